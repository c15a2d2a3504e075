"""Run the engine on simulated devices, and compare a rewritten function with the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from conftest import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.comm.device_collectives import DeviceCollectives
from zerojax.config import BUCKET_BYTES
from zerojax.gather.engine import trace_loss
from zerojax.gather.on_use import as_function
from zerojax.gather.schedule import Options
from zerojax.layout.leaf import Leaf

DEVICES = 8
ROWS = P("data")
# Small programs take as long as their compilation does, and what LLVM makes of them is not under test.
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A mesh, and the layout of a tree of parameters on it."""

    mesh: jax.sharding.Mesh
    layout: object

    @property
    def leaves(self):
        return jax.tree.leaves(self.layout, is_leaf=is_leaf)

    @property
    def specs(self):
        return self.each(lambda leaf: leaf.local_spec)

    def each(self, fn, *trees):
        """`fn(leaf, *values)` for every parameter."""
        return jax.tree.map(fn, self.layout, *trees, is_leaf=is_leaf)


def is_leaf(x):
    return isinstance(x, Leaf)


def lay_out(params, dims, devices=DEVICES):
    """`dims` says for each leaf which dim is sharded; -1 is replicated."""

    def one(path, x, dim):
        kind, dim = ("replicated", None) if dim < 0 else ("sharded", dim)
        return Leaf(jax.tree_util.keystr(path), x.shape, np.dtype(x.dtype), ("data",), devices, kind, dim)

    return Setup(mesh_of(devices), jax.tree_util.tree_map_with_path(one, params, dims))


def stored(params, setup):
    """Parameters padded into storage and put on the mesh."""

    def one(leaf, x):
        pad = [(0, s - n) for s, n in zip(leaf.storage_shape, leaf.shape, strict=True)]
        return jax.device_put(np.pad(x, pad), NamedSharding(setup.mesh, leaf.local_spec))

    return setup.each(one, params)


def trimmed(tree, setup):
    return setup.each(lambda leaf, x: np.asarray(x)[tuple(slice(n) for n in leaf.shape)], tree)


def padding_of(tree, setup):
    """Everything in storage outside of the logical arrays, as one flat array."""

    def one(leaf, x):
        inside = np.zeros(x.shape, bool)
        inside[tuple(slice(n) for n in leaf.shape)] = True
        return np.asarray(x)[~inside]

    return np.concatenate([*jax.tree.leaves(setup.each(one, tree)), np.zeros(0)])


def on_use(fn, layout, *, bucket_bytes=BUCKET_BYTES, shared_bytes=0, prefetch=1, reshard_after_forward=True):
    """`fn(params, *args)` as a function of shards, to be called inside a `shard_map` over the helpers' mesh."""
    comm = DeviceCollectives(("data",), bucket_bytes, shared_bytes=shared_bytes)
    options = Options(comm, prefetch, reshard_after_forward)

    def wrapped(params, *args):
        shards, tree = jax.tree.flatten(params)
        leaves = tree.flatten_up_to(layout)
        pairs = zip(leaves, shards, strict=True)
        full = [jax.ShapeDtypeStruct(leaf.shape, x.dtype) if leaf.kind == "sharded" else x for leaf, x in pairs]
        on_leaves = lambda full, *args: fn(tree.unflatten(full), *args)
        program, arrays, consts, structure = trace_loss(on_leaves, leaves, full, args, (), comm, range(len(args)))
        return jax.tree.unflatten(structure, as_function(program, options)(*shards, *arrays, *consts))

    return wrapped


def sharded_grad(fn, setup, *, batch_specs=ROWS, has_aux=False, **options):
    """`(params, batch) -> (value, gradients, aux)`, each a mean over the mesh; to be jitted or traced."""
    axis_size = setup.mesh.shape["data"]

    def body(params, batch):
        wrapped = on_use(fn, setup.layout, **options)
        out, grads = jax.value_and_grad(wrapped, has_aux=has_aux, allow_int=True)(params, batch)
        value, aux = out if has_aux else (out, ())

        def averaged(leaf, g):
            if g.dtype == jax.dtypes.float0:
                return jnp.zeros(g.shape, jnp.float32)
            return g / axis_size if leaf.kind == "sharded" else jax.lax.pmean(g, "data")

        value, aux = jax.lax.pmean((value, aux), "data")
        return value, setup.each(averaged, grads), aux

    return jax.shard_map(
        body,
        mesh=setup.mesh,
        axis_names={"data"},
        in_specs=(setup.specs, batch_specs),
        out_specs=(P(), setup.specs, P()),
        check_vma=False,
    )


def plain_grad(fn, params, batch, *, devices=DEVICES, has_aux=False):
    """`(value, gradients, aux)` on one device: `fn` on the rows that each device would have, averaged."""
    run = jax.jit(jax.value_and_grad(fn, has_aux=has_aux, allow_int=True), compiler_options=QUICK)
    found = []
    for rows in zip(*[np.split(np.asarray(x), devices) for x in jax.tree.leaves(batch)], strict=True):
        out, grads = run(params, jax.tree.unflatten(jax.tree.structure(batch), rows))
        found.append((*out, grads) if has_aux else (out, (), grads))
    value, aux, grads = jax.tree.map(lambda *each: _mean(each), *found)
    return value, grads, aux


def _mean(each):
    if each[0].dtype == jax.dtypes.float0:
        return np.zeros(each[0].shape, np.float32)
    return np.mean([np.asarray(x, np.float32) for x in each], axis=0)


def assert_same(fn, params, batch, dims, *, devices=DEVICES, has_aux=False, rounding=2e-5, **options):
    """The rewritten function's value, gradients and aux equal the plain one's, and padding stays zero.

    Returns the largest of these numbers.

    Args:
        fn: `(params, batch) -> scalar`, or with `has_aux` `(scalar, aux)`.
        params: Full parameters.
        batch: Arrays whose rows are divided over the devices.
        dims: For each parameter the dim that is sharded; -1 is replicated.
        devices: Size of the mesh.
        has_aux: As for `jax.grad`.
        rounding: Largest difference, as a fraction of the largest entry of all gradients (at least 1). The default
            is some hundred float32 roundings: sums over rows and devices are made in another order.
        options: For `on_use`.
    """
    setup = lay_out(params, dims, devices)
    wanted = plain_grad(fn, params, batch, devices=devices, has_aux=has_aux)
    sharded = sharded_grad(fn, setup, has_aux=has_aux, **options)
    value, grads, aux = jax.jit(sharded, compiler_options=QUICK)(stored(params, setup), batch)
    found = (value, trimmed(grads, setup), aux)
    largest = max((np.abs(x).max() for x in jax.tree.leaves(wanted) if x.size), default=1.0)
    scale = max(1.0, largest)
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        name = ("value", "gradient", "aux")[path[0].idx] + jax.tree_util.keystr(path[1:])
        np.testing.assert_allclose(
            np.asarray(have, np.float32), want, rtol=rounding, atol=rounding * scale, err_msg=name
        )
    assert not padding_of(grads, setup).any()
    return largest
