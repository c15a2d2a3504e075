"""Keyword options that planning functions share with `zero_shard` and `train_step`, by name and type."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from zerojax.config import Offload, Precision, Wire


class LossOptions(TypedDict, total=False):
    """Options that say what a loss function returns, as for `train_step`."""

    has_aux: bool
    weighted: bool


class EstimateOptions(LossOptions, total=False):
    """Further arguments of the loss, a GPU to compile for, and options of `zero_shard`."""

    args: Sequence[Any]
    gpu: str | None

    precision: Precision | None
    offload: Offload | None
    persist_below: int
    prefetch: int
    trainable: Any
    overwrite: Any
    shard_axis: str | tuple[str, ...] | None
    params_axis: str | tuple[str, ...] | None
    expert_axis: str | tuple[str, ...] | None
    wire: Wire | None


class HardwareOptions(TypedDict, total=False):
    """Options that become the fields of `Hardware`."""

    memory: float | str | None
    link: float | None
    network: float | None
    host_link: float | None
    disk: float | None
    rates: Any


class FitOptions(LossOptions, HardwareOptions, total=False):
    """Rows of the batch to try, whether layers may recompute activations, the loss's options, and the GPU's figures."""

    rows: int | Sequence[int] | None
    recompute: bool


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    others = dict(options)
    return {name: others.pop(name, False) for name in LossOptions.__annotations__}, others
