"""Lay out a state with packed leaves: each packed array is sharded as the wide array that it represents."""

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.narrow_state.packed_state import packed_leaf, packings_of
from zerojax.optim.master_weights import MasterState, master_forms


def packed_leaves(config: Config, trained: Layout, state: Any, leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Return the layouts of the stored state. `state` has the shapes of the wide state, and `leaves` its layouts."""
    inner = state.inner if isinstance(state, MasterState) else state
    packings, start = packings_of(config, trained, inner), len(jax.tree.leaves(inner))
    changed = {k: packed_leaf(leaves[k], packing) for k, packing in packings.items()}
    if config.has_master_weights:
        forms = filter(None, master_forms(config, trained))
        changed |= {k: form.leaf(leaves[k]) for k, form in enumerate(forms, start)}
    return tuple(changed.get(k, leaf) for k, leaf in enumerate(leaves))
