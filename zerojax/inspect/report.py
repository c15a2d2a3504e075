"""Count the bytes of a state's arrays on each device, and print a table of its parts and leaves.

If the `ShardingPlan` of the state is known, the table also says why a leaf is not sharded or not placed as planned.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.config import Config, path_of
from zerojax.layout.leaf import Leaf, is_stored_node
from zerojax.layout.padded import Padded
from zerojax.offload.chunked import Chunked
from zerojax.optim.in_trees import models_in, only_model, parts_like
from zerojax.optim.returned_state import Annotated
from zerojax.optim.sharding_plan import ShardingPlan, make_plan, state_shapes
from zerojax.placement.problems import misplaced, unusable_named

TITLES = {"device": "bytes/device", "host": "in host memory", "disk": "in files"}
NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of a state."""

    part: str  # the field of the state that contains the leaf: `"params"`, `"opt_state"` and others
    path: str  # the leaf's path within the part
    keys: tuple[str, ...]  # the leaf's path in the report: its part, or "master", then one key per level
    shape: tuple[int, ...]  # the logical shape if it is known, otherwise the storage shape
    dtype: Any  # element type
    # Bytes with padding by kind of memory (`"device"`, `"host"` or `"disk"`), then by device. The first key is the
    # leaf's own kind. With `Offload(device_bytes=)`, an offloaded leaf also has chunks in `"device"` memory.
    stored: dict[str, dict[jax.Device, int]]
    sharding: str  # the `PartitionSpec` and the memory kind. A sharding without a spec is described in words
    note: str  # why the leaf is replicated or flat, or how it is padded. Empty for a sharded leaf without padding

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}  {self.sharding}"
        return f"{text}  ({self.note})" if self.note else text


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """Bytes per device of a state. `print` shows a table of parts and leaves.

    Attributes:
        rows: One row per leaf.
        matrices: The matrices that owners update (one device each), what owners save, and why others have no owner.
        groups: The sets of leaves that are updated together, with the place of their state. Empty without offload.
        misplaced: For each leaf that is not placed as planned, by path: the planned and the actual placement.
        compiled: Sentences about the compiler options of a step, if `report` was given the step.
    """

    rows: tuple[Row, ...]
    matrices: str = ""
    groups: str = ""
    misplaced: dict[str, str] = dataclasses.field(default_factory=dict)
    compiled: tuple[str, ...] = ()

    @property
    def bytes(self) -> dict[str, int]:
        """Return, for each part, the most bytes that one device has in its memory."""
        return self._by_part("device")

    @property
    def host(self) -> dict[str, int]:
        """Return, for each offloaded part, the most bytes that one device has in host memory."""
        return self._by_part("host")

    @property
    def disk(self) -> dict[str, int]:
        """Return, for each offloaded part, the most bytes that one device has on disk."""
        return self._by_part("disk")

    def _by_part(self, place: str) -> dict[str, int]:
        parts = dict.fromkeys(row.part for row in self.rows if row.stored.get(place))
        return {part: bytes_by_place([row for row in self.rows if row.part == part])[place] for part in parts}

    @property
    def per_device(self) -> dict[jax.Device, int]:
        """Return, for each device, the bytes of all parts in the device's memory."""
        totals = Counter[jax.Device]()
        for row in self.rows:
            for place, sizes in row.stored.items():
                totals.update(sizes if place == "device" else dict.fromkeys(sizes, 0))
        return dict(totals)

    @property
    def total(self) -> int:
        """Return the bytes on the fullest device."""
        return max(self.per_device.values(), default=0)

    @property
    def title(self) -> str:
        """Return the totals in one line."""
        count = len(self.per_device)
        offloaded = {"in host memory": sum(self.host.values()), "in files": sum(self.disk.values())}
        return "; ".join(
            [
                f"{self.total:,d} bytes on the fullest of {count} device{'s' * (count != 1)}",
                *(f"{size:,d} bytes/device {where}" for where, size in offloaded.items() if size),
            ]
        )

    def __str__(self) -> str:
        """Return totals, notes, a line per part, and a line per leaf. Equal leaves of several layers share a line."""
        head = self.title, self.padding, self.warning, self.groups, self.matrices, *self.compiled
        return "\n".join([*filter(None, head), "", as_text(self.rows)])

    __repr__ = __str__

    @property
    def padding(self) -> str:
        """Describe the padded parameters in one line. Empty if no parameter is padded."""
        count = sum(row.part == "params" and "padded" in row.note for row in self.rows)
        if not count:
            return ""
        padded = f"{count} parameters are padded" if count > 1 else "1 parameter is padded"
        return f"{padded}: take statistics of zerojax.logical(params), and chain transformations inside of zero_shard"

    @property
    def warning(self) -> str:
        """Describe how many leaves are not placed as planned, and the first such leaf. Empty if all are as planned."""
        if not self.misplaced:
            return ""
        path, how = next(iter(self.misplaced.items()))
        count = f"{len(self.misplaced)} of {len(self.rows)} leaves"
        return f"{count} are placed otherwise than planned, such as {path.lstrip('.')} ({how})"


