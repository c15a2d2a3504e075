"""Figures that README and pages quote of the files in benchmarks/results.

A quote is a stretch of a page with `#` for each figure, and the values of the figures. A figure is its value, rounded
to the digits that the page gives. A page may break a stretch into lines.
"""

import json
import pathlib
import statistics

from remat_budget import dominating

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


USED = set()


def read(name):
    USED.add(name)
    return json.loads((RESULTS / f"{name}.json").read_text())


def ways(name, *keys):
    return {tuple(row.get(key, "") for key in ("style", "way", *keys)): row for row in read(name)["rows"]}


def percent(row, *columns):
    """The values of a row, of which shares are in percent."""
    shares = ("hidden", "inside", "across", "waiting", "beside")
    return [row[column] * (100 if column in shares else 1) for column in columns]


def lost(row):
    return 100 * row["exposed ms"] / row["step ms"]


def kernels_ms(row):
    return row.get("kernels ms", row["step ms"] - row["exposed ms"])


AOT = ways("aot_gpt", "prefetch")
STYLES = ("unrolled", "scan")
OURS = U, S = [AOT[style, "stage3", 1] for style in STYLES]
DEVICE = [AOT[style, "device", 1] for style in STYLES]
LATE = [AOT[style, "stage3", 0] for style in STYLES]
OTHERS = ("gspmd", "pipelined", "pipelined-unordered")
GSPMD, RIVAL, UNORDERED = ([AOT[style, way, 0] for style in STYLES] for way in OTHERS)
# With MaxText's options, which are for scanned layers.
RULES = [AOT["unrolled", "rules", 0], AOT["scan", "rules-options", 0]]
README = [
    (
        f"| {name} | #, # | #%, #% |",
        [row["all-in"] for row in rows] + [lost(row) for row in rows],
    )
    for name, rows in (
        ("zerojax, stage 3 (unrolled layers, scanned layers)", OURS),
        ("plain `jit` with sharded parameters", GSPMD),
        (f"rules for logical axes, as in MaxText, {RULES[0]['lines']} lines", RULES),
        (f"pipelined by hand, {RIVAL[0]['lines']} lines", RIVAL),
    )
]
README += [
    ("#% of the bytes that it sends are sent while matrix products run", [100 * min(row["hidden"] for row in OURS)]),
]


def kernels():
    """Milliseconds of the buckets' kernels, and their share of all kernels."""
    for found in read("aot_gpt_kernels")["styles"].values():
        rows = [row["ms"] for row in found["beyond"]["gathered"] if row["kernels"].startswith("buckets")]
        yield sum(rows), 100 * sum(rows) / found["ms"]["stage3"]


