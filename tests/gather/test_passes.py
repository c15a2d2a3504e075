"""The planner's optional passes: each rewrites its example, and a plain network needs none of them."""

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import lay_out
from jax import lax

from zerojax.gather.planner import PASSES, Inlined, inlined

SIZE = 16
W, V = (jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32) for _ in range(2))
B = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
X = jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, SIZE, SIZE), jnp.float32)


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
