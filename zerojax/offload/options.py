"""Define the option `Offload`, which says which model states leave device memory."""

import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import Config, check_word
from zerojax.config.chosen import checked_where, chooses
from zerojax.offload.host import check_host_memory, host_sharding
from zerojax.units import parse_bytes

CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Offload:
    """The model states that are kept outside of device memory, and where they are updated.

    Each device's shard of the optimizer state, including master weights, is kept in pinned memory or in files of the
    device's host. It is fetched, updated and written back chunk by chunk, and the transfers of different chunks
    overlap. Arrays of fewer than `persist_below` elements, such as scalars, stay on the device. If `precision` computes
    in a narrower type, stage 3 stores the parameters on the device in that type.

    Attributes:
        optimizer: Where the optimizer state is kept: `"host"` (pinned host memory) or `"disk"` (files under `path`).
        params: `"host"`: stage 3 keeps shards of parameters in host memory, and copies each of them to the device for a
            gather or an update. The device then holds only the shards for the next few uses. Gradients, and parameters
            of fewer than `persist_below` elements, stay on the device. `"disk"`: stage 3 keeps parameters, gradients
            and the optimizer state in files under `path`. A step then runs in stages, which read the parameters of a
            few layers at a time. None: all parameters stay on the device.
        update: Where the optax update runs. `"device"`: chunks of the state are copied to the device and back.
            `"host"`: gradients are sent to the host, and new parameters back.
        fraction: The fraction of the optimizer state's bytes that is offloaded, from 0 to 1.
        where: The parameters whose state may be offloaded: `where(path, leaf) -> bool`, as for `Precision.keep`, or
            shell patterns such as `("*/kernel",)`. None: all.
        path: For `optimizer="disk"`: the folder for the files. Each process creates a folder inside it.
        chunk_bytes: The largest number of bytes per device that is copied at once, or text such as `"32 MiB"`.
        device_bytes: For `optimizer="host"` and `update="device"`: bytes per device for chunks that stay on the device
            between steps and are not transferred; a number, or text such as `"8 GB"`. Unlike `fraction`,
            this can keep a part of a leaf on the device. None: no chunk stays.
        host_bytes: For `params="disk"`: bytes of host memory per process; a number, or text such as `"8 GB"`. Buffers
            take a part. The rest keeps parameters and gradients that would otherwise be on disk. None: only buffers.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a word is unknown, a number is out of range, or fields contradict each other.

    References:
        Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload); Rajbhandari et al. 2021, arXiv 2104.07857 (ZeRO-Infinity).

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3, offload=Offload(optimizer="host"))
    """

    argument = "offload"  # of `zero_shard`

    optimizer: Literal["host", "disk"] | None = None
    params: Literal["host", "disk"] | None = None
    update: Literal["device", "host"] = "device"
    fraction: float = 1.0
    where: Callable[[str, Any], bool] | tuple[str, ...] | None = None
    path: str | os.PathLike | None = None
    chunk_bytes: Any = CHUNK_BYTES
    host_bytes: int | str | None = None
    device_bytes: Any = None

    def __post_init__(self):
        """Check every field, and convert `path` to a string and `where` to a function or a tuple."""
        check_word("Offload(optimizer=)", self.optimizer, (None, "host", "disk"))
        check_word("Offload(params=)", self.params, (None, "host", "disk"))
        check_word("Offload(update=)", self.update, ("device", "host"))
        if self.optimizer is None:
            why = "offloads parameters without their optimizer state" if self.params else "offloads nothing"
            given = f"params={self.params!r}" if self.params else ""
            raise ValueError(f'Offload({given}) {why}. Give optimizer="host" or optimizer="disk".')
        fraction = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
            raise ValueError(
                f"Offload(fraction={fraction!r}) is not valid. Give a number from 0 to 1, or device_bytes= instead."
            )
        for name, least in (("chunk_bytes", 1), ("host_bytes", 1), ("device_bytes", 0)):
            if name == "chunk_bytes" or getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(f"Offload({name}=)", getattr(self, name), least=least))
        self._check_together()
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
            if not self.path:
                raise ValueError('Offload(path="") names no folder. Give one, or "." for this one.')
        object.__setattr__(self, "where", checked_where("Offload(where=)", self.where))

    def _check_together(self) -> None:
        with_params = {"optimizer": "disk", "fraction": 1, "where": None, "update": "device"}
        for name, wanted in with_params.items() if self.params == "disk" else ():
            if (given := getattr(self, name)) != wanted:
                raise ValueError(
                    f'Offload(params="disk", {name}={given!r}) is not possible: the device updates chunks of '
                    f"parameters on disk together with their optimizer state, so that state must be on disk as well. "
                    f"Give {name}={wanted!r}."
                )
        if self.host_bytes is not None and self.params != "disk":
            raise ValueError(
                f'Offload(host_bytes={self.host_bytes}) bounds the host memory of params="disk", and '
                f"params={self.params!r}. Leave it out, or keep the parameters on disk."
            )
        if self.device_bytes is not None and (self.optimizer, self.update) != ("host", "device"):
            raise ValueError(
                f"Offload(device_bytes={self.device_bytes}) keeps chunks in device memory, instead of in host memory, "
                f"that the device updates, and here optimizer={self.optimizer!r} and update={self.update!r}. Give "
                f'optimizer="host" and update="device", or fraction= instead of device_bytes=.'
            )
        if (self.path is not None) != (self.optimizer == "disk"):
            raise ValueError(
                f"Offload(optimizer={self.optimizer!r}, path={self.path!r}) contradicts itself: path= is the folder "
                f'for the files of optimizer="disk". Give both, or neither.'
            )

    def check(self, config: Config) -> None:
        """Raise a ValueError if another option contradicts this one.

        Args:
            config: The configuration with all options.
        """
        if config.stage == 0:
            raise ValueError(
                "Stage 0 shards nothing, so every device would keep the full optimizer state on the host. "
                "Use offload= at stage 1, 2 or 3."
            )
        if self.params is not None and config.stage != 3:
            raise ValueError(
                f"Offload(params={self.params!r}) needs stage 3: at stage {config.stage} each device holds all "
                f"parameters. Use stage=3, or leave params= out."
            )
        if self.params is not None and config.params_axis:
            raise ValueError(
                f"Offload(params={self.params!r}) shards a parameter like its optimizer state, but "
                f"Tuning(params_axis=) shards it over fewer axes. Give one of them."
            )
        plain = {"view": "global", "expert_axis": (), "shard_axis": (), "wire": None, "overwrite": None}
        for name, wanted in plain.items() if self.params == "disk" else ():
            if (given := getattr(config, name)) != wanted:
                raise ValueError(
                    f'{name}={given!r} is not possible with Offload(params="disk"), whose step runs in stages. Leave '
                    f"it out, or keep the parameters in memory."
                )

    def require_jit(self) -> None:
        """Raise a ValueError if `jax.jit` is disabled, because compiled programs say in which memory arrays are."""
        settings: Any = jax.config
        if settings.jax_disable_jit:
            raise ValueError(
                "JAX_DISABLE_JIT (or jax.disable_jit) is on, and offload= needs compiled programs, which say in which "
                "memory each array is. Leave one of them out: without offload= the numbers are the same."
            )

    def host_sharding(self, mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of an array in host memory.

        Args:
            mesh: The mesh whose devices read the array.
            spec: The spec of the stored array.
        """
        return host_sharding(mesh, spec)

    def check_host_memory(self, mesh: Mesh, bytes_per_device: int) -> None:
        """Raise a `MemoryError` if parameters do not fit into host memory.

        Args:
            mesh: The mesh whose hosts keep the parameters.
            bytes_per_device: Bytes of one device's shards of the parameters.
        """
        check_host_memory(mesh, bytes_per_device, "Offload(params=)")

    def covers(self, path: str, leaf: Any) -> bool:
        """Return whether `where` lets the state of a parameter be offloaded.

        Args:
            path: The path of the parameter, "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
        """
        return self.where is None or chooses(self.where, path, leaf)
