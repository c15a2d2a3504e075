"""Define the methods of a transformation that take and return trees, as optax and hand-written loops do.

These methods only call functions of other files. A call imports the file that it needs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, overload

import optax

from zerojax.config import Config, check_count
from zerojax.train.loss import Loss

if TYPE_CHECKING:
    from zerojax.train.state import ZeroState
    from zerojax.train.tree_api import Shardings

# With these type variables, the functions that methods return have the types of the caller's functions.
Params = TypeVar("Params", bound=Any)
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Result = TypeVar("Result")
Args = ParamSpec("Args")
Given = TypeVarTuple("Given")


def init(config: Config, params: Any) -> Any:
    from zerojax.train import tree_api

    return tree_api.create_opt_state(config, params)


def update(config: Config, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    from zerojax.train import tree_api

    return tree_api.update_tree(config, updates, state, params, **extra)


class TreeTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that shards its state, with methods for hand-written loops and for evaluation."""

    if TYPE_CHECKING:
        config: Config

    @property
    def _trees(self) -> Any:
        from zerojax.train import tree_api

        return tree_api

    def init_params(self, init_fn: Callable[[*Given], Result], *args: *Given) -> Result:
        """Initialise parameters in storage. Each device makes only its shards: at stage 3, a part of the model.

        Args:
            init_fn: Function that returns the tree of parameters, and that `jax.jit` can trace.
            *args: Arguments of `init_fn`.

        Returns:
            The tree `init_fn(*args)` in storage, in the types of the master weights, for `create` or `init`. At stage
            3, its leaves are sharded, and a leaf that needs padding is a `Padded`.
        """
        from zerojax.train.params import init_params

        return init_params(self.config, init_fn, args)

    def shard(self, params: Any) -> Any:
        """Copy existing parameters into storage.

        Args:
            params: Logical JAX or NumPy arrays, arrays in storage, or `jax.ShapeDtypeStruct`s.

        Returns:
            A copy in storage for `create` or `init`, in the types of the master weights; frozen parameters have their
            stored types. Donating the copy does not delete the caller's arrays. Shapes are returned with shardings.
        """
        from zerojax.train.params import shard

        return shard(self.config, params)

    def unshard(self, tree: Any, params: Any = None) -> Any:
        """Gather parameters or an optimizer state into logical arrays, replicated on every device.

        Args:
            tree: Parameters, gradients, updates, an optimizer state, or a part of an optimizer state, in storage.
            params: The parameters or their shapes, if `tree` is an optimizer state. Needed in three cases: neither
                `init` nor `create` was called for them in this process; several models have states of equal storage
                shapes; or `tree` is a part of a state, such as a tree of moments, without a `NamedTuple` of optax.

        Returns:
            The tree in the form of plain JAX and optax. A state has `optax.MaskedNode()` for each parameter that is
            not trained. It has no master weights, which `tx.weights` returns.

        Raises:
            ValueError: If the logical shapes of a state are unknown, or an array was donated or is on another mesh.
        """
        return self._trees.unshard(self.config, tree, params)

    def adopt(self, state: Any, params: Any) -> Any:
        """Shard an optimizer state from a run without zerojax, as `init` shards a fresh state.

        Args:
            state: A state of the wrapped transformation, with logical arrays. If some parameters are frozen, it may be
                the state of all parameters, or a state of `optax.masked`.
            params: The parameters of the other run, logical or in storage. Master weights are copied from them.

        Returns:
            A copy of the state in storage, for `update`. `tx.unshard` converts it back, bit for bit. For a run of
            `train_step`, call `tx.create(params, opt_state=state)` with the plain state instead.

        Raises:
            ValueError: If the state belongs to other parameters or to another transformation.
            TypeError: If a leaf has a type whose values the sharded state cannot represent.
        """
        return self._trees.adopt(self.config, state, params)

    def as_params(self, mirror: Any, params: Any) -> Any:
        """Convert a part of the optimizer state, such as an average of the parameters, into a tree of parameters.

        Args:
            mirror: A subtree of the state, in storage, with one leaf per trained parameter.
            params: The parameters, logical or in storage. Leaves that are not trained are copied from them.

        Returns:
            A tree in storage, in the types of `mirror`, for `eval_step`, `unshard` or `export`. Together with
            `params`, `optax.contrib.schedule_free_eval_params` accepts it.

        Raises:
            ValueError: If `mirror` and the trained parameters differ in structure or shapes.
        """
        from zerojax.optim.logical_state import as_params

        return as_params(self.config, mirror, self._trees.loaded(params))

    def weights(self, params: Any, opt_state: Any) -> Any:
        """Return the current parameters in the types of the master weights, for example to average them.

        Args:
            params: The parameters in storage, such as `state.params`.
            opt_state: Their optimizer state, such as `state.opt_state`.

        Returns:
            A tree in storage. Without master weights, this is `params` itself: copy it before a step donates `params`.
        """
        from zerojax.optim.logical_state import weights

        return weights(self.config, self._trees.loaded(params), opt_state)

    def eval_step(self, fn: Callable[Args, Result]) -> Callable[Args, Result]:
        """Return a jitted function of the parameters, for evaluation or generation. Parameters are gathered on use.

        Args:
            fn: `fn(params, batch, *args)`. In both views, `fn` sees logical parameters and all rows of `batch`. It
                may return any value that a jitted function may return.

        Returns:
            `step(params, batch, *args, **keywords)`, which returns the result of `fn`. `params` are logical or in
            storage, such as `state.params`. `fn` sees parameters in the types that a loss sees. If the devices cannot
            divide the rows, as in the last batch of an epoch, each device computes all rows. A parameter that each
            iteration of a scan reads is gathered before the scan. A loss with a teacher model may call `step`.
        """
        from zerojax.train.eval_step import eval_step

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
                sum of the weights, which are not differentiated, over all microbatches and devices. If a weight is
                negative or the weights sum to zero, the mean loss and the gradients are NaN.
            mutable: Whether the loss has a mutable state, as for `train_step`. If it has, `f(params, mutable, batch,
                *args)` returns `((loss, mutable), grads)`, or `((loss, mutable, aux), grads)` with `has_aux`.
            accumulate: Number of microbatches per device. Their losses and gradients are computed one after the other,
                so that only one microbatch's activations are in memory. Keys in `*args` are folded with the index of
                the microbatch.
            reduction: Whether the losses of microbatches (in device view also of devices) are averaged (`"mean"`) or
                added up (`"sum"`, for sums over rows). None: they are averaged, but with microbatches, a loss that is a
                sum over the rows raises an error.

        Returns:
            `f(params, batch, *args, **keywords) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. Without a
            positional batch, keyword arguments that contain arrays with rows are the batch. `grads` has the structure,
            logical shapes and types of `params`, and zeros for frozen leaves. At stages 2 and 3 it is sharded like
            `tx.shardings(params).grads`. Only `train_step` applies a loss scale.

        Raises:
            ValueError: If devices and microbatches do not divide the rows evenly, or the loss is not a scalar.
        """
        check_count("accumulate", accumulate, "microbatches", least=1)
        loss = Loss(loss_fn, has_aux, weighted, mutable, reduction)
        return self._trees.differentiate_tree(self.config, loss, accumulate=accumulate)

    def shardings(self, params: Any) -> "Shardings":
        """Return the shardings of parameters, gradients and optimizer state, as trees of `NamedSharding`.

        Args:
            params: The parameters, as arrays or shapes.

        Returns:
            The trees. A parameter that is a `Padded` in storage has one sharding.
        """
        return self._trees.shardings(self.config, params)

    def reshard(self, state: "ZeroState", *, to: "TreeTransformation", donate: bool = True) -> "ZeroState":
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
        from zerojax.checkpoint.live import reshard

        return reshard(self.config, state, to, donate=donate)
