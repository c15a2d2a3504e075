"""Compute the contract of a stage, which limits the memory, communication and FLOPs of a step.

The contract follows from the element counts of the model's layout, and from the program that plain jit compiles for
the loss with replicated parameters. It does not depend on the program that is checked.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import jaxprs
from zerojax.budget.graph import flops_of
from zerojax.comm.quantised import codec_of
from zerojax.comm.typed import TypedLoss
from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.gather.working_set import WorkingSet
from zerojax.inspect.hlo import Module, memory_analysis, read
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.layout.leaf import Leaf
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.wrapped import wrapped_tx
from zerojax.planning.absent_program import abstract, lowered, plain_gradient, program_of, rows_of, shape_of
from zerojax.planning.stage_bytes import backward_bytes
from zerojax.primitives import Kind
from zerojax.train.state import ZeroState
from zerojax.train.step import Step


@dataclasses.dataclass(frozen=True)
class Contract:
    """The limits on the memory, communication and FLOPs of a stage's program."""

    temporary: int  # bytes of temporary memory
    gathered: int  # elements of parameters that are gathered, counted in full tensors
    reduced: int  # elements of gradients that are reduced, counted in full tensors
    replicated: int  # the part of `reduced` that is all-reduced, because these gradients stay replicated
    gradients: int  # elements of all gradients, each counted once; plain jit reduces these elements
    sizes: frozenset[int]  # elements of each gradient, and of its slices along dim 0, which may be layers of a stack
    # Whether the number of devices divides the rows of a microbatch, or the leaves of the batch differ in rows.
    # If this is False, a sum over rows cannot be divided over the devices.
    is_even: bool
    flops: int  # FLOPs of a device's matrix products
    share: int | None  # FLOPs of a device, if the devices divide the rows of every product; None if not known
    plain: Module  # the program of plain jit
    times: int  # how often a step computes the gradient that `plain` computes once
    update: bool  # whether the update may move any number of bytes, because it has products without owners
    program: WorkingSet  # the parameters that stage 3 gathers for the loss


