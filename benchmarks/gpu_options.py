"""Run one option of `gpu.py`: torch's FSDP2, mocked devices, FP8, `train_step(memory=)`, parameters on disk."""

import dataclasses
import functools
import os
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yardstick
from flax.linen import fp8_ops
from gpu_common import batch_of, peak_device, shapes_of, spread, timed_steps

from zerojax import Offload, Precision, zero_shard

MOCKED = 8


def torch_steps(notes, *, size, rounds, ways):
    """FSDP2 on one GPU in several `ways` of `peer_torch.Trainer`, one after another: seconds a step of each."""
    import peer_torch

    init, _, _ = yardstick.build(size, scan=False)
    made = dataclasses.asdict(yardstick.SIZES[size]) | {"gpu": jax.default_backend() == "gpu"}
    made.pop("dtype")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        leaves = jax.tree_util.tree_leaves_with_path(jax.jit(init)(jax.random.key(0)))
    weights = {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    found = {}
    for way in ways:
        notes.add(doing=f"torch's steps: {way}")
        trainer = peer_torch.Trainer(way, made, weights, rank=0, workers=1)
        trainer.begin_peak()
        seconds = []
        for i in range(rounds + 2):
            begin = time.perf_counter()
            trainer.step(i)
            trainer.wait()
            seconds.append(time.perf_counter() - begin)
        found[way] = {"step_s": spread(seconds[2:]), "peak_device": trainer.device_peak(), "status": "ran"}
        trainer.end()
        del trainer
        notes.add(ways_of_torch=found)
    notes.add(status="ran")


def bf16_step(loss, **options):
    """`(tx, step)` of stage 3 with AdamW."""
    tx = zero_shard(optax.adamw(1e-4), stage=3, precision=Precision.bf16(), **options)
    return tx, functools.partial(tx.train_step, loss)


def mocked(notes, *, size, rounds, layers):
    """A program of eight devices on one GPU, whose collectives do nothing: its memory and its time.

    The numbers are wrong, so no loss is looked at. Nothing else of the process may have started JAX's backend.
    """
    jax.config.update("jax_mock_gpu_topology", f"1x{MOCKED}x1")
    count = jax.device_count()
    notes.add(devices=[count, jax.local_device_count()])
    if jax.default_backend() == "gpu" and count != MOCKED:
        notes.add(status=f"not mocked: JAX has {count} devices, and {MOCKED} were asked for")
        return
    init, loss, (rows, length) = yardstick.build(size, scan=True, layers=layers)
    tx, step_of = bf16_step(loss)
    taken = step_of()
    notes.add(doing="making the state")
    state = tx.create(tx.init_params(init, jax.random.key(0)))
    batch = batch_of(tx, size, rows, length)
    notes.add(parameters=sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))))
    notes.add(doing="compiling")
    memory = taken.lower(shapes_of(state), batch).compile().memory_analysis()
    notes.add(arguments=memory.argument_size_in_bytes, temporary=memory.temp_size_in_bytes, doing="the timed steps")
    seconds = timed_steps(taken, state, batch, rounds, finite=False)
    notes.add(step_s=spread(seconds), peak_device=peak_device(), status="ran")


def fp8(notes, *, size, rounds, layers):
    """Stage 3 with Flax's FP8 layers against bfloat16, round by round."""
    steps, losses = {}, {}
    for name, dot in (("bf16", None), ("fp8", fp8_ops.Fp8DirectDotGeneralOp)):
        notes.add(doing=f"compiling {name}")
        init, loss, (rows, length) = yardstick.build(size, scan=True, dot_general=dot, layers=layers)
        tx, step_of = bf16_step(loss)
        state, taken = tx.create(tx.init_params(init, jax.random.key(0))), step_of()
        batch = batch_of(tx, size, rows, length)
        losses[name] = []
        for _ in range(3):
            state, metrics = taken(state, batch)
            losses[name].append(float(metrics["loss"]))
        steps[name] = [taken, state, batch]
    notes.add(losses=losses, doing="the timed steps")
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (taken, state, batch) in steps.items():
            begin = time.perf_counter()
            steps[name][1], metrics = taken(state, batch)
            jax.block_until_ready((steps[name][1], metrics))
            seconds[name].append(time.perf_counter() - begin)
    median = {name: spread(times) for name, times in seconds.items()}
    notes.add(by_type=median, step_s=median["fp8"], peak_device=peak_device(), status="ran")


def budget(notes, *, size, rounds, memory):
    """`train_step(memory=)` of a model without remat: the compiled peak that it chose, and the allocator's."""
    init, loss, (rows, length) = yardstick.build(size, scan=True, remat=False)
    tx, step_of = bf16_step(loss)
    taken = step_of(memory=memory)
    notes.add(doing="making the state")
    state = tx.create(tx.init_params(init, jax.random.key(0)))
    notes.add(create_peak_device=peak_device(), doing="choosing activations")
    batch = batch_of(tx, size, rows, length)
    begin = time.perf_counter()
    fit = taken.memory_fit(state, batch)
    chosen = fit.chosen
    notes.add(memory=fit.memory, share=chosen.share, predicted=chosen.predicted, compiled=chosen.peak)
    notes.add(compilations=len(fit.trials), fit_s=time.perf_counter() - begin, doing="the timed steps")
    seconds = timed_steps(taken, state, batch, rounds)
    notes.add(step_s=spread(seconds), peak_device=peak_device(), status="ran")


def disk(notes, *, size, rounds, layers):
    """A step whose parameters and state are on disk, against the same in memory: losses and seconds."""
    init, loss, (rows, length) = yardstick.build(size, scan=True, layers=layers)
    found = {}
    for name in ("in memory", "on disk"):
        with tempfile.TemporaryDirectory() as folder:
            offload = Offload(params="disk", optimizer="disk", path=folder) if name == "on disk" else None
            tx, step_of = bf16_step(loss, offload=offload)
            notes.add(doing=f"the steps {name}")
            state, taken = tx.create(tx.init_params(init, jax.random.key(0))), step_of()
            batch, losses, seconds = batch_of(tx, size, rows, length), [], []
            for _ in range(rounds + 2):
                begin = time.perf_counter()
                state, metrics = taken(state, batch)
                losses.append(float(metrics["loss"]))
                jax.block_until_ready(jax.tree.leaves(state))
                seconds.append(time.perf_counter() - begin)
            found[name] = {"losses": losses, "step_s": spread(seconds[2:])}
            del state
    apart = max(abs(a / b - 1) for a, b in zip(*(x["losses"] for x in found.values()), strict=True))
    notes.add(by_place=found, largest_difference=apart, step_s=found["on disk"]["step_s"])
    notes.add(
        peak_device=peak_device(), status="ran" if apart <= float(jnp.finfo(jnp.bfloat16).eps) else "wrong losses"
    )
