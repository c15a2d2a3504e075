"""What the caller chose, checked once: the words every other module uses."""

import dataclasses

import optax
from jax.sharding import Mesh

STAGES = {
    0: "everything replicated",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
PERSIST_BELOW = 8192
BUCKET_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Config:
    """A transformation and where its parts live.

    Attributes:
        tx: The optax transformation that is wrapped.
        stage: ZeRO stage, 0 to 3.
        mesh: Mesh with Auto axes.
        axis: The mesh axis that everything is divided over.
        persist_below: A leaf with fewer elements is not cut by dim: at stage 3 its
            parameter stays whole, and its gradient and optimizer state lie flat.
        prefetch: How many uses ahead stage 3 starts a gather; 0 is none.
        bucket_bytes: A layer's leaves travel together up to this many logical bytes.
        reshard_after_forward: Whether stage 3 drops gathered parameters after the forward pass.

    Raises:
        TypeError: If `tx` is no optax transformation or a count is no integer.
        ValueError: If the stage is unknown or a count negative.
    """

    tx: optax.GradientTransformation
    stage: int
    mesh: Mesh
    axis: str = "data"
    persist_below: int = PERSIST_BELOW
    prefetch: int = 1
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True

    def __post_init__(self):
        """Check every field."""
        if not (callable(getattr(self.tx, "init", None)) and callable(getattr(self.tx, "update", None))):
            raise TypeError(
                f"zero_shard wraps an optax transformation, which has init and update; got {type(self.tx).__name__}. "
                f"For example: zero_shard(optax.adamw(3e-4), stage=3)."
            )
        if isinstance(self.stage, bool) or self.stage not in STAGES or not isinstance(self.stage, int):
            known = "; ".join(f"{stage}: {what}" for stage, what in STAGES.items())
            raise ValueError(f"Unknown ZeRO stage {self.stage!r}. Give one of {known}.")
        counted = {"persist_below": "elements", "prefetch": "uses", "bucket_bytes": "bytes"}
        for name, unit in counted.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} counts {unit} and must be an int, not {value!r}.")
            if value < 0:
                raise ValueError(f"{name} counts {unit} and cannot be negative, but is {value}.")

    @property
    def shards(self) -> int:
        """Size of the mesh axis."""
        return self.mesh.shape[self.axis]
