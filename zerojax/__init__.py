"""ZeRO for JAX: any optax transformation, sharded over a device mesh."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from zerojax import checkpoint, offload, plot
    from zerojax.config import DynamicScale, Offload, Precision
    from zerojax.gather import block
    from zerojax.inspect.collectives import Collective, Collectives, collectives
    from zerojax.inspect.report import Report, report
    from zerojax.layout.padded import Padded
    from zerojax.planning.check import check
    from zerojax.planning.compiled_plan import Plan
    from zerojax.planning.estimate import Estimate, estimate
    from zerojax.planning.plan import plan
    from zerojax.train.state import ZeroState
    from zerojax.zero import Shardings, ZeroTransformation, zero_shard

# Each name is imported when it is first used: the command line needs no JAX to show its help, training no
# compiled programs, and neither needs checkpoints.
_MODULE_OF = {
    "Collective": "inspect.collectives",
    "Collectives": "inspect.collectives",
    "DynamicScale": "config",
    "Estimate": "planning.estimate",
    "Offload": "config",
    "Padded": "layout.padded",
    "Plan": "planning.compiled_plan",
    "Precision": "config",
    "Report": "inspect.report",
    "Shardings": "zero",
    "ZeroState": "train.state",
    "ZeroTransformation": "zero",
    "block": "gather",
    "check": "planning.check",
    "checkpoint": None,
    "collectives": "inspect.collectives",
    "estimate": "planning.estimate",
    "offload": None,
    "plan": "planning.plan",
    "plot": None,
    "report": "inspect.report",
    "zero_shard": "zero",
}

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


def __getattr__(name: str) -> _Any:
    """Import what a public name stands for."""
    if name == "__version__":
        found = _import_module(f"{__name__}.version").version()
    elif name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif (module := _MODULE_OF[name]) is None:
        return _import_module(f"{__name__}.{name}")
    else:
        found = getattr(_import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public surface."""
    return sorted([*__all__, "__version__", "__doc__", "__name__", "__file__", "__path__"])
