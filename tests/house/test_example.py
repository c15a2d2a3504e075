"""The examples: training on real text at any stage with its table and pictures, adapters, and rollouts."""

import functools
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rollouts
import train_gpt
from conftest import mesh_of
from finetune import merged, prose, with_adapters
from flax.traverse_util import flatten_dict
from gpt import GPT, next_byte_loss
from memory import stage_memory

from zerojax import Precision, Tuning, report, zero_shard
from zerojax.checkpoint import export, import_params

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = "--steps 4 --width 64 --layers 2 --heads 2 --batch 8 --seq 32".split()


def train(folder, *options):
    return run("train_gpt.py", "--fresh", "--out", str(folder), *options)


def run(script, *options, env=None):
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=env).stdout


def bits(printed):
    return float(re.search(r"Held out: ([\d.]+) bits per byte", printed).group(1))


def written(printed):
    """What the model wrote after "def "."""
    return re.search(r"It writes:\ndef (.*)\n\nHeld out", printed, re.S).group(1)


def parameters(printed):
    return float(re.search(r"│ 2 +│ +([\d,]+) \|", printed).group(1).replace(",", ""))


@pytest.fixture(scope="module")
def stage_0(tmp_path_factory):
    """What the example prints at stage 0 on two devices."""
    return train(tmp_path_factory.mktemp("stage_0"), "--stage", "0", "--devices", "2", *SMALL)


@pytest.mark.slow
def test_it_learns_as_at_stage_0_and_draws_its_pictures(stage_0, tmp_path):
    printed = train(tmp_path, "--stage", "3", "--devices", "2", *SMALL)
    assert bits(printed) == pytest.approx(bits(stage_0), abs=2e-3)  # printed to three digits
    assert len(written(printed)) >= 75  # of 150 bytes, several of which may be one character
    for part in ("parameters", "gradients", "optimizer"):
        assert part in printed
    for picture in ("loss.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path):
    """Stopped at one stage and gone on at another, it ends as the one that was left alone."""
    options = [*SMALL, "--steps", "40", "--save-every", "5", "--devices", "2"]
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--out", str(tmp_path / "stopped"), *options]
    with subprocess.Popen([*command, "--stage", "3"], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("stopped/checkpoints/step_*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    after = int(re.search(r"Stopped after step (\d+)", printed).group(1))
    assert 5 <= after < 40
    again = run("train_gpt.py", *command[2:], "--stage", "1")
    assert f"Going on from step {after}" in again
    sample = run("generate.py", *command[2:], "--stage", "2", "--bytes", "40")
    assert sample.split("def ", 1)[1][:30] == written(again)[:30]
    assert bits(again) == pytest.approx(bits(train(tmp_path / "whole", *options)), abs=2e-3)  # printed to three digits
    once_more = subprocess.run([*command, "--width", "32"], capture_output=True, text=True, timeout=300, check=False)
    assert once_more.returncode == 1
    assert "Give its options, another --out, or --fresh." in once_more.stderr
    assert "Traceback" not in once_more.stderr


@pytest.mark.slow
def test_it_learns_the_same_with_its_optimizer_state_on_disk(stage_0, tmp_path):
    printed = train(tmp_path, "--stage", "3", "--devices", "2", "--offload", "disk", *SMALL)
    assert "Optimizer state waits on disk" in printed
    assert re.search(r"│ 3 .*│ +[1-9][\d,]* │", printed)  # kB of it, in the last column
    assert list(tmp_path.glob("state/process_0/chunk_*"))
    assert bits(printed) == pytest.approx(bits(stage_0), abs=2e-3)  # printed to three digits


@pytest.mark.slow
def test_float16_and_microbatches_learn_much_the_same(stage_0, tmp_path):
    options = "--stage 2 --devices 2 --precision fp16 --accumulate 2".split()
    printed = train(tmp_path, *SMALL, *options)
    assert bits(printed) == pytest.approx(bits(stage_0), abs=1e-2)  # 11 bits are 0.05% of a logit, after four steps
    assert 2 * parameters(printed) == pytest.approx(parameters(stage_0), abs=2)  # printed in whole kB
    assert "Master weights are counted as optimizer" in " ".join(printed.split())


@pytest.mark.parametrize("precision", [Precision.fp32(), Precision.bf16()], ids=["fp32", "bf16"])
def test_the_tables_bytes_are_those_of_live_arrays_and_of_the_paper(precision, mesh):
    n = mesh.size
    paper = {4: (16, 8 + 8 / n, 4 + 12 / n, 16 / n), 2: (16, 4 + 12 / n, 2 + 14 / n, 16 / n)}[
        precision.compute.itemsize
    ]
    params = {"matrix": jnp.ones((128, 96))}  # one leaf that is cut evenly: nothing is found beyond the formula
    for stage in range(4):
        tx = zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh, precision=precision)
        memory, live = stage_memory(tx, params), report(tx.create(params)).bytes
        assert sum(memory.paper.values()) == paper[stage] * params["matrix"].size
        assert memory.found["params"] == live["params"]
        assert memory.found["opt_state"] == live["opt_state"]
        sums = {0: 4, 1: precision.compute.itemsize, 2: 4 / n, 3: 4 / n}[stage]  # stage 1 holds what is not summed yet
        assert memory.found["grads"] == sums * params["matrix"].size
        beyond = memory.found["grads"] - memory.paper["grads"] if stage < 3 else 0  # at stage 3 the parts differ alone
        assert sum(memory.found.values()) - beyond == pytest.approx(sum(memory.paper.values()), abs=4)  # Adam's count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stage", "4"), "invalid choice"),
        (("--steps", "0"), "at least 1"),
        (("--devices", "3"), "does not divide"),
        (("--tensor-parallel", "3"), "--heads 4 must be a multiple of --tensor-parallel 3"),
        (("--accumulate", "3"), "does not divide over 8 devices of 3 microbatches each: give a multiple of 24"),
        (("--precision", "int8"), "invalid choice"),
        (("--offload", "host", "--stage", "0"), "needs --stage 1, 2 or 3"),
        (("--data", "nowhere.txt"), "not a file"),
    ],
)
def test_bad_options_are_one_readable_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt, "mesh_of", lambda count, _: mesh_of(count or 8))  # JAX has begun with eight
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    said = capsys.readouterr().err if ended.value.code == 2 else ended.value.code
    assert message in said.strip().splitlines()[-1]


