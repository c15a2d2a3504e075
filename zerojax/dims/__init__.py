"""Follow a dim through a program, and find the dim that holds its entries in each value.

The followed dim may hold the rows of a batch, or the matrices of a stack. A table has a rule for each primitive, which
finds the dim in the results, given the operands. Without a rule the answer is "unknown", which is always safe.

place      describes where the followed dim is in one value
moves      has rules for primitives that move elements, or compute each one from elements at the same place
products   has rules for products, convolutions and decompositions
indexing   has rules for slices, gathers and scatters
follow     walks through a jaxpr, its calls, loops and branches
"""

from zerojax.dims.follow import Follower
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, at, stacked

__all__ = ["NOWHERE", "UNKNOWN", "Context", "Follower", "Place", "Places", "State", "at", "stacked"]