LAST = (UNORDERED[1], S)
(BUCKETS_U, SHARE_U), (BUCKETS_S, SHARE_S) = kernels()
FAR = ways("aot_gpt_64")
ON_64 = [FAR[style, "stage3"][key] for key in ("hidden", "all-in") for style in STYLES]
IN_FLOAT32 = ways("aot_gpt_attention", "attention", "precision")["unrolled", "stage3", "cudnn", "bf16"]
STAGE3 = [
    ("| 0 | #% | # |", percent(LATE[0], "hidden", "all-in")),
    ("| 1 | #% | # |", percent(U, "hidden", "all-in")),
    ("| 2 | #% | # |", percent(AOT["unrolled", "stage3", 2], "hidden", "all-in")),
    (
        "lengthens the gradient by # of # ms if the layers are unrolled, and by # of # ms if they are scanned",
        [row[key] for row in OURS for key in ("exposed ms", "step ms")],
    ),
    ("Kernels wait for # and # ms, mostly", [row["waits ms"] for row in OURS]),
    ("Without prefetch, they wait for # and # ms", [row["waits ms"] for row in LATE]),
    (
        "needs # times the parameters' bytes instead of # times, and its kernels take #% less time than ours",
        [GSPMD[0]["all-in"], U["all-in"], 100 - 100 * kernels_ms(GSPMD[0]) / kernels_ms(U)],
    ),
    (
        "kernels wait during #% and #% of the gradient's time, and without prefetch during #% and #%",
        [100 * row["waiting"] for row in OURS + LATE],
    ),
    (
        "On 64 H200s in 8 hosts, #% (unrolled) and #% (scan) of the bytes are hidden, and a device needs # and # times",
        [100 * x for x in ON_64[:2]] + ON_64[2:],
    ),
    ("In the scan, prefetch needs # MiB more memory", [S["temp MiB"] - LATE[1]["temp MiB"]]),
    ("without this option, #% of the bytes are hidden", percent(AOT["scan", "pipelined-uncombined", 0], "hidden")),
    ("Memory (# and #, against # and #)", [row["all-in"] for row in OURS + RIVAL]),
    ("*Passes*: # instead of #.", [RIVAL[1]["passes"], S["passes"]]),
    (
        "*Exposed time of the scan*: # instead of # ms, although its kernels wait longer (# instead of # ms)",
        [row[key] for key in ("exposed ms", "waits ms") for row in (RIVAL[1], S)],
    ),
    (
        "*Time of the scan without `program_order`*: # instead of # ms, for # times the memory instead of #. "
        "The rival's kernels take # instead of # ms.",
        [row["step ms"] for row in LAST] + [row["all-in"] for row in LAST] + [kernels_ms(row) for row in LAST],
    ),
    (
        "its exposed time is # ms with unrolled layers, and # ms with scanned layers and MaxText's options. "
        "Ours is # and # ms. Unrolled, its kernels take # instead of # ms, because it has no buckets. For this it "
        "needs # times the parameters' bytes instead of # times, and in the scan # times, where its kernels take # "
        "instead of # ms. Its # passes are",
        [row["exposed ms"] for row in RULES + OURS]
        + [kernels_ms(row) for row in (RULES[0], U)]
        + [row["all-in"] for row in (RULES[0], U, RULES[1])]
        + [kernels_ms(row) for row in (RULES[1], S)]
        + [RULES[0]["passes"]],
    ),
    ("keeps all weights (# passes, # times the memory)", [UNORDERED[0]["passes"], UNORDERED[0]["all-in"]]),
    ("cost more than 0.1 ms: # and # ms, which are #% and #%", [BUCKETS_U, BUCKETS_S, SHARE_U, SHARE_S]),
    ("So #% of 8967 MiB are exposed", [100 - 100 * IN_FLOAT32["hidden"]]),
]

COMPILED = {(row["style"], row["way"]): row["processor / plain"] for row in read("compile_rivals")["seconds"]}
STAGE3 += [
    (f"| {name} | # | # |", [COMPILED[style, f"{name} gradient"] for style in STYLES])
    for name in ("stage 3", "pipelined", "rules", "gathered", "gspmd")
]
STAGE3.append(("| stage 3, a whole step | # | # |", [COMPILED[style, "stage 3 step"] for style in STYLES]))

ACROSS = ("across", "waiting", "all-in")
HYBRID = ways("hybrid")
TENSOR = ways("tensor")
HOSTS = [
    (
        f"| {name} | {inside}, #% | #% | # | {inside}, #% | #% | # |",
        [x for row in (HYBRID[style, way] for style in STYLES) for x in percent(row, *columns)],
    )
    for name, way, inside, columns in (
        ("FSDP over all", "stage3", "-", ACROSS),
        ('`shard_axis="gpu"`', "hybrid", "#%", ("inside", *ACROSS)),
        ('`params_axis="gpu"`', "inside", "#%", ("inside", *ACROSS)),
    )
]
TENSOR_ROWS, ALONE = ([TENSOR[style, way] for style in STYLES] for way in ("tensor", "stage3"))
HOSTS += [
    ("bytes sent for parameters and gradients | #% | #% |", [100 * x["hidden"] for x in TENSOR_ROWS]),
    ("| memory of a device, divided by the bytes of the parameters | # | # |", [x["all-in"] for x in TENSOR_ROWS]),
    (
        "| memory of a device, divided by the ideal | # | # |",
        [2 * x["all-in"] / alone["all-in"] for x, alone in zip(TENSOR_ROWS, ALONE, strict=True)],
    ),
    ("| share of the step in which kernels wait | #% | #% |", [100 * x["waiting"] for x in TENSOR_ROWS]),
]

