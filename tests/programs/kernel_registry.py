"""The table of losses with kernels: what each is made of, and the forms in which it is compiled."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from registry import DEVICES, Allowed, norm, xent

# Rows, rows of a device and of a microbatch, time steps, devices and widths are all different.
ROWS, TIME = 64, 24
HEADS, HEAD, WIDTH, HIDDEN, VOCABULARY = 5, 16, 80, 112, 136
LAYERS = {"unrolled": 2, "remat": 2, "scan": 3}
FORMS = tuple(LAYERS)
KINDS = (
    *("Attention", "Norms", "Products", "Losses", "Recurrences", "Experts", "Sequences over devices"),
    *("Partitioned by the user", "Foreign functions and callbacks", "Rules of transformations", "Sparse", "Libraries"),
)
SEQUENCE = 2  # devices of the axis "sequence", where there is one


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a loss runs: on one device, in global view on a mesh, or in device view on a part of the rows.

    Attributes:
        view: "one", "global" or "device".
        mesh: The mesh of the last two.
    """

    view: str
    mesh: Any = None

    def per_device(self, fn: Callable, places: tuple, out: Any = 0, *, check_vma: bool = False) -> Callable:
        """Run a function on each device's rows, as users do: in a `jax.shard_map` over the data axis.

        Args:
            fn: A function of one device's arrays.
            places: The dim that holds the rows in each operand; None: every device has all of it.
            out: The dim that holds the rows of the result, or a tree of such.
            check_vma: Whether JAX checks over which axes values vary.
        """
        if self.view != "global":
            return fn
        spec = lambda dim: PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data")
        ins, outs = (jax.tree.map(spec, dims, is_leaf=lambda d: d is None) for dims in (places, out))
        return jax.shard_map(fn, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)

    def over_sequence(self, fn: Callable, operands: int) -> Callable:
        """Run a function of (B, T, ...) on the rows and time steps of each device."""
        if self.view == "global":
            spec = PartitionSpec("data", "sequence")
            return jax.shard_map(fn, mesh=self.mesh, in_specs=(spec,) * operands, out_specs=spec, check_vma=False)
        spec = PartitionSpec(None, "sequence")  # the loss is in a `shard_map` over the data axis already
        axes = {"axis_names": {"sequence"}, "check_vma": False}
        return jax.shard_map(fn, in_specs=(spec,) * operands, out_specs=spec, **axes)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A loss with a kernel.

    Attributes:
        name: Its name in the table.
        kind: The group it is in.
        about: What it is, in a line.
        layer: `layer(where, x, w)` of (B, T, D).
        weights: Shapes of the parameters of a layer.
        head: `head(where, x, w, labels)`, the loss of each token.
        sequence: Whether the mesh has an axis that divides time steps, too.
        views: In which views the loss makes sense.
        bare: Whether plain jit computes all rows on each device, and so do we.
        shared: Why plain jit exchanges activations; empty: it does not, or device view does, too.
        exceptions: What is allowed beyond the limits, by the limit's name.
    """

    name: str
    kind: str
    about: str
    layer: Callable
    weights: Mapping[str, tuple]
    head: Callable
    sequence: bool = False
    views: tuple[str, ...] = ("global", "device")
    bare: bool = False
    shared: str = ""
    exceptions: Mapping[str, Allowed] = dataclasses.field(default_factory=dict)

    def params(self, form: str) -> Any:
        """Random parameters: a list of layers, or a stack of them for a scan."""
        layers = LAYERS[form]
        shapes = {name: (layers, *shape) for name, shape in self.weights.items()}
        rng = np.random.default_rng(0)
        draw = lambda shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)
        vector = lambda shape: jnp.asarray(1 + 0.1 * rng.normal(size=shape), jnp.float32)
        stack = {name: draw(shape) if len(shape) > 2 else vector(shape) for name, shape in shapes.items()}
        tree = stack if form == "scan" else [{name: x[i] for name, x in stack.items()} for i in range(layers)]
        return {"layers": tree, "head": draw((WIDTH, VOCABULARY))}

    def batch(self) -> Any:
        """Random rows and labels."""
        rng = np.random.default_rng(1)
        x = jnp.asarray(rng.normal(size=(ROWS, TIME, WIDTH)), jnp.float32)
        return {"x": x, "y": jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, TIME)), jnp.int32)}

    def loss(self, form: str, where: Where) -> Callable:
        """The loss in a form."""

        def layer(x, w):
            return self.layer(where, x, w).astype(x.dtype)

        if form != "unrolled":
            layer = jax.checkpoint(layer)

        def loss(p, batch):
            x = batch["x"].astype(p["head"].dtype)
            if form == "scan":
                x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, p["layers"])
            else:
                for w in p["layers"]:
                    x = layer(x, w)
            return self.head(where, norm(x), p["head"], batch["y"]).astype(jnp.float32).mean()

        return loss


KERNELS: dict[str, Kernel] = {}
MLP = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
QKV = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}


def plain_head(where, x, w, labels):
    """Cross entropy of each token."""
    return xent((x @ w).astype(jnp.float32), labels)


def plain_layer(where, x, w):
    """Two products."""
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def layer(kind: str, weights: Mapping[str, tuple], **options: Any) -> Callable:
    """Enter the layer below in the table, under its own name."""

    def decorate(fn):
        enter(fn.__name__, kind, fn.__doc__, fn, weights, plain_head, **options)
        return fn

    return decorate


def head(kind: str, **options: Any) -> Callable:
    """Enter the loss of a token below in the table, after layers of products."""

    def decorate(fn):
        enter(fn.__name__, kind, fn.__doc__, plain_layer, MLP, fn, **options)
        return fn

    return decorate


def enter(name: str, kind: str, about: str, *args: Any, **options: Any) -> None:
    """Enter a loss in the table."""
    assert name not in KERNELS, name
    assert kind in KINDS, kind
    KERNELS[name] = Kernel(name, kind, about.strip().partition("\n")[0].rstrip("."), *args, **options)


def mesh_of(kernel: Kernel, count: int = DEVICES) -> Any:
    """The mesh that a loss is compiled for."""
    shape, names = ((count // SEQUENCE, SEQUENCE), ("data", "sequence")) if kernel.sequence else ((count,), ("data",))
    types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:count])


def heads(x, w):
    """Queries, keys and values of (B, T, H, K)."""
    return jnp.split((norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, HEAD), 3, axis=2)


def merged(x, o, w):
    """The results of all heads, added to the layer's input."""
    return x + o.reshape(*x.shape[:2], WIDTH) @ w["out"]
