"""Read a DeepSpeed configuration, and translate it, key by key, into Python and the objects that the Python defines."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.config import check_count
from zerojax.deepspeed.expressions import Code, call, defined, imports, user_expression
from zerojax.deepspeed.keys import KEYS, Key, asked
from zerojax.deepspeed.optimizers import optimizer_code
from zerojax.deepspeed.schema import check_key, check_tree, read_json, shown

CLIP = 1.0  # DeepSpeed's default since 2026-06


@dataclasses.dataclass(frozen=True)
class FromDeepSpeed:
    """A DeepSpeed configuration as Python, which `print` shows. The properties are the values that the Python defines.

    Attributes:
        source: Python that defines `optimizer`, `options` and `step_options`.
        notes: One line per key of the file, which says how the key was translated.
        rows: Rows of the global batch that a step takes. None if the file does not determine them.
    """

    source: str
    notes: tuple[str, ...]
    rows: int | None

    def __str__(self) -> str:
        """Return the Python, followed by one comment per key of the file."""
        return "\n".join([self.source, *(f"# {note}" for note in self.notes)])

    @functools.cached_property
    def _defined(self) -> dict[str, Any]:
        return defined(self.source)

    @property
    def optimizer(self) -> Any:
        """Return the optax transformation."""
        return self._defined["optimizer"]

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `zero_shard`."""
        return self._defined["options"]

    @property
    def step_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `train_step`."""
        return self._defined["step_options"]


def from_deepspeed(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    devices: int | None = None,
    optimizer: str | None = None,
) -> FromDeepSpeed:
    """Convert a DeepSpeed configuration into an optax transformation and options of zerojax.

    Args:
        config: The path of the JSON file, or the object in the file.
        auto: Values for keys that are `"auto"` or missing in the file, by path: `{"optimizer.params.lr": 3e-4}`.
        devices: Number of data-parallel workers. Needed if the file's number of microbatches or rows depends on it.
        optimizer: One Python expression for an optax transformation, such as `"optax.contrib.muon(2e-2)"`. It replaces
            the file's optimizer and schedule in the printed Python. The attribute `optimizer` can evaluate it, without
            `exec`, if it consists of calls, literals and arithmetic.

    Returns:
        A `FromDeepSpeed`.

    Raises:
        TypeError: If the configuration is not a JSON object, or `devices` is not an integer.
        ValueError: If the file is not JSON, a key is unknown or has an invalid value, an `"auto"` remains, batch sizes
            contradict each other, or zerojax cannot train as a key asks. The message has the path of the key.

    Examples:
        >>> found = from_deepspeed("ds_config.json", auto={"optimizer.params.lr": 3e-4})
        >>> tx = zero_shard(found.optimizer, **found.options)
        >>> step = tx.train_step(loss_fn, **found.step_options)
    """
    if not isinstance(config, Mapping):
        config = read_json(config)
    if not isinstance(config, Mapping):
        raise TypeError(f"A DeepSpeed configuration is a JSON object, not a {type(config).__name__}.")
    if devices is not None:
        check_count("devices", devices, "data-parallel workers", least=1)
    values = _checked(config, auto or {})
    rows, accumulate = _batch(values, devices)
    given = _contributions(values)
    optimizer_text = optimizer_code(values) if optimizer is None else user_expression(optimizer)
    lines = [f"optimizer = {optimizer_text}"]
    if clip := values.get("gradient_clipping", CLIP):
        clipping = call("optax.clip_by_global_norm", clip)
        lines.append(f"optimizer = {call('optax.chain', clipping, Code('optimizer'))}")
    steps = ({"accumulate": accumulate} if accumulate != 1 else {}) | given["train_step"]
    lines += [f"options = {call('dict', **_options(given))}", f"step_options = {call('dict', **steps)}"]
    lines = [*imports("\n".join(lines)), *lines, "", "# tx = zerojax.zero_shard(optimizer, **options)"]
    lines.append("# step = tx.train_step(loss_fn, **step_options)")
    if rows:
        lines.append(f"# A step is given {rows} rows, over all devices.")
    return FromDeepSpeed("\n".join([*lines, ""]), tuple(_notes(values)), rows)


def key_of(path: str) -> Key:
    """Return the `Key` of the table for a path. Raise a `ValueError` if DeepSpeed has no such key."""
    check_key(path)
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        key = KEYS.get(".".join(parts[:count]))
        if key is not None and (count == len(parts) or key.open or parts[count - 1] == "params"):
            return key
    near = difflib.get_close_matches(path, KEYS, n=1, cutoff=0.5)
    raise ValueError(f"{path} is no key of DeepSpeed." + (f" Do you mean {near[0]}?" if near else ""))


def _checked(config: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each key by path, checked and converted by the rule of the key."""
    check_tree(config)
    values = dict(_flattened(config))
    for path, value in auto.items():
        check_tree(value, path)
        whole = not isinstance(value, Mapping) or (path in KEYS and KEYS[path].open)
        values |= {path: value} if whole else dict(_flattened(value, f"{path}."))
    keys = {path: key_of(path) for path in values}
    if left := [path for path, value in values.items() if value == "auto"]:
        raise ValueError(
            f'{left[0]} is "auto", which Hugging Face fills in. Give it: from_deepspeed(..., '
            f"auto={{{left[0]!r}: ...}})" + (f"; and {', '.join(left[1:])}." if left[1:] else ".")
        )
    for path, key in keys.items():
        if key.fate == "refused" and asked(values[path]):
            raise ValueError(
                f"{path}={shown(values[path])} has no counterpart here: {key.how}. Remove it to train without."
            )
        if path in KEYS:  # keys below "params" have the rules of their optimizer or schedule
            values[path] = key.rule.check(path, values[path])
    return values


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its path. The object of an open key is not flattened."""
    for part, value in tree.items():
        path = f"{prefix}{part}"
        check_key(path)
        if "." in part:
            raise ValueError(f"{path} is one key with a dot. Give one object for each level.")
        key = KEYS.get(path)
        below = [known for known in KEYS if known.startswith(f"{path}.")]
        if isinstance(value, Mapping) and not (key is not None and key.open):
            yield from _flattened(value, f"{path}.")
        elif key is None and below and value is not None:
            raise ValueError(f"{path} is {shown(value)}. Give an object with keys such as {below[0]}.")
        elif value is not None or key is not None or not below:
            yield path, value


def _contributions(values: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
    """Return the arguments that the keys contribute: one dict per function that takes them, by its name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    givers: dict[str, str] = {}
    for path, value in values.items():
        contributed = KEYS[path].gives(value) if path in KEYS else {}
        for name, given in contributed.items():
            function, argument = name.split(".")
            if given is None:
                continue
            if found[function].setdefault(argument, given) != given:
                raise ValueError(
                    f"{givers[name]}={shown(values[givers[name]])} and {path}={shown(value)} contradict each other: "
                    f"both decide {argument} of {function}. Give one of the two."
                )
            givers[name] = path
    return found


