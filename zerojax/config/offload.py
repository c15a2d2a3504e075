"""Which model states are offloaded from the device's memory, and where they are updated."""

from __future__ import annotations

import dataclasses
import fnmatch
import numbers
import os
from collections.abc import Callable
from typing import Any, Literal

from zerojax.config.checks import byte_count, check_count, check_word

CHUNK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Offload:
    """What is offloaded from the device's memory, and where it is updated.

    Optimizer state, with the master weights, is kept in pinned host memory or in files, each
    device's part with the device's host, in chunks that are fetched, updated and put back
    while their neighbours are transferred. Arrays of fewer than `persist_below` elements, scalars
    among them, stay on the device. Where `precision` computes in a narrower type, stage 3
    keeps its shards in that type: the master weights are offloaded with the optimizer state.

    Attributes:
        optimizer: `"host"`: pinned host memory. `"disk"`: files under `path`. None: the device.
        params: `"host"`: at stage 3, shards of parameters are kept in host memory and
            fetched where they are gathered, in each pass again, and for their update: the
            device holds those of a few uses or of two updates. Gradients, and leaves below
            `persist_below`, are on the device. `"disk"`: at stage 3, with the optimizer state, in files under
            `path`, and gradients too. A step then runs in stages, which read the parameters of a few layers at a
            time. None: the device.
        update: Where the optax update runs. `"device"`: the state is streamed through
            the device. `"host"`: gradients are sent to the host, and new parameters back.
            `"auto"`: link and host memory are measured once, and the faster way is taken.
        fraction: How much of the optimizer state is offloaded, by bytes, from 0 to 1; the
            rest stays on the device. `"auto"`: as little as `budget` allows.
        budget: For `fraction="auto"`: bytes a device has for parameters, gradients,
            optimizer state and the chunks under way; activations are beyond it.
        where: Parameters whose state may be offloaded: `where(path, leaf) -> bool`, as for
            `Precision.keep`, or shell patterns such as `("*/kernel",)`. None: all.
        path: For `"disk"`: the folder of the files; each process makes its own in it.
        chunk_bytes: Bytes per device of the largest chunk of an array that is copied at once.
        host_bytes: For `params="disk"`: bytes of host memory, per process, for buffers and for the parameters and
            gradients that are kept there in place of the disk; a number, or text such as `"8 GB"`. None: buffers alone.

    Raises:
        TypeError: If a field is of another type.
        ValueError: If a word is unknown, a number out of range, or fields do not go together.

    References:
        Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload); Rajbhandari et al. 2021, arXiv
        2104.07857 (ZeRO-Infinity).
    """

    optimizer: Literal["host", "disk"] | None = None
    params: Literal["host", "disk"] | None = None
    update: Literal["auto", "device", "host"] = "auto"
    fraction: float | Literal["auto"] = 1.0
    budget: int | None = None
    where: Callable[[str, Any], bool] | tuple[str, ...] | None = None
    path: str | os.PathLike | None = None
    chunk_bytes: int = CHUNK_BYTES
    host_bytes: int | str | None = None

    def __post_init__(self):
        """Check every field, and write paths and patterns in one way."""
        check_word("Offload(optimizer=)", self.optimizer, (None, "host", "disk"))
        check_word("Offload(params=)", self.params, (None, "host", "disk"))
        check_word("Offload(update=)", self.update, ("auto", "device", "host"))
        check_count("Offload(chunk_bytes=)", self.chunk_bytes, "bytes", least=1)
        if self.optimizer is None:
            beside = "; the update of offloaded parameters goes through the host" if self.params else ""
            raise ValueError(f'Offload() moves nothing without optimizer="host" or optimizer="disk"{beside}.')
        self._check_fraction()
        self._check_params()
        if (self.path is not None) != (self.optimizer == "disk"):
            raise ValueError(
                f'Offload(optimizer={self.optimizer!r}, path={self.path!r}): optimizer="disk" needs path=, the folder '
                f"for its files, and nothing else takes one."
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
            if not self.path:
                raise ValueError('Offload(path="") names no folder. Give one, or "." for this one.')
        if self.where is not None and not callable(self.where):
            patterns = (self.where,) if isinstance(self.where, str) else tuple(self.where)
            if not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"Offload(where=) is a function of (path, leaf) or shell patterns, not {self.where!r}.")
            object.__setattr__(self, "where", patterns)

    def _check_params(self) -> None:
        if self.host_bytes is not None:
            object.__setattr__(self, "host_bytes", byte_count("Offload(host_bytes=)", self.host_bytes))
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
                    f'Offload(params="disk", {name}={given!r}): a parameter on disk is updated chunk by chunk with its '
                    f"optimizer state, so all of that state is on disk, too. Give {name}={wanted!r}."
                )
        if self.update == "host":
            raise ValueError(
                'Offload(params="disk", update="host"): chunks pass through the device, where they are updated. Give '
                'update="device" or "auto".'
            )

    def _check_fraction(self) -> None:
        fraction = self.fraction
        if fraction == "auto":
            if self.budget is None:
                raise ValueError('Offload(fraction="auto") needs budget=, the bytes a device has for model states.')
            return check_count("Offload(budget=)", self.budget, "bytes", least=1)
        if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
            raise ValueError(f'Offload(fraction=) is a number from 0 to 1 or "auto", not {fraction!r}.')
        if self.budget is not None:
            raise ValueError('Offload(budget=) is for fraction="auto" alone.')
        return None

    def covers(self, path: str, leaf: Any) -> bool:
        """Return whether the state of the parameter at a path may be offloaded.

        Args:
            path: "/"-separated.
            leaf: A `jax.ShapeDtypeStruct` of logical shape.
        """
        if self.where is None:
            return True
        if callable(self.where):
            return bool(self.where(path, leaf))
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.where)