WIRED = ways("wire_aot")
CURVES = read("wire")
WIRE = [
    ("| without `wire=` | # | # |", [HYBRID["scan", way]["sent across MiB"] for way in ("stage3", "inside")]),
    (
        '| `Wire(gather="int8", reduce="int4")` | # | # |',
        [WIRED["scan", way]["sent across MiB"] for way in ("wire", "wire-inside")],
    ),
    ("| exact | # |", [CURVES["held out, bits per byte"]["as they are"]]),
]
WIRE += [
    (f"| {name} | # | {'-' if change < 0 else '+'}#% |", [CURVES["held out, bits per byte"][name], abs(100 * change)])
    for name, change in CURVES["beside as they are"].items()
    if change
]

LONG = {row["way"]: row for row in read("long_context")["rows"]}
LONG_CONTEXT = [
    (
        f"{name} | # | # | #{more} |",
        [LONG[way]["longest"], LONG[way]["longest"] / LONG["plain"]["longest"], LONG[way]["KB a token"]],
    )
    for name, way, more in (
        ("| plain", "plain", ""),
        ("| loss in tiles", "loss", ""),
        ("| loss and feed-forward layers in tiles", "loss+mlp", ""),
        ("activations))", "offload", ", and 262 of host memory"),
    )
]
LONG_CONTEXT += [
    ("Of the # KB per token", [LONG["loss+mlp"]["KB a token"]]),
    ("longest sequence takes # GB of host memory per device", [LONG["offload"]["host GB"]]),
]

SMALL = read("small_leaves")["cases"]["500x1536"]
PACKED, APART = SMALL["packed"], SMALL["a folder per leaf"]
RESTORED = [way["ratio"] for way in read("restore_memory")["ways"].values()]
IMPORTED = read("import_weights")["ways"]
added = lambda way: IMPORTED[way]["added"] / IMPORTED[way]["shards"]
CHECKPOINT = [
    ("a checkpoint has # files instead of #.", [PACKED["files"], APART["files"]]),
    (
        "saving takes # s instead of # s, and restoring # s instead of # s",
        [
            case["seconds"][what]["median"]
            for what in ("save: all, to the disk", "restore, verified")
            for case in (PACKED, APART)
        ],
    ),
    ("The peak was # to # × the bytes of the state", [min(RESTORED), max(RESTORED)]),
    ("the peak memory is # × the bytes of its shards", [added("import_params, stage 3")]),
    ("The peak would be # × if the whole model", [added("to host, then shard")]),
]

