"""What `collectives` and `overlap` read off programs that jax compiled, and off the forms HLO text can take."""

import math
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zerojax.inspect.compiled_collectives import KINDS, Collective, CompiledCollectives, collectives
from zerojax.inspect.hlo import HloArray
from zerojax.inspect.roofline import overlap

CUT, WHOLE = P("data"), P()
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)  # local when cut: (8, 64), 2048 bytes; whole: 16384 bytes
STACK = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)
FLAG = jax.ShapeDtypeStruct((), jnp.bool_)
PART, FULL = 2048, 16384


def compile_on_cpu(f, in_specs, out_specs, *args):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    cut = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(cut).lower(*args).compile()


def gather(w):
    return lax.all_gather(w, "data", axis=0, tiled=True)


def mixed(x):
    return jnp.tanh(lax.psum(x, "data"))


def scanned(ws, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ gather(w)), None), x, ws)[0]


def nested(x):
    inner = lambda c: lax.scan(lambda c, _: (mixed(c), None), c, None, length=3)[0]
    return lax.scan(lambda c, _: (jnp.sin(inner(c)), None), x, None, length=5)[0]


def bounded(x):
    return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, mixed(c[1])), (0, x))[1]


def unbounded(x):
    """A scan of 5 inside a loop that ends when the data says so."""
    turn = lambda c: lax.scan(lambda c, _: (mixed(c), None), c, None, length=5)[0]
    return lax.while_loop(lambda c: jnp.sum(c) < 7.0, turn, x)


def branching(flag, x):
    return lax.cond(flag, lambda x: lax.psum(x, "data"), lambda x: gather(x)[:8] * 2, x)


def gradient(ws, x):
    return jax.grad(lambda ws: jnp.sum(scanned(ws, x)))(ws)


def ring(x):
    return lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])


STACK_CUT = P(None, "data")
PROGRAMS = {
    "psum": ((lambda x: lax.psum(x, "data"), CUT, WHOLE, SQUARE), [("all-reduce", "f32", PART, 1)]),
    "psum_scatter": (
        (lambda x: lax.psum_scatter(x, "data", tiled=True), WHOLE, CUT, SQUARE),
        [("reduce-scatter", "f32", FULL, 1)],
    ),
    "all_gather": ((gather, CUT, WHOLE, SQUARE), [("all-gather", "f32", FULL, 1)]),
    "all_to_all": (
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), WHOLE, CUT, SQUARE),
        [("all-to-all", "f32", FULL, 1)],
    ),
    "ppermute": ((ring, CUT, CUT, SQUARE), [("collective-permute", "f32", PART, 1)]),
    "scan": ((scanned, (STACK_CUT, CUT), CUT, STACK, SQUARE), [("all-gather", "f32", FULL, 5)]),
    "gradient of a scan": (
        (gradient, (STACK_CUT, CUT), STACK_CUT, STACK, SQUARE),
        [("all-gather", "f32", FULL, 5), ("reduce-scatter", "f32", FULL, 5)],
    ),
    "nested scan": ((nested, CUT, CUT, SQUARE), [("all-reduce", "f32", PART, 15)]),
    "while": ((bounded, CUT, CUT, SQUARE), [("all-reduce", "f32", PART, 7)]),
    "cond": (
        (branching, (WHOLE, CUT), CUT, FLAG, SQUARE),
        [("all-gather", "f32", FULL, 1), ("all-reduce", "f32", PART, 1)],
    ),
    "jit call": (
        (lambda x: jax.jit(mixed)(jax.jit(mixed)(x)), CUT, WHOLE, SQUARE),
        [("all-reduce", "f32", PART, 1)] * 2,
    ),
    "nothing": ((jnp.tanh, CUT, CUT, SQUARE), []),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_collective_of_a_compiled_program_is_found_with_its_size_and_count(name):
    program, expected = PROGRAMS[name]
    found = collectives(compile_on_cpu(*program))
    assert sorted((c.kind, c.dtype, c.bytes, c.times) for c in found) == expected
    assert all(c.elements * 4 == c.bytes and c.group_size == 8 for c in found)
    assert all(c.conditional == (name == "cond") for c in found)


def test_a_loop_of_unknown_trip_count_is_reported():
    found = collectives(compile_on_cpu(unbounded, CUT, CUT, SQUARE))
    assert [(c.times, c.times_if_once) for c in found] == [(None, 5)]
    with pytest.raises(ValueError, match="unknown_once=True"):
        found.moved()
    assert found.moved(unknown_once=True).bytes == 5 * PART
    assert "1 run in loops of unknown trip count" in str(found)


