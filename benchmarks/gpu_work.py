"""Run one piece of `gpu.py` in a separate process: the check of numbers, or one configuration of one part.

    python gpu_work.py JSON OUT

JSON has `work` and its arguments. Each result is written to OUT as soon as it is known, so that a process that is
stopped or killed leaves its earlier results.
"""

import argparse
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import step
import yardstick
from gpu_common import batch_of, data_mesh, peak_device, peak_rss, shapes_of, spread, timed_steps
from gpu_options import budget, disk, fp8, mocked, torch_steps
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Offload, Precision, Tuning, plan, report, zero_shard
from zerojax.doctor import bandwidths, timed
from zerojax.gpus.devices import Device, Topology
from zerojax.layout.leaf import is_chunked
from zerojax.offload.host import available_bytes, host_sharding, to_memory
from zerojax.streaming.stores import store_for
from zerojax.train.streamed_step import resident_state

CHECKED = [(stage, "fp32", name) for stage in (3, 2, 1) for name in ("none", "host/device", "host/host")]
CHECKED[3:3] = [(3, "fp32", "host/device half"), (3, "fp32", "disk/device")]
CHECKED += [(3, "bf16", name) for name in ("none", "host/device", "host/host")]
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "OUT_OF_MEMORY")


class Notes(dict):
    """Figures that are written to a file whenever some are added."""

    def __init__(self, path):
        super().__init__()
        self._path = pathlib.Path(path)

    def add(self, **figures):
        self.update(figures)
        self._path.write_text(json.dumps(self))


def main():
    given, notes = json.loads(sys.argv[1]), Notes(sys.argv[2])
    works = (probe, check, speed, planned, train, activations, blocking, torch_steps, mocked, fp8, budget, disk)
    work = {work.__name__: work for work in works}[given.pop("work")]
    try:
        work(notes, **given)
    except Exception as error:
        memory = isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY)
        at = f" while {notes['doing']}" if "doing" in notes else ""
        notes.add(
            status=("out of memory" if memory else "failed") + at, error=f"{type(error).__name__}: {str(error)[:600]}"
        )
    notes.add(peak_rss=peak_rss())


