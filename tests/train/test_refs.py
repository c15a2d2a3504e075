"""A `jax.Ref` in a loss: its own one works, one that it closes over in global view; others are refused by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import Tuning, zero_shard

PARAMS = {"w": jnp.linspace(-1, 1, 16 * 24).reshape(16, 24), "v": jnp.ones((24, 16))}
BATCH = jnp.linspace(0, 1, 16 * 16).reshape(16, 16)


def on_mesh(x):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return jax.new_ref(jax.device_put(x, NamedSharding(mesh, PartitionSpec())))


def plumbed(new_ref):
    """Count calls of a layer, and note what the last one computed: the guide's plumbing refs."""
    count, means = new_ref(jnp.zeros(())), new_ref(jnp.zeros(3))

    def layer(params, x, i):
        x = jnp.tanh(x @ params["w"] @ params["v"] / 8)
        count[...] += 1
        means[i] = jax.lax.stop_gradient(jnp.mean(x))
        return x

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, i: (layer(params, x, i), None), batch, jnp.arange(3))
        return jnp.mean((x @ params["w"]) ** 2)

    return loss, (count, means)


def stashed(new_ref):
    """Note the cotangent of an activation: the guide's stashed gradients, with a ref that the rule closes over."""
    ref = new_ref(jnp.zeros((16, 24)))

    @jax.custom_vjp
    def stash(x):
        return x

    def backward(_, cotangent):
        ref[...] = cotangent
        return (cotangent,)

    stash.defvjp(lambda x: (x, None), backward)
    return lambda params, batch: jnp.mean((jnp.tanh(stash(batch @ params["w"])) @ params["v"]) ** 2), (ref,)


def stashed_in_an_argument(new_ref):
    """Note a cotangent in a ref that the forward pass hands to the backward pass."""
    ref = new_ref(jnp.zeros((16, 24)))

    @jax.custom_vjp
    def stash(ref, x):
        return x

    def backward(ref, cotangent):
        ref[...] = cotangent
        return None, cotangent

    stash.defvjp(lambda ref, x: (x, ref), backward)
    return lambda params, batch: jnp.mean(stash(ref, batch @ params["w"]) ** 2), (ref,)


def used_under_remat(new_ref):
    """Read and count in a remat, which both passes run."""
    ref = new_ref(jnp.full((), 2.0))

    @jax.checkpoint
    def layer(params, x):
        out = jnp.tanh(ref[...] * (x @ params["w"]))
        ref[...] += 1
        return out

    return lambda params, batch: jnp.mean(layer(params, batch) ** 2), (ref,)


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.parametrize("make", [plumbed, stashed, stashed_in_an_argument, used_under_remat])
def test_refs_on_the_mesh_hold_what_plain_jax_writes(make, stage):
    loss, refs = make(jax.new_ref)
    wanted = jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)
    same, placed = make(on_mesh)
    tx = zero_shard(optax.sgd(1.0), stage=stage, tuning=Tuning(persist_below=10))
    found, grads = tx.value_and_grad(same)(tx.shard(PARAMS), BATCH)
    have = [found, grads, *(ref[...] for ref in placed)]
    want = [*wanted, *(ref[...] for ref in refs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), have, want)


@pytest.mark.parametrize(
    ("make", "new_ref", "view"),
    [
        (plumbed, on_mesh, "device"),
        (stashed, on_mesh, "device"),
        (plumbed, jax.new_ref, "global"),
    ],
)
def test_refs_that_cannot_be_used_are_refused(make, new_ref, view):
    """By JAX, whose messages docs/troubleshooting.md lists."""
    words = "Ref|mutable array reference|JaxprInputEffect|incompatible devices"
    for stage in (1, 3):
        tx = zero_shard(optax.sgd(1.0), stage=stage, view=view, tuning=Tuning(persist_below=10))
        with pytest.raises((AttributeError, NotImplementedError, TypeError, ValueError), match=words):
            tx.value_and_grad(make(new_ref)[0])(tx.shard(PARAMS), BATCH)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="hijax defines its primitives in another way")
@pytest.mark.parametrize("view", ["global", "device"])
def test_values_of_a_type_of_the_users_own(view):
    from hijax_types import loss

    wanted = jax.jit(jax.grad(loss))(PARAMS, BATCH)
    for stage in (1, 3):
        tx = zero_shard(optax.sgd(1.0), stage=stage, view=view, tuning=Tuning(persist_below=10))
        params, gradient = tx.shard(PARAMS), tx.value_and_grad(loss)
        if stage == 3:
            with pytest.raises(TypeError, match=r"value of type Quantised.* at hijax_types\.py:\d+.*use stage 2"):
                gradient(params, BATCH)
        else:
            same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
            jax.tree.map(same, gradient(params, BATCH)[1], wanted)


@pytest.mark.parametrize(("view", "stage"), [("device", 3), pytest.param("global", 1, marks=pytest.mark.slow)])
def test_a_ref_that_the_loss_makes_itself(view, stage):
    def loss(params, batch):
        ref = jax.new_ref(params["w"])
        ref[0] = 2 * ref[0]
        return jnp.mean(jnp.tanh(batch @ jax.freeze(ref)))

    params = {"w": PARAMS["w"]}
    wanted = jax.jit(jax.grad(loss))(params, BATCH)
    tx = zero_shard(optax.sgd(1.0), stage=stage, view=view, tuning=Tuning(persist_below=10))
    grads = tx.unshard(tx.value_and_grad(loss)(tx.shard(params), BATCH)[1])
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=1e-4, atol=1e-7)