def report(state: Any, tx: Any = None) -> Report:
    """Count the bytes of a state's arrays on each device.

    Leaves are compared with their planned layout if `state` is a `ZeroState`, or a `TrainState` whose `tx` is
    zerojax's, or if `tx` is given. The report of any other tree only describes the arrays.

    Args:
        state: A `ZeroState`, a Flax `TrainState`, or any pytree of arrays. The parts of the report are the fields of
            `state`, or the keys of its topmost node.
        tx: The transformation that made `state`, if `state` has parameters, their optimizer state or both, such as
            `(params, opt_state)` or `(model, optimizer)` of NNX. Or the step that trains `state`: the report of a step
            also names its compiler options.

    Returns:
        The bytes per device of each part, and a row for each leaf. A row has the leaf's sharding, the reason if it is
        not sharded, and the planned placement if the leaf is not placed as planned.

    Raises:
        TypeError: If a leaf is not an array (shapes have no bytes: use `tx.shardings`), or `state` is None.
        ValueError: If an array was donated to an earlier step. The error names the array.
    """
    if state is None:
        raise TypeError(
            "report measures live jax.Arrays, and None has none. Pass a state; did a function return nothing?"
        )
    with unusable_named(None, state=state):
        return measured(state, tx)


def measured(state: Any, tx: Any) -> Report:
    plan, data = plan_and_data(state, tx)
    elsewhere: dict[str, str] = {}
    rows: list[Row] = []
    for path, x in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_stored_node)[0]:
        array = x.storage if isinstance(x, Padded) else x
        part = key_in_words(path[0]) if path else "array"
        inner = jax.tree_util.keystr(path[1:])
        keys = (part, *map(key_in_words, path[1:]))
        keys = keys[1:] if inner.startswith(".master") and part == "opt_state" else keys
        if isinstance(array, bool | int | float | complex):
            continue  # a Flax TrainState counts its steps in Python
        if not isinstance(array, jax.Array | Chunked):
            raise TypeError(
                f"{part}{inner} is a {type(array).__name__}; report measures live jax.Arrays, which have bytes on "
                f"devices. Pass arrays, or use tx.shardings for shapes."
            )
        shape = tuple(array.leaf.shape if isinstance(array, Chunked) else x.shape)
        whole = jax.tree_util.keystr(path)
        leaf, note = plan.get(whole, (None, ""))
        if leaf is not None and leaf.encoding is not None:
            note = str(leaf.encoding)
        if leaf is not None and (found := misplaced(leaf, x, data)):
            elsewhere[whole] = found
            note = "; ".join(filter(None, (note, found)))
        texts = array_in_words(array), note or note_from_array(x, array)
        rows.append(Row(part, inner, keys, shape, x.dtype, stored_bytes(array), *texts))
    of_state = getattr(state, "plan", None)
    matrices, groups = (str(getattr(of_state, name, "")) for name in ("matrices", "groups"))
    return Report(tuple(rows), matrices, groups, elsewhere, getattr(tx, "compiled_with", ()))


