"""Where the rows of a batch are in every value of a program.

The oracle knows nothing of the table: a dim holds rows if and only if permuting the rows of the batch permutes the
value along it. For a function of one row under `jax.vmap`, it is the dim that vmap's own batching chose.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import quick_or_slow
from jax import lax
from jax.experimental.sparse import BCOO
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import compat, rows
from zerojax.dims import NOWHERE, UNKNOWN, Follower, Place, on_dim

ROWS, WIDTH = 6, 5


@pytest.fixture
def float64():
    """Compute in float64, in which rounding cannot be taken for a difference."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def states(fn, given, *args, count=ROWS):
    """Where the results of `fn(*args)` hold the rows, as `follow` says."""
    closed = jax.make_jaxpr(fn)(*args)
    return Follower(count).results(compat.opened(closed)[0], given)


def places(state):
    return UNKNOWN if state is None else tuple(sorted((place.dim, place.outer) for place in state.places))


# What a row's function is made of: `(array of any shape but (), key) -> array`. Sizes differ from ROWS throughout.
def _product(x, key):
    return x @ jax.random.normal(key, (x.shape[-1], WIDTH))


def _loop(x, key):
    return lax.scan(lambda carry, row: (jnp.sin(carry + row), carry * row), jnp.zeros(x.shape[1:]), x)[1]


def _layers(x):
    """A loop under remat in a loop. In jax 0.11 and later, its derivative has equations named "eval_jaxpr"."""
    twice = lambda row: lax.scan(lambda carry, i: (jnp.sin(carry + i), None), row, jnp.arange(2.0))[0]
    return lax.scan(lambda _, row: (None, jax.checkpoint(twice, prevent_cse=False)(row)), None, x)[1]


def _branch(x, key):
    return lax.cond(jnp.sum(jax.random.normal(key)) > 0, jnp.cos, lambda x: jnp.sin(x) + x, x)


def _convolution(x, key):
    flat = x.reshape(1, 1, -1)
    return lax.conv_general_dilated(flat, jax.random.normal(key, (3, 1, 2)), (1,), "SAME")[0]


STEPS = {
    "argmax": lambda x, key: x * jnp.argmax(x, -1, keepdims=True),
    "attention": lambda x, key: jax.nn.softmax(x @ jnp.moveaxis(x, -1, -2)) @ x if x.ndim > 1 else x,
    "branch": _branch,
    "concatenate": lambda x, key: jnp.concatenate([x, jnp.ones((1, *x.shape[1:]))]),
    "convolution": _convolution,
    "count": lambda x, key: x + lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + i, x),
    "cumsum": lambda x, key: jnp.cumsum(x, axis=-1),
    "custom": lambda x, key: jax.nn.relu(x) + optax.safe_norm(x, 1e-3),
    "dropout": lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape),
    "layers": lambda x, key: _layers(x),
    "lookup": lambda x, key: jnp.take(x, jnp.argsort(x[0].ravel())[:1] % x.shape[-1], axis=-1),
    "loop": _loop,
    "merge": lambda x, key: x.reshape(-1),
    "pad": lambda x, key: jnp.pad(x, [(1, 0)] * x.ndim),
    "product": _product,
    "remat": lambda x, key: jax.checkpoint(lambda x: jnp.tanh(_product(x, key)))(x),
    "reverse": lambda x, key: x[::-1],
    "slice": lambda x, key: x[..., : max(1, x.shape[-1] - 1)],
    "softmax": lambda x, key: jax.nn.softmax(x, axis=-1),
    "sort": lambda x, key: jnp.sort(x, axis=0),
    "spread": lambda x, key: x[..., None] * jnp.arange(1.0, 4.0),
    "sum": lambda x, key: x.sum(-1) if x.ndim > 1 else x,
    "transpose": lambda x, key: jnp.moveaxis(x, 0, -1),
    "where": lambda x, key: jnp.where(x > 0, x, jnp.exp(-jnp.abs(x))),
}
# And what mixes rows: the rows of the result are on dim 0 again.
MIXED = {
    "normalise": lambda x: (x - x.mean(0)) / (1 + x.var(0)),
    "similarities": lambda x: jax.nn.softmax(x.reshape(ROWS, -1) @ x.reshape(ROWS, -1).T) @ x.reshape(ROWS, -1),
    "penalty": lambda x: x * jnp.sum(x**2),
    "merged": lambda x: jnp.tanh(x.reshape(-1, *x.shape[2:])).reshape(x.shape) if x.ndim > 1 else x,
    "major": lambda x: (
        jnp.swapaxes(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]).reshape(-1, ROWS, *x.shape[2:]), 0, 1)
        if x.ndim > 1
        else x
    ),
    "loss": lambda x: (
        x
        * optax.softmax_cross_entropy_with_integer_labels(
            x.reshape(ROWS, -1), jnp.argmax(x.reshape(ROWS, -1), 1)
        ).reshape(ROWS, *[1] * (x.ndim - 1))
    ),
}


