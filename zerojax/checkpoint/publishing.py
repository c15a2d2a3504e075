"""Copy the parameters of a run to other devices, names and types, while the run goes on.

`publish` copies them between meshes of the same processes, tensor by tensor. `published_files.py` writes versions of
them for programs that are not part of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from zerojax.checkpoint.export import check_dtype, params_of
from zerojax.checkpoint.mapping import Names, Section, listed, resolve, tensors_from
from zerojax.checkpoint.resharding import Conversion, convert
from zerojax.checkpoint.state_leaves import keys_of
from zerojax.comm.explicit import auto_context, to_auto, to_explicit
from zerojax.comm.mesh import replicated, wait_if_simulated
from zerojax.config import BUCKET_BYTES
from zerojax.display import showing
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf, replace_at
from zerojax.layout.tree import best_dim
from zerojax.offload.host import to_device
from zerojax.placement import pieces
from zerojax.placement.chunking import joined
from zerojax.placement.unusable import problem_of
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import PyTree

Shardings = Sharding | Mapping[str, Sharding] | Callable[[str, tuple[int, ...]], Sharding]


def publish(
    params: ZeroState | PyTree,
    shardings: Shardings | PyTree,
    *,
    mapping: Names | None = None,
    dtype: Any = None,
    hold: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, jax.Array]]:
    """Copy parameters to the devices, names and type that another program needs, such as an inference engine.

    The result is an iterator. Each step of it dispatches the copy of one tensor, and waits only if more than half a
    bucket is under way. So at most one bucket of memory is used on a device of either mesh, besides the tensors that
    the caller keeps. No device and no host holds all parameters in full, unless `shardings` say so. Values are those of
    `tx.unshard`.

    A training step uses up its parameters. So either take all tensors before the next step, which then runs while the
    last ones arrive, or pass `hold=True`, and take them while the step runs.

    Args:
        params: A state, or a tree of parameters. If a state has master weights, they are published.
        shardings: Where each tensor is wanted: one sharding for all, a dict by the tensor's name, a function of name
            and shape, or, without a mapping, a tree like the parameters. A sharding is a `NamedSharding` or a
            `SingleDeviceSharding`.
        mapping: Names and shapes of the tensors, as for `import_params` and `export`. None: each leaf is a tensor, with
            the name of its keys joined by dots.
        dtype: The floating type to which floating tensors are cast. None keeps their types.
        hold: Whether each device keeps a copy of its part of the parameters, in `dtype`, until it is published. Arrays
            that every device has in full are divided for this, if a dim can be divided evenly. Not for parameters that
            are offloaded.
        bucket_bytes: The bytes that a device may use for copies.

    Returns:
        An iterator of names and arrays in the order of the mapping, for `dict(...)` or a loop. All processes must take
        the same tensors. A tensor that a mapping makes from a slice of a tensor's inner dims is copied as a whole, even
        if it is larger than a bucket.

    Raises:
        TypeError: If a sharding is neither of a mesh nor of one device, or a leaf is a PRNG key or no array.
        ValueError: If the mapping does not fit, a tensor has no sharding or cannot be divided as it says, or `params`
            were used up. The iterator raises this error, too, if a step uses `params` up before they are taken.

    Examples:
        >>> weights = dict(zerojax.publish(state.params, NamedSharding(rollout_mesh, P()), dtype=jnp.bfloat16))
    """
    check_dtype(dtype)
    if problem := problem_of(None, "params", params):
        raise ValueError(problem)
    sources = [Source(".".join(path), path, array, leaf) for path, array, leaf in params_of(to_auto(params))]
    if keys := [one.name for one in sources if jnp.issubdtype(one.leaf.dtype, jax.dtypes.prng_key)]:
        raise TypeError(
            f"{keys[0]} is a PRNG key, which no other program reads. Leave it out of params=, as nnx.state(module, "
            f"nnx.Param) does, or give jax.random.key_data of it."
        )
    resolved = resolve(mapping, [(one.path, one.leaf.shape) for one in sources])
    if resolved.problems:
        raise ValueError(f"The mapping does not fit these parameters:{listed(resolved.problems)}")
    wanted = by_name(shardings, params if mapping is None else None, resolved.tensors)
    tensors = []
    for name, sections in resolved.tensors.items():
        kinds = [sources[one.leaf].leaf.dtype for one in sections]
        kind = jnp.result_type(*kinds)
        kind = jnp.dtype(dtype) if dtype is not None and jnp.issubdtype(kind, jnp.floating) else kind
        tensors.append(tensor_of(name, resolved.shape(name), kind, tuple(sections), wanted))
    if hold:
        sources = [held(one, dtype) for one in sources]
    return published(sources, tensors, bucket_bytes)


class Source(NamedTuple):
    """A parameter to publish."""

    name: str
    path: tuple[str, ...]
    array: Any  # in storage, or a `Chunked` node
    leaf: Leaf


class Tensor(NamedTuple):
    """A tensor to place. Its `sharding` is on Auto axes, and `mesh` is the mesh that the caller gave."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sections: tuple[Section, ...]
    sharding: NamedSharding
    mesh: Mesh

    @property
    def bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def by_name(shardings: Any, like: Any, names: Iterable[str]) -> Callable[[str, tuple[int, ...]], Any]:
    """Return a function of a tensor's name and shape that finds its sharding. `like` is the tree of parameters.

    Raise a ValueError if a sharding is for a tensor that is not in `names`, because its name is probably misspelt.
    """
    if isinstance(shardings, Sharding):
        return lambda name, shape: shardings
    if callable(shardings):
        return shardings
    found = dict(shardings) if isinstance(shardings, Mapping) else {}
    if like is not None and not all(isinstance(one, Sharding) for one in found.values() or [None]):
        flat = jax.tree_util.tree_flatten_with_path(shardings)[0]
        found = {".".join(keys_of(path)): one for path, one in flat}
    if unknown := [f"{name} has a sharding, and is no tensor" for name in found if name not in names]:
        raise ValueError(f"shardings= does not fit the tensors {', '.join(names)}:{listed(unknown)}")
    return lambda name, shape: found.get(name)


