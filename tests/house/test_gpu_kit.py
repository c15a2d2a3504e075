"""The kit that measures on GPUs runs to its end without one, and measures nothing where numbers are wrong."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import gpt
import gpu
import gpu_expected
import gpu_picture
import gpu_work
import jax
import jax.numpy as jnp
import pytest
import yardstick

from zerojax.gpus.devices import installed

BENCHMARKS = Path(gpu.__file__).parent


@pytest.mark.parametrize("size", ["125M", "350M", "gpu"])
def test_the_models_are_as_large_as_their_names_say(size):
    named = {"125M": 125e6, "350M": 350e6, "gpu": 1.3e9}[size]
    assert gpu_work.parameters_of(size) == pytest.approx(named, rel=0.15)


def test_flops_are_those_of_the_products():
    """Of the convention; the embedding's lookup is no product, but its other use, the head, is one."""
    made = yardstick.SIZES["125M"]
    matrices = 12 * made.layers * made.width**2 + made.vocabulary * made.width
    scores = 2 * made.layers * made.width * made.tokens  # a token's, with all positions, and their products with values
    assert gpu_work.flops_a_token("125M") == pytest.approx(3 * 2 * (matrices + scores), rel=0.01)


def test_other_losses_are_not_timed():
    same = {"replicated": [4.0, 3.9, 3.8], "stage 3": [4.01, 3.9, 3.79]}
    assert not gpu_work.disagreements(same, jnp.bfloat16)
    (said,) = gpu_work.disagreements(same, jnp.float32)
    assert said.startswith("stage 3 has [4.01")
    assert gpu_work.disagreements({**same, "stage 3": [4.0, 3.9, float("nan")]}, jnp.bfloat16)


@pytest.mark.slow
def test_a_wrong_way_is_refused(monkeypatch, tmp_path):
    make_ways = gpu_work.step.make_ways

    def with_another(args, views):
        ways, tokens, batch = make_ways(args, views)
        wrong = ways["stage 3"]
        return ways | {"stage 3": lambda batch: 1.001 * wrong(batch)}, tokens, batch

    monkeypatch.setattr(gpu_work.step, "make_ways", with_another)
    notes = gpu_work.Notes(tmp_path / "notes")
    gpu_work.speed(notes, size="tiny", rounds=1)
    assert notes["status"].startswith("wrong, and so not timed: stage 3 has")
    assert "ways" not in notes


