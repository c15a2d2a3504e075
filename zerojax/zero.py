"""`zero_shard`: any optax transformation, sharded. Joins the packages below; has no logic of its own."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.core
import optax
from jax.sharding import Mesh

from zerojax.comm.explicit import on_auto_mesh
from zerojax.comm.mesh import resolve_axes, resolve_mesh
from zerojax.config import BUCKET_BYTES, PERSIST_BELOW, BatchSpec, Config, Offload, Precision, Wire, check_count
from zerojax.config.data_mesh import spec_entry
from zerojax.layout.padded import stored_mask
from zerojax.layout.tree import layout_of
from zerojax.optim.logical_state import as_params
from zerojax.placement.init_params import init_programs
from zerojax.placement.place import cast_params, check_host_room, place_params
from zerojax.placement.storage import in_storage, named_tree
from zerojax.train.begin import create, initialised
from zerojax.train.eval_step import eval_step
from zerojax.train.loss import Loss
from zerojax.train.optax_pair import adopt, init, unshard, update
from zerojax.train.shardings import Shardings, shardings
from zerojax.train.state import ZeroState
from zerojax.train.step import Step, StepOptions
from zerojax.train.tree_api import value_and_grad


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose parameters, gradients and state are sharded for a ZeRO stage.

    It is an `optax.GradientTransformationExtraArgs`: `init` and `update` are optax's own
    pair, and it works wherever optax's transformations do.
    """

    @classmethod
    def of(cls, config: Config) -> "ZeroTransformation":
        """Return the transformation of a configuration. `zero_shard` makes and checks one."""
        # keywords, as optax's protocols name them; a partial keeps the configuration where rebuilding finds it
        return cls(functools.partial(init, config), functools.partial(update, config))

    @property
    def config(self) -> Config:
        """Return the wrapped transformation, stage, mesh and axis."""
        return self.init.args[0]  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        """Return stage, mesh and axis. The functions would say nothing."""
        c = self.config
        mesh = dict(c.mesh.shape)
        return f"zero_shard(stage={c.stage}, mesh={mesh}, axis={spec_entry(c.axis)!r}, persist_below={c.persist_below})"

    def init_params(self, init_fn: Callable, *args: Any) -> Any:
        """Initialise parameters, each leaf in its layout from the start.

        At stage 3 the whole model never exists on one device.

        Args:
            init_fn: Returns the tree of parameters; any function that jit takes.
            *args: Its arguments.

        Returns:
            `init_fn(*args)` in storage: at stage 3 sharded over the axis, a leaf of which no dim divides as a `Padded`.
            In the types of the master weights, from which `create` and `init` take them, and `shard` narrower copies.
        """
        config, layout = self.config, layout_of(self.config, jax.eval_shape(init_fn, *args))
        check_host_room(config, layout)
        arrays = initialised(config, init_programs(config, layout, init_fn, args), args)
        store = lambda arrays: in_storage(cast_params(config, layout, arrays, like=layout.grads), layout)
        shardings = lambda _: named_tree(config, layout.treedef, layout.params)
        return on_auto_mesh(config.user_mesh, store, arrays, shardings=shardings)

    def shard(self, params: Any) -> Any:
        """Put existing parameters into storage.

        Args:
            params: Logical arrays (NumPy's too), arrays in storage already, or shapes.

        Returns:
            The tree in storage, always a copy: donating it spares the caller's arrays. In
            the types that `precision` asks for: at stages 0 to 2 that is the one to compute in, so make the
            optimizer's state from the wider parameters before. Of shapes, shapes with their shardings.
        """
        config, layout = self.config, layout_of(self.config, params)

        def store(params):
            arrays = place_params(config, layout, params)
            return in_storage(cast_params(config, layout, arrays, like=layout.params), layout)

        shardings = lambda _: named_tree(config, layout.treedef, layout.params)
        return on_auto_mesh(config.user_mesh, store, params, shardings=shardings)

    def unshard(self, tree: Any, params: Any = None) -> Any:
        """Gather parameters, or an optimizer state, into full logical arrays, replicated on every device.

        Args:
            tree: Parameters (gradients, updates) or the optimizer state in storage; also a part of the state.
            params: For a state, the parameters or their shapes. Needed where this transformation has planned no such
                parameters in this process, or several that are stored alike, or `tree` has no node of optax's.

        Returns:
            The tree as plain JAX and optax have it. A state is that of the transformation `zero_shard` was given, with
            holes for parameters that are not trained and without master weights: these are
            `tx.unshard(tx.as_params(opt_state.master, params))`.

        Raises:
            ValueError: If the logical shapes of a state are not known.
        """
        return unshard(self.config, tree, params)

    def adopt(self, state: Any, params: Any) -> Any:
        """Place a plain optax state, from a run without zerojax, as `init` places its own.

        Args:
            state: The state of the transformation that `zero_shard` was given: `tx.unshard` undoes this, bit for bit.
                With frozen parameters, the state of all of them or that of `optax.masked`.
            params: The parameters it belongs to, in any form. Master weights are taken from them.

        Returns:
            A copy of the state in storage, for `update`. A run begins with it by `tx.create(params, opt_state=state)`.

        Raises:
            ValueError: If the state is of other parameters or of another transformation.
            TypeError: If a leaf has a type that the state's own cannot represent.
        """
        return adopt(self.config, state, params)

    def as_params(self, mirror: Any, params: Any) -> Any:
        """Convert parts of the optimizer state that mirror the parameters, such as an average, into parameters.

        Args:
            mirror: A tree of the state, in storage; of the structure of the trained parameters.
            params: The parameters, in any form; taken in place of those that are not trained.

        Returns:
            A tree in storage, in the types of `mirror`: for `eval_step`, `unshard`, `export`, and functions of
            it and `params`, such as `optax.contrib.schedule_free_eval_params`.

        Raises:
            ValueError: If `mirror` is of another structure or shape.
        """
        return as_params(self.config, mirror, params)

    def eval_step(self, fn: Callable) -> Callable:
        """Return a jitted function of full parameters, gathered where they are used: evaluation, generation.

        Args:
            fn: `fn(params, batch, *args)` sees full logical parameters and, in either view, all of
                `batch`; it may return anything that jit may.

        Returns:
            `step(params, batch, *args, **keywords)`, which returns what `fn` does. `params` are in storage, such as
            `state.params`, or logical; types are those of training. Rows that the devices cannot
            divide, such as the last of an epoch, are replicated. Call it in a scan over tokens, and in a
            loss (a teacher): a scan within `fn` keeps gathered what all of its iterations use.
        """
        return eval_step(self.config, fn)

    def value_and_grad(
        self,
        loss_fn: Callable,
        *,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        accumulate: int = 1,
    ) -> Callable:
        """Return loss and gradient over all devices, with explicit collectives.

        Args:
            loss_fn: `loss_fn(params, batch, *args)` sees full logical parameters and all of
                `batch` (in device view its device's rows), and returns a loss; with
                `has_aux`, `(loss, aux)`; with `weighted`, `(total, weight)` for the loss.
            has_aux: Whether `loss_fn` returns `(loss, aux)`. Of microbatches and devices
                markers say what becomes of a leaf (`Mean`, `Sum`, `Rows`, `Same`).
            weighted: Whether the loss is `(total, weight)`: the sum of the totals is then
                divided by the sum of the weights, over all microbatches and devices. A
                weight is taken for a constant: nothing is differentiated through it. If
                weights are negative or sum to zero, loss and gradients are NaN.
            mutable: As for `train_step`: `f(params, mutable, batch, *args)` returns
                `((loss, mutable), grads)`, with `has_aux` too `((loss, mutable, aux), grads)`.
            accumulate: Into how many microbatches each device divides its rows. They are
                differentiated one after the other, so that activations are of one, and their
                mean is taken; PRNG keys in `*args` are folded with the microbatch's index.

        Returns:
            `f(params, batch, *args, **keywords) -> (loss, grads)` (`((loss, aux), grads)` with
            `has_aux`), as `jax.value_and_grad` gives it. Without a positional batch, the keyword arguments that
            have rows are the batch: `f(params, x=x, y=y)`; flags, numbers and keys among them are further arguments.
            `grads` has the structure, the logical shapes and the dtypes of `params`; at stages 2 and 3 it is sharded
            like `shardings(params).grads`. The gradient of a leaf that is not trained, as integers and booleans are
            not, is zeros of its size, which `train_step` does without. The loss is not scaled: that is
            `train_step`'s too.

        Raises:
            ValueError: If axis and microbatches do not divide the batch, or the loss is no scalar.
        """
        check_count("accumulate", accumulate, "microbatches", least=1)
        return value_and_grad(self.config, Loss(loss_fn, has_aux, weighted, mutable), accumulate=accumulate)

    def create(self, params: Any, *, mutable: Any = None, opt_state: Any = None) -> ZeroState:
        """Begin a run: parameters in storage, a fresh optimizer state, step 0.

        Args:
            params: Logical parameters, parameters in storage, or shapes. They are copied,
                so that the steps, which donate the state, leave them alone; drop them to
                have their memory back. Master weights are taken from them before they
                are cast.
            mutable: What a loss function given to `train_step` with `mutable=True` updates
                beside (batch statistics): a tree of arrays, replicated.
            opt_state: A plain optax state to go on from, as `adopt` takes it. None: a fresh one.

        Returns:
            The state that `train_step`'s step takes.
        """
        return create(self.config, params, mutable, opt_state)

    def train_step(
        self,
        loss_fn: Callable,
        *,
        accumulate: int = 1,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        skip_nonfinite: bool = False,
        max_skips: int | None = None,
        leaf_norms: bool = False,
        timeout: float | None = None,
    ) -> Step:
        """Return a jitted training step that donates its state.

        Args:
            loss_fn: As for `value_and_grad`; with `mutable`, `loss_fn(params, mutable, batch, *args)` returns
                `(loss, mutable)`, with `has_aux` too `(loss, mutable, aux)`.
            accumulate: As for `value_and_grad`. Stages 0 and 1 add up full gradients and
                reduce once; stages 2 and 3 reduce-scatter each microbatch's and hold 1/N.
            has_aux: As for `value_and_grad`; aux comes back as `metrics["aux"]`.
            weighted: As for `value_and_grad`. A step whose weights are negative or sum to
                zero is skipped, and a later call raises: the first that finds it done.
            mutable: Whether the loss updates `state.mutable`. Its microbatches do so one after the other. In device
                view float leaves are then averaged over the devices, each counting the same, and others must be the
                same on all; there, and with microbatches, PRNG keys, folded in `*args` alone, do not belong in it.
            skip_nonfinite: Whether a step whose gradient has a norm that is not finite leaves the state as it is, bit
                for bit. Always so with a loss scale.
            max_skips: How many steps in a row may be skipped before the next call raises; None is any number. If
                given, such steps are skipped, and each call waits for the step before.
            leaf_norms: Whether metrics have `grad_norms`, the norm of each parameter's
                gradient; `optax.MaskedNode()` for one that is not trained.
            timeout: Seconds that a step may take, but for compiling. One that takes longer ends the process, with exit
                status 75, and says which process it waits for. None: 1800 s where several processes train, otherwise
                any time; `float("inf")`: any time.

        Returns:
            `step(state, batch, *args, **keywords) -> (state, metrics)`, with `.trace(...)` and
            `.lower(...)` as `jax.jit` has them; metrics has `loss`, `grad_norm` (of the unscaled, averaged
            gradient) and `skipped`, with a loss scale `loss_scale`, the one it used, under
            `optax.inject_hyperparams` `learning_rate` (without it, optax keeps no rate).

        Raises:
            TypeError: If `accumulate` or `max_skips` is no integer.
            ValueError: If `accumulate` is below 1, `max_skips` below 0 or `timeout` not above 0.
        """
        options = StepOptions(accumulate, skip_nonfinite, max_skips, leaf_norms, timeout)
        return Step(self.config, Loss(loss_fn, has_aux, weighted, mutable), options)

    def shardings(self, params: Any) -> Shardings:
        """Return where parameters, gradients and optimizer state live.

        Args:
            params: Arrays or shapes; on a mesh of absent devices too.

        Returns:
            Trees of `NamedSharding`; where a leaf is a `Padded`, one for the node.
        """
        return shardings(self.config, params)


