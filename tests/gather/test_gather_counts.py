"""How often parameters are gathered, how many share a collective, and what is kept for the backward pass."""

import functools
import math
import re
import runpy

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import QUICK, ROWS, assert_same, lay_out, on_use, sharded_grad
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

from zerojax.gather.tiled import block
from zerojax.gather.working_set import working_set

SIZE, DEVICES = 64, 8
WEIGHT = SIZE * SIZE
SHARD = WEIGHT // DEVICES
X = jnp.ones((16, SIZE))
# Rows are few, so that whatever is as large as a weight is a weight.
ACTIVATION = X.size // DEVICES
POLICIES = jax.checkpoint_policies


def collectives_of(jaxpr, primitive, times=1):
    """`(elements in the logical arrays, calls)` of a collective, loops counted by their iterations."""
    elements = calls = 0
    read = {atom for atom in jaxpr.outvars if isinstance(atom, jex.Var)}
    for eqn in reversed(jaxpr.eqns):
        # XLA drops what nobody reads.
        if not read.intersection(eqn.outvars):
            continue
        read.update(atom for atom in eqn.invars if isinstance(atom, jex.Var))
        if eqn.primitive.name == primitive:
            side = eqn.outvars if primitive == "all_gather" else eqn.invars
            elements += times * sum(math.prod(v.aval.shape) for v in side)
            calls += times
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jex.jaxprs_in_params(eqn.params):
            more = collectives_of(inner, primitive, inside)
            elements, calls = elements + more[0], calls + more[1]
    return elements, calls


def traced(fn, params, dims, batch, **options):
    """`(jaxpr of the sharded gradient, elements of all sharded parameters)`."""
    setup = lay_out(params, dims)
    closed = jax.make_jaxpr(sharded_grad(fn, setup, **options))(params, batch)
    return closed.jaxpr, sum(leaf.size for leaf in setup.leaves if leaf.kind == "sharded")


def passes(*args, **options):
    """`(gathered, reduce-scattered)`, in elements of all sharded parameters."""
    jaxpr, sharded = traced(*args, **options)
    return tuple(collectives_of(jaxpr, name)[0] / sharded for name in ("all_gather", "reduce_scatter"))


def calls(*args, **options):
    """`(gathers, reduce-scatters)`."""
    jaxpr, _ = traced(*args, **options)
    return tuple(collectives_of(jaxpr, name)[1] for name in ("all_gather", "reduce_scatter"))


def kept_sizes(fn, params, dims, batch, **options):
    """Sizes, in elements, of what stays on a device between the two passes, parameters' shards included."""
    setup, sizes = lay_out(params, dims), []

    def body(params, batch):
        value, back = jax.vjp(on_use(fn, setup.layout, **options), params, batch)
        sizes.extend(math.prod(x.shape) for x in jax.tree.leaves(back) if hasattr(x, "shape"))
        return value

    mapped = jax.shard_map(body, mesh=setup.mesh, in_specs=(setup.specs, ROWS), out_specs=P(), check_vma=False)
    jax.make_jaxpr(mapped)(params, batch)
    return sizes


def layer(x, w):
    return jnp.tanh(x @ w.T.reshape(SIZE, 8, 8).reshape(SIZE, SIZE)) @ w


def unrolled(wrap, params, x):
    for w in params["layers"]:
        x = wrap(layer)(x, w)
    return jnp.mean((x @ params["head"]) ** 2)