def contract_of(step: Step, state: ZeroState, batch: Any, args: tuple) -> Contract:
    """Return the contract: the cost of the gradient by plain jit, plus the memory and communication of the stage.

    `batch` has shapes with shardings.
    """
    config, plan, layout = step.config, state.plan, state.plan.layout
    loss, accumulate, mutable = step.program.loss, step.options.accumulate, abstract(state.mutable)
    microbatch = lambda x: x.update(shape=(x.shape[0] // accumulate, *x.shape[1:]))
    rows = batch if accumulate == 1 else jax.tree.map(microbatch, batch)
    typed = TypedLoss(config, layout, loss)
    try:
        traced = plain_gradient(layout, typed, rows, args, mesh=config.mesh, mutable=mutable)
    except NameError as error:
        raise ValueError(
            "The loss function names a mesh axis, as in lax.pmean. check compares it with plain jit, which has no mesh "
            "axes. Check it without that collective."
        ) from error
    plain = lowered(traced, config.mesh).compile()
    trained = [leaf for leaf in layout.trained_only().params if is_float_leaf(leaf)]
    program = program_of(config, layout, loss, rows, args, mutable)
    temporary = memory_analysis(plain).temp_size_in_bytes + 3 * program.layer
    plain_module = read(plain)
    flops = sum(product_flops(kernels(plain_module)).values())
    compiled = plain_update(plan, config)
    products = sum(product_flops(kernels(read(compiled))).values())
    flops = accumulate * flops + products
    share = share_of(traced.jaxpr.jaxpr, config.data.workers)
    share = None if share is None else accumulate * share + products
    analysis = plan.analysis(config)
    update = bool(products) and not (analysis.has_owners and not analysis.owned.left)
    of_update = 2 * sum(grad.local_bytes for grad in plan.grads)
    if products:  # a matrix optimizer, whose owners hold whole matrices
        of_update += memory_analysis(compiled).temp_size_in_bytes
    temporary = max(temporary, of_update) + backward_bytes(config, plan, accumulate)
    reduced, replicated = reduced_elements(config, plan, accumulate)
    count = rows_of(rows)
    return Contract(
        temporary=temporary,
        gathered=gathered_elements(config, plan, accumulate),
        reduced=reduced,
        replicated=replicated,
        gradients=sum(leaf.size for leaf in trained),
        sizes=frozenset(size for leaf in trained for size in (leaf.size, math.prod(leaf.shape[1:]))),
        is_even=count is None or count % config.data.workers == 0,
        flops=flops,
        share=share,
        plain=plain_module,
        times=accumulate,
        update=update,
        program=program,
    )


def is_float_leaf(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def share_of(jaxpr: Any, workers: int) -> int | None:
    """Return one worker's share of the FLOPs of a jaxpr, or None if some of its operations cannot be counted."""

    def is_unknown(eqn) -> bool:
        facts = jaxprs.facts(eqn)
        unknown = facts.kind is Kind.SHARD_MAP or facts.is_opaque
        return unknown or eqn.primitive.name in ("ragged_dot_general", "while")

    unknown = any(map(is_unknown, jaxprs.equations(jaxpr)))
    return None if unknown else sum(map(flops_of, jaxpr.eqns)) // workers


def size_of(leaf: Leaf, config: Config) -> int:
    """Return the elements of a parameter. If non-data axes divide the parameter (experts), count one device's part."""
    return leaf.along_others(dict(config.data.sizes)).size


def gathered_elements(config: Config, plan: ShardingPlan, accumulate: int) -> int:
    """Return how many elements of parameters a step gathers, on use and after the update together.

    After the update, a replicated parameter whose gradient is sharded is gathered in full. With `params_axis`,
    gradients have smaller shards than parameters, so a parameter's shard is gathered from the smaller, updated shards.
    """
    passes = 2 if config.reshard_after_forward else 1
    sharded = [leaf for leaf in plan.layout.params if is_float_leaf(leaf) and leaf.dim is not None]
    updated = [
        grad.size if leaf.dim is None else grad.size // leaf.shards
        for leaf, grad in zip(plan.trained.params, plan.grads, strict=True)
        if grad.kind != "replicated" and (leaf.dim is None or leaf.further > 1)
    ]
    return accumulate * passes * sum(size_of(leaf, config) for leaf in sharded) + sum(updated)


def reduced_elements(config: Config, plan: ShardingPlan, accumulate: int) -> tuple[int, int]:
    """Return how many gradient elements are reduced, and how many of them belong to gradients that stay replicated."""
    trained, each = plan.layout.trained_only(), 1 if config.stage < 2 else accumulate
    total = replicated = 0
    for param, grad in zip(trained.params, plan.grads, strict=True):
        if not is_float_leaf(param) or set(config.data.batch) <= set(axes_of(param.others)):
            continue  # Experts that are divided over all data axes have no gradient to reduce.
        leaf = grad if param.dim is None else param
        # In hybrid sharding each shard is also reduced across the hosts.
        over = {axis for axis in config.data.batch if axis not in axes_of(leaf.others)}
        again = leaf.kind != "replicated" and not over <= set(leaf.axes)
        hops = each * _hops(config, leaf) + again * each / leaf.shards
        total += int(size_of(param, config) * hops)
        replicated += size_of(param, config) * each if grad.kind == "replicated" else 0
    return total, replicated


def _hops(config: Config, leaf: Leaf) -> float:
    """Return the reductions per element of a gradient: 1, or more if it is quantised, and so reduced axis by axis."""
    if codec_of(config.wire, leaf, gathers=False) is None:
        return 1
    return sum(1 / config.data.size(leaf.axes[k + 1 :]) for k in range(len(leaf.axes)))


def plain_update(plan: ShardingPlan, config: Config) -> Any:
    everywhere = NamedSharding(config.mesh, PartitionSpec())
    logical = lambda leaves: [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere) for leaf in leaves]
    tree = lambda leaves: jax.tree.unflatten(plan.trained.treedef, leaves)
    tx, params = wrapped_tx(config, plan.trained), tree(logical(plan.trained.grads))
    state = jax.tree.map(lambda x: shape_of(x, everywhere), jax.eval_shape(tx.init, params))
    value = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    update = lambda grads, state, params, value: tx.update(grads, state, params, value=value)
    return jax.jit(update).lower(params, state, params, value).compile()