def test_zerojax_plan_gets_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "mesh_of", lambda count, _: mesh_of(count or 8))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--out", str(tmp_path), *SMALL])
    step, state, batch = train_gpt.make_step()
    step.trace(state, batch)


@pytest.mark.slow
def test_bfloat16_ends_where_float32_does(tmp_path):
    # The held-out loss is a mean over 64 kB, whose noise is far below 1%: nothing needs smoothing.
    size = "--steps 80 --width 64 --layers 2 --heads 2 --batch 16 --seq 64".split()
    wide = bits(train(tmp_path, "--stage", "0", *size))
    assert wide < 4  # it has learnt: 8 is knowing nothing
    narrow = bits(train(tmp_path, "--stage", "3", "--precision", "bf16", *size))
    assert narrow == pytest.approx(wide, rel=0.01)


@pytest.mark.slow
def test_the_example_in_fp8_learns_restores_what_it_saved_and_continues():
    printed = run("train_fp8.py", "--steps", "10")
    untrained, saved, restored, last = map(float, re.findall(r"(?<![\w.])\d+\.\d+", printed))
    assert untrained > saved == restored > last
    assert re.search(r"Gathered as: f(16|8e4m3fn)$", printed.strip())


# Fine-tuning (examples/finetune.py)

AS_A_USER = {k: x for k, x in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
RANK = 2


def adapters_of(params):
    """Adapters and base, each as a flat dict of NumPy arrays."""
    flat = {"/".join(path): np.asarray(x) for path, x in flatten_dict(params).items()}
    return {k: x for k, x in flat.items() if "lora" in k}, {k: x for k, x in flat.items() if "lora" not in k}


@pytest.mark.slow
def test_only_adapters_move_and_they_can_be_merged(mesh, tmp_path):
    model = GPT(width=32, layers=2, heads=2)
    init = functools.partial(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    rng = np.random.default_rng(0)
    base = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), jax.eval_shape(init))
    windows = rng.integers(256, size=(8, 17)).astype(np.int32)

    tx = zero_shard(
        optax.adam(1e-2),
        stage=3,
        mesh=mesh,
        tuning=Tuning(persist_below=100),
        trainable=lambda path, leaf: "lora" in path,
    )
    export(base, tmp_path / "base")
    is_new = lambda path: "lora" in path
    params = import_params(tmp_path / "base", tx.init_params(with_adapters(init, RANK)), partial=is_new)
    state = tx.create(params)
    adapters, _ = adapters_of(tx.unshard(state.params))
    assert {path.split("/")[-2] for path in adapters} == {"query", "key", "value", "out", "up", "down"}
    assert report(state).bytes["opt_state"] < report(state).bytes["params"]

    plain = jax.jit(next_byte_loss(model))
    step = tx.train_step(with_adapters(next_byte_loss(model), RANK))
    state, metrics = step(state, windows)
    assert float(metrics["loss"]) == pytest.approx(float(plain(base, windows)), rel=1e-5)  # float32 sums in two orders
    state, _ = step(state, windows)  # the first step moves B alone: as it is zero, A has no gradient
    moved, frozen = adapters_of(tx.unshard(state.params))
    for path, x in adapters.items():
        assert not np.array_equal(x, moved[path]), path
    for path, x in adapters_of(base)[1].items():
        np.testing.assert_array_equal(x, frozen[path], err_msg=path)
    without = float(plain(jax.device_get(merged(state.params, mesh)), windows))
    assert without == pytest.approx(float(step(state, windows)[1]["loss"]), rel=1e-5)