def stored_bytes(array: jax.Array | Chunked) -> dict[str, dict[jax.Device, int]]:
    """Return the bytes of an array by kind of memory, then by device of this process, as in `Row.stored`."""
    sizes = Counter[jax.Device]()
    if isinstance(array, Chunked):
        for chunk in array.chunks if array.leaf_files is None else ():
            sizes.update(stored_bytes(chunk).get("device", {}))
        there = {x: array.leaf.local_bytes - sizes[x] for x in array.sharding.addressable_devices}
        return {"host" if array.leaf_files is None else "disk": there, "device": dict(sizes)}
    for shard in array.addressable_shards:
        sizes[shard.device] += math.prod(shard.data.shape) * itemsize(array)
    return {"device" if array.sharding.memory_kind in (None, "device") else "host": dict(sizes)}


def itemsize(array: jax.Array | Chunked) -> int:
    """Return the bytes of one element. For a PRNG key, these are the bytes of its key data."""
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(array)
        return math.prod(words.shape[array.ndim :]) * words.dtype.itemsize
    return np.dtype(array.dtype).itemsize


def note_from_array(x: Any, array: jax.Array | Chunked) -> str:
    if isinstance(x, Padded):
        return f"dim {x.dim} padded from {x.shape[x.dim]} to {x.storage.shape[x.dim]}"
    if isinstance(array, Chunked):
        return ""
    (sizes,) = stored_bytes(array).values()
    whole = math.prod(array.shape) * itemsize(array)
    return "replicated" if len(sizes) > 1 and max(sizes.values()) == whole else ""


def array_in_words(array: jax.Array | Chunked) -> str:
    sharding = array.sharding
    spec = getattr(sharding, "spec", None)
    if isinstance(array, Chunked):
        memory, count = "on disk" if array.leaf_files is not None else "in host memory", len(array.chunking.extents)
        kept = sum("device" in stored_bytes(chunk) for chunk in array.chunks) if array.leaf_files is None else 0
        text = f"{spec} {memory}, {count} chunk{'s' * (count > 1)}"
        return f"{text}, of which {kept} on the device" if kept else text
    kind = sharding.memory_kind
    only = next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else None
    text = f"{spec}" if spec is not None else f"device {only.id}" if only else type(sharding).__name__
    return text if kind in (None, "device") else f"{text} in {kind}"


def key_in_words(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


# The layout of each leaf of a tree, and why the leaf is not sharded or trained, by the path of the leaf.
Planned = dict[str, tuple[Leaf, str]]


def plan_and_data(state: Any, tx: Any = None) -> tuple[Planned, tuple[str, ...]]:
    """Return the planned layout of each leaf of `state`, and the axes that divide the batch.

    `state` is a `ZeroState`, a Flax `TrainState`, or a mapping with `params` and `opt_state`. With `tx`, `state` may
    also be parameters, an optimizer state, or a tree of both. Leaves without a known plan are left out.
    """
    if isinstance(plan := getattr(state, "plan", None), ShardingPlan):
        return of_plan(plan, params=".params", opt_state=".opt_state")
    config = getattr(tx if tx is not None else getattr(state, "tx", None), "config", None)
    if not isinstance(config, Config):
        return {}, ()
    has = state.__contains__ if isinstance(state, Mapping) else lambda name: hasattr(state, name)
    if has("params") and has("opt_state"):
        get = state.__getitem__ if isinstance(state, Mapping) else lambda name: getattr(state, name)
        at = "[{!r}]" if isinstance(state, Mapping) else ".{}"
        opt_state = at.format("opt_state") + ".state" * isinstance(get("opt_state"), Annotated)
        return of_plan(make_plan(config, get("params")), params=at.format("params"), opt_state=opt_state)
    if tx is None:
        return {}, ()
    keyed = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored_node)
    whole, names = [jax.tree_util.keystr(path) for path, _ in keyed], [path_of(path) for path, _ in keyed]
    by_index = lambda leaves, indices: dict(zip([whole[i] for i in indices], leaves.values(), strict=True))
    nodes = [x for _, x in keyed]
    if one := only_model(models_in(config, names, nodes, is_stored_node)[0]):
        leaves, data = of_plan(one.plan, params="params", opt_state="opt_state")
        return by_index(leaves, [*one.params, *one.opt_state]), data
    trees = [(plan, state_shapes(config, plan)) for plan in config.plans.values() if plan.state]
    if states := [(plan, found) for plan, tree in trees for _, found in parts_like(names, tree, is_stored_node)]:
        planned: Planned = {}
        for plan, indices in states:
            if [nodes[i].shape for i in indices] == [leaf.storage_shape for leaf in plan.state]:
                planned = by_index(of_plan(plan, opt_state="")[0], indices) | planned
        return planned, config.data.batch  # planned as parameters, the other leaves would look wrong
    return of_plan(make_plan(config, state), params="")


