"""Describe a sharding plan in words."""

from typing import Any


def text_of(plan: Any) -> str:
    """Return a line with stage and axes, then one line per leaf with its type, logical shape and layout.

    `plan` is a `ShardingPlan`.
    """
    policy, sent = plan.layout.policy, lambda leaf: f", {leaf.sent}" if leaf.sent else ""
    rows = []
    for i, leaf in enumerate(plan.layout.params):
        why = plan.layout.why_not_trained(i)
        rows.append(("params", leaf, sent(leaf) + (f", {why}" if why not in leaf.reason else "")))
    rows += [("grads", leaf, sent(leaf)) for leaf in plan.grads]
    chunks = [f", offloaded in {len(x.extents)} chunks" if x else "" for x in plan.chunkings]
    rows += [("opt_state", leaf, more) for leaf, more in zip(plan.state, chunks, strict=True)]
    title = f"stage {policy.stage} over {policy.data.in_words()}, {policy.data.workers} workers"
    return "\n".join([title, *(f"{part}{leaf.path}  {leaf}{more}" for part, leaf, more in rows), *plan.update_in_words])