DISK, LARGE, ADAM = read("disk"), read("params_on_disk_large"), read("host_adam")
FEW = read("params_on_disk_throughput")["batches"]["few tokens"]
H100 = read("h100")
DETAIL = H100["offload in detail"]
none, device, host = (row["step_s"][0] for row in H100["rows"][:3])
median = lambda kind, what: statistics.median(FEW[kind][what])
OFFLOAD = [
    (
        "the same files | # (#–# in single rounds)",
        [DISK["store / plain"][key] for key in ("median", "least", "most")],
    ),
    (
        "three steps, loss #, #, #; resident at most # GB",
        [*LARGE["losses"], LARGE["peak_resident_bytes"] / 1e9],
    ),
    (
        "15 rounds each; per parameter # ns, torch # ns, plain XLA # ns",
        [ADAM["ns a parameter"][way]["median"] for way in ("zerojax, threads", "torch fused", "optax")],
    ),
    (
        "2 cores | # (#–#), the median of six processes",
        [ADAM["ns a parameter"]["zerojax, threads"]["to torch"], *ADAM["spread of to torch"]["zerojax, threads"]],
    ),
    ("One thread takes # times as long", [ADAM["ns a parameter"]["zerojax"]["to torch"]]),
    ("| the same step in memory | # | # |", [median(kind, "compute") for kind in ("seconds", "processor_seconds")]),
    ("| sequential reads and writes of the same bytes | # |", [median("seconds", "I/O")]),
    (
        "| the step on disk | # (# to #) | # |",
        [f(FEW["seconds"]["step"]) for f in (statistics.median, min, max)] + [median("processor_seconds", "step")],
    ),
    ("takes # times as long as sequential", [median("seconds", "step") / median("seconds", "I/O")]),
    ("750 ms (measured: # ms)", [1e3 * device]),
    ("| all | # ms; the passes alone take # ms", [1e3 * none, 1e3 * DETAIL["overlap"]["compute"][0]]),
    ("| no offload | # |", [none]),
    (
        '| `update="device"` | #, # × | the update alone takes # s, at # GB/s',
        [device, device / none, H100["rows"][1]["update_s"][0], H100["rows"][1]["achieved each way"] / 1e9],
    ),
    ('| `update="host"` | #, # × | the update alone takes # s', [host, host / none, H100["rows"][2]["update_s"][0]]),
    ("slow: # s per step", [host]),
]
CREATED = [min(row["create_s"] for row in H100["rows"][1:]), DETAIL["create"]["s"]]
PINNED = DETAIL["create"]["rss end"] - DETAIL["init_params"]["rss end"]
OFFLOAD += [
    ("`create` took # to # s and # GB of host memory", [*CREATED, PINNED]),
    ("bytes that the state needs: # GB for # GB on one H100", [PINNED, H100["rows"][1]["state_host"] / 1e9]),
]
TORCH = H100["torch"]
without, offloaded = TORCH["FSDP2"]["step_s"][0], TORCH["FSDP2, offload"]["step_s"][0]
SPEED = {kind: H100["speed"][f"1.3B, {kind}"]["ways"] for kind in ("XLA", "cuDNN")}
ms = lambda kind, way="stage 3": 1e3 * SPEED[kind][way]["median"]
GPU = [
    ("takes # ms per step with XLA's attention, and # ms with cuDNN's", [ms("XLA"), ms("cuDNN")]),
    ("# ms against # ms. With cuDNN's attention, stage 3 takes # ms", [1e3 * without, ms("XLA"), ms("cuDNN")]),
    ("took #% longer than plain optax", [100 * ms("cuDNN") / ms("cuDNN", "replicated") - 100]),
]
GPU += [("**Creating offloaded state took # to # s", CREATED)]
OFFLOAD += [("FSDP2 took # × as long with its offload", [offloaded / without])]
PLANNED = H100["plan"]["1.3B"]
README += [("differed from the measured peak by #%", [100 * PLANNED["planned_peak"] / PLANNED["peak_device"] - 100])]

SHAPES = read("public_shapes")["runs"]
OFFLOADED = [SHAPES[name] for name in ("MoE, offload", "MoE, offload, higher limit")]
COLUMNS = [*(SHAPES[name] for name in ("8B", "70B", "MoE, parallel", "MoE")), *OFFLOADED]
PLAN = [
    (f"| {name} | {' | '.join([f'#{unit}'] * 6)} |", [scale * run[key] for run in COLUMNS])
    for name, key, scale, unit in (
        ("bytes hidden", "hidden", 100, "%"),
        ("kernels, at least", "kernels s", 1, " s"),
        ("communication", "communication s", 1, " s"),
        ("kernels wait", "waiting s", 1, " s"),
        ("attention, not in kernels", "attention s", 1, " s"),
    )
]
PLAN += [
    ("| passes of gathers | # | # | # | # | # | # |", [run["passes"]["all-gather"] for run in COLUMNS]),
    (
        "| # of # GB | # of # GB | # of # GB | **#** of # GB | # of # GB | # of # GB |",
        [run[key] for run in COLUMNS for key in ("peak GB", "usable GB")],
    ),
    ("| host memory per GPU | | | | | # GB | # GB |", [run["host GB"] for run in OFFLOADED]),
    (f"| parameters | {' | '.join(['# billion'] * 6)} |", [run["parameters"] / 1e9 for run in COLUMNS]),
    ("without offload**, and kernels wait # s", [SHAPES["MoE, parallel"]["waiting s"]]),
    ("Gathers move #% of the parameters' bytes", [100 * SHAPES["MoE, parallel"]["passes"]["all-gather"]]),
    (
        "a peak of # GB. The plan said # GB, which is #% more. The step took # s. The plan's least time is # s, "
        "which is #% of this.",
        [
            *(PLANNED[key] / 1e9 for key in ("peak_device", "planned_peak")),
            *README[-1][1],
            PLANNED["step_s"][0],
            *(PLANNED["planned_s"] * x for x in (1, 100 / PLANNED["step_s"][0])),
        ],
    ),
]

