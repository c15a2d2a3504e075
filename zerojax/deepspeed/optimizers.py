"""Write DeepSpeed's optimizers and schedules as Python that uses optax, including DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerojax.deepspeed.expressions import Code, call
from zerojax.deepspeed.schema import ANY, TRUTH, Rule, integer, number, only, pair, shown, word

GIVE = 'Give an optax transformation: from_deepspeed(..., optimizer="optax.adamw(3e-4)").'
ONE_BIT = "its gradients are compressed to one bit after a warm-up"
WIDTHS = "its rates depend on each layer's width, which optax.multi_transform says by label"
TRUST = "its trust ratio is clamped, and optax's is not"
NO_COUNTERPART = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), ONE_BIT),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), WIDTHS),
    **dict.fromkeys(("lamb", "fusedlamb"), TRUST),
    "muon": "optax.contrib.muon's arguments say which parameters are matrices: docs/muon.md",
    "adagrad": "it adds eps to the root, and optax adds eps within the root",
}
# Each table maps an argument of a DeepSpeed optimizer to the rule of its values, and DeepSpeed's default.
RATE = {"lr": (number(), 1e-3), "weight_decay": (number(), 0.0)}
BETAS = pair(number(0, 1, below=True))
LION = RATE | {"betas": (BETAS, (0.9, 0.99))}
ADAM = RATE | {
    "betas": (BETAS, (0.9, 0.999)),
    "eps": (number(), 1e-8),
    "adam_w_mode": (TRUTH, True),
    "amsgrad": (only(False, "optax.adamw is not AMSGrad; write other optimizers as optimizer="), False),
    "bias_correction": (only(True, "optax.adamw corrects the bias; write other optimizers as optimizer="), True),
    # These arguments change how the update is computed, but not its result.
    **dict.fromkeys(("torch_adam", "freeze_step", "foreach", "fused", "capturable"), (ANY, None)),
}
SGD = RATE | {
    "momentum": (number(), 0.0),
    "nesterov": (TRUTH, False),
    "dampening": (only(0, "optax.sgd has no dampening; write other optimizers as optimizer="), 0),
}
# Each table maps an argument of a DeepSpeed schedule to the rule of its values, the default, and the name in zerojax.
REQUIRED = object()
WARMUP = {
    "warmup_type": (word("log", "linear"), "log", "log"),
    "warmup_num_steps": (integer(0), 1000, "warmup_steps"),
    "last_batch_iteration": (only(-1, "a checkpoint has the count of updates"), -1, None),
}
RISE = {"warmup_min_lr": (number(), 0.0, "min_lr"), "warmup_max_lr": (number(), 1e-3, "max_lr")}
TOTAL = {"total_num_steps": (integer(1), REQUIRED, "total_steps")}
SHARES = {
    "warmup_min_ratio": (number(0, 1), 0.0, "warmup_min_ratio"),
    "cos_min_ratio": (number(0, 1), 1e-4, "cos_min_ratio"),
}
SCHEDULES: Mapping[str, tuple[str, Mapping[str, tuple[Rule, Any, str | None]]]] = {
    "WarmupLR": ("zerojax.deepspeed.warmup_lr", WARMUP | RISE),
    "WarmupDecayLR": ("zerojax.deepspeed.warmup_decay_lr", WARMUP | RISE | TOTAL),
    "WarmupCosineLR": ("zerojax.deepspeed.warmup_cosine_lr", WARMUP | TOTAL | SHARES),
}


def optimizer_code(values: Mapping[str, Any]) -> Code:
    """Return the file's optimizer, with its schedule, as Python. Raise an error for a part without a counterpart."""
    kind = values.get("optimizer.type")
    if kind is None:
        raise ValueError(f"The configuration names no optimizer, so the script must have made it. {GIVE}")
    if why := NO_COUNTERPART.get(kind.lower()):
        raise ValueError(f"optimizer.type={kind!r} has no counterpart: {why}. {GIVE}")
    if kind.lower() not in OPTIMIZERS:
        raise ValueError(f"optimizer.type={shown(kind)} is none of {', '.join(OPTIMIZERS)}. {GIVE}")
    make, table = OPTIMIZERS[kind.lower()]
    given = _arguments(values, "optimizer.params.", table, kind)
    return make(kind.lower(), given, _rate(values, given["lr"]))


def _arguments(values: Mapping[str, Any], prefix: str, table: Mapping[str, tuple], user: str) -> dict[str, Any]:
    """Return the arguments in `table`: the checked values below `prefix`, or defaults for missing arguments."""
    found = {name: row[1] for name, row in table.items()}
    for path, value in values.items():
        name = path.removeprefix(prefix)
        if name != path and name not in table:
            raise ValueError(f"{path} has no counterpart for {user}. Remove it, or write the optimizer as optimizer=.")
        if name != path:
            found[name] = table[name][0].check(path, value)
    return found


def _rate(values: Mapping[str, Any], lr: float) -> Any:
    """Return the learning rate, as a number or as the Python of a schedule."""
    kind = values.get("scheduler.type")
    if kind is None:
        return lr
    if kind not in SCHEDULES:
        raise ValueError(
            f"scheduler.type={shown(kind)}: of DeepSpeed's schedules there are {', '.join(SCHEDULES)}. "
            f"Give an optax transformation with a schedule as optimizer=."
        )
    function, table = SCHEDULES[kind]
    given = _arguments(values, "scheduler.params.", table, kind)
    if missing := [name for name, value in given.items() if value is REQUIRED]:
        raise ValueError(f"{kind} needs scheduler.params.{missing[0]}. Give it in the file or in auto=.")
    given["warmup_type"] = given["warmup_type"] == "log"
    arguments = {ours: given[name] for name, (_, _, ours) in table.items() if ours is not None}
    return call(function, *([lr] if kind == "WarmupCosineLR" else []), **arguments)


def _decayed(decay: float, optimizer: Code) -> Code:
    """Return Python that first adds weight decay to the gradients, and then runs `optimizer`."""
    return call("optax.chain", call("optax.add_decayed_weights", decay), optimizer) if decay else optimizer


def _adam(kind: str, given: dict[str, Any], rate: Any) -> Code:
    b1, b2 = given["betas"]
    moments = {"b1": b1, "b2": b2, "eps": given["eps"]}
    if kind == "adamw" or given["adam_w_mode"]:
        return call("optax.adamw", rate, **moments, weight_decay=given["weight_decay"])
    return _decayed(given["weight_decay"], call("optax.adam", rate, **moments))


def _lion(kind: str, given: dict[str, Any], rate: Any) -> Code:
    b1, b2 = given["betas"]
    return call("optax.lion", rate, b1=b1, b2=b2, weight_decay=given["weight_decay"])


def _sgd(kind: str, given: dict[str, Any], rate: Any) -> Code:
    sgd = call("optax.sgd", rate, momentum=given["momentum"] or None, nesterov=given["nesterov"])
    return _decayed(given["weight_decay"], sgd)


OPTIMIZERS: Mapping[str, tuple[Callable[[str, dict, Any], Code], Mapping[str, tuple[Rule, Any]]]] = {
    "adam": (_adam, ADAM),
    "adamw": (_adam, ADAM),
    "fusedadam": (_adam, ADAM),
    "lion": (_lion, LION),
    "fusedlion": (_lion, LION),
    "sgd": (_sgd, SGD),
}
