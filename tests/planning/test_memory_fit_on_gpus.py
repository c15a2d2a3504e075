"""Steps with `memory=` use the memory of GPUs that are not there, as predicted before any compilation."""

import jax
import pytest

from zerojax.gpus.topology import installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax"
    ),
]


def test_a_step_uses_the_memory_and_its_peak_was_predicted():
    from memory_fit import fitted

    found = fitted("gpt scan", "h100:8")
    first, chosen = found["trials"][0], found["trials"][found["chosen"]]
    assert abs(first["predicted"] / first["peak"] - 1) <= 0.1
    assert 0.85 * found["memory"] <= chosen["peak"] <= found["memory"]
    assert len(found["trials"]) <= 3
