"""Stage 3 on the GPT yardstick, compiled for eight H200s that are not there."""

import functools

import jax
import pytest

from zerojax.plan.topology import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="needs the extra aot"),
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the yardstick is set for the newest jax"),
]


@functools.cache
def figures(style, prefetch, layers=24):
    from aot_gpt import measure

    return measure(style, prefetch=prefetch, layers=layers)


@pytest.mark.parametrize("style", ["unrolled", "scan"])
def test_parameters_are_gathered_twice(style):
    for prefetch in (0, 1):
        assert figures(style, prefetch)["passes"] <= 2.02


@pytest.mark.parametrize("style", ["unrolled", "scan"])
def test_communication_hides_behind_products(style):
    assert figures(style, 1)["hidden"] >= 0.95


@pytest.mark.parametrize("style", ["unrolled", "scan"])
def test_a_device_needs_little_beyond_shards_and_activations(style):
    assert figures(style, 1)["all-in"] <= 1.25
    assert figures(style, 0)["all-in"] <= 1.18


@pytest.mark.parametrize("style", ["unrolled", "scan"])
def test_a_layer_more_costs_no_more_than_its_activation(style):
    """Peak beyond shards and activations does not grow with depth: a layer more costs at most its activation."""
    at = {layers: figures(style, 1, layers)["temp MiB"] for layers in (4, 14, 24)}
    activations = 10 * 8 * 1024 * 2048 * 2 / 2**20  # ten layers, rows x tokens x width in bfloat16
    # a shallow model may peak at its head, and grow by less than its activations at first
    assert at[24] - at[14] <= 1.1 * max(at[14] - at[4], activations)
