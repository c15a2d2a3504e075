"""Initialise parameters in their layout, a few leaves at a time.

One program for all leaves would hold the intermediate values of all of them at once,
several times their size (seen on CPU, where the barriers that would order them are
dropped by jax 0.10). A few programs, each for a share of the leaves, do not.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core

from zerojax import compat
from zerojax.comm.explicit import auto_context, to_auto
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.placement.storage import named, storage_leaves

MOST_PROGRAMS = 8


def init_programs(
    config: Config, layout: Layout, init_fn: Callable, args: tuple, *, most: int = MOST_PROGRAMS
) -> list[Any]:
    """Return jitted programs of `args`, about `most`. Each makes the next few parameters, in storage shape."""
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
    """Group the leaves in order, so that a group is small beside the largest full leaf."""
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
