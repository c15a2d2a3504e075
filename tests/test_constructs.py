"""Every construct a model may use around a parameter gives the plain function's value and gradients."""

import constructs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from engine_helpers import assert_same, lay_out
from jax import lax

from zerojax import zero_shard
from zerojax.gather import working_set

X = jax.random.normal(jax.random.key(9), (24, 8))
OPTIONS = [("prefetch", 3), ("prefetch", 0), ("reshard_after_forward", False), ("bucket_bytes", 0)]


def assert_construct(name, *, dims=constructs.DIMS, **options):
    # bfloat16 gradients are summed over the devices in bfloat16, which has 8 bits of mantissa.
    rounding = {"rounding": 3e-2} if name.startswith("cast") else {}
    assert_same(constructs.TABLE[name], constructs.make_params(), X, dims, **rounding, **options)


@pytest.mark.parametrize("name", constructs.TABLE)
def test_every_construct_equals_the_plain_function(name):
    assert_construct(name)


NAMES = ["plain", "remat", "scan_everything", "scan_remat", "embedding", "cast", "marked_block"]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    # the random programs of test_property.py take the options at random, too
    quick_or_slow(
        [(name, *option) for name in NAMES for option in OPTIONS],
        [(name, *OPTIONS[i % 4]) for i, name in enumerate(NAMES)],
    ),
)
def test_no_option_changes_the_result(name, option, value):
    assert_construct(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "devices"),
    [(name, 3) for name in (*NAMES[:2], "stacked_layers")] + [("scan_everything", 1)],
)
def test_padded_leaves_are_trimmed_and_their_gradients_padded_with_zeros(name, devices):
    assert_construct(name, devices=devices)


@pytest.mark.parametrize("name", ["scan_xs", "scan_everything", "stacked_layers"])
def test_a_stack_may_be_sharded_over_its_layers(name):
    assert_construct(name, dims=constructs.DIMS | {"stack": 0})


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_are_those_of_plain_optax(stage):
    """Of what an engine that evaluates equation by equation is likeliest to lose."""
    names = ("custom_vjp_of_a_constant", "stateful", "indexed", "cast_and_scaled_layers")
    loss = lambda params, x: sum(constructs.TABLE[name](params, x) for name in names)
    plain = optax.adamw(1e-2, eps=1e-3)  # with its usual epsilon, Adam makes a full update of a rounding error
    tx = zero_shard(plain, stage=stage, mesh=mesh_of(4), persist_below=1)
    params = constructs.make_params()
    state, step, opt_state = tx.create(params), tx.train_step(loss), plain.init(params)
    expected_of = jax.jit(jax.value_and_grad(loss))
    for _ in range(2):
        value, grads = expected_of(params, X)
        updates, opt_state = plain.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, X)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), tx.unshard(state.params), params)


def over_layers(layer, stack, x):
    return lax.fori_loop(0, 3, lambda i, x: layer(x, stack[i]), x)


def over_numbers(layer, stack, x):
    return lax.scan(lambda x, i: (layer(x, stack[i]), None), x, jnp.arange(3))[0]


def under_remat(layer, stack, x):
    step = jax.checkpoint(lambda x, i: (layer(x, lax.dynamic_index_in_dim(stack, i, keepdims=False)), None))
    return lax.scan(step, x, jnp.arange(3), reverse=True)[0]


def over_slices(layer, stack, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]


CHANGES = {
    "none": lambda stack: stack,
    "scaled": lambda stack: jnp.tanh(stack) * 0.5,
    "transposed": lambda stack: jnp.swapaxes(stack, 1, 2).reshape(3, 4, 2, 8).reshape(3, 8, 8),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("loop", [over_layers, over_numbers, under_remat, over_slices])
def test_a_stack_stays_sharded_until_its_iteration(loop, change):
    params = constructs.make_params()
    setup = lay_out({"stack": params["stack"]}, {"stack": 1})
    loss = lambda p, x: constructs.mean(loop(lambda x, w: jnp.tanh(x @ w), CHANGES[change](p["stack"]), x))
    found = working_set(loss, setup.layout, X)
    assert found.stacks == {0}
    assert found.bytes == 2 * params["stack"][0].nbytes  # of this iteration and the next
