"""torchax: a PyTorch module, its functions called with JAX arrays; `make_train_step` takes any optax transformation."""

import jax
import numpy as np
import optax
import torch
from torchax.interop import jax_view, torch_view
from torchax.train import make_train_step

from zerojax import zero_shard

INNER = optax.adamw(1e-2, eps=1e-4)


def make_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(*layers)


def functional():
    """The module's function of its weights, the weights as JAX arrays, and the loss."""
    model = make_model()
    weights = {name: jax.numpy.asarray(w.detach().numpy()) for name, w in model.named_parameters()}
    model_fn = lambda weights, buffers, args: torch.func.functional_call(model, {**weights, **buffers}, args)
    return model_fn, weights, torch.nn.functional.cross_entropy


def batches():
    draw = np.random.default_rng(1)
    for _ in range(3):
        yield draw.normal(size=(16, 12)).astype(np.float32), draw.integers(0, 10, 16)


def plain():
    model_fn, weights, loss_fn = functional()
    tx = INNER
    step = jax.jit(jax_view(make_train_step(model_fn, loss_fn, tx)))
    opt_state, losses = tx.init(weights), []
    for x, y in batches():
        loss, weights, opt_state = step(weights, {}, opt_state, (x,), y)
        losses.append(loss)
    return losses, weights


def of_model(loss, label):
    """The model's function has computed it."""
    return loss


def zero(stage, mesh=None):
    model_fn, weights, loss_fn = functional()
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=20)
    weights = tx.shard(weights)
    loss = jax_view(lambda weights, batch: loss_fn(model_fn(weights, {}, batch[:1]), batch[1]))
    of_shards = torch_view(tx.eval_step(loss))
    step = jax.jit(jax_view(make_train_step(lambda weights, buffers, batch: of_shards(weights, batch), of_model, tx)))
    opt_state, losses = tx.init(weights), []
    for x, y in batches():
        loss, weights, opt_state = step(weights, {}, opt_state, (x, y), y)
        losses.append(loss)
    return losses, tx.unshard(weights)
