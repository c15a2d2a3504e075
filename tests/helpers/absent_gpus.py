"""A mark for tests that compile for GPUs that this machine does not have."""

import jax
import pytest

from zerojax.gpus.devices import installed

aot = pytest.mark.skipif(
    not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax"
)
