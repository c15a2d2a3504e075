"""Replicate leaves without an evenly divisible dim if this costs little memory, so that padding is rare."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from zerojax.layout.leaf import Leaf

MOST_EXTRA = 0.03


def reason_for(shards: int) -> str:
    """Return the `reason` of a leaf that is replicated because the shards divide none of its dims evenly."""
    return f"{shards} divides none of its dims; such leaves add at most {MOST_EXTRA:.0%} to a device's share"


def is_kept_whole(leaf: Leaf) -> bool:
    """Return whether a leaf is replicated because the shards divide none of its dims evenly."""
    return leaf.kind == "replicated" and leaf.reason == reason_for(leaf.shards)


def keep_whole(
    leaves: Sequence[Leaf], candidates: Collection[int], shares: Sequence[Collection[int]], sizes: Mapping[str, int]
) -> tuple[Leaf, ...]:
    """Replicate leaves that would need padding, as long as this adds little to the memory of a device.

    A device holds `1 / shards` of every sharded leaf. Replicating a leaf of `b` bytes adds `b * (1 - 1 / shards)`.
    Leaves with the same shape and type are decided together, so that equal layers have equal layouts. The group of
    leaves that adds the fewest bytes is decided first.

    Only `candidates`, given by index, may become replicated. `shares` are sets of indices, such as all parameters and
    the trained ones: in each set, replicated leaves add at most the fraction `MOST_EXTRA` to the bytes of a device.
    `sizes` has the size of each mesh axis, because axes other than data axes also divide leaves.
    """
    held = [leaf.along_others(sizes).bytes for leaf in leaves]
    extra = [size * (leaf.shards - 1) for size, leaf in zip(held, leaves, strict=True)]
    shares = [frozenset(share) for share in shares]
    left = [MOST_EXTRA * sum(held[i] for i in s) - sum(extra[i] for i in s if is_kept_whole(leaves[i])) for s in shares]
    groups: dict[tuple, list[int]] = {}
    for i in sorted(candidates):
        if leaves[i].kind == "sharded" and leaves[i].padding > 0:
            groups.setdefault((leaves[i].shape, str(leaves[i].dtype), leaves[i].others), []).append(i)
    whole = list(leaves)
    for group in sorted(groups.values(), key=lambda group: sum(extra[i] for i in group)):
        rest = [now - sum(extra[i] for i in share.intersection(group)) for now, share in zip(left, shares, strict=True)]
        if min(rest) < 0:
            continue
        left = rest
        for i in group:
            reason = reason_for(leaves[i].shards)
            whole[i] = dataclasses.replace(leaves[i], kind="replicated", dim=None, reason=reason)
    return tuple(whole)
