"""The strongest rival that is known to us: FSDP of the yardstick GPT, pipelined by hand for `jax.shard_map`.

Everything that zerojax derives from the plain loss is written out here. Each layer's weights are gathered while the
layer before it computes, in both passes. The backward pass of a layer is a `jax.vjp` whose saved weights are cleared,
so that it gathers them again. A layer's gradients are reduce-scattered while the next layer computes.

It knows the model: which leaves are layers, what the head and the lookup read, and how the loss is averaged. Another
model needs another such program.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import yardstick

AXIS = "data"


def value_and_grad(size, scan, mesh, specs, *, ordered=True, unroll=1):
    """`f(params, tokens) -> (loss, grads)` for jit. `specs` has the `PartitionSpec` of each parameter.

    With `ordered`, the parts of the program are ordered by `program_order`. `unroll` is that of the scans.
    """
    layers = specs["blocks"] if scan else specs["block_0"]
    within = jax.tree.map(lambda spec: jax.P(*spec[1:]), layers) if scan else layers
    grouped, in_order = (functools.partial(order, enforce=enforce, on=ordered) for enforce in (False, True))

    @functools.partial(jax.checkpoint, prevent_cse=not scan)
    def layer(x, w):
        return yardstick.Block(size).apply({"params": w}, x)[0]

    def gather(shards, specs=within):
        """Shards -> full weights in the type of the products."""
        full = lambda w, spec: jax.lax.all_gather(w, AXIS, axis=spec.index(AXIS), tiled=True) if AXIS in spec else w
        return jax.tree.map(lambda w, spec: full(w.astype(size.dtype), spec), shards, specs)

    def reduce(grads, specs=within):
        """One device's gradients -> shards of the mean over all devices."""
        total = lambda g, dim: jax.lax.psum_scatter(g, AXIS, scatter_dimension=dim, tiled=True)
        one = lambda g, spec: total(g, spec.index(AXIS)) if AXIS in spec else jax.lax.psum(g, AXIS)
        return jax.tree.map(lambda g, spec: one(g, spec).astype(jnp.float32) / mesh.size, grads, specs)

    @grouped
    def forward(x, w, following):
        """One layer, while the weights of the following layer are gathered."""
        ahead = following and gather(following)
        x, back = jax.vjp(layer, x, w)
        back.args_res[1] = None
        return x, ahead, back

    @grouped
    def backward(ct, w, grads, back, following):
        """The gradient of one layer, while others are gathered and reduced: of the next and of the previous layer."""
        ahead, reduced = following and gather(following), grads and reduce(grads)
        back.args_res[1] = w
        ct, grads = back(ct)
        return ct, ahead, grads, reduced

    def head(x, embedding, norm, tokens):
        x = nn.LayerNorm(dtype=size.dtype).apply({"params": norm}, x)
        return yardstick.next_token_loss(x @ embedding.T, tokens)

    def scanned(x, stack, middle):
        count, row = size.layers, lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
        at = lambda i, stack=stack: jax.tree.map(lambda x: row(x, i), stack)
        put = lambda sums, new, i: jax.tree.map(lambda s, g: jax.lax.dynamic_update_index_in_dim(s, g, i, 0), sums, new)

        def there(carry, i):
            x, ahead, back = forward(*carry, at(i + 1))
            return (x, ahead), back

        (x, w), backs = jax.lax.scan(there, (x, gather(at(0))), jnp.arange(count - 1), unroll=unroll)
        x, _, back = forward(x, w, None)
        value, ct, others = middle(x)
        ct, w, grads, _ = backward(ct, w, None, back, at(count - 2))

        def here(carry, i):
            ct, w, grads, sums = carry
            ct, ahead, new, reduced = backward(ct, w, grads, at(i, backs), at(i - 1))
            return (ct, ahead, new, put(sums, reduced, i + 1)), None

        carry = ct, w, grads, jax.tree.map(jnp.zeros_like, stack)
        (ct, w, grads, sums), _ = jax.lax.scan(here, carry, jnp.arange(1, count - 1), reverse=True, unroll=unroll)
        ct, _, grads, reduced = backward(ct, w, grads, at(0, backs), None)
        return value, ct, put(put(sums, reduced, 1), reduce(grads), 0), others

    def unrolled(x, stack, middle):
        ahead, backs, sums = gather(stack[0]), [], []
        for following in [*stack[1:], None]:
            w = ahead
            x, ahead, back = forward(x, w, following)
            backs.append(back)
        value, ct, others = middle(x)
        grads = None
        for back, following in zip(backs[::-1], [*stack[-2::-1], None], strict=True):
            ct, w, grads, reduced = backward(ct, w, grads, back, following)
            sums.insert(0, reduced)
        return value, ct, [reduce(grads), *sums[:-1]], others

    @in_order
    def local(params, tokens):
        specs_of = {name: specs[name] for name in ("Embed_0", "LayerNorm_0")}
        lookup = lambda params: params["embedding"][tokens]
        x, back_of_lookup = jax.vjp(lookup, gather(params["Embed_0"], specs_of["Embed_0"]))

        def middle(x):
            """The head, forward and backward. Its embedding is gathered again, after the layers."""
            x, outer = jax.lax.optimization_barrier((x, {name: params[name] for name in specs_of}))
            full = gather(outer, specs_of)
            of = lambda x, full: head(x, full["Embed_0"]["embedding"], full["LayerNorm_0"], tokens)
            value, (ct, grads) = jax.value_and_grad(of, (0, 1))(x, full)
            return jax.lax.pmean(value, AXIS), ct, reduce(grads, specs_of)

        names = [f"block_{i}" for i in range(size.layers)]
        stack = params["blocks"] if scan else [params[name] for name in names]
        value, ct, sums, others = (scanned if scan else unrolled)(x, stack, middle)
        others["Embed_0"] = jax.tree.map(jnp.add, others["Embed_0"], reduce(back_of_lookup(ct)[0], specs_of["Embed_0"]))
        return value, others | ({"blocks": sums} if scan else dict(zip(names, sums, strict=True)))

    options = {"mesh": mesh, "in_specs": (specs, jax.P(AXIS)), "out_specs": (jax.P(), specs), "check_vma": False}
    return jax.shard_map(local, **options)


def order(f, *, enforce, on):
    """`f`, its equations ordered by `program_order`, or as a group of equations that are not."""
    if not on:
        return f
    from jax.experimental.overlap import program_order

    return program_order(f, enforce=enforce)
