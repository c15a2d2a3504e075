"""flowjax: `fit_to_data` trains a masked autoregressive flow, an Equinox module with leaves that are not trained."""

import equinox as eqx
import jax
import numpy as np
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data
from flowjax.train.losses import MaximumLikelihoodLoss

from zerojax import Tuning, zero_shard

INNER = optax.adam(5e-3)


def make_flow():
    base = Normal(np.zeros(4, np.float32))
    return masked_autoregressive_flow(jax.random.key(0), base_dist=base, flow_layers=2, nn_width=24)


def samples():
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    return np.concatenate([x[:, :2], x[:, 2:] + np.sin(2 * x[:, :2])], axis=1)


def arrays_of(flow):
    return jax.tree.leaves(eqx.filter(flow, eqx.is_inexact_array))


def plain():
    flow = make_flow()
    options = {"batch_size": 16, "max_epochs": 2, "val_prop": 0.2, "show_progress": False}
    flow, losses = fit_to_data(jax.random.key(1), flow, samples(), optimizer=INNER, **options)
    return losses, arrays_of(flow)


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    flow = make_flow()
    is_fixed = lambda leaf: isinstance(leaf, paramax.NonTrainable)
    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=is_fixed)
    flow = eqx.combine(tx.shard(params), static)

    def loss_fn(params, static, x, key):
        of_params = lambda params, x: MaximumLikelihoodLoss()(params, static, x)
        return tx.eval_step(of_params)(params, x)

    options = {"batch_size": 16, "max_epochs": 2, "val_prop": 0.2, "show_progress": False}
    flow, losses = fit_to_data(jax.random.key(1), flow, samples(), loss_fn=loss_fn, optimizer=tx, **options)
    return losses, arrays_of(flow)
