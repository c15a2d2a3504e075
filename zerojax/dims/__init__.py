"""Find which dims of each value in a program hold the entries of one dim of the program's inputs.

This dim of the inputs is called the followed dim. Its entries may be the rows of a batch, or the matrices of a stack. A
place is a dim of a value that holds these entries. A table has one rule per primitive, which finds the places in an
equation's results, given the places in its operands. Without a rule the answer is "unknown", which is always safe.

place      describes where the followed dim is in one value
moves      has rules for primitives that move elements, or compute each one from elements at the same place
products   has rules for products, convolutions and decompositions
indexing   has rules for slices, gathers and scatters
follow     finds the places in a jaxpr, its calls, loops and branches
"""

from zerojax.dims.follow import Follower
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, at, stacked

__all__ = ["NOWHERE", "UNKNOWN", "Context", "Follower", "Place", "Places", "State", "at", "stacked"]
