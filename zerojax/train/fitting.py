"""Choose the share of activations that the blocks of a loss save, so that the compiled step fits into memory.

All blocks save the same share of their bytes (`zerojax.budget.blocks`). The predicted peak is `base + held(share)`. The
bytes that blocks save, `held`, are known before compilation. Each compiled program corrects `base`, the other bytes.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.budget.blocks import BlockMemory, Blocks, memory_of_blocks
from zerojax.config import Config
from zerojax.inspect.hlo import peak_bytes
from zerojax.placement.storage import is_on_host
from zerojax.train.same_run import signature_of
from zerojax.train.state import ZeroState
from zerojax.train.step_program import JittedStep
from zerojax.units import format_bytes

# If a program takes less than this part of the memory, the step is compiled again with a larger share.
ENOUGH = 0.85
# The n-th compilation has the largest share whose predicted peak is at most the n-th of these parts of the memory. The
# first prediction does not include the temporary memory outside of blocks, which only a compiled program shows.
_AIMS = (1.0, 0.97, 0.94)
# Shares are multiples of 1 / `_STEPS`.
_STEPS = 64


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compilation of the step.

    Attributes:
        share: The share of the blocks' bytes that is saved.
        predicted: The peak that was predicted before this compilation, in bytes per device.
        peak: The peak of the compiled program in bytes per device.
    """

    share: float
    predicted: int
    peak: int


@dataclasses.dataclass(frozen=True)
class MemoryFit:
    """The share that was chosen for one set of argument shapes.

    Attributes:
        memory: The memory that the step may take, in bytes per device.
        trials: The compilations, in their order.
        chosen: The trial whose program the step runs.
        blocks: The bytes that each block saves and recomputes, and the FLOPs that it repeats.
    """

    memory: int
    trials: tuple[Trial, ...]
    chosen: Trial
    blocks: tuple[BlockMemory, ...]

    def __str__(self) -> str:
        return (
            f"With memory={format_bytes(self.memory)} the number of compilations was {len(self.trials)}. The chosen "
            f"program takes {self.chosen.peak / self.memory:.0%} of the memory; {format_bytes(self.chosen.predicted)} "
            f"were predicted."
        )


class DoesNotFit(ValueError):
    """A step needs more memory than its `memory=`. `peak` is the least compiled peak in bytes per device."""

    def __init__(self, message: str, peak: int):
        super().__init__(message)
        self.peak = peak


class FittedStep:
    """The executor of a step with `memory=`. It wraps another executor, and runs the program whose share fits."""

    def __init__(self, executor: JittedStep):
        self._executor = executor
        self._blocks = Blocks()
        self._with_share = functools.cache(self._saving)
        self._fits: dict[Any, MemoryFit] = {}

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        return self._chosen(state, rows, args).run(state, rows, args)

    def inside(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        raise TypeError(
            "train_step(memory=) compiles the step to see what fits, which is not possible while it is traced. "
            "Call the step as it is, outside of jax.jit, or use zerojax.remat_within in the loss instead."
        )

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        return self._chosen(state, rows, args).trace(state, rows, args)

    def lower_update(self, state: ZeroState) -> list[Any]:
        return self._executor.lower_update(state)

    def _chosen(self, state: ZeroState, rows: Any, args: tuple) -> JittedStep:
        return self._with_share(self.fit(state, rows, args).chosen.share)

    def fit(self, state: ZeroState, rows: Any, args: tuple) -> MemoryFit:
        """Return the `MemoryFit` for the shapes of the arguments. The first call with new shapes compiles the step."""
        placed = tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(args))
        key = signature_of((state, rows, args)), placed
        if key not in self._fits:
            program = self._executor.program
            memory: Any = program.options.memory
            self._fits[key] = fit_memory(
                lambda share: self._with_share(share).trace(state, rows, args).lower(),
                self._blocks,
                device_bytes(program.config) if memory == "auto" else memory,
                arguments=sum(map(_bytes_per_device, jax.tree.leaves((state, rows, args)))),
                devices=devices_of_a_block(program.config),
            )
        return self._fits[key]

    def _saving(self, share: float) -> JittedStep:
        loss = self._executor.program.loss
        return self._executor.with_loss(dataclasses.replace(loss, fn=self._blocks.rematerialised(loss.fn, share)))


