"""Every construct a model may use around a parameter gives the plain function's value and gradients."""

import constructs
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from engine_helpers import assert_same, lay_out
from jax import lax
from parity import assert_parity

from zerojax import Tuning, zero_shard
from zerojax.gather.working_set import working_set

X = jax.random.normal(jax.random.key(9), (24, 8))


def assert_construct(name, **options):
    # bfloat16 gradients are summed over the devices in bfloat16, which has 8 bits of mantissa.
    rounding = {"rounding": 3e-2} if name == "cast_and_scaled_layers" else {}
    largest = assert_same(constructs.TABLE[name], constructs.make_params(), X, constructs.DIMS, **rounding, **options)
    assert largest > 1e-3, "any numbers as small as these would pass"


EVERY = [(name,) for name in constructs.TABLE]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", quick_or_slow(EVERY, EVERY[1::4]))
def test_every_construct_equals_the_plain_function(name):
    assert_construct(name)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "devices"), [("plain", 3), ("scan_everything", 3), ("stacked_layers", 1)])
def test_padded_leaves_are_trimmed_and_their_gradients_padded_with_zeros(name, devices):
    assert_construct(name, devices=devices)


def test_layers_that_are_kept_for_the_backward_pass_are_those_of_their_iteration():
    assert_construct("custom_vjp_in_scan", devices=2, reshard_after_forward=False)


HARD = ("custom_vjp_of_a_constant", "stateful", "product_in_many_places")
HARDER = ("indexed", "masked_layers", "layers_in_another_order", "changed_weights", "microbatches")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "names"), [(1, HARD), (3, HARDER)])
def test_steps_are_those_of_plain_optax(stage, names):
    """Of what an engine that evaluates equation by equation is likeliest to lose."""
    loss = lambda params, x: sum(constructs.TABLE[name](params, x) for name in names)
    plain = optax.adamw(1e-2, eps=1e-3)  # with its usual epsilon, Adam makes a full update of a rounding error
    tx = zero_shard(plain, stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=1))
    assert_parity(tx, loss, constructs.make_params(), [X] * 2, atol=1e-5)


def over_slices(layer, stack, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]


def reversed_slices(layer, stack, x):
    return lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, stack, reverse=True)[0]


CHANGES = {
    "none": lambda stack: stack,
    "scaled": lambda stack: jnp.tanh(stack) * 0.5,
    "transposed": lambda stack: jnp.swapaxes(stack, 1, 2).reshape(3, 4, 2, 8).reshape(3, 8, 8),
    "masked": lambda stack: jnp.where(jnp.arange(8) % 3 > 0, stack, 0) / X.std() * X[:3, 0, None, None],
    "flipped": lambda stack: jnp.flip(stack, 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("loop", [over_slices, reversed_slices])
def test_a_stack_stays_sharded_until_its_iteration(loop, change):
    params = constructs.make_params()
    setup = lay_out({"stack": params["stack"]}, {"stack": 1})
    loss = lambda p, x: constructs.mean(loop(lambda x, w: jnp.tanh(x @ w), CHANGES[change](p["stack"]), x))
    found = working_set(loss, setup.layout, X)
    assert found.stacks == {0}
    assert found.bytes == 2 * params["stack"][0].nbytes  # of this iteration and the next


def test_of_a_stack_in_groups_a_group_is_gathered():
    params = {"stack": jnp.ones((6, 8, 8))}
    setup = lay_out(params, {"stack": 2})
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    loss = lambda p, x: lax.scan(lambda x, g: lax.scan(layer, x, g), x, p["stack"].reshape(3, 2, 8, 8))[0].mean()
    assert working_set(loss, setup.layout, X).bytes == 2 * params["stack"][:2].nbytes
