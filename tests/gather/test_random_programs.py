"""Random programs out of the constructs a model may use around a parameter equal the plain function.

A program is a tuple of parts, which reads like the model it describes:
`(Part("over", "reverse", (Part("inside", "remat", (Part("use", "dot", "layer"),)),)), Part("use", "dot", "w"))` is a
reversed scan over layers under remat, and a head. Each part maps rows to rows of the same width.
"""

import functools
import itertools
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import assert_same
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zerojax.gather.tiled import block

POLICIES = jax.checkpoint_policies
ROWS = 24  # shared evenly by 2, 3 and 8 devices
# Each device's first one chooses its branch or layer, of 2 or 3, and not the same one on all devices.
IDS = np.repeat([0, 3, 1, 2, 5, 4, 1, 2], 3) + 6 * (np.arange(ROWS) % 3)


class Part(NamedTuple):
    """One use of a parameter, or a body in a transformation, or in a loop over layers whose layer is `"layer"`."""

    table: str  # a key of `TABLES`
    name: str  # a key of that table
    of: Any  # the name of the parameter, or the body, which is a program


# Both rules of differentiation are wrong on purpose: one that is lost shows in the gradient.
@jax.custom_jvp
def tripled(w, x):
    return x @ w


@tripled.defjvp
def _tripled_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 3 * (x @ dw) + dx @ w


@jax.custom_vjp
def doubled(w, x):
    return jnp.sin(x @ w)


def _doubled_forward(w, x):
    return jnp.sin(x @ w), (x, w.T, x @ w)


def _doubled_backward(kept, cotangent):
    x, transposed, h = kept
    cotangent = cotangent * jnp.cos(h)
    return 2 * (x.T @ cotangent), cotangent @ transposed


doubled.defvjp(_doubled_forward, _doubled_backward)


def named(w, x):
    w = checkpoint_name(w.T, "weight")
    return jnp.sin(checkpoint_name(x @ w, "hidden")) @ w


def low_precision(w, x):
    low = jnp.bfloat16
    return jnp.tanh(x.astype(low) @ w.astype(low)).astype(jnp.float32)


def low_and_transposed(w, x):
    low = jnp.bfloat16
    return jnp.tanh(x.astype(low) @ w.T.reshape(w.shape).astype(low)).astype(jnp.float32)


def low_and_high(w, x):
    return low_precision(w, x) + x @ w


def noisy(w, x):
    return jnp.tanh(x @ (w + 0.1 * jax.random.normal(jax.random.key(1), w.shape)))


def gradient_inside(w, x):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)


USES = {
    "dot": lambda w, x: jnp.tanh(x @ w),
    "transposed": lambda w, x: jnp.tanh(jnp.einsum("bi,ji->bj", x, w)),
    "reshaped": lambda w, x: jnp.tanh(x @ w.T.reshape(-1).reshape(w.shape)),
    "twice": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "scaled": lambda w, x: jnp.tanh(x @ (0.5 * w)),
    "normed": lambda w, x: x @ (w / (1 + jnp.linalg.norm(w))),
    "summed": lambda w, x: x + w.sum(0),
    "one row": lambda w, x: x * (1 + w[1]),
    "two halves": lambda w, x: jnp.tanh(jnp.concatenate([x @ w[:, 1:], x @ w[:, :1]], axis=1)),
    "sorted": lambda w, x: x + jnp.cumsum(jnp.sort(w, axis=0), axis=1)[0],
    "stopped": lambda w, x: jnp.tanh(x @ lax.stop_gradient(w)) + x,
    "gradient": gradient_inside,
    "named": named,
    "bfloat16": low_precision,
    "bfloat16 of a transpose": low_and_transposed,
    "bfloat16 and float32": low_and_high,
    "noisy": noisy,
    "custom_jvp": tripled,
    "custom_vjp": doubled,
}


def repeated(body, w, x):
    return lax.scan(lambda x, scale: (scale * body(w, x), None), x, jnp.array([0.9, 0.7]))[0]