def _options(given: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of `zero_shard`, given the result of `_contributions`."""
    options = {"stage": 0, **given["zero_shard"]}
    if {"params_axis", "shard_axis"} <= options.keys():
        raise ValueError("zero_hpz_partition_size and mics_shard_size divide parameters in two ways. Give one.")
    precision = dict(given["Precision"])
    kind, scale = precision.pop("kind", "fp32"), precision.pop("loss_scale", 0)
    if kind == "fp16":
        precision["loss_scale"] = scale or _dynamic_scale(**given["DynamicScale"])
    if kind != "fp32" or precision:
        options["precision"] = call(f"Precision.{kind}", **precision)
    offload = dict(given["Offload"])
    if {"optimizer", "params"} & offload.keys():
        options["offload"] = call("Offload", **_offload(**offload))
    wire = given["Wire"]
    if "error_feedback" in wire and not ("reduce" in wire and "params_axis" in options):
        needed = "zero_hpz_partition_size" if "reduce" in wire else "zero_quantized_gradients"
        raise ValueError(
            f"zeropp_loco_param feeds errors of quantised gradients back, here errors of the reduction across hosts. "
            f"Give {needed} too, or leave zeropp_loco_param out."
        )
    return options | ({"wire": call("Wire", **wire)} if wire else {})


def _dynamic_scale(initial: int = 16, growth_interval: int = 1000, hysteresis: int = 2, floor: float = 1.0) -> Code:
    """Return the Python of a `DynamicScale`. The default arguments are those of DeepSpeed."""
    if floor > 2.0**initial:
        raise ValueError(
            f"fp16.min_loss_scale is {floor}, above the initial scale 2**{initial}. Give a lower one, or a higher "
            f"fp16.initial_scale_power."
        )
    start = Code(f"2.0 ** {initial}")
    return call("DynamicScale", initial=start, growth_interval=growth_interval, hysteresis=hysteresis, floor=floor)


def _offload(
    optimizer: str | None = None,
    path: str | None = None,
    params_path: str | None = None,
    max_in_cpu: int = 0,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of `Offload`. DeepSpeed ignores a path unless the state is in files."""
    if others.get("params") == "disk":
        if optimizer == "host":
            raise ValueError(
                'offload_param.device="nvme" keeps the optimizer state on the disk here, too, and '
                'offload_optimizer.device is "cpu". Give "nvme" for both.'
            )
        if params_path and path not in (None, params_path):
            raise ValueError(
                f"offload_param.nvme_path is {params_path!r} and offload_optimizer.nvme_path is {path!r}. "
                f"Offload(path=) is one folder for both. Give the same path."
            )
        optimizer, path = "disk", path or params_path
        others |= {"host_bytes": 4 * max_in_cpu} if max_in_cpu else {}
    optimizer = optimizer or "host"
    if optimizer != "disk":
        return {"optimizer": optimizer, **others}
    if path is None:
        raise ValueError("State on NVMe needs a folder for its files. Give nvme_path.")
    return {"optimizer": optimizer, "path": path, **others}


def _batch(values: Mapping[str, Any], devices: int | None) -> tuple[int | None, int]:
    """Return the number of rows per step (None if it is unknown), and the number of microbatches per step."""
    rows, micro = values.get("train_batch_size"), values.get("train_micro_batch_size_per_gpu")
    accumulate = values.get("gradient_accumulation_steps")
    if rows and micro and accumulate is None:
        if devices is None:
            raise ValueError(
                "gradient_accumulation_steps follows from train_batch_size, train_micro_batch_size_per_gpu and the "
                "number of devices: from_deepspeed(..., devices=8)."
            )
        accumulate, rest = divmod(rows, micro * devices)
        if rest or not accumulate:
            raise ValueError(f"train_batch_size={rows} is no multiple of {micro} rows on each of {devices} devices.")
    accumulate = accumulate or 1
    if micro and devices:
        product = micro * accumulate * devices
        if rows not in (None, product):
            raise ValueError(
                f"train_batch_size={rows} is not {micro} rows x {accumulate} microbatches x {devices} devices."
            )
        rows = product
    if rows is not None and rows % (accumulate * (devices or 1)):
        over = f" on each of {devices} devices" if devices else ""
        raise ValueError(f"train_batch_size={rows} cannot be divided into {accumulate} equal microbatches{over}.")
    return rows, accumulate


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of the file, which says how the key was translated."""
    for path, value in values.items():
        key = key_of(path)
        yield f"{path} = {shown(value)}: {'' if key.fate == 'mapped' else f'{key.fate}: '}{key.how}"
    if "optimizer.params.lr" in values and values.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"):
        yield "optimizer.params.lr is not used, as in DeepSpeed: the schedule goes to its own warmup_max_lr (0.001)"
    if "gradient_clipping" not in values:
        yield f"gradient_clipping is not given: {CLIP}, as in DeepSpeed since 2026-06; before, 0 was meant"
