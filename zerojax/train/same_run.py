"""What has to be the same on every process of a run; compared before the first collective that would wait for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from zerojax import compat
from zerojax.comm.processes import require_same
from zerojax.config import Config
from zerojax.optim.plan import ShardingPlan, choose_update

OF_OFFLOAD = ("optimizer", "params", "update", "fraction", "chunk_bytes")  # each host has its own folder


def live_plan(config: Config, plan: ShardingPlan) -> ShardingPlan:
    """The plan of a run that begins: the same on every process, with where the update of what is offloaded runs.

    Raises:
        ValueError: If the processes have other options, parameters or versions.
        TimeoutError: If one does not begin a run.
    """
    if not compat.is_tracing():
        require_same("begin", run_record(config, plan))
    return dataclasses.replace(plan, choice=choose_update(config, plan))


def run_record(config: Config, plan: ShardingPlan) -> dict[str, str]:
    """Options, versions and leaves of a run, by name."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options |= {"user_mesh": dict(config.mesh.shape), "tx": None, "trainable": config.trainable is not None}
    options["overwrite"] = config.overwrite is not None
    if config.offload is not None:
        options["offload"] = {name: getattr(config.offload, name) for name in OF_OFFLOAD}
    leaves = {f"params{leaf.path}": leaf for leaf in plan.layout.params}
    leaves |= {f"opt_state{leaf.path}": leaf for leaf in plan.state}
    of = lambda leaf: ", ".join(filter(None, (f"{leaf.dtype}{list(leaf.shape)}", leaf.kind, leaf.sent)))
    described = {path: of(leaf) for path, leaf in leaves.items()}
    return {"jax": jax.__version__} | {name: str(in_words(value)) for name, value in options.items()} | described


def in_words(value: Any) -> Any:
    """An option as every process writes it: of a function only that it is there."""
    if dataclasses.is_dataclass(value):
        return {field.name: in_words(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return "a function" if callable(value) else value


class SameSteps:
    """The first step with arguments of some shapes is the same on every process."""

    def __init__(self, options: Any):
        """Nothing is compared yet."""
        self._options, self._seen = repr(options), set()

    def check(self, step: jax.Array, batch: Any, args: tuple) -> bool:
        """Compare with the others where the arguments have shapes that none had before; whether they have.

        Raises:
            ValueError: If they differ in shapes, options or the step that they are at.
            TimeoutError: If a process takes no step.
        """
        leaves = jax.tree_util.tree_leaves_with_path({"batch": batch, "args": args})
        type_of = lambda x: getattr(x, "dtype", type(x).__name__)
        record = {jax.tree_util.keystr(path): f"{type_of(x)}{list(np.shape(x))}" for path, x in leaves}
        key = tuple(record.items())
        if key in self._seen:
            return False
        self._seen.add(key)
        if jax.process_count() > 1:
            at = str(np.asarray(step.addressable_data(0)))
            require_same("step", {"options": self._options, "step": at} | record)
        return True
