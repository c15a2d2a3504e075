"""Generation from sharded parameters: what it draws, and that it gathers a layer at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from gpt import GPT, generator

from zerojax import Precision, Tuning, collectives, zero_shard

MODEL, COUNT = GPT(width=32, layers=3, heads=2), 6
PROMPTS = np.random.default_rng(1).integers(256, size=(8, 5))


@pytest.fixture(scope="module")
def params():
    """Blocks that change the stream so much that what follows is not the last byte again."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), PROMPTS)
    return jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "rows", "options"), [(3, 8, {}), (3, 3, {"view": "device"}), (1, 8, {"precision": Precision.bf16()})]
)
def test_what_is_drawn_with_a_cache_is_what_is_likeliest_without(stage, rows, options, params):
    tx = zero_shard(optax.identity(), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=1), **options)
    stored, prompts = tx.shard(params), PROMPTS[:rows]
    generate = generator(tx, MODEL, COUNT, temperature=0)
    compiled = generate.lower(stored, prompts, jax.random.key(0)).compile()
    drawn = compiled(stored, prompts, jax.random.key(0))
    assert len(np.unique(drawn)) > 3  # or it repeats what it was given
    everything = np.concatenate([prompts, drawn], axis=1)
    compute = tx.config.precision.compute if tx.config.precision else jnp.float32
    narrow = jax.tree.map(lambda x: x.astype(compute), tx.unshard(stored))  # as the generator uses them
    logits = jax.jit(MODEL.apply)(narrow, everything[:, :-1])[:, -COUNT:].astype(jnp.float32)
    lost = logits.max(-1) - jnp.take_along_axis(logits, drawn[..., None], -1)[..., 0]
    assert lost.max() <= 3e-2 * bool(options.get("precision")) * logits.max()  # narrow sums depend on their order
    if stage == 3:
        gathers = collectives(compiled)
        assert {c.kind for c in gathers} == {"all-gather"}
        # Never more than a layer at once; and for every byte all of them, but for one that XLA may keep.
        total, blocks = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, params["params"]["blocks"]))
        layer = blocks // MODEL.layers
        assert max(c.elements for c in gathers) == layer
        assert gathers.moved().elements >= (1 + COUNT) * (total - layer)
