"""Say how many FLOPs an equation takes, for products, decompositions, and what takes none."""

import math
from collections.abc import Mapping
from typing import Any

from zerojax import compat, jaxprs
from zerojax.primitives import Kind

# A decomposition of an (m, n) matrix with m >= n takes this factor times m * n^2 FLOPs.
# Source: Golub and Van Loan 2013, sections 4.2 to 8.6.
DECOMPOSITION_FLOPS: Mapping[str, float] = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqrf": 2.0,
    "householder_product": 2.0,
    "lu": 1.0,
    "qr": 4.0,
    "schur": 25.0,
    "svd": 14.0,
    "triangular_solve": 1.0,
    "tridiagonal": 4 / 3,
}

# What costs no FLOPs: elements are moved or renamed.
_FREE_KINDS = frozenset({Kind.IDENTITY, Kind.LAYOUT, Kind.JOIN, Kind.INDEXING})
_FREE = frozenset(
    "bitcast_convert_type convert_element_type copy random_clone random_seed random_unwrap random_wrap "
    "stop_gradient".split()
)


def dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)


def is_free(eqn: Any) -> bool:
    """Return whether an equation costs no FLOPs, because it only moves or renames elements."""
    return jaxprs.facts(eqn).kind in _FREE_KINDS or compat.name_of(eqn) in _FREE
