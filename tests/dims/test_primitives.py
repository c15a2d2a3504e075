"""The table of primitives knows every primitive that the installed JAX registers, and nothing under a wrong name."""

import contextlib
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax import primitives
from zerojax.budget import graph
from zerojax.optim import owned
from zerojax.primitives import Kind

# Scripts, and what needs another package.
LEFT_OUT = ("collect_profile", "__main__", "jax2tf", "flatbuffers", "tools.", "colab")
# Modules whose primitives only occur inside of kernels, or in programs of `jax.experimental.thunky`.
OF_KERNELS = ("jax._src.pallas.", "jax._src.thunky", "jax.experimental.thunky", "jax.experimental.mosaic.")
CALLS_OF_KERNELS = ("jax._src.pallas.core", "jax._src.pallas.mpmd", "jax._src.pallas.pallas_call")
# Primitives about which nothing is assumed.
UNKNOWN = """
    after_all assert_consumed_value broadcast_to buffer_callback call_exported
    call_hi_primitive call_hi_primitive_linearized check cholesky_update composite compute_on consume core_map
    create_linear create_token cudnn_fusion custom_jvp_call_jaxpr custom_lin custom_linear_solve
    custom_partitioning custom_vmap_call dce_sink dim_as_value dimension_size empty empty2 from_edtype
    fused_call geqp3 global_array_to_host_local_array hessenberg host_local_array_to_global_array inspect_sharding
    iota_2x32_shape linear_call lu_pivots_to_permutation mpmd_map ormqr pin platform_index preduced program_order
    reduced_vary_cast reduced_vary_cast_p relayout remat_opt rnn_bwd rnn_fwd
    run_state scaled_dot scaled_matmul scaled_matmul_wrapper shape_assertion shard_alike spsolve stage
    symmetric_product tie to_edtype tpu_custom_call tridiagonal_solve unpin unreachable vary_unreduced_cast
    vary_unreduced_cast_p xla_metadata_call xla_metadata_value zerojax_shardwise zerojax_widen zeros_like

    dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fwd dot_product_attention_fwd_wrapper

    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general
    bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
    coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm
    csr_spmv csr_todense todense
"""


def registered() -> set[str]:
    """Return the names of all primitives in JAX's modules and in its tables of lowerings, but for those of kernels."""
    for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
        if not any(word in module.name for word in LEFT_OUT):
            with contextlib.suppress(Exception):  # of modules that need a package or a device which is not here
                importlib.import_module(module.name)
    inside, found = set(), set()
    for name, module in list(sys.modules.items()):
        of_kernels = name.startswith(OF_KERNELS) and name not in CALLS_OF_KERNELS
        if name.split(".")[0] == "jax" and module is not None:
            (inside if of_kernels else found).update(x for x in vars(module).values() if isinstance(x, Primitive))
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    found |= {primitive for table in tables for primitive in table} - inside
    return {primitive.name for primitive in found}


def test_every_primitive_of_jax_is_known():
    """In a process of its own, because other libraries that tests import register primitives, too."""
    command = [sys.executable, "-c", "import test_primitives; print(*test_primitives.registered())"]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, check=True, capture_output=True, text=True)
    unknown = sorted({*done.stdout.split()} - primitives.TABLE.keys() - {*UNKNOWN.split()})
    assert len(done.stdout.split()) > 200
    assert not unknown, f"decide: a kind in zerojax/primitives.py, or UNKNOWN in this test: {', '.join(unknown)}"


def test_each_primitive_has_one_kind():
    names = [name for kind in (*primitives._NAMES.values(), UNKNOWN) for name in kind.split()]
    assert len(names) == len(set(names))


def test_every_fact_is_about_a_known_primitive():
    facts = [*primitives._FLAGS.values(), *primitives._JOINTLY, *owned.DECOMPOSITION_FLOPS, *graph._FREE]
    assert {name for names in facts for name in names.split()} <= primitives.TABLE.keys()
    assert primitives.of_kind(Kind.DECOMPOSITION) == owned.DECOMPOSITION_FLOPS.keys()


def test_nothing_is_known_of_other_primitives():
    assert primitives.named("no_primitive_of_jax") == primitives.Facts(Kind.UNKNOWN)


X = jnp.linspace(-0.9, 0.8, 7)


def test_facts_about_functions_of_one_array_are_those_of_their_values():
    found = 0
    for name in sorted(primitives.of_kind(Kind.ELEMENTWISE) - {"stop_gradient"}):
        facts, fn = primitives.named(name), getattr(jax.lax, name, None)
        try:
            value = fn(X)
        except (TypeError, ValueError):  # a function of several arrays, or of integers
            continue
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        found += 1
        np.testing.assert_array_equal(fn(X[::-1]), value[::-1], name)
        assert facts.zero_at_zero == (float(jnp.abs(fn(0 * X)).max()) == 0), name
        assert facts.linear == np.allclose(fn(2 * X + 1), 2 * value + fn(jnp.ones(7))), name
        assert facts.rounds == np.array_equal(value, jnp.round(value)), name
    assert found > 30
