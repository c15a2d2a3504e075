"""What waits outside the devices' memory: optimizer state, parameters, activations."""

from .remat import remat_policy

__all__ = ["remat_policy"]
