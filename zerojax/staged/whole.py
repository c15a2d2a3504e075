"""A loop whose layers cannot be read one by one: its parameters are on the devices, sharded, while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.mesh import constrain
from zerojax.gather.program import Program
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options, Uses
from zerojax.gather.segments import Segment
from zerojax.staged.sources import Source

if TYPE_CHECKING:
    from jaxtyping import Array


class WholeStage:
    """A segment that runs as the engine runs it, on complete shards of its parameters.

    Attributes:
        segment: The segment.
        roots: For each array that its parameters are taken from, where its shards come from: one source, or one per
            layer if the array is a stack of parameters.
        trained: Those whose gradient is wanted.
    """

    def __init__(
        self, segment: Segment, roots: Mapping[Any, tuple[Source, ...]], moving: Set, program: Program, options: Options
    ):
        """Store the arguments; nothing is traced yet. `moving` are the sources that want cotangents."""
        self.segment, self.roots = segment, dict(roots)
        self.trained = [root for root in roots if root in moving]
        self._moving, self._program, self._options = moving, program, options
        self._stacks = program.joined
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward)

    @property
    def is_differentiated(self) -> bool:
        """Return whether there is a backward pass."""
        return bool(self._moving)

    @property
    def sources(self) -> list[Source]:
        """Return where all shards come from."""
        return [source for sources in self.roots.values() for source in sources]

    @property
    def reason(self) -> str:
        """Say which parameters are read before the loop, and why."""
        paths = ", ".join(sorted({source.of.leaf.path for source in self.sources}))
        return f"params{paths}: a loop does not read this layer by layer, so it is read before the loop"

    def _env(self, shards: Mapping[Any, Sequence[Array]]) -> dict:
        return {root: jnp.stack(xs) if root in self._stacks else xs[0] for root, xs in shards.items()}

    def _forward(self, shards: Mapping[Any, Sequence[Array]], others: Mapping[Any, Array]) -> tuple[list, Any]:
        """Return `(results, residuals)`. `others` has the other inputs, and what slices of the parameters read."""
        env = {**others, **self._env(shards)}
        return self.segment.forward(self._gathers(env, self.segment.first_gather), self._moving)

    def _backward(
        self, shards: Mapping[Any, Sequence[Array]], others: Mapping[Any, Array], residuals: Any, cotangents: Mapping
    ) -> tuple[dict, dict]:
        """Return `(gradients of the trained shards, cotangents of the other inputs)`, the latter if there are any."""
        segment, program = self.segment, self._program
        env = {**others, **self._env(shards)}
        grads = GradScheduler(env, [*program.invars, *program.held], self._options)
        grads.cotangents.update(cotangents)
        segment.backward(residuals, self._gathers(env, segment.last_gather(residuals)), grads)
        grads.finish()
        to_shards = {root: self._grads_of(root, grads.cotangents.get(root), shards[root]) for root in self.trained}
        return to_shards, {v: grads.cotangents[v] for v in segment.others if v in grads.cotangents}

    def _grads_of(self, root: Any, grad: Array | None, shards: Sequence[Array]) -> list[Array]:
        """Return the gradients of the sources of one array."""
        if grad is None:
            grad = jnp.zeros_like(self._env({root: shards})[root])
        layers = list(grad) if root in self._stacks else [grad]
        mesh = self.roots[root][0].of.mesh
        pairs = zip(layers, self.roots[root], strict=True)
        return [constrain(mesh, x, source.of.leaf) if source.param is None else x for x, source in pairs]

    def _gathers(self, env: dict, params: Sequence) -> GatherScheduler:
        """Return the gathers of this segment alone; see `Stage`."""
        program = self._program
        uses = Uses([params, []], [self.segment.computes, False], frozenset(program.invars), program.rows)
        return GatherScheduler(env, uses, self._options)