def of_plan(
    plan: ShardingPlan, *, params: str | None = None, opt_state: str | None = None
) -> tuple[Planned, tuple[str, ...]]:
    """Return the leaves of `plan` by path, and the axes that divide the batch.

    `params` and `opt_state` are the paths of parameters and optimizer state in the tree. None: that part is left out.
    """
    found: Planned = {}
    for i, leaf in enumerate(plan.layout.params if params is not None else ()):
        why = plan.layout.why_not_trained(i)
        notes = note_from_layout(leaf), leaf.sent, "" if why in leaf.reason else why
        found[f"{params}{leaf.path}"] = leaf, "; ".join(filter(None, notes))
    for leaf in plan.state if opt_state is not None else ():
        found[f"{opt_state}{leaf.path}"] = leaf, note_from_layout(leaf)
    return found, plan.layout.policy.data.batch


def note_from_layout(leaf: Leaf) -> str:
    """Explain why a leaf is replicated or flat, and how it is padded. Empty for a sharded leaf without padding."""
    padding = f"padded by {leaf.padding} elements" if leaf.padding else ""
    if leaf.kind == "sharded":
        return padding and f"dim {leaf.dim} {padding}"
    kind = f"{leaf.kind}: {leaf.reason}" if leaf.reason else leaf.kind
    return f"{kind}; {padding}" if padding else kind


def bytes_by_place(rows: Sequence[Row]) -> dict[str, int]:
    """Return, for each kind of memory, the most bytes of `rows` that one device has in it."""
    totals: dict[str, Counter] = {place: Counter() for place in TITLES}
    for row in rows:
        for place, sizes in row.stored.items():
            totals[place].update(sizes)
    return {place: max(total.values(), default=0) for place, total in totals.items()}


def as_text(rows: Sequence[Row]) -> str:
    used = bytes_by_place(rows)
    places = [place for place in TITLES if place == "device" or used[place]]
    sections: dict[str, dict[tuple, list[Row]]] = {}
    for row in rows:
        stored = tuple((place, *sizes.items()) for place, sizes in row.stored.items())
        alike = NUMBER.sub("#", "/".join(row.keys)), str(row), stored
        sections.setdefault(row.keys[0], {}).setdefault(alike, []).append(row)
    lines = [("", *(TITLES[place] for place in places), "")]
    for part, groups in sections.items():
        if len(groups) > 1:
            lines.append((part, *cells_of([row for group in groups.values() for row in group], places), ""))
        for group in groups.values():
            cells, times = cells_of(group[:1], places), f"{len(group)} x " * (len(group) > 1)
            columns = zip(*(row.keys for row in group), strict=True)
            keys = [key[0] if len(set(key)) == 1 else NUMBER.sub("#", key[0]) for key in columns]
            label = "/".join(keys) if len(groups) == 1 else f"  {'/'.join(keys[1:])}"
            lines.append((label, *(text and times + text for text in cells), str(group[0])))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), text]).rstrip()
        for label, *cells, text in lines
    )


def cells_of(rows: Sequence[Row], places: Sequence[str]) -> list[str]:
    found = bytes_by_place(rows)
    is_shown = lambda place: found[place] or (place == "device" and not any(found.values()))
    return [f"{found[place]:,d}" if is_shown(place) else "" for place in places]