EXPERT_WAYS = list(read("expert_shapes")["ways"].values())
EXPERTS = [
    (f"| {name} | # GB | # GB | # GB | # GB |", [value(way) for way in EXPERT_WAYS])
    for name, value in (
        ("temporary memory", lambda way: way["temporary"]),
        (
            "parameters and gradients, gathered and reduced",
            lambda way: sum(way["sent"][x] for x in ("all-gather", "reduce-scatter")),
        ),
        ("tokens, exchanged", lambda way: way["sent"]["all-to-all"]),
    )
]
EXPERTS += [("over all 64: the peak is # GB", [SHAPES["MoE, parallel"]["peak GB"]])]

PEERS = read("peers")["ways"]


def of_peer(name):
    """The cells of one way: milliseconds, overheads and MiB, unrolled and scanned."""
    cells, values = [], []
    for style in STYLES:
        row = PEERS[style][name]
        spread = ("median", "least", "most") if "overhead" in row else ()
        cells += ["#", "# (#–#)" if spread else "", "#" if spread else "", "#"]
        values += [1e3 * row["seconds"]["median"], *(row["overhead"][key] for key in spread)]
        values += [row["CPU overhead"]["median"]] if spread else []
        values += [row["MiB a worker"]["resident"]]
    return f"| `{name}` | {' | '.join(cells)} |", values


PEERS_PAGE = [of_peer(name) for name in PEERS["scan"]]
PEERS_PAGE += [
    (
        "is # MiB (unrolled) and # MiB (scan), and that of `gspmd-tuned` is # and # MiB",
        [PEERS[style][way]["MiB a worker"]["compiled"] for way in ("zerojax", "gspmd-tuned") for style in STYLES],
    ),
    (
        "eager FSDP2 took # ms per step of a GPT with 1.3 billion parameters. zerojax at stage 3 took # ms with XLA's "
        "attention, so FSDP2 was faster, and # ms with cuDNN's.",
        [1e3 * without, ms("XLA"), ms("cuDNN")],
    ),
    (
        "FSDP2's step took # times as long as without (1.3 billion parameters), and that of zerojax # times",
        [offloaded / without, device / none],
    ),
]

TRACED = [row for name in ("compile", "compile_small") for row in read(name)["seconds"] if "rows / trace" in row]
FOLLOWED = [100 * row["rows / trace"] for row in TRACED]
DESIGN = [
    ("The analysis takes # to #% of the time of tracing", [min(FOLLOWED), max(FOLLOWED)]),
    (
        "both views hide the same bytes: #% if its layers are unrolled, and #% if they are scanned",
        [100 * row["hidden"] for row in DEVICE],
    ),
]

FP8_ROWS = ways("fp8", "size")
OF_FP8 = ("passes", "hidden", "float8")
FP8 = [
    (
        f"| {name} | bfloat16 | # | #% | | | | FP8 | # | #% | #% |",
        [(1 if key == "passes" else 100) * row[key] for row, keys in rows for key in keys],
    )
    for name, size in (
        ("1.3 billion parameters, width 2048", "gpu"),
        ("GPT-3 13B: 40 layers, width 5120, 50257 tokens", "13B"),
    )
    for rows in [((FP8_ROWS["scan", "stage3", size], OF_FP8[:2]), (FP8_ROWS["scan", "fp8", size], OF_FP8))]
]

