"""What a stage may move, compute and hold for a model: the contract that a compiled program is checked against.

It is of the model and not of the program: element counts of the layout, and what plain jit needs on replicated
parameters. A gradient and a whole step have one each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.comm.encoding import Encoding
from zerojax.config import Config
from zerojax.gather import WorkingSet
from zerojax.inspect.hlo import Module, read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.plan import ShardingPlan
from zerojax.planning.activations import plain_gradient, program_of
from zerojax.planning.shapes import rows_of, shape_of
from zerojax.planning.stage_bytes import backward_bytes
from zerojax.train.loss import Loss, Returned
from zerojax.train.tree_api import returned_grads
from zerojax.train.typed_loss import TypedLoss


@dataclasses.dataclass(frozen=True)
class Checked:
    """What is differentiated, for a gradient or a step.

    Attributes:
        config: Stage and mesh; of real or absent devices.
        layout: Layout of the parameters.
        loss: The loss function, or another with the same `call`.
        batch: The batch, as shapes with shardings.
        args: Further arguments of the loss.
        accumulate: Microbatches a device and step.
        plan: Of a step, how everything is sharded; None: only a gradient is computed.
    """

    config: Config
    layout: Layout
    loss: Loss | Any
    batch: Any
    args: tuple
    accumulate: int = 1
    plan: ShardingPlan | None = None

    @property
    def microbatch(self) -> Any:
        """Return the rows that are differentiated at a time."""
        one = lambda x: jax.ShapeDtypeStruct(
            (x.shape[0] // self.accumulate, *x.shape[1:]), x.dtype, sharding=x.sharding
        )
        return self.batch if self.accumulate == 1 else jax.tree.map(one, self.batch)


@dataclasses.dataclass(frozen=True)
class Contract:
    """What a stage may take at most.

    Attributes:
        temporary: Bytes of temporary memory.
        gathered: Elements of parameters gathered, full tensors.
        reduced: Elements of gradients reduced, full tensors.
        replicated: Of these, elements of gradients that stay replicated: they are all-reduced.
        gradients: Elements of all gradients, each once, as plain jit reduces them.
        sizes: Elements of each gradient, and of a layer of each that may be a stack.
        is_even: Whether the devices divide the rows of each microbatch, those that the loss itself makes too: of others
            no sum over rows can be divided.
        flops: FLOPs of a device's matrix products.
        plain: The program of plain jit.
        times: How often plain jit's gradient is computed in the program.
        update: Whether the compiler may move what it likes for the optimizer's update.
        program: What stage 3 gathers of the loss.
    """

    temporary: int
    gathered: int
    reduced: int
    replicated: int
    gradients: int
    sizes: frozenset[int]
    is_even: bool
    flops: int
    plain: Module
    times: int
    update: bool
    program: WorkingSet


def contract_of(checked: Checked) -> Contract:
    """Compile what plain jit does with the same loss, and add up what the stage adds.

    Raises:
        ValueError: If the loss names mesh axes, of which plain jit has none.
    """
    config, layout, rows = checked.config, checked.layout, checked.microbatch
    try:
        plain = plain_gradient(layout, TypedLoss(config, layout, checked.loss), rows, checked.args, mesh=config.mesh)
    except NameError as error:
        raise ValueError(
            "The loss function names a mesh axis, as in lax.pmean, and plain jit, with which check compares it, has "
            "none. Check it without that collective."
        ) from error
    trained = [leaf for leaf in layout.trained_only().params if is_float(leaf)]
    program = program_of(config, layout, checked.loss, rows, checked.args)
    temporary = memory_analysis(plain).temp_size_in_bytes + 3 * program.layer
    plain_module = read(plain)
    flops, gathered = sum(product_flops(kernels(plain_module)).values()), gathered_elements(checked, program)
    update = True
    if checked.plan is not None:
        plan, compiled = checked.plan, plain_update(checked.plan, config)
        products = sum(product_flops(kernels(read(compiled))).values())
        flops = checked.accumulate * flops + products
        gathered += gathered_after_update(plan)
        update = bool(products) and not (plan.matrices is not None and plan.matrices.owned and not plan.matrices.left)
        of_update = 2 * sum(grad.local_bytes for grad in plan.grads)
        if products:  # of matrices, of which an owner has some whole
            of_update += memory_analysis(compiled).temp_size_in_bytes
        temporary = max(temporary, of_update) + backward_bytes(config, plan, checked.accumulate)
    elif config.stage < 3:  # plain jit's results are all gradients, and its activations may lie in their buffers
        types = dict(zip((leaf.path for leaf in layout.params), layout.compute, strict=True))
        temporary += sum(leaf.size * np.dtype(types[leaf.path]).itemsize for leaf in trained)
    reduced, replicated = reduced_elements(checked, program)
    count, loops = rows_of(rows), {1, *program.repeats.values()}
    return Contract(
        temporary=temporary,
        gathered=gathered,
        reduced=reduced,
        replicated=replicated,
        gradients=sum(leaf.size for leaf in trained),
        sizes=frozenset(size for leaf in trained for size in (leaf.size, math.prod(leaf.shape[1:]))),
        is_even=count is None or all(count % (n * config.data.workers) == 0 for n in loops),
        flops=flops,
        plain=plain_module,
        times=checked.accumulate,
        update=update,
        program=program,
    )


def is_float(leaf: Leaf) -> bool:
    """Return whether a parameter is of a type with gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def sharded_params(layout: Layout) -> list[Leaf]:
    """Return the parameters that the stage gathers on use."""
    return [leaf for leaf in layout.params if is_float(leaf) and leaf.dim is not None]