def probe(notes, *, link_bytes):
    """The hardware, the versions, and the link with nothing else on it."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "optax", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin")
    stats = device.memory_stats() or {}
    notes.add(
        platform=device.platform,
        devices=[device.device_kind, jax.device_count()],
        device_limit=stats.get("bytes_limit"),
        host_available=available_bytes(),
        cores=os.cpu_count(),
        python=platform.python_version(),
        versions={name: version for name in names if (version := version_of(name))},
        backend=getattr(device.client, "platform_version", "").replace("\n", ", "),
    )
    size = link_bytes["cpu" if device.platform == "cpu" else "gpu"]
    sizes = {"large": size, "a chunk": min(32 << 20, size)}
    notes.add(link={name: {"bytes": size} | link(data_mesh(), size) for name, size in sizes.items()})
    text, measured = bandwidths()
    notes.add(library_measures={"text": text} | measured)


def version_of(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def link(mesh, size):
    """Bytes per second of one device, all asking at once: to it, from it, and each way with both at once."""
    on_host = jax.device_put(np.ones(mesh.size * size // 4, np.float32), host_sharding(mesh, PartitionSpec("data")))
    on_device, host = to_memory(on_host, "device"), on_host.sharding.memory_kind
    both = timed(lambda: (to_memory(on_host, "device"), to_memory(on_device, host)))
    return {
        "H2D": size / timed(lambda: to_memory(on_host, "device")),
        "D2H": size / timed(lambda: to_memory(on_device, host)),
        "each of both": size / both,
    }


def train(notes, *, model, mode, steps, link_bytes):
    """One model with one way of offloading: figures of its making, its steps and its update."""
    size = {**model, "dtype": jnp.bfloat16}
    init, loss, (rows, length) = yardstick.build(size.pop("base"), scan=True, **size)
    offload = Offload(optimizer="host", **mode) if mode else None
    tx = zero_shard(optax.adamw(1e-4), stage=3, precision=Precision.bf16(), offload=offload)
    count, begin = jax.device_count(), time.perf_counter()
    vocabulary = model.get("vocabulary", yardstick.SIZES[model["base"]].vocabulary)
    tokens = jax.random.randint(jax.random.key(1), (rows * count, length), 0, vocabulary)
    batch = jax.device_put(tokens, NamedSharding(tx.config.mesh, PartitionSpec("data")))

    notes.add(doing="making the state")
    params = narrowed(tx.init_params(init, jax.random.key(0)))
    # `create` makes master weights of these values, with offload or without: all modes begin from the same.
    state = tx.create(params)
    del params
    jax.block_until_ready(jax.tree.leaves(state))
    found = report(state)
    notes.add(
        parameters=sum(math.prod(leaf.shape) for leaf in state.plan.layout.params),
        tokens_a_step=tokens.size,
        create_s=time.perf_counter() - begin,
        create_peak_device=peak_device(),
        state_device=found.total,
        state_host=sum(found.host.values()),
        update=offload.update if offload else "",
    )

    notes.add(doing="compiling and the first steps")
    taken = tx.train_step(loss)
    begin = time.perf_counter()
    losses = []
    for _ in range(2):
        state, metrics = taken(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(jax.tree.leaves(state))
    notes.add(first_steps_s=time.perf_counter() - begin, trains=bool(np.isfinite(losses).all()))

    notes.add(doing="the timed steps")
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        state, metrics = taken(state, batch)
        jax.block_until_ready((metrics, jax.tree.leaves(state)))
        seconds.append(time.perf_counter() - begin)
        notes.add(step_s=spread(seconds), peak_device=peak_device(), **{"tokens/s": tokens.size / spread(seconds)[0]})
    notes.add(losses=[*losses, float(metrics["loss"])])
    if offload and steps > 1 and state.plan.offloaded:
        notes.add(doing="the update alone")
        state, seconds = update_seconds(taken, tx, state, batch, steps)
        crossing = bytes_across(taken, state)
        notes.add(update_s=spread(seconds), bytes_to_device=crossing[0], bytes_to_host=crossing[1])
        shapes = shapes_of(state)
        del state, metrics
        notes.add(doing="the link alone")
        notes.add(link=link(tx.config.mesh, link_bytes))
        notes.add(**share(notes))
        state = shapes
    if steps > 1:
        notes.add(doing="asking the compiler for its figures")
        memory = taken.lower(shapes_of(state), batch).compile().memory_analysis()
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        notes.add(compiled_device=memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs)
    notes.add(status="ran")
    notes.pop("doing")


def narrowed(params):
    """Parameters in the type they are computed in, the wider ones freed one by one.

    `create` copies its arguments, while it makes the optimizer's state: at 8B this saves 2 x 16 GB. Master weights are
    made of the rounded values. A run from values that were not rounded has other losses, by 2% after six steps.
    """

    def one(x):
        narrow = jax.block_until_ready(x.astype(jnp.bfloat16))
        x.delete()
        return narrow

    return jax.tree.map(one, params)


def update_seconds(taken, tx, state, batch, steps):
    """The seconds from complete gradients to the complete state: `Step` itself lets the two overlap."""
    plan, seconds = state.plan, []
    for _ in range(steps + 1):
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
        new, _, begun = taken._executor.resident(state.replace(opt_state=resident_state(state)), batch)
        jax.block_until_ready((jax.tree.leaves(new), begun))
        begin = time.perf_counter()
        params, leaves = taken._executor.updates(plan).run(begun, store_for(tx.config, plan, leaves))
        jax.block_until_ready((params, jax.tree.leaves(leaves)))
        seconds.append(time.perf_counter() - begin)
        stored = jax.tree.unflatten(plan.layout.treedef, params)
        state = new.replace(params=stored, opt_state=jax.tree.unflatten(plan.state_def, leaves))
    return state, seconds[1:]


def bytes_across(taken, state):
    """Bytes an update sends over the link of one device, to it and from it."""
    plan, streamed = state.plan, taken._executor.updates(state.plan)
    to_device = to_host = 0
    for group in streamed.partition.groups:
        if streamed.runs_on_host(group):
            to_host += sum(plan.grads[i].local_bytes for i in group.params)
            to_device += sum(plan.trained.params[i].local_bytes for i in group.params)
        else:
            state_bytes = sum(plan.state[k].local_bytes for k in group.state)
            to_device, to_host = to_device + state_bytes, to_host + state_bytes
    return to_device, to_host


def share(notes):
    """The share of the link that the update reached.

    The link was measured in both directions at once, so the larger one gives the least time.
    """
    most, seconds = max(notes["bytes_to_device"], notes["bytes_to_host"]), notes["update_s"][0]
    return {"achieved each way": most / seconds, "share of link": most / notes["link"]["each of both"] / seconds}


def speed(notes, *, size, rounds, attention="auto"):
    """One model each way, round by round, once their losses agree: seconds a step, tokens/s and MFU."""
    notes.add(doing="compiling")
    given = argparse.Namespace(size=size, style="scan", stages=[3], attention=attention)
    ways, tokens, batch = step.make_ways(given, views=False)
    losses = {name: [float(run(batch)) for _ in range(3)] for name, run in ways.items()}
    found = disagreements(losses, yardstick.SIZES[size].dtype)
    notes.add(losses=losses)
    if found:
        notes.add(status=f"wrong, and so not timed: {'; '.join(found)}")
        return
    notes.add(doing="the timed steps")
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begin = time.perf_counter()
            run(batch)
            seconds[name].append(time.perf_counter() - begin)
    count, each = jax.device_count(), flops_a_token(size)
    rows = {name: step.figures(name, tokens, seconds) for name in ways}
    for row in rows.values():
        row["model TFLOP/s of a device"] = row["tokens/s"] * each / count / 1e12
        row["MFU"] = None if rate() is None else row["tokens/s"] * each / count / rate()
    notes.add(ways=rows, parameters=parameters_of(size), peak_device=peak_device(), status="ran")


def disagreements(losses, dtype):
    """Ways whose losses are not those of plain jit: a rounding of the type computed in is allowed for each step."""
    expected, allowed = np.array(losses["replicated"]), float(jnp.finfo(dtype).eps)
    # in float32 programs differ in the order of sums, which are long
    allowed = max(allowed, 1e-5)
    off = {name: np.abs(np.array(found) / expected - 1) for name, found in losses.items()}
    return [
        f"{name} has {losses[name]}, and plain jit {losses['replicated']}"
        for name in off
        if not (off[name] <= allowed).all()
    ]


def parameters_of(size):
    init, _, _ = yardstick.build(size, scan=True)
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))))


def flops_a_token(size):
    """Of the model, forward and backward: 6 a parameter, and 12 x layers x width x length of attention.

    Nothing is counted for what is computed again (Chowdhery et al. 2022, appendix B), nor taken off for the mask.
    """
    made = yardstick.SIZES[size]
    return 6 * parameters_of(size) + 12 * made.layers * made.width * made.tokens


KINDS = {"A100": "a100-80", "B200": "b200", "H100": "h100", "H200": "h200"}


def kind():
    """The name of this GPU in zerojax's table; None for others."""
    name = jax.devices()[0].device_kind
    return next((known for word, known in KINDS.items() if word in name), None)


