"""Make an optimizer's first state, group by group if it is offloaded, so the device never holds all state.

`adopt_state`, the inverse of `unshard`, places the state of an optimizer that ran without zerojax, as a plan says.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree, Shaped

from zerojax import compat, jaxprs
from zerojax.comm.mesh import in_storage_shape, to_storage, wait_if_simulated
from zerojax.compat import common_dtype
from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked, is_stored_node
from zerojax.layout.padded import Padded
from zerojax.layout.tree import canonical, has_gradient, is_numeric
from zerojax.narrow_state.encoded_state import wide_leaf
from zerojax.offload.chunked import chunks_of
from zerojax.offload.host import check_host_memory
from zerojax.optim.master_weights import form_of, narrow_leaves
from zerojax.optim.returned_state import is_on_disk
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes
from zerojax.optim.traced import trace_inlined
from zerojax.optim.update import first_leaves, state_to_host
from zerojax.placement.problems import tree_difference
from zerojax.placement.storage import leaf_sharding, leaves_of, logical_array, place_array, to_device
from zerojax.streaming.stores import abandoned_on_error, disk_nodes, kept_on_device, store_for


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A parameter that is copied to the devices when it is needed."""

    load: Callable[[], Array]  # a function that copies the parameter to the devices, and returns it in storage shape
    shape: tuple[int, ...]  # the parameter's storage shape
    dtype: Any  # the parameter's type


def check_state_room(config: Config, plan: ShardingPlan) -> None:
    """Raise a `MemoryError` if the state that is offloaded to host memory does not fit there."""
    if config.offload is not None and config.offload.optimizer == "host" and plan.offloaded:
        needed = sum(plan.state[k].local_bytes for k in plan.offloaded) - sum(kept_on_device(config, plan).values())
        check_host_memory(config.mesh, needed, "The offloaded optimizer state")


def init_state_by_group(
    config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"] | Deferred]
) -> PyTree:
    """Make the state with one program for all leaves that stay on the device, and one program per offloaded group."""
    check_state_room(config, plan)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored]
    jaxpr, consts = trace_inlined(lambda *xs: first_leaves(config, plan, xs), *shapes)
    inputs = dict(zip(jaxpr.invars, stored, strict=True)) | dict(zip(compat.constvars_of(jaxpr), consts, strict=True))

    def init(leaves: Sequence[int]) -> list[Array]:
        outvars = [jaxpr.outvars[k] for k in leaves]
        eqns, read = jaxprs.needed_for(jaxpr.eqns, outvars)
        invars = [var for var in inputs if var in read]
        equations = compat.part_of(jaxpr, eqns, invars, outvars)

        def program(values):
            state = jax.core.eval_jaxpr(equations, (), *values)
            return [to_storage(config.mesh, x, plan.state[k]) for k, x in zip(leaves, state, strict=True)]

        values = [inputs[var] for var in invars]
        loaded = [x.load() if isinstance(x, Deferred) else to_device(x) for x in values]
        return jax.jit(program, out_shardings=[leaf_sharding(config, plan.state[k]) for k in leaves])(loaded)

    return store_by_group(config, plan, init)


def store_by_group(config: Config, plan: ShardingPlan, make: Callable[[Sequence[int]], list[Array]]) -> PyTree:
    """Return a state whose offloaded leaves are written to its store, group by group.

    `make(indices)` computes the leaves of the state with these indices, on the device.
    """
    store = store_for(config, plan)
    resident = [k for k, chunking in enumerate(plan.chunkings) if chunking is None]
    with abandoned_on_error(store):
        state: dict[int, Any] = dict(zip(resident, make(resident), strict=True))
        for group in plan.analysis(config).partition.groups:
            made = zip(group.state, make(group.state), strict=True)
            leaves = [chunks_of(x, plan.state[k], plan.offloaded[k]) for k, x in made]
            for n, chunks in enumerate(zip(*leaves, strict=True)):
                store.write(group, n, chunks)
            state |= zip(group.state, store.nodes(group), strict=True)
        store.advance()
    return jax.tree.unflatten(plan.state_def, [state[k] for k in range(len(plan.state))])


