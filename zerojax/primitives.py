"""The table of facts about JAX's primitives, for example which ones are linear. All analyses of jaxprs read it.

A primitive has one `Kind`, and further facts that cut across the kinds. `jaxprs.facts(eqn)` returns the facts about the
primitive of an equation. The table has the names of all supported versions of JAX. Nothing is assumed about a primitive
that is not in the table. A test compares the table with the primitives that the installed JAX registers. Give each new
primitive a kind, or list it in the test as unknown.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

# The names of zerojax's own primitives.
MAPPED = "zerojax_mapped"  # a call that `comm.mesh.mapped` makes
ROWS = "zerojax_rows"  # `zerojax.rows`
SHARDWISE = "zerojax_shardwise"  # a quantised weight that is computed on shards (`gather.shardwise`)
WIDEN = "zerojax_widen"  # a weight that is computed from its gathered quantised value (`gather.shardwise`)


class Kind(enum.Enum):
    """What a primitive does."""

    ELEMENTWISE = enum.auto()  # computes each element from the elements at the same index, or from scalars
    COUNTERS = enum.auto()  # random numbers, element by element from counters
    IDENTITY = enum.auto()  # result i is operand i; the primitive adds a name, a sharding, a type or an order
    LAYOUT = enum.auto()  # each element of the result is an element of the only operand, at a static index
    JOIN = enum.auto()  # joins, cuts or makes arrays, at static indices
    INDEXING = enum.auto()  # reads or writes at indices that are operands
    SCATTER = enum.auto()
    REDUCTION = enum.auto()
    ALONG = enum.auto()  # sorts or accumulates along one dim
    WINDOW = enum.auto()
    PRODUCT = enum.auto()
    DECOMPOSITION = enum.auto()  # of matrices in the last two dims; the dims before them are a batch
    KEYS = enum.auto()  # makes, divides or uses PRNG keys; the leading dims are a batch
    COLLECTIVE = enum.auto()
    CONTROL = enum.auto()
    CALL = enum.auto()
    REMAT = enum.auto()
    CUSTOM = enum.auto()  # a function with a custom derivative
    SHARD_MAP = enum.auto()
    KERNEL = enum.auto()  # runs a jaxpr that JAX does not lower to XLA's operations
    FOREIGN = enum.auto()  # runs compiled code of others
    CALLBACK = enum.auto()  # computes values on the host
    DEBUG = enum.auto()  # shows values to the user
    REF = enum.auto()  # makes, reads or writes a `jax.Ref`
    UNKNOWN = enum.auto()  # nothing is known except the flags in `_FLAGS`


_NAMES: Mapping[Kind, str] = {
    Kind.ELEMENTWISE: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
        conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
        igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
        mulhi ne neg nextafter not one_minus_square or polygamma polynomial population_count pow real reduce_precision
        regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
        sin sinh sqrt square stop_gradient sub tan tanh xor zeta
    """,
    Kind.COUNTERS: "philox2x32 philox4x32 threefry2x32 threefry4x32",
    Kind.IDENTITY: f"""
        device_put layout_constraint name optimization_barrier pvary reshard sharding_constraint
        with_memory_space_constraint {ROWS}
    """,
    Kind.LAYOUT: "broadcast_in_dim reshape rev slice squeeze transpose",
    Kind.JOIN: "concatenate iota pad split stack tile unstack",
    Kind.INDEXING: "dynamic_slice dynamic_update_slice gather",
    Kind.SCATTER: "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub",
    Kind.REDUCTION: """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """,
    Kind.ALONG: "approx_top_k cumlogsumexp cummax cummin cumprod cumsum sort top_k",
    Kind.WINDOW: """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter
        select_and_scatter_add
    """,
    Kind.PRODUCT: "conv_general_dilated dot_general ragged_dot_general",
    Kind.DECOMPOSITION: """
        cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve tridiagonal
    """,
    Kind.KEYS: """
        random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    """,
    Kind.COLLECTIVE: """
        all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start
        all_to_all all_to_all_done all_to_all_start pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax
        pmin ppermute ppermute_done ppermute_start precv psend psum psum_done psum_invariant psum_invariant_start
        psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax
        unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
    """,
    Kind.CONTROL: "cond scan while",
    Kind.CALL: f"call closed_call eval_jaxpr jit pjit {MAPPED}",
    Kind.REMAT: "checkpoint remat remat2",
    Kind.CUSTOM: "custom_jvp_call custom_vjp_call",
    Kind.SHARD_MAP: "shard_map",
    Kind.KERNEL: "pallas_call",
    Kind.FOREIGN: "ffi_call triton_kernel_call",
    Kind.CALLBACK: "io_callback pure_callback",
    Kind.DEBUG: "debug_callback debug_print",
    Kind.REF: """
        accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get log_extend log_read new_box new_log
        new_ref swap
    """,
    Kind.UNKNOWN: "axis_index bitcast_convert_type fft rng_bit_generator rng_uniform",  # only what `_FLAGS` says
}

