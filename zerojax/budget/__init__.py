"""Choose which values a block saves for its backward pass, within a budget of bytes.

Read `remat.py` first: it has the public function. It gives every value of the block a name. `graph.py` finds out which
values the backward pass reads, counts the FLOPs of each value, and chooses the names to save. `jax.checkpoint` then
recomputes the other values.
"""
