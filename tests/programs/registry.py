"""The registry of programs: losses in the layouts that people write them in, each with shapes of its own.

Every interesting size is distinct: no width is the number of rows, of time steps, or of devices, so that a dim which
holds features cannot be taken for one which holds rows; but most of them divide by the devices, so that they could be.
Matrix products dominate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

DEVICES = 8
ROWS, TIME, VIEWS = 416, 24, 3  # rows divide by the devices, and each device's by 4 microbatches
MANY = 6656  # rows of programs without time steps, so that activations are more than parameters
WIDTH, HIDDEN, OUT = 80, 176, 48
HEADS, HEAD = 16, 5
VOCABULARY = 136
LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Allowed:
    """More than a limit allows, for a reason that is the construct's.

    Attributes:
        most: What is allowed instead: times plain jit's FLOPs or memory, times device view's bytes.
        why: The reason.
        stages: At which stages.
    """

    most: float
    why: str
    stages: tuple[int, ...] = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, and the shapes it is compiled for.

    Attributes:
        name: Its name in the table.
        kind: The group it is in.
        loss: `loss(params, batch, *args)`.
        params: A tree of shapes, or a function that makes a tree of `ShapeDtypeStruct`.
        batch: A tree of shapes; dim 0 of each is the rows. An array of integers is `ids(shape)`.
        args: Further arguments, as shapes.
        accumulate: Microbatches; above 1 the whole training step is compiled, otherwise the gradient.
        shared: Why plain jit exchanges activations, too: rows meet in the loss, or the compiler cannot divide an
            operation. As much is then allowed here. (Device view computes another loss, of each device's rows.)
        lost: Whether the rows are lost where plain jit exchanges activations. The compiler then sums gradients as plain
            jit's, and these count as exchanged, too.
        exceptions: What is allowed beyond the limits, by the limit's name.
    """

    name: str
    kind: str
    loss: Callable
    params: Any
    batch: Any
    args: tuple = ()
    accumulate: int = 1
    shared: str = ""
    lost: bool = False
    exceptions: Mapping[str, "Allowed"] = dataclasses.field(default_factory=dict)

    @property
    def about(self) -> str:
        """What it is, in a line."""
        return (self.loss.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    def shapes(self) -> tuple[Any, Any, tuple]:
        """`(params, batch, args)`, as trees of `ShapeDtypeStruct`."""
        params = self.params() if callable(self.params) else structs(self.params)
        return params, structs(self.batch), structs(self.args)


TABLE: dict[str, Program] = {}


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    """An array of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def structs(tree: Any) -> Any:
    """A tree of shapes as one of `ShapeDtypeStruct`; tuples of integers are float32."""
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x) and x != ()
    make = lambda x: jax.ShapeDtypeStruct(x, jnp.float32) if is_shape(x) else x
    return jax.tree.map(make, tree, is_leaf=is_shape)


def program(kind: str, params: Any, batch: Any, **options: Any) -> Callable:
    """Enter the loss below in the table, under its own name."""

    def decorate(loss):
        enter(loss.__name__, kind, loss, params, batch, **options)
        return loss

    return decorate


def enter(name: str, kind: str, loss: Callable, params: Any, batch: Any, about: str = "", **options: Any) -> None:
    """Enter a loss in the table."""
    if about:
        given = loss
        loss = lambda *args: given(*args)
        loss.__doc__ = about
    assert name not in TABLE, name
    TABLE[name] = Program(name, kind, loss, params, batch, **options)


def xent(logits, labels):
    """Cross entropy per row, of labels on the last dim."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def norm(x, axis: int | tuple[int, ...] = -1):
    """A layer norm without parameters."""
    x = x - x.mean(axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis, keepdims=True) + 1e-6)
