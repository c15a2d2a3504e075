"""The configuration, which has the wrapped transformation and all options of `zero_shard`, checked once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from zerojax.config.checks import check_word
from zerojax.config.data_mesh import DataMesh, LayoutPolicy, in_words

if TYPE_CHECKING:
    from zerojax.config.batch_dims import BatchSpec
    from zerojax.config.precision import Precision
    from zerojax.config.wire import Wire

STAGES = {
    0: "everything replicated",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
PERSIST_BELOW = 8192
BUCKET_BYTES = 128 << 20
# A collective needs 10-20 us to start. In this time, a network of 50-100 GB/s between hosts sends 1 MiB, and links
# inside of a host send more. So a gather of 1 MiB takes at most about twice as long as a gather of nothing.
SHARED_BYTES = 1 << 20
# An example of each option that is an object, for errors.
EXAMPLES = {"precision": "Precision.bf16()", "wire": 'Wire(gather="int8")', "offload": 'Offload(optimizer="host")'}
EXAMPLES["state"] = 'Narrow("int8")'


def with_auto_axes(mesh: Any) -> Any:
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)) if mesh.explicit_axes else mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """The wrapped transformation, and the options of `zero_shard` and `Tuning`, whose docstrings describe the fields.

    Raises:
        TypeError: If `tx` is not an optax transformation, or an option has a wrong type.
        ValueError: If an option is out of range, or options contradict each other.
    """

    tx: optax.GradientTransformation
    stage: int
    user_mesh: Mesh  # the mesh that the caller gave
    axis: tuple[str, ...] = ("data",)
    shard_axis: tuple[str, ...] = ()  # empty: all of `axis`
    params_axis: tuple[str, ...] = ()  # empty: the axes of gradients and optimizer state
    expert_axis: tuple[str, ...] = ()
    persist_below: int = PERSIST_BELOW
    prefetch: int = 1
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True
    precision: "Precision | None" = None
    trainable: Callable[[str, Any], bool] | None = None
    overwrite: Callable[[str, Any], bool] | None = None
    offload: Any = None  # `Offload`, which is defined above this package
    batch_spec: "BatchSpec | None" = None
    view: str = "global"
    wire: "Wire | None" = None
    matrix_updates: str = "auto"
    state: Any = None  # `Narrow`, which is defined above this package

    def __post_init__(self):
        if not (callable(getattr(self.tx, "init", None)) and callable(getattr(self.tx, "update", None))):
            raise TypeError(
                f"zero_shard wraps an optax transformation, which has init and update; got {type(self.tx).__name__}. "
                f"For example: zero_shard(optax.adamw(3e-4), stage=3)."
            )
        if isinstance(self.stage, bool) or self.stage not in STAGES or not isinstance(self.stage, int):
            known = "; ".join(f"{stage}: {what}" for stage, what in STAGES.items())
            raise ValueError(f"Unknown ZeRO stage {self.stage!r}. Give one of {known}.")
        check_word("view=", self.view, ("global", "device"))
        for argument in ("shard_axis", "params_axis", "expert_axis"):
            if missing := [name for name in getattr(self, argument) if name not in self.axis]:
                raise ValueError(
                    f"{argument} names {in_words(tuple(missing))}, over which no rows are divided: axis={self.axis!r}. "
                    f"Name some of these axes, or leave {argument} out."
                )
        self._check_axes()
        if self.batch_spec is not None:
            self.batch_spec.check(self.axis, dict(self.user_mesh.shape))
        for name, example in EXAMPLES.items():
            option = getattr(self, name)
            if option is not None and getattr(type(option), "argument", None) != name:
                kind = example.partition("(")[0].partition(".")[0]
                raise TypeError(f"{name} is a zerojax.{kind}, such as {example}, not {option!r}.")
        for option in filter(None, (self.wire, self.offload, self.state)):
            option.check(self)

    def _check_axes(self) -> None:
        if self.params_axis and self.stage != 3:
            raise ValueError(
                f"Tuning(params_axis={self.params_axis!r}) needs stage 3: stage {self.stage} keeps parameters "
                f"replicated. Use stage=3, or leave params_axis out."
            )
        if self.params_axis and self.shard_axis:
            raise ValueError(
                f"Tuning(shard_axis={self.shard_axis!r}) shards everything over these axes, but with "
                f"params_axis={self.params_axis!r} gradients and optimizer state are sharded over all of axis=. Give "
                f"one of them."
            )
        if self.expert_axis and self.view == "device":
            raise ValueError(
                f'expert_axis={self.expert_axis!r} leaves experts divided, but with view="device" the loss sees every '
                f"parameter in full. Use the global view, and call the experts in a jax.shard_map over these axes."
            )
        if self.expert_axis and self.params_axis:
            raise ValueError(
                f"Tuning(params_axis=) cannot be combined with expert_axis={self.expert_axis!r}. Leave one of them out."
            )

    def __getstate__(self) -> dict:
        """Return the fields, with a record of the mesh, which is rebuilt when it is first used, not when unpickled."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "user_mesh")
        return {name: getattr(self, name) for name in names} | {"_mesh_record": mesh_record(self.user_mesh)}

    if not TYPE_CHECKING:  # otherwise the type checker would accept every misspelled attribute

        def __getattr__(self, name: str) -> Any:
            """Rebuild the mesh of a configuration that was pickled."""
            if name != "user_mesh" or "_mesh_record" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            self.__dict__["user_mesh"] = mesh = rebuilt_mesh(*self.__dict__["_mesh_record"])
            return mesh

    @functools.cached_property
    def plans(self) -> dict[Any, Any]:
        """Return the cache of sharding plans, by layout. It is not a field, so it is neither compared nor pickled."""
        return {}

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Return the caller's mesh with all axes Auto. All computations use this mesh."""
        return with_auto_axes(self.user_mesh)

    @property
    def stores_compute_dtype(self) -> bool:
        """Return whether parameters are stored in the compute type. Otherwise they are stored in the master type."""
        has_narrow_masters = self.state is not None and self.state.masters != "float32"
        return self.stage < 3 or self.offload is not None or bool(self.params_axis) or has_narrow_masters

    @property
    def params_on_disk(self) -> bool:
        return self.offload is not None and self.offload.params == "disk"

    @property
    def shared_bytes(self) -> int:
        """Return the size limit, in logical bytes, of a gather that several blocks share. On CPUs, return 0.

        On CPUs, sharing saves no time, because a collective starts at once. With jax 0.10, sharing also slows
        compilation: 6.0 s, not 1.7 s, for the gradient of 64 small layers. With jax 0.12, it does not.
        """
        is_cpu = isinstance(self.mesh, jax.sharding.AbstractMesh) or self.mesh.devices.flat[0].platform == "cpu"
        return 0 if is_cpu else min(SHARED_BYTES, self.bucket_bytes)

    @property
    def has_master_weights(self) -> bool:
        """Return whether the optimizer state has master weights, of which the parameters are a narrower copy."""
        precision = self.precision
        return precision is not None and self.stores_compute_dtype and precision.compute != precision.master

    @functools.cached_property
    def data(self) -> DataMesh:
        """Return the axes that divide the batch, and the axes that shard parameters, gradients and optimizer state."""
        over = self.shard_axis, self.params_axis, self.expert_axis
        return DataMesh.for_stage(dict(self.mesh.shape), self.axis, self.stage, *over)

    @functools.cached_property
    def layout_policy(self) -> LayoutPolicy:
        params_on_host = self.offload is not None and self.offload.params == "host"
        options = self.stores_compute_dtype, params_on_host, self.state is not None
        return LayoutPolicy(self.stage, self.data, self.persist_below, *options)


def mesh_record(mesh: Mesh) -> tuple:
    """Return the arguments with which `rebuilt_mesh` makes an equal mesh."""
    devices = list(mesh.devices.flat)
    ids = tuple(device.id for device in devices)
    return mesh.devices.shape, mesh.axis_names, tuple(mesh.axis_types), devices[0].platform, ids


def rebuilt_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], types: tuple[AxisType, ...], platform: str, ids: tuple[int, ...]
) -> Mesh:
    """Rebuild a mesh from the devices of this process. Raise a ValueError if a device is missing."""
    try:
        devices = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # this process has no such platform
        devices = {}
    if missing := [i for i in ids if i not in devices]:
        axes = dict(zip(names, shape, strict=True))
        raise ValueError(
            f"A pickled transformation has a mesh {axes} with the {platform} devices {list(ids)}, "
            f"and this process has no device {missing[0]}, only {sorted(devices) or 'devices of other platforms'}. "
            f"A mesh is rebuilt from device ids: load the transformation where JAX sees the same devices (after "
            f"jax.distributed.initialize), or make it there with zero_shard."
        )
    found = np.array([devices[i] for i in ids]).reshape(shape)
    return Mesh(found, names, axis_types=types)
