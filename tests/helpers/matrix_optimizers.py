"""Optimizers that see matrices whole, as users write them: Shampoo and SOAP, which optax does not have, in short."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers


def matrices(params):
    """Muon's dimension numbers with an array of three dims as a stack of matrices."""
    numbers = {2: MuonDimensionNumbers(0, 1), 3: MuonDimensionNumbers(1, 2)}
    return jax.tree.map(lambda x: numbers.get(x.ndim), params)


def muon(rate=1e-2, **options):
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=matrices, **options)


class ShampooState(NamedTuple):
    """Gram matrices of the gradients, a pair where a parameter is a matrix."""

    grams: Any


def _is_matrix(x):
    return x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)


def _root(gram):
    """The inverse fourth root."""
    values, vectors = jnp.linalg.eigh(gram)
    return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T


def shampoo(rate):
    """Gupta et al. 2018, arXiv 1802.09568, algorithm 1; what is no matrix is left to SGD."""

    def init(params):
        grams = lambda x: tuple(0.1 * jnp.eye(n) for n in x.shape) if _is_matrix(x) else ()
        return ShampooState(jax.tree.map(grams, params))

    def update(grads, state, params=None):
        leaves, tree = jax.tree.flatten(grads)
        out, kept = [], []
        for g, pair in zip(leaves, tree.flatten_up_to(state.grams), strict=True):
            if pair:
                left, right = pair[0] + g @ g.T, pair[1] + g.T @ g
                out.append(-rate * _root(left) @ g @ _root(right))
                kept.append((left, right))
            else:
                out.append(-rate * g)
                kept.append(())
        return tree.unflatten(out), ShampooState(tree.unflatten(kept))

    return optax.GradientTransformation(init, update)


def _distinct(n):
    """A Gram matrix to begin with whose eigenvectors do not depend on rounding."""
    return jnp.diag(1 + jnp.arange(n, dtype=jnp.float32))


class SoapState(NamedTuple):
    """Moments in the basis of Shampoo's preconditioner, which is computed anew every other step."""

    count: Any
    mu: Any
    nu: Any
    grams: Any
    bases: Any


def soap(rate, every=2):
    """Vyas et al. 2024, arXiv 2409.11321, algorithm 3; what is no matrix has no basis, which makes it Adam."""

    def init(params):
        squares = lambda make: jax.tree.map(lambda x: tuple(make(n) for n in x.shape) if _is_matrix(x) else (), params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SoapState(jnp.zeros((), jnp.int32), zeros, zeros, squares(_distinct), squares(jnp.eye))

    def rotated(x, basis, back=False):
        if not basis:
            return x
        left, right = basis
        return left @ x @ right.T if back else left.T @ x @ right

    def update(grads, state, params=None):
        count = state.count + 1
        leaves, tree = jax.tree.flatten(grads)
        columns = [tree.flatten_up_to(part) for part in state[1:]]
        out, kept = [], []
        for g, mu, nu, gram, basis in zip(leaves, *columns, strict=True):
            if basis:
                gram = (0.9 * gram[0] + 0.1 * g @ g.T, 0.9 * gram[1] + 0.1 * g.T @ g)
                fresh = lambda gram=gram: tuple(jnp.linalg.eigh(x)[1] for x in gram)
                basis = jax.lax.cond(count % every == 1, fresh, lambda basis=basis: basis)
            mu = 0.9 * mu + 0.1 * g
            turned = rotated(g, basis)
            nu = 0.95 * nu + 0.05 * turned**2
            step = rotated(rotated(mu, basis) / (jnp.sqrt(nu) + 0.1), basis, back=True)
            out.append(-rate * step)
            kept.append((mu, nu, gram, basis))
        return tree.unflatten(out), SoapState(count, *(tree.unflatten(x) for x in zip(*kept, strict=True)))

    return optax.GradientTransformation(init, update)
