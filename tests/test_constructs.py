"""Every construct a model may use around a parameter gives the plain function's value and gradients."""

import constructs
import jax
import pytest
from engine_helpers import assert_same

X = jax.random.normal(jax.random.key(9), (16, 8))


def tolerance(name):
    # bfloat16 gathers are summed over devices in bfloat16: 8 bits of mantissa.
    return {"rtol": 3e-2, "atol": 3e-2} if name == "cast" else {}


@pytest.mark.parametrize("name", constructs.TABLE)
def test_equals_the_plain_function(name):
    assert_same(constructs.TABLE[name], constructs.make_params(), X, constructs.CUT, **tolerance(name))


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}, {"bucket_bytes": 0}]
)
@pytest.mark.parametrize(
    "name", ["plain", "remat", "scan_everything", "scan_remat", "embedding", "cast", "marked_block"]
)
def test_no_option_changes_the_result(name, options):
    assert_same(constructs.TABLE[name], constructs.make_params(), X, constructs.CUT, **options, **tolerance(name))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", ["plain", "remat", "scan_everything", "scan_remat", "stacked_layers", "embedding"])
def test_padded_leaves_are_trimmed_and_their_gradients_padded_with_zeros(name, devices):
    assert_same(constructs.TABLE[name], constructs.make_params(), X[:12], constructs.CUT, devices=devices)


@pytest.mark.parametrize("name", ["scan_xs", "scan_everything", "stacked_layers"])
def test_a_stack_cut_over_its_layers(name):
    assert_same(constructs.TABLE[name], constructs.make_params(), X, constructs.CUT | {"stack": 0})
