"""Read a DeepSpeed configuration: each key is mapped, or not needed, or refused; the result is Python that runs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.deepspeed.keys import KEYS, Key
from zerojax.deepspeed.optimizers import optimizer_source

AUTO = "auto"
CLIP = 1.0  # where the file says nothing: DeepSpeed's since 2026-06


@dataclasses.dataclass(frozen=True)
class FromDeepSpeed:
    """What a DeepSpeed configuration is here. Print it for the Python; the other attributes are what that defines.

    Attributes:
        source: Python that defines `optimizer`, and `options` and `step_options`, or what they are made of.
        notes: For each key of the file a line: what became of it.
        rows: Rows of the batch that a step is given, over all devices; None where the file does not say.
    """

    source: str
    notes: tuple[str, ...]
    rows: int | None

    def __str__(self) -> str:
        """The Python, then key by key what became of it, as comments."""
        return "\n".join([self.source, *(f"# {note}" for note in self.notes)])

    @functools.cached_property
    def _defined(self) -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(compile(self.source, "<from_deepspeed>", "exec"), names)  # ours: made of checked numbers and names
        return names

    @property
    def optimizer(self) -> Any:
        """The optax transformation."""
        return self._defined["optimizer"]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `zero_shard`."""
        return self._defined["options"]

    @property
    def step_options(self) -> dict[str, Any]:
        """Keyword arguments of `train_step`."""
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
            `"optax.contrib.muon(2e-2)"`.

    Returns:
        A `FromDeepSpeed`.

    Raises:
        TypeError: If the file holds no object.
        ValueError: If a key is unknown, an `"auto"` is left, batch sizes contradict each other, or something is asked
            for that would train otherwise here; with the path of the key.

    Examples:
        >>> found = from_deepspeed("ds_config.json", auto={"optimizer.params.lr": 3e-4})
        >>> tx = zero_shard(found.optimizer, **found.options)
        >>> step = tx.train_step(loss_fn, **found.step_options)
    """
    if not isinstance(config, Mapping):
        config = json.loads(Path(config).read_text())
    if not isinstance(config, Mapping):
        raise TypeError(f"A DeepSpeed configuration is a JSON object, not a {type(config).__name__}.")
    values = dict(_flattened(config))
    for path, value in (auto or {}).items():
        key_of(path)
        values[path] = value
    if left := [path for path, value in values.items() if value == AUTO]:
        raise ValueError(
            f'{left[0]} is "auto", which Hugging Face fills in. Give it: from_deepspeed(..., '
            f"auto={{{left[0]!r}: ...}})" + (f"; and {', '.join(left[1:])}." if left[1:] else ".")
        )
    for path, value in values.items():
        key = key_of(path)
        if key.stops and _asked(key, value):
            raise ValueError(f"{path}={value!r} has no counterpart here: {key.how}. Remove it to train without.")
    reading = _Reading(values, devices, optimizer)
    return FromDeepSpeed(reading.source(), tuple(reading.notes()), reading.rows)


def key_of(path: str) -> Key:
    """What becomes of the key at a path.

    Raises:
        ValueError: If there is no such key, naming the nearest.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        key = KEYS.get(".".join(parts[:count]))
        if key is not None and (count == len(parts) or key.open or parts[count - 1] == "params"):
            return key
    near = difflib.get_close_matches(path, KEYS, n=1, cutoff=0.5)
    raise ValueError(f"{path} is no key of DeepSpeed." + (f" Do you mean {near[0]}?" if near else ""))


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by path; what is below an open key stays together."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        key = KEYS.get(path)
        if isinstance(value, Mapping) and not (key is not None and key.open):
            yield from _flattened(value, f"{path}.")
        elif value is not None or key is not None or not any(known.startswith(f"{path}.") for known in KEYS):
            yield path, value


def _asked(key: Key, value: Any) -> bool:
    """Whether a value asks for something."""
    enabled = value.get("enabled", True) if isinstance(value, Mapping) else value
    return enabled not in key.off and value != {}


