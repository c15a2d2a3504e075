"""Idioms of Flax NNX's guides, written once for plain NNX and for zerojax, as in `guides`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from guides import adam, batches, idiom


class Net(nnx.Module):
    """One weight is padded in storage, one is sharded evenly, biases are persistent."""

    def __init__(self, rngs, first=nnx.Linear, **options):
        self.first = first(12, 30, rngs=rngs, **options)
        self.second = nnx.Linear(30, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def error(model, batch):
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def fit(way, model, loss=error, tx=None, wrt=nnx.Param, steps=3, **options):
    """Train a module in place; return the losses and the transformation."""
    tx = way.optimizer(tx or adam())
    way.shard_module(model, tx, wrt=wrt)
    optimizer, losses = nnx.Optimizer(model, tx, wrt=wrt), []

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = way.module_grad(tx, loss, argnums=nnx.DiffState(0, wrt), **options)(model, batch)
        optimizer.update(model, grads)
        return value

    for batch in batches(steps):
        losses.append(step(model, optimizer, batch))
    return losses, tx


def state_of(way, tx, model, *filters):
    """Return the values of a module's variables, logical."""
    return way.unshard(tx, nnx.to_pure_dict(nnx.state(model, *(filters or (nnx.Param,)))))


@idiom
def sown_penalties(way):
    """Layers sow penalties, which the loss takes out of the module again."""

    class Sowing(Net):
        def __call__(self, x):
            h = nnx.tanh(self.first(x))
            self.sow(nnx.Intermediate, "penalty", jnp.mean(h**2))
            return self.second(h)

    def loss(model, batch):
        y = model(batch[0])
        sown = nnx.pop(model, nnx.Intermediate)
        return jnp.mean((y - batch[1]) ** 2) + 0.1 * sum(jax.tree.leaves(sown))

    model = Sowing(nnx.Rngs(0))
    losses, tx = fit(way, model, loss)
    return losses, state_of(way, tx, model)


@idiom
def views_for_evaluation(way):
    """A view of a trained module evaluates: running averages, no dropout; the module itself stays as it is."""

    class Regular(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm, self.drop = nnx.BatchNorm(30, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.second(self.drop(nnx.tanh(self.norm(self.first(x)))))

    model = Regular(nnx.Rngs(0, dropout=1))
    losses, tx = fit(way, model)
    graph, params, rest = nnx.split(nnx.view(model, deterministic=True, use_running_average=True), nnx.Param, ...)
    evaluate = way.evaluate(tx, lambda params, batch, rest: error(nnx.merge(graph, params, rest), batch))
    evaluated = evaluate(params, batches(1)[0], rest)
    more, tx = fit(way, model, tx=optax.sgd(0.1))
    return losses, evaluated, more, state_of(way, tx, model), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))


@idiom
def repeated_layer(way):
    """A layer is applied in `nnx.fori_loop`."""

    class Repeated(Net):
        def __call__(self, x):
            h = nnx.tanh(self.first(x))
            again = lambda _, carry: (carry[0], nnx.tanh(self.first(carry[1][:, :12])) + carry[1])
            _, h = nnx.fori_loop(0, 3, again, (self.first, h))
            return self.second(h)

    model = Repeated(nnx.Rngs(0))
    losses, tx = fit(way, model)
    return losses, state_of(way, tx, model)


@idiom
def gradients_of_activations(way):
    """Perturbations, zeros that are added to activations, have their gradients: one per row."""

    class Perturbed(Net):
        def __call__(self, x):
            return self.second(nnx.tanh(self.perturb("hidden", self.first(x))))

    def loss(model, batch):
        _, zeros = nnx.capture(error, nnx.Perturbation)(model, batch)
        parts = nnx.split(model)
        of = lambda zeros: nnx.capture(error, init=zeros)(nnx.merge(*parts), batch)
        value, slopes = jax.value_and_grad(of)(zeros)
        return value + 10 * jnp.mean(slopes["hidden"][...] ** 2), nnx.to_pure_dict(slopes)

    model = Perturbed(nnx.Rngs(0))
    values, tx = fit(way, model, loss, has_aux=True)
    return values, state_of(way, tx, model)
