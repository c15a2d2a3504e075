"""The option `Tuning`: settings of memory, bytes sent and time. A step computes the same values with all of them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax

from zerojax.config.checks import check_count, check_flag, check_word
from zerojax.config.config import BUCKET_BYTES, PERSIST_BELOW, Config
from zerojax.config.data_mesh import resolve_axes
from zerojax.units import parse_bytes

# In hybrid sharding, a step has collectives over NVLink and over the network, which do not share a link. With this
# option, XLA's scheduler may run both at once. `xla_gpu_memory_limit_slop_factor` is not set: a lower limit saves
# memory, but XLA keeps within the limit by repeating matrix products, and not by another schedule.
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
# XLA of jax 0.12 ends the process when it compiles its kernel for small all-reduces for a scalar and more than 32 GPUs.
# The sum of a microbatch's loss is such a scalar. With an empty list of kernels, NCCL computes small all-reduces.
SMALL_KERNEL, MOST_OF_KERNEL = "xla_gpu_experimental_use_collective_kernels", 32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Settings that change the memory, the bytes sent and the time of a step, but only the rounding of its results.

    The defaults are right for most models on the GPUs of one host. `zerojax.report` and `zerojax.plan` show what a
    setting costs.

    Attributes:
        shard_axis: The axes of `axis` over which the stage shards, such as `"gpu"`. Over the other axes, everything is
            replicated (hybrid sharding, HSDP). A step needs as much memory per device as a run on one host, and sends
            fewer bytes between hosts. None: all axes of `axis`.
        params_axis: Stage 3: the axes of `axis` over which parameters are sharded and gathered, such as `"gpu"`, within
            a host. Gradients and optimizer state are sharded over all of `axis`. Parameters need more memory, and are
            not gathered between hosts. None: the axes of gradients and optimizer state.
        reshard_after_forward: Stage 3: whether gathered parameters are freed after the forward pass, and gathered again
            for the backward pass. If False, they are kept, all in memory at once, and a step moves 2 times the
            parameters' bytes, not 3 times. Default: True.
        prefetch: Stage 3: how many groups of blocks ahead a gather may start. A group is one block, or several small
            ones. Each group ahead costs the memory of about one gathered layer. A scan prefetches at most one iteration
            ahead. 0 disables prefetch. Default: 1.
        bucket_bytes: Leaves of a layer share a collective up to this size, in logical bytes or as text, such as
            `"64 MiB"`. Larger buckets need more memory while they are sent, and there are fewer collectives. 0: each
            leaf has its own collective. Default: 128 MiB.
        persist_below: A leaf with fewer elements is not sharded along a dim. Its parameter stays replicated at stage 3.
            If its update is elementwise, its gradient and optimizer state are flattened, and sharded in this form. A
            larger number needs more memory, and gathers fewer leaves. Default: 8192.
        matrix_updates: Which devices compute updates that multiply matrices, such as Muon's. `"owner"`: one device per
            matrix, or a few devices per matrix if there are fewer matrices than devices. `"sharded"`: all devices share
            each product. `"auto"`: the choice with the shorter estimated time, which `zerojax.report` shows.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a number is negative, a word is unknown, or an axis is named twice.

    References:
        Zhang et al. 2022, arXiv 2205.00119 (MiCS: `shard_axis`); Wang et al. 2023, arXiv 2306.10209, section 3.3 (hpZ:
        `params_axis`).

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3, tuning=Tuning(prefetch=2, bucket_bytes="64 MiB"))
    """

    shard_axis: str | tuple[str, ...] | None = None
    params_axis: str | tuple[str, ...] | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    bucket_bytes: int | str = BUCKET_BYTES
    persist_below: int = PERSIST_BELOW
    matrix_updates: Literal["auto", "owner", "sharded"] = "auto"

    def __post_init__(self):
        """Check every field, and convert axes to tuples and sizes to bytes."""
        for name in ("shard_axis", "params_axis"):
            object.__setattr__(self, name, resolve_axes(getattr(self, name), name))
        check_flag("reshard_after_forward", self.reshard_after_forward)
        object.__setattr__(self, "bucket_bytes", parse_bytes("bucket_bytes", self.bucket_bytes))
        for name, unit in {"persist_below": "elements", "prefetch": "groups", "bucket_bytes": "bytes"}.items():
            check_count(name, getattr(self, name), unit, least=0)
        check_word("matrix_updates=", self.matrix_updates, ("auto", "owner", "sharded"))


def fields_of(tuning: Any) -> dict[str, Any]:
    """Return the fields of a `Tuning` by name, as `Config` has them. Raise a TypeError for another object."""
    if not isinstance(tuning, Tuning):
        raise TypeError(f"tuning is a zerojax.Tuning, such as Tuning(prefetch=2), not {tuning!r}.")
    return vars(tuning)


def unknown_option(function: str, name: str, value: Any) -> TypeError:
    """Return the error for an option that `function` does not have. If `Tuning` has it, the error says so."""
    if name in Tuning.__dataclass_fields__:
        return TypeError(
            f"{function}() has no option {name!r}, which is a field of Tuning. Give tuning=Tuning({name}={value!r})."
        )
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}. help({function}) lists its options.")


def options_of_mesh(config: Config) -> Mapping[str, Any]:
    """Return the options with which a step is compiled if the user gives none. `XLA_FLAGS` has priority."""
    if not is_gpu(config) or config.params_on_disk:
        return {}
    data, found = config.data, {}
    if config.stage > 0 and 1 < data.size(data.across) < data.workers:
        found[OVERLAP] = 2
    if config.mesh.size > MOST_OF_KERNEL and jax.__version_info__[:2] == (0, 12):
        found[SMALL_KERNEL] = ""
    return {name: value for name, value in found.items() if name not in os.environ.get("XLA_FLAGS", "")}


def is_gpu(config: Config) -> bool:
    return config.mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")
