"""ZeRO for JAX: any optax transformation, sharded over a device mesh."""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from zerojax import checkpoint, data, metrics, offload
    from zerojax.budget.remat import Remat, remat_within
    from zerojax.compilations import cache_compilations
    from zerojax.config.precision import DynamicScale, Precision
    from zerojax.config.tuning import Tuning
    from zerojax.config.wire import Wire
    from zerojax.dims.declared import rows
    from zerojax.gather.tiled import block, tiled
    from zerojax.inspect.compiled_collectives import Collective, CompiledCollectives, collectives
    from zerojax.inspect.report import Report, report
    from zerojax.layout.padded import Padded
    from zerojax.narrow_state.option import Narrow
    from zerojax.offload.options import Offload
    from zerojax.planning.check import check
    from zerojax.planning.compare import Comparison, compare
    from zerojax.planning.compiled_plan import Plan
    from zerojax.planning.estimate import Estimate, estimate
    from zerojax.planning.plan import plan
    from zerojax.train.params import logical
    from zerojax.train.state import ZeroState
    from zerojax.train.tree_api import Shardings
    from zerojax.zero import ZeroTransformation, zero_shard

    __version__: str

# Each name is imported at its first use. So `zerojax --help` does not import JAX, and training does not import the
# code for checkpoints or for the inspection of compiled programs.
_MODULES = {
    "budget.remat": "Remat remat_within",
    "compilations": "cache_compilations",
    "config.precision": "DynamicScale Precision",
    "config.tuning": "Tuning",
    "config.wire": "Wire",
    "dims.declared": "rows",
    "gather.tiled": "block tiled",
    "inspect.compiled_collectives": "Collective CompiledCollectives collectives",
    "inspect.report": "Report report",
    "layout.padded": "Padded",
    "narrow_state.option": "Narrow",
    "offload.options": "Offload",
    "planning.check": "check",
    "planning.compare": "Comparison compare",
    "planning.compiled_plan": "Plan",
    "planning.estimate": "Estimate estimate",
    "planning.plan": "plan",
    "train.params": "logical",
    "train.state": "ZeroState",
    "train.tree_api": "Shardings",
    "zero": "ZeroTransformation zero_shard",
}
_RENAMED = {
    "Mean": "metrics.Mean",
    "Rows": "metrics.PerRow",
    "Same": "metrics.Replicated",
    "Sum": "metrics.Sum",
    "flax": "flax_nnx",
    "remat": "remat_within",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Collective",
    "Comparison",
    "CompiledCollectives",
    "DynamicScale",
    "Estimate",
    "Narrow",
    "Offload",
    "Padded",
    "Plan",
    "Precision",
    "Remat",
    "Report",
    "Shardings",
    "Tuning",
    "Wire",
    "ZeroState",
    "ZeroTransformation",
    "block",
    "cache_compilations",
    "check",
    "checkpoint",
    "collectives",
    "compare",
    "data",
    "estimate",
    "logical",
    "metrics",
    "offload",
    "plan",
    "remat_within",
    "report",
    "rows",
    "tiled",
    "zero_shard",
]


if not _typing.TYPE_CHECKING:  # otherwise the type checker would accept every misspelled name

    def __getattr__(name: str) -> _typing.Any:
        """Import a public name at its first use."""
        if name == "__version__":
            found = _import_module(f"{__name__}.version").version()
        elif name in ("checkpoint", "data", "metrics", "offload"):
            return _import_module(f"{__name__}.{name}")
        elif name in _MODULE_OF:
            found = getattr(_import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        else:
            now = f", which is now zerojax.{_RENAMED[name]}" if name in _RENAMED else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{now}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__", "__name__", "__file__", "__path__"])
