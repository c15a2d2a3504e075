"""Define `ZeroTransformation`, the result of `zero_shard`. Its methods only call functions of other files."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, overload

import optax

from zerojax.config import Config, check_count
from zerojax.config.data_mesh import spec_entry
from zerojax.staged.params_on_disk import loaded
from zerojax.train.eval_step import eval_step
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState, create, init_params, shard
from zerojax.train.step import Step, StepOptions
from zerojax.train.tree_api import Shardings, adopt, init, shardings, unshard, update, value_and_grad

# The types of the caller's functions, which the functions made of them keep.
Params = TypeVar("Params", bound=Any)
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Result = TypeVar("Result")
Args = ParamSpec("Args")
Given = TypeVarTuple("Given")


class ZeroTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation, usable wherever optax takes one, that shards parameters, gradients and its own state."""

    @classmethod
    def of(cls, config: Config) -> "ZeroTransformation":
        """Return the transformation for a configuration that `zero_shard` built."""
        # The partials contain `config`, so an object that pickle rebuilds from `init` and `update` has `config`, too.
        return cls(functools.partial(init, config), functools.partial(update, config))

    @property
    def config(self) -> Config:
        """Return the configuration, with the wrapped transformation, the mesh and all options."""
        return self.init.args[0]  # pyright: ignore[reportAttributeAccessIssue]

    def __repr__(self) -> str:
        """Return a text with the stage, mesh and axis, because the functions in the tuple have no useful repr."""
        c, mesh = self.config, dict(self.config.mesh.shape)
        tuning = f"Tuning(persist_below={c.persist_below})"
        return f"zero_shard(stage={c.stage}, mesh={mesh}, axis={spec_entry(c.axis)!r}, tuning={tuning})"

    def init_params(self, init_fn: Callable[[*Given], Result], *args: *Given) -> Result:
        """Initialise parameters in storage. Each device makes only its shards: at stage 3, none holds the whole model.

        Args:
            init_fn: Function that returns the tree of parameters, and that `jax.jit` can trace.
            *args: Arguments of `init_fn`.

        Returns:
            The tree `init_fn(*args)` in storage, in the types of the master weights, for `create` or `init`. At stage
            3, its leaves are sharded, and a leaf that needs padding is a `Padded`.
        """
        return init_params(self.config, init_fn, args)

    def shard(self, params: Any) -> Any:
        """Copy existing parameters into storage.

        Args:
            params: Logical JAX or NumPy arrays, arrays in storage, or `jax.ShapeDtypeStruct`s.

        Returns:
            A copy in storage for `create` or `init`, in the types of the master weights; frozen parameters have their
            stored types. Donating it does not delete the caller's arrays. Shapes are returned with their shardings.
        """
        return shard(self.config, params)

    def unshard(self, tree: Any, params: Any = None) -> Any:
        """Gather parameters or an optimizer state into logical arrays, replicated on every device.

        Args:
            tree: Parameters, gradients, updates, an optimizer state, or a part of an optimizer state, in storage.
            params: The parameters or their shapes, if `tree` is an optimizer state. Needed if neither `init` nor
                `create` was called for them in this process, if several models have states with the same storage
                shapes, or if `tree` is a part of a state without a `NamedTuple` of optax, such as a tree of moments.

        Returns:
            The tree in the form of plain JAX and optax: a state with `optax.MaskedNode()` for each parameter that is
            not trained, and without master weights, which `tx.weights` returns.

        Raises:
            ValueError: If the logical shapes of a state are unknown, or an array was donated or is on another mesh.
        """
        return unshard(self.config, tree, params)

    def adopt(self, state: Any, params: Any) -> Any:
        """Shard an optimizer state from a run without zerojax, as `init` shards a fresh state.

        Args:
            state: A state of the wrapped transformation, with logical arrays. If some parameters are frozen, it may be
                the state of all parameters, or a state of `optax.masked`.
            params: The parameters of that run, logical or in storage. Master weights are copied from them.

        Returns:
            A copy of the state in storage, for `update`. `tx.unshard` converts it back, bit for bit. For a run of
            `train_step`, call `tx.create(params, opt_state=state)` with the plain state instead.

        Raises:
            ValueError: If the state belongs to other parameters or to another transformation.
            TypeError: If a leaf has a type whose values the sharded state cannot represent.
        """
        return adopt(self.config, state, params)

    def as_params(self, mirror: Any, params: Any) -> Any:
        """Convert a part of the optimizer state, such as an average of the parameters, into a tree of parameters.

        Args:
            mirror: A subtree of the state, in storage, with one leaf per trained parameter.
            params: The parameters, logical or in storage. Leaves that are not trained are copied from them.

        Returns:
            A tree in storage, in the types of `mirror`, for `eval_step`, `unshard`, `export` or, with `params`,
            `optax.contrib.schedule_free_eval_params`.

        Raises:
            ValueError: If `mirror` and the trained parameters differ in structure or shapes.
        """
        from zerojax.optim.logical_state import as_params

        return as_params(self.config, mirror, loaded(params))

    def weights(self, params: Any, opt_state: Any) -> Any:
        """Return the parameters in the types of the master weights at every stage, for an average of them, for example.

        Args:
            params: The parameters in storage, such as `state.params`.
            opt_state: Their optimizer state, such as `state.opt_state`.

        Returns:
            A tree in storage. Without master weights it is `params` itself: copy it before a step donates it.
        """
        from zerojax.optim.logical_state import weights

        return weights(self.config, loaded(params), opt_state)

    def eval_step(self, fn: Callable[Args, Result]) -> Callable[Args, Result]:
        """Return a jitted function of the parameters, for evaluation or generation. Parameters are gathered on use.

        Args:
            fn: `fn(params, batch, *args)`. In both views, it sees logical parameters and all rows of `batch`. It may
                return any value that a jitted function may return.

        Returns:
            `step(params, batch, *args, **keywords)`, which returns the result of `fn`. `params` are logical or in
            storage, such as `state.params`. `fn` sees them in the types that a loss sees. If the devices cannot divide
            the rows, as in the last batch of an epoch, each computes all of them. A loop over tokens, or a loss with a
            teacher model, may call `step`. In a scan, parameters that all iterations use are gathered before it.
        """
        return eval_step(self.config, fn)

    @overload
    def value_and_grad(
        self,
        loss_fn: Callable[Concatenate[Params, Args], Value],
        *,
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> Callable[Concatenate[Params, Args], tuple[Value, Params]]: ...

    @overload
    def value_and_grad(
        self,
        loss_fn: Callable[Concatenate[Params, Args], tuple[Value, Aux]],
        *,
        has_aux: Literal[True],
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> Callable[Concatenate[Params, Args], tuple[tuple[Value, Aux], Params]]: ...

    @overload
    def value_and_grad(
        self,
        loss_fn: Callable,
        *,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> Callable: ...

    def value_and_grad(
        self,
        loss_fn: Callable,
        *,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> Callable:
        """Return a function that computes loss and gradient over all devices, like `jax.value_and_grad`.

        Args:
            loss_fn: `loss_fn(params, batch, *args)`. It sees logical parameters. In global view it sees all rows of
                `batch`, and in device view only the rows of its device. It returns the loss, or `(loss, aux)` with
                `has_aux`. With `weighted`, it returns `(total, weight)` instead of the loss.
            has_aux: Whether `loss_fn` returns `(loss, aux)`. The markers of `zerojax.metrics` say how each leaf
                of aux is combined over microbatches and devices.
            weighted: Whether the loss is `(total, weight)`. The mean loss is then the sum of the totals divided by the
                sum of the weights, which are not differentiated, over all microbatches and devices. It is NaN, like
                the gradients, if a weight is negative or the sum of the weights is zero.
            mutable: Whether the loss has a mutable state, as for `train_step`. `f(params, mutable, batch, *args)` then
                returns `((loss, mutable), grads)`, or `((loss, mutable, aux), grads)` with `has_aux`.
            accumulate: Number of microbatches per device. Their losses and gradients are computed one after the other,
                so that only one microbatch's activations are in memory. Keys in `*args` are folded with its index.
            reduction: Whether the losses of microbatches (in device view also of devices) are averaged (`"mean"`) or
                added up (`"sum"`, for sums over rows). None: averaged, unless `accumulate` finds a sum: an error.

        Returns:
            `f(params, batch, *args, **keywords) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. Without a
            positional batch, keyword arguments that contain arrays with rows are the batch. `grads` has the structure,
            logical shapes and types of `params`, and zeros for frozen leaves. At stages 2 and 3 it is sharded like
            `tx.shardings(params).grads`. Only `train_step` applies a loss scale.

        Raises:
            ValueError: If devices and microbatches do not divide the rows evenly, or the loss is not a scalar.
        """
        check_count("accumulate", accumulate, "microbatches", least=1)
        return value_and_grad(self.config, Loss(loss_fn, has_aux, weighted, mutable, reduction), accumulate=accumulate)

    def create(self, params: Any, *, mutable: Any = None, opt_state: Any = None) -> ZeroState:
        """Create the state of a new run at step 0, with the parameters in storage and an optimizer state.

        Args:
            params: Logical parameters, parameters in storage, or shapes. They are copied, master weights as they are.
                Delete the originals to free their memory.
            mutable: The initial mutable state, such as batch statistics, for a loss with `mutable=True`: a tree of
                arrays, which every device holds in full.
            opt_state: A plain optax state to continue from, as for `adopt`. None: a fresh state.

        Returns:
            The state to pass to the step that `train_step` returns.
        """
        return create(self.config, params, mutable, opt_state)

    def reshard(self, state: ZeroState, *, to: "ZeroTransformation", donate: bool = True) -> ZeroState:
        """Move a live state into the layout of another transformation, without files, bit for bit.

        Stage, mesh, number of devices, hybrid sharding, precision and offload may differ. The result is what a
        checkpoint of `state` would restore into `to.create(shapes)`. Leaves are moved one by one. If the devices
        differ, a leaf goes through host memory.

        Args:
            state: The state of a run. All processes of both meshes must call this method.
            to: The transformation for which the state is wanted: `zero_shard` of the same optax transformation.
            donate: Whether `state` is used up, as by a step. If False, memory must have room for both states.

        Returns:
            The state for `to`.

        Raises:
            ValueError: If the optimizers differ, `state` was donated, or a process has only devices of the new mesh.
        """
        from zerojax.checkpoint.live import reshard  # only here, because orbax takes long to import

        return reshard(self.config, state, to, donate=donate)

    def train_step(
        self,
        loss_fn: Callable,
        *,
        accumulate: int = 1,
        reduction: Literal["mean", "sum"] | None = None,
        has_aux: bool = False,
        weighted: bool = False,
        mutable: bool = False,
        skip_nonfinite: bool = False,
        max_skips: int | None = None,
        leaf_norms: bool = False,
        timeout: float | None = None,
        memory: float | str | None = None,
        compiler_options: Mapping[str, Any] | Literal["auto"] = "auto",
    ) -> Step:
        """Return a jitted training step that donates its state.

        Args:
            loss_fn: As for `value_and_grad`. With `mutable`, it is `loss_fn(params, mutable, batch, *args)`.
            accumulate: As for `value_and_grad`. At stages 0 and 1, each device adds up full gradients, which are
                reduced once per step. At stages 2 and 3, the gradients of each microbatch are reduce-scattered.
            reduction: As for `value_and_grad`.
            has_aux: As for `value_and_grad`. The combined aux is `metrics["aux"]`.
            weighted: As for `value_and_grad`. Invalid weights skip a step, and a later call raises an error.
            mutable: Whether the loss updates `state.mutable`. Each microbatch gets the state that the previous one
                returned. In device view, float leaves are averaged over devices at the end, and others must be equal.
                Keep PRNG keys out of it in device view or with microbatches: only keys in `*args` are folded.
            skip_nonfinite: Whether a step whose gradient norm is not finite leaves the state unchanged, bit for bit.
                Always on with a loss scale.
            max_skips: After more skipped steps in a row, the next call raises an error. Implies `skip_nonfinite`, and
                makes each call wait for the previous step. None: no limit.
            leaf_norms: Whether the metrics include norms per parameter: of its gradient and, without offload, of its
                stored value and change; `optax.MaskedNode()` for a frozen parameter.
            timeout: Seconds that a step may take, without compilation. If a step takes longer, the process prints which
                process it waits for, and exits with status 75. None: it only prints, after 1800 s and with several
                processes. `float("inf")`: nothing.
            memory: The bytes per device that the compiled step may take, such as `"72 GB"`, or `"auto"` for the memory
                that JAX may use on the device. The blocks of the loss (functions under `zerojax.block`, and bodies of
                scans, without a `jax.checkpoint`) save as many activations as fit, and recompute all others. The first
                call with new shapes compiles up to four times.
            compiler_options: Options of XLA by name. With `"auto"`, a step on GPUs with hybrid sharding may run two
                collectives at once.

        Returns:
            `step(state, batch, *args, **keywords) -> (state, metrics)`; see `zerojax.train.step.Step`.

        Raises:
            TypeError: If an option has a wrong type.
            ValueError: If an option is out of range or not for this configuration, or `memory` does not suffice.
        """
        options = StepOptions(accumulate, skip_nonfinite, max_skips, leaf_norms, timeout, memory, compiler_options)
        return Step(self.config, Loss(loss_fn, has_aux, weighted, mutable, reduction), options)

    def shardings(self, params: Any) -> Shardings:
        """Return trees of the `NamedSharding`s of parameters, gradients and optimizer state, one for each `Padded`.

        Args:
            params: Arrays or shapes.
        """
        return shardings(self.config, params)
