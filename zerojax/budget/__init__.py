"""Choose which values a block saves for its backward pass, within a budget of bytes.

Read `remat.py` first: it is the public function. It names every value of the block, asks `graph.py` which values the
backward pass reads and what each costs to compute (`flops.py`), and `choice.py` which names to save. The recomputation
itself is `jax.checkpoint`'s.
"""