def zero_shard(
    tx: optax.GradientTransformation,
    *,
    stage: Literal[0, 1, 2, 3],
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] = "data",
    shard_axis: str | tuple[str, ...] | None = None,
    params_axis: str | tuple[str, ...] | None = None,
    persist_below: int = PERSIST_BELOW,
    prefetch: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    reshard_after_forward: bool = True,
    precision: Precision | None = None,
    trainable: Callable[[str, Any], bool] | Any = None,
    overwrite: Callable[[str, Any], bool] | Any = None,
    offload: Offload | None = None,
    batch_spec: Any = None,
    view: Literal["global", "device"] = "global",
    wire: Wire | None = None,
    matrix_updates: Literal["auto", "owner", "sharded"] = "auto",
) -> ZeroTransformation:
    """Shard an optax transformation, and the training around it, over a mesh axis.

    Args:
        tx: Any optax transformation. Its update sees logical arrays, so it is exact.
        stage: 0: everything replicated. 1: optimizer state sharded. 2: gradients too. 3: parameters too.
        mesh: A mesh of real or absent devices, whose axes are Auto or Explicit: arrays come back on it. Default: all
            devices on one axis. Axes other than `axis` are left to the compiler; inside of the loss all are Auto.
        axis: The mesh axis, or axes such as `("host", "gpu")`, that rows, and the parts above, are divided over.
        shard_axis: Which of these the parts above are divided over, such as `"gpu"`; over the others they are
            replicated (HSDP). None: all.
        params_axis: Stage 3: which of these parameters alone are divided over, such as `"gpu"`: they are gathered
            within a host, and their gradients and optimizer state are over all. None: as the others.
        persist_below: A leaf with fewer elements is not sharded by dim: its parameter is persistent (replicated)
            at stage 3, its gradient and optimizer state are flat, each device holding 1/N, if the transformation
            updates it element by element.
        prefetch: Stage 3: how many uses ahead of a parameter's use its gather may start; 0 disables it. Each holds
            about one more layer's gathered parameters. A scan gathers one iteration ahead, whatever the number.
        bucket_bytes: Leaves of a layer are gathered and reduced together up to this many logical bytes.
        reshard_after_forward: Stage 3: False keeps gathered parameters between the
            forward and the backward pass: two passes moved instead of three.
        precision: In which types a step computes, sums and keeps its parameters, such as `Precision.bf16()`. None: as
            the parameters and the loss function have it. Where there are master weights, chain inside, in `tx`: what
            is behind it in an `optax.chain` would change updates that cannot reach them.
        trainable: Which parameters are trained: `trainable(path, leaf) -> bool`, where `path` is like
            `"params/dense/kernel"` and `leaf` a `jax.ShapeDtypeStruct` of logical shape; or a tree of bools. The
            others, and integers and booleans always, get no gradient, no optimizer state and no reduce-scatter; at
            stage 3 they are sharded all the same. `tx` sees holes in their place, as under `optax.masked`.
        overwrite: Which parameters take their gradient as the new value, given as `trainable` is and whatever that
            says: where a layer computes statistics in its backward pass. Those whose path, or NNX class, names Flax's
            collection `_overwrite_with_gradient` do so in any case. Of microbatches, and in device view of devices,
            the elementwise maximum is taken. They are replicated, keep their type, and no norm counts them; `tx` sees
            holes in their place.
        offload: What is offloaded to host memory or disk, such as `Offload(optimizer="host")`.
            `train_step` streams it chunk by chunk; `update`, which may be part of another
            program, brings all of it to the device at once. JAX adds nothing to an array in host memory: with
            `params="host"`, a loop of your own moves the parameters to `jax.memory.Space.Device` before
            `optax.apply_updates`, and the result back with `jax.device_put(result, tx.shardings(params).params)`.
        batch_spec: How the batch is divided: a `PartitionSpec` such as `P("data", "sequence")`, which begins with
            `axis` and of which a leaf takes as many entries as it has dims; or a tree of them. None: dim 0 alone.
        view: What a loss function sees. `"global"`: the whole batch, as under `jax.jit`: all is as on one device.
            `"device"`: the rows of its device, as under `pmap`, and its mean is taken over the devices; it may use
            collectives over `axis`.
        wire: What collectives carry in few bits, such as `Wire(gather="int8", reduce="int4")`. None: nothing.
        matrix_updates: Who computes what an update multiplies matrices for, as Muon's does: `"owner"`, one device
            each matrix, or a few where there are fewer matrices than devices; `"sharded"`, all devices each product;
            `"auto"`, what takes less time, counted in FLOPs and bytes. The plan and the report say which.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the methods of `ZeroTransformation`.

    Raises:
        TypeError: If `tx` is no optax transformation.
        ValueError: If the stage is unknown, or the mesh lacks the axis or has Manual axes.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.

    Examples:
        >>> tx = zero_shard(optax.adamw(3e-4), stage=3)
        >>> state = tx.create(tx.init_params(model_init, key))
        >>> step = tx.train_step(loss_fn)
        >>> state, metrics = step(state, batch)
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    axes = resolve_axes(axis)
    mesh = resolve_mesh(mesh, axes)
    config = Config(
        tx,
        stage,
        mesh,
        axes,
        resolve_axes(shard_axis, "shard_axis"),
        resolve_axes(params_axis, "params_axis"),
        persist_below=persist_below,
        prefetch=prefetch,
        bucket_bytes=bucket_bytes,
        reshard_after_forward=reshard_after_forward,
        precision=precision,
        trainable=stored_mask(trainable, "trainable"),
        overwrite=stored_mask(overwrite, "overwrite"),
        offload=offload,
        batch_spec=BatchSpec.of(batch_spec),
        view=view,
        wire=wire,
        matrix_updates=matrix_updates,
    )
    return ZeroTransformation.of(config)
