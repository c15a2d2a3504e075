"""Keep optimizer state and parameters in host memory or on disk."""

from typing import Any

__all__ = ["close"]


def close(state: Any) -> None:
    """Unlock the folder of a state on disk. The state cannot be used afterwards.

    Call this after Ctrl-C in a step. The state is then lost, but its folder stays locked as long as something, such as
    a traceback, refers to the state. Leaves that are not on disk are not changed.

    Args:
        state: A `ZeroState`, donated or not, or any tree with offloaded leaves.
    """
    import jax  # here, so that `zerojax.offload.disk` can be imported without JAX

    from zerojax.layout.leaf import is_chunked

    for x in jax.tree.leaves(state, is_leaf=is_chunked):
        if is_chunked(x) and x.leaf_files is not None:
            x.leaf_files.state_files.abandon()


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])
