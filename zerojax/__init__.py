"""ZeRO for JAX: any optax transformation, sharded over a device mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint, offload, plot
    from .config import DynamicScale, Offload, Precision
    from .layout.padded import Padded
    from .memory.report import Report, report
    from .planner import plan
    from .planning.estimate import Estimate, estimate
    from .planning.hlo import Collective, Collectives, collectives
    from .planning.planned import Plan
    from .stages.gather import block
    from .train.state import ZeroState
    from .zero import Shardings, ZeroTransformation, check, zero_shard

__all__ = [
    "Collective",
    "Collectives",
    "DynamicScale",
    "Estimate",
    "Offload",
    "Padded",
    "Plan",
    "Precision",
    "Report",
    "Shardings",
    "ZeroState",
    "ZeroTransformation",
    "block",
    "check",
    "checkpoint",
    "collectives",
    "estimate",
    "offload",
    "plan",
    "plot",
    "report",
    "zero_shard",
]


# Each name is imported when it is first used: the command line needs no JAX to show its help, training no
# compiled programs, and neither needs checkpoints.
_HOME = {
    "Collective": "planning.hlo",
    "Collectives": "planning.hlo",
    "DynamicScale": "config",
    "Estimate": "planning.estimate",
    "Offload": "config",
    "Padded": "layout.padded",
    "Plan": "planning.planned",
    "Precision": "config",
    "Report": "memory.report",
    "Shardings": "zero",
    "ZeroState": "train.state",
    "ZeroTransformation": "zero",
    "block": "stages.gather",
    "check": "zero",
    "collectives": "planning.hlo",
    "estimate": "planning.estimate",
    "plan": "planner",
    "report": "memory.report",
    "zero_shard": "zero",
}


def __getattr__(name: str) -> Any:
    """Import what a name stands for."""
    if name in ("checkpoint", "offload", "plot"):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    thing = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return thing