def carried(body, w, x):
    def iteration(carry, _):
        carried_w, x = carry
        return (jax.tree.map(lambda leaf: 0.9 * leaf, carried_w), body({**carried_w, "ids": w["ids"]}, x)), None

    carried_w = {name: leaf for name, leaf in w.items() if name != "ids"}
    (carried_w, x), _ = lax.scan(iteration, (carried_w, x), length=2)
    return x + carried_w["w"].mean()


def for_count(body, w, x):
    return lax.fori_loop(0, 2, lambda i, x: body(w, x) * (i + 1) / 2, x)


def while_below(body, w, x):
    # Reverse differentiation of a while loop is nothing JAX has.
    w, start = lax.stop_gradient((w, x))
    return x + lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(w, c[1])), (0, start))[1]


def conditional(body, w, x):
    return lax.cond(w["ids"][0] % 2 == 0, body, lambda w, x: jnp.sin(x), w, x)


def switched(body, w, x):
    return lax.switch(w["ids"][0] % 3, [body, lambda w, x: jnp.sin(x), lambda w, x: body(w, -x)], w, x)


def batched(body, w, x):
    return jax.vmap(body, (None, 0))(w, jnp.stack([x, -x])).mean(0)


def applied_twice(body, w, x):
    return body(w, jnp.sin(body(w, x)))


def closed_over(wrap):
    return lambda body, w, x: wrap(lambda x: body(w, x))(x)


def remat_with(policy):
    return lambda body, w, x: jax.checkpoint(body, policy=policy)(w, x)


INSIDE = {
    "jit": lambda body, w, x: jax.jit(body)(w, x),
    "block": lambda body, w, x: block(body)(w, x),
    "block that closes over its parameters": closed_over(block),
    "remat": remat_with(None),
    "remat that closes over its parameters": closed_over(jax.checkpoint),
    "remat of dots": remat_with(POLICIES.dots_saveable),
    "remat of everything": remat_with(POLICIES.everything_saveable),
    "remat but names": remat_with(POLICIES.save_only_these_names("weight", "hidden")),
    "remat of names": remat_with(POLICIES.save_anything_except_these_names("hidden")),
    "scan over nothing": repeated,
    "scan that carries": carried,
    "fori": for_count,
    "while": while_below,
    "cond": conditional,
    "switch": switched,
    "vmap": batched,
    "twice": applied_twice,
}


def scanned(body, w, x, *, wrap=lambda f: f, **options):
    iteration = wrap(lambda x, layer: (body(w | {"layer": layer}, x) + x / 2, None))
    return lax.scan(iteration, x, w["stack"], **options)[0]


def scanned_with_results(body, w, x):
    def iteration(x, operands):
        layer, index, bias = operands
        x = body(w | {"layer": layer}, x) + index * bias
        return x, (x[:, :1], index)

    count = w["stack"].shape[0]
    x, (columns, _) = lax.scan(iteration, x, (w["stack"], jnp.arange(count), jnp.ones((count, 1)) * w["b"]))
    return x + columns.mean(0)


def scanned_in_pairs(body, w, x):
    """The same stack twice, once transposed in the iteration."""
    iteration = lambda x, pair: (body(w | {"layer": pair[0] + pair[1].T / 2}, x), None)
    return lax.scan(iteration, x, (w["stack"], w["stack"]))[0]


def scanned_by_index(body, w, x):
    iteration = lambda x, i: (body(w | {"layer": w["stack"][i]}, x), None)
    return lax.scan(iteration, x, jnp.arange(w["stack"].shape[0]))[0]


def scanned_in_scan(body, w, x):
    return lax.scan(lambda x, scale: (scale * scanned(body, w, x), None), x, jnp.array([0.9, 0.7]))[0]


