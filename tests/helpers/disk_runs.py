"""Runs that two processes with parameters on disk, and one process with them in memory, do alike."""

import dataclasses
from collections.abc import Callable

import jax
import optax
from disk_models import LOSSES, batch_of, model_params

DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Run:
    loss: Callable
    steps: int = 3
    tx: Callable = lambda: optax.adamw(1e-2)
    config: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)


def weighted(params, batch):
    weight = batch["tokens"].sum().astype(params["uneven"].dtype)
    return LOSSES["remat_loop"](params, batch) * weight, weight


RUNS = {
    "loop": Run(LOSSES["loop"], steps=20),
    "clipped, frozen, and weights of microbatches": Run(
        weighted,
        tx=lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        config={"trainable": lambda path, _: "w" not in path},
        options={"weighted": True, "accumulate": 2},
    ),
    "whole leaves": Run(LOSSES["one_by_one"], tx=lambda: optax.lamb(1e-2)),
}


def trained(tx, run, state=None, place=lambda batch: batch, steps=None):
    """The loss of each step, and the last state. Without a `state`, parameters are initialised into storage."""
    step, losses = tx.train_step(run.loss, **run.options), []
    state = tx.create(tx.init_params(model_params)) if state is None else state
    for seed in range(steps or run.steps):
        state, metrics = step(state, place(batch_of(seed)))
        losses.append(float(metrics["loss"]))
    return losses, state


def results(tx, state):
    """The logical parameters and optimizer state, and what an evaluation returns."""
    loss = tx.eval_step(lambda params, batch: {"loss": LOSSES["loop"](params, batch), "rows": params["embed"][:3]})
    found = tx.unshard(state.params), tx.unshard(state.opt_state, state.params), loss(state.params, batch_of())
    return jax.tree.leaves(jax.device_get(found))