def tensor_of(name: str, shape: tuple[int, ...], dtype: Any, sections: tuple[Section, ...], wanted: Any) -> Tensor:
    """Return a tensor with its sharding, or raise an error that names it."""
    sharding = wanted(name, shape)
    if sharding is None:
        raise ValueError(f"shardings= has no sharding for the tensor {name!r}. Give one for each tensor.")
    if isinstance(sharding, SingleDeviceSharding):
        [device] = sharding.device_set
        sharding = NamedSharding(pieces.mesh_of_one(device), PartitionSpec())
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh := sharding.mesh, Mesh):
        raise TypeError(
            f"The tensor {name!r} cannot be placed on {sharding}. Give a NamedSharding or a SingleDeviceSharding."
        )
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(f"The tensor {name!r} of the shape {list(shape)} cannot be divided: {error}") from error
    return Tensor(name, shape, dtype, sections, to_auto(sharding), mesh)


def held(one: Source, dtype: Any) -> Source:
    """Copy a parameter, so that a step may use up the original. Each device keeps a part of it, in `dtype`."""
    if is_chunked(one.array):
        raise ValueError(f"{one.name} is offloaded, and hold=True would copy it to the devices. Publish without hold.")
    array, leaf = whole_if_flat(pieces.on_mesh(one.array), one.leaf)
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    mesh, spec = sharding.mesh, sharding.spec
    if array.sharding.is_fully_replicated and leaf.size > 1:
        dim = best_dim(leaf.shape, list(range(len(leaf.shape))), mesh.size)
        if leaf.shape[dim] % mesh.size == 0:
            spec = PartitionSpec(*[None] * dim, mesh.axis_names)
    kind = dtype if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    array = jax.jit(lambda x: to_device(x).astype(kind), out_shardings=NamedSharding(mesh, spec))(array)
    return one._replace(array=array, leaf=dataclasses.replace(leaf, dtype=jnp.dtype(kind)))


