"""The planner's optional passes: each rewrites its example, and a plain network needs none of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import lay_out
from jax import lax

from zerojax import jaxprs, names
from zerojax.gather.per_layer import moved_into_loops
from zerojax.gather.planner import PASSES, Inlined, inlined
from zerojax.gather.unrolled import unrolled

SIZE = 16
W, V = (jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32) for _ in range(2))
B = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
X = jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
STACK = jax.ShapeDtypeStruct((2, SIZE, SIZE), jnp.float32)


def plain(w, b, v, x):
    return jnp.mean((jax.nn.relu(x @ w + b) @ v - x) ** 2)


def scanned(w, x):
    return lax.scan(lambda x, w: (x @ w, None), x, w / jnp.linalg.norm(w, 2, (1, 2))[:, None, None])[0].sum()


def twice(w, x):
    out = [jnp.tanh(x @ w) for _ in range(2)]
    return out[0].mean() + out[1].std()


# The name of each pass, the parameters and the loss. The last is for parameters on disk.
EXAMPLES = {
    "quantised_weights": ([W], lambda w, x: jnp.sum(x @ (w + lax.stop_gradient(jnp.round(w) - w)))),
    "values_of_layers": ([STACK], scanned),
    "equal_equations": ([W], twice),
    "late_functionals": ([W], lambda w, x: jnp.tanh(jnp.ones(SIZE) @ w @ jnp.ones(SIZE)) + jnp.sum(x @ w)),
    "shared_reads": ([W, V], lambda w, v, x: jnp.sum(jnp.tanh(x @ w) @ v) - jnp.sum(jnp.tanh(2 * x @ w) @ v)),
    "unrolled_loops": ([STACK], lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0].sum()),
}


def loss_of(params, fn, by_row=()):
    leaves = lay_out(params, [len(w.shape) - 1 for w in params]).leaves
    layouts, alike = [*leaves, None], [*[True] * len(leaves), False]
    return Inlined(*inlined(jax.make_jaxpr(fn)(*params, X), layouts), layouts, alike, by_row)


def text_of(loss):
    return str(loss.jaxpr)


@pytest.mark.parametrize("optional", PASSES, ids=lambda optional: optional.__name__)
def test_a_pass_rewrites_its_example_and_leaves_a_plain_network(optional):
    params, fn = EXAMPLES[optional.__name__]
    loss = loss_of(params, fn, by_row=[0] if optional.__name__ == "unrolled_loops" else ())
    found = optional(loss)
    assert found is not None
    assert text_of(loss.rewritten(*found)) != text_of(loss)
    assert optional(loss_of([W, B, V], plain)) is None


def test_arguments_and_constants_are_known_to_be_alike_unless_they_are_traced():
    loss = loss_of([W], lambda w, x: jnp.sum(x @ w))
    traced = []
    jax.eval_shape(lambda x: traced.append(dataclasses.replace(loss, consts=[np.ones(2), x]).all_alike), X)
    assert traced == [[*loss.alike, True, False]]


@pytest.mark.parametrize("change", [{"host": True}, {"further": 2}, {"dim": 0}])
def test_only_shards_on_the_device_are_quantised_before_the_gather(change):
    """And their gradients must be divided as they are; the other dim is as good."""
    loss = loss_of(*EXAMPLES["quantised_weights"])
    leaves = [dataclasses.replace(loss.leaves[0], **change), None]
    found, _ = PASSES[0](dataclasses.replace(loss, leaves=leaves))
    assert (found is loss.jaxpr) == ("dim" not in change)


@pytest.mark.parametrize("rank", [SIZE // 4, SIZE // 4 + 1])
def test_iterations_multiply_factors_if_the_product_is_twice_as_large(rank):
    a, b = jax.ShapeDtypeStruct((2, SIZE, rank), jnp.float32), jax.ShapeDtypeStruct((2, rank, SIZE), jnp.float32)
    fn = lambda a, b, x: lax.scan(lambda x, w: (x @ w, None), x, a @ b)[0]
    jaxpr = jax.make_jaxpr(fn)(a, b, X).jaxpr
    found, _ = moved_into_loops(jaxpr, [None] * 3, [True, True, False])
    assert (found is jaxpr) == (rank > SIZE // 4)


def masked(w, v, x):
    pruned = w * jnp.tri(SIZE)  # the mask is computed, and as large as the weight
    return jnp.sum(jnp.tanh(x @ v) @ pruned)


def halves(w, v, x):
    first, second = jnp.split(w, 2, axis=1)  # each is read once
    return jnp.sum(x @ first) + jnp.sum(jnp.tanh(x @ v)) + jnp.sum(x @ second)


def returned_twice(w, v, x):
    a, b = jax.jit(lambda h: (jnp.tanh(h), jnp.tanh(h)))(x @ w)
    return jnp.sum(jnp.sin(a) @ v) + jnp.sum(jnp.sin(b))


@pytest.mark.parametrize(
    ("name", "fn"), [("late_functionals", masked), ("shared_reads", halves), ("equal_equations", returned_twice)]
)
def test_no_pass_overlooks_what_its_cheap_test_does_not_show_at_once(name, fn):
    loss = loss_of([W, V], fn)
    found = next(optional for optional in PASSES if optional.__name__ == name)(loss)
    assert found is not None
    assert text_of(loss.rewritten(*found)) != text_of(loss)


def test_a_scan_over_stacks_on_disk_calls_one_function_per_row():
    """Rows of another operand are sliced before the first call. A scan that reads another parameter stays a scan."""

    def loss(on_disk, other, x):
        def layer(carry, rows):
            x, i = carry
            x = jnp.tanh(x @ rows[0] + rows[1] * i) * gain
            return (x, i + 1), (x, i)

        gain = jnp.cos(x)
        found = lax.scan(layer, (x, 0), (on_disk, jnp.arange(1.0, 4)), reverse=True)
        found += lax.scan(layer, (x, 0), (on_disk, x.sum(0)[:3]))
        step = lambda x, rows: (sum(rows, x), None)
        return found, [lax.scan(step, x, rows)[0] for rows in ((other,), (on_disk, other), (on_disk[:0],))]

    stack = jnp.sin(jnp.arange(48.0)).reshape(3, 4, 4)
    args = stack, jnp.cos(stack), stack[0]
    closed = jax.make_jaxpr(loss)(*args)
    found, consts = unrolled(closed.jaxpr, closed.jaxpr.invars[:2], closed.jaxpr.invars[:1])
    assert [eqn.primitive.name for eqn in found.eqns].count("scan") == 3
    calls = [i for i, eqn in enumerate(found.eqns) if names.is_block(eqn)]
    assert len(calls) == 6
    assert len({id(found.eqns[i].params["jaxpr"]) for i in calls}) <= 2
    reads = [eqn.invars[0] for eqn in found.eqns[calls[0] : calls[2]] if eqn.primitive.name == "slice"]
    assert set(reads) == {found.invars[0]}
    run = jax.jit(lambda *args: (jaxprs.run(found, consts, *args), loss(*args)))
    for one, plain in zip(*map(jax.tree.leaves, run(*args)), strict=True):
        np.testing.assert_allclose(
            one, plain, rtol=1e-6, atol=1e-7
        )  # float32 sums of larger terms, some of which cancel
