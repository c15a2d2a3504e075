"""Small functions of parameters and rows: constructs around a parameter beside those of `test_random_programs.py`.

Each takes `({"w": (8, 8), "v": (8, 8), "stack": (3, 8, 8), "table": (11, 8), "b": (8,)}, x)` with `x` of
shape `(rows, 8)` and gives a scalar.
"""

import jax
import jax.numpy as jnp
from jax import lax

DIMS = {"w": 0, "v": 1, "stack": 1, "table": 0, "b": -1}
THIRDS = jnp.array([1.0, 2.0, 3.0]) / 3


def make_params(key=0):
    keys = jax.random.split(jax.random.key(key), 5)
    shapes = {"w": (8, 8), "v": (8, 8), "stack": (3, 8, 8), "table": (11, 8), "b": (8,)}
    return {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def mean(x):
    return jnp.mean(x**2)


def plain(p, x):
    return mean(jnp.tanh(x @ p["w"]) @ p["v"].T + p["b"])


def remat(p, x):
    @jax.checkpoint
    def layer(w, v, x):
        return jnp.tanh(x @ w) @ v + x @ w

    return mean(layer(p["v"], p["w"], layer(p["w"], p["v"], x)))


def scan_everything(p, x):
    def layer(carry, xs):
        x, count = carry
        w, index, bias = xs
        x = jnp.tanh(x @ w @ p["v"]) + bias + index.astype(x.dtype) * p["b"]
        return (x, count + 1), (x[:, 0], index)

    biases = jnp.ones((3, 8)) * p["b"]
    (x, count), (ys, ids) = lax.scan(layer, (x, 0), (p["stack"], jnp.arange(3), biases), reverse=True)
    return mean(x) + mean(ys) + mean(ys[0]) + count + jnp.sum(ids.astype(x.dtype) * THIRDS)


def scan_same_stack_twice(p, x):
    def layer(x, ws):
        return jnp.tanh(x @ ws[0]) @ ws[1].T, None

    return mean(lax.scan(layer, x, (p["stack"], p["stack"]))[0])


def scan_of_groups(p, x):
    def outer(x, group):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, group)[0], None

    groups = jnp.stack([p["stack"], p["stack"] * 2])
    direct = p["stack"].reshape(3, 1, 8, 8)
    return mean(lax.scan(outer, x, groups)[0]) + mean(lax.scan(outer, x, direct)[0])


def indexed(p, x):
    """Loops that index the stack, which is gathered before them: a scan under remat in reverse, and past its end."""

    @jax.checkpoint
    def layer(x, i):
        return jnp.tanh(x @ p["stack"][i]) + x @ lax.dynamic_index_in_dim(p["stack"], i, keepdims=False), None

    x, _ = lax.scan(layer, x, jnp.arange(3), reverse=True)
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["stack"][-1 - i]), x)
    x = lax.fori_loop(1, 4, lambda i, x: jnp.tanh(x @ p["stack"][i]), x)
    return mean(lax.fori_loop(0, 2, lambda i, x: x @ p["stack"][i], x))


def cast_and_scaled_layers(p, x):
    """Stacks that are scanned over after something is done to each layer, or to several at once."""

    def layer(x, ws):
        return jnp.tanh(x @ ws[0] + x @ ws[1][0].astype(x.dtype)) @ ws[2], None

    stack = p["stack"]
    narrow = jnp.swapaxes(jnp.sin(2 * stack), 1, 2).reshape(3, 1, 8, 8).astype(jnp.bfloat16)
    x, _ = lax.scan(layer, x, (jnp.tanh(stack) + stack, narrow, jnp.flip(stack, 0)))
    scaled = stack / 2
    return mean(lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ scaled[i]), x)) + mean(scaled)


