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


def assert_construct(name, **options):
    # bfloat16 gradients are summed over the devices in bfloat16, which has 8 bits of mantissa.
    rounding = {"rounding": 3e-2} if name.startswith("cast") else {}
    largest = assert_same(constructs.TABLE[name], constructs.make_params(), X, constructs.DIMS, **rounding, **options)
    assert largest > 1e-3, "any numbers as small as these would pass"


EVERY = [(name,) for name in constructs.TABLE]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", quick_or_slow(EVERY, EVERY[::4]))
def test_every_construct_equals_the_plain_function(name):
    assert_construct(name)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "devices"), [("plain", 3), ("stacked_layers", 3), ("scan_everything", 1)])
def test_padded_leaves_are_trimmed_and_their_gradients_padded_with_zeros(name, devices):
    assert_construct(name, devices=devices)


HARD = ("custom_vjp_of_a_constant", "stateful", "product_in_many_places")
HARDER = ("indexed", "masked_layers", "layers_in_another_order", "changed_weights", "microbatches")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "names"), [(1, HARD), (3, HARDER)])
def test_steps_are_those_of_plain_optax(stage, names):
    """Of what an engine that evaluates equation by equation is likeliest to lose."""
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


def test_a_stack_of_single_parameters_is_of_their_shards():
    params = constructs.make_params()
    setup = lay_out(params, constructs.DIMS | {"v": 0})
    layer, twice = lambda x, w: jnp.tanh(x @ w), 2 * params["w"].nbytes
    joined = lambda p, x: constructs.mean(over_slices(layer, jnp.array([p["w"], p["v"], p["w"]]), x))
    found = working_set(joined, setup.layout, X)
    assert (found.bytes, found.whole) == (twice, ())  # this iteration's and the next one's
    changed = lambda p, x: constructs.mean(over_slices(layer, jnp.stack([p["w"], 2 * p["v"], p["w"]]), x))
    assert working_set(changed, setup.layout, X).whole


def test_of_a_stack_in_groups_a_group_is_gathered():
    params = {"stack": jnp.ones((6, 8, 8))}
    setup = lay_out(params, {"stack": 2})
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    loss = lambda p, x: lax.scan(lambda x, g: lax.scan(layer, x, g), x, p["stack"].reshape(3, 2, 8, 8))[0].mean()
    assert working_set(loss, setup.layout, X).bytes == 2 * params["stack"][:2].nbytes


def test_microbatches_gather_a_layer_at_a_time_each():
    params = constructs.make_params()
    setup = lay_out({name: params[name] for name in ("stack", "w")}, {"stack": 1, "w": 0})
    layers = lambda p, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0] @ p["w"]

    def sets(count):
        def loss(p, x):
            micro = lambda total, x: (total + layers(p, x).mean(), None)
            return lax.scan(micro, 0.0, jnp.stack([x] * count))[0]

        return working_set(loss, setup.layout, X)

    assert sets(2).stacks == {0}
    assert (sets(2).bytes, sets(2).whole, sets(2).repeats) == (2 * params["w"].nbytes, (), {0: 2, 1: 2})
    assert sets(65).repeats == {}  # as many times the gathers would be slow
    assert sets(65).whole


def test_no_more_is_held_than_four_times_the_largest_use():
    params = {str(i): jnp.eye(8) + i for i in range(6)}
    setup = lay_out(params, dict.fromkeys(params, 0))

    def loss(p, x):
        derived = [w @ w.T for w in p.values()]
        for w in derived + derived:
            x = jnp.tanh(x @ w)
        return x.mean()

    assert len(working_set(loss, setup.layout, X).recomputed) == 2