def scanned(wrap, params, x):
    x, _ = lax.scan(wrap(lambda x, w: (layer(x, w), None)), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def model(style, wrap, depth):
    """`(loss, params, dims, batch)` of a model with `depth` layers and a head, all of one size."""
    w = jnp.ones((SIZE, SIZE)) / SIZE
    if style == "unrolled":
        layers, dims, loss = [w] * depth, [1] * depth, unrolled
    else:
        layers, dims, loss = jnp.stack([w] * depth), 2, scanned
    return functools.partial(loss, WRAPS[wrap]), {"layers": layers, "head": w}, {"layers": dims, "head": 0}, X


WRAPS = {
    "remat": jax.checkpoint,
    "remat of dots": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "remat of everything": functools.partial(jax.checkpoint, policy=POLICIES.everything_saveable),
    "block": block,
}
STYLES = ["unrolled", "scanned"]


def two_passes(depth):
    """The last weight's two uses are next to each other in time: it stays."""
    return pytest.approx(2 - 1 / (depth + 1))


DEPTHS = [*((style, wrap, 4) for style in STYLES for wrap in WRAPS), ("scanned", "remat", 96)]
DEPTHS += [(style, "remat", depth) for style in STYLES for depth in (1, 2, 24)]


@pytest.mark.parametrize(("style", "wrap", "depth"), DEPTHS)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_layer_is_gathered_once_forward_and_once_backward(style, wrap, depth, prefetch):
    assert passes(*model(style, wrap, depth), prefetch=prefetch) == (two_passes(depth), 1)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_loop_of_one_or_two_iterations_runs_each_once(prefetch):
    for depth in (1, 2):
        assert passes(*model("scanned", "remat", depth), prefetch=prefetch) == (two_passes(depth), 1)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("style", STYLES)
def test_gathered_parameters_are_not_kept(wrap, style):
    sizes = kept_sizes(*model(style, wrap, 4))
    assert sum(size >= WEIGHT for size in sizes) == 1  # the last one stays


@pytest.mark.parametrize(
    # A remat keeps its layer's input; without one autodiff also keeps tanh's result and slope.
    ("wrap", "activations"),
    [("remat", 1), ("block", 3)],
)
@pytest.mark.parametrize(("style", "depth"), [("unrolled", 24), ("scanned", 24), ("scanned", 96)])
def test_a_layer_more_keeps_only_its_shard_and_activations_more(style, wrap, activations, depth):
    less, more = [sum(kept_sizes(*model(style, wrap, d))) for d in (4, depth)]
    assert more - less <= (depth - 4) * (SHARD + activations * ACTIVATION)


@pytest.mark.parametrize("style", STYLES)
def test_the_compiled_peak_grows_by_shards_and_activations_only(style):
    if style == "unrolled" and jax.__version_info__ < (0, 11):
        pytest.skip("on CPU, jax 0.10 drops the barriers and merges the backward gathers with the forward ones")

    def temp(depth):
        fn, params, dims, batch = model(style, "remat", depth)
        step = jax.jit(sharded_grad(fn, lay_out(params, dims)), compiler_options=QUICK)
        return step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes / 4

    # Gradients are results and not counted here; a layer's may pass through a temporary of a shard's size.
    # One layer more that is gathered for too long would be a full weight.
    assert temp(24) - temp(4) <= 20 * (SHARD + ACTIVATION)


@pytest.mark.parametrize("style", STYLES)
def test_resharding_can_be_turned_off(style):
    arguments = model(style, "remat", 4)
    assert passes(*arguments, reshard_after_forward=False) == (1, 1)
    assert sum(kept_sizes(*arguments, reshard_after_forward=False)) >= 5 * WEIGHT


@pytest.mark.parametrize("style", STYLES)
def test_a_layers_leaves_share_a_bucket_unless_told_otherwise(style):
    @block
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], None

    def loss(params, x):
        if style == "scanned":
            return jnp.mean(lax.scan(layer, x, params)[0])
        for i in range(4):
            x, _ = layer(x, jax.tree.map(lambda stack: stack[i], params))  # noqa: B023
        return jnp.mean(x)

    w = jnp.ones((4, SIZE, SIZE))
    arguments = loss, {"w": w, "v": w, "b": w[:, 0]}, {"w": 1, "v": 2, "b": 1}, X
    together, one_by_one = calls(*arguments), calls(*arguments, bucket_bytes=0)
    # Forward and backward. Unrolled, the last layer stays, and the first one's input has no gradient for which
    # its `w` would be needed. The bias is not needed backward.
    assert together == ((4 + 3, 4) if style == "unrolled" else (4 + 4, 4))
    assert one_by_one == ((3 * 4 + 2 * 3 - 1, 3 * 4) if style == "unrolled" else (3 * 4 + 2 * 4, 3 * 4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_small_blocks_share_gathers_and_reductions_up_to_the_limit(prefetch):
    arguments = model("unrolled", "remat", 4)
    pairs, all_five = ({"prefetch": prefetch, "shared_bytes": 4 * count * WEIGHT} for count in (2, 5))
    # Forward the layers are in pairs, and the head is alone and stays. Backward the last layer is in the head's group.
    assert calls(*arguments, **pairs) == (3 + 3, 3)
    assert passes(*arguments, **pairs) == (two_passes(4), 1)
    assert calls(*arguments, **all_five) == (1, 1)
    assert passes(*arguments, **all_five) == (1, 1)
    found = [assert_same(*arguments[:2], X, arguments[2], **options) for options in (pairs, all_five)]
    assert found == pytest.approx([assert_same(*arguments[:2], X, arguments[2], prefetch=prefetch)] * 2)


def test_a_loop_and_a_large_block_share_no_gather():
    def loss(p, x):
        x = jnp.tanh(x @ p["first"] @ p["wide"]) @ p["back"]
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, p["stack"])
        return jnp.mean((x @ p["last"]) ** 2)

    w = jnp.ones((SIZE, SIZE)) / SIZE
    wide = jnp.ones((SIZE, 4 * SIZE)) / SIZE
    params = {"first": w, "wide": wide, "back": wide.T, "stack": jnp.stack([w] * 3), "last": w}
    dims = {"first": 0, "wide": 0, "back": 1, "stack": 1, "last": 0}
    assert calls(loss, params, dims, X, shared_bytes=8 * WEIGHT) == calls(loss, params, dims, X)
    found = working_set(loss, lay_out(params, dims).layout, X, shared_bytes=4 * WEIGHT)
    assert found == working_set(loss, lay_out(params, dims).layout, X)


def test_a_frozen_block_that_ends_a_group_does_not_delay_the_groups_gradients():
    def loss(p, x):
        for name in ("first", "wide", "back", "frozen", "small", "last"):
            x = x @ (lax.stop_gradient(p[name]) if name == "frozen" else p[name])
        return jnp.mean(x**2)

    w, wide = jnp.ones((SIZE, SIZE)) / SIZE, jnp.ones((SIZE, 4 * SIZE)) / SIZE
    params = {"first": w, "wide": wide, "back": wide.T, "frozen": w, "small": w, "last": w}
    dims = dict.fromkeys(params, 0) | {"back": 1}
    # Backward: (last, small, frozen), back, wide, first. `back` has its own reduction.
    assert calls(loss, params, dims, X, shared_bytes=12 * WEIGHT)[1] == 4


def test_the_working_set_has_the_blocks_that_share_a_gather():
    loss, params, dims, x = model("unrolled", "remat", 4)
    layout = lay_out(params, dims).layout
    found = [working_set(loss, layout, x, shared_bytes=4 * count * WEIGHT) for count in (0, 2, 5)]
    assert [each.layer for each in found] == [4 * WEIGHT, 8 * WEIGHT, 20 * WEIGHT]
    assert [each.bytes for each in found] == [8 * WEIGHT, 16 * WEIGHT, 20 * WEIGHT]


def tied(p, x):
    ids = jnp.abs(x).astype(jnp.int32)[:, :3]
    h = jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(p["w"], p["table"][ids].sum(1))
    return jnp.mean((h @ p["table"].T) ** 2)


def indexed(p, x):
    for i in range(4):
        x = jnp.tanh(x @ p["stack"][i])
    return jnp.mean(x)


@pytest.mark.parametrize(
    ("fn", "shapes", "dims", "gathered"),
    [
        (tied, {"table": (4 * SIZE, SIZE), "w": (SIZE, SIZE)}, {"table": 0, "w": 0}, 2),
        # The last stays, and nobody asks for the gradient of the first layer's input.
        (indexed, {"stack": (4, SIZE, SIZE)}, {"stack": 1}, 2 - 2 / 4),
    ],
)
def test_each_use_gathers_what_it_reads(fn, shapes, dims, gathered):
    found, reduced = passes(fn, {name: jnp.ones(shape) for name, shape in shapes.items()}, dims, X)
    assert found == pytest.approx(gathered)
    assert reduced <= 2


def test_gathers_move_the_type_that_the_model_casts_to():
    def fn(p, x):
        low = jax.checkpoint(lambda w, x: jnp.tanh(x @ w.astype(jnp.bfloat16)))
        return jnp.mean(low(p["v"], low(p["w"], x.astype(jnp.bfloat16))).astype(jnp.float32))

    params = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8))}
    text = str(traced(fn, params, {"w": 0, "v": 1}, X[:, :8])[0])
    moving = [line for line in text.splitlines() if "= all_gather" in line or "= reduce_scatter" in line]
    assert moving
    assert all(":bf16[" in line for line in moving)


def test_a_collective_names_its_line_in_a_folder_that_is_called_as_the_library_is(tmp_path):
    path = tmp_path / "zerojax" / "model.py"
    path.parent.mkdir()
    path.write_text("def loss(p, x):\n    return (x @ p['w']).mean()\n")
    setup = lay_out({"w": jnp.ones((SIZE, SIZE))}, {"w": 0})
    fn = sharded_grad(runpy.run_path(str(path))["loss"], setup)
    text = jax.jit(fn).lower({"w": jnp.ones((SIZE, SIZE))}, X).as_text(debug_info=True)
    assert "zerojax_gather[['w'] model.py:2]" in text
    assert "zerojax_reduce_scatter[['w'] model.py:2]" in text
    assert re.findall(r'loc\("(.*)/dot_general"', text) == ["jvp()", "transpose(jvp())"]
