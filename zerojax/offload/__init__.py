"""Where offloaded arrays are: host memory and disk, for optimizer state, parameters and activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.offload.remat import remat_policy

__all__ = ["remat_policy"]


def __getattr__(name: str) -> Any:
    """Import the policy when it is first used: the files of a disk store can be inspected without JAX."""
    if name != "remat_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".remat", __name__).remat_policy
