"""How often parameters are gathered, and what is kept for the backward pass."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import is_leaf, lay_out, make_mesh, sharded_grad
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

from zerojax.stages.gather import block, gather_on_use

SIZE = 64


def moved(jaxpr, primitive, times=1):
    """Elements in the logical results of a collective, loops counted by their turns."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            side = eqn.outvars if primitive == "all_gather" else eqn.invars
            total += times * sum(math.prod(v.aval.shape) for v in side)
        turns = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jex.jaxprs_in_params(eqn.params):
            total += moved(inner, primitive, turns)
    return total


def passes(fn, params, dims, batch, **options):
    """`(gathered, reduce-scattered)`, in elements of all cut parameters."""
    setup = lay_out(params, dims)
    closed = jax.make_jaxpr(sharded_grad(fn, setup, **options))(params, batch)
    cut = sum(leaf.size for leaf in jax.tree.leaves(setup.layout, is_leaf=is_leaf) if leaf.kind == "cut")
    return moved(closed.jaxpr, "all_gather") / cut, moved(closed.jaxpr, "reduce_scatter") / cut


def kept_sizes(fn, params, dims, batch, **options):
    """Sizes, in elements, of what stays on a device between the two passes."""
    setup, sizes = lay_out(params, dims), []

    def body(params, batch):
        value, back = jax.vjp(gather_on_use(fn, setup.layout, axis="data", **options), params, batch)
        sizes.extend(math.prod(x.shape) for x in jax.tree.leaves(back) if hasattr(x, "shape"))
        return value

    jax.make_jaxpr(
        jax.shard_map(body, mesh=make_mesh(), in_specs=(setup.specs, P("data")), out_specs=P(), check_vma=False)
    )(params, batch)
    return sizes


def layers_params(depth):
    return {f"w{i}": jnp.ones((SIZE, SIZE)) / SIZE for i in range(depth)} | {"v": jnp.ones((SIZE, SIZE))}


def dims_of(params):
    return dict.fromkeys(params, 1)


def unrolled(wrap, params, x):
    def layer(w, x):
        return jnp.tanh(x @ w.T.reshape(SIZE, 8, 8).reshape(SIZE, SIZE)) @ w

    for i in range(len(params) - 1):
        x = wrap(layer)(params[f"w{i}"], x)
    return jnp.mean((x @ params["v"]) ** 2)


X = jnp.ones((16, SIZE))
POLICIES = jax.checkpoint_policies
WRAPS = {
    "remat": jax.checkpoint,
    "remat of dots": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "remat of everything": functools.partial(jax.checkpoint, policy=POLICIES.everything_saveable),
    "block": block,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_layer_is_gathered_once_forward_and_once_backward(wrap, prefetch):
    params = layers_params(4)
    gathered, scattered = passes(
        functools.partial(unrolled, WRAPS[wrap]), params, dims_of(params), X, prefetch=prefetch
    )
    # The last weight's two uses are next to each other in time: it stays.
    assert gathered == pytest.approx(2 - 1 / 5)
    assert scattered == pytest.approx(1)


@pytest.mark.parametrize("wrap", WRAPS)
def test_gathered_parameters_are_not_kept(wrap):
    params = layers_params(4)
    sizes = kept_sizes(functools.partial(unrolled, WRAPS[wrap]), params, dims_of(params), X)
    # Rows are few: what is as large as a weight is a weight. Only the last stays.
    assert sum(size >= SIZE * SIZE for size in sizes) == 1


def test_resharding_can_be_turned_off():
    params = layers_params(4)
    gathered, scattered = passes(
        functools.partial(unrolled, jax.checkpoint), params, dims_of(params), X, reshard_after_forward=False
    )
    assert gathered == scattered == pytest.approx(1)


def test_a_tied_embedding_is_gathered_for_the_lookup_and_for_the_head():
    def fn(p, x):
        ids = jnp.abs(x).astype(jnp.int32)[:, :3]
        h = jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(p["w"], p["table"][ids].sum(1))
        return jnp.mean((h @ p["table"].T) ** 2)

    params = {"table": jnp.ones((4 * SIZE, SIZE)), "w": jnp.ones((SIZE, SIZE))}
    gathered, scattered = passes(fn, params, {"table": 0, "w": 0}, X)
    assert gathered == pytest.approx(2)
    assert scattered <= 2


def test_one_layer_of_a_stack_is_gathered_at_a_time():
    params = {"stack": jnp.ones((4, SIZE, SIZE))}

    def fn(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p["stack"][i])
        return jnp.mean(x)

    gathered, _ = passes(fn, params, {"stack": 1}, X)
    # The last stays, and nobody asks for the gradient of the first layer's input.
    assert gathered == pytest.approx(2 - 2 / 4)


def test_gathers_move_the_type_that_the_model_casts_to():
    def fn(p, x):
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)))
        return jnp.mean(layer(p["v"], layer(p["w"], x.astype(jnp.bfloat16))).astype(jnp.float32))

    params = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8))}
    text = str(jax.make_jaxpr(sharded_grad(fn, lay_out(params, {"w": 0, "v": 1})))(params, X[:, :8]))
    gathers = [line for line in text.splitlines() if "= all_gather" in line or "= reduce_scatter" in line]
    assert gathers
    assert all(":bf16[" in line for line in gathers)


def test_a_scan_over_layers_gathers_two_passes():
    params = {"stack": jnp.ones((4, SIZE, SIZE)), "head": jnp.ones((SIZE, SIZE))}

    def fn(p, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w.T) @ w, None), prevent_cse=False)
        return jnp.mean(lax.scan(layer, x, p["stack"])[0] @ p["head"])

    gathered, scattered = passes(fn, params, {"stack": 2, "head": 0}, X)
    assert gathered <= 2
    assert scattered == pytest.approx(1)


def test_unused_and_integer_parameters():
    params = {
        "w": jnp.ones((8, 8)),
        "unused": jnp.ones((8, 9)),
        "steps": jnp.arange(8),
        "q": jnp.ones((8, 8), jnp.int8),
    }

    def fn(p, x):
        return jnp.mean(x @ p["w"] @ p["q"].astype(jnp.float32)) * jnp.sum(p["steps"])

    setup = lay_out(params, {"w": 0, "unused": 1, "steps": 0, "q": 0})
    from engine_helpers import assert_same, stored

    assert_same(fn, params, X[:, :8], {"w": 0, "unused": 1, "steps": 0, "q": 0})
    _, grads, _ = sharded_grad(fn, setup)(stored(params, setup), X[:, :8])
    assert grads["unused"].shape == setup.layout["unused"].storage_shape
    assert not np.asarray(grads["unused"]).any()
