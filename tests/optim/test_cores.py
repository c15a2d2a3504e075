"""Which part of an update needs a matrix whole, read from the equations of one that is written by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard
from zerojax.optim import traced
from zerojax.optim.cores import CoreFinder
from zerojax.optim.wrapped import UpdatedLeaves

PARAMS = {"a": jax.ShapeDtypeStruct((16, 24), jnp.float32), "b": jax.ShapeDtypeStruct((32, 8), jnp.float32)}


def listed(mix):
    """A transformation whose state is a list in reversed order, with a sum over everything in front.

    The last part of the state has products that the update does not read.
    """

    def init(params):
        sums = [jnp.zeros((x.shape[0],) * 2) for x in jax.tree.leaves(params)]
        return [jnp.zeros((3, 5)), *sums[::-1], *sums[::-1]]

    def update(grads, state, params=None):
        leaves, tree = jax.tree.flatten(grads)
        total, *sums = state[:3]
        sums = [s + g @ g.T for s, g in zip(sums[::-1], leaves, strict=True)]
        total = total + sum(g.sum() for g in leaves)
        moved = [s @ g * (jnp.sqrt(total[0, 0]) if mix else 1) for s, g in zip(sums, leaves, strict=True)]
        return jax.tree.unflatten(tree, moved), [total, *sums[::-1], *(s @ s for s in sums[::-1])]

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("mix", [False, True])
def test_a_state_leaf_belongs_to_the_one_parameter_that_it_depends_on(mix):
    """Whatever its path; a norm of all gradients ties no parameter to another."""
    tx = zero_shard(listed(mix), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=1, matrix_updates="owner"))
    plan = tx.create(PARAMS).plan
    assert plan.leaves.param_of == (None,) * 5
    finder = CoreFinder(plan.analysis(tx.config).traced, *plan.leaves)
    assert finder.param_of == [None, 1, 0, 1, 0]
    cores, refused = finder.find()
    assert sorted(cores) == [0, 1]
    assert not refused
    paths = {i: {leaf.path for _, leaf in core.outs} for i, core in cores.items()}
    assert paths == {0: {"['a']", "[2]", "[4]"}, 1: {"['b']", "[1]", "[3]"}}


def factored(joint):
    """A transformation that decomposes each gradient. With `joint`, one branch doubles all gradients before."""

    def update(grads, state, params=None):
        if joint:
            grads = jax.lax.cond(state < 2, lambda tree: jax.tree.map(lambda x: 2 * x, tree), lambda tree: tree, grads)
        factors = {name: jnp.linalg.qr(g) for name, g in grads.items()}
        return {name: q @ (r - 1) for name, (q, r) in factors.items()}, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


@pytest.mark.parametrize("joint", [False, True])
def test_two_matrices_of_one_equation_are_told_apart(joint):
    """The factors of a decomposition belong to one parameter. The results of a branch depend on all its operands."""
    tx = zero_shard(factored(joint), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=1, matrix_updates="owner"))
    params = {name: jax.random.normal(jax.random.key(len(name)), x.shape) for name, x in PARAMS.items()}
    state = tx.create(params)
    cores, refused = CoreFinder(state.plan.analysis(tx.config).traced, *state.plan.leaves).find()
    assert (sorted(cores), sorted(refused)) == (([], [0, 1]) if joint else ([0, 1], []))
    loss = lambda params, batch: batch.mean() * sum(jnp.sum(jnp.sin(x)) for x in params.values())
    state, _ = tx.train_step(loss)(state, jnp.ones((8, 1)))
    updates, _ = factored(joint).update(jax.grad(loss)(params, jnp.ones(1)), jnp.zeros(()))
    for name, x in optax.apply_updates(params, updates).items():  # float32 decompositions of two programs
        np.testing.assert_allclose(tx.unshard(state.params)[name], x, rtol=1e-4, atol=1e-4)


def test_the_state_of_a_shorter_stack_is_as_short():
    """Statistics of each matrix, too, unless the matrices themselves have another shape."""
    grad, *state = [SimpleNamespace(shape=x) for x in ((6, 4, 8), (6, 4, 8), (6, 3), (), (6, 4, 8))]
    leaves = UpdatedLeaves((grad,), tuple(state), (0, 0, 0, None))
    shapes = lambda new: [traced._state_shape(leaves, k, {0: new}) for k in range(4)]
    assert shapes((2, 4, 8)) == [(2, 4, 8), (2, 3), None, None]
    assert shapes((2, 5, 8)) == [(2, 5, 8), None, None, None]
    assert traced._state_shape(leaves, 0, {}) is None
