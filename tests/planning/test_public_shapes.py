"""A mixture of experts of a published shape, with fewer and smaller layers, compiled for absent GPUs."""

import dataclasses

import public_shapes
import pytest
from absent_gpus import aot
from long_context import blockwise

SMALL = dataclasses.replace(
    public_shapes.MIXTURE, vocabulary=2048, width=512, hidden=256, layers=6, heads=4, kv_heads=2, experts=8, top=2
)


@pytest.mark.slow
@aot
def test_a_mixture_of_experts_gathers_twice_reduces_once_and_hides_its_loops():
    run = public_shapes.RUNS["MoE"]
    # In global view, this loop of attention needs the rule for calls that jax names "eval_jaxpr" (zerojax/dims).
    changes = {"topology": "h200:8", "config": SMALL, "rows": 2, "tokens": 1024, "attention": blockwise}
    run = dataclasses.replace(run, **changes)
    found = public_shapes.measure(run)
    count = found["parameters"]
    assert found["passes"]["all-gather"] < 2.0  # two passes; the last layer is gathered once for both
    assert found["passes"]["reduce-scatter"] == pytest.approx(1.0, abs=0.02)
    assert found["passes"]["all-reduce"] < 1e-3
    assert found["hidden"] > 0.85  # all but the experts of the peeled iterations, the lookup and the head
    # Shards of the parameters and of Adam's moments in float32.
    held = sum(found["memory GB"][part] for part in ("parameters", "optimizer state"))
    assert held == pytest.approx(12 * count / 8 / 1e9, abs=0.02)
    assert found["peak GB"] <= 0.20  # the whole layers in bfloat16 alone would take 0.06 more
