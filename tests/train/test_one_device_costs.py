"""On one device, a step of each model compiles to what plain optax compiles to."""

import re
from collections import Counter

import jax
import optax
import pytest
import test_one_device
from conftest import mesh_of
from programs import TABLE

from zerojax import zero_shard

WAYS = {"yardstick": "unrolled", "yardstick_scan": "scanned"}


def model(name):
    """`(loss, params, batch)` of the yardstick, or of a program of the table with fewer rows, as shapes."""
    if name in WAYS:
        return test_one_device.model(WAYS[name])
    program = TABLE[name]
    params, batch, _ = program.shapes()
    return program.loss, params, jax.tree.map(lambda x: jax.ShapeDtypeStruct((16, *x.shape[1:]), x.dtype), batch)


def costs(compiled):
    """`(products, fusions, bytes read and written, temporary memory)` of a compiled program."""
    names = Counter(re.findall(r"= \S+ ([a-z-]+)\(", compiled.as_text()))
    accessed, temporary = compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes
    return names["dot"], names["fusion"], accessed, temporary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [("yardstick", 1), ("yardstick_scan", 2), ("yardstick", 3), ("eqx_gpt", 3), ("moe_tokens_scan", 3)],
)
def test_a_step_costs_what_plain_optax_costs(name, stage, optimized):
    loss, params, batch = model(name)
    optimizer = optax.adamw(1e-3)

    def plain(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    given = params, jax.eval_shape(optimizer.init, params), batch
    usual = costs(jax.jit(plain, donate_argnums=(0, 1)).lower(*given).compile())
    tx = zero_shard(optimizer, stage=stage, mesh=mesh_of(1))
    found = costs(tx.train_step(loss).lower(jax.eval_shape(tx.create, params), batch).compile())
    # A step also counts itself, and says whether its loss is finite: a few scalars, in up to 3 fusions.
    scalars = (0, 3, 1024, 1024)
    assert all(a <= 1.02 * b + more for a, b, more in zip(found, usual, scalars, strict=True)), (found, usual)
