"""Compile the programs of a step with parameters on disk, and find the step's peak of device memory.

XLA compiles each program for the shardings of its operands. Operands that other programs compute have the shardings of
these programs' results, as in a step that runs. Equal programs are compiled once.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import compat
from zerojax.inspect.memory import memory_analysis
from zerojax.planning.compiled_plan import HELD, RESULTS, TEMPORARY, CompiledStep, part_of
from zerojax.planning.staged_trace import StepTrace

JIT, READ_OR_WRITE = "jit", "device_put"  # the names of primitives


def compile_trace(trace: StepTrace, mesh: Mesh, parts: Mapping[str, str]) -> CompiledStep:
    """Compile every program of a trace. `parts` names the parts of memory, as in `StepFacts`.

    Python allocates memory in the order in which it launches programs. So the peak is the largest sum, over all
    programs, of the live arrays, the program's temporary memory, and its results that do not reuse donated arrays.
    """
    compiler, ends = Compiler(mesh), last_uses(trace)
    resident = Counter[str]()
    given = {**trace.inputs, **trace.consts}
    shapes: dict[Any, Any] = {var: compiler.placed(var.aval, like=x) for var, x in given.items()}
    shapes |= trace.chunks
    for var, name in trace.names.items():
        resident[part_of(name, parts)] += local_bytes(shapes[var])
    live: dict[Any, int] = {var: local_bytes(shapes[var]) for var in trace.consts}
    peak: dict[str, int] = {}
    for number, eqn in enumerate(trace.jaxpr.eqns):
        operands = [compiler.placed(x.aval) if compat.is_literal(x) else shapes[x] for x in eqn.invars]
        temporary, new = 0, 0
        if eqn.primitive.name == READ_OR_WRITE:
            results = operands
        else:
            program, results = compiler.compile(eqn, operands)
            analysis = memory_analysis(program)
            temporary = analysis.temp_size_in_bytes
            new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        found = {**resident, HELD: sum(live.values()), TEMPORARY: temporary, RESULTS: new}
        peak = max(peak, found, key=lambda memory: sum(memory.values()))
        for var, shape in zip(results_of(eqn), results, strict=True):
            if ends.get(var, number) > number:
                shapes[var], live[var] = shape, local_bytes(shape)
        for var in [var for var in live if ends.get(var, number) <= number]:
            del live[var]
    order = dict.fromkeys([*parts.values(), *peak])
    return CompiledStep(tuple(compiler.counts.items()), {part: peak[part] for part in order if peak.get(part)})


def last_uses(trace: StepTrace) -> dict[Any, int]:
    """Return, for each variable, the index of the equation after which its array is freed.

    A chunk that was read is kept until the first read after its last use. The results of the step, and the arrays that
    the step closes over, are kept until the end of the step.
    """
    eqns, last = trace.jaxpr.eqns, {}
    for number, eqn in enumerate(eqns):
        last |= {x: number for x in eqn.invars if not compat.is_literal(x)}
    reads = [number for number, eqn in enumerate(eqns) if eqn.invars and eqn.invars[0] in trace.chunks]
    for number in reads:
        (var,) = eqns[number].outvars
        later = bisect.bisect_right(reads, last.get(var, number))
        last[var] = reads[later] if later < len(reads) else len(eqns)
    return last | {x: len(eqns) for x in [*trace.consts, *trace.jaxpr.outvars] if not compat.is_literal(x)}


def local_bytes(shape: Any) -> int:
    return math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize


class Compiler:
    """Compiles the programs of a trace for one mesh.

    Attributes:
        counts: The number of executions of each compiled program.
    """

    def __init__(self, mesh: Mesh):
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._made: dict[Any, Any] = {}
        self.counts: dict[Any, int] = {}

    def placed(self, aval: Any, like: Any = None) -> jax.ShapeDtypeStruct:
        """Return the shape of `aval` with the sharding of `like`, or replicated if `like` is not on the mesh."""
        sharding = getattr(like, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self._everywhere.mesh:
            sharding = self._everywhere
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    def compile(self, eqn: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the program of one equation and the shapes of its results, and count one execution."""
        # A jit function that runs again has the same jaxpr. Other operations are few, and their text is short.
        what = id(compat.opened(eqn.params["jaxpr"])[0]) if eqn.primitive.name == JIT else str(eqn.params)
        key = (eqn.primitive.name, what, tuple((x.shape, x.dtype, x.weak_type, x.sharding) for x in operands))
        if key not in self._made:
            self._made[key] = self._compiled(eqn, operands)
        program, shardings = self._made[key]
        self.counts[program] = self.counts.get(program, 0) + 1
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding, weak_type=v.aval.weak_type)
            for v, sharding in zip(results_of(eqn), shardings, strict=True)
        ]
        return program, shapes

    def _compiled(self, eqn: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        inner, consts = compat.opened(eqn.params["jaxpr"]) if eqn.primitive.name == JIT else (None, ())
        donated = tuple(i for i, on in enumerate(eqn.params.get("donated_invars", ())) if on)

        def run(*values):
            if inner is not None:
                return jax.core.eval_jaxpr(inner, consts, *values)
            return [x for x in compat.evaluate_one(eqn, values) if x is not None]

        run.__name__ = eqn.params.get("name", eqn.primitive.name)
        # Without operands, only the sharding of the results tells JAX the mesh.
        where: dict[str, Any] = {} if operands else {"out_shardings": self._everywhere}
        program = jax.jit(run, donate_argnums=donated, **where).lower(*operands).compile()
        return program, jax.tree.leaves(program.output_shardings)


def results_of(eqn: Any) -> list[Any]:
    """Return the variables of an equation's results. Of a jit function, these include results that nothing reads."""
    return [v for v in eqn.outvars if eqn.primitive.name == JIT or not compat.is_dropped(v)]
