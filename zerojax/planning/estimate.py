"""Estimate bytes per device and bytes sent, for every stage, before any array is made.

The shapes of the optimizer's state come from `jax.eval_shape` of the transformation's `init`, and are sharded as in
training. Activations are not included: they depend on the model's code. `zerojax.plan` compiles a step to measure them.
"""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.comm.mesh import auto_context
from zerojax.config import STAGES, Config, check_count, resolve_axes
from zerojax.config.chosen import LeafMask
from zerojax.config.precision import Precision
from zerojax.config.tuning import Tuning, fields_of, unknown_option
from zerojax.config.wire import Wire
from zerojax.gpus.devices import Topology, abstract_mesh
from zerojax.narrow_state.option import Narrow
from zerojax.offload.options import Offload
from zerojax.optim.sharding_plan import make_plan
from zerojax.planning.absent_program import is_array, named_sharding
from zerojax.planning.stage_bytes import HOST, StageEstimate, estimate_stage
from zerojax.units import format_bytes
from zerojax.zero import ZeroTransformation

if TYPE_CHECKING:
    from jaxtyping import PyTree


class EstimateOptions(TypedDict, total=False):
    """The options of `zero_shard` that `estimate` accepts."""

    precision: Precision | None
    offload: Offload | None
    trainable: Any
    overwrite: Any
    expert_axis: str | tuple[str, ...] | None
    wire: Wire | None
    state: Narrow | None
    tuning: Tuning | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A table of estimates, with one row per stage and number of devices.

    Attributes:
        parameters: Elements of all parameters.
        trained: Elements of trained parameters.
        rows: The rows, in the order of the arguments `devices` and `stages`.
    """

    parameters: int
    trained: int
    rows: tuple[StageEstimate, ...]

    def __getitem__(self, stage: int) -> StageEstimate:
        """Return the row of a stage, for the first number of devices.

        Raises:
            KeyError: If the estimate does not have this stage.
        """
        return {row.stage: row for row in reversed(self.rows)}[stage]

    def __str__(self) -> str:
        offloaded = [name for name in ("host", "disk") if any(getattr(row, name) for row in self.rows)]
        hosts = ["across"] if any(row.across is not None for row in self.rows) else []
        # If only optimizer state is on disk, `read` and `written` equal `disk`. Then these two columns are left out.
        traffic = ["read", "written"] if any(row.read != row.disk for row in self.rows) else []
        states = ["params", "grads", "master", "opt_state", "total", "gathered"]
        columns = [*states, *offloaded, *traffic, "sent", *hosts]
        lines = [f"{self.parameters:,} parameters; bytes per device"]
        lines.append("stage  devices" + "".join(f"{name:>12s}" for name in columns))
        for row in self.rows:
            cells = "".join(f"{format_bytes(getattr(row, name)):>12s}" for name in columns)
            lines.append(f"{row.stage:5d}  {row.devices:7d}{cells}")
        return "\n".join(lines)


@auto_context()
def estimate(
    model: Any,
    *,
    tx: optax.GradientTransformation | None = None,
    devices: int | str | Sequence[int | str] = 8,
    stages: Sequence[int] = tuple(STAGES),
    accumulate: int = 1,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """Estimate bytes per device and bytes sent per step, for every stage, without making arrays.

    Args:
        model: A number of parameters (such as `7.5e9`, taken as one long vector), a tree of parameters or of their
            shapes, or an NNX module. For a Linen module, give `jax.eval_shape(module.init, key, x)`.
        tx: The optax transformation, whose state is counted. Default: `optax.adam`.
        devices: Number of data-parallel workers. Several numbers give several rows per stage. A topology of hosts x
            GPUs, such as `"h100:128x8"`, has the axes `"host"` and `"gpu"`, and adds a column of bytes across hosts.
        stages: ZeRO stages, in the order of the rows.
        accumulate: Microbatches per step. With more microbatches, stages 2 and 3 send more.
        **options: As for `zero_shard`: `precision` (default for a number of parameters: bfloat16), `offload` (ignored
            at stage 0), `trainable`, `overwrite`, `wire` (at stages that support it), `expert_axis` for shapes whose
            `NamedSharding` or Flax metadata names it, `state`, and `tuning`, such as `Tuning(shard_axis="gpu")` with
            hosts. Its `params_axis` counts at stage 3 only, and its `persist_below` is ignored if `model` is a number.

    Returns:
        An `Estimate`, whose rows are in the order of `devices`, then of `stages`.

    Raises:
        TypeError: If `model` has another type, a count is not an integer, or an option is unknown.
        ValueError: If a count is not positive, or a stage is unknown.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5, table 1.

    Examples:
        >>> round(estimate(7.5e9, devices=64)[1].total / 1e9, 1)
        31.4
    """
    number = float(model) if isinstance(model, numbers.Real) else None
    check_count("accumulate", accumulate, "microbatches", least=1)
    if isinstance(tx, ZeroTransformation):
        raise TypeError(
            "tx is a transformation of zero_shard, and estimate wraps tx itself, at every stage. Give the "
            "transformation that zero_shard wraps, and its options as options, such as precision=."
        )
    tx = optax.adam(1e-3) if tx is None else tx
    rows, size, trained = [], 0, 0
    for count in (devices,) if isinstance(devices, str) or not isinstance(devices, Sequence) else devices:
        axes = mesh_axes(count)
        width = narrow.block if (narrow := options.get("state")) else 1
        params = model_shapes(model) if number is None else vector(number, axes["user_mesh"].size, width)
        for stage in stages:
            config = Config(tx, stage, **axes, **config_options(dict(options), number, stage))
            plan = make_plan(config, params)
            layout = plan.layout
            row = estimate_stage(config, plan, accumulate)
            rows.append(row if number is None else dataclasses.replace(row, gathered=None))
            size = sum(leaf.size for leaf in layout.params)
            trained = sum(layout.params[i].size for i in layout.trained)
    if number is not None:  # do not count the elements that `vector` adds
        size = trained = int(number)
    return Estimate(size, trained, tuple(rows))


def mesh_axes(devices: int | str) -> dict[str, Any]:
    """Return the mesh and data axes of a number of devices, or of a topology, as fields of a `Config`."""
    if not isinstance(devices, str):
        check_count("devices", devices, "devices", least=1)
        return {"user_mesh": abstract_mesh(devices)}
    parsed, axes = Topology.parse(devices), (HOST, "gpu")
    return {"user_mesh": abstract_mesh(parsed.size, axes, hosts=parsed.hosts), "axis": axes}


def config_options(options: dict[str, Any], number: float | None, stage: int) -> dict[str, Any]:
    """Return options as fields of a `Config` for one stage. `number` is given if only the parameter count is known."""
    if unknown := sorted(set(options) - set(EstimateOptions.__annotations__)):
        if unknown[0] in Tuning.__dataclass_fields__:
            raise unknown_option("estimate", unknown[0], options[unknown[0]])
        raise TypeError(
            f"estimate() has no option {unknown[0]!r}. It has {', '.join(EstimateOptions.__annotations__)}."
        )
    changed: dict[str, Any] = {} if stage else {"offload": None}
    for name in ("trainable", "overwrite"):
        mask = options.get(name)
        changed[name] = mask if mask is None or callable(mask) else LeafMask.of(mask, name)
    changed["expert_axis"] = resolve_axes(options.get("expert_axis"), "expert_axis")
    changed |= fields_of(options.get("tuning") or Tuning())
    if stage < 3:
        changed["params_axis"] = ()
    if wire := options.get("wire"):
        everywhere = {} if number is None else {"where": lambda path, leaf: True}
        gather = wire.gather if stage == 3 else None
        sends = gather or (wire.reduce and stage)
        changed["wire"] = dataclasses.replace(wire, gather=gather, **everywhere) if sends else None
    if number is not None:
        changed |= {"persist_below": 0, "precision": options.get("precision") or Precision.bf16()}
    return {name: value for name, value in options.items() if name != "tuning"} | changed


def vector(count: float, devices: int, width: int) -> PyTree:
    """Return `count` parameters as rows of `width`. The number of rows is rounded up to a multiple of `devices`."""
    if not 1 <= count < np.inf:
        raise ValueError(f"The model has {count} parameters; a count of at least 1 is required, such as 7.5e9.")
    rows = -(-int(count) // width)
    shape = (rows + -rows % devices, width)
    return {"parameters": jax.ShapeDtypeStruct(shape if width > 1 else shape[:1], jnp.float32)}


def model_shapes(model: Any) -> PyTree:
    """Return the shapes of a tree of parameters, or of an NNX module's parameters."""
    name = type(model).__name__
    if nnx := sys.modules.get("flax.nnx"):  # an nnx module exists only if flax.nnx was imported
        model = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    leaves = jax.tree_util.tree_leaves_with_path(model)
    others = [(path, x) for path, x in leaves if not is_array(x)]
    if 0 < len(others) < len(leaves):
        path, x = others[0]
        raise TypeError(
            f"{name}{jax.tree_util.keystr(path)} is a {type(x).__name__} and not an array. estimate takes only the "
            f"parameters of a model. Give its arrays, such as equinox.filter(model, equinox.is_array)."
        )
    if not leaves or others:
        raise TypeError(
            f"estimate takes a number of parameters, a tree of arrays or shapes, or an NNX module, not {name}. "
            f"For example jax.eval_shape(init, key), and of a Linen module jax.eval_shape(module.init, key, x)."
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named_sharding(x)), model)
