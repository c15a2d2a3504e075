"""Unroll loops over stacks of parameters on disk, because Python reads such a stack layer by layer."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names


def unrolled(jaxpr: Any, params: Collection, stacks: Collection) -> tuple[Any, list]:
    """Return a jaxpr whose scans over `stacks` call their body once per iteration, and the constants of the jaxpr.

    Each call is a block, which reads one row of each stack. Rows of other operands are sliced before the first call, so
    that they are results of one segment. A scan that also reads one of the other `params` layer by layer stays a scan.
    """

    def rule(eqn, values):
        loop = compat.loop_of(eqn)
        if loop is None or not loop.length:
            return None
        inner = loop.consts + loop.carry
        scanned = [not compat.is_literal(atom) and atom in params for atom in eqn.invars[inner:]]
        if not any(scanned) or not all(v in stacks for v, on in zip(eqn.invars[inner:], scanned, strict=True) if on):
            return None

        def layer(*operands):
            return jaxprs.run(*compat.opened(loop.body), *operands)

        layer.__name__ = names.BLOCK
        layer = jax.jit(layer)
        consts, carry, stacked = values[: loop.consts], values[loop.consts : inner], values[inner:]
        row = lambda x, i: lax.index_in_dim(x, i, keepdims=False)
        others = [[] if on else [row(x, i) for i in range(loop.length)] for x, on in zip(stacked, scanned, strict=True)]
        rows = dict[int, list]()
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            own = [each[i] if each else row(x, i) for x, each in zip(stacked, others, strict=True)]
            results = layer(*consts, *carry, *own)
            carry, rows[i] = results[: loop.carry], results[loop.carry :]
        return [*carry, *(jnp.stack(column) for column in zip(*(rows[i] for i in sorted(rows)), strict=True))]

    again = jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, (), args, rule))
    jaxpr, consts = compat.opened(again(*(var.aval for var in jaxpr.invars)))
    return jaxpr, list(consts)
