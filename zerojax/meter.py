"""Measure the rates of a training loop, and pass its metrics to TensorBoard, W&B or another writer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config import check_count
from zerojax.gpus.devices import Device
from zerojax.gpus.topology import Topology
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.layout.chunked import is_chunked
from zerojax.placement.storage import is_stored_node
from zerojax.train.statistics import statistics

if TYPE_CHECKING:
    from jaxtyping import PyTree


class Throughput:
    """Measures tokens and FLOPs per second, and the utilization of the devices' peak rate.

    Only matrix products and convolutions count, with two FLOPs per multiplication. There are two conventions for
    utilization. **HFU**, hardware FLOPs utilization, counts all products of the compiled step, including the products
    that remat repeats. **MFU**, model FLOPs utilization, counts `model_flops` per token, whatever the step computes.
    Remat raises HFU, but not MFU.

    References:
        Chowdhery et al. 2022, arXiv 2204.02311, appendix B.

    Examples:
        >>> rates = Throughput(step.lower(state, batch).compile(), model_flops=6 * parameters, peak="h200")
        >>> rates(steps=10, tokens=10 * rows * length)
    """

    def __init__(
        self,
        compiled: Any = None,
        *,
        model_flops: float | None = None,
        peak: str | float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Count the FLOPs of a step.

        Args:
            compiled: The result of `step.lower(state, batch).compile()`. If it is None, no FLOPs are counted.
            model_flops: FLOPs that the model requires per token, forward and backward: 6 for each element of a matrix,
                plus the FLOPs of attention. If it is None, there is no MFU.
            peak: FLOP/s of one device, or the name of a GPU, such as `"h200"`. The name selects the GPU's dense rate
                for the type in which most of the step's FLOPs run. Without `peak`, there is no utilization.
            clock: A function that returns the time in seconds.

        Raises:
            ValueError: If the GPU is unknown, `peak` is not above 0, or `compiled` is missing.
        """
        if compiled is None and (peak is not None or model_flops is not None):
            raise ValueError("Utilization needs the compiled step: give compiled=step.lower(state, batch).compile().")
        by_type = {} if compiled is None else product_flops(kernels(read(compiled)))
        if isinstance(peak, str):
            dtype = max(by_type, key=lambda dtype: by_type[dtype], default="f32")
            peak = Device.of(Topology.parse(f"{peak.lower()}:1")).rate(dtype)
        if peak is not None and not peak > 0:
            raise ValueError(f"peak is {peak}, but a device's FLOP/s must be above 0.")
        self.flops = None if compiled is None else sum(by_type.values())
        self.model_flops, self.peak = model_flops, peak
        shardings = [] if compiled is None else jax.tree.leaves(compiled.input_shardings)
        self.devices = max((len(one.device_set) for one in shardings), default=1)
        self._clock, self._last = clock, None

    def __call__(self, *, steps: int, tokens: int = 0) -> dict[str, float]:
        """Return the rates since the last call. Before a call, wait for the metrics of the last step.

        Args:
            steps: Number of steps since the last call.
            tokens: Tokens in these steps, over all devices; 0 for a model without tokens.

        Returns:
            `step_seconds`; `tokens_per_second` of all devices; `flops_per_second` of one device; `hfu` and `mfu`, as
            shares of a device's peak. A rate is left out if an option that it needs was not given. The first call
            starts the clock and returns no rates, so that earlier compilation does not count.
        """
        now = self._clock()
        seconds, self._last = now - (now if self._last is None else self._last), now
        if not seconds or not steps:
            return {}
        found = {"step_seconds": seconds / steps}
        if tokens:
            found["tokens_per_second"] = tokens / seconds
        if self.flops is not None:
            found["flops_per_second"] = self.flops * steps / seconds
        if self.flops is not None and self.peak is not None:
            found["hfu"] = found["flops_per_second"] / self.peak
        if self.model_flops is not None and self.peak is not None and tokens:
            found["mfu"] = self.model_flops * tokens / self.devices / seconds / self.peak
        return found


