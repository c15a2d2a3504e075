"""Lay out a state with encoded leaves. Each encoded array is sharded like the wide array that it represents."""

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.narrow_state.encoded_state import encoded_leaf, encodings_of
from zerojax.optim.master_weights import MasterState, master_forms


def encoded_leaves(config: Config, trained: Layout, state: Any, leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Return the layouts of the encoded state, from the shapes (`state`) and layouts (`leaves`) of the wide state."""
    inner = state.inner if isinstance(state, MasterState) else state
    encodings, start = encodings_of(config, trained, inner), len(jax.tree.leaves(inner))
    changed = {k: encoded_leaf(leaves[k], encoding) for k, encoding in encodings.items()}
    if config.has_master_weights:
        forms = filter(None, master_forms(config, trained))
        changed |= {k: form.leaf(leaves[k]) for k, form in enumerate(forms, start)}
    return tuple(changed.get(k, leaf) for k, leaf in enumerate(leaves))
