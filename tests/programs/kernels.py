"""Pallas kernels with a backward kernel each. They are interpreted, so that every device can run them.

All arrays are one device's. Dim 0 of an operand is divided into blocks, one per step of the grid, unless it is shared.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

INTERPRETED = {"interpret": True}


def blocked(body, *, shared=0, sums=0, block=1, like=None, **options):
    """`body(*blocks)` in a kernel, block by block of dim 0.

    Args:
        body: A function of arrays. It returns a tuple.
        shared: How many of the last operands each step reads in full.
        sums: How many of the last results are added up over the steps, in float32.
        block: Entries of dim 0 per step.
        like: Shapes and types of the results; None: those of `body` on all entries.
        options: Of `pallas_call`.
    """

    def run(*args):
        outs = jax.eval_shape(body, *args) if like is None else like
        rows_in, rows_out = len(args) - shared, len(outs) - sums

        def kernel(*refs):
            results = body(*(ref[...] for ref in refs[: len(args)]))
            for i, (ref, value) in enumerate(zip(refs[len(args) :], results, strict=True)):
                if i < rows_out:
                    ref[...] = value
                    continue
                first = pl.program_id(0) == 0
                ref[...] = jnp.where(first, jnp.zeros_like(ref), ref[...]) + value.astype(ref.dtype)

        def spec(x, by_rows):
            rest = (0,) * (x.ndim - 1)
            if by_rows:
                return pl.BlockSpec((block, *x.shape[1:]), lambda i: (i, *rest))
            return pl.BlockSpec(x.shape, lambda i: (0, *rest))

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype if i < rows_out else jnp.float32) for i, x in enumerate(outs)]
        return pl.pallas_call(
            kernel,
            shapes,
            grid=(args[0].shape[0] // block,),
            in_specs=[spec(x, i < rows_in) for i, x in enumerate(args)],
            out_specs=[spec(x, i < rows_out) for i, x in enumerate(outs)],
            **(options or INTERPRETED),
        )(*args)

    return run


def fused(body, *, shared=0, block=1, **options):
    """An operation whose forward pass is one kernel, and whose backward pass is another one that computes it again.

    `body(*blocks)` returns one array. Integers have no cotangent.
    """
    forward = blocked(lambda *args: (body(*args),), shared=shared, block=block, **options)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)

    @jax.custom_vjp
    def op(*args):
        return forward(*args)[0]

    def bwd(args, g):
        floats = [i for i, x in enumerate(args) if is_float(x)]
        rows = len(args) - shared

        def backward(g, *args):
            some = lambda *values: body(*(dict(zip(floats, values, strict=True)).get(i, x) for i, x in enumerate(args)))
            return jax.vjp(some, *(args[i] for i in floats))[1](g)

        sums = sum(i >= rows for i in floats)
        like = [args[i] for i in floats]
        found = blocked(backward, shared=shared, sums=sums, block=block, like=like, **options)(g, *args)
        grads = dict(zip(floats, found, strict=True))
        return tuple(grads[i].astype(x.dtype) if i in grads else None for i, x in enumerate(args))

    op.defvjp(lambda *args: (op(*args), args), bwd)
    return op


def _scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])


def _flash(q, k, v):
    scores = _scores(q, k)
    top = scores.max(-1, keepdims=True)
    total = jnp.exp(scores - top).sum(-1, keepdims=True)
    lse = top + jnp.log(total)
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(scores - lse).astype(v.dtype), v), lse[..., 0]


def _flash_backward(q, k, v, o, lse, g):
    p = jnp.exp(_scores(q, k) - lse[..., None])
    dp = jnp.einsum("bthd,bshd->bhts", g, v, preferred_element_type=jnp.float32)
    delta = jnp.einsum("bthd,bthd->bht", g, o, preferred_element_type=jnp.float32)[..., None]
    ds = (p * (dp - delta) / math.sqrt(q.shape[-1])).astype(q.dtype)
    dv = jnp.einsum("bhts,bthd->bshd", p.astype(g.dtype), g)
    return jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", ds, q), dv


flash_forward = blocked(_flash)
flash_backward = blocked(_flash_backward)


@jax.custom_vjp
def flash(q, k, v):
    """Attention of (B, T, H, K), whose backward kernel reads the logarithms of the sums."""
    return flash_forward(q, k, v)[0]


def flash_fwd(q, k, v):
    o, lse = flash_forward(q, k, v)
    return o, (q, k, v, o, lse)


flash.defvjp(flash_fwd, lambda kept, g: tuple(flash_backward(*kept, g)))


def _layer_norm(x, scale, offset):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale + offset


def _rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def _linear_xent(x, w, labels):
    logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return _xent(logits, labels)


def _xent(logits, labels):
    logits = logits.astype(jnp.float32)
    hot = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    return jax.nn.logsumexp(logits, -1) - jnp.where(hot, logits, 0).sum(-1)


def _recurrence(decay, x):
    def step(state, now):
        state = now[0] * state + now[1]
        return state, state

    over = lambda a: jnp.moveaxis(a, 1, 0)
    return over(lax.scan(step, jnp.zeros_like(x[:, 0]), (over(decay), over(x)))[1])


def _decode(q, k, v):
    scores = jnp.einsum("bhd,bshd->bhs", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores).astype(v.dtype), v)


def _glu(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def _mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down


def _widened(x, w, scale):
    return x @ (w.astype(x.dtype) * scale.astype(x.dtype))


layer_norm = fused(_layer_norm, shared=2)
rms_norm = fused(_rms_norm, shared=1)
softmax = fused(lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype))
linear = fused(lambda x, w: jax.nn.gelu(x @ w), shared=1)
glu = fused(_glu, shared=2)
mlp = fused(_mlp, shared=2)
widened = blocked(lambda x, w, scale: (_widened(x, w, scale),), shared=2)
widened_backward = blocked(
    lambda g, x, w, scale: (g @ (w.astype(g.dtype) * scale.astype(g.dtype)).T, jnp.einsum("btd,btf->df", x, g)),
    shared=2,
    sums=1,
)
linear_xent = fused(lambda x, labels, w: _linear_xent(x, w, labels), shared=1)
xent = fused(_xent)
recurrence = fused(_recurrence)
decode = fused(_decode)
gelu = fused(jax.nn.gelu)


def _quantised(w):
    scale = jnp.abs(w).max(0, keepdims=True).astype(jnp.float32) / 127
    return jnp.round(w / scale).astype(jnp.int8), scale


@jax.custom_vjp
def quantised(x, w):
    """`x @ w` by a kernel that reads the weight in int8; the gradient is straight through."""
    return widened(x, *_quantised(w))[0]


def _quantised_backward(kept, g):
    x, w, scale, narrow = kept
    dx, dw = widened_backward(g, x, w, scale)
    return dx.astype(x.dtype), dw.astype(narrow.dtype)


def _quantised_forward(x, w):
    q, scale = _quantised(w)
    return widened(x, q, scale)[0], (x, q, scale, w[:0])


quantised.defvjp(_quantised_forward, _quantised_backward)
add_norm = functools.partial(fused, shared=1)(lambda x, y, scale: _rms_norm(x + y, scale))
