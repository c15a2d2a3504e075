"""ZeRO for JAX: any optax transformation, sharded over a device mesh."""

from typing import TYPE_CHECKING, Any

from .config import DynamicScale, Precision
from .layout.padded import Padded
from .memory.report import Report, report
from .stages.gather import block
from .train.state import ZeroState
from .zero import Shardings, ZeroTransformation, check, zero_shard

if TYPE_CHECKING:
    from .plan.hlo import Collective, Collectives, collectives

__all__ = [
    "Collective",
    "Collectives",
    "DynamicScale",
    "Padded",
    "Precision",
    "Report",
    "Shardings",
    "ZeroState",
    "ZeroTransformation",
    "block",
    "check",
    "collectives",
    "report",
    "zero_shard",
]


def __getattr__(name: str) -> Any:
    """Reading compiled programs is imported when it is first used: training needs none of it."""
    if name in ("Collective", "Collectives", "collectives"):
        from .plan import hlo

        return getattr(hlo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
