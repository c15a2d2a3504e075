"""The options of `zero_shard`, as frozen dataclasses that check their fields when they are created."""

from zerojax.config.checks import LeafMask, check_chosen, check_count, check_flag, check_word, path_of
from zerojax.config.config import BUCKET_BYTES, PERSIST_BELOW, STAGES, Config, with_auto_axes
from zerojax.config.data_mesh import BatchSpec, DataMesh, LayoutPolicy
from zerojax.config.options import CHUNK_BYTES, Offload, Wire
from zerojax.config.precision import DynamicScale, Precision

__all__ = [
    "BUCKET_BYTES",
    "CHUNK_BYTES",
    "PERSIST_BELOW",
    "STAGES",
    "BatchSpec",
    "Config",
    "DataMesh",
    "DynamicScale",
    "LayoutPolicy",
    "LeafMask",
    "Offload",
    "Precision",
    "Wire",
    "check_chosen",
    "check_count",
    "check_flag",
    "check_word",
    "path_of",
    "with_auto_axes",
]