def random_program(seed):
    """`(function of a batch, its dim of rows, that of the result)`, at random."""
    rng = np.random.default_rng(seed)
    keys = list(jax.random.split(jax.random.key(seed), 8))

    def row_function(steps, keys):
        def of_row(x):
            for name, key in zip(steps, keys, strict=True):
                x = STEPS[name](x, key)
                x = x.reshape(1) if x.ndim == 0 else x
            return x

        return of_row

    first, second = (row_function(rng.choice([*STEPS], 4), keys[n : n + 4]) for n in (0, 4))
    mix, dim = MIXED[rng.choice([*MIXED])], int(rng.integers(3))

    def of_batch(batch, out=0):
        x = jax.vmap(first, in_axes=dim)(batch)
        return jax.vmap(second, out_axes=out)(mix(x))

    ndim = len(jax.eval_shape(of_batch, jnp.zeros(np.insert((3, 4), dim, ROWS))).shape)
    out = int(rng.integers(ndim))
    return lambda batch: of_batch(batch, out), dim, out


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", quick_or_slow([(n,) for n in range(20)], [(n,) for n in range(4)]))
def test_a_dim_holds_rows_if_permuting_the_batch_permutes_it(seed, float64):
    fn, dim, out = random_program(seed)
    batch = jax.random.normal(jax.random.key(seed), np.insert((3, 4), dim, ROWS))
    order = np.random.default_rng(seed).permutation(ROWS)

    def both(batch):
        result, pull = jax.vjp(fn, batch)
        return result, pull(jnp.tanh(result))[0]

    found = states(both, [on_dim(dim)], batch)
    assert [places(state) for state in found] == [((out, 1),), ((dim, 1),)]
    run = jax.jit(both)
    permuted = run(jnp.take(batch, order, dim))
    for value, other, place in zip(run(batch), permuted, (out, dim), strict=True):
        # float64, rounded in another order, and large where a program multiplies often.
        np.testing.assert_allclose(jnp.take(value, order, place), other, atol=1e-9 * (1 + np.nanmax(np.abs(value))))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_rows_are_followed_alike(seed):
    """As the devices hold them: two rows each."""
    fn, dim, out = random_program(seed)
    batch = jnp.zeros(np.insert((3, 4), dim, ROWS))
    assert places(states(fn, [on_dim(dim)], batch, count=ROWS // 2)[0]) == ((out, 1),)


def cases():
    x, w = jnp.zeros((ROWS, 4)), jnp.zeros((4, WIDTH))
    wide, labels = jnp.zeros((ROWS, 3, 4)), jnp.zeros(ROWS, int)
    image, kernel = jnp.zeros((ROWS, 3, 8)), jnp.zeros((2, 3, 3))
    convolve = lambda x, k, groups=1: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=groups)
    table, graph = jnp.zeros((7, 4)), jnp.zeros((ROWS, 9), int)
    return {
        "rows with rows": (lambda x: x @ x.T, [x], (0, 1)),
        "a weight's gradient": (jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w))), [w, x], ()),
        "a row by number": (lambda x: x[0], [x], UNKNOWN),
        "a sum of a row": (lambda x: x[0].sum(), [x], ()),
        "sorted rows": (lambda x: jnp.sort(x, 0), [x], UNKNOWN),
        "labels by position": (lambda x, y: x[jnp.arange(ROWS), y % 4], [x, labels], (0,)),
        "its gradient": (jax.grad(lambda x, y: x[jnp.arange(ROWS), y % 4].sum()), [x, labels], (0,)),
        "labels of other positions": (lambda x, y: x[jnp.arange(ROWS)[::-1], y % 4], [x, labels], UNKNOWN),
        "labels along": (lambda x, y: jnp.take_along_axis(x, y[:, None] % 4, 1), [x, labels], (0,)),
        "time first": (lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, 4), [wide], {Place(0, 3)}),
        "time first and back": (lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, 4).reshape(3, ROWS, 4), [wide], (1,)),
        "pairs of rows": (lambda x: x.reshape(ROWS // 2, 2, 4), [x], (0,), ROWS // 2),
        "microbatches": (lambda x: jnp.concatenate([x, x, x]).reshape(3, ROWS, 4)[1], [x], (0,)),
        "microbatches of the batch": (lambda x: x.reshape(2, ROWS // 2, 4), [x], (1,), ROWS // 2),
        "one behind the other": (lambda x: jnp.concatenate([x, 2 * x]), [x], {Place(0, 2)}),
        "half of both": (lambda x: jnp.concatenate([x, 2 * x])[ROWS:], [x], (0,)),
        "edges repeated": (lambda x: jnp.pad(x, ((0, 0), (1, 1)), mode="edge"), [x], (0,)),
        "some of the rows": (lambda x: x[: ROWS // 2], [x], UNKNOWN),
        "every other column": (lambda x: x[:, ::2], [x], (0,)),
        "a convolution": (convolve, [image, kernel], (0,)),
        "its kernel's gradient": (jax.grad(lambda k, x: jnp.sum(jnp.sin(convolve(x, k)))), [kernel, image], ()),
        "in groups": (
            jax.grad(lambda k, x: jnp.sum(jnp.sin(convolve(x, k[:, :1], 3)))),
            [jnp.zeros((6, 3, 3)), image],
            (),
        ),
        "kernels of each row": (jax.vmap(lambda x, s: convolve(x[None], kernel * s)[0]), [image, labels], (0,)),
        "pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID"), [image], (0,)),
        "pooling of rows": (
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1, 1), (1, 1, 1), "SAME"),
            [image],
            UNKNOWN,
        ),
        "a loop under remat in a loop": (lambda x: jax.vjp(_layers, x.T)[0], [x], (1,)),
        "an embedding": (lambda t, y: t[y], [table, labels], (0,)),
        "its gradient is a sum": (jax.grad(lambda t, y: jnp.sum(jnp.sin(t[y]))), [table, labels], ()),
        "messages of a graph": (
            jax.vmap(lambda nodes, to: jax.ops.segment_sum(nodes[to % 3], to % 3, 3)),
            [wide, graph],
            (0,),
        ),
        "rows by rows": (lambda x, y: x[y], [x, labels], UNKNOWN),
        "keys of rows": (
            lambda x: jax.vmap(jax.random.normal)(jax.vmap(jax.random.key)(x[:, 0].astype(int))),
            [x],
            (0,),
        ),
        "a loop over rows": (lambda x: lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, x)[1], [x], UNKNOWN),
        "a stack": (lambda x: jnp.stack([x, x], 1), [x], (0,)),
        "attention": (lambda x: jax.nn.dot_product_attention(*[x[:, :, None]] * 3), [wide], (0,)),
        "a decomposition": (lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + jnp.eye(3)), [wide], (0,)),
        "a decomposition of rows": (lambda x: jnp.linalg.svd(x)[1], [x], UNKNOWN),
        "a transform": (lambda x: jnp.fft.rfft(x).real, [x], (0,)),
        "a while loop": (
            lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))[0],
            [x],
            (0,),
        ),
        "as long as rows say": (lambda x: lax.while_loop(lambda c: jnp.sum(c) < 0, jnp.sin, x), [x], (0,)),
    }