@pytest.mark.slow
def test_it_runs_to_its_end_without_a_gpu(tmp_path):
    out = tmp_path / "gpu.json"
    modes = ["none", "half"]
    command = [sys.executable, BENCHMARKS / "gpu.py", "--dry-run", "--steps", "2", "--out", out, "--modes", *modes]
    command += ["--budget", "750", "--limit", "400"]  # the processors may have other work
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["dry run"]
    assert found["check"]["ok"]
    assert set(gpu.PARTS) - {"check", "offload"} <= set(found)
    for row in found["speed"].values():
        assert set(row["ways"]) == {"stage 3", "replicated", "GSPMD", "gathered"}
    for part in ("speed", "mocked", "fp8", "memory", "disk", "activations", "checkpoint"):
        assert found[part]
        assert {row["status"] for row in found[part].values()} == {"ran"}, found[part]
    assert {row["mode"] for row in found["rows"] if row["model"] == "1.5B" and row["status"] == "ran"} == set(modes)
    (plan,) = found["plan"].values()
    assert plan["status"] == "ran" if installed() else "extra" in plan["error"] or "zerojax[aot]" in plan["error"], plan
    has_torch = importlib.util.find_spec("torch") is not None
    assert all((row["status"] == "ran") is has_torch for row in found["torch"].values()), found["torch"]
    assert all(row["parameters"] for row in found["largest"].values())
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_the_picture_says_what_was_not_measured(tmp_path):
    nothing = {part: {} for part in ("speed", *gpu.MORE)}
    machine = {"devices": ["NVIDIA H200", 1], "versions": {"jax": "0.12"}}
    gpu_picture.draw({"rows": [], "date": "", "dry run": False, "machine": machine} | nothing, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


# What a kit on one GPU finds if each page is right, and with one figure that is not.
AS_DOCUMENTED = {
    "machine": {"devices": ["NVIDIA H200", 1], "device_limit": 140e9},
    "check": {"rows": [{"precision": "fp32", "to plain optax": 7e-7}, {"precision": "bf16"}]},
    "speed": {"1.3B": {"status": "ran", "ways": {"stage 3": {"to replicated": 1.01, "median": 1.0}}}},
    "plan": {
        "1.3B": {
            "planned_peak": 25e9,
            "peak_device": 25.1e9,
            "create_peak_device": 20e9,
            "planned_s": 0.3,
            "step_s": [0.4, 0.4, 0.4],
        }
    },
    "rows": [
        {"model": "1.5B", "mode": mode, "status": "ran", "step_s": [seconds], "state_host": 18e9, "parameters": 1.5e9}
        | {"to no offload": 1e-4, "bytes_to_device": 18e9, "bytes_to_host": 18e9, "link": {"each of both": 40e9}}
        for mode, seconds in {"none": 1.0, "device": 1.4}.items()
    ],
    "torch": {"FSDP2": {"step_s": [1.1]}, "FSDP2, offload": {"step_s": [3.3]}},
    "mocked": {"eight devices": {"arguments": 2e9, "parameters": 1.3e9}},
    "fp8": {"1.3B": {"by_type": {"bf16": [0.2], "fp8": [0.15]}}},
    "memory": {"40 GB": {"peak_device": 39e9, "create_peak_device": 30e9, "compiled": 39e9}},
    "disk": {"6 layers": {"largest_difference": 2e-4}},
    "activations": {"on the device": {"peak_device": 30e9}, "in host memory": {"peak_device": 29.2e9}},
    "checkpoint": {
        "4000 MB": {
            "seconds": {"save: the loop is blocked": {"median": 0.8}, "copy to host memory": {"median": 0.75}},
        }
    },
    "largest": {"none": {"parameters": 8e9}},
}


def judged(found):
    return {one["figure"]: (one["verdict"], one["measured"]) for one in gpu_expected.verdicts(found)}


def test_each_part_has_a_documented_figure_that_a_measurement_can_refute():
    docs = BENCHMARKS.parent / "docs"
    assert {one.part for one in gpu_expected.EXPECTED} == set(gpu.PARTS)
    for one in gpu_expected.EXPECTED:
        assert one.quote in (docs / one.page).read_text(), (one.part, one.page)
        assert one.low < one.high
    table = (docs / "gpu.md").read_text()
    assert all(one.figure in table for one in gpu_expected.EXPECTED)


def test_what_the_pages_say_holds_and_all_other_figures_are_refuted():
    several = [one.figure for one in gpu_expected.EXPECTED if one.figure.startswith("several GPUs")]
    found = judged(AS_DOCUMENTED)
    assert {verdict for figure, (verdict, _) in found.items() if figure not in several} == {"holds"}, found
    assert [found[figure] for figure in several] == [("not measured", None)]
    for one in gpu_expected.EXPECTED:
        beyond = dataclasses.replace(one, measured=lambda found, one=one: one.high + 0.01 * (one.high - one.low))
        assert beyond.judge({})[0] == "REFUTED"
    eight = {"machine": {"devices": ["NVIDIA H200", 8], "device_limit": 140e9}}
    eight |= {"speed": {"1.3B": {"status": "ran", "ways": {"stage 3": {"to gathered": 1.2}}}}}
    assert judged(eight)[several[0]] == ("REFUTED", 1.2)
    wrong = AS_DOCUMENTED | {"check": {"rows": [{"precision": "fp32", "to plain optax": 1e-3}]}}
    assert [verdict for verdict, _ in judged(wrong).values()].count("REFUTED") == 1
    assert {verdict for verdict, _ in judged(AS_DOCUMENTED | {"dry run": True}).values()} == {"not measured"}


def test_the_page_has_the_figures_of_the_h100():
    """Each row of the table is what the file has at its place, rounded to the digits that the page gives."""
    found = json.loads((BENCHMARKS / "results" / "h100.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "gpu.md").read_text()
    units = {"ms": 1e3, "s": 1, "GB": 1e-9, "GB/s": 1e-9, "%": 100, "×": 1, "": 1}
    rows = re.findall(r"^\|([^|]+)\| *([\d.e-]+) ?(\S*) *\|( `.*) \|$", page, re.M)
    assert len(rows) > 30
    for what, figure, unit, places in rows:
        values = [at(found, place) for place in re.findall(r"`([^`]+)`", places)]
        value = values[0] / values[1] if len(values) == 2 else values[0] * units[unit]
        if "e" in figure:
            assert float(f"{value:.1e}") == float(figure), what
        else:
            assert f"{value:.{len(figure.partition('.')[2])}f}" == figure, (what, value)


def at(found, place):
    """The value of a path; names may have slashes."""
    while place:
        if isinstance(found, list):
            name, _, place = place.partition("/")
            found = found[int(name)]
        else:
            name = max((x for x in found if place == x or place.startswith(f"{x}/")), key=len)
            found, place = found[name], place[len(name) + 1 :]
    return found


@pytest.mark.parametrize("attention", [gpt.causal_attention, yardstick.fastest])
def test_attention_is_cudnn_where_it_can_be(attention, monkeypatch):
    chosen = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, v, *, implementation, **_: chosen.append(implementation)
    )
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for dtype, head in ((jnp.bfloat16, 64), (jnp.float16, 64), (jnp.float32, 64), (jnp.bfloat16, 12)):
            x = jax.ShapeDtypeStruct((2, 16, 4, head), dtype)
            attention(x, x, x)
    assert chosen == ["xla"] * 4 + ["cudnn"] * 2 + ["xla"] * 2
