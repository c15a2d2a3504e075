"""Each rule of the planner: a tiny loss that falls under it, and what the program would lack without the rule."""

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import lay_out
from jax import lax

import zerojax
from zerojax.dims import NOWHERE, Follower, on_dim
from zerojax.gather.engine import check_types, gather_groups, trace_loss, weights_of
from zerojax.gather.reduced import ReducedSegment
from zerojax.gather.rules import RULES
from zerojax.gather.scan import ScanSegment

SIZE = 16
W = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
STACK = jax.ShapeDtypeStruct((4, SIZE, SIZE), jnp.float32)
B = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
X = jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
BYTES = SIZE * SIZE * 4


def program_of(loss, *weights, comm=None):
    """The program of `loss(*weights, x)`, whose weights are sharded on their last dim but one, or on their only dim."""
    setup = lay_out(list(weights), [max(len(w.shape) - 2, 0) for w in weights])
    full = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in setup.leaves]
    return trace_loss(lambda weights, x: loss(*weights, x), setup.leaves, full, [X], [0], comm, differing=[0])[0]


def taken(make, rule):
    """The names of the primitives that fell under a rule in `make()`."""
    found = []

    def act(so_far, site, match):
        found.append(site.eqn.primitive.name)
        of.act(so_far, site, match)

    (of,) = [each for each in RULES if each.name == rule]
    watched = [dataclasses.replace(each, act=act) if each is of else each for each in RULES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerojax.gather.rules.RULES", tuple(watched))
        make()
    return found


def reading(*args):
    """The segments of a loss's program that read parameters."""
    return [segment for segment in program_of(*args).segments if segment.params]


def primitives(segment):
    return [eqn.primitive.name for eqn in segment.jaxpr.eqns]


def kinds(program):
    return [type(segment) for segment in program.segments]


def state():
    """One block has all equations between the refs, although two of them are uses."""

    def loss(w, v, x):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jnp.sum(x @ w)
        total[...] += jnp.sum(x @ v)
        return total[...]

    (block,) = reading(loss, W, W)
    assert primitives(block).count("dot_general") == len(block.params) == 2


def with_functional(w, x):
    """A loss with a number computed from the whole of `w`, which also multiplies `x`."""
    ones = jnp.ones(SIZE)
    return jnp.sum(x @ w) + jnp.tanh(ones @ w @ ones)


def cluster():
    """What follows from the number runs in the block that computed it."""
    (block,) = reading(with_functional, W)
    assert primitives(block)[-1] == "tanh"


def expanded():
    """The product of two small factors, which are alike, is computed in the block of the weight."""
    factors = jnp.ones((SIZE, 2)), jnp.ones((2, SIZE))
    (block,) = reading(lambda w, x: jnp.sum(x @ (w + factors[0] @ factors[1])), W)
    assert primitives(block) == ["dot_general", "add", "dot_general"]


def activations():
    """Consecutive equations without parameters share one plain segment."""
    program = program_of(lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w))), W)
    assert [len(segment.params) for segment in program.segments] == [1, 0]
    assert primitives(program.segments[1]) == ["tanh", "sin", "reduce_sum"]


