"""DeepSpeed's optimizers and schedules, as Python of optax; their defaults are written out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.deepspeed.expressions import call, literal
from zerojax.deepspeed.schema import ANY, TRUTH, Rule, integer, number, pair, shown, word

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
FUSED = ("torch_adam", "freeze_step", "foreach", "fused", "capturable")
BETAS = pair(number(0, 1, below=True))
RATES = {"lr": number(), "weight_decay": number()}
ADAM = RATES | {"betas": BETAS, "eps": number(), "adam_w_mode": TRUTH, "amsgrad": TRUTH, "bias_correction": TRUTH}
ADAM |= dict.fromkeys(FUSED, ANY)
LION = RATES | {"betas": BETAS}
SGD = RATES | {"momentum": number(), "dampening": number(), "nesterov": TRUTH}
WARMUP = {
    "warmup_type": word("log", "linear"),
    "warmup_num_steps": integer(0),
    "last_batch_iteration": integer(-1),
}
RISE = {"warmup_min_lr": number(), "warmup_max_lr": number()}
TOTAL = {"total_num_steps": integer(1)}
# Of each schedule: our function, the rules of its arguments.
SCHEDULES: Mapping[str, tuple[str, Mapping[str, Rule]]] = {
    "WarmupLR": ("warmup_lr", WARMUP | RISE),
    "WarmupDecayLR": ("warmup_decay_lr", WARMUP | RISE | TOTAL),
    "WarmupCosineLR": (
        "warmup_cosine_lr",
        WARMUP | TOTAL | {"warmup_min_ratio": number(0, 1), "cos_min_ratio": number(0, 1)},
    ),
}


def optimizer_expression(values: Mapping[str, Any]) -> ast.expr:
    """Return the file's optimizer, with its schedule, as a tree of Python.

    Raises:
        ValueError: If there is none, it has no counterpart, or an argument has none or a value that is none of its own.
    """
    name = values.get("optimizer.type")
    if name is None:
        raise ValueError(
            "The configuration names no optimizer: it was made in the script. Give the optax transformation: "
            'from_deepspeed(..., optimizer="optax.adamw(3e-4)").'
        )
    kind = name.lower()
    if kind in NO_COUNTERPART:
        raise ValueError(
            f"optimizer.type={name!r}: {NO_COUNTERPART[kind]}. Give an optax transformation: "
            f'from_deepspeed(..., optimizer="optax.adamw(3e-4)").'
        )
    if kind not in MAKERS:
        raise ValueError(f"optimizer.type={shown(name)} is none of {', '.join(MAKERS)}. Give it as optimizer=.")
    make, rules = MAKERS[kind]
    given = _arguments(values, "optimizer.params.", rules, f"has no counterpart for {name}. Give optimizer=")
    return make(kind, given, _schedule(values, given.get("lr", 1e-3)))


def _arguments(values: Mapping[str, Any], prefix: str, rules: Mapping[str, Rule], unknown: str) -> dict[str, Any]:
    """Return the checked arguments below a prefix.

    Raises:
        ValueError: If there is no rule for one, or one does not follow its rule.
    """
    given = {path[len(prefix) :]: value for path, value in values.items() if path.startswith(prefix)}
    if others := [name for name in given if name not in rules]:
        raise ValueError(f"{prefix}{others[0]} {unknown}.")
    return {name: rules[name].check(f"{prefix}{name}", value) for name, value in given.items()}


def _decayed(decay: float, inner: ast.expr) -> ast.expr:
    """Add weight decay to the gradients, before the optimizer sees them."""
    return call("optax.chain", call("optax.add_decayed_weights", decay), inner) if decay else inner


def _adam(kind: str, given: dict, rate: ast.expr) -> ast.expr:
    b1, b2 = given.get("betas", (0.9, 0.999))
    decay = given.get("weight_decay", 0.0)
    if given.get("amsgrad", False) or not given.get("bias_correction", True):
        raise ValueError("amsgrad, or Adam without bias correction, has no counterpart by this name. Give optimizer=.")
    arguments = {"b1": b1, "b2": b2, "eps": given.get("eps", 1e-8)}
    if kind == "adamw" or given.get("adam_w_mode", True):
        return call("optax.adamw", rate, **arguments, weight_decay=decay)
    return _decayed(decay, call("optax.adam", rate, **arguments))


def _lion(kind: str, given: dict, rate: ast.expr) -> ast.expr:
    b1, b2 = given.get("betas", (0.9, 0.99))
    return call("optax.lion", rate, b1=b1, b2=b2, weight_decay=given.get("weight_decay", 0.0))


def _sgd(kind: str, given: dict, rate: ast.expr) -> ast.expr:
    if given.get("dampening", 0):
        raise ValueError("optimizer.params.dampening has no counterpart in optax.sgd. Give optimizer=.")
    sgd = call("optax.sgd", rate, momentum=given.get("momentum") or None, nesterov=given.get("nesterov", False))
    return _decayed(given.get("weight_decay", 0.0), sgd)


MAKERS: Mapping[str, tuple[Callable[[str, dict, ast.expr], ast.expr], Mapping[str, Rule]]] = {
    "adam": (_adam, ADAM),
    "adamw": (_adam, ADAM),
    "fusedadam": (_adam, ADAM),
    "lion": (_lion, LION),
    "fusedlion": (_lion, LION),
    "sgd": (_sgd, SGD),
}


def _schedule(values: Mapping[str, Any], lr: float) -> ast.expr:
    """Return the learning rate as a tree of Python: a number, or a schedule."""
    name = values.get("scheduler.type")
    if name is None:
        return literal(lr)
    if name not in SCHEDULES:
        raise ValueError(
            f"scheduler.type={shown(name)}: of DeepSpeed's schedules there are WarmupLR, WarmupDecayLR and "
            f"WarmupCosineLR. Give an optax transformation with a schedule as optimizer=."
        )
    function, rules = SCHEDULES[name]
    given = _arguments(values, "scheduler.params.", rules, f"is no argument of {name}")
    if given.get("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration: a checkpoint has the count of updates. Remove it.")
    arguments: dict[str, Any] = {"warmup_steps": given.get("warmup_num_steps", 1000)}
    arguments["log"] = given.get("warmup_type", "log") == "log"
    if "total_num_steps" in rules:
        if "total_num_steps" not in given:
            raise ValueError(f"{name} needs scheduler.params.total_num_steps.")
        arguments["total_steps"] = given["total_num_steps"]
    if name == "WarmupCosineLR":
        arguments["warmup_min_ratio"] = given.get("warmup_min_ratio", 0.0)
        arguments["cos_min_ratio"] = given.get("cos_min_ratio", 1e-4)
        return call(f"zerojax.deepspeed.{function}", lr, **arguments)
    arguments["min_lr"] = given.get("warmup_min_lr", 0.0)
    return call(f"zerojax.deepspeed.{function}", given.get("warmup_max_lr", 1e-3), **arguments)
