"""Read a DeepSpeed configuration: each key is mapped, or not needed, or refused; the result is Python that runs."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.config import check_count
from zerojax.deepspeed import expressions
from zerojax.deepspeed.expressions import call, literal, name
from zerojax.deepspeed.keys import KEYS, Key
from zerojax.deepspeed.optimizers import optimizer_expression
from zerojax.deepspeed.schema import check_key, check_tree, read_json, shown

AUTO = "auto"
CLIP = 1.0  # where the file says nothing: DeepSpeed's since 2026-06
AXES = ("host", "gpu")
TYPES = {"fp16": "jnp.float16", "bf16": "jnp.bfloat16", "fp32": "jnp.float32"}


@dataclasses.dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration is here. Print it for the Python; the other attributes are what that defines.

    Attributes:
        source: Python that defines `optimizer`, and `options` and `step_options`, or what they are made of.
        notes: For each key of the file a line: what became of it.
        rows: Rows of the batch that a step is given, over all devices; None where the file does not say.
        program: The definitions in `source`: each variable with the syntax tree of its value.
    """

    source: str
    notes: tuple[str, ...]
    rows: int | None
    program: tuple[tuple[str, ast.expr], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        """Return the Python, then a comment per key that says what became of it."""
        return "\n".join([self.source, *(f"# {note}" for note in self.notes)])

    @functools.cached_property
    def _defined(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for variable, tree in self.program:
            found[variable] = expressions.evaluate(tree, found)
        return found

    @property
    def optimizer(self) -> Any:
        """Return the optax transformation."""
        return self._defined["optimizer"]

    @property
    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `zero_shard`."""
        return self._defined["options"]

    @property
    def step_options(self) -> dict[str, Any]:
        """Return keyword arguments of `train_step`."""
        return self._defined["step_options"]


def from_deepspeed(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    devices: int | None = None,
    optimizer: str | None = None,
) -> FromDeepSpeed:
    """Read a DeepSpeed configuration.

    Args:
        config: The path of its JSON file, or what is in it.
        auto: What to take for values that are `"auto"` in the file, or missing, by path:
            `{"optimizer.params.lr": 3e-4}`.
        devices: Data-parallel workers, where the number of microbatches or rows follows from it.
        optimizer: Python for an optax transformation in the place of the file's optimizer and schedule, such as
            `"optax.contrib.muon(2e-2)"`: one expression. It is printed as it is; for the attribute `optimizer` it is
            evaluated without `exec`, if it consists of calls, literals and arithmetic.

    Returns:
        A `FromDeepSpeed`.

    Raises:
        TypeError: If the file holds no object, or `devices` is no integer.
        ValueError: If the file is no JSON, a key is unknown or has a value that it does not take, an `"auto"` is left,
            batch sizes contradict each other, or something is asked for that would train otherwise here; with the
            path of the key.

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
    check_tree(config)
    values = dict(_flattened(config))
    for path, value in (auto or {}).items():
        check_key(path)
        check_tree(value, path)
        whole = not isinstance(value, Mapping) or (path in KEYS and KEYS[path].open)
        values |= {path: value} if whole else dict(_flattened(value, f"{path}."))
    for path in values:
        key_of(path)
    if left := [path for path, value in values.items() if value == AUTO]:
        raise ValueError(
            f'{left[0]} is "auto", which Hugging Face fills in. Give it: from_deepspeed(..., '
            f"auto={{{left[0]!r}: ...}})" + (f"; and {', '.join(left[1:])}." if left[1:] else ".")
        )
    for path, value in values.items():
        key = key_of(path)
        if key.stops and _asked(key, value):
            raise ValueError(f"{path}={shown(value)} has no counterpart here: {key.how}. Remove it to train without.")
        if path in KEYS:  # arguments below "params" have the rules of their optimizer or schedule
            values[path] = key.rule.check(path, value)
    reading = _Reading(values, devices, optimizer)
    program = reading.program()
    return FromDeepSpeed(_source(program, reading.rows), tuple(reading.notes()), reading.rows, program)


def key_of(path: str) -> Key:
    """Return what becomes of the key at a path.

    Raises:
        ValueError: If there is no such key, naming the nearest.
    """
    check_key(path)
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        key = KEYS.get(".".join(parts[:count]))
        if key is not None and (count == len(parts) or key.open or parts[count - 1] == "params"):
            return key
    near = difflib.get_close_matches(path, KEYS, n=1, cutoff=0.5)
    raise ValueError(f"{path} is no key of DeepSpeed." + (f" Do you mean {near[0]}?" if near else ""))


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves by path; what is below an open key stays together.

    Raises:
        ValueError: If a key has a dot or another odd character, or a part of the file is no object.
    """
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


def _asked(key: Key, value: Any) -> bool:
    """Return whether a value asks for something."""
    enabled = value.get("enabled", True) if isinstance(value, Mapping) else value
    return enabled not in key.off and value != {}


class _Reading:
    """One configuration, read. Lives as long as `from_deepspeed`."""

    def __init__(self, values: dict[str, Any], devices: int | None, optimizer: str | None):
        self.values, self.devices, self.optimizer = values, devices, optimizer
        self.rows, self.accumulate = self._batch()

    def zero(self, name: str, default: Any = None) -> Any:
        """Return a value below `zero_optimization`."""
        value = self.values.get(f"zero_optimization.{name}")
        return default if value is None else value

    def on(self, path: str) -> bool:
        """Return whether a key asks for something."""
        return path in self.values and _asked(key_of(path), self.values[path])

    def program(self) -> tuple[tuple[str, ast.expr], ...]:
        """Return the definitions, in their order: each variable with the syntax tree of its value."""
        given = self.optimizer
        lines = [("optimizer", optimizer_expression(self.values) if given is None else expressions.parse(given))]
        if clip := self.values.get("gradient_clipping", CLIP):
            clipping = call("optax.clip_by_global_norm", clip)
            lines.append(("optimizer", call("optax.chain", clipping, name("optimizer"))))
        for part in filter(self._is_on, ("zero_hpz_partition_size", "mics_shard_size")):
            group = self.zero(part)
            hosts = expressions.binary(call("jax.device_count"), ast.FloorDiv(), group)
            lines.append(("mesh", call("jax.make_mesh", (hosts, literal(group)), AXES)))
        lines.append(("options", call("dict", **self._options())))
        steps: dict[str, Any] = {"accumulate": self.accumulate} if self.accumulate != 1 else {}
        if self.on("bf16.check_grad_overflow"):
            steps["skip_nonfinite"] = True
        return (*lines, ("step_options", call("dict", **steps)))

    def notes(self) -> Iterator[str]:
        """Return what became of each key of the file."""
        for path, value in self.values.items():
            key = key_of(path)
            fate = {"mapped": "", "not needed": "not needed: ", "not there": "not there: "}[key.fate]
            yield f"{path} = {shown(value)}: {fate}{key.how}"
        if self.on("optimizer.params.lr") and self.values.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"):
            yield "optimizer.params.lr is not used, as there: the schedule goes to its own warmup_max_lr (0.001)"
        if "gradient_clipping" not in self.values:
            yield f"gradient_clipping is not given: {CLIP}, as in DeepSpeed since 2026-06; before, 0 was meant"

    def _is_on(self, name: str) -> bool:
        return self.on(f"zero_optimization.{name}")

    def _options(self) -> dict[str, Any]:
        """Return the arguments of `zero_shard`: values, or trees of Python."""
        options: dict[str, Any] = {"stage": self.zero("stage", 0)}
        if self._is_on("zero_hpz_partition_size") and self._is_on("mics_shard_size"):
            raise ValueError("zero_hpz_partition_size and mics_shard_size divide parameters in two ways. Give one.")
        for part, argument in (("zero_hpz_partition_size", "params_axis"), ("mics_shard_size", "shard_axis")):
            if self._is_on(part):
                options |= {"mesh": name("mesh"), "axis": AXES, argument: "gpu"}
        if (threshold := self.zero("stage3_param_persistence_threshold")) is not None:
            options["persist_below"] = threshold
        for argument, tree in (("precision", self._precision()), ("offload", self._offload())):
            if tree is not None:
                options[argument] = tree
        wire: dict[str, Any] = {}
        if self._is_on("zero_quantized_weights") or self._is_on("zero_quantized_nontrainable_weights"):
            wire["gather"] = "int8"
        if self._is_on("zero_quantized_gradients"):
            wire["reduce"] = "int4"
        if self._is_on("zeropp_loco_param"):
            for needed in ("zero_quantized_gradients", "zero_hpz_partition_size"):
                if not self._is_on(needed):
                    raise ValueError(
                        f"zeropp_loco_param feeds errors of quantised gradients back, here those of the reduction "
                        f"across hosts. Give {needed} too, or leave it out."
                    )
            wire["error_feedback"] = True
        if wire:
            options["wire"] = call("Wire", **wire)
        return options

    def _precision(self) -> ast.expr | None:
        """Return the `Precision` as a tree; None for float32."""
        found = [kind for kind in ("fp16", "bf16") if self.on(f"{kind}.enabled")]
        if len(found) > 1:
            raise ValueError("fp16 and bf16 are both enabled. Enable one.")
        given = [self.values.get(path) for path in ("data_types.grad_accum_dtype", "communication_data_type")]
        reduce = {TYPES[one] for one in given if one is not None}
        if len(reduce) > 1:
            raise ValueError(
                "data_types.grad_accum_dtype and communication_data_type differ, and Precision(reduce=) is one type. "
                "Give one, or the same."
            )
        arguments = {"reduce": name(reduce.pop())} if reduce else {}
        if found == ["fp16"]:
            arguments["loss_scale"] = self._loss_scale()
        if not found and not arguments:
            return None
        return call(f"Precision.{found[0] if found else 'fp32'}", **arguments)

    def _loss_scale(self) -> ast.expr:
        """Return a dynamic scale or a number, as a tree."""
        get = lambda part, default: self.values.get(f"fp16.{part}", default)
        if scale := get("loss_scale", 0):
            return literal(scale)
        power, floor = get("initial_scale_power", 16), get("min_loss_scale", 1.0)
        if floor > 2.0**power:
            raise ValueError(
                f"fp16.min_loss_scale is {floor}, above the initial scale 2**{power}. Give a lower one, or a higher "
                f"fp16.initial_scale_power."
            )
        return call(
            "DynamicScale",
            initial=expressions.binary(2.0, ast.Pow(), power),
            growth_interval=get("loss_scale_window", 1000),
            hysteresis=get("hysteresis", 2),
            floor=floor,
        )

    def _offload(self) -> ast.expr | None:
        """Return the `Offload` as a tree; None for none."""
        device = "cpu" if self._is_on("cpu_offload") else self.zero("offload_optimizer.device", "none")
        params = "cpu" if self._is_on("cpu_offload_param") else self.zero("offload_param.device", "none")
        if params == "nvme":
            raise ValueError(
                'zero_optimization.offload_param.device="nvme": parameters are on the device or in host memory. '
                'Give "cpu".'
            )
        if device == params == "none":
            return None
        arguments: dict[str, Any] = {"optimizer": "disk" if device == "nvme" else "host"}
        if device == "nvme":
            path = self.zero("offload_optimizer.nvme_path")
            if path is None:
                raise ValueError('offload_optimizer.device="nvme" needs nvme_path, a folder.')
            arguments["path"] = path
        if params == "cpu":
            arguments["params"] = "host"
        if (ratio := self.zero("offload_optimizer.ratio", 1.0)) != 1.0:
            arguments["fraction"] = ratio
        return call("Offload", **arguments)

    def _batch(self) -> tuple[int | None, int]:
        """Return rows per step, and microbatches: what the file says, and what follows from it."""
        get = lambda name: self.values.get(name)
        rows, micro = get("train_batch_size"), get("train_micro_batch_size_per_gpu")
        accumulate = get("gradient_accumulation_steps")
        if rows and micro and accumulate is None:
            if self.devices is None:
                raise ValueError(
                    "gradient_accumulation_steps follows from train_batch_size, train_micro_batch_size_per_gpu and the "
                    "number of devices: from_deepspeed(..., devices=8)."
                )
            accumulate, rest = divmod(rows, micro * self.devices)
            if rest or not accumulate:
                raise ValueError(
                    f"train_batch_size={rows} is no multiple of {micro} rows on each of {self.devices} devices."
                )
        accumulate = accumulate or 1
        if micro and self.devices:
            product = micro * accumulate * self.devices
            if rows is not None and rows != product:
                raise ValueError(
                    f"train_batch_size={rows} is not {micro} rows x {accumulate} microbatches x {self.devices} devices."
                )
            rows = product
        if rows is not None and rows % (accumulate * (self.devices or 1)):
            over = f" on each of {self.devices} devices" if self.devices else ""
            raise ValueError(f"train_batch_size={rows} cannot be divided into {accumulate} equal microbatches{over}.")
        return rows, accumulate


def _source(program: tuple[tuple[str, ast.expr], ...], rows: int | None) -> str:
    """Print definitions as Python, with the imports that they need."""
    lines = [f"{variable} = {ast.unparse(tree)}" for variable, tree in program]
    lines += ["", "# tx = zerojax.zero_shard(optimizer, **options)"]
    lines.append("# step = tx.train_step(loss_fn, **step_options)")
    if rows:
        lines.append(f"# A step is given {rows} rows, over all devices.")
    return "\n".join([*expressions.imports([tree for _, tree in program]), *lines, ""])