def sizes_of(layout: Layout, program: WorkingSet) -> dict[str, int]:
    """Return elements of each parameter, as often as the loss's own loop over microbatches uses it."""
    return {leaf.path: program.repeats.get(i, 1) * leaf.size for i, leaf in enumerate(layout.params)}


def gathered_elements(checked: Checked, program: WorkingSet) -> int:
    """Return elements that forward and backward passes gather."""
    sizes, passes = sizes_of(checked.layout, program), 2 if checked.config.reshard_after_forward else 1
    return checked.accumulate * passes * sum(sizes[leaf.path] for leaf in sharded_params(checked.layout))


def gathered_after_update(plan: ShardingPlan) -> int:
    """Return elements that are gathered of updated parameters: all of a replicated one, a part of a divided one."""
    pairs = zip(plan.trained.params, plan.grads, strict=True)
    return sum(
        grad.size if leaf.dim is None else grad.size // leaf.shards
        for leaf, grad in pairs
        if grad.kind != "replicated" and (leaf.dim is None or leaf.further > 1)
    )


def reduced_elements(checked: Checked, program: WorkingSet) -> tuple[int, int]:
    """Return elements that are reduced, and those of them whose gradients stay replicated."""
    config, sizes = checked.config, sizes_of(checked.layout, program)
    trained = checked.layout.trained_only()
    grads = trained.grads if checked.plan is None else checked.plan.grads
    kept = grads if checked.plan is not None else returned_grads(config, trained, [True] * len(trained.params))
    each = 1 if config.stage < 2 else checked.accumulate
    total = replicated = 0
    for param, grad, result in zip(trained.params, grads, kept, strict=True):
        if not is_float(param):
            continue
        leaf = grad if param.dim is None else param
        # In hybrid sharding each shard is reduced across, too.
        again = leaf.kind != "replicated" and not set(config.data.batch) <= set(leaf.axes)
        hops = each * _hops(config, leaf) + again * each / leaf.shards
        total += int(sizes[param.path] * hops)
        replicated += sizes[param.path] * each if result.kind == "replicated" else 0
    return total, replicated


def _hops(config: Config, leaf: Leaf) -> float:
    """Return how often an element of a gradient is reduced. Quantised ones are reduced axis by axis."""
    if Encoding(formats=config.wire).reduce_codec(leaf) is None:
        return 1
    return sum(1 / config.data.size(leaf.axes[k + 1 :]) for k in range(len(leaf.axes)))


def plain_update(plan: ShardingPlan, config: Config) -> Any:
    """Compile the optimizer's update by plain jit on one device's full arrays."""
    everywhere = NamedSharding(config.mesh, PartitionSpec())
    logical = lambda leaves: [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere) for leaf in leaves]
    tree = lambda leaves: jax.tree.unflatten(plan.trained.treedef, leaves)
    tx, params = wrapped_tx(config, plan.trained), tree(logical(plan.trained.grads))
    state = jax.tree.map(lambda x: shape_of(x, everywhere), jax.eval_shape(tx.init, params))
    value = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    update = lambda grads, state, params, value: tx.update(grads, state, params, value=value)
    return jax.jit(update).lower(params, state, params, value).compile()


@dataclasses.dataclass(frozen=True)
class WithMutable:
    """A loss whose mutable state is the first of its further arguments, for what knows only arguments."""

    loss: Loss

    def call(self, params: Any, mutable: Any, batch: Any, args: tuple) -> Returned:
        """Call the loss; see `Loss.call`."""
        return self.loss.call(params, args[0], batch, args[1:])
