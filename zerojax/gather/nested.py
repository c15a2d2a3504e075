"""Run a loop over microbatches inside the loss. Each iteration runs the program of the loop's body.

The rule "loop of its own" makes this segment. The parameters stay sharded. An iteration gathers each parameter where
it is used, and reduce-scatters the gradients before the next iteration starts. The loop adds up the gradients' shards.
The alternative is to gather before the loop, which keeps every gathered parameter for all iterations.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.dims import UNKNOWN
from zerojax.gather.residuals import Static
from zerojax.gather.run import as_function
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import Program, Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.offload.host import to_device

MOST_ITERATIONS = 64  # Each iteration gathers the parameters again. A loop over tokens has thousands of iterations.


@dataclasses.dataclass(frozen=True)
class NestedSegment(Segment):
    """A loop that runs a program in each iteration.

    Attributes:
        program: The body's program. Its arguments are the loop's constants, carry and rows, then `consts`.
        consts: Arrays that the body closes over.
    """

    program: Program
    consts: Sequence

    @property
    def loop(self) -> compat.LoopEqn:
        """Return the loop, which is the segment's only equation."""
        loop = compat.loop_of(self.jaxpr.eqns[0])
        assert loop is not None
        return loop

    def entered(self, *transforms: str) -> Any:
        """Enter the context of the loop; see `Segment`. JAX differentiates the loop, and adds the transforms."""
        return names.at(self.jaxpr.eqns[0])

    @property
    def first_gather(self) -> Sequence[ShardedParam]:
        """Return no parameters, because the iterations gather them."""
        return ()

    def last_gather(self, residuals: Any) -> Sequence[ShardedParam]:
        """Return no parameters, because the iterations gather them."""
        return ()

    @property
    def gathered_bytes(self) -> list[int]:
        return [size for segment in self.program.segments for size in segment.gathered_bytes]

    @property
    def stacks(self) -> Sequence[ShardedParam]:
        """Return the stacks; see `Segment`."""
        stacks = {param.root for segment in self.program.segments for param in segment.stacks}
        by_var = dict(zip(self.jaxpr.invars, self.params, strict=False))
        pairs = zip(self.jaxpr.eqns[0].invars, self.program.invars, strict=False)
        return [by_var[atom] for atom, var in pairs if var in stacks]

    @property
    def operands(self) -> list:
        """Return an empty list. The backward pass needs no operands: it does not slice parameters a second time."""
        return []

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, tuple[Callable, Static] | None]:
        """Run the forward pass; see `Segment`."""
        _, others = self.take_inputs(gathers, ahead=False)
        # A shard in host memory is copied to the device before the loop, because the loop adds up its gradient there.
        roots = {param.root: to_device(gathers.env[param.root]) for param in self.params}
        env = {**gathers.env, **roots, **dict(zip(self.others, others, strict=True))}
        # The backward pass begins after the last iteration, so that each iteration would keep gathered parameters.
        program = as_function(self.program, dataclasses.replace(gathers.options, keeps_last=False), zeros={})
        if not moving:
            return self._loop(program, env), None
        live = set(self.live_results(moving))
        outputs = [i for i, key in enumerate(self.results) if key in live]
        inputs = [v for v in dict.fromkeys(self.sources) if v in moving]

        def run(values):
            results = self._loop(program, {**env, **dict(zip(inputs, values, strict=True))})
            return [results[i] for i in outputs], results

        _, pull, results = jax.vjp(run, [env[v] for v in inputs], has_aux=True)
        # `pull` maps the cotangents of the results with the indices `outputs` to the cotangents of `inputs`.
        return results, (pull, Static((outputs, inputs)))

    def backward(self, residuals: tuple[Callable, Static], gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        pull, active = residuals
        outputs, inputs = active.value
        cotangents = self.cotangents(outputs, grads)
        if cotangents is None:
            return
        _, (cotangents, due) = gathers.take(cotangents, grads.due, rows=[UNKNOWN] * len(cotangents), ahead=False)
        grads.settle(due)
        (to_inputs,) = pull(cotangents)
        grads.add_others(inputs, gathers.finish(to_inputs))

    def _loop(self, program: Callable, env: Mapping) -> list:
        """Run the loop with `program` as its body, and return its results. `env` has the values of variables."""
        (eqn,) = self.jaxpr.eqns
        loop, by_var = self.loop, dict(zip(self.jaxpr.invars, self.sources, strict=True))
        params = dict(zip(self.jaxpr.invars, self.params, strict=False))

        def value(atom):
            if compat.is_literal(atom):
                return jnp.asarray(atom.val, atom.aval.dtype)
            if atom in params:
                return params[atom].sliced(env).astype(params[atom].wide)
            return env[by_var[atom]]

        values, split = [value(atom) for atom in eqn.invars], loop.consts + loop.carry

        def body(carry, rows):
            results = program(*values[: loop.consts], *carry, *rows, *self.consts)
            return results[: loop.carry], results[loop.carry :]

        options = {"length": loop.length, "reverse": loop.reverse, "unroll": loop.unroll}
        carry, stacks = lax.scan(body, values[loop.consts : split], values[split:], **options)
        results = dict(zip(eqn.outvars, [*carry, *stacks], strict=True))
        return [results[var] for var in self.jaxpr.outvars]


def iterations_are_independent(loop: compat.LoopEqn) -> bool:
    """Return whether iterations only add to the carry, and do not depend on each other in any other way."""
    body = compat.opened(loop.body)[0]
    uses, _ = jaxprs.uses_of(body)
    carried = zip(body.invars[loop.consts :], body.outvars[: loop.carry], strict=False)
    return not body.effects and all(_is_summed(before, after, uses) for before, after in carried)


def _is_summed(before: Any, after: Any, uses: Mapping) -> bool:
    """Return whether a loop only adds to a carry, or leaves it unchanged. A carry of integers may change in any way."""
    if not jnp.issubdtype(before.aval.dtype, jnp.inexact) or before is after:
        return True
    var = before
    while var is not after and (readers := uses.get(var, ())):
        if len(readers) > 1 or readers[0][0].primitive.name not in ("add", "add_any", "convert_element_type"):
            return False
        (var,) = readers[0][0].outvars
    return True