# The fields of `Facts` that are true for the named primitives.
_FLAGS: Mapping[str, str] = {
    "linear": f"""
        all_gather all_to_all broadcast_in_dim conj conv_general_dilated convert_element_type copy cumsum div
        dot_general dynamic_slice fft gather imag mul neg ppermute psum psum_invariant pvary real reduce_precision
        reduce_scatter reduce_sum reduce_window_sum reshape rev sharding_constraint slice split squeeze tile transpose
        unstack {ROWS}
    """,
    "zero_at_zero": """
        abs add add_any asin asinh atan atanh bessel_i1e cbrt ceil conj convert_element_type copy erf erf_inv expm1
        floor imag integer_pow log1p max min neg real reduce_precision round sign sin sinh sqrt square stop_gradient sub
        tan tanh
    """,
    "is_view": "name pvary reshape squeeze stop_gradient transpose",
    "rounds": "ceil floor round sign",
    "draws": "philox2x32 philox4x32 random_bits random_gamma rng_bit_generator threefry2x32 threefry4x32",
    "differs_by_device": """
        all_to_all all_to_all_done all_to_all_start axis_index pallas_call ppermute ppermute_done ppermute_start precv
        psend ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start rng_uniform shard_map
        unreduced_reduce_scatter unreduced_reduce_scatter_start
    """,
    "stays_apart": "optimization_barrier rng_uniform",
    "adds_no_zeros": "add broadcast_in_dim convert_element_type div jit mul neg pjit reshape sub transpose",
    "changes_weights": """
        abs add convert_element_type cos div erf exp integer_pow logistic max min mul neg pow rsqrt select_n sign sin
        sqrt square sub tanh
    """,
}

# The operands in which a primitive is linear jointly: `a + b` is linear in the pair (a, b), but not in `a` alone.
_JOINTLY: Mapping[str, slice] = {
    **dict.fromkeys(("add", "add_any", "complex", "dynamic_update_slice", "pad", "sub"), slice(2)),
    **dict.fromkeys(("concatenate", "stack"), slice(None)),
    **dict.fromkeys(("scatter-add", "scatter-sub"), slice(0, 3, 2)),
    "select_n": slice(1, None),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about one primitive. With the defaults, nothing is known."""

    kind: Kind = Kind.UNKNOWN
    linear: bool = False  # in each operand, if the others are constant; `div` is linear only in its first operand
    jointly_linear: slice = dataclasses.field(default_factory=lambda: slice(0))  # see `_JOINTLY`
    zero_at_zero: bool = False  # an elementwise result is zero wherever all operands are zero
    is_view: bool = False  # the result has the operand's elements, and XLA writes no new array
    # how a reduction or scatter combines elements, in any order: "sum", "max", "min", "prod", "and", "or" or "xor"
    reduction: str | None = None
    rounds: bool = False  # floats are rounded to integers
    draws: bool = False  # random numbers are computed
    differs_by_device: bool = False  # equal operands on all devices may have different results
    stays_apart: bool = False  # two equations with the same operands must not become one
    adds_no_zeros: bool = False  # the derivative makes no array of zeros
    changes_weights: bool = False  # models often scale, mask or normalise a weight with it, element by element

    @property
    def elementwise(self) -> bool:
        return self.kind is Kind.ELEMENTWISE

    @property
    def is_combinable(self) -> bool:
        """Return whether each device can reduce a part, so that a collective combines the devices' results."""
        return self.kind is Kind.REDUCTION and self.reduction in ("sum", "max", "min")

    @property
    def is_control(self) -> bool:
        """Return whether the primitive runs a jaxpr, but is not a plain call or a remat."""
        return self.kind in (Kind.CONTROL, Kind.CUSTOM, Kind.SHARD_MAP, Kind.KERNEL)

    @property
    def is_opaque(self) -> bool:
        """Return whether the compiler cannot see what the primitive computes, and so cannot divide the computation."""
        return self.kind in (Kind.KERNEL, Kind.FOREIGN, Kind.CALLBACK)


def _facts_of(name: str, kind: Kind) -> Facts:
    _, _, reduction = name.replace("-", "_").replace("add", "sum").partition("_")
    return Facts(
        kind,
        jointly_linear=_JOINTLY.get(name, slice(0)),
        reduction=reduction if reduction and kind in (Kind.REDUCTION, Kind.SCATTER) else None,
        **{flag: name in names.split() for flag, names in _FLAGS.items()},
    )


TABLE: Mapping[str, Facts] = MappingProxyType(
    {name: _facts_of(name, kind) for kind, names in _NAMES.items() for name in names.split()}
)
NOTHING_KNOWN = Facts()


def named(name: str) -> Facts:
    """Return the facts about the primitive `name`. Nothing is known about the primitives of other libraries."""
    return TABLE.get(name, NOTHING_KNOWN)


def of_kind(*kinds: Kind) -> frozenset[str]:
    return frozenset(name for name, facts in TABLE.items() if facts.kind in kinds)