def whole_if_flat(array: jax.Array, leaf: Leaf) -> tuple[jax.Array, Leaf]:
    """Return a flat array, which is small, in logical shape on every device. Return any other array unchanged."""
    if leaf.kind != "flat":
        return array, leaf
    whole = dataclasses.replace(leaf, kind="replicated", dim=None)
    return convert([array], [Conversion(leaf, whole, replicated(pieces.mesh_of(array)))])[0], whole


def published(sources: list[Source], tensors: list[Tensor], bucket_bytes: int) -> Iterator[tuple[str, jax.Array]]:
    """Yield the tensors. Copies under way have at most half a bucket, because a program may need the other half."""
    last = {section.leaf: tensor.name for tensor in tensors for section in tensor.sections}
    loaded: dict[int, tuple[jax.Array, Leaf]] = {}
    under_way: list[jax.Array] = []
    size, limit = 0, max(1, bucket_bytes // 2)
    with showing("Publishing", sum(tensor.bytes for tensor in tensors)) as update:
        for tensor in tensors:
            for i in (section.leaf for section in tensor.sections):
                if i not in loaded or loaded[i][0].is_deleted():
                    loaded[i] = load(sources[i])
            parts = [Part(section, *loaded[section.leaf]) for section in tensor.sections]
            taken = sum(part.bytes for part in parts)
            if size + taken > limit:
                jax.block_until_ready(under_way)
                under_way, size = [], 0
            with auto_context():
                array = placed(tensor, parts, limit)
            del parts
            for i in {section.leaf for section in tensor.sections if last[section.leaf] == tensor.name}:
                del loaded[i]
                sources[i] = sources[i]._replace(array=None)  # drop what hold=True has kept
            wait_if_simulated(tensor.mesh, array)
            under_way.append(array)
            size += taken
            update(amount=tensor.bytes)
            yield tensor.name, to_explicit(tensor.mesh, array)


def load(one: Source) -> tuple[jax.Array, Leaf]:
    """Return a parameter on the devices, not flat. Of an offloaded parameter, each device gets its shard."""
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(one.array)):
        raise ValueError(
            f"{one.name} was used up before it was published: a step took the memory of the parameters. Take all "
            f"tensors of publish before the step, or pass hold=True."
        )
    array = joined(one.array) if is_chunked(one.array) else to_device(pieces.on_mesh(one.array))
    return whole_if_flat(array, one.leaf)


class Part(NamedTuple):
    """A section of a tensor, and the leaf on the devices that it comes from."""

    section: Section
    array: jax.Array
    leaf: Leaf

    @property
    def bytes(self) -> int:
        """Return the bytes of the section."""
        return math.prod(self.section.shape) * self.array.dtype.itemsize

    def taken(self, mesh: Mesh, spans: Mapping[int, tuple[int, int]]) -> jax.Array:
        """Gather the section, and copy it to all devices of `mesh`. `spans` limits dims to a start and a length."""
        section = self.section
        pieces.check_processes(pieces.mesh_of(self.array), mesh)
        starts = [*section.index, *(spans.get(d, (0, 0))[0] for d in range(len(section.shape)))]
        sizes = (*[1] * len(section.index), *(spans.get(d, (0, n))[1] for d, n in enumerate(section.shape)))
        return pieces.carried(pieces.take(self.array, self.leaf.shape, starts, sizes), mesh)


def placed(tensor: Tensor, parts: list[Part], limit: int) -> jax.Array:
    """Place a tensor, in boxes of at most `limit` bytes if the dims of its sections allow it."""
    mesh = tensor.sharding.mesh
    assert isinstance(mesh, Mesh)
    divided = tensor.sections[0].pattern.divided is not None
    groups = [[part] for part in parts] if divided else [parts]  # the parts of a group are copies of each other
    ways = [way_of(group, limit) for group in groups] if sum(part.bytes for part in parts) > limit else [None]
    if None in ways:
        return assembled(tensor, [part.taken(mesh, {}) for part in parts], tensor.sections, tensor.sharding)
    array = jnp.zeros(tensor.shape, tensor.dtype, device=tensor.sharding)
    for group, way in zip(groups, ways, strict=True):
        assert way is not None
        for start in pieces.starts_of(way.size, way.length):
            array = with_box(array, tensor, group, way, start)
    return array


