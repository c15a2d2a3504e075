"""The options `Offload` (which model states leave device memory) and `Wire` (which collectives send quantised data)."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal

from zerojax.config.checks import check_count, check_word, checked_where, chooses
from zerojax.units import parse_bytes

CHUNK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
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
        device_bytes: For `optimizer="host"` and `update="device"`: bytes per device of chunks that stay on the device
            between steps, so that they do not cross the link; a number, or text such as `"8 GB"`. Other than with
            `fraction`, a part of a leaf can stay. None: no chunk stays.
        host_bytes: For `params="disk"`: bytes of host memory, per process, for buffers and for the parameters and
            gradients that are kept there instead of on disk; a number, or text such as `"8 GB"`. None: only buffers.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a word is unknown, a number is out of range, or fields contradict each other.

    References:
        Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload); Rajbhandari et al. 2021, arXiv 2104.07857 (ZeRO-Infinity).

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3, offload=Offload(optimizer="host"))
    """

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
        object.__setattr__(self, "chunk_bytes", parse_bytes("Offload(chunk_bytes=)", self.chunk_bytes, least=1))
        if self.optimizer is None:
            why = "offloads parameters without their optimizer state" if self.params else "offloads nothing"
            given = f"params={self.params!r}" if self.params else ""
            raise ValueError(f'Offload({given}) {why}. Give optimizer="host" or optimizer="disk".')
        fraction = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
            raise ValueError(
                f"Offload(fraction={fraction!r}) is not valid. Give a number from 0 to 1, or device_bytes= instead."
            )
        self._check_params()
        self._check_device_bytes()
        if (self.path is not None) != (self.optimizer == "disk"):
            raise ValueError(
                f"Offload(optimizer={self.optimizer!r}, path={self.path!r}) contradicts itself: path= is the folder "
                f'for the files of optimizer="disk". Give both, or neither.'
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
            if not self.path:
                raise ValueError('Offload(path="") names no folder. Give one, or "." for this one.')
        object.__setattr__(self, "where", checked_where("Offload(where=)", self.where))

    def _check_params(self) -> None:
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", parse_bytes("Offload(host_bytes=)", self.host_bytes, least=1))
            if self.params != "disk":
                raise ValueError(
                    f'Offload(host_bytes={self.host_bytes}) bounds the host memory of params="disk", and '
                    f"params={self.params!r}. Leave it out, or keep the parameters on disk."
                )
        if self.params != "disk":
            return
        found = {"optimizer": (self.optimizer, "disk"), "fraction": (self.fraction, 1), "where": (self.where, None)}
        for name, (given, wanted) in found.items():
            if given != wanted:
                raise ValueError(
                    f'Offload(params="disk", {name}={given!r}) is not possible: chunks of parameters on disk are '
                    f"updated together with their optimizer state, so that state must be on disk as well. Give "
                    f"{name}={wanted!r}."
                )
        if self.update == "host":
            raise ValueError(
                'Offload(params="disk", update="host") is not possible: the device updates the chunks of parameters on '
                'disk. Give update="device".'
            )

    def _check_device_bytes(self) -> None:
        if self.device_bytes is None:
            return
        object.__setattr__(self, "device_bytes", parse_bytes("Offload(device_bytes=)", self.device_bytes, least=0))
        if self.optimizer != "host" or self.update != "device":
            raise ValueError(
                f"Offload(device_bytes={self.device_bytes}) keeps chunks in device memory, instead of in host memory, "
                f"that the device updates, and here optimizer={self.optimizer!r} and update={self.update!r}. Give "
                f'optimizer="host" and update="device", or fraction= instead of device_bytes=.'
            )

    def covers(self, path: str, leaf: Any) -> bool:
        """Return whether `where` lets the state of a parameter be offloaded.

        Args:
            path: The path of the parameter, "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
        """
        return self.where is None or chooses(self.where, path, leaf)


Format = Literal["int4", "int8", "float8_e4m3fn", "float8_e5m2"]
# Bits per element.
FORMATS = MappingProxyType({"int4": 4, "int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8})
SCALE_BYTES = 4
# The smallest number of blocks per shard. A smaller shard would be mostly padding and scales.
LEAST_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Wire:
    """The collectives that send quantised data. Data is quantised block by block, with one scale per block.

    Stored parameters and optimizer state are not rounded. Only the gathered copies of parameters, and the partial sums
    of gradients that devices send, are rounded. A quantised reduction is one all-to-all per mesh axis, beginning with
    the innermost axis. Each device adds up the received blocks in float32. So a gradient is rounded once per axis.

    Attributes:
        gather: The format in which stage 3 all-gathers parameters, such as `"int8"`. None: not quantised.
        reduce: The format in which gradients are reduce-scattered, such as `"int4"`. None: not quantised.
        block: Number of elements that share a scale. At least 2, and even.
        rounding: How gradients are rounded to integers: `"nearest"` or `"stochastic"`. The expected value of stochastic
            rounding is the exact number. Its pseudo-random bits are a hash of the number and its position.
        over: The mesh axes whose collectives are quantised, such as `"host"`. None: all axes.
        where: The parameters that are quantised: a function of `(path, leaf)`, where `leaf` is a `jax.ShapeDtypeStruct`
            of logical shape, or shell patterns such as `("*/kernel",)`. None: all except vectors and parameters with
            "embed" in their path. Shards of fewer than `8 * block` elements are never quantised.

    Raises:
        TypeError: If `where` or `over` has a wrong type.
        ValueError: If a format is unknown, `block` is odd or below 2, or nothing is quantised.

    References:
        Wang et al. 2023, arXiv 2306.10209, sections 3.2 (qwZ) and 3.4 (qgZ): ZeRO++.

    Examples:
        >>> wire = Wire(gather="int8", reduce="int4")
    """

    gather: Format | None = None
    reduce: Format | None = None
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    over: str | tuple[str, ...] | None = None
    where: Callable[[str, Any], bool] | Sequence[str] | None = None

    def __post_init__(self):
        """Check every field, and convert axes and patterns to tuples."""
        for name in ("gather", "reduce"):
            check_word(f"Wire({name}=)", getattr(self, name), (None, *FORMATS))
        if self.gather is None and self.reduce is None:
            raise ValueError('Wire() quantises nothing. Give gather= or reduce=, such as gather="int8".')
        check_word("Wire(rounding=)", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.reduce not in ("int4", "int8"):
            raise ValueError(
                f'Wire(rounding="stochastic") rounds gradients to integers, and reduce={self.reduce!r} sends none. '
                f'Give reduce="int4" or "int8", or leave rounding out.'
            )
        check_count("Wire(block=)", self.block, "elements", least=2)
        if self.block % 2:
            raise ValueError(f"Wire(block={self.block}) must be even: two elements of 4 bits share a byte.")
        over = (self.over,) if isinstance(self.over, str) else self.over
        if over is not None and (not over or not all(isinstance(axis, str) for axis in over)):
            raise TypeError(f'Wire(over=) names mesh axes, such as "host", not {self.over!r}.')
        object.__setattr__(self, "over", None if over is None else tuple(over))
        object.__setattr__(self, "where", checked_where("Wire(where=)", self.where))

    def reason_against(self, path: str, leaf: Any, shard_size: int) -> str:
        """Return the reason why a parameter is not quantised, or an empty string if it is quantised.

        Args:
            path: The path of the parameter, "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
            shard_size: Number of elements of one device's shard.
        """
        if self.where is None:
            if len(leaf.shape) < 2:
                return "a vector"
            if "embed" in path.lower():
                return "an embedding by its name"
        elif not chooses(self.where, path, leaf):
            return "not in Wire(where=)"
        if shard_size < LEAST_BLOCKS * self.block:
            return f"small: {shard_size} elements per shard, under {LEAST_BLOCKS} blocks of {self.block}"
        return ""
