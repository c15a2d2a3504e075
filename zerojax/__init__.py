"""ZeRO for JAX: any optax transformation, sharded over a device mesh."""

from .layout.padded import Padded
from .memory.report import Report, report
from .plan.hlo import Collective, collectives
from .train.state import ZeroState
from .zero import Shardings, ZeroTransformation, zero_shard

__all__ = [
    "Collective",
    "Padded",
    "Report",
    "Shardings",
    "ZeroState",
    "ZeroTransformation",
    "collectives",
    "report",
    "zero_shard",
]
