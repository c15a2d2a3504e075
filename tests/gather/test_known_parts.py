"""What a `shard_map` computes from a gathered parameter alone is not stored between the passes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from zerojax.gather import traced_passes


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_parameter_that_a_shard_map_reads_is_not_stored(transposed, check_vma, mesh):
    def local(w, x):
        return x + jnp.tanh(x @ (2 * w.T if transposed else w))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    run = jax.shard_map(local, mesh=mesh, **specs)
    w, x = jnp.ones((64, 64)), jnp.ones((16, 64))
    passes = traced_passes(lambda params, others: [run(*params, *others)], [w], [x], active=[True], trained=[True])
    saved = passes.forward.jaxpr.outvars[passes.results :]
    assert all(v.aval.size <= x.size for v in saved)
    assert passes.needed == {0}
