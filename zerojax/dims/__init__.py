"""Follow a dim through a program: where is it in each value?

The dim may hold the rows of a batch, or the matrices of a stack. One table says for every primitive where its
results have the dim; whatever the table does not know is "unknown", which is always a safe answer.

place      what is known of one value
moves      the table: primitives that move elements, and those that compute them one by one
products   the table: products, convolutions and decompositions
indexing   the table: slices, gathers and scatters
follow     walks through a jaxpr, its calls, loops and branches
"""

from zerojax.dims.follow import Follower
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, at, stacked

__all__ = ["NOWHERE", "UNKNOWN", "Context", "Follower", "Place", "Places", "State", "at", "stacked"]