def on_the_shard():
    """The cast is made before the gather, which then moves half of the bytes."""
    program = program_of(lambda w, x: jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)), W)
    assert [segment.gathered_bytes for segment in program.segments if segment.params] == [[BYTES // 2]]
    assert not any(eqn.outvars[0].aval.shape == W.shape for segment in program.segments for eqn in segment.jaxpr.eqns)


def reduction():
    """The shards are reduced, and the only block is the product."""
    program = program_of(lambda w, x: jnp.sum(x @ w) + jnp.sum((w - jnp.mean(w)) ** 2), W)
    assert [primitives(segment) for segment in program.segments if segment.params] == [["dot_general"]]
    assert kinds(program).count(ReducedSegment) == 2  # the second waits for the mean
    program = program_of(lambda w, x: jnp.sum(x @ w) + jnp.sum(w * jnp.cos(jnp.arange(16.0))), W)
    (penalty,) = [segment for segment in program.segments if isinstance(segment, ReducedSegment)]
    assert [v.aval.shape for v in penalty.others] == [(SIZE,)]  # each device broadcasts it to its part
    assert " more" not in penalty._label


def repeated():
    """Each use transposes the weight that it has gathered; no segment passes the transposed weight on."""
    uses = reading(lambda w, x: jnp.sum(jnp.tanh(x @ w.T) @ w.T), W)
    assert [primitives(segment)[:2] for segment in uses] == [["transpose", "dot_general"]] * 2


def scale():
    """The norm is computed in the block of the product, not in a block of its own."""
    (block,) = reading(lambda w, x: jnp.sum(x @ (w / jnp.linalg.norm(w))), W)
    assert primitives(block)[-1] == "dot_general"


def masked():
    """The masked weight is computed where it is read, and is not passed on like an activation, as a bias is."""
    (use,) = reading(lambda w, x: jnp.sum(x @ (w * (x[0] > 0).astype(w.dtype))), W)
    assert {"mul", "dot_general"} <= set(primitives(use))
    uses = reading(lambda w, b, x: jnp.sum(x @ (w @ (b * x[0]))), W, B)
    assert [primitives(segment) for segment in uses] == [["mul"], ["dot_general"]]


@jax.custom_vjp
def rounded(w):
    """A weight in steps of a quarter, from integers of eight bits."""
    return jnp.round(4 * w).astype(jnp.int8).astype(w.dtype) / 4


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


def quantised():
    """The product gathers one byte per element."""
    (block,) = reading(lambda w, x: jnp.sum(x @ rounded(w)), W)
    assert block.gathered_bytes == [BYTES // 4]


def loop_over_layers():
    """Each iteration gathers its layer of the stack."""
    (loop,) = reading(lambda w, x: jnp.sum(lax.scan(lambda x, w: (x @ w, None), x, w)[0]), STACK)
    assert isinstance(loop, ScanSegment)
    assert loop.gathered_bytes == [BYTES, BYTES]


def shared_gather():
    """The number is computed in the block of the product, so that one gather serves both. So is a later constant."""

    def with_later_constant(w, v, x):
        y = jnp.sum(jnp.tanh(x @ w) @ v)
        return y + jnp.tanh(jnp.sin(jnp.arange(16.0)) @ w @ jnp.ones(SIZE))

    assert [segment.gathered_bytes for segment in reading(with_functional, W)] == [[BYTES]]
    assert primitives(reading(with_later_constant, W, W)[0])[:3] == ["dot_general", "iota", "sin"]


def use():
    """Each product is a block that gathers its own weight."""
    uses = reading(lambda w, v, x: jnp.sum(x @ w @ v), W, W)
    assert [segment.gathered_bytes for segment in uses] == [[BYTES]] * 2


CASES = {
    "state": (state, "dot_general"),
    "cluster": (cluster, "tanh"),
    "expanded": (expanded, "dot_general"),
    "activations": (activations, "tanh"),
    "on the shard": (on_the_shard, "convert_element_type"),
    "quantised": (quantised, "zerojax_shardwise"),
    "repeated": (repeated, "transpose"),
    "reduction": (reduction, "reduce_sum"),
    "scale": (scale, "reduce_sum"),
    "masked": (masked, "mul"),
    "shared gather": (shared_gather, "dot_general"),
    "loop over layers": (loop_over_layers, "scan"),
    "use": (use, "dot_general"),
}


def test_every_rule_has_a_case_and_a_row_in_the_documentation():
    page = (pathlib.Path(zerojax.__file__).parents[1] / "docs" / "engine.md").read_text()
    assert list(CASES) == [rule.name for rule in RULES]
    assert [rule.name for rule in RULES if f"| {rule.name} | `{rule.example}` |" not in page] == []


@pytest.mark.parametrize("name", CASES)
def test_each_rule_takes_its_equation_and_shapes_the_program(name):
    case, primitive = CASES[name]
    assert primitive in taken(case, name)


@pytest.mark.parametrize("name", [name for name in CASES if name != "use"])
def test_without_a_rule_its_case_fails(name, monkeypatch):
    """The other rules would take the equation, so the assertions above must depend on this one."""
    monkeypatch.setattr("zerojax.gather.rules.RULES", tuple(rule for rule in RULES if rule.name != name))
    with pytest.raises((AssertionError, ValueError)):
        CASES[name][0]()


@pytest.mark.parametrize(
    ("stored", "first", "then"), [("bfloat16", "float32", None), ("float32", "bfloat16", "float8_e4m3fn")]
)
def test_only_the_first_cast_to_a_narrower_type_precedes_the_gather(stored, first, then):
    """A cast to a wider type would gather more bytes, and one cast instead of two would round differently."""
    cast = lambda w: w.astype(first) if then is None else w.astype(first).astype(then)
    program = program_of(lambda w, x: jnp.sum(x @ cast(w).astype(x.dtype)), jax.ShapeDtypeStruct(W.shape, stored))
    assert [segment.gathered_bytes for segment in program.segments if segment.params] == [[BYTES // 2]]


def scans(*args):
    return [segment for segment in program_of(*args).segments if isinstance(segment, ScanSegment)]


def test_the_operands_of_a_loop_are_sorted_by_kind():
    """Of a loop without a carry, and of one in reverse with a constant, a literal and another stack."""
    (scan,) = scans(lambda w, x: jnp.sum(lax.map(lambda w: x @ w, w)), STACK)
    loop = scan.loop
    assert (loop.shared, loop.stacked, loop.consts, loop.carry) == ((), scan.params, 1, 0)

    def loss(v, w, x):
        step = lambda carry, own: ((jnp.tanh(carry[0] @ own[0] @ v) + own[1], carry[1] + 1), None)
        return lax.scan(step, (x, 0), (w, jnp.arange(4.0)), reverse=True)[0][0].sum()

    (scan,) = scans(loss, W, STACK)
    loop = scan.loop
    assert (loop.shared, loop.stacked, loop.consts, loop.carry) == (scan.params[:1], scan.params[1:], 0, 2)
    assert [loop.layer(i) for i in range(4)] == [3, 2, 1, 0]
    rows = [on_dim(0) if v.aval.shape == X.shape else NOWHERE for v in scan.others]
    assert loop.rows_inside(rows, Follower(8)) == [on_dim(0), NOWHERE, NOWHERE]


def test_small_consecutive_blocks_are_one_group():
    """A loop is a group by itself. So is a block beyond the limit, unless it reads what the group has gathered."""

    def loss(a, b, wide, stack, c, x):
        x = jnp.tanh(jnp.tanh(jnp.tanh(x @ a) @ b) @ a)
        x = jnp.tanh(x @ wide) @ wide.T
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, stack)
        return jnp.sum(jnp.tanh(x @ c) @ c)

    segments = reading(loss, W, W, jax.ShapeDtypeStruct((SIZE, 4 * SIZE), jnp.float32), STACK, W)
    apart, pair, wide_too = [0, 1, 2, 3, 3, 4, 5, 5], [0, 0, 0, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 1, 2, 2]
    for limit, numbers in {0: apart, 1: apart, 2: pair, 5: pair, 6: wide_too}.items():
        assert gather_groups(segments, limit * BYTES) == numbers


def test_only_what_parameters_give_without_rows_may_have_partial_sums_as_cotangents():
    """Not a constant, nor the result of a rule of its own, which may need the sum."""
    rule = jax.custom_vjp(jnp.tanh)
    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (jnp.clip(g, -1, 1),))

    def loss(w, v, u, x):
        gain = jnp.exp(jnp.ones(SIZE) @ v) * jnp.cos(jnp.arange(16.0))
        return jnp.sum((jnp.tanh(x @ w) * gain + rule(jnp.ones(SIZE) @ u)) @ w)

    program = program_of(loss, W, W, W, comm=types.SimpleNamespace(follower=Follower(8), experts=lambda leaves: []))
    assert sum(segment.has_rule for segment in program.segments) == 1
    (block,) = [segment for segment in program.segments if not weights_of(program).isdisjoint(segment.results)]
    assert {"exp", "mul"} <= {*primitives(block)}


def test_a_value_without_a_size_is_refused():
    """Its type is defined with `jax.experimental.hijax`."""
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0).jaxpr
    check_types(jaxpr)
    var = types.SimpleNamespace(aval=types.SimpleNamespace(is_high=True))
    with pytest.raises(TypeError, match=r"value of type .* at .*use stage 2"):
        check_types(types.SimpleNamespace(eqns=[jaxpr.eqns[0].replace(outvars=[var])]))


def test_an_equation_without_results_may_read_a_parameter():
    """It is a use, such as a callback that prints a weight."""

    def loss(w, x):
        jax.debug.callback(lambda w: None, w)
        return jnp.sum(x @ w)

    assert taken(lambda: program_of(loss, W), "use") == ["debug_callback", "dot_general"]
