"""Run a loop whose layers cannot be read one by one. Its parameters stay on the devices, sharded, while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.mesh import constrain
from zerojax.gather.options import Options
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Uses
from zerojax.gather.segments import Program, Segment
from zerojax.layout.chunked import MOST_ROWS
from zerojax.staged.sources import Source

if TYPE_CHECKING:
    from jaxtyping import Array


class WholeStage:
    """The forward and backward programs of a segment whose parameters are all on the devices while it runs.

    Attributes:
        segment: The segment.
        roots: The sources of each array of which the segment's parameters are slices, by variable. A stack that the
            loss makes of parameters has one source per layer, and any other array has one source.
        trained: The keys of `roots` whose gradients are needed.
    """

    def __init__(
        self, segment: Segment, roots: Mapping[Any, tuple[Source, ...]], moving: Set, program: Program, options: Options
    ):
        """Store the arguments. `moving` contains the segment's input variables whose cotangents are needed."""
        self.segment, self.roots = segment, dict(roots)
        self.trained = [root for root in roots if root in moving]
        self._moving, self._program, self._options = moving, program, options
        self._stacks = program.joined
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward)

    @property
    def is_differentiated(self) -> bool:
        return bool(self._moving)

    @property
    def sources(self) -> list[Source]:
        return [source for sources in self.roots.values() for source in sources]

    @property
    def reason(self) -> str:
        """Return a message that says which parameters are read before the loop, and why."""
        paths = ", ".join(f"params{path}" for path in sorted({source.of.leaf.path for source in self.sources}))
        return (
            f"A loop does not read {paths} layer by layer, so their shards are read before the loop and stay on "
            f"the devices while it runs. Scan over a stack of at most {MOST_ROWS} layers, or use accumulate= of "
            f"train_step for microbatches."
        )

    @property
    def inputs(self) -> list:
        """Return the variables that the segment, or a slice of its parameters, reads and that are not parameters."""
        return list(dict.fromkeys([*self.segment.others, *self.segment.operands]))

    def _env(self, shards: Sequence[Sequence[Array]], inputs: Sequence[Array | None]) -> dict:
        """Map variables to values. `shards` are in the order of `roots`, and `inputs` in the order of `self.inputs`."""
        pairs = zip(self.roots, shards, strict=True)
        roots = {root: jnp.stack(xs) if root in self._stacks else xs[0] for root, xs in pairs}
        return roots | {v: x for v, x in zip(self.inputs, inputs, strict=True) if x is not None}

    def _forward(self, shards: Sequence[Sequence[Array]], inputs: Sequence[Array]) -> tuple[list, Any]:
        return self.segment.forward(self._gathers(self._env(shards, inputs), self.segment.first_gather), self._moving)

    def _backward(
        self, shards: Sequence[Sequence[Array]], inputs: Sequence, residuals: Any, cotangents: Sequence
    ) -> tuple[list, list]:
        """Return `(gradients of the trained shards, cotangents of the segment's other inputs)`.

        `inputs` contains the values that slices of the parameters read, and None for other inputs. `cotangents`
        contains the cotangent of each result, or None if it is zero.
        """
        segment, program, env = self.segment, self._program, self._env(shards, inputs)
        grads = GradScheduler(env, [*program.invars, *program.held], self._options)
        pairs = zip(segment.results, cotangents, strict=True)
        grads.cotangents.update({key: x for key, x in pairs if x is not None})
        segment.backward(residuals, self._gathers(env, segment.last_gather(residuals)), grads)
        grads.finish()
        to_shards = [self._grads_of(root, grads.cotangents.get(root), env[root]) for root in self.trained]
        return to_shards, [grads.cotangents.get(v) for v in segment.others]

    def _grads_of(self, root: Any, grad: Array | None, stored: Array) -> list[Array]:
        """Divide the gradient of one array into the gradients of its sources."""
        grad = jnp.zeros_like(stored) if grad is None else grad
        layers = list(grad) if root in self._stacks else [grad]
        mesh = self.roots[root][0].of.mesh
        pairs = zip(layers, self.roots[root], strict=True)
        return [constrain(mesh, x, source.of.leaf) if source.param is None else x for x, source in pairs]

    def _gathers(self, env: dict, params: Sequence) -> GatherScheduler:
        """Return a scheduler of the gathers of this segment; see `Stage._gathers`."""
        program = self._program
        uses = Uses([params, []], [self.segment.computes, False], frozenset(program.invars), program.rows)
        return GatherScheduler(env, uses, self._options)
