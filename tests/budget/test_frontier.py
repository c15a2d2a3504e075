"""The frontier of budgets is never below a policy of JAX, for the blocks that the benchmark compiles."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remat_budget
from conftest import quick_or_slow

import zerojax
from zerojax import compat, jaxprs
from zerojax.budget.graph import flops_of
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops

WIDTH, HEADS, ROWS, TOKENS, LAYERS = 32, 4, 2, 32, 24
KINDS = ["vit", "experts", "u-net"]
RESULTS = pathlib.Path(remat_budget.__file__).with_name("results") / "remat_budget.json"


@functools.cache
def block_of(kind):
    block, shapes_of, _ = remat_budget.MODELS[kind]
    return block, remat_budget.arguments(shapes_of(WIDTH, HEADS), ROWS, TOKENS, WIDTH)


def products(fn, args):
    """FLOPs of matrix products and convolutions in the traced gradient of a block."""
    loss = lambda *args: jnp.sum(fn(*args).astype(jnp.float32) ** 2)
    jaxpr = compat.opened(jax.make_jaxpr(jax.grad(loss))(*args))[0]
    return sum(
        flops_of(e) for e in jaxprs.equations(jaxpr) if e.primitive.name in ("dot_general", "conv_general_dilated")
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick_or_slow([(kind,) for kind in KINDS], [("experts",)]))
def test_no_policy_of_jax_saves_less_and_repeats_less(kind):
    """With the bytes that a policy saves, a budget repeats no more FLOPs of products than the policy."""
    block, args = block_of(kind)
    most = zerojax.remat_within(block, budget=0).choice(*args).most_bytes
    for name, rule in remat_budget.POLICIES.items():
        theirs = jax.checkpoint(block, policy=rule)
        saved = min(remat_budget.saved_bytes(theirs, *args), most)
        ours = zerojax.remat_within(block, budget=saved)
        assert ours.choice(*args).saved_bytes <= saved
        # The choice counts elementwise FLOPs, too. It may repeat a small product instead of a larger softmax.
        assert products(ours, args) <= 1.005 * products(theirs, args), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "u-net"])
def test_the_compiled_memory_stays_within_the_budget(kind):
    """Of a scan, beyond what it takes with a budget of 0. The backward pass copies the values of one layer of 24."""
    block, (params, x) = block_of(kind)
    stacked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((LAYERS, *w.shape), w.dtype), params)
    most = zerojax.remat_within(block, budget=0).choice(params, x).most_bytes
    budgets = [int(share * most) for share in np.linspace(0, 1, 4)]
    sizes, flops, compiled = [], [], {}
    for budget in budgets:
        fn = zerojax.remat_within(block, budget=budget, prevent_cse=False)
        saved = fn.choice(params, x).saved
        if saved not in compiled:
            loss = lambda params, x, fn=fn: jnp.sum(jax.lax.scan(lambda x, w: (fn(w, x), None), x, params)[0] ** 2)
            compiled[saved] = jax.jit(jax.grad(loss)).lower(stacked, x).compile()
        sizes.append(compiled[saved].memory_analysis().temp_size_in_bytes)
        flops.append(sum(product_flops(kernels(read(compiled[saved].as_text()))).values()))
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]
    for budget, size in zip(budgets, sizes, strict=True):
        assert size <= sizes[0] + 1.05 * LAYERS * budget


def test_the_published_table_has_no_policy_that_is_not_dominated():
    models = json.loads(RESULTS.read_text())["models"]
    assert set(models) == set(remat_budget.MODELS)
    for name, found in models.items():
        assert set(found["policies"]) == set(remat_budget.POLICIES)
        assert not [policy for policy in found["policies"] if remat_budget.dominating(found, policy) is None], name
