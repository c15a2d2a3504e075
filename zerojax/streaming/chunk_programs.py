"""The compiled programs of a streamed update: one for each kind of piece, whatever the depth of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.config import Config
from zerojax.layout.chunked import Chunking
from zerojax.layout.leaf import Leaf
from zerojax.optim.partition import CONST, GRAD, PARAM, SHARED, STATE, Part, Task
from zerojax.optim.plan import ShardingPlan
from zerojax.optim.rollback import roll_back
from zerojax.placement.chunking import put, take
from zerojax.placement.storage import constrain, gather, to_storage, view

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class Values(NamedTuple):
    """What a task computes with, each in the order of the task.

    Attributes:
        params: Parameters that are moved; storage shape of their parts, or pieces.
        grads: Gradients; storage shape, or pieces.
        state: Offloaded leaves of the state; storage shape, or pieces.
        resident: Leaves of the state on the device that are replaced; storage shape.
        shared: What was computed for it with the gradients.
        consts: Arrays that the transformation closed over.
    """

    params: Sequence[Array]
    grads: Sequence[Array]
    state: Sequence[Array]
    resident: Sequence[Array]
    shared: Sequence[Array]
    consts: Sequence[Array]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What tells two programs apart: like pieces of like layers share one.

    Attributes:
        part: The equations.
        text: The equations as text, by which they are compared.
        reads: For each value they read, its kind and its place among the values of that kind.
        params: How the parameters lie that are moved, in the type they are updated in.
        stored: The types in which they are stored.
        grads: How the gradients lie.
        state: How the offloaded state lies.
        resident: How the replaced state on the device lies.
        dim: The dim that is cut; None: the task runs on whole arrays.
        length: Of the piece, on that dim.
    """

    part: Part = dataclasses.field(compare=False)
    text: str
    reads: tuple[tuple[str, int], ...]
    params: tuple[Leaf, ...]
    stored: tuple
    grads: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    resident: tuple[Leaf, ...]
    dim: int | None
    length: int

    @classmethod
    def of(cls, plan: ShardingPlan, task: Task, length: int) -> Kind:
        """The kind of a task's pieces of some length; 0 for a task that is not cut."""
        part = task.parts[length]
        places = {PARAM: task.params, STATE: task.state} | {k: task.reading(k) for k in (GRAD, SHARED, CONST)}

        def alike(leaves: Sequence[Leaf], indices: Sequence[int]) -> tuple[Leaf, ...]:
            return tuple(dataclasses.replace(leaves[i], path="", reason="") for i in indices)

        return cls(
            part,
            part.text,
            tuple((kind, places[kind].index(i)) for kind, i in part.reads),
            alike(plan.grads, task.params),
            tuple(plan.trained.params[i].dtype for i in task.params),
            alike(plan.grads, task.reading(GRAD)),
            alike(plan.state, task.state),
            alike(plan.state, task.resident),
            None if task.chunking is None else task.chunking.dim,
            length,
        )

    @property
    def reads_params(self) -> bool:
        """Whether the equations read the parameters; with master weights they do not."""
        return any(kind == PARAM for kind, _ in self.reads)


def on_device(config: Config, kind: Kind) -> Callable:
    """A piece's update on the device: `f(params, state, resident, others, start, skipped)` gives the first three anew.

    They are donated.
    """

    def run(params, state, resident, others: Values, start, skipped):
        values = others._replace(params=params, state=state, resident=resident)
        moved, state, resident = computed(config, kind, pieces_of(config, kind, values, start), skipped)
        return written(config, kind, params, moved, start, skipped), state, resident

    return jax.jit(run, donate_argnums=(0, 1, 2))


def pieces_of(config: Config, kind: Kind, values: Values, start: Int[Array, ""]) -> Values:
    """The values with parameters and gradients as pieces, in the types they are stored in."""

    def one(x, leaf: Leaf):
        return x if kind.dim is None else take(config.mesh, x, leaf, Chunking(kind.dim, ()), start, kind.length)

    params = [one(x, leaf) for x, leaf in zip(values.params, kind.params, strict=True)]
    return values._replace(
        params=params, grads=[one(x, leaf) for x, leaf in zip(values.grads, kind.grads, strict=True)]
    )


def computed(config: Config, kind: Kind, values: Values, skipped: Bool[Array, ""]) -> tuple[list, list, list]:
    """New parameters, offloaded and resident state; of the state the old, bit for bit, if the step is skipped."""
    whole = kind.dim is None

    def seen(arrays: Sequence[Array], leaves: Sequence[Leaf]) -> list:
        typed = [x.astype(leaf.dtype) for x, leaf in zip(arrays, leaves, strict=True)]
        return [view(x, leaf) for x, leaf in zip(typed, leaves, strict=True)] if whole else typed

    def laid(arrays: Sequence[Array], leaves: Sequence[Leaf]) -> list:
        lay = to_storage if whole else constrain
        return [lay(config, x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]

    held = {
        PARAM: seen(values.params, kind.params) if kind.reads_params else (),
        GRAD: seen(values.grads, kind.grads),
        STATE: seen(values.state, kind.state),
        SHARED: values.shared,
        CONST: values.consts,
    }
    results = kind.part.on([held[name][i] for name, i in kind.reads])
    moved = laid(results[: len(kind.params)], kind.params)
    state = laid(results[len(kind.params) :], [*kind.state, *kind.resident])
    state = roll_back(~skipped, state, [*values.state, *values.resident])
    return moved, state[: len(kind.state)], state[len(kind.state) :]


def written(
    config: Config, kind: Kind, params: Sequence, moved: Sequence, start: Int[Array, ""], skipped: Bool[Array, ""]
) -> list:
    """The parameters with new pieces, unless the step is skipped."""
    if kind.dim is None:
        return roll_back(~skipped, list(moved), list(params))

    chunking = Chunking(kind.dim, ())

    def one(x, chunk, leaf: Leaf):
        old = take(config.mesh, x, leaf, chunking, start, kind.length)
        return put(config.mesh, x, jnp.where(skipped, old, chunk), leaf, chunking, start)

    return [one(x, chunk, leaf) for x, chunk, leaf in zip(params, moved, kind.params, strict=True)]


def outgoing(config: Config, kind: Kind) -> Callable:
    """`f(values, start) -> (params, grads)`: the pieces that an update on the host needs."""

    def run(values: Values, start):
        chunks = pieces_of(config, kind, values, start)
        return (chunks.params if kind.reads_params else []), chunks.grads

    return jax.jit(run)


def incoming(config: Config, kind: Kind) -> Callable:
    """`f(params, moved, start, skipped) -> params`: what the host sends back is put in its place."""

    def run(params, moved, start, skipped):
        return written(config, kind, params, moved, start, skipped)

    return jax.jit(run, donate_argnums=0)


def gathered(config: Config, leaves: Sequence[Leaf]) -> Callable:
    """`f(parts) -> params`: whole parameters from their parts."""
    return jax.jit(lambda parts: gather(config, parts, leaves), donate_argnums=0)