def first_shapes(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the shapes and shardings of a new optimizer state. Files are named, and not created."""
    nodes = disk_nodes(config, plan) if is_on_disk(config) else {}
    leaves = jax.tree.leaves(state_shapes(config, plan), is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, [nodes.get(k, x) for k, x in enumerate(leaves)])


INNER = ".inner"


def adopt_state(config: Config, plan: ShardingPlan, state: PyTree, params: PyTree) -> PyTree:
    """Shard and offload a copy of `state`, a plain optax state, as `plan` says. Make master weights from `params`.

    Raises:
        ValueError: If the state was made for other parameters, or by another transformation.
        TypeError: If the planned type of a leaf cannot represent the leaf's type.
        MemoryError: If the state that is offloaded to host memory does not fit there.
    """
    masters = master_weights(plan, params) if config.has_master_weights else []
    # Remove the prefix of the wrapped transformation's state from the paths, because a plain state lacks this prefix.
    prefix = INNER if config.has_master_weights else ""
    inner = plan.state[: len(plan.state) - len(masters)]
    wanted = [dataclasses.replace(wide_leaf(leaf), path=leaf.path.removeprefix(prefix)) for leaf in inner]
    found = plain_leaves(plan, state, wanted)
    values = [checked_leaf(x, leaf, may_be_wider=not plan.offloaded) for x, leaf in zip(found, wanted, strict=True)]
    values = [*map(encoded_value, values, inner, range(len(inner))), *masters]
    if any(isinstance(x, jax.core.Tracer) for x in values):
        stored = [to_storage(config.mesh, jnp.asarray(x), leaf) for x, leaf in zip(values, plan.state, strict=True)]
        return state_to_host(config, plan, jax.tree.unflatten(plan.state_def, stored))
    wait_if_simulated(config.mesh, values)
    check_state_room(config, plan)

    def make(indices: Sequence[int]) -> list[Array]:
        pairs = [(values[k], plan.state[k]) for k in indices]
        return [place_array(in_storage_shape(x, leaf), leaf_sharding(config, leaf)) for x, leaf in pairs]

    if not plan.offloaded:
        return jax.tree.unflatten(plan.state_def, make(range(len(plan.state))))
    return store_by_group(config, plan, make)


def master_weights(plan: ShardingPlan, params: PyTree) -> list:
    """Return what is kept of master weights, in logical shape; see `master_weights.WideMaster`."""
    as_array = lambda x: logical_array(x) if isinstance(x, Padded | jax.Array) else np.asarray(x)
    leaves = leaves_of(params)
    narrow = zip(plan.layout.trained, plan.trained.grads, narrow_leaves(plan.trained), strict=True)
    wide = [as_array(leaves[i]).astype(part.dtype) for i, part, on in narrow if on]
    kept = plan.state[len(plan.state) - len(wide) :]
    on = [i for i, on in enumerate(narrow_leaves(plan.trained)) if on]
    forms = [form_of(leaf, plan.trained.params[i]) for leaf, i in zip(kept, on, strict=True)]
    return [form.first(x, i) for form, x, i in zip(forms, wide, on, strict=True)]


def encoded_value(x: Any, leaf: Leaf, number: int) -> Any:
    """Return a wide array as `leaf` is stored, without padding. `number` is that of the leaf."""
    if leaf.encoding is None:
        return x
    from zerojax.narrow_state.rounding import first_encoded

    return first_encoded(jnp.asarray(x), leaf.encoding, number)


def plain_leaves(plan: ShardingPlan, state: PyTree, wanted: Sequence[Leaf]) -> list:
    """Return the leaves of a plain state in the plan's order, or raise a `ValueError` if the state does not fit.

    `state` may have leaves of parameters that this transformation does not train. The result leaves them out. `state`
    may be wrapped in an `optax.MaskedState`.
    """
    keyed = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_stored_node)
    found = {jax.tree_util.keystr(path): x for path, x in keyed}
    paths = [leaf.path for leaf in wanted]
    untrained = tuple(leaf.path for i, leaf in enumerate(plan.layout.params) if i not in plan.layout.trained)
    surplus = found.keys() - set(paths)
    if all(path in found for path in paths) and all(path.endswith(untrained) for path in surplus):
        return [found[path] for path in paths]
    if isinstance(state, optax.MaskedState):
        return plain_leaves(plan, state.inner_state, wanted)
    raise ValueError(
        f"The state does not belong to these parameters and this transformation: it {tree_difference(keyed, wanted)}. "
        f"Pass the state of the optax transformation that zero_shard was given, of the same parameters."
    )


def checked_leaf(x: Any, leaf: Leaf, *, may_be_wider: bool) -> Any:
    """Return `x`, a leaf of a plain state, cast to the type of `leaf`, which is the planned layout.

    Raises:
        ValueError: If `x` is not an array with the logical shape of `leaf`.
        TypeError: If the type of `leaf` cannot represent `x`. With `may_be_wider`, a wider float is returned unchanged.
    """
    name = f"opt_state{leaf.path}"
    if is_stored_node(x) or isinstance(x, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} is a {type(x).__name__}, and tx.adopt takes the logical arrays of a plain optax state. "
            f"A state of zerojax is plain once it is gathered: tx.unshard(opt_state)."
        )
    x = to_device(x) if isinstance(x, jax.Array) else np.asarray(x)
    dtype = canonical(x.dtype)
    if tuple(x.shape) != leaf.shape:
        stored = "; it is in storage already" if tuple(x.shape) == leaf.storage_shape else ""
        raise ValueError(
            f"{name} is {dtype}{list(x.shape)}, and {leaf.dtype}{list(leaf.shape)} is required (logical "
            f"shape){stored}. Pass the state of the same parameters, from plain optax or tx.unshard(opt_state)."
        )
    if dtype == leaf.dtype:
        return x
    floats = is_numeric(dtype) and is_numeric(leaf.dtype) and has_gradient(dtype) and has_gradient(leaf.dtype)
    wide = common_dtype(dtype, leaf.dtype) if floats else None
    if wide == leaf.dtype:
        return x.astype(leaf.dtype)
    if wide == dtype and may_be_wider:  # wide gradients make such a wide leaf, which `update` accepts
        return x
    raise TypeError(
        f"{name} is {dtype}, and this transformation keeps it in {leaf.dtype}, which cannot represent every {dtype}. "
        f"Give parameters and precision= as in the run that made the state, or cast the state."
    )