def carried_stack(body, w, x):
    def iteration(carry, i):
        stack, x = carry
        return (stack * 0.9, body(w | {"layer": stack[i]}, x)), None

    return lax.scan(iteration, (w["stack"], x), jnp.arange(w["stack"].shape[0]))[0][1]


def by_given_index(body, w, x):
    # On each device another layer: slices of the shards, once gathered, would be none of any.
    return body(w | {"layer": w["stack"][w["ids"][0] % w["stack"].shape[0]]}, x)


def one_by_one(body, w, x):
    for i in range(w["stack"].shape[0]):
        x = body(w | {"layer": w["stack"][i]}, x)
    return x


def ensemble(body, w, x):
    return jax.vmap(lambda layer: body(w | {"layer": layer}, x))(w["stack"]).mean(0)


def counted(body, w, x):
    return lax.fori_loop(0, w["stack"].shape[0], lambda i, x: body(w | {"layer": w["stack"][i]}, x), x)


OVER = {
    "scan": scanned,
    "reverse": functools.partial(scanned, reverse=True),
    "unroll": functools.partial(scanned, unroll=2),
    "remat": functools.partial(scanned, wrap=functools.partial(jax.checkpoint, prevent_cse=False)),
    "remat of dots": functools.partial(
        scanned, wrap=functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable), reverse=True
    ),
    "block": functools.partial(scanned, wrap=block),
    "results": scanned_with_results,
    "pairs": scanned_in_pairs,
    "by index": scanned_by_index,
    "scan in scan": scanned_in_scan,
    "carry": carried_stack,
    "given index": by_given_index,
    "one by one": one_by_one,
    "ensemble": ensemble,
    "fori": counted,
}


def looked_up(w, x, p):
    logits = x @ p["table"].T
    return logits.mean() + jnp.mean(p["table"][w["ids"] % p["table"].shape[0]] * x)


# What is added to the loss, besides the mean square of the program's rows.
EXTRAS = {
    "tied embedding": looked_up,
    "penalty": lambda w, x, p: 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
    "tied head": lambda w, x, p: jnp.mean(jnp.sin(x @ p["w"])),
    # Nothing to the loss: parameters among the results, as they are and changed.
    "returned": lambda w, x, p: 0.0,
}


TABLES = {"use": USES, "inside": INSIDE, "over": OVER}


def apply(program, w, x):
    """Run a program on rows `x` with the arrays that `w` names."""
    for part in program:
        of = w[part.of] if part.table == "use" else functools.partial(apply, part.of)
        x = TABLES[part.table][part.name](*((of,) if part.table == "use" else (of, w)), x)
    return x


def loss_of(program, extras):
    def loss(params, batch):
        w = {name: params[name] for name in ("w", "v", "stack", "b")} | {"ids": batch["ids"]}
        x = apply(program, w, batch["x"] + params["table"][batch["ids"] % params["table"].shape[0]])
        value = jnp.mean(x**2) + sum(EXTRAS[name](w, x, params) for name in sorted(extras))
        returned = {"w": params["w"], "first": 2 * params["stack"][0], "rows": params["table"][:2]}
        return value, returned if "returned" in extras else {}

    return loss