def with_box(array: jax.Array, tensor: Tensor, group: list[Part], way: Way, start: int) -> jax.Array:
    """Write one box into a tensor, which is donated. Wait for it, so that only one box is in memory."""
    mesh = tensor.sharding.mesh
    assert isinstance(mesh, Mesh)
    pairs = list(zip(group, way.dims, strict=True))
    boxes = [part.taken(mesh, {d: (start, way.length)}) for part, d in pairs]
    sections = [shortened(part.section, d, way.length) for part, d in pairs]
    piece = assembled(tensor, boxes, sections, replicated(mesh))
    return jax.block_until_ready(pieces.put(array, piece, way.dim, (group[0].section.start + start) * way.times))


class Way(NamedTuple):
    """How copies of a tensor, or of a part of it, are divided into boxes."""

    dim: int  # the dim of the tensor
    times: int  # indices of the tensor's dim per index of a section's dim
    dims: tuple[int, ...]  # the dim of each section
    size: int  # size of the sections' dims
    length: int  # length of a box along the sections' dims


def way_of(group: list[Part], limit: int) -> Way | None:
    """Choose the dim of a tensor whose ranges are ranges of one dim of each section. Return None if there is none."""
    ways, most = [], len(group) * max(part.bytes for part in group)
    for dim in range(len(group[0].section.pattern.left)):
        lefts = [part.section.pattern.left[dim] for part in group]
        sections = [part.section for part in group]
        times = {math.prod(one.sizes[name] for name in left[1:]) for one, left in zip(sections, lefts, strict=True)}
        if not all(lefts) or len(times) > 1 or sections[0].pattern.divided not in (None, lefts[0][0]):
            continue
        dims = tuple(one.pattern.right.index(left[0]) for one, left in zip(sections, lefts, strict=True))
        size = sections[0].shape[dims[0]]
        ways.append(Way(dim, times.pop(), dims, size, max(1, limit * size // most)))
    # `take` sends half as many bytes along dims that the source does not shard.
    first, lead = group[0].array.sharding, len(group[0].section.index)
    is_whole = lambda way: not pieces.axes_at(first.spec, lead + way.dims[0])  # pyright: ignore[reportAttributeAccessIssue]
    fits = lambda way: limit * way.size >= most
    return max(ways, key=lambda way: (fits(way), is_whole(way), way.size), default=None)


def shortened(section: Section, dim: int, length: int) -> Section:
    """Return a section of which only a range of a dim is there. It is a tensor by itself."""
    pattern = dataclasses.replace(section.pattern, divided=None)
    return dataclasses.replace(section, shape=replace_at(section.shape, dim, length), pattern=pattern)


def assembled(
    tensor: Tensor, boxes: list[jax.Array], sections: Sequence[Section], sharding: NamedSharding
) -> jax.Array:
    """Make a tensor, or a range of it, from boxes of its sections. Raise an error if copies of it differ."""
    alike = tuple(dataclasses.replace(one, leaf=0, index=(), start=0) for one in sections)
    array, same = assembling(alike, jnp.dtype(tensor.dtype), sharding)(boxes)
    if same is not None and not bool(same):
        raise ValueError(f"The mapping makes several parameters the tensor {tensor.name!r}, but they are not equal.")
    return array


@functools.lru_cache(maxsize=256)
def assembling(sections: tuple[Section, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Return the jitted function that `assembled` calls. Layers of one shape share it."""

    def program(boxes):
        boxes = [x.reshape(one.shape) for x, one in zip(boxes, sections, strict=True)]
        first, *others = tensors_from(sections, boxes)
        same = [jnp.array_equal(first, other, equal_nan=jnp.issubdtype(first.dtype, jnp.inexact)) for other in others]
        return first.astype(dtype), jnp.stack(same).all() if same else None

    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return jax.jit(program, out_shardings=(sharding, replicated(mesh)))