UPDATES = {tuple(row[x] for x in ("optimizer", "matrix_updates")): row for row in read("matrix_updates")["rows"]}
MUON = [
    (f'| `"{how}"`, {name} | # GB | # ms | # |', [row["sent GB"], row["products ms"], row["all-reduces"]])
    for optimizer, how, name in (
        ("muon", "sharded", "Muon for the embedding too (optax's default)"),
        ("muon", "auto", "Muon for the embedding too"),
        ("muon-hidden", "sharded", "embedding with Adam"),
        ("muon-hidden", "auto", "embedding with Adam"),
    )
    for row in [UPDATES[optimizer, how]]
]
OF_SCAN = [UPDATES["muon-all", how][key] for how in ("auto", "sharded") for key in ("sent GB", "products ms")]
MUON += [("the update with owners sends # GB and takes # ms. Without owners it sends # GB and takes # ms.", OF_SCAN)]
HIDDEN = [UPDATES["muon-hidden", how][key] for key in ("sent GB", "products ms") for how in ("auto", "sharded")]
DESIGN += [("the update with owners sends # GB instead of # GB, and its products take # ms instead of # ms", HIDDEN)]

MODELS = read("remat_budget")["models"]
FIT = [
    (
        f"| {name} |" + " #, # |" * len(found["policies"]),
        [
            dominating(found, policy)[key] / theirs[key]
            for policy, theirs in found["policies"].items()
            for key in ("memory", "flops")
        ],
    )
    for name, found in MODELS.items()
]

LAST = read("narrow_state")["last"]
TITLES = {"GPT, AdamW": "adamw", "GPT, Adam with additive decay": "adam, additive decay", "GPT, Lion": "lion"}
NARROW_STATE = [
    (
        f"| {title} |" + " # (#) |" * len(LAST[run]),
        [x for row in LAST[run].values() for x in (row["mean"], row["range"])],
    )
    for title, run in TITLES.items()
]
SMALL = [x * 1e12 for row in list(LAST["adam, regression"].values())[:-1] for x in (row["mean"], row["range"])]
NEAREST = [LAST["adam, regression"]["bfloat16, nearest"][key] * 1e6 for key in ("mean", "range")]
NARROW_STATE.append(("| regression, Adam |" + " #e-12 (#e-12) |" * 4 + " #e-6 (#e-6) |", SMALL + NEAREST))
NARROW_UPDATE = read("narrow_update")
OF_BYTES = ("wide", "bfloat16", "int8", "int8, compensated", "int8, rounded", "int8, in chunks")
OF_TIME = ("bfloat16", "int8", "float8", "int8, compensated", "int8, rounded")
for title in ("AdamW", "Lion"):
    sizes, times = (NARROW_UPDATE[key][title.lower()] for key in ("bytes", "seconds"))
    NARROW_STATE += [
        (f"| {title} |" + " # |" * len(OF_BYTES), [sizes[way]["update"] for way in OF_BYTES]),
        (f"| {title} | 1 x |" + " # x |" * len(OF_TIME), [times[way]["times wide"] for way in OF_TIME]),
    ]

QUOTES = {
    "README.md": README,
    "docs/checkpoint.md": CHECKPOINT,
    "docs/design.md": DESIGN,
    "docs/experts.md": EXPERTS,
    "docs/fit.md": FIT,
    "docs/fp8.md": FP8,
    "docs/gpu.md": GPU,
    "docs/hosts.md": HOSTS,
    "docs/long_context.md": LONG_CONTEXT,
    "docs/muon.md": MUON,
    "docs/narrow_state.md": NARROW_STATE,
    "docs/offload.md": OFFLOAD,
    "docs/peers.md": PEERS_PAGE,
    "docs/plan.md": PLAN,
    "docs/stage3.md": STAGE3,
    "docs/wire.md": WIRE,
}
