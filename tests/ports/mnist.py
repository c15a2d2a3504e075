"""As flax's mnist: an NNX CNN with batch norm and dropout, `nnx.Optimizer` and `nnx.MultiMetric`."""

import numpy as np
import optax
from flax import nnx

import zerojax.flax_nnx
from zerojax import Tuning, zero_shard


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)  # else Adam steps along its rounding errors
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3)
        self.hidden = nnx.Linear(16 * 16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.avg_pool(nnx.relu(self.drop(self.norm(self.conv(x)), rngs=rngs)), (2, 2), (2, 2))
        return self.out(self.drop(nnx.relu(self.hidden(x.reshape(len(x), -1))), rngs=rngs))


def loss_fn(model, rngs, batch):
    logits = model(batch["image"], rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield {"image": draw.normal(size=(16, 8, 8, 1)).astype(np.float32), "label": draw.integers(0, 10, 16)}


def plain():
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, rngs, batch):
        loss, logits = loss_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    history = []
    for batch in batches():
        model.train()
        train_step(model, optimizer, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
        model.eval()
        eval_step(model, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
    return history


def zero(stage, mesh=None):
    model, rngs = CNN(nnx.Rngs(0)), nnx.Rngs(1)
    tx = zero_shard(optax.adamw(0.005, 0.9), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    zerojax.flax_nnx.shard_module(model, tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def train_step(model, optimizer, metrics, rngs, batch):
        grad_fn = zerojax.flax_nnx.value_and_grad(tx, loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, rngs, batch):
        loss, logits = loss_fn(model, rngs, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    history = []
    for batch in batches():
        model.train()
        train_step(model, optimizer, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
        model.eval()
        eval_step(model, metrics, rngs, batch)
        history.append(metrics.compute())
        metrics.reset()
    return history
