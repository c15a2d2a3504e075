"""Choose which values a block saves for its backward pass, within a budget of bytes.

Read `remat.py` first: it has the public function. Every value of a block gets a name. `graph.py` finds the values that
the backward pass reads, counts the FLOPs that compute each value, and chooses the names to save. `jax.checkpoint` then
recomputes the other values. `blocks.py` applies this to every block of a loss.
"""
