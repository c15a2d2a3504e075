"""What the caller chose, checked once: a transformation and where its parts live."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optax
from jax.sharding import AxisType, Mesh

from zerojax.config.batch_spec import BatchSpec
from zerojax.config.checks import check_count
from zerojax.config.data_mesh import DataMesh, LayoutPolicy, in_words
from zerojax.config.mesh_record import MeshRecord
from zerojax.config.offload import Offload
from zerojax.config.precision import Precision
from zerojax.config.wire import Wire

STAGES = {
    0: "everything replicated",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
VIEWS = ("global", "device")
MATRIX_UPDATES = ("auto", "owner", "sharded")
PERSIST_BELOW = 8192
BUCKET_BYTES = 128 << 20


def with_auto_axes(mesh: Any) -> Any:
    """Return a mesh, or an abstract one, with the same axes, all of them Auto."""
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)) if mesh.explicit_axes else mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """A transformation and where its parts live.

    Attributes:
        tx: The optax transformation that is wrapped.
        stage: ZeRO stage, 0 to 3.
        user_mesh: The mesh as the caller gave it.
        axis: The mesh axes that rows of the batch are divided over.
        shard_axis: Which of them the stage shards over; empty: all.
        params_axis: Which of them parameters are sharded over; empty: as `shard_axis`.
        persist_below: A leaf with fewer elements is not sharded by dim: at stage 3 its
            parameter is persistent (replicated), and its gradient and optimizer state are flat.
        prefetch: How many uses ahead stage 3 starts a gather; 0 disables prefetch.
        bucket_bytes: A layer's leaves share a bucket up to this many logical bytes.
        reshard_after_forward: Whether stage 3 drops gathered parameters after the forward pass.
        precision: Types of a step; None leaves every type as the parameters and the loss have it.
        trainable: `trainable(path, leaf) -> bool`; None trains every leaf.
        overwrite: `overwrite(path, leaf) -> bool`: which leaves take their gradient as the new value; None: as named.
        offload: What is offloaded to host memory or disk; None: nothing.
        batch_spec: How dims of the batch are divided; None: dim 0 over `axis` alone.
        view: `"global"`: the loss sees all rows of the batch; `"device"`: each device's its own.
        wire: What collectives carry in few bits; None: nothing.
        matrix_updates: Which devices compute the update of a matrix: `"owner"`, `"sharded"`, or the cheaper, `"auto"`.

    Raises:
        TypeError: If `tx` is no optax transformation, a count is no integer, or another option of another type.
        ValueError: If the stage is unknown or a count negative, or the stage cannot offload.
    """

    tx: optax.GradientTransformation
    stage: int
    user_mesh: Mesh
    axis: tuple[str, ...] = ("data",)
    shard_axis: tuple[str, ...] = ()
    params_axis: tuple[str, ...] = ()
    persist_below: int = PERSIST_BELOW
    prefetch: int = 1
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True
    precision: Precision | None = None
    trainable: Callable[[str, Any], bool] | None = None
    overwrite: Callable[[str, Any], bool] | None = None
    offload: Offload | None = None
    batch_spec: BatchSpec | None = None
    view: str = "global"
    wire: Wire | None = None
    matrix_updates: str = "auto"

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
        if self.view not in VIEWS:
            raise ValueError(f'Unknown view of the loss {self.view!r}. Give "global" or "device".')
        if self.matrix_updates not in MATRIX_UPDATES:
            raise ValueError(f'Unknown matrix_updates={self.matrix_updates!r}. Give "auto", "owner" or "sharded".')
        for argument in ("shard_axis", "params_axis"):
            if missing := [name for name in getattr(self, argument) if name not in self.axis]:
                raise ValueError(
                    f"{argument} names {in_words(tuple(missing))}, over which no rows are divided: axis={self.axis!r}. "
                    f"Shards are over all of these axes, or some."
                )
        if self.params_axis:
            self._check_params_axis()
        if self.batch_spec is not None:
            self.batch_spec.check(self.axis, dict(self.user_mesh.shape))
        for name, unit in {"persist_below": "elements", "prefetch": "uses", "bucket_bytes": "bytes"}.items():
            check_count(name, getattr(self, name), unit, least=0)
        if not isinstance(self.precision, Precision | None):
            raise TypeError(f"precision is a zerojax.Precision, such as Precision.bf16(), not {self.precision!r}.")
        if not isinstance(self.offload, Offload | None):
            raise TypeError(f'offload is a zerojax.Offload, such as Offload(optimizer="host"), not {self.offload!r}.')
        if not isinstance(self.wire, Wire | None):
            raise TypeError(f'wire is a zerojax.Wire, such as Wire(gather="int8"), not {self.wire!r}.')
        if self.wire is not None:
            self._check_wire(self.wire)
        if self.offload is not None and self.stage == 0:
            raise ValueError(
                "Stage 0 shards nothing, so every device would keep the full optimizer state on the host. "
                "Offload at stage 1, 2 or 3."
            )
        if self.offload is not None and self.offload.params is not None and self.stage != 3:
            raise ValueError(
                f"Offload(params={self.offload.params!r}) needs stage 3: at stage {self.stage} the loss needs every "
                f"parameter in full, on the device."
            )
        if self.params_on_disk:
            self._check_params_on_disk()

    def _check_params_axis(self) -> None:
        """Refuse what parameters sharded over fewer axes than their optimizer state cannot be combined with."""
        if self.stage != 3:
            raise ValueError(
                f"params_axis={self.params_axis!r} needs stage 3: stage {self.stage} keeps parameters replicated."
            )
        if self.shard_axis:
            raise ValueError(
                f"shard_axis={self.shard_axis!r} says over which axes everything is sharded, and "
                f"params_axis={self.params_axis!r} that gradients and optimizer state are over all of axis=. Give one."
            )
        if self.offload is not None and self.offload.params is not None:
            raise ValueError(
                f"Offload(params={self.offload.params!r}) keeps a parameter as its optimizer state is sharded, and "
                f"params_axis= over fewer axes. Give one of them."
            )

    def _check_params_on_disk(self) -> None:
        """Refuse options that a step in stages does not know."""
        for name, found in {"shard_axis": self.shard_axis, "wire": self.wire, "overwrite": self.overwrite}.items():
            if found:
                raise ValueError(
                    f'{name}={found!r} is not known to Offload(params="disk"), whose step runs in stages. Leave it '
                    f'out, or take Offload(params="host").'
                )
        if self.view != "global":
            raise ValueError(
                f'view={self.view!r} runs a step as one program, and Offload(params="disk") in stages. Take the '
                f"global view."
            )

    def _check_wire(self, wire: Wire) -> None:
        """Refuse to quantise what no collective of the stage carries, or sums that would be rounded again."""
        if self.stage == 0:
            raise ValueError(
                "Stage 0 all-reduces gradients: quantised, every partial sum would be rounded, and with wire= none is. "
                "Take stage 1, 2 or 3, whose reductions send each gradient once."
            )
        if wire.gather and self.stage != 3:
            raise ValueError(
                f"Wire(gather={wire.gather!r}) needs stage 3: stage {self.stage} gathers what it stores, so that "
                f"the rounded parameters would be all there is. Give Wire(reduce=) alone."
            )
        if wire.reduce and self.shard_axis:
            raise ValueError(
                f"shard_axis={self.shard_axis!r} all-reduces shards of gradients over the other axes, and with "
                f"Wire(reduce={wire.reduce!r}) sums would be rounded once more. Take params_axis=, which "
                f"reduce-scatters them."
            )
        if missing := tuple(axis for axis in wire.over or () if axis not in self.axis):
            raise ValueError(
                f"Wire(over=) names {in_words(missing)}, over which no rows are divided: axis={self.axis!r}. "
                f"Name some of these axes."
            )
        if wire.error_feedback:
            self._check_error_feedback(wire)

    def _check_error_feedback(self, wire: Wire) -> None:
        """Refuse to feed back errors of reductions within the backward pass, or of more than one."""
        across = tuple(axis for axis in self.axis if axis not in self.params_axis)
        if not self.params_axis or len(across) != 1:
            found = (
                f"over {in_words(across)} there are {len(across)} reductions" if self.params_axis else "there is none"
            )
            raise ValueError(
                f"Wire(error_feedback=True) keeps the errors of one reduction across hosts, at the end of a step, and "
                f'{found}. Shard parameters within a host: stage=3, axis=("host", "gpu"), params_axis="gpu"; a '
                f"reduction within the backward pass would need a full gradient's errors on each device."
            )
        if wire.over is not None and across[0] not in wire.over:
            raise ValueError(
                f"Wire(error_feedback=True) is of what goes over {in_words(across)}, and over={wire.over!r} quantises "
                f"nothing there. Name it, or leave over= out."
            )

    def __getstate__(self) -> dict:
        """Return the fields, with the mesh as its `MeshRecord`: devices cannot be pickled."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"user_mesh": MeshRecord.of(self.user_mesh)}

    def __setstate__(self, state: dict) -> None:
        """Take the fields; the mesh is rebuilt when it is first used, so that loading starts no backend of JAX."""
        self.__dict__.update(state)
        self.__dict__["_mesh_record"] = self.__dict__.pop("user_mesh")

    if not TYPE_CHECKING:  # or every misspelled attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """Rebuild the mesh of a configuration that was pickled."""
            if name != "user_mesh" or "_mesh_record" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            self.__dict__["user_mesh"] = mesh = self.__dict__["_mesh_record"].mesh()
            return mesh

    @functools.cached_property
    def plans(self) -> dict[Any, Any]:
        """Return the plans that were made, by layout: the arrays of an optimizer state do not say their logical shapes.

        Kept beside the fields: configurations that are equal have plans of their own, and they are not pickled.
        """
        return {}

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Return the mesh that everything is computed on: the caller's, with all axes Auto."""
        return with_auto_axes(self.user_mesh)

    @property
    def stores_compute_dtype(self) -> bool:
        """Return whether parameters are stored in the type they are computed in. Stage 3 stores what it updates."""
        return self.stage < 3 or self.offload is not None or bool(self.params_axis)

    @property
    def params_on_host(self) -> bool:
        """Return whether sharded parameters are kept in host memory."""
        return self.offload is not None and self.offload.params == "host"

    @property
    def params_on_disk(self) -> bool:
        """Return whether sharded parameters are kept in files."""
        return self.offload is not None and self.offload.params == "disk"

    @property
    def has_master_weights(self) -> bool:
        """Return whether parameters are a copy of master weights in the optimizer state."""
        precision = self.precision
        return precision is not None and self.stores_compute_dtype and precision.compute != precision.master

    @functools.cached_property
    def data(self) -> DataMesh:
        """Return which axes divide the batch, and which shard each part of the model states."""
        return DataMesh.for_stage(dict(self.mesh.shape), self.axis, self.stage, self.shard_axis, self.params_axis)

    @functools.cached_property
    def layout_policy(self) -> LayoutPolicy:
        """Return the part of the configuration that decides layouts."""
        return LayoutPolicy(self.stage, self.data, self.persist_below, self.stores_compute_dtype, self.params_on_host)