def check(case):
    """Compare a program with the plain function. `case` also has sizes, and options of `assert_same`."""
    case = dict(case)
    program, n, layers = case.pop("program"), case.pop("width"), case.pop("layers")
    shapes = {"w": (n, n), "v": (n, n), "stack": (layers, n, n), "table": (n + 2, n), "b": (n,), "unused": (n, 2)}
    keys = jax.random.split(jax.random.key(0), 7)
    params = {
        # Rows keep their size from layer to layer; what vanishes or saturates has no gradient to compare.
        name: np.asarray(jax.random.normal(key, shape) / n**0.5)
        for key, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    batch = {"x": np.asarray(jax.random.normal(keys[0], (ROWS, n))), "ids": IDS}
    # A bfloat16 has 8 bits: a gradient is rounded so a few times, and summed over the devices so. For
    # float32 it is assert_same's own tolerance.
    rounding = {"rounding": 5e-2} if "bfloat16" in str(program) else {}
    assert_same(loss_of(program, case.pop("extras")), params, batch, has_aux=True, **rounding, **case)


def bodies(hows, weights, depth):
    """One or two parts, at most `depth` deep, on matrices out of `weights`."""
    use = st.builds(Part, st.just("use"), st.sampled_from(hows), st.sampled_from(weights))
    alone = st.tuples(use) | st.tuples(use, use)
    if depth == 0:
        return alone
    inside, over = (parts(table, TABLES[table], hows, weights, depth) for table in ("inside", "over"))
    # Mostly deep ones: two uses are soon tried.
    return alone | st.tuples(inside) | st.tuples(over) | st.tuples(use, inside) | st.tuples(over, use)


def parts(table, names, hows, weights, depth):
    """A part of a table with a body, at most `depth` deep, by one of `names`."""
    if table == "over":
        # The layer comes first: a loop over layers should use them more often than not.
        weights = ("layer", *[name for name in weights if name != "layer"])
    return st.builds(Part, st.just(table), st.sampled_from(list(names)), bodies(hows, weights, depth - 1))


OUTERMOST = [(table, name) for table in ("inside", "over") for name in TABLES[table]]
DIMS = {"w": 2, "v": 2, "stack": 3, "table": 2, "b": 1, "unused": 2}


def cases(number):
    """Cases in whose programs number `number` of `OUTERMOST` is outermost."""
    table, name = OUTERMOST[number]
    # Hypothesis tries the first of everything first: let that be another use each time.
    start = number % len(USES)
    hows = [*list(USES)[start:], *list(USES)[:start]]
    # A program with a bfloat16 in it is compared loosely, so most are to have none.
    precise = [how for how in hows if "bfloat16" not in how]
    of = lambda hows: st.tuples(parts(table, [name], hows, ("w", "v"), 2))
    dims = {name: st.sampled_from([*reversed(range(dims))] * 2 + [-1]) for name, dims in DIMS.items()}
    return st.fixed_dictionaries({
        "program": st.sampled_from([precise] * 4 + [hows]).flatmap(of),
        "extras": st.frozensets(st.sampled_from(list(EXTRAS))),
        "width": st.sampled_from([3, 5, 7, 8, 13]),
        "layers": st.sampled_from([3, 2, 1]),
        "dims": st.fixed_dictionaries(dims),
        "devices": st.sampled_from([2, 3, 8]),
        "prefetch": st.sampled_from([1, 0, 2]),
        "bucket_bytes": st.sampled_from([1 << 20, 0]),
        "reshard_after_forward": st.sampled_from([True, False]),
    })  # fmt: skip


def random_check(number, run=check, **options):
    # An example's time is that of compiling it.
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    return settings(print_blob=True, **slow, **options)(given(cases(number))(run))


NAMES = [f"{table} {name}" for table, name in OUTERMOST]


def test_a_random_program_equals_the_plain_function():
    # Not `derandomize`, which would draw the same sizes, dims and options for every number.
    # And without shrinking, which takes minutes for a program that is small as it is; the slow test shrinks.
    drawn = itertools.count()

    def check_but_the_first(case):
        assume(next(drawn))  # the simplest there is, which a slow test has
        check(case)

    options = {"derandomize": False, "database": None, "phases": [Phase.generate]}
    seed(6)(random_check(6, check_but_the_first, max_examples=1, **options))()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_the_simplest_program_of_each_kind_equals_the_plain_function(part):
    """The first example is the simplest: one use, and another one for each number."""
    for number in range(len(OUTERMOST))[part::2]:
        random_check(number, max_examples=1, database=None, phases=[Phase.generate])()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OUTERMOST)), ids=NAMES)
def test_many_random_programs_equal_the_plain_function(number):
    random_check(number, max_examples=3, derandomize=False, phases=[Phase.reuse, Phase.generate, Phase.shrink])()
