"""What the programs of a page take for given, and what is asked of them afterwards.

A page whose programs are whole has nothing here.
"""

LOOP = """
import jax, jax.numpy as jnp, numpy as np, optax
import zerojax
from zerojax import zero_shard


def init(key):
    a, b = jax.random.split(key)
    return {"w": jax.random.normal(a, (32, 512)) / 6, "v": jax.random.normal(b, (512, 1)) / 23}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        x = draw.normal(size=(64, 32)).astype("float32")
        yield x, np.sin(x[:, :1])


key = jax.random.key(0)
params, batch = init(key), next(batches())
"""

STEP = """
tx = zero_shard(optax.adamw(3e-3), stage=3)
state, step = tx.create(params), tx.train_step(loss_fn)
"""

GIVEN = {
    "index.md": LOOP,
    "compare.md": LOOP + STEP,
    "checkpoint.md": LOOP
    + STEP
    + """
class Loader:
    position = 0

    def __next__(self):
        self.position += 1
        return batch

    def get_state(self):
        return self.position

    def set_state(self, position):
        self.position = position


batches, steps = Loader(), 3
evaluate, held_out = tx.eval_step(loss_fn), batch


class model:  # of published weights
    def init(key, tokens):
        shapes = {"query": (2, 8, 2, 4), "up": (2, 8, 16)}
        layers = {name: {"kernel": jnp.zeros(shape)} for name, shape in shapes.items()}
        return {"params": {"embed": {"embedding": jnp.zeros((24, 8))}, "layers": layers,
                           "head": {"kernel": jnp.zeros((8, 24))}}}


from pathlib import Path
from safetensors.numpy import save_file

tokens = jnp.zeros((1, 4), jnp.int32)
shapes = {"model.embed_tokens.weight": (24, 8), "lm_head.weight": (24, 8)}
for i in range(2):
    of_layer = {"self_attn.q_proj.weight": (8, 8), "mlp.up_proj.weight": (16, 8), "self_attn.rotary_emb.inv_freq": (4,)}
    shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
draw = np.random.default_rng(0)
saved = {name: draw.normal(size=shape).astype("float32") for name, shape in shapes.items()}
Path("Llama-3.2-1B").mkdir()
save_file(saved, "Llama-3.2-1B/model.safetensors")
""",
    "log.md": LOOP,
    "long_context.md": """
import jax, jax.numpy as jnp, optax

hidden_states = lambda params, tokens: params["embed"][tokens]
""",
    "muon.md": """
import jax, jax.numpy as jnp, optax, zerojax
from gpt import GPT
from zerojax import zero_shard

shapes = jax.eval_shape(GPT(32, 2, 2).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
state = zero_shard(optax.contrib.muon(2e-2), stage=3).create({"w": jnp.ones((64, 256))})
""",
    "offload.md": """
import jax, jax.numpy as jnp, optax, zerojax
from jax.ad_checkpoint import checkpoint_name


def layer(w, x):
    return jnp.tanh(checkpoint_name(x, "layer_input") @ w)
""",
    "plan.md": LOOP
    + STEP
    + """
batch = {"tokens": batch[0]}
loss = lambda params, batch: jnp.mean((jnp.tanh(batch["tokens"] @ params["w"]) @ params["v"]) ** 2)
loss_with_remat, step = loss, tx.train_step(loss)
shapes = params
""",
    "stage3.md": LOOP + STEP,
    "troubleshooting.md": LOOP + STEP,
    "wire.md": """
import jax, optax

mesh = jax.make_mesh((2, 4), ("host", "gpu"))
""",
}

AFTERWARDS = {
    "checkpoint.md": """
from safetensors.numpy import load_file

back = load_file("tuned/model.safetensors")
assert set(back) == {name for name in saved if "inv_freq" not in name}
for name, x in back.items():
    np.testing.assert_allclose(np.float32(x), saved[name], rtol=1e-2)
""",
    "long_context.md": """
given = {"embed": jnp.ones((16, 8)), "head": jnp.ones((8, 16))}
assert jnp.isfinite(jax.grad(loss)(given, jnp.zeros((2, 65), jnp.int32), jnp.ones((2, 64)))["head"]).all()
""",
    "muon.md": "tx.create(shapes)",
    "offload.md": "assert jnp.isfinite(jax.grad(lambda w: layer(w, jnp.ones((4, 8))).sum())(jnp.ones((8, 8)))).all()",
    "stage3.md": 'assert product["w"].shape == params["w"].shape',
    "wire.md": "assert tx.config.wire.reduce == 'int4'",
}
