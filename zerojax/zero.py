"""`zero_shard` and its object: joins the rooms below, and has no logic."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from zerojax.comm.mesh import resolve_axes, resolve_mesh
from zerojax.config import BUCKET_BYTES, PERSIST_BELOW, BatchSpec, Config, Offload, Precision, Wire, check_count
from zerojax.config.data_mesh import spec_entry
from zerojax.layout.padded import stored_mask
from zerojax.optim.logical_state import as_params
from zerojax.train.begin import create, init_params, shard
from zerojax.train.eval_step import eval_step
from zerojax.train.loss import Loss
from zerojax.train.optax_pair import Shardings, adopt, init, shardings, unshard, update
from zerojax.train.state import ZeroState
from zerojax.train.step import Step, StepOptions
from zerojax.train.tree_api import value_and_grad


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation whose parameters, gradients and state are sharded for a ZeRO stage.

    It is an `optax.GradientTransformationExtraArgs`, and works wherever optax's transformations do.
    """

    @classmethod
    def of(cls, config: Config) -> "ZeroTransformation":
        """Return the transformation of a configuration, which `zero_shard` makes and checks."""
        # keywords, as optax's protocols name them; a partial keeps the configuration where rebuilding finds it
        return cls(functools.partial(init, config), functools.partial(update, config))

    @property
    def config(self) -> Config:
        """Return the configuration: the wrapped transformation, the mesh and all options."""
        return self.init.args[0]  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        """Return stage, mesh and axis. The functions would say nothing."""
        c = self.config
        mesh = dict(c.mesh.shape)
        return f"zero_shard(stage={c.stage}, mesh={mesh}, axis={spec_entry(c.axis)!r}, persist_below={c.persist_below})"

    def init_params(self, init_fn: Callable, *args: Any) -> Any:
        """Initialise parameters, each leaf in its layout from the start.

        At stage 3, no device ever holds the whole model.

        Args:
            init_fn: Returns the tree of parameters. `jax.jit` must be able to trace it.
            *args: Arguments of `init_fn`.

        Returns:
            `init_fn(*args)` in storage: at stage 3 sharded over the axis, with a `Padded` for each leaf that has to be
            padded. The types are those of the master weights; `create` and `init` take the parameters so, and `shard`
            makes narrower copies.

        Examples:
            >>> params = tx.init_params(model.init, jax.random.key(0), inputs)
        """
        return init_params(self.config, init_fn, args)

    def shard(self, params: Any) -> Any:
        """Copy existing parameters into storage.

        Args:
            params: Logical arrays of JAX or NumPy, arrays in storage, or shapes.

        Returns:
            A copy in storage. If it is donated, the caller's arrays remain. The types are those that `precision` asks
            for. At stages 0 to 2, that is the compute type, so make the optimizer state from the wider parameters
            first. Shapes are returned with their shardings.
        """
        return shard(self.config, params)

    def unshard(self, tree: Any, params: Any = None) -> Any:
        """Gather parameters or an optimizer state into logical arrays, replicated on every device.

        Args:
            tree: Parameters, gradients, updates or the optimizer state, in storage; also a part of the state.
            params: For a state, the parameters or their shapes. Required in three cases: this transformation has not
                planned such parameters in this process, it has planned several that are stored alike, or `tree` has no
                node of optax's.

        Returns:
            The tree as plain JAX and optax have it. A state is that of the transformation which `zero_shard` was given:
            it has holes for parameters that are not trained, and no master weights. For master weights, call
            `tx.unshard(tx.as_params(opt_state.master, params))`.

        Raises:
            ValueError: If the logical shapes of a state are not known, or an array was donated or is on another mesh.
        """
        return unshard(self.config, tree, params)

    def adopt(self, state: Any, params: Any) -> Any:
        """Place a plain optax state, from a run without zerojax, as `init` places its own.

        Args:
            state: A state of the transformation that `zero_shard` was given; logical arrays. `tx.unshard` undoes this
                method, bit for bit. With frozen parameters, give the state of all parameters or of `optax.masked`.
            params: The parameters of the state, in any form. Master weights are taken from them.

        Returns:
            A copy of the state in storage, for `update`. `tx.create(params, opt_state=state)` begins a run with it.

        Raises:
            ValueError: If the state belongs to other parameters or to another transformation.
            TypeError: If the sharded state's type cannot represent a leaf.
        """
        return adopt(self.config, state, params)

    def as_params(self, mirror: Any, params: Any) -> Any:
        """Convert a part of the optimizer state that mirrors the parameters, such as an average, into parameters.

        Args:
            mirror: A subtree of the state, in storage, with the structure of the trained parameters.
            params: The parameters, in any form. Leaves that are not trained are taken from them.

        Returns:
            A tree in storage, in the types of `mirror`. Pass it to `eval_step`, `unshard`, `export`, or to functions of
            it and `params`, such as `optax.contrib.schedule_free_eval_params`.

        Raises:
            ValueError: If `mirror` has another structure or shape.
        """
        return as_params(self.config, mirror, params)

    def eval_step(self, fn: Callable) -> Callable:
        """Return a jitted function of full parameters, for evaluation and generation. It gathers them on use.

        Args:
            fn: `fn(params, batch, *args)`. It sees logical parameters and, in either view, all rows of `batch`. It may
                return anything that a jitted function may.

        Returns:
            `step(params, batch, *args, **keywords)`, which returns the result of `fn`. `params` are logical or in
            storage, such as `state.params`; their types are those of training. Rows that the devices cannot divide,
            such as the last of an epoch, are replicated. `step` may be called in a loop over tokens, and in a loss (a
            teacher). A scan within `fn` keeps gathered the parameters that all of its iterations use.

        Examples:
            >>> accuracy = tx.eval_step(lambda params, batch: jnp.mean(predict(params, batch["x"]) == batch["y"]))
            >>> accuracy(state.params, batch)
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
        """Return a function that computes loss and gradient over all devices, like `jax.value_and_grad`.

        Args:
            loss_fn: `loss_fn(params, batch, *args)`. It sees logical parameters and all rows of `batch` (in device view
                the rows of its device). It returns the loss, `(loss, aux)` with `has_aux`, or `(total, weight)` in the
                place of the loss with `weighted`.
            has_aux: Whether `loss_fn` returns `(loss, aux)`. The markers `Mean`, `Sum`, `Rows` and `Same` say how
                leaves are combined over microbatches and devices.
            weighted: Whether the loss is `(total, weight)`. The sum of the totals is then divided by the sum of the
                weights, over all microbatches and devices. A weight counts as a constant, which is not differentiated.
                If a weight is negative or the sum is zero, loss and gradients are NaN.
            mutable: As for `train_step`: `f(params, mutable, batch, *args)` returns `((loss, mutable), grads)`, and
                with `has_aux` `((loss, mutable, aux), grads)`.
            accumulate: Microbatches per device. They are differentiated one after the other, so that the activations
                of only one are in memory, and averaged. PRNG keys in `*args` are folded with the microbatch's index.

        Returns:
            `f(params, batch, *args, **keywords) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. Without a
            positional batch, the keyword arguments that have rows are the batch: `f(params, x=x, y=y)`. `grads` has the
            structure, logical shapes and types of `params`. At stages 2 and 3 it is sharded like
            `shardings(params).grads`. The gradient of a leaf that is not trained, such as integers, is zeros of its
            full size. `train_step` computes no such zeros, and only `train_step` scales the loss.

        Raises:
            ValueError: If axis and microbatches do not divide the batch, or the loss is no scalar.
        """
        check_count("accumulate", accumulate, "microbatches", least=1)
        return value_and_grad(self.config, Loss(loss_fn, has_aux, weighted, mutable), accumulate=accumulate)

    def create(self, params: Any, *, mutable: Any = None, opt_state: Any = None) -> ZeroState:
        """Begin a run: return parameters in storage with a fresh optimizer state, at step 0.

        Args:
            params: Logical parameters, parameters in storage, or shapes. They are copied, because each step donates its
                state; delete them to free their memory. Master weights are taken from them before they are cast.
            mutable: The initial mutable state (batch statistics), for a loss function with `mutable=True`: a tree of
                arrays, replicated.
            opt_state: A plain optax state to continue from, as `adopt` takes it. None: a fresh state.

        Returns:
            The state that the step of `train_step` takes.
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
            loss_fn: As for `value_and_grad`. With `mutable`, `loss_fn(params, mutable, batch, *args)` returns
                `(loss, mutable)`, and with `has_aux` `(loss, mutable, aux)`.
            accumulate: As for `value_and_grad`. Stages 0 and 1 add up full gradients and reduce them once. Stages 2 and
                3 reduce-scatter the gradients of each microbatch, and hold 1/N.
            has_aux: As for `value_and_grad`. The combined aux is `metrics["aux"]`.
            weighted: As for `value_and_grad`. A step with a negative weight or a zero sum is skipped, and the first
                later call that finds it finished raises an error.
            mutable: Whether the loss updates `state.mutable`, by one microbatch after the other. In device view, float
                leaves are then averaged over the devices, with equal weights, and other leaves must be equal on all.
                PRNG keys do not belong in it in device view or with microbatches: only keys in `*args` are folded.
            skip_nonfinite: Whether a step whose gradient norm is not finite leaves the state unchanged, bit for bit.
                A loss scale implies it.
            max_skips: Number of steps in a row that may be skipped before the next call raises; None for any number.
                Implies `skip_nonfinite`, and makes each call wait for the previous step.
            leaf_norms: Whether metrics have `grad_norms`: the norm of each parameter's gradient, and
                `optax.MaskedNode()` for a parameter that is not trained.
            timeout: Seconds that a step may take, without compilation. A step that takes longer ends the process with
                exit status 75, and names the process that it waits for. None: 1800 s with several processes,
                otherwise no limit. `float("inf")`: no limit.

        Returns:
            `step(state, batch, *args, **keywords) -> (state, metrics)`; see `zerojax.train.step.Step`.

        Raises:
            TypeError: If `accumulate` or `max_skips` is no integer.
            ValueError: If `accumulate` is below 1, `max_skips` below 0 or `timeout` not above 0.
        """
        options = StepOptions(accumulate, skip_nonfinite, max_skips, leaf_norms, timeout)
        return Step(self.config, Loss(loss_fn, has_aux, weighted, mutable), options)

    def shardings(self, params: Any) -> Shardings:
        """Return the shardings of parameters, gradients and optimizer state.

        Args:
            params: Arrays or shapes. The devices of the mesh may be absent.

        Returns:
            Trees of `NamedSharding`, with one sharding for each `Padded`.
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
    """Shard an optax transformation, and the training around it, over mesh axes.

    Args:
        tx: Any optax transformation. Its update sees logical arrays, so the result is exact.
        stage: 0: everything replicated. 1: optimizer state sharded. 2: gradients too. 3: parameters too.
        mesh: A mesh of real or absent devices, with Auto or Explicit axes; results are on it. None: all devices on one
            axis. Axes that `axis` does not name are left to the compiler. Inside the loss, all axes are Auto.
        axis: The mesh axes that divide the rows of a batch, such as `"data"` or `("host", "gpu")`.
        shard_axis: The axes of `axis` over which the stage shards, such as `"gpu"`. Over the other axes, everything is
            replicated (hybrid sharding, HSDP). None: all axes of `axis`.
        params_axis: Stage 3: the axes of `axis` over which parameters are sharded, such as `"gpu"`, so that they are
            gathered within a host. Gradients and optimizer state are sharded over all axes. None: as `shard_axis`.
        persist_below: A leaf with fewer elements is not sharded by dim. Its parameter is persistent (replicated) at
            stage 3. Its gradient and optimizer state are flat, 1/N per device, if its update is elementwise.
        prefetch: Stage 3: how many uses ahead of its use a parameter's gather may start; 0 disables prefetch. Each use
            costs the memory of about one gathered layer. A scan always prefetches one iteration.
        bucket_bytes: Leaves of a layer share one collective up to this many logical bytes.
        reshard_after_forward: Stage 3: whether gathered parameters are dropped after the forward pass. False keeps them
            for the backward pass, and moves the parameters' bytes twice per step and not three times.
        precision: The types in which a step computes, sums and keeps its parameters, such as `Precision.bf16()`. None:
            the types of the parameters and of the loss function. With master weights, chain further transformations
            inside `tx`: one behind it in an `optax.chain` would change updates that cannot reach the master weights.
        trainable: Which parameters are trained: `trainable(path, leaf) -> bool`, with a path such as
            `"params/dense/kernel"` and a `jax.ShapeDtypeStruct` of logical shape, or a tree of bools. Other parameters,
            and integers and booleans always, have no gradient and no optimizer state, but are sharded at stage 3. `tx`
            sees holes for them, as under `optax.masked`.
        overwrite: Which parameters take their gradient as the new value, given like `trainable`, which does not matter
            for them. Parameters whose path, or NNX class, names Flax's collection `_overwrite_with_gradient` always do.
            The new value is the elementwise maximum over microbatches, and in device view over devices. These
            parameters are replicated, keep their type, and are left out of norms. `tx` sees holes for them.
        offload: What is offloaded to host memory or disk, such as `Offload(optimizer="host")`. `train_step` streams it
            chunk by chunk; `update` brings all of it to the device at once. With `params="host"`, a hand-written loop
            moves parameters to `jax.memory.Space.Device` before `optax.apply_updates`, because JAX adds nothing to an
            array in host memory, and moves the result back: `jax.device_put(result, tx.shardings(params).params)`.
        batch_spec: How the batch is divided: a `PartitionSpec` that begins with `axis`, such as
            `P("data", "sequence")`, or a tree of them. A leaf takes as many entries as it has dims. None: only dim 0.
        view: What a loss function sees. `"global"`: the whole batch, as under `jax.jit` on one device. `"device"`: the
            rows of its device, as under `pmap`; the loss is averaged over devices, and may use collectives over `axis`.
        wire: What collectives send in few bits, such as `Wire(gather="int8", reduce="int4")`. None: nothing.
        matrix_updates: Which devices compute updates that multiply matrices, such as Muon's. `"owner"`: one device per
            matrix, or a few if there are fewer matrices than devices. `"sharded"`: all devices share each product.
            `"auto"`: the way with the smaller estimated time. The plan and the report show the choice.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the methods of `ZeroTransformation`.

    Raises:
        TypeError: If `tx` is no optax transformation.
        ValueError: If the stage is unknown, or the mesh lacks an axis or has Manual axes.

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
