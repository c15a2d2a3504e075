"""Rates of a training loop, and a hook that gives its metrics to TensorBoard, W&B or another writer."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from jaxtyping import PyTree


class Throughput:
    """Tokens and FLOPs a second, and what share of the devices' peak that is.

    FLOPs are two for each multiplication of a matrix product or convolution; nothing else is counted. There are two
    conventions. **HFU**, hardware FLOPs utilization, counts what a device computes: the products of the compiled step,
    those of rematerialisation included. **MFU**, model FLOPs utilization, counts what the model requires, however
    it is computed: `model_flops` for each token. Remat raises the first and not the second.

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
            compiled: The step, as `step.lower(state, batch).compile()` gives it. None: no FLOPs are counted.
            model_flops: FLOPs that the model requires for a token, forward and backward: 6 for each parameter
                of a matrix, and those of attention. None: no MFU.
            peak: FLOP/s of one device; or the name of a GPU, such as `"h200"`, whose dense rate for the type
                in which most of the step's FLOPs are computed it is. None: no utilization.
            clock: Gives seconds.

        Raises:
            ValueError: If the GPU is unknown, `peak` is not above 0, or what utilization needs is missing.
        """
        if compiled is None and (peak is not None or model_flops is not None):
            raise ValueError(
                "Utilization is of a program on its devices: give compiled=step.lower(state, batch).compile()"
            )
        by_type = {} if compiled is None else product_flops(kernels(read(compiled)))
        if isinstance(peak, str):
            dtype = max(by_type, key=lambda dtype: by_type[dtype], default="f32")
            peak = Device.of(Topology.parse(f"{peak.lower()}:1")).rate(dtype)
        if peak is not None and not peak > 0:
            raise ValueError(f"peak is FLOP/s of a device and must be above 0, not {peak}.")
        self.flops = None if compiled is None else sum(by_type.values())
        self.model_flops, self.peak = model_flops, peak
        shardings = [] if compiled is None else jax.tree.leaves(compiled.input_shardings)
        self.devices = max((len(one.device_set) for one in shardings), default=1)
        self._clock, self._last = clock, None

    def __call__(self, *, steps: int, tokens: int = 0) -> dict[str, float]:
        """Return rates since the last call. Wait for the last step's metrics before.

        Args:
            steps: Done since the last call.
            tokens: In these steps, over all devices; 0 for a model that has none.

        Returns:
            `step_seconds`; `tokens_per_second`, of all devices; `flops_per_second`, computed by one device; `hfu`
            and `mfu`, shares of its peak. What was not given is left out. The first call starts the
            clock and returns nothing, so that what compiles before it does not count.
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
    """A hook for a training loop: every so many steps it hands the metrics that are scalars, and rates, to a writer.

    Steps between are not waited for. With several processes the first one writes.

    Examples:
        >>> log = Log(wandb.log, every=10, throughput=Throughput(step.lower(state, batch).compile()))
        >>> for i, batch in enumerate(batches, start=1):
        ...     state, metrics = step(state, batch)
        ...     log(i, metrics, tokens=batch.size)
    """

    def __init__(self, write: Callable[..., Any], *, every: int = 1, throughput: Throughput | None = None):
        """Say where metrics go.

        Args:
            write: Called as `write(values, step=step)`, which is how `wandb.log` is called; `values` has a float
                for each name. For TensorBoard, and `clu` with its `write_scalars(step, values)`, a lambda.
            every: Write at steps that this divides.
            throughput: Whose rates are written beside; it is called here alone.

        Raises:
            TypeError: If `every` is no integer.
            ValueError: If `every` is below 1.
        """
        check_count("every", every, "steps", least=1)
        self.write, self.every, self.throughput = write, every, throughput
        self._steps = self._tokens = 0

    def __call__(self, step: int, metrics: Mapping[str, Any], *, tokens: int = 0) -> None:
        """Take note of a step.

        Args:
            step: Its number.
            metrics: What it returned. Nested ones are named `"grad_norms/layer/kernel"`; what is no
                scalar, such as logits, is left out.
            tokens: In its batch, over all devices.

        Raises:
            TypeError: If one is no number, such as a string, naming it.
        """
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens
        if step % self.every:
            return
        values = scalars(metrics)
        if self.throughput is not None:
            values |= self.throughput(steps=self._steps, tokens=self._tokens)
        self._steps = self._tokens = 0
        if jax.process_index() == 0:
            self.write(values, step=step)


def scalars(metrics: PyTree) -> dict[str, float]:
    """Return the scalars of a tree by path, as floats. Waits for them."""
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