def masked_layers(p, x):
    """Stacks that are changed before the loop by something else than parameters: per layer, per unit, and at random."""
    stack, keep = p["stack"], jax.random.bernoulli(jax.random.key(7), 0.7, p["stack"].shape)
    gained = jnp.where(keep, stack, 0) * (1 + THIRDS)[:, None, None] / x.std() + jnp.zeros((8, 1)) + p["b"]
    x, ys = lax.scan(lambda x, w: (jnp.tanh(x @ w), mean(w)), x, gained)
    halved = stack * jnp.full_like(stack, 0.5) + jnp.full((1, 8, 1), 0.1)
    return mean(lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ halved[i]), x)) + mean(ys)


def microbatches(p, x):
    """Loops whose iterations do not depend on one another, over a stack and others, and parameters around them."""

    def micro(carry, rows):
        count, total = carry
        y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), rows @ p["w"], p["stack"])
        return (count + 1, total + mean(y @ p["v"] + p["b"])), y.sum()

    (count, total), sums = lax.scan(micro, (0, 0.0), jnp.stack([x, 2 * x]))
    of_layers = lambda rows: lax.scan(lambda y, w: (jnp.sin(y @ w), None), rows, p["stack"][1:])[0] @ p["v"] + p["b"]
    return total / count + mean(sums) / 64 + mean(lax.map(of_layers, jnp.stack([x, 2 * x]))) + mean(p["w"])


def layers_in_another_order(p, x):
    """Stacks that are read from behind, in strides, in groups, along another axis, and made of single layers."""
    stack = p["stack"]
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    x = lax.fori_loop(0, 3, lambda i, x: layer(x, stack[2 - i] + x[0, 0] * jnp.flip(stack, 0)[i])[0], x)
    x = lax.fori_loop(0, 2, lambda i, x: layer(x, (2 * stack)[2 * i])[0], x)
    x, _ = lax.scan(lambda x, i: layer(x, stack[i]), x, jnp.arange(3)[::-1])
    x, _ = lax.scan(layer, x, jnp.stack([p["w"], jnp.sin(x[0, 0]) * p["w"], p["v"]]))
    x, _ = lax.scan(lambda x, w: (x + layer(x, w)[0], None), x, 0.1 * jnp.stack([p["w"], p["w"]] * 9))
    x, _ = lax.scan(lambda x, group: lax.scan(layer, x, group), x, (stack / 2).reshape(3, 1, 8, 8))
    row = lambda x, w: (x + jnp.sin(x * w) / 4, None)
    x, _ = lax.scan(lambda x, rows: lax.scan(row, x, rows), x, p["v"].reshape(2, 4, 8))
    return 100 * mean(lax.scan(lambda x, ws: row(x, ws[0] * ws[1]), x, (p["v"].T, p["w"].T))[0])


def changed_weights(p, x):
    """Weights that are masked, normed, noisy, of a hypernetwork, and gained; some are read twice, or under remat."""
    keep, noise = jax.random.split(jax.random.key(3))
    w = jnp.where(jax.random.bernoulli(keep, 0.6, p["w"].shape), p["w"], 0)
    v = p["v"] / jnp.linalg.norm(p["v"], axis=0) * (1 + p["b"])
    made = jnp.outer(jnp.tanh(x.mean(0) @ p["w"]), p["b"]) + p["v"]
    noisy = p["w"] + 0.1 * jax.random.normal(noise, p["w"].shape)
    x = jnp.tanh(x @ w) @ v + jnp.sin(x @ made) @ w.T
    x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, p["w"] * x.std() + noisy)
    return mean(x @ (noisy * (1 + THIRDS[0])).T) + mean(p["w"] * x[:1] + p["v"])


def product_in_many_places(p, x):
    """Products of weights that several segments need: a polynomial of one, its transpose, and a loop's constant."""
    w = p["w"] / jnp.linalg.norm(p["w"])
    for _ in range(3):
        w = 1.5 * w - 0.5 * w @ w.T @ w
    merged = (p["v"] + p["w"] @ p["v"]) / 3
    for i in range(3):
        x = jnp.tanh(x @ w + p["b"][i]) @ merged
    x, _ = lax.scan(lambda x, scale: (jnp.tanh(x @ merged) * scale, None), x, 1 + THIRDS)
    return mean(x @ w.T) + mean(merged) + mean(jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, merged))


