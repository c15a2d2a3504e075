"""What waits outside the devices' memory: optimizer state, parameters, activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerojax.offload.remat import remat_policy

__all__ = ["remat_policy"]


def __getattr__(name: str) -> Any:
    """Import the policy when it is first used: the files of the disk tier need no JAX to be looked at."""
    if name != "remat_policy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".remat", __name__).remat_policy