def rate():
    """Peak FLOP/s of a device in bfloat16; None where zerojax's table has none."""
    return None if kind() is None else Device.of(Topology.parse(f"{kind()}:1")).rate("bf16")


def planned(notes, *, size, rounds, topology):
    """`zerojax.plan`'s peak and least time of a step of stage 3, and the measured ones."""
    init, loss, (rows, length) = yardstick.build(size, scan=True)
    tx = zero_shard(optax.adamw(1e-4), stage=3, precision=Precision.bf16())
    taken = tx.train_step(loss)
    notes.add(doing="planning")
    shapes = tx.create(jax.eval_shape(init, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((rows * jax.device_count(), length), jnp.int32)
    given = topology or f"{kind()}:{jax.device_count()}"
    found = plan(taken, shapes, tokens, topology=given)
    notes.add(topology=given, planned_peak=found.peak, planned_s=found.roofline.seconds)
    notes.add(doing="making the state")
    state = jax.block_until_ready(tx.create(tx.init_params(init, jax.random.key(0))))
    notes.add(create_peak_device=peak_device(), doing="the timed steps")
    batch = batch_of(tx, size, rows, length)
    seconds = timed_steps(taken, state, batch, rounds)
    memory = taken.lower(shapes, batch).compile().memory_analysis()
    kept = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    kept += memory.output_size_in_bytes - memory.alias_size_in_bytes
    notes.add(step_s=spread(seconds), peak_device=peak_device(), compiled_device=kept, status="ran")


def activations(notes, *, size, rounds, offload):
    """A step whose layers' inputs wait in host memory between the passes, or on the device."""
    policy = (
        yardstick.offloading(yardstick.LAYER_INPUT)
        if offload
        else jax.checkpoint_policies.save_only_these_names(yardstick.LAYER_INPUT)
    )
    init, loss, (rows, length) = yardstick.build(size, scan=True, policy=policy)
    tx = zero_shard(optax.adamw(1e-4), stage=3, precision=Precision.bf16())
    taken = tx.train_step(loss)
    notes.add(doing="the timed steps")
    state = tx.create(tx.init_params(init, jax.random.key(0)))
    seconds = timed_steps(taken, state, batch_of(tx, size, rows, length), rounds)
    notes.add(step_s=spread(seconds), peak_device=peak_device(), status="ran")


def blocking(notes, *, megabytes, rounds):
    """How long a save blocks the loop, and all it takes: `checkpoint.py`."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
        command = [sys.executable, str(pathlib.Path(__file__).with_name("checkpoint.py")), "--platform", platform]
        command += ["--mb", str(megabytes), "--rounds", str(rounds), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-600:])
        found = json.loads(out.read_text())
    notes.add(bytes=found["bytes"], seconds=found["seconds"], status="ran")


def check(notes, *, stages=(1, 2, 3), only=None):
    """Compare stages with every way of offloading, or those of `only`, to plain optax and to no offload."""
    init, loss, (rows, length) = yardstick.build("tiny", scan=True)
    keys = jax.random.split(jax.random.key(2), 4)
    batches = [jax.random.randint(key, (rows * max(4, jax.device_count()), length), 0, 128) for key in keys]
    # Products in full float32, and an epsilon above the gradients' rounding: without it Adam turns the rounding
    # of a gradient that is nearly zero into a full step, on the device and on the host differently.
    jax.config.update("jax_default_matmul_precision", "highest")
    tx = functools.partial(optax.adamw, 1e-2, eps=1e-3)
    params = jax.jit(init)(jax.random.key(0))
    plain = jax.device_get(train_plain(tx(), loss, params, batches))
    cases = [(s, p, name) for s, p, name in CHECKED if s in stages and (only is None or name in only)]
    rows, reference = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for stage, precision, name in cases:
            notes.add(doing=f"checking {name} at stage {stage} in {precision}")
            row = {"stage": stage, "precision": precision, "offload": name}
            try:
                chosen = zero_shard(
                    tx(),
                    stage=stage,
                    precision=getattr(Precision, precision)(),
                    tuning=Tuning(persist_below=256),
                    offload=checked_modes(pathlib.Path(folder, f"{stage}{precision}"))[name],
                )
                row |= compared(chosen, loss, params, batches, plain, reference.get((stage, precision)))
                reference.setdefault((stage, precision), row.pop("found"))
            except Exception as error:
                row |= {"ok": False, "error": f"{type(error).__name__}: {str(error)[:600]}"}
            rows.append(row)
            notes.add(rows=rows)
    notes.add(status="ran", ok=all(row["ok"] for row in rows))
    notes.pop("doing")


def train_plain(tx, loss, params, batches):
    """The parameters after training with optax alone, on one device."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = step(params, state, batch)
    return params


def checked_modes(folder):
    here = functools.partial(Offload, optimizer="host", chunk_bytes=16 << 10)
    return {
        "none": None,
        "host/device": here(update="device"),
        "host/host": here(update="host"),
        "host/device half": here(update="device", fraction=0.5),
        "disk/device": Offload(optimizer="disk", path=folder, update="device", chunk_bytes=16 << 10),
    }


def compared(tx, loss, params, batches, plain, reference):
    """Largest difference of the parameters after training to no offload, and in float32 to plain optax."""
    state, taken = tx.create(params), tx.train_step(loss)
    for batch in batches:
        state, metrics = taken(state, batch)
    found = jax.device_get(tx.unshard(state.params))

    def difference(other):
        largest = jax.tree.map(lambda a, b: float(np.max(np.abs(np.float32(a) - np.float32(b)))), found, other)
        return max(jax.tree.leaves(largest))

    wide = tx.config.precision.compute == jnp.float32
    differences = {"to plain optax": difference(plain)} if wide else {}
    if reference is not None:
        differences["to no offload"] = difference(reference)
    # float32: some roundings in each of 4 steps of 1e-2. bfloat16 parameters near 1 are multiples of 2^-7 (norms;
    # weights finer), so a rounding of the master weight the other way is one such step.
    ok = max(differences.values(), default=0.0) <= (1e-5 if wide else 2.0**-7) and bool(np.isfinite(metrics["loss"]))
    return {"ok": ok, "loss": float(metrics["loss"]), "found": found} | differences


if __name__ == "__main__":
    main()
