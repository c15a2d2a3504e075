"""A scan over layers: stacked parameters stay sharded until the iteration that uses them.

The rule "loop over layers" makes this segment. Each pass carries the gathered parameters of one iteration while it
gathers those of the next iteration, so that the gather hides behind the iteration. Plain autodiff would keep that
carry, which means every layer, as residuals. So the two passes are loops of our own (`scan_forward`, `scan_backward`),
and each iteration writes its residuals in place into stacks. The backward loop reduce-scatters the gradients of one
iteration while it computes the next one.

The first and last iterations gather or reduce less than the others. They are peeled, so that no layer is moved twice.
The alternative, a clamped index, would gather one layer twice in each pass.
"""

import dataclasses
import functools
from collections.abc import Sequence, Set

from zerojax.gather import scan_backward, scan_forward
from zerojax.gather.loop import Loop
from zerojax.gather.residuals import BlockResiduals
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import Segment, bytes_of
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class ScanSegment(Segment):
    """A loop of which each iteration gathers its own layers."""

    @functools.cached_property
    def loop(self) -> Loop:
        """Return the scan's operands, sorted."""
        return Loop.of(self.jaxpr, self.params)

    @property
    def first_gather(self) -> Sequence[ShardedParam]:
        """Return the parameters that the first iteration uses."""
        return self.loop.params_of(0)

    def last_gather(self, residuals: BlockResiduals) -> Sequence[ShardedParam]:
        """Return the parameters that the backward pass of the last iteration reads."""
        if residuals.gathered is not None:
            return []
        last = self.loop.params_of(self.loop.length - 1)
        return [param for i, param in enumerate(last) if i in residuals.passes.value.needed]

    @property
    def gathered_bytes(self) -> list[int]:
        """Return the bytes of two iterations: no more are gathered at once."""
        return [bytes_of(self.first_gather)] * min(self.loop.length, 2)

    @property
    def stacks(self) -> Sequence[ShardedParam]:
        """Return the stacks; see `Segment`."""
        return self.loop.stacked

    @property
    def waits_for_next(self) -> bool:
        """Return False if the iterations gather nothing.

        XLA then hides the next segment's gathers behind the whole loop. With a wait, it ended half of these gathers
        before the loop.
        """
        return bool(self.loop.stacked)

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        """Run the forward pass; see `Segment`."""
        return scan_forward.forward(self, self.loop, gathers, moving)

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        scan_backward.backward(self, self.loop, residuals, gathers, grads)