def test_a_collective_says_where_it_comes_from():
    (found,) = collectives(compile_on_cpu(bounded, CUT, CUT, SQUARE))
    assert found.op_name.endswith("/psum")
    assert re.search(r"test_hlo_collectives\.py:\d+ in mixed$", found.frames[0])
    assert any(frame.endswith("in bounded") for frame in found.frames[1:])


def test_totals_multiply_executions_and_choose_kinds():
    found = collectives(compile_on_cpu(*PROGRAMS["gradient of a scan"][0]))
    both, gathers = found.moved(), found.moved("all-gather")
    assert both == (10 * FULL // 4, 10 * FULL, 10 * FULL * 7 // 8, 10 * FULL // 4 * 7 // 8)
    assert gathers == (5 * FULL // 4, 5 * FULL, 5 * FULL * 7 // 8, 5 * FULL // 4 * 7 // 8)
    assert [c.kind for c in found.of("reduce-scatter")] == ["reduce-scatter"]
    with pytest.raises(ValueError, match=r"'allgather'.*all-gather"):
        found.moved("allgather")


def test_the_table_shows_totals_and_says_what_it_assumes():
    table = str(collectives(compile_on_cpu(*PROGRAMS["scan"][0])))
    assert table.splitlines()[1].split() == ["all-gather", "f32", "1", "5", "20,480", "81.9", "kB", "71.7", "kB"]
    assert "counted" not in table
    assert "2 are in a branch of a conditional" in str(collectives(compile_on_cpu(*PROGRAMS["cond"][0])))
    assert (str(CompiledCollectives()), CompiledCollectives().hidden_share) == ("no collectives", 1.0)


RING = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"), 7 / 8)
RING |= {"all-reduce": 14 / 8, "collective-permute": 1, "collective-broadcast": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_sent_are_those_of_a_ring(kind):
    c = Collective(
        kind, (HloArray("bf16", (64,)), HloArray("bf16", (0, 3))), (*range(8),), 1, 1, False, "main", "c", "", ()
    )
    assert (c.sent, c.sent_elements) == (128 * RING[kind], 64 * RING[kind])
    alone = Collective(kind, (HloArray("bf16", (64,)),), (0,), 1, 1, False, "main", "c", "", ())
    assert alone.sent == 0


DTYPES = {"f32": 4, "bf16": 2, "s64": 8, "c128": 16, "pred": 1, "f8e4m3fn": 1, "s4": 0.5, "f4e2m1fn": 0.5, "token": 0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_every_dtype(dtype):
    assert HloArray(dtype, (3, 5)).bytes == math.ceil(15 * DTYPES[dtype])


def test_a_dtype_that_is_not_known_is_not_guessed():
    with pytest.raises(ValueError, match="'floaty'"):
        HloArray("floaty", (3,)).bytes  # noqa: B018


def hlo(body, *computations, header="is_scheduled=true, num_partitions=8"):
    """A program; %p, %q and %r are there for the taking, and so are the computations."""
    parameters = "%p = f32[8]{0} parameter(0)\n%q = bf16[16]{0} parameter(1)\n%r = f32[64]{0} parameter(2)\n"
    blocks = [*computations, "ENTRY %main (p: f32[8], q: bf16[16], r: f32[64]) -> f32[] {\n" + parameters + body]
    text = [f"HloModule m, {header}\n"]
    for block in blocks:
        first, *lines = textwrap.dedent(block).strip().splitlines()
        text.append("\n".join([first, *("  " + line.strip() for line in lines), "}\n"]))
    return "\n".join(text)


ALL = "replica_groups=[1,8]<=[8]"
FORMS = {
    "synchronous": (f"%c = f32[64]{{0}} all-gather(%p), {ALL}, dimensions={{0}}", [("all-gather", "f32", 64)]),
    "native gather": (
        f"%s = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%p), {ALL}\n%d = f32[64]{{0}} all-gather-done(%s)",
        [("all-gather", "f32", 64)],
    ),
    "native gather, combined": (
        f"%s = ((f32[8]{{0}}, bf16[16]{{0}}), (f32[64]{{0}}, bf16[128]{{0}})) "
        f"all-gather-start(%p, /*index=1*/%q), {ALL}\n"
        "%d = (f32[64]{0}, bf16[128]{0}) all-gather-done(%s)",
        [("all-gather", "bf16+f32", 192)],
    ),
    "gather in memory space and tiles": (
        f"%s = ((f32[8]{{0:T(128)S(1)}}), f32[64]{{0:T(8,128)(2,1)S(1)}}, u32[]{{:S(2)}}) all-gather-start(%p), {ALL}\n"
        "%d = f32[64]{0:T(8,128)(2,1)S(1)} all-gather-done(%s)",
        [("all-gather", "f32", 64)],
    ),
    "native reduce, combined": (
        f"%s = (f32[8]{{0}}, f32[64]{{0}}) all-reduce-start(%p, %r), {ALL}, to_apply=%add\n"
        "%d = (f32[8]{0}, f32[64]{0}) all-reduce-done(%s)",
        [("all-reduce", "f32", 72)],
    ),
    "generic reduce": (
        f"%s = ((f32[8]{{0}}), f32[8]{{0}}) all-reduce-start(%p), {ALL}, to_apply=%add\n"
        "%d = f32[8]{0} all-reduce-done(%s)",
        [("all-reduce", "f32", 8)],
    ),
    "combined scatter": (
        f"%c = (f32[8]{{0}}, bf16[2]{{0}}) reduce-scatter(%r, %q), {ALL}, dimensions={{0}}, to_apply=%add",
        [("reduce-scatter", "bf16+f32", 80)],
    ),
    "permute with context": (
        "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}\n"
        "%d = f32[8]{0} collective-permute-done(%s)",
        [("collective-permute", "f32", 8)],
    ),
    "exchange by parts": (
        f"%c = (f32[8]{{0}}, f32[8]{{0}}) all-to-all(%p, %p), {ALL}\n%g = f32[8]{{0}} get-tuple-element(%c), index=1",
        [("all-to-all", "f32", 16)],
    ),
    "ragged exchange": (
        f"%c = f32[64]{{0}} ragged-all-to-all(%r, %r, %p, %p, %p, %p), {ALL}",
        [("ragged-all-to-all", "f32", 64)],
    ),
    "broadcast": (f"%c = f32[8]{{0}} collective-broadcast(%p), {ALL}", [("collective-broadcast", "f32", 8)]),
    "operands with their shapes": (
        f"%c = (f32[8], f32[64]) all-reduce(f32[8]{{0:T(8,128)(2,1)}} %p, f32[64]{{0}} %r), {ALL}, to_apply=%add",
        [("all-reduce", "f32", 72)],
    ),
    "names without a sign": (
        "w = f32[8,4]{1,0} broadcast(p)\n"
        f"c = (f32[1,4], f32[8]) reduce-scatter(f32[8,4]{{1,0}} w, f32[64]{{0}} r), {ALL}",
        [("reduce-scatter", "f32", 96)],
    ),
    "dims with a bound": (f"%c = f32[<=64]{{0}} all-gather(%p), {ALL}", [("all-gather", "f32", 64)]),
}
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
    %a = f32[] parameter(0)
    %b = f32[] parameter(1)
    ROOT %s = f32[] add(%a, %b)"""


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_collective_is_read_once(form):
    body, expected = FORMS[form]
    assert [(c.kind, c.dtype, c.elements) for c in collectives(hlo(body, ADD))] == expected


EIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
GROUPS = {
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": (0, 1),
    "replica_groups={{0,2,4,6},{1,3,5,7}}": (0, 2, 4, 6),
    "replica_groups={}": EIGHT,
    "channel_id=1": EIGHT,
    "replica_groups=[1,8]<=[8]": EIGHT,
    "replica_groups=[4,2]<=[2,4]T(1,0)": (0, 4),
    "replica_groups=[2,4]<=[2,2,2]T(0,2,1)": (0, 2, 1, 3),
    "replica_groups=mesh['data'=8] {'data'}": EIGHT,
    "replica_groups=mesh['data'=4,'model'=2] {'model'}": (0, 1),
    "replica_groups=mesh['data'=4,'model'=2] {'data'}": (0, 2, 4, 6),
    "replica_groups=mesh['data'=4,'model'=2] {'data','model'}": EIGHT,
    "replica_groups=mesh['data'=4,'model'=2] {'data':(2)2,'model'}": (0, 1, 2, 3),
    "replica_groups=mesh['data'=4,'model'=2] {'data':(1)2}": (0, 4),
    "source_target_pairs={{0,1},{1,2},{2,0}}": (0, 1, 2),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_first_group_in_every_notation(groups):
    (found,) = collectives(hlo(f"%c = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add", ADD))
    assert (found.group, found.group_size) == (GROUPS[groups], len(GROUPS[groups]))


WRAPPED = f"""%inner (x: f32[8]) -> f32[8] {{
    %x = f32[8]{{0}} parameter(0)
    ROOT %wrapped = f32[8]{{0}} all-reduce(%x), {ALL}, to_apply=%add"""


@pytest.mark.parametrize(
    "wrapper",
    [
        "%s = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%inner\n"
        "%u = ((f32[8]{0}), f32[8]{0}, u32[]) async-update(%s)\n%d = f32[8]{0} async-done(%u)",
        "%s = ((f32[8]{0}), f32[8]{0}) fusion-start(%p), kind=kCustom, calls=%inner\n%d = f32[8]{0} fusion-done(%s)",
        "%s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), calls=%inner\n%d = f32[8]{0} all-reduce-done(%s)",
        "%d = f32[8]{0} fusion(%p), kind=kCustom, calls=%inner",
        "%d = f32[8]{0} call(%p), to_apply=%inner",
        '%d = f32[8]{0} custom-call(%p), custom_call_target="x", called_computations={%inner}',
    ],
)
def test_a_wrapped_collective_counts_once(wrapper):
    assert [(c.name, c.times, c.bytes) for c in collectives(hlo(wrapper, ADD, WRAPPED))] == [("wrapped", 1, 32)]


def test_every_way_to_a_computation_counts_and_none_counts_nothing():
    call = "%{} = f32[8]{{0}} call(%p), to_apply=%inner\n"
    assert [c.times for c in collectives(hlo(call.format("d") + call.format("e"), ADD, WRAPPED))] == [2]
    assert collectives(hlo("%d = f32[8]{0} copy(%p)", ADD, WRAPPED)) == ()


def test_words_in_metadata_are_not_read():
    words = 'metadata={op_name="all-reduce(%p), calls=%inner"}'
    assert collectives(hlo(f"%f = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%add, {words}", ADD, WRAPPED)) == ()


@pytest.mark.parametrize(("note", "trips"), [(', backend_config={"known_trip_count":{"n":"7"}}', 7), ("", None)])
def test_a_condition_runs_once_more_than_the_body(note, trips):
    reduce = f"f32[8]{{0}} all-reduce(%x), {ALL}, to_apply=%add"
    body = f"""%body (x: f32[8]) -> f32[8] {{
        %x = f32[8]{{0}} parameter(0)
        ROOT %in_body = {reduce}"""
    condition = f"""%condition (x: f32[8]) -> pred[] {{
        %x = f32[8]{{0}} parameter(0)
        %in_condition = {reduce}
        ROOT %go = pred[] custom-call(%in_condition)"""
    entry = f"ROOT %loop = f32[8]{{0}} while(%p), condition=%condition, body=%body{note}"
    times = {c.name: c.times for c in collectives(hlo(entry, ADD, body, condition))}
    assert times == {"in_body": trips, "in_condition": None if trips is None else trips + 1}


def test_what_is_no_compiled_program_is_refused_with_the_remedy():
    lowered = jax.jit(jnp.tanh).lower(SQUARE)
    for given in (lowered, jax.jit(jnp.tanh), 3):
        name = type(given).__name__
        with pytest.raises(TypeError, match=rf"a {name}\. Give what jax\.jit\(f\)\.lower\(\.\.\.\)\.compile"):
            collectives(given)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives(lowered.as_text())
    with pytest.raises(ValueError, match=r"truncated: all-reduce 'c' takes 'gone'"):
        collectives(hlo("%c = f32[8]{0} all-reduce(%gone)"))


TURNS_3 = '{"known_trip_count":{"n":"3"}}'
START = f"%s = ((f32[64]{{0}}), f32[8]{{0}}) reduce-scatter-start(%r), {ALL}, to_apply=%add"
DONE = "%d = f32[8]{0} reduce-scatter-done(%s)"
DOT = "%m = f32[] dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
PRODUCT = f"%product (p: f32[8]) -> f32[] {{\n%p = f32[8]{{0}} parameter(0)\n{DOT}\nROOT %n = f32[] dot(%m, %m)"
PLAIN = "%plain (p: f32[8]) -> f32[8] {\n%p = f32[8]{0} parameter(0)\nROOT %n = f32[8]{0} negate(%p)"
CONDITION = "%condition (p: f32[8]) -> pred[] {\n%p = f32[8]{0} parameter(0)\nROOT %t = pred[] constant(true)"
BETWEEN = {
    "nothing": ("%n = f32[8]{0} negate(%p)", 0),
    "dot": (DOT, 1),
    "two dots": (DOT + "\n%m2 = f32[] dot(%p, %p)", 2),
    "convolution": ("%m = f32[8]{0} convolution(%p, %p), window={size=1}", 1),
    "fusion with a dot": ("%f = f32[] fusion(%p), kind=kOutput, calls=%product", 1),
    "Triton product": (
        "%gemm_fusion_dot.1 = f32[] fusion(%p), kind=kCustom, calls=%product, "
        'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}',
        1,
    ),
    "custom fusion without a dot": ("%f = f32[8]{0} fusion(%gemm_fusion_dot.1), kind=kCustom, calls=%plain", 0),
    "cuBLAS product": ('%m = f32[8]{0} custom-call(%p), custom_call_target="__cublas$lt$matmul"', 1),
    "cuDNN attention": ('%m = f32[8]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"', 1),
    "cuBLAS solve": ('%m = f32[8]{0} custom-call(%p), custom_call_target="__cublas$triangularSolve"', 0),
    "cuDNN norm": ('%m = f32[8]{0} custom-call(%p), custom_call_target="__cudnn$norm"', 0),
    "call": ("%f = f32[] call(%p), to_apply=%product", 2),
    "loop of 3": ("%f = f32[8]{0} while(%p), condition=%condition, body=%product, backend_config=" + TURNS_3, 6),
    "loop of unknown trip count": ("%f = f32[8]{0} while(%p), condition=%condition, body=%product", 2),
    "branch": ("%f = f32[] conditional(%p, %p, %p), branch_computations={%product, %product}", 2),
    "branch that may have none": (
        "%f = f32[] conditional(%p, %p, %p), true_computation=%product, false_computation=%plain",
        0,
    ),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_products_between_start_and_done_are_counted(between):
    body, products = BETWEEN[between]
    text = hlo(
        f"%m0 = f32[] dot(%p, %p)\n{START}\n{body}\n{DONE}\n%m9 = f32[] dot(%p, %p)", ADD, PRODUCT, PLAIN, CONDITION
    )
    found = overlap(text)
    assert [c.products for c in found] == [products]
    assert found.hidden_share == (1.0 if products else 0.0)


@pytest.mark.parametrize(
    ("body", "products"),
    [
        (f"%c = f32[8]{{0}} reduce-scatter(%r), {ALL}, to_apply=%add\n{DOT}", 0),
        (START + ', backend_config={"collective_backend_config":{"is_sync":true}}\n' + DOT + "\n" + DONE, 0),
        (START + ', backend_config={"collective_backend_config":{"is_sync":false}}\n' + DOT + "\n" + DONE, 1),
        (f"{START}\n{DOT}", 1),  # the done stands elsewhere: it flies at least to the end
        (f"%s = ((f32[8]), f32[8]) fusion-start(%p), calls=%inner\n{DOT}\n%d = f32[8] fusion-done(%s)", 1),
        (
            "%s = ((f32[8]), f32[8]) async-start(%p), calls=%inner\n"
            f"%u = () async-update(%s)\n{DOT}\n%d = () async-done(%u)",
            1,
        ),
        (f"%d = f32[8]{{0}} call(%p), to_apply=%inner\n{DOT}", 0),
        (
            f"%s = ((f32[8]), f32[8]) fusion-start(%p), calls=%inner\n{DOT}\n%d = f32[8] fusion-done(%s)\n"
            "%e = f32[8]{0} fusion(%p), calls=%inner",
            0,  # of two ways to one collective the exposed one counts
        ),
        (
            "%e = f32[8]{0} fusion(%p), calls=%inner\n"
            f"%s = ((f32[8]), f32[8]) fusion-start(%p), calls=%inner\n{DOT}\n%d = f32[8] fusion-done(%s)",
            0,
        ),
    ],
)
def test_only_what_is_in_flight_hides(body, products):
    assert [c.products for c in overlap(hlo(body, ADD, WRAPPED))] == [products]


def test_hidden_share_weighs_bytes_by_executions():
    turn = f"""%turn (r: f32[64]) -> f32[64] {{
        %r = f32[64]{{0}} parameter(0)
        %p = f32[8]{{0}} slice(%r), slice={{[0:8]}}
        {START}
        {DOT}
        {DONE}
        ROOT %g = f32[64]{{0}} copy(%r)"""
    entry = f"""%c = f32[64]{{0}} all-gather(%p), {ALL}
        %w = f32[64]{{0}} while(%r), condition=%condition, body=%turn, backend_config={TURNS_3}"""
    found = overlap(hlo(entry, ADD, turn, CONDITION))
    assert (found.moved().bytes, found.hidden_share) == (4 * 256, 0.75)
    assert (found.of("all-gather").hidden_share, found.of("reduce-scatter").hidden_share) == (0.0, 1.0)
    assert [c.name for c in found.exposed] == ["c"]


def test_overlap_of_a_text_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        overlap(hlo(DOT, header="num_partitions=8"))