@pytest.mark.parametrize("axis", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_adapters_are_merged_on_any_mesh(axis):
    draw = np.random.default_rng(0).normal
    layer = {"kernel": draw(size=(16, 2, 8)), "lora_a": draw(size=(16, 8)), "lora_b": draw(size=(8, 16))}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis,))
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    params = tx.shard({"up": jax.tree.map(jnp.float32, layer)})
    assert not any(x.is_fully_replicated for x in jax.tree.leaves(params))
    kernel = merged(params, mesh)["up"]["kernel"]
    expected = layer["kernel"] + (layer["lora_a"] @ layer["lora_b"]).reshape(16, 2, 8)
    np.testing.assert_allclose(kernel, expected, rtol=1e-5, atol=1e-5)  # float32, and sums of 8 products
    assert not kernel.is_fully_replicated


def test_fine_tuning_needs_no_matplotlib():
    without = "import sys; sys.modules['matplotlib'] = None; import finetune"
    subprocess.run([sys.executable, "-c", without], cwd=EXAMPLES, check=True, timeout=300)


def test_no_paragraph_of_the_prose_is_both_learnt_and_held_out():
    learnt, held_out = ({" ".join(p.split()) for p in bytes(text).decode().split("\n\n")} for text in prose())
    assert held_out
    assert not {p for p in learnt & held_out if len(p) > 20}  # where the text is cut, ends of paragraphs may be alike


@pytest.mark.slow
def test_the_default_run_learns_prose_and_its_files_are_the_best_steps(tmp_path):
    printed = run("finetune.py", "--out", str(tmp_path), env=AS_A_USER)
    first, *judged, best = map(float, re.findall(r"(?:held out|step \d+,) ([\d.]+)", printed))
    assert best == min(judged) < first - 0.2
    assert bool(list(tmp_path.glob("board/events*"))) == (importlib.util.find_spec("tensorboardX") is not None)


@pytest.mark.slow
def test_a_killed_run_takes_the_steps_of_one_that_is_not(tmp_path):
    small = "--devices 2 --width 32 --seq 16 --batch 16 --base-steps 4 --steps 40 --eval-every 5".split()
    run("finetune.py", "--out", str(tmp_path / "whole"), *small, env=AS_A_USER)
    options = ["--out", str(tmp_path / "killed"), "--base", str(tmp_path / "whole" / "base"), *small]
    log = tmp_path / "killed" / "metrics.csv"
    command = [sys.executable, str(EXAMPLES / "finetune.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=AS_A_USER) as process:
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 12):
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert "From step 0" not in run("finetune.py", *options, env=AS_A_USER)
    assert log.read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


# Rollouts (examples/rollouts.py): workers have the weights of one step ago, in their names


def test_the_workers_weights_are_one_step_old():
    loop, key = rollouts.Loop(), jax.random.key(0)
    state = loop.tx.create(loop.tx.init_params(rollouts.init, key))
    weights = loop.handed_over(rollouts.renamed(state.params))
    batch = rollouts.rollout(weights, jax.device_put(key, loop.everywhere))
    for _ in range(2):
        old = jax.device_get(loop.tx.unshard(state.params))
        state, weights, batch = loop.iterate(state, weights, batch, key)
        expected = {"net.0.weight": old["up"].T, "net.0.bias": old["shift"], "net.2.weight": old["down"].T}
        assert weights.keys() == expected.keys()
        for name, x in expected.items():
            assert np.array_equal(weights[name], x.astype(jnp.bfloat16)), name
            assert weights[name].sharding == loop.everywhere
    assert not np.array_equal(old["up"], jax.device_get(loop.tx.unshard(state.params))["up"])
    assert not loop.everywhere.device_set & loop.rows.device_set


@pytest.mark.slow
def test_the_policy_learns():
    rewards = rollouts.train(jax.random.key(0), steps=60)
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.6
