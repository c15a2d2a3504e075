"""Models of Flax's FP8 layers, and the types in which a program gathers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax.extend import core as jex

DEPTH, WIDTH, HIDDEN = 3, 65, 128  # eight devices do not divide 65
OPS = "Fp8DotGeneralOp", "Fp8DirectDotGeneralOp", "Fp8Einsum"


class Projection(nn.Module):
    """A dense layer of one of Flax's FP8 operations."""

    features: int
    op: type

    @nn.compact
    def __call__(self, x):
        op = functools.partial(self.op, amax_history_length=3)
        if self.op is not fp8_ops.Fp8Einsum:
            return nn.Dense(self.features, dot_general_cls=op)(x)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        return op()("bi,io->bo", x, kernel)


class Residual(nn.Module):
    """A residual block of FP8 layers, in the form that `nn.scan` needs."""

    op: type

    @nn.compact
    def __call__(self, x, _=None):
        return x + Projection(WIDTH, self.op)(jnp.tanh(Projection(HIDDEN, self.op)(x))), None


class FP8(nn.Module):
    """Rematerialised blocks of FP8 layers."""

    op: type
    style: str

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Residual)
        if self.style == "scanned":
            axes = {"params": 0, fp8_ops.OVERWRITE_WITH_GRADIENT: 0}
            return nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=DEPTH)(self.op)(x, None)[0]
        for _ in range(DEPTH):
            x, _ = block(self.op)(x)
        return x


def fp8(op, x, style="unrolled"):
    """The loss of a model of Flax's FP8 layers, and its variables."""
    model = FP8(getattr(fp8_ops, op), style)
    return lambda variables, x: jnp.mean(model.apply(variables, x) ** 2), model.init(jax.random.key(0), x)


def gathered(jaxpr, times=1):
    """Bytes of all gathered arrays, by type."""
    found: dict = {}
    for eqn in jaxpr.eqns:
        parts = [{str(v.aval.dtype): times * v.aval.size * v.aval.dtype.itemsize} for v in eqn.outvars]
        parts = parts if eqn.primitive.name == "all_gather" else []
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for part in [*parts, *(gathered(inner, inside) for inner in jex.jaxprs_in_params(eqn.params))]:
            found = {name: found.get(name, 0) + part.get(name, 0) for name in {**found, **part}}
    return found