class Log:
    """A hook for a training loop that passes scalar metrics, and rates, to a writer at every `every`-th step.

    Only at these steps does the loop wait for the metrics. With several processes, only process 0 writes.

    Examples:
        >>> log = Log(wandb.log, every=10, throughput=Throughput(step.lower(state, batch).compile()), stats=True)
        >>> for i, batch in enumerate(batches, start=1):
        ...     state, metrics = step(state, batch)
        ...     log(i, metrics, tokens=batch.size, params=state.params)
    """

    def __init__(
        self,
        write: Callable[..., Any],
        *,
        every: int = 1,
        throughput: Throughput | None = None,
        stats: bool = False,
    ):
        """Choose the writer.

        Args:
            write: A function called as `write(values, step=step)`, such as `wandb.log`. `values` is a dict of floats.
                Wrap a writer with other arguments, such as `clu`'s `write_scalars(step, values)`, in a lambda.
            every: Write at each step whose number is a multiple of `every`.
            throughput: Measures the rates to write. Do not call this object elsewhere.
            stats: Also write the statistics of each parameter, as `zerojax.statistics` computes them; `parameters`,
                their number; `memory/in_use` and `memory/peak`, the bytes of the device of this process that uses the
                most, if the backend counts them; and `update_ratios`, for a step with `leaf_norms=True`.

        Raises:
            TypeError: If `every` is not an integer.
            ValueError: If `every` is below 1.
        """
        check_count("every", every, "steps", least=1)
        self.write, self.every, self.throughput, self.stats = write, every, throughput, stats
        self._steps = self._tokens = 0

    def __call__(self, step: int, metrics: Mapping[str, Any], *, tokens: int = 0, params: PyTree = None) -> None:
        """Record a step, and write its metrics if its number is a multiple of `every`.

        Args:
            step: The number of the step.
            metrics: The metrics that the step returned. A nested metric is named `"grad_norms/layer/kernel"`. Arrays
                that are no scalars, such as logits, are left out.
            tokens: Tokens in the step's batch, over all devices.
            params: With `stats`, the parameters after the step, or the `ZeroState`, `TrainState` or NNX module that
                contains them. Only its parameters are described. All processes must make this call.

        Raises:
            TypeError: If a metric is not a number, such as a string. The error names the metric. Also if `stats` is set
                and `params` is missing.
        """
        if self.stats and params is None:
            raise TypeError("Log(stats=True) describes the parameters: call log(step, metrics, params=state.params).")
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if step % self.every:
            return
        values = scalars(metrics)
        if self.throughput is not None:
            values |= self.throughput(steps=self._steps, tokens=self._tokens)
        if self.stats:
            params = params_in(params)
            values |= update_ratios(values) | memory_in_use()
            values["parameters"] = float(sum(map(size_of, jax.tree.leaves(params, is_leaf=is_stored_node))))
            values |= scalars({"params": statistics(params)})
        self._steps = self._tokens = 0
        if jax.process_index() == 0:
            self.write(values, step=step)


def update_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return the norm of each update, divided by the norm of the parameter, if the step has measured both."""
    of = {name.removeprefix("update_norms"): x for name, x in values.items() if name.startswith("update_norms")}
    pairs = {name: (x, values[f"param_norms{name}"]) for name, x in of.items() if f"param_norms{name}" in values}
    with np.errstate(divide="ignore", invalid="ignore"):  # a parameter may be zero: the ratio is then infinite
        return {f"update_ratios{name}": float(np.divide(*pair)) for name, pair in pairs.items()}


def params_in(tree: PyTree) -> PyTree:
    """Return the parameters of a training state or of an NNX module. Any other tree is returned unchanged."""
    nnx = sys.modules.get("flax.nnx")  # imported by every program that has a module
    if nnx is not None and isinstance(tree, nnx.Module):
        return nnx.state(tree, nnx.Param)
    return tree.params if hasattr(tree, "params") and hasattr(tree, "opt_state") else tree


def size_of(x: Any) -> int:
    """Return the number of elements of a parameter, without padding."""
    return x.leaf.size if is_chunked(x) else int(np.prod(np.shape(x), dtype=np.int64))


def memory_in_use() -> dict[str, float]:
    """Return the bytes in use, and their peak, of the device of this process that uses the most. CPUs count none."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    names = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use"}
    return {
        f"memory/{name}": float(max(stats[key] for stats in found))
        for name, key in names.items()
        if found and all(key in stats for stats in found)
    }


def scalars(metrics: PyTree) -> dict[str, float]:
    """Wait for the scalars of a tree, and return them as floats by path."""
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    for path, x in leaves:
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float):
            name = f"metrics{jax.tree_util.keystr(path)}"
            raise TypeError(f"Log writes numbers, and {name} is {x!r:.60}, a {type(x).__name__}. Leave it out.")
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(np.asarray(x))
        for path, x in leaves
        if jnp.ndim(x) == 0 and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    }