class _Reading:
    """One configuration, read. Lives as long as `from_deepspeed`."""

    def __init__(self, values: dict[str, Any], devices: int | None, optimizer: str | None):
        self.values, self.devices, self.optimizer = values, devices, optimizer
        self.rows, self.accumulate = self._batch()

    def zero(self, name: str, default: Any = None) -> Any:
        """A value below `zero_optimization`."""
        value = self.values.get(f"zero_optimization.{name}")
        return default if value is None else value

    def on(self, path: str) -> bool:
        """Whether a key asks for something."""
        return path in self.values and _asked(key_of(path), self.values[path])

    def source(self) -> str:
        """The Python."""
        options = self._options()
        lines = []
        clip = self.values.get("gradient_clipping", CLIP)
        inner = self.optimizer or optimizer_source(self.values)
        lines.append(f"optimizer = {inner}")
        if clip:
            lines.append(f"optimizer = optax.chain(optax.clip_by_global_norm({float(clip)}), optimizer)")
        for name in filter(self._is_on, ("zero_hpz_partition_size", "mics_shard_size")):
            group = int(self.zero(name))
            lines.append(f'mesh = jax.make_mesh((jax.device_count() // {group}, {group}), ("host", "gpu"))')
        lines.append(f"options = dict({', '.join(f'{name}={value}' for name, value in options.items())})")
        steps = {"accumulate": self.accumulate} if self.accumulate != 1 else {}
        if self.on("bf16.check_grad_overflow"):
            steps["skip_nonfinite"] = True
        lines.append(f"step_options = dict({', '.join(f'{name}={value}' for name, value in steps.items())})")
        lines += ["", "# tx = zerojax.zero_shard(optimizer, **options)"]
        lines.append("# step = tx.train_step(loss_fn, **step_options)")
        if self.rows:
            lines.append(f"# A step is given {self.rows} rows, over all devices.")
        return "\n".join([*_imports("\n".join(lines)), *lines, ""])

    def notes(self) -> Iterator[str]:
        """For each key of the file what became of it."""
        for path, value in self.values.items():
            key = key_of(path)
            fate = {"mapped": "", "not needed": "not needed: ", "not there": "not there: "}[key.fate]
            yield f"{path} = {json.dumps(value)}: {fate}{key.how}"
        if self.on("optimizer.params.lr") and self.values.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"):
            yield "optimizer.params.lr is not used, as there: the schedule goes to its own warmup_max_lr (0.001)"
        if "gradient_clipping" not in self.values:
            yield f"gradient_clipping is not given: {CLIP}, as in DeepSpeed since 2026-06; before, 0 was meant"

    def _is_on(self, name: str) -> bool:
        return self.on(f"zero_optimization.{name}")

    def _options(self) -> dict[str, str]:
        """Arguments of `zero_shard`, as Python."""
        stage = self.zero("stage", 0)
        options = {"stage": str(int(stage))}
        if self._is_on("zero_hpz_partition_size") and self._is_on("mics_shard_size"):
            raise ValueError("zero_hpz_partition_size and mics_shard_size divide parameters in two ways. Give one.")
        for name, argument in (("zero_hpz_partition_size", "params_axis"), ("mics_shard_size", "shard_axis")):
            if self._is_on(name):
                options |= {"mesh": "mesh", "axis": '("host", "gpu")', argument: '"gpu"'}
        if (threshold := self.zero("stage3_param_persistence_threshold")) is not None:
            options["persist_below"] = repr(int(threshold))
        if precision := self._precision():
            options["precision"] = precision
        if offload := self._offload():
            options["offload"] = offload
        wire = {}
        if self._is_on("zero_quantized_weights") or self._is_on("zero_quantized_nontrainable_weights"):
            wire["gather"] = '"int8"'
        if self._is_on("zero_quantized_gradients"):
            wire["reduce"] = '"int4"'
        if self._is_on("zeropp_loco_param"):
            for needed in ("zero_quantized_gradients", "zero_hpz_partition_size"):
                if not self._is_on(needed):
                    raise ValueError(
                        f"zeropp_loco_param feeds errors of quantised gradients back, here those of the reduction "
                        f"across hosts. Give {needed} too, or leave it out."
                    )
            wire["error_feedback"] = "True"
        if wire:
            options["wire"] = f"Wire({', '.join(f'{name}={value}' for name, value in wire.items())})"
        return options

    def _precision(self) -> str:
        """The `Precision`, as Python; empty for float32."""
        named = {"fp16": "jnp.float16", "bf16": "jnp.bfloat16", "fp32": "jnp.float32"}
        found = [name for name in ("fp16", "bf16") if self.on(f"{name}.enabled")]
        if len(found) > 1:
            raise ValueError("fp16 and bf16 are both enabled. Enable one.")
        given = [self.values.get(path) for path in ("data_types.grad_accum_dtype", "communication_data_type")]
        reduce = {named.get(str(one), one) for one in given if one is not None}
        if unknown := reduce - set(named.values()):
            raise ValueError(f"Gradients can be summed in fp32, bf16 and fp16, and not in {unknown.pop()!r}.")
        if len(reduce) > 1:
            raise ValueError(
                "data_types.grad_accum_dtype and communication_data_type differ, and Precision(reduce=) is one type. "
                "Give one, or the same."
            )
        arguments = [f"reduce={reduce.pop()}"] if reduce else []
        if found == ["fp16"]:
            arguments.append(f"loss_scale={self._loss_scale()}")
        if not found and not arguments:
            return ""
        return f"Precision.{found[0] if found else 'fp32'}({', '.join(arguments)})"

    def _loss_scale(self) -> str:
        """Dynamic, or a number, as Python."""
        get = lambda name, default: self.values.get(f"fp16.{name}", default)
        if scale := get("loss_scale", 0):
            return repr(float(scale))
        return (
            f"DynamicScale(initial=2.0**{int(get('initial_scale_power', 16))}, "
            f"growth_interval={int(get('loss_scale_window', 1000))}, hysteresis={int(get('hysteresis', 2))}, "
            f"floor={float(get('min_loss_scale', 1))})"
        )

    def _offload(self) -> str:
        """The `Offload`, as Python; empty for none."""
        device = "cpu" if self._is_on("cpu_offload") else self.zero("offload_optimizer.device", "none")
        params = "cpu" if self._is_on("cpu_offload_param") else self.zero("offload_param.device", "none")
        if params == "nvme":
            raise ValueError(
                'zero_optimization.offload_param.device="nvme": parameters are on the device or in host memory. '
                'Give "cpu".'
            )
        for name, value in (("offload_optimizer", device), ("offload_param", params)):
            if value not in ("none", "cpu", "nvme"):
                raise ValueError(f'zero_optimization.{name}.device is "none", "cpu" or "nvme", not {value!r}.')
        if device == params == "none":
            return ""
        arguments = {"optimizer": '"disk"' if device == "nvme" else '"host"'}
        if device == "nvme":
            path = self.zero("offload_optimizer.nvme_path")
            if path is None:
                raise ValueError('offload_optimizer.device="nvme" needs nvme_path, a folder.')
            arguments["path"] = repr(str(path))
        if params == "cpu":
            arguments["params"] = '"host"'
        if (ratio := self.zero("offload_optimizer.ratio", 1.0)) != 1.0:
            arguments["fraction"] = repr(float(ratio))
        return f"Offload({', '.join(f'{name}={value}' for name, value in arguments.items())})"

    def _batch(self) -> tuple[int | None, int]:
        """Rows of a step, and microbatches: what the file says, and what follows from it."""
        get = lambda name: self.values.get(name)
        rows, micro = get("train_batch_size"), get("train_micro_batch_size_per_gpu")
        accumulate = get("gradient_accumulation_steps")
        rows, micro, accumulate = (None if one is None else int(one) for one in (rows, micro, accumulate))
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
        return rows, accumulate


def _imports(body: str) -> Iterator[str]:
    """What some Python uses of what it may."""
    ours = [
        name for name in ("DynamicScale", "Offload", "Precision", "Wire") if f"{name}(" in body or f"{name}." in body
    ]
    for name, line in {"jax": "import jax", "jnp": "import jax.numpy as jnp", "optax": "import optax"}.items():
        if re.search(rf"\b{name}\.", body):
            yield line
    yield ""
    yield "import zerojax"
    if ours:
        yield f"from zerojax import {', '.join(ours)}"
    yield ""