@pytest.mark.parametrize("name", cases())
def test_the_table(name):
    fn, args, wanted, *count = cases()[name]
    (count,) = count or [ROWS]
    given = [on_dim(0) if x.shape[0] == ROWS and x.shape != (6, 3, 3) else NOWHERE for x in args]
    (found,) = states(fn, given, *args, count=count)
    if isinstance(wanted, set):
        assert found.places == wanted
    else:
        assert places(found) == (UNKNOWN if wanted is UNKNOWN else tuple((dim, 1) for dim in wanted))


def guesses():
    """Functions that no rule looks into: `(function, arguments, dims that hold the rows of the result)`."""
    x, wide, table = jnp.zeros((ROWS, 4)), jnp.zeros((ROWS, 3, 4)), jnp.zeros((5, 4))
    shape = jax.ShapeDtypeStruct
    remat = jax.custom_vjp(lambda x, w: jnp.sin(x) @ w.T)
    remat.defvjp(lambda x, w: (remat(x, w), x), lambda x, g: (x, None), optimize_remat=True)
    mapped = jax.custom_batching.custom_vmap(lambda x: jnp.moveaxis(x, 0, 1) * 2)
    mapped.def_vmap(lambda size, given, x: (jnp.moveaxis(x, 1, 2) * 2, True))
    callback = lambda out, x: jax.pure_callback(lambda x: x, out, x)
    foreign = lambda out, x: jax.ffi.ffi_call("foreign", out)(x)
    two = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    in_map = lambda fn, out: jax.shard_map(fn, mesh=two, in_specs=P("data"), out_specs=out, check_vma=False)
    constrain = lambda x: lax.with_sharding_constraint(x, NamedSharding(two, P(None, "data")))
    sizes = jnp.array([1, 2, 3])
    ragged = lambda x: lax.ragged_dot(x, jnp.zeros((3, 4, 5)), sizes)
    lost = lambda x: callback(shape((7, 2 * ROWS), x.dtype), x)
    matrix = BCOO.fromdense(jnp.eye(4))
    of_experts = lambda x: jax.vjp(lambda w: lax.ragged_dot(x, w, sizes), jnp.zeros((3, 4, 5)))[1](
        x[:, :1] * jnp.ones((ROWS, 5))
    )
    return {
        "a function of its residuals": (lambda x: jax.vjp(remat, x, table)[0], [x], (0,)),
        "a function with a rule for vmap": (mapped, [wide], (1,)),
        "a callback": (lambda x: callback(x, x), [x], (0,)),
        "foreign code": (lambda x: foreign(shape((ROWS, 9), x.dtype), x), [x], (0,)),
        "rows on another dim": (lambda x: foreign(shape((9, ROWS), x.dtype), x), [x], (1,)),
        "rows and heads merged": (lambda x: foreign(shape((3 * ROWS, 4), x.dtype), x), [wide], (0,)),
        "rows and heads split": (lambda x: foreign(wide, x.reshape(-1, 4)), [wide], (0,)),
        "a gradient of a parameter": (lambda x: foreign(shape((4, 2 * ROWS), x.dtype), x), [wide], UNKNOWN),
        "sorted rows": (lambda x: jnp.sort(x, 0), [x], (0,)),
        "every other row": (lambda x: x[::3], [x], (0,)),
        "shuffled rows": (lambda x: x[jnp.argsort(x[:, 0])], [x], (0,)),
        "a shard_map": (in_map(lambda x: x.T, P(None, "data")), [x], (1,)),
        "a sum in a shard_map": (in_map(lambda x: lax.psum(x.sum(0), "data"), P()), [x], UNKNOWN),
        "experts": (ragged, [x], (0,)),
        "gradients of experts": (of_experts, [x], ()),
        "a sparse product": (lambda x: matrix @ x.T, [x], (1,)),
        "lost": (lost, [x], UNKNOWN),
        "lost, then constrained": (lambda x: constrain(lost(x)), [x], (1,)),
        "lost, then declared": (lambda x: rows(lost(x), 1), [x], (1,)),
        "lost, then added to rows": (lambda x: lost(x)[:4, :ROWS].T + x, [x], (0,)),
    }


@pytest.mark.parametrize("name", guesses())
def test_guesses(name):
    fn, args, wanted = guesses()[name]
    jaxpr, _ = compat.opened(jax.make_jaxpr(fn)(*args))
    given = [*[NOWHERE] * (len(jaxpr.invars) - len(args)), *[on_dim(0)] * len(args)]
    (found,) = Follower(2, guesses=True, axes=("data",)).results(jaxpr, given)
    assert places(found) == (UNKNOWN if wanted is UNKNOWN else tuple((dim, 1) for dim in wanted))


@pytest.mark.parametrize("name", ["sorted rows", "a callback", "a shard_map", "lost, then declared"])
def test_a_proof_does_not_guess(name):
    fn, args, _ = guesses()[name]
    assert states(fn, [on_dim(0)], *args, count=2) == [UNKNOWN]
