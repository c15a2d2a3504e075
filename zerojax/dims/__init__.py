"""Find which dims of each value in a program hold the entries of one dim of the program's inputs.

This dim of the inputs is called the followed dim. Its entries may be the rows of a batch, or the rows of a matrix. A
place is a dim of a value that holds these entries. A table has one rule per primitive, which finds the places in an
equation's results, given the places in its operands. Without a rule the answer is "unknown", which is always safe.

place      describes where the followed dim is in one value (`RowDims`)
moves      has rules for the primitives of a dense model
follow     finds the places in a jaxpr and its calls

These three are what most programs need. `follow` imports the others when it meets an equation for them:

loops      finds the places in loops and branches
mixing     has rules for primitives that cut, join or mix the entries along some dims
indexing   has rules for slices and gathers at indices that are operands, and for scatters
guess      replaces unknown places where shapes, shardings or the equation itself allow a guess
kernels    proves that a Pallas kernel's programs use only their own rows
declared   defines `zerojax.rows`, which declares a place
"""

from zerojax.dims.follow import Follower
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, RowDims, fits, on_dim, row_dims_of