@jax.custom_vjp
def _flash(w, x):
    return jnp.sin(x @ w)


def _flash_forward(w, x):
    return jnp.sin(x @ w), (w, x, w.T)


def _flash_backward(kept, ct):
    w, x, wt = kept
    ct = ct * jnp.cos(x @ w)
    return 3 * (x.T @ ct), ct @ wt


_flash.defvjp(_flash_forward, _flash_backward)


def custom_vjp_in_scan(p, x):
    return mean(lax.scan(lambda x, w: (_flash(w, x) + x, None), x, p["stack"])[0])


def _by_constant(times):
    """A product whose gradient is multiplied by the sum of an array that `times` makes of nothing traced."""

    @jax.custom_vjp
    def product(w, x, times):
        return x @ w * times[1]

    def backward(kept, ct):
        w, x, times = kept
        ct = ct * lax.fori_loop(0, 3, lambda i, total: total + times[i], 0.0)
        return x.T @ ct, ct @ w.T, None

    product.defvjp(lambda w, x, times: (product(w, x, times), (w, x, times)), backward)
    return lambda w, x: product(w, x, times())


def custom_vjp_of_a_constant(p, x):
    inside, outside = _by_constant(lambda: jnp.array([0.2, 0.5, 0.7])), _by_constant(lambda: THIRDS)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(inside(w, x)), None), outside(p["w"], x), p["stack"])
    return mean(inside(p["v"], x))


def stateful(p, x):
    """Refs that hold a parameter, a product, and a count that a scan's body adds to."""
    weight, count = jax.new_ref(p["w"]), jax.new_ref(jnp.zeros(()))

    def layer(x, w):
        count[...] += 1
        return jnp.tanh(x @ w + x @ weight[...]), None

    x, _ = lax.scan(layer, x, p["stack"])
    product = jax.new_ref(x @ p["v"])
    product[...] *= count[...]
    return mean(product[...]) + mean(jax.checkpoint(_with_own_ref)(p["w"], x))


def _with_own_ref(w, x):
    product = jax.new_ref(x @ w)
    product[...] = jnp.sin(product[...])
    return product[...]


def stacked_layers(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p["stack"][i])
    return mean(x @ p["stack"][-1, :, 2:6])


def constant_layers(p, x):
    index = jnp.arange(5)[3] - 1
    return mean(jnp.tanh(x @ p["stack"][index]) @ lax.dynamic_index_in_dim(p["stack"], index, keepdims=False))


def debug_print(p, x):
    jax.debug.print("", ordered=False)

    @jax.checkpoint
    def layer(w, x):
        jax.debug.print("")
        return x @ w

    return mean(layer(p["w"], x))


def penalty(p, x):
    return mean(x @ p["w"]) + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def merged(p, x):
    lora = p["w"] @ p["v"]
    return mean(x @ (p["stack"][0] + lora)) + mean(x @ (p["w"] / jnp.linalg.norm(p["w"])))


def concatenated(p, x):
    fused = jnp.concatenate([p["w"], p["v"]], axis=1)
    return mean(jnp.split(x @ fused, 2, axis=-1)[1]) + mean(x @ jnp.stack([p["w"], p["v"]])[1])


TABLE = {
    f.__name__: f
    for f in (
        plain, remat, scan_everything, scan_same_stack_twice, scan_of_groups, custom_vjp_in_scan, stacked_layers,
        constant_layers, debug_print, penalty, merged, custom_vjp_of_a_constant, stateful, concatenated, indexed,
        cast_and_scaled_layers, masked_layers, layers_in_another_order, microbatches, changed_weights,
        product_in_many_places,
    )
}  # fmt: skip
