"""Find parameters and optimizer state in the tree of a hand-written loop, such as a pair or a Flax `TrainState`.

The tree becomes a `ZeroState`, so that both have the same names in a checkpoint. All other leaves become mutable state.
Arrays of an optimizer state do not say how they are padded or flattened, so their layouts come from the plan of
`tx.init`, whose leaves are found in the tree by their paths.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.state_leaves import leaf_name
from zerojax.comm.mesh import replicated
from zerojax.config import Config, path_of
from zerojax.layout.leaf import is_chunked, is_padded
from zerojax.optim.in_trees import NAMED, Found, models_in, only_model
from zerojax.optim.sharding_plan import state_shapes
from zerojax.placement.problems import problem_of
from zerojax.placement.storage import are_shapes, place_replicated
from zerojax.train.state import ZeroState


def as_state(tree: PyTree, tx: Any) -> tuple[ZeroState, Callable[[ZeroState], PyTree]]:
    """Convert a tree to a `ZeroState`, and return a function that converts such a state back to the tree's form.

    `tx` is the transformation that placed the arrays. If it is None, `tree` or one of its children must have the
    attribute `tx`. A top-level leaf named `step` is the step. A `ZeroState` is returned unchanged.
    """
    if isinstance(tree, ZeroState):
        return tree, lambda state: state
    config = config_of(tree, tx)
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_padded)
    paths, nodes = [path_of(path) for path, _ in keyed], [placed(config, path, x) for path, x in keyed]
    plan, params, opt_state = find_model(config, paths, nodes)[:3]
    step = [i for i, path in enumerate(paths) if path == "step"]
    found = {*step, *params, *opt_state}
    rest = structure.unflatten([None if i in found else i for i in range(len(nodes))])
    rest = jax.tree.map(lambda x: x if jax.tree.leaves(x) else None, rest, is_leaf=is_chunked)
    # The top becomes a dict, whatever node it is, so that all trees have the names of a mutable state in a dict.
    top = jax.tree_util.tree_flatten_with_path(rest, is_leaf=lambda x: x is not rest)[0]
    others = {path_of(path): child for path, child in top}
    state = ZeroState(
        nodes[step[0]] if step else None,  # pyright: ignore[reportArgumentType]
        plan.layout.treedef.unflatten([nodes[i] for i in params]),
        jax.tree.structure(state_shapes(config, plan)).unflatten([nodes[i] for i in opt_state]),
        None,  # pyright: ignore[reportArgumentType]
        jax.tree.map(nodes.__getitem__, others),
        plan,
    )
    check_parts(config, state)

    def back(state: ZeroState) -> PyTree:
        new = jax.tree.leaves((state.step, state.params, state.opt_state, state.mutable), is_leaf=is_padded)
        new = dict(zip([*step, *params, *opt_state, *jax.tree.leaves(others)], new, strict=True))
        given = [x for _, x in keyed]
        return structure.unflatten([type(x)(new[i]) if isinstance(x, int) else new[i] for i, x in enumerate(given)])

    return state, back


def config_of(tree: PyTree, tx: Any) -> Config:
    top = [tree, *jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)]
    given = [getattr(node, "tx", None) for node in top] if tx is None else [tx]
    configs = {id(one): one for x in given if isinstance(one := getattr(x, "config", None), Config)}
    if len(configs) == 1:
        return next(iter(configs.values()))
    raise TypeError(
        f"A checkpoint needs the transformation that placed the arrays, because an array of an optimizer state does "
        f"not say how it is padded. A {type(tree).__name__} does not name it: {len(configs) or 'no'} nodes of the tree "
        f"have a .tx. Give the state of tx.create(params) or, for the tree of your own loop, Checkpointer(..., tx=tx)."
    )


def placed(config: Config, path: tuple, x: Any) -> Any:
    """Return a leaf on the mesh. Numbers and uncommitted arrays, which have no fixed device, are replicated."""
    if is_padded(x) or (isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None):
        return x
    if isinstance(x, jax.Array) or (isinstance(x, int) and abs(x) < 2**31):  # such as the step of a new TrainState
        return x if getattr(x, "committed", False) else replicate(config, x)
    raise TypeError(
        f"{leaf_name('state', path)} is a {type(x).__name__}, and a checkpoint has arrays of JAX. Give jnp.asarray(x), "
        f"or a shape with a sharding, as tx.shard returns. Leave functions out: eqx.filter(model, eqx.is_array)."
    )


def replicate(config: Config, x: Any) -> jax.Array:
    """Replicate a value that all processes have. A key is moved as its data: JAX copies no key to other processes."""
    if isinstance(x, jax.Array) and is_key(x):
        wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
        return jax.jit(wrap, out_shardings=replicated(config.mesh))(replicate(config, jax.random.key_data(x)))
    return place_replicated(config.mesh, x, shapes=False)


def find_model(config: Config, paths: list[str], nodes: list[Any]) -> Found:
    """Find parameters and their optimizer state among the leaves of a tree, and the plan by which they are stored."""
    found, problem = models_in(config, paths, nodes, is_padded)
    if one := only_model(found):
        return one
    if not found:
        raise ValueError(
            f"The tree has no parameters with an optimizer state of this transformation: {problem}. Give parameters "
            f"that tx.shard or tx.init_params returned, and the state that tx.init of the same tx returned for them."
        )
    pairs = ", ".join(f"{one.root or 'the tree'} with {one.state_root}" for one in found[:NAMED])
    raise ValueError(
        f"Several parts of the tree could be the parameters and their optimizer state: {pairs}. A checkpoint has one "
        f"model. Give the parameters the key 'params', and save each model with a Checkpointer of its own."
    )


def check_parts(config: Config, state: ZeroState) -> None:
    """Raise a `ValueError` for arrays on another mesh, or for a second sharded optimizer state of unknown layout."""
    for name, part in (("params", state.params), ("opt_state", state.opt_state)):
        if not are_shapes(part) and (problem := problem_of(config.mesh, name, part)):
            raise ValueError(problem)
    is_state = lambda x: isinstance(x, tuple) and type(x).__module__.partition(".")[0] == "optax"
    others = jax.tree.leaves([x for x in jax.tree.leaves(state.mutable, is_leaf=is_state) if is_state(x)])
    if not all(x.sharding.is_fully_replicated for x in others):
        raise ValueError(
            "The tree has another sharded optimizer state, whose arrays do not say how they are padded. Save each "
            "model with a Checkpointer of its own."
        )
