"""What only one of the views of the loss can run: each says so, and names the other."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Tuning, zero_shard

PARAMS = {"w": jnp.ones((16, 32))}
BATCH = jnp.ones((8, 16))
ROWS = NamedSharding(mesh_of(4), PartitionSpec("data"))


def gradient(loss, view, stage, **options):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=10), view=view)
    return tx.value_and_grad(loss, **options)(tx.shard(PARAMS), BATCH)


def named_axis(params, batch):
    return lax.pmean(jnp.mean(batch @ params["w"]), "data")


def constrained(params, batch):
    return jnp.mean(lax.with_sharding_constraint(batch @ params["w"], ROWS))


def own_shard_map(params, batch):
    product = jax.shard_map(jnp.matmul, mesh=ROWS.mesh, in_specs=(ROWS.spec, PartitionSpec()), out_specs=ROWS.spec)
    return jnp.mean(product(batch, params["w"]))


def resharded(params, batch):
    return jnp.mean(jax.sharding.reshard(batch @ params["w"], ROWS))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("loss", "view", "message"),
    [
        (named_axis, "global", "unbound axis name"),
        (constrained, "device", r'divides rows over a mesh axis.*view="global"'),
        (own_shard_map, "device", "should match the mesh"),
        (resharded, "global", "of type Auto|Auto axes"),
    ],
)
def test_a_loss_for_the_other_view_is_refused(loss, view, message, stage):
    with pytest.raises((NameError, ValueError), match=message):  # most errors are JAX's
        gradient(loss, view, stage)


KEYS = {"typed": jax.random.key(0), "untyped": jax.random.PRNGKey(0)}


def closes_over(key):
    return lambda p, b: jnp.mean(b @ p["w"] * jax.random.uniform(key, (32,)))


def within_a_call(key):
    return lambda p, b: jax.jit(lambda x: x * jax.random.uniform(key))(jnp.mean(b @ p["w"]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [lambda: jax.random.key(0), lambda: jax.random.PRNGKey(jnp.int32(7) + 1)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_key_made_of_a_constant_is_refused_as_a_closed_over_one(make, stage):
    drop = lambda x: jax.random.bernoulli(make(), 0.5, x.shape) * x
    losses = [lambda p, b: jnp.mean(drop(b @ p["w"])), lambda p, b: jnp.mean(jax.checkpoint(drop)(b @ p["w"]))]
    for loss in losses:
        for view, accumulate in (("device", 1), ("global", 2)):
            with pytest.raises(ValueError, match=r"of a constant at test_views.py:\d+, .*a further argument"):
                gradient(loss, view, stage, accumulate=accumulate)
        gradient(loss, "global", stage)


def test_a_key_that_nothing_draws_from_is_let_pass():
    unused = lambda p, b: (jax.random.normal(jax.random.key(0)), jnp.mean(b @ p["w"]))[1]
    gradient(unused, "device", 3)


def folded_by_device(p, b):
    key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
    return jnp.mean(b @ p["w"] * jax.random.uniform(key))


def drawn_into_a_ref(p, b):
    ref = jax.new_ref(b @ p["w"])
    ref[...] *= jax.random.uniform(jax.random.key(0), ref.shape)
    return jnp.mean(ref[...])


@pytest.mark.parametrize("loss", [folded_by_device, drawn_into_a_ref])
def test_a_key_of_a_constant_is_refused_however_it_is_used(loss):
    """One that is folded by device would still be the same in each microbatch."""
    with pytest.raises(ValueError, match="makes a key of a constant"):
        gradient(loss, "device", 3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [closes_over, within_a_call])
@pytest.mark.parametrize(("stage", "kind"), [(1, "typed"), (3, "typed"), (3, "untyped")])
def test_a_closed_over_key_is_refused_where_several_losses_would_draw_the_same(make, stage, kind):
    for view, accumulate in (("device", 1), ("global", 2)):
        with pytest.raises(ValueError, match=r"closes over .*a PRNG key.*as a further argument"):
            gradient(make(KEYS[kind]), view, stage, accumulate=accumulate)
    gradient(make(KEYS[kind]), "global", stage)
