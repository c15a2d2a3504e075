"""Check that options, values and programs are the same on every process, because a collective would hang otherwise."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import compat
from zerojax.comm.processes import EVENTS, Processes, is_of_all
from zerojax.config import Config
from zerojax.layout.leaf import is_chunked
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import to_device
from zerojax.train.arguments import is_constant
from zerojax.version import version

MOST_NAMED = 3  # differences in one error
OF_OFFLOAD = ("optimizer", "params", "update", "fraction", "chunk_bytes")  # not `path`, which may differ by host
# Options of JAX and environment variables that change numbers or programs.
OF_JAX = tuple(
    "jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl jax_threefry_partitionable "
    "jax_numpy_dtype_promotion jax_numpy_rank_promotion jax_disable_jit jax_disable_most_optimizations jax_debug_nans "
    "jax_debug_infs jax_softmax_custom_jvp jax_random_seed_offset jax_use_shardy_partitioner".split()
)
OF_XLA = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OF_ONE_HOST = ("dump", "device_count", "cache", "dir")  # XLA flags with one of these words may differ


def require_same(
    topic: str,
    record: Mapping[str, object],
    *,
    partial: bool = False,
    timeout: float | None = None,
    error: type[Exception] = TimeoutError,
) -> None:
    """Check that all processes are about to do the same thing, so that no process waits for another in vain.

    `record` maps names to values that must be the same on all processes. If a value differs, every process raises a
    `ValueError`. If `partial` is true, some processes may lack a name. `Processes.exchange` describes `topic` and all
    other errors, and `Processes` describes `timeout` and `error`.
    """
    if jax.process_count() == 1:
        return
    processes = Processes(topic, timeout, call=EVENTS.begin(topic), error=error)
    mine = json.dumps({name: str(value) for name, value in record.items()})
    records = [json.loads(text) for text in processes.exchange(topic, mine)]
    if difference := first_difference(records, partial=partial):
        index, reference, names = difference
        one, other = records[reference], records[index]
        found = [f"{name} is {other.get(name, 'missing')}, not {one.get(name, 'missing')}" for name in names]
        more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise ValueError(
            f"The processes do not {topic} alike. On process {index}, unlike {reference}: "
            f"{'; '.join(found[:MOST_NAMED])}{more}. Give every process the same program, options, values "
            f"and shapes."
        )


def first_difference(records: list[dict], *, partial: bool = False) -> tuple[int, int, list[str]] | None:
    """Return `(process, reference process, names that differ)` for the first record that differs; None if all agree.

    The reference for a value is the first process that has its name. Unless `partial`, a missing name is a difference.
    """
    if not partial:
        missing = dict.fromkeys(itertools.chain(*records))
        records = [missing | record for record in records]
    first_with: dict[str, int] = {}
    for index, record in enumerate(records):
        against = {name: first_with.setdefault(name, index) for name in record}
        differ = [name for name, first in against.items() if records[first][name] != record[name]]
        if differ:
            reference = against[differ[0]]
            return index, reference, [name for name in differ if against[name] == reference]
    return None


def require_same_run(config: Config, plan: ShardingPlan) -> None:
    """Compare options, parameters, versions and flags over processes, at the beginning of a run."""
    if not compat.is_tracing() and is_of_all(config.mesh):
        require_same("begin", environment() | run_record(config, plan))


def environment() -> dict[str, str]:
    """Return, by name, the versions of libraries, options of JAX and flags of XLA that processes must share."""
    versions = {name: metadata.version(name) for name in ("jaxlib", "optax", "numpy")} | {"zerojax": version()}
    options = {name: repr(jax.config.values[name]) for name in OF_JAX if name in jax.config.values}
    flags = {}
    for variable in OF_XLA:
        kept = [flag for flag in os.environ.get(variable, "").split() if not any(word in flag for word in OF_ONE_HOST)]
        flags[variable] = " ".join(sorted(kept)) or "empty"
    return versions | options | flags


def run_record(config: Config, plan: ShardingPlan) -> dict[str, str]:
    """Return descriptions of the options and leaves of a run, by name."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options |= {"user_mesh": dict(config.mesh.shape), "tx": None, "trainable": config.trainable is not None}
    options["overwrite"] = config.overwrite is not None
    if config.offload is not None:
        options["offload"] = {name: getattr(config.offload, name) for name in OF_OFFLOAD}
    leaves = {f"params{leaf.path}": leaf for leaf in plan.layout.params}
    leaves |= {f"opt_state{leaf.path}": leaf for leaf in plan.state}
    of = lambda leaf: ", ".join(filter(None, (f"{leaf.dtype}{list(leaf.shape)}", leaf.kind, leaf.sent)))
    described = {path: of(leaf) for path, leaf in leaves.items()}
    return {"jax": jax.__version__} | {name: str(comparable(value)) for name, value in options.items()} | described


