"""A primitive of another library that runs a jaxpr is run as it is, or an error names it and the user's line."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from zerojax import Tuning, zero_shard

PARAMS = {"w": jnp.linspace(-0.3, 0.4, 128).reshape(8, 16), "v": jnp.linspace(0.5, -0.2, 128).reshape(16, 8)}
BATCH = jnp.linspace(-1, 1, 64).reshape(8, 8)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def primitive(name, *, differentiable):
    made = Primitive(name)
    made.multiple_results = True
    run = lambda *args, jaxpr: jaxpr_as_fun(jaxpr)(*args)
    made.def_impl(run)
    made.def_abstract_eval(lambda *avals, jaxpr: list(jaxpr.out_avals))
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    batching.primitive_batchers[made] = lambda args, dims, *, jaxpr: (
        jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))(*args),
        [0] * len(jaxpr.out_avals),
    )
    if differentiable:
        ad.primitive_jvps[made] = lambda primals, tangents, *, jaxpr: jax.jvp(
            jaxpr_as_fun(jaxpr), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
        )
    return made


CALL = primitive("call_of_a_library", differentiable=True)
FORWARD = primitive("forward_of_a_library", differentiable=False)


def loss_with(primitive):
    layer = lambda w, x: jnp.tanh(x @ w)

    def loss(params, batch):
        (hidden,) = primitive.bind(params["w"], batch, jaxpr=jax.make_jaxpr(layer)(params["w"], batch))  # the layer
        return jnp.mean((hidden @ params["v"]) ** 2)

    return loss


def trained(loss, **options):
    tx = zero_shard(optax.sgd(1.0), tuning=Tuning(persist_below=0), **options)
    state, metrics = tx.train_step(loss)(tx.create(PARAMS), BATCH)
    return jax.device_get((tx.unshard(state.params), metrics["loss"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("view", ["global", "device"])
def test_a_primitive_that_nobody_knows_is_differentiated_by_jax(view, stage, kind):
    mesh = mesh_of(4, kind=KINDS[kind])
    params, value = trained(loss_with(CALL), view=view, stage=stage, mesh=mesh)
    expected, grads = jax.value_and_grad(loss_with(CALL))(PARAMS, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for name, x in PARAMS.items():
        # Sums over the rows are added in another order.
        np.testing.assert_allclose(params[name], x - grads[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("view", ["global", "device"])
def test_an_error_names_the_primitive_and_the_line_of_the_loss(view, stage):
    with pytest.raises(NotImplementedError, match="Differentiation rule for 'forward_of_a_library'") as found:
        trained(loss_with(FORWARD), view=view, stage=stage, mesh=mesh_of(4))
    assert "# the layer" in "".join(traceback.format_exception(found.value))
