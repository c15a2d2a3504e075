"""Keep master weights in fewer bytes than a wide copy. Both forms have the methods of `master_weights.WideMaster`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from zerojax.config import Config
from zerojax.layout.encoding import Encoding
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.narrow_state.encoded_state import encoded_leaf, may_encode
from zerojax.narrow_state.rounding import first_encoded, narrow, nearest_bfloat16, round_to_bfloat16


@dataclasses.dataclass(frozen=True)
class Compensated:
    """Keep the rounding error of the bfloat16 parameter in bfloat16. Their sum has at least 16 significant bits.

    References:
        Zamirai et al. 2020, arXiv 2010.06192, algorithm 1.
    """

    is_weight = False

    def leaf(self, leaf: Leaf) -> Leaf:
        return dataclasses.replace(leaf, dtype=np.dtype(jnp.bfloat16))

    def first(self, weight: Array, number: int) -> Array:
        return self.kept(weight, weight)[1]

    def current(self, master: Array, param: Array) -> Array:
        weight = param + master.astype(param.dtype)
        # If the sum does not round to the parameter, a program changed the parameter since the last update.
        return jnp.where(nearest_bfloat16(weight) == param, weight, param)

    def kept(self, moved: Array, master: Array) -> tuple[Array, Array]:
        param = nearest_bfloat16(moved)
        rest = moved - param
        error = nearest_bfloat16(rest)
        # If the error rounds to half a unit of the parameter, the sum may round to another. Then truncate the error.
        bits = lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
        same = nearest_bfloat16(param + error) == param
        error = jnp.where(same, error, lax.bitcast_convert_type(bits, jnp.float32))
        return param, error.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Round the bfloat16 parameter stochastically, and keep only the seeds for it."""

    encoding: Encoding
    is_weight = False

    def leaf(self, leaf: Leaf) -> Leaf:
        return encoded_leaf(leaf, self.encoding)

    def first(self, weight: Array, number: int) -> Array:
        return first_encoded(weight, self.encoding, number)

    def current(self, master: Array, param: Array) -> Array:
        return param

    def kept(self, moved: Array, master: Array) -> tuple[Array, Array]:
        seeds = narrow(moved, master, self.encoding)
        return round_to_bfloat16(moved, seeds, self.encoding), seeds


def narrow_forms(config: Config, trained: Layout, forms: Sequence[Any]) -> list[Any]:
    """Replace each `WideMaster` in `forms` by a narrow form, if the parameter's state may be encoded. Leave None."""

    def one(form: Any, part: Leaf) -> Any:
        seeds = Encoding(part.shape, str(part.dtype), "seeds", config.state.block, "stochastic")
        if form is None or not may_encode(config, part, seeds):
            return form
        return Compensated() if config.state.masters == "compensated" else Rounded(seeds)

    return [one(form, part) for form, part in zip(forms, trained.grads, strict=True)]
