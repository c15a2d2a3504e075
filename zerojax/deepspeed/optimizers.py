"""DeepSpeed's optimizers and schedules, as Python of optax; their defaults are written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_COUNTERPART = {
    "onebitadam": "its gradients are compressed to one bit after a warm-up",
    "zerooneadam": "its gradients are compressed to one bit after a warm-up",
    "onebitlamb": "its gradients are compressed to one bit after a warm-up",
    "muadam": "rates depend on each layer's width, which optax.multi_transform says by label",
    "muadamw": "rates depend on each layer's width, which optax.multi_transform says by label",
    "musgd": "rates depend on each layer's width, which optax.multi_transform says by label",
    "muon": "which parameters are matrices is said by optax.contrib.muon's arguments: docs/muon.md",
    "lamb": "its trust ratio is clamped, and optax's is not",
    "fusedlamb": "its trust ratio is clamped, and optax's is not",
    "adagrad": "it adds eps beside the root, and optax's within it",
}
# Ignored: how it is computed, and not what.
FUSED = {"torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "freeze_step", "foreach", "fused", "capturable"}


def optimizer_source(values: Mapping[str, Any]) -> str:
    """The file's optimizer, with its schedule, as Python.

    Raises:
        ValueError: If there is none, it has no counterpart, or an argument has none.
    """
    name = values.get("optimizer.type")
    if name is None:
        raise ValueError(
            "The configuration names no optimizer: it was made in the script. Give the optax transformation: "
            'from_deepspeed(..., optimizer="optax.adamw(3e-4)").'
        )
    kind = str(name).lower()
    if kind in NO_COUNTERPART:
        raise ValueError(
            f"optimizer.type={name!r}: {NO_COUNTERPART[kind]}. Give an optax transformation: "
            f'from_deepspeed(..., optimizer="optax.adamw(3e-4)").'
        )
    prefix = "optimizer.params."
    given = {path[len(prefix) :]: value for path, value in values.items() if path.startswith(prefix)}
    makers = {"adam": _adam, "adamw": _adam, "fusedadam": _adam, "lion": _lion, "fusedlion": _lion, "sgd": _sgd}
    if kind not in makers:
        raise ValueError(f"optimizer.type={name!r} is none of {', '.join(makers)}. Give it as optimizer=.")
    rate = _schedule(values, float(given.pop("lr", 1e-3)))
    text = makers[kind](kind, given, rate)
    if given:
        raise ValueError(f"optimizer.params.{next(iter(given))} has no counterpart for {name}. Give optimizer=.")
    return text


def _adam(kind: str, given: dict, rate: str) -> str:
    b1, b2 = map(float, given.pop("betas", (0.9, 0.999)))
    eps, decay = float(given.pop("eps", 1e-8)), float(given.pop("weight_decay", 0.0))
    decoupled = kind == "adamw" or given.pop("adam_w_mode", True)
    if given.pop("amsgrad", False) or not given.pop("bias_correction", True):
        raise ValueError("amsgrad, or Adam without bias correction, has no counterpart by this name. Give optimizer=.")
    for name in FUSED & set(given):
        given.pop(name)
    arguments = f"b1={b1}, b2={b2}, eps={eps}"
    if decoupled:
        return f"optax.adamw({rate}, {arguments}, weight_decay={decay})"
    adam = f"optax.adam({rate}, {arguments})"
    return f"optax.chain(optax.add_decayed_weights({decay}), {adam})" if decay else adam


def _lion(kind: str, given: dict, rate: str) -> str:
    b1, b2 = map(float, given.pop("betas", (0.9, 0.99)))
    return f"optax.lion({rate}, b1={b1}, b2={b2}, weight_decay={float(given.pop('weight_decay', 0.0))})"


def _sgd(kind: str, given: dict, rate: str) -> str:
    if given.pop("dampening", 0):
        raise ValueError("optimizer.params.dampening has no counterpart in optax.sgd. Give optimizer=.")
    momentum, nesterov = float(given.pop("momentum", 0.0)), bool(given.pop("nesterov", False))
    decay = float(given.pop("weight_decay", 0.0))
    sgd = f"optax.sgd({rate}, momentum={momentum or None}, nesterov={nesterov})"
    return f"optax.chain(optax.add_decayed_weights({decay}), {sgd})" if decay else sgd


def _schedule(values: Mapping[str, Any], lr: float) -> str:
    """The learning rate, as Python: a number, or a schedule."""
    name, prefix = values.get("scheduler.type"), "scheduler.params."
    if name is None:
        return repr(lr)
    given = {path[len(prefix) :]: value for path, value in values.items() if path.startswith(prefix)}
    if given.pop("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration: a checkpoint has the count of updates. Remove it.")
    kind = given.pop("warmup_type", "log")
    if kind not in ("log", "linear"):
        raise ValueError(f'scheduler.params.warmup_type is "log" or "linear", not {kind!r}.')
    arguments = [f"warmup_steps={int(given.pop('warmup_num_steps', 1000))}", f"log={kind == 'log'}"]
    if name in ("WarmupDecayLR", "WarmupCosineLR"):
        if "total_num_steps" not in given:
            raise ValueError(f"{name} needs scheduler.params.total_num_steps.")
        arguments.append(f"total_steps={int(given.pop('total_num_steps'))}")
    if name in ("WarmupLR", "WarmupDecayLR"):
        arguments.append(f"min_lr={float(given.pop('warmup_min_lr', 0.0))}")
        function = "warmup_lr" if name == "WarmupLR" else "warmup_decay_lr"
        first = float(given.pop("warmup_max_lr", 1e-3))
    elif name == "WarmupCosineLR":
        arguments.append(f"warmup_min_ratio={float(given.pop('warmup_min_ratio', 0.0))}")
        arguments.append(f"cos_min_ratio={float(given.pop('cos_min_ratio', 1e-4))}")
        first, function = lr, "warmup_cosine_lr"
    else:
        raise ValueError(
            f"scheduler.type={name!r}: of DeepSpeed's schedules there are WarmupLR, WarmupDecayLR and WarmupCosineLR. "
            f"Give an optax transformation with a schedule as optimizer=."
        )
    if given:
        raise ValueError(f"scheduler.params.{next(iter(given))} is no argument of {name}.")
    return f"zerojax.deepspeed.{function}({first}, {', '.join(arguments)})"
