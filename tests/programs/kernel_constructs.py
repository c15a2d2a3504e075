"""Losses with other opaque calls: partitioned by the user, foreign functions, callbacks, layouts, sparse matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from jax import lax
from jax.experimental import sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec
from kernel_registry import MLP, QKV, TIME, WIDTH, heads, layer, merged, norm
from registry import Allowed

OPAQUE = "a bare callback or foreign function"


def rows_of(shape, mesh):
    """The sharding of dim 0 alone."""
    spec = shape.sharding.spec if shape.sharding is not None and shape.shape else ()
    return NamedSharding(mesh, PartitionSpec(*spec[:1]))


def partitioned(fn, rule, *, shared=0, sums=0):
    """A function that its own callback divides by the rows of its operands, where the sharding rule lets them reach.

    `shared` of the last operands are needed in full, and `sums` of the last results are sums over the rows.
    """
    whole = custom_partitioning(fn)

    def partition(mesh, args, results):
        args, tree = jax.tree.leaves(args), jax.tree.structure(results)
        rows, full = rows_of(args[0], mesh), NamedSharding(mesh, PartitionSpec())
        axes = rows.spec[0] if rows.spec else None
        ins = [rows] * (len(args) - shared) + [full] * shared
        outs = [rows] * (tree.num_leaves - sums) + [full] * sums

        def local(*values):
            found = fn(*values)
            single = not isinstance(found, tuple | list)
            found = [found] if single else list(found)
            if axes is not None and sums:
                found[-sums:] = [lax.psum(x, axes) for x in found[-sums:]]
            return found[0] if single else tuple(found)

        return mesh, local, jax.tree.unflatten(tree, outs), tuple(ins)

    whole.def_partition(partition=partition, sharding_rule=rule)
    return whole


def with_vjp(op, fwd, bwd):
    """A differentiable operation."""
    op = jax.custom_vjp(op)
    op.defvjp(fwd, bwd)
    return op


def _partitioned_flash(of_rule):
    """Attention under `custom_partitioning`; `of_rule` gives a rule in the form that JAX is told it in."""
    q = "b t h d"
    forward = partitioned(kernels.flash_forward, of_rule(f"{q}, b s h d, b s h d -> {q}, b h t"))
    backward = partitioned(
        kernels.flash_backward, of_rule(f"{q}, b s h d, b s h d, {q}, b h t, {q} -> {q}, b s h d, b s h d")
    )

    def fwd(q, k, v):
        o, lse = forward(q, k, v)
        return o, (q, k, v, o, lse)

    return with_vjp(lambda *args: forward(*args)[0], fwd, lambda kept, g: tuple(backward(*kept, g)))


flash_by_rule = _partitioned_flash(lambda rule: rule)
flash_by_function = _partitioned_flash(lambda rule: lambda *_: rule)
_gelu = partitioned(kernels.gelu, "b t d -> b t d")
_gelu_backward = partitioned(lambda x, g: jax.vjp(kernels.gelu, x)[1](g)[0], "b t d, b t d -> b t d")
gelu_by_rule = with_vjp(_gelu, lambda x: (_gelu(x), x), lambda x, g: (_gelu_backward(x, g),))
_linear = partitioned(kernels.linear, "b t d, d f -> b t f", shared=1)
_linear_backward = partitioned(
    lambda g, x, w: jax.vjp(kernels.linear, x, w)[1](g), "b t f, b t d, d f -> b t d, d f", shared=1, sums=1
)
linear_by_rule = with_vjp(
    _linear, lambda x, w: (_linear(x, w), (x, w)), lambda kept, g: tuple(_linear_backward(g, *kept))
)


@layer("Partitioned by the user", QKV)
def partitioned_attention(where, x, w):
    """Attention under `custom_partitioning` with a rule, forward and backward"""
    return merged(x, flash_by_rule(*heads(x, w)), w)


@layer("Partitioned by the user", QKV)
def partitioned_by_function(where, x, w):
    """Attention under `custom_partitioning`, whose rule is a function"""
    return merged(x, flash_by_function(*heads(x, w)), w)


@layer("Partitioned by the user", MLP)
def partitioned_gelu(where, x, w):
    """GELU under `custom_partitioning` with a rule"""
    return x + gelu_by_rule(norm(x) @ w["up"]) @ w["down"]


IN_CALLBACK = "the partition callback sums the parameter's gradient over the devices, once per microbatch"


@layer(
    "Partitioned by the user", MLP, exceptions={"bytes": Allowed(2.1, IN_CALLBACK), "memory": Allowed(1.1, IN_CALLBACK)}
)
def partitioned_linear(where, x, w):
    """Product and GELU under `custom_partitioning` with a rule, with a matrix as operand"""
    return x + linear_by_rule(norm(x), w["up"]) @ w["down"]


jnp.linalg.cholesky(jnp.eye(2))  # loads LAPACK: without it, a call of its functions ends the process


def _cholesky(a):
    major = (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)  # LAPACK's matrices have columns first
    results = jax.ShapeDtypeStruct(a.shape, jnp.float32), jax.ShapeDtypeStruct(a.shape[:-2], jnp.int32)
    how = {"input_layouts": [major], "output_layouts": [major, None], "input_output_aliases": {0: 0}}
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", results, vmap_method="broadcast_all", **how)
    return jnp.tril(call(a.astype(jnp.float32), uplo=np.uint8(ord("L")))[0])


def _logdet_fwd(a):
    factor = _cholesky(a)
    return 2 * jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(-1), factor


def _logdet_bwd(factor, g):
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1]), factor.shape)
    inverse = lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
    return (g[..., None, None] * jnp.swapaxes(inverse, -1, -2) @ inverse,)


logdet = with_vjp(lambda a: _logdet_fwd(a)[0], _logdet_fwd, _logdet_bwd)


def _gated(x, w, determinant):
    h = (norm(x) @ w["up"]).astype(jnp.float32)
    gram = jnp.einsum("btf,bsf->bts", h, h) / math.sqrt(h.shape[-1]) + 4 * jnp.eye(TIME)
    gate = jax.nn.sigmoid(determinant(gram) / TIME - 3)
    return x + gate[:, None, None] * jax.nn.gelu(h) @ w["down"].astype(jnp.float32)


@layer("Foreign functions and callbacks", MLP)
def foreign(where, x, w):
    """`ffi_call` of LAPACK in a `shard_map`"""
    return _gated(x, w, where.per_device(logdet, (0,)))


@layer("Foreign functions and callbacks", MLP, bare=True, shared=OPAQUE)
def foreign_bare(where, x, w):
    """`ffi_call` of LAPACK, bare"""
    return _gated(x, w, logdet)


@layer("Foreign functions and callbacks", MLP, bare=True, shared=OPAQUE)
def foreign_vmapped(where, x, w):
    """`ffi_call` of LAPACK on one matrix, under `vmap`"""
    return _gated(x, w, jax.vmap(logdet))


def _called(fn, *args):
    return jax.pure_callback(fn, jax.ShapeDtypeStruct(args[0].shape, args[0].dtype), *args, vmap_method="expand_dims")


_tanh = lambda x: np.tanh(np.asarray(x, np.float32)).astype(x.dtype)
_slope = lambda x, g: (np.asarray(g, np.float32) / np.cosh(np.asarray(x, np.float32)) ** 2).astype(x.dtype)
called = with_vjp(
    functools.partial(_called, _tanh), lambda x: (_called(_tanh, x), x), lambda x, g: (_called(_slope, x, g),)
)


@layer("Foreign functions and callbacks", MLP)
def callback(where, x, w):
    """`pure_callback` in a `shard_map`"""
    return x + where.per_device(called, (0,))(norm(x) @ w["up"]) @ w["down"]


@layer("Foreign functions and callbacks", MLP, bare=True, shared=OPAQUE)
def callback_bare(where, x, w):
    """`pure_callback`, bare"""
    return x + called(norm(x) @ w["up"]) @ w["down"]


@layer("Rules of transformations", MLP)
def optimized_remat(where, x, w):
    """A kernel in a `shard_map` in a `custom_vjp(optimize_remat=True)`"""
    op = jax.custom_vjp(lambda x: where.per_device(kernels.gelu, (0,))(x))
    backward = where.per_device(lambda x, g: jax.vjp(kernels.gelu, x)[1](g)[0], (0, 0))
    op.defvjp(
        lambda x: (where.per_device(kernels.gelu, (0,))(x), x), lambda x, g: (backward(x, g),), optimize_remat=True
    )
    return x + op(norm(x) @ w["up"]) @ w["down"]


def _with_vmap(where, fn, operands):
    op = jax.custom_batching.custom_vmap(lambda *rows: fn(*(x[None] for x in rows))[0])
    run = where.per_device(fn, (0,) * operands)
    op.def_vmap(lambda size, batched, *args: (run(*args), True))
    return op


@layer("Rules of transformations", MLP)
def custom_vmap(where, x, w):
    """`custom_vmap`, whose rule is a kernel in a `shard_map`"""
    forward = _with_vmap(where, kernels.gelu, 1)
    backward = _with_vmap(where, lambda x, g: jax.vjp(kernels.gelu, x)[1](g)[0], 2)
    op = with_vjp(forward, lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return x + jax.vmap(op)(norm(x) @ w["up"]) @ w["down"]


@layer("Rules of transformations", MLP)
def platform(where, x, w):
    """`lax.platform_dependent`: a kernel on one platform, and plain JAX on others, in a `shard_map`"""
    local = lambda x: lax.platform_dependent(x, cpu=kernels.gelu, default=jax.nn.gelu)
    return x + where.per_device(local, (0,))(norm(x) @ w["up"]) @ w["down"]


@layer("Rules of transformations", QKV)
def layouts(where, x, w):
    """`with_layout_constraint` before and after a kernel in a `shard_map`"""
    turned = lambda a: with_layout_constraint(a, Layout(major_to_minor=(0, 2, 1, 3)))
    o = where.per_device(kernels.flash, (0, 0, 0))(*map(turned, heads(x, w)))
    return merged(x, turned(o), w)


@layer("Rules of transformations", QKV)
def attention_under_vmap(where, x, w):
    """Attention of one row under `vmap`, bare"""
    one = lambda q, k, v: kernels.flash(q[None], k[None], v[None])[0]
    return merged(x, jax.vmap(one)(*heads(x, w)), w)


_MIXING = np.argwhere(np.random.default_rng(2).random((TIME, TIME)) < 0.2)
_PRUNED = np.argwhere(np.random.default_rng(3).random((WIDTH, MLP["up"][1])) < 0.25)


@layer("Sparse", MLP)
def sparse_mixing(where, x, w):
    """Each row is multiplied by a BCOO matrix that mixes time steps, under `vmap`"""
    mixing = sparse.BCOO((jnp.ones(len(_MIXING), x.dtype) / 5, jnp.asarray(_MIXING)), shape=(TIME, TIME))
    return x + jax.nn.gelu(jax.vmap(lambda row: mixing @ row)(norm(x)) @ w["up"]) @ w["down"]


@layer("Sparse", {"values": (len(_PRUNED),), "down": MLP["down"]})
def sparse_weight(where, x, w):
    """Tokens times a BCOO weight, whose values are a parameter"""
    weight = sparse.BCOO((w["values"] / 5, jnp.asarray(_PRUNED)), shape=MLP["up"])
    return x + jax.nn.gelu((norm(x).reshape(-1, WIDTH) @ weight).reshape(*x.shape[:2], -1)) @ w["down"]