def devices_of_a_block(config: Config) -> int:
    """Return the number of devices over which the values of a block in the loss are divided."""
    return config.data.workers if config.view == "global" else 1


def _bytes_per_device(x: Any) -> int:
    """Return the bytes of one device's part of `x` in device memory. 0 if `x` is neither an array nor a shape."""
    sharding = getattr(x, "sharding", None)
    if not hasattr(x, "dtype") or (sharding is not None and is_on_host(x)):
        return 0
    return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize


def device_bytes(config: Config) -> int:
    """Return the bytes of memory that programs may use on each device of the mesh, the least over all processes."""
    device = config.mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f'train_step(memory="auto") uses the memory of the device, and {device.device_kind} does not tell how much '
            f'it has. Give the bytes per device, such as memory="72 GB".'
        )
    limit = np.array(stats["bytes_limit"], np.int64)
    # All processes must choose the same program.
    return int(limit if jax.process_count() == 1 else multihost_utils.process_allgather(limit).min())


def fit_memory(
    lower: Callable[[float], Any], blocks: Blocks, memory: int, *, arguments: int, devices: int
) -> MemoryFit:
    """Find the largest share whose compiled program takes at most `memory` bytes per device.

    `lower(share)` lowers the step whose blocks save this share of their bytes, and updates `blocks`. The step's
    arguments have `arguments` bytes per device. The blocks' bytes are divided over `devices`.

    At most three programs are compiled. If none of them fits, share 0 is compiled, too. If this does not fit either,
    raise `DoesNotFit`.
    """
    lowered, trials = {1.0: lower(1.0)}, list[Trial]()
    held = lambda share: blocks.held_bytes(share) / devices
    base, best = arguments, None
    for aim in _AIMS:
        share = largest_share(base, held, aim * memory)
        if held(share) in {held(trial.share) for trial in trials}:  # the same program
            break
        trials.append(_compiled(lowered.get(share) or lower(share), share, base + held(share)))
        base = trials[-1].peak - held(share)
        best = max((trial for trial in trials if trial.peak <= memory), key=lambda trial: trial.share, default=None)
        if best is not None and (best.share == 1 or best.peak >= ENOUGH * memory):
            break
    if best is None and trials[-1].share > 0:
        trials.append(_compiled(lower(0.0), 0.0, base + held(0.0)))
        best = trials[-1] if trials[-1].peak <= memory else None
    if best is None:
        least = min(trials, key=lambda trial: trial.peak)
        raise DoesNotFit(_nothing_fits(least, blocks, memory, arguments), least.peak)
    return MemoryFit(memory, tuple(trials), best, memory_of_blocks(blocks, best.share, devices))


def _compiled(lowered: Any, share: float, predicted: float) -> Trial:
    return Trial(share, int(predicted), peak_bytes(lowered.compile()))


def largest_share(base: float, held: Callable[[float], float], memory: float) -> float:
    """Return the largest share with `base + held(share) <= memory`, or 0 if there is no such share."""
    fitting = bisect.bisect_right(range(_STEPS + 1), memory, key=lambda step: base + held(step / _STEPS))
    return max(fitting - 1, 0) / _STEPS


def _nothing_fits(least: Trial, blocks: Blocks, memory: int, arguments: int) -> str:
    found = (
        f"With the least activations the compiled step takes {format_bytes(least.peak)} per device, of which "
        f"{format_bytes(arguments)} are its arguments (parameters, optimizer state and batch), and "
        f"train_step(memory=) allows {format_bytes(memory)}: {format_bytes(least.peak - memory)} are missing."
    )
    if not blocks.found:
        found += (
            " The loss has no blocks whose activations could be recomputed: mark its layers with zerojax.block, or run "
            "them in a jax.lax.scan. A layer that contains jax.checkpoint is no such block, because it says what to "
            "recompute: remove jax.checkpoint, or let it save less."
        )
    remedy = "activations: use accumulate=, fewer rows, or smaller blocks."
    if 2 * arguments > least.peak:
        remedy = "arguments: use a higher stage, more devices, or Offload(optimizer='host')."
    return f"{found} Most of it are {remedy} zerojax.plan.fit searches for you."
