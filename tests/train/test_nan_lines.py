"""The first NaN of a function is found at its source line, also inside of loops, branches and calls."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.layout.tree import layout_of
from zerojax.train.loss import Loss, LossInputs, View
from zerojax.train.nan_lines import note_line, origins


def in_loop(x, reverse=False):
    """The first slice makes a NaN of log, and the last one of sqrt."""
    body = lambda carry, x: (carry + jnp.log(5 - x), jnp.sqrt(x))
    return jax.lax.scan(body, jnp.ones(2), x, reverse=reverse)


def in_reverse_loop(x):
    return in_loop(x, reverse=True)


def in_loop_with_consts(x):
    """The second log makes an inf of 0, and the third a NaN of the inf."""
    return jax.lax.scan(lambda carry, _: (jnp.log(carry) * x[0, 0] * x[1], None), jnp.ones(2), length=3)[0]


def in_branch(x):
    branches = [lambda x, _: jnp.sqrt(x), lambda _, y: jnp.log(y), lambda x, y: x + y]
    return jax.lax.switch(1, branches, x, x - 20)


def in_remat(x):
    return jax.checkpoint(lambda x: x + jnp.log(x - 20))(x)


def in_jit(x):
    return jax.jit(lambda x, key: (x + jnp.log(x - 20), jax.random.fold_in(key, 1)))(x, jax.random.key(0))


LINES = {  # of each NaN or inf: its kind, its primitive, and its line after the function's first
    in_loop: ("nan log 2",),
    in_reverse_loop: ("nan sqrt -4",),
    in_loop_with_consts: ("inf log 2", "nan log 2"),
    in_branch: ("nan log 1",),
    in_remat: ("nan log 1",),
    in_jit: ("nan log 1",),
}


@pytest.mark.parametrize("fn", LINES)
def test_a_nan_is_found_at_its_line(fn):
    found = origins(fn, x=jnp.array([[9.0, 9.0], [1.0, -1.0]]))
    lines = [int(origin.where.removeprefix("test_nan_lines.py:")) - fn.__code__.co_firstlineno for origin in found]
    assert tuple(f"{one.kind} {one.primitive} {line}" for one, line in zip(found, lines, strict=True)) == LINES[fn]


def test_an_argument_with_a_nan_is_named():
    (found,) = origins(lambda a, b: a, a=jnp.inf, b={"c": [jnp.ones(2), jnp.array([0, jnp.nan])]})
    assert str(found) == "the first nan is given in b['c'][1]"


def loss(params, batch):
    return jnp.mean(batch["x"] @ params["w"]) + jnp.log(jnp.sum(batch["y"]) - 3)  # of the last device's rows: 1 - 3


def test_a_nan_of_one_device_is_noted():
    """In device view JAX tests only the results of a `shard_map`."""
    mesh = mesh_of(2, 3)
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, view="device", axis=("host", "gpu"))
    params = tx.shard({"w": jnp.ones((5, 2))})
    view = View(tx.config, layout_of(tx.config, params), (), Loss(loss), 1)
    error = FloatingPointError()
    batch = {"x": jnp.ones((12, 5)), "y": 6 - jnp.arange(12) // 10 * 5.0}
    line = loss.__code__.co_firstlineno + 1
    note_line(error, view, LossInputs(jax.tree.leaves(params), None, batch, ()))
    assert error.__notes__ == [f"On the rows of one device, the first nan is made by log at test_nan_lines.py:{line}."]
