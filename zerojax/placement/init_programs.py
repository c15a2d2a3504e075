"""Compile the programs that initialise parameters in storage, a few leaves per program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core

from zerojax import compat
from zerojax.comm.mesh import auto_context, to_auto
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.placement.storage import named, storage_leaves

MOST_PROGRAMS = 8


def init_programs(
    config: Config, layout: Layout, init_fn: Callable, args: tuple, *, most: int = MOST_PROGRAMS
) -> list[Any]:
    """Return jitted functions of `args`. Each function initialises some parameters, and returns them in storage shape.

    A single program would hold the intermediate values of all leaves at once, which are several times the size of the
    leaves (seen on CPU, where jax 0.10 drops the barriers that would order the leaves).
    """
    jaxpr, consts = compat.opened(jax.make_jaxpr(init_fn)(*args))

    def some(indices, *args):
        leaves = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args))
        with auto_context(config.user_mesh):
            return [x for i, x in enumerate(storage_leaves(to_auto(leaves), layout.params)) if i in indices]

    return [
        jax.jit(functools.partial(some, group), out_shardings=[named(config, layout.params[i]) for i in group])
        for group in groups(layout.params, most)
    ]


def groups(leaves: tuple[Leaf, ...], most: int = MOST_PROGRAMS) -> Iterator[tuple[int, ...]]:
    """Yield groups of consecutive leaf indices, so that the shards in a group of several leaves stay under a limit.

    The limit in bytes is half of the largest full leaf, or 1/`most` of all shards, whichever is larger.
    """
    local = [leaf.local_bytes for leaf in leaves]
    largest = max((leaf.bytes for leaf in leaves), default=0)
    budget = max(largest // 2, sum(local) // most)
    group: list[int] = []
    for i, size in enumerate(local):
        if group and sum(local[j] for j in group) + size > budget:
            yield tuple(group)
            group = []
        group.append(i)
    if group:
        yield tuple(group)