def comparable(value: Any) -> Any:
    """Convert the value of an option to a form that processes can compare. A function becomes `"a function"`."""
    if dataclasses.is_dataclass(value):
        return {field.name: comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return "a function" if callable(value) else value


def require_same_values(config: Config, topic: str, **trees: Any) -> None:
    """Compare arrays and shards over the processes that have copies of them. `Processes.exchange` describes `topic`."""
    if is_of_all(config.mesh) and not compat.is_tracing():
        require_same(topic, checksums(trees), partial=True)


def require_same_programs(config: Config, what: str, lower: Iterable[Callable[[], Any]]) -> None:
    """Compare lowered programs over processes. `what` is a verb phrase that says what the programs do.

    Numbers that a function closes over are constants of the program, so programs with different learning rates differ.
    """
    if not is_of_all(config.mesh) or compat.is_tracing():
        return
    for one in lower:
        topic = f"compile the program of: {what}"
        digest = hashlib.sha256(one().as_text().encode()).hexdigest()
        digests = Processes("program", call=EVENTS.begin(topic)).exchange(topic, digest)
        if differ := [str(i) for i, other in enumerate(digests) if other != digests[0]]:
            raise ValueError(
                f"The processes do not {what} alike: the programs of process {', '.join(differ)} differ from that of "
                f"process 0. A number that differs may be a learning rate, a factor, a key or data that a function "
                f"closes over. Give every process the same program, options, values and shapes. To find the line, "
                f"write step.lower(state, batch).as_text(debug_info=True) to a file of each process, and compare them."
            )


class SameCalls:
    """Compares calls of one jitted function over processes, whenever a call has arguments of new shapes or types."""

    def __init__(self, config: Config, what: str, options: Any = None):
        # `what` is a verb phrase for the function. `options` are compared, too.
        self._config, self._what, self._options, self._seen = config, what, repr(options), set()

    @property
    def is_needed(self) -> bool:
        return is_of_all(self._config.mesh) and not compat.is_tracing()

    def is_new(self, known: Hashable, batch: Any, args: tuple, step: jax.Array | None = None) -> bool:
        """Return whether a call is the first one with its shapes, types and flags. If it is, compare it over processes.

        The batch is compared by shape and type. Further arguments, and `step`, the count of a training state, are
        compared by value. `known` identifies the shapes and types of all other arguments.
        """
        if compat.is_tracing():
            return False
        key = known, signature_of((batch, args))
        if key in self._seen:
            return False
        self._seen.add(key)
        if self.is_needed:
            record = {"options": self._options}
            if step is not None:
                record["step"] = str(np.asarray(step.addressable_data(0)))
            for path, x in jax.tree_util.tree_leaves_with_path({"batch": batch, "args": args}):
                record[jax.tree_util.keystr(path)] = f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
            if flags := [x.value for x in jax.tree.leaves(args, is_leaf=is_constant) if is_constant(x)]:
                record["constant arguments"] = str(comparable(flags))
            require_same(self._what, record)
            require_same_values(self._config, self._what, args=args)
        return True

    def call(self, program: Any, *args: Any, is_new: bool, **keywords: Any) -> Any:
        """Call a jitted function. With several processes, compare a new program first, and announce the call."""
        if is_new:
            lower = functools.partial(program.lower, *args, **keywords)
            require_same_programs(self._config, self._what, [lower])
        if not self.is_needed:
            return program(*args, **keywords)
        with EVENTS.calling(self._what, self._config.mesh) as call:
            returned = program(*args, **keywords)
            # The first array of a program's results is ready only when the program has ended.
            call.result = next((x for x in jax.tree.leaves(returned) if isinstance(x, jax.Array)), jnp.zeros(()))
        return returned


def signature_of(tree: Any) -> Hashable:
    """Return a key that is equal for trees for which `jax.jit` compiles one program: structure, shapes and types."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False)) for x in leaves)


FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # primes of xxHash


def checksums(tree: Any) -> dict[str, str]:
    """Return the checksum of each leaf, by path. An array that is sharded over processes has one checksum per shard.

    Offloaded state is left out, because each process computes its own chunks from parameters that are compared.
    """
    pending = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_chunked):
        name = jax.tree_util.keystr(path).replace("']", "", 1).removeprefix("['")
        if is_chunked(x) or not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            continue
        pending += [(f"the checksum of {name}{part}", checksum_of_array(to_device(array))) for part, array in parts(x)]
    return {name: f"{int(value):08x}" for name, value in pending}


def parts(x: Any) -> list[tuple[str, Any]]:
    """Return `(index, shard)` for each shard of `x` that this process holds. The index of a whole array is empty."""
    if not isinstance(x, jax.Array):
        return [("", jnp.asarray(x))]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.is_fully_addressable:
        return [("", x)]
    if x.is_fully_replicated:
        return [("", x.addressable_data(0))]
    by_index = {}  # such as `[0:4, 0:16]`
    for shard in x.addressable_shards:
        bounds = [one.indices(size)[:2] for one, size in zip(shard.index, x.shape, strict=True)]
        by_index[f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"] = shard.data
    return list(by_index.items())


@jax.jit
def checksum_of_array(x: jax.Array) -> jax.Array:
    """Return a 32-bit checksum of an array. The checksum depends on every bit, and on the order of elements."""
    bits = jnp.ravel(as_bits(x)).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (bits ^ (place * jnp.uint32(FACTORS[0]))) * jnp.uint32(FACTORS[1])
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(FACTORS[2])
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def as_bits(x: jax.Array) -> jax.Array:
    """Return the bits of an array as an array of integers of at most 32 bits each."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    width = jnp.dtype(x.dtype).itemsize
    # `bitcast_convert_type` fails for bools and 4-bit integers.
    if x.dtype == bool or (jnp.issubdtype(x.dtype, jnp.integer) and width < 4):
        return x.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
