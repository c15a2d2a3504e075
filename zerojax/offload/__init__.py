"""Keep optimizer state and parameters in host memory or on disk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.offload.state_files import close

__all__ = ["close"]
MODULES = {"close": ".state_files"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `zerojax.offload.disk` can be imported without JAX."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])
