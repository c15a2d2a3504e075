"""A loss that keeps a weight in a type of its own: int8 and one scale per row, by `jax.experimental.hijax`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import hijax

FLOAT = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Rows:
    values: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class Quantised(hijax.HiType):
    dims: tuple[int, int]

    def lo_ty(self):
        return [hijax.ShapedArray(self.dims, np.dtype("int8")), hijax.ShapedArray(self.dims[:1], FLOAT)]

    def lower_val(self, rows):
        return [rows.values, rows.scales]

    def raise_val(self, values, scales):
        return Rows(values, scales)

    def to_tangent_aval(self):
        return hijax.ShapedArray(self.dims, FLOAT)


hijax.register_hitype(Rows, lambda rows: Quantised(rows.values.shape))


class Quantise(hijax.HiPrimitive):
    def abstract_eval(self, x):
        return Quantised(x.shape), set()

    def to_lojax(self, x):
        scales = jnp.max(jnp.abs(x), 1) / 127
        return Rows(jnp.round(x / scales[:, None]).astype(jnp.int8), scales)

    def jvp(self, primals, tangents):
        return self.bind(*primals), tangents[0]


class Dequantise(hijax.HiPrimitive):
    def abstract_eval(self, rows):
        return hijax.ShapedArray(rows.dims, FLOAT), set()

    def to_lojax(self, rows):
        return rows.values.astype(FLOAT) * rows.scales[:, None]

    def jvp(self, primals, tangents):
        return self.bind(*primals), tangents[0]


quantise, dequantise = Quantise("quantise"), Dequantise("dequantise")


def loss(params, batch):
    kept = quantise.bind(params["w"])
    return jnp.mean((jax.nn.relu(batch @ dequantise.bind(kept)) @ params["v"]) ** 2)
