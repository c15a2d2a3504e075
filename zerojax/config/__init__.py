"""The options of `zero_shard`, as frozen dataclasses that check their fields when they are created.

This package imports what every run needs. `Precision`, `Wire`, `Tuning`, `BatchSpec` and the checks of options
that choose parameters have their own files, and `Offload` is in `zerojax.offload`.
"""

from zerojax.config.checks import check_count, check_flag, check_word, path_of
from zerojax.config.config import BUCKET_BYTES, PERSIST_BELOW, STAGES, Config, with_auto_axes
from zerojax.config.data_mesh import DataMesh, LayoutPolicy, resolve_axes
