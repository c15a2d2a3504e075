"""Compare a rewritten function with the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.layout.leaf import Leaf
from zerojax.stages.gather import gather_on_use

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Setup:
    """A mesh, and how a tree of parameters lies on it."""

    mesh: jax.sharding.Mesh
    layout: object

    @property
    def specs(self):
        return jax.tree.map(lambda leaf: leaf.manual_spec, self.layout, is_leaf=is_leaf)


def is_leaf(x):
    return isinstance(x, Leaf)


def make_mesh(devices=DEVICES):
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def lay_out(params, dims, devices=DEVICES, mesh=None):
    """`dims` says for each leaf which dim is cut; -1 is whole."""

    def one(path, x, dim):
        kind = "whole" if dim < 0 else "cut"
        return Leaf(
            jax.tree_util.keystr(path), x.shape, np.dtype(x.dtype), "data", devices, kind, None if dim < 0 else dim
        )

    layout = jax.tree_util.tree_map_with_path(one, params, dims)
    return Setup(mesh or make_mesh(devices), layout)


def stored(params, setup):
    """Parameters padded into storage and put on the mesh."""

    def one(leaf, x):
        pad = [(0, s - n) for s, n in zip(leaf.storage_shape, leaf.shape, strict=True)]
        return jax.device_put(jnp.pad(x, pad), NamedSharding(setup.mesh, leaf.manual_spec))

    return jax.tree.map(one, setup.layout, params, is_leaf=is_leaf)


def trimmed(tree, setup):
    return jax.tree.map(
        lambda leaf, x: np.asarray(x)[tuple(slice(n) for n in leaf.shape)], setup.layout, tree, is_leaf=is_leaf
    )


def padding_of(tree, setup):
    """Everything in storage outside the logical array, as one flat array."""

    def one(leaf, x):
        inside = np.zeros(x.shape, bool)
        inside[tuple(slice(n) for n in leaf.shape)] = True
        return np.asarray(x)[~inside]

    return np.concatenate(
        [one(leaf, x) for leaf, x in zip(jax.tree.leaves(setup.layout, is_leaf=is_leaf), jax.tree.leaves(tree))]
        + [np.zeros(0)]
    )


def sharded_grad(fn, setup, *, batch_specs=P("data"), has_aux=False, **options):
    """Jitted `(params, batch) -> (mean loss, summed gradients[, aux])` over the mesh."""
    axis_size = setup.mesh.shape["data"]

    def body(params, batch):
        wrapped = gather_on_use(fn, setup.layout, axis="data", **options)
        out, grads = jax.value_and_grad(wrapped, has_aux=has_aux, allow_int=True)(params, batch)
        value, aux = out if has_aux else (out, ())

        def reduced(leaf, g):
            if g.dtype == jax.dtypes.float0:
                return jnp.zeros(g.shape, jnp.float32)
            return g / axis_size if leaf.kind == "cut" else jax.lax.pmean(g, "data")

        grads = jax.tree.map(reduced, setup.layout, grads, is_leaf=is_leaf)
        value, aux = jax.lax.pmean((value, aux), "data")
        return value, grads, aux

    return jax.jit(
        jax.shard_map(
            body,
            mesh=setup.mesh,
            axis_names={"data"},
            in_specs=(setup.specs, batch_specs),
            out_specs=(P(), setup.specs, P()),
            check_vma=False,
        )
    )


def assert_same(fn, params, batch, dims, *, devices=DEVICES, rtol=2e-5, atol=2e-5, **options):
    """Value and gradients equal those of the plain function, device by device and averaged.

    The tolerance is float32 rounding: sums over devices are made in another order.
    """
    setup = lay_out(params, dims, devices)
    rows = [jax.tree.map(lambda x: jnp.split(x, devices)[i], batch) for i in range(devices)]
    plain = jax.jit(jax.value_and_grad(fn, allow_int=True))
    wanted = [plain(params, row) for row in rows]
    value, grads, _ = sharded_grad(fn, setup, **options)(stored(params, setup), batch)
    np.testing.assert_allclose(value, np.mean([v for v, _ in wanted]), rtol=rtol, atol=atol)
    got = trimmed(grads, setup)
    for (path, g), *each in zip(
        jax.tree_util.tree_leaves_with_path(got), *[jax.tree.leaves(g) for _, g in wanted], strict=True
    ):
        if each[0].dtype == jax.dtypes.float0:
            continue
        mean = np.mean([np.asarray(e, np.float32) for e in each], axis=0)
        np.testing.assert_allclose(np.asarray(g, np.float32), mean, rtol=rtol, atol=atol, err_msg=str(path))
    assert not padding_of(grads, setup).any()
    return setup
