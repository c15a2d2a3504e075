"""Set each figure that `gpu.py` measures beside what the documentation says, and say which measurement refutes it.

    python benchmarks/gpu_expected.py results/gpu.json       judge a file again

An expectation holds, is refuted, or was not measured. Each one quotes its page, so a change of the page changes it too.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

NOISE = 0.02  # of the ratio of two times that were measured round by round


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What a page says about a part, and the range outside of which a measurement refutes it.

    Attributes:
        part: The part of `gpu.py`.
        figure: What is measured, in words.
        page: The page in docs/.
        quote: The words on this page that the measurement can refute.
        low, high: The smallest and the largest value that agree with the page.
        measured: Reads the value from what `gpu.py` found. It raises `KeyError` or `IndexError`, or returns None, if
            the value was not measured.
    """

    part: str
    figure: str
    page: str
    quote: str
    low: float
    high: float
    measured: Callable[[dict], float | None]

    def judge(self, found: dict) -> tuple[str, float | None]:
        """Return "holds", "REFUTED" or "not measured", and the measured value."""
        try:
            value = self.measured(found)
        except (KeyError, IndexError, StopIteration, TypeError, ZeroDivisionError):
            value = None
        if value is None:
            return "not measured", None
        return ("holds" if self.low <= value <= self.high else "REFUTED"), value


def devices(found: dict) -> int:
    return found["machine"]["devices"][1]


def row(found: dict, *modes: str) -> dict:
    """Return what was found of the 1.5B model with the first of these ways of offloading that ran."""
    ran = {x["mode"]: x for x in found["rows"] if (x["model"], x["status"]) == ("1.5B", "ran")}
    return next(ran[mode] for mode in modes if mode in ran)


def on_device(found: dict) -> dict:
    """Return what was found with `update="device"`, or with "auto", which chose it on the H100."""
    return row(found, "device", "auto")


def ratio(way: str, to: str, *, several: bool) -> Callable[[dict], float | None]:
    """Return a reader of the time of `way` over that of `to`, of the largest model that ran."""

    def measured(found: dict) -> float | None:
        ran = [size for size in found["speed"].values() if size["status"] == "ran"]
        return ran[-1]["ways"][way][f"to {to}"] if (devices(found) > 1) is several else None

    return measured


def farthest_from_optax(found: dict) -> float:
    return max(x["to plain optax"] for x in found["check"]["rows"] if x["precision"] == "fp32")


def planned_peak(found: dict) -> float | None:
    """Return the planned peak over the allocator's. If making the state took more, the step's peak is not known."""
    plan = next(iter(found["plan"].values()))
    known = plan["peak_device"] is not None and plan["peak_device"] > plan["create_peak_device"]
    return plan["planned_peak"] / plan["peak_device"] if known else None


def planned_time(found: dict) -> float:
    plan = next(iter(found["plan"].values()))
    return plan["planned_s"] / plan["step_s"][0]


def bytes_on_hosts(found: dict) -> float:
    """Return the bytes of offloaded state of all devices, per parameter."""
    return devices(found) * on_device(found)["state_host"] / on_device(found)["parameters"]


def offload_cost(found: dict) -> float:
    """Return the additional seconds of an offloaded update over the seconds that the link needs for its bytes."""
    offloaded = on_device(found)
    least = max(offloaded["bytes_to_device"], offloaded["bytes_to_host"]) / offloaded["link"]["each of both"]
    return (offloaded["step_s"][0] - row(found, "none")["step_s"][0]) / least


def against_torch(found: dict) -> float:
    """Return our step with offload over our step without, over the same ratio of FSDP2."""
    seconds = {name: x["step_s"][0] for name, x in found["torch"].items()}
    ours = on_device(found)["step_s"][0] / row(found, "none")["step_s"][0]
    return ours / (seconds["FSDP2, offload"] / seconds["FSDP2"])


def losses_of_offload(found: dict) -> float | None:
    """Return the largest difference of all ways of offloading."""
    return max((x["to no offload"] for x in found["rows"] if "to no offload" in x), default=None)


def eighth(found: dict) -> float:
    """Return the arguments of a mocked device over the parameters and moments of one of eight."""
    mocked = next(iter(found["mocked"].values()))
    return mocked["arguments"] / (12 * mocked["parameters"] / 8)


def against_eager(found: dict) -> float:
    """Return the time of the last speed that ran, with cuDNN's attention, over that of FSDP2."""
    ran = [x for x in found["speed"].values() if x["status"] == "ran"]
    return ran[-1]["ways"]["stage 3"]["median"] / found["torch"]["FSDP2"]["step_s"][0]


def fp8_gain(found: dict) -> float:
    by_type = next(iter(found["fp8"].values()))["by_type"]
    return by_type["fp8"][0] / by_type["bf16"][0]


def chosen_peak(found: dict) -> float | None:
    """Return the allocator's peak over the peak of the program that `memory=` chose."""
    fitted = next(iter(found["memory"].values()))
    known = fitted["peak_device"] is not None and fitted["peak_device"] > fitted["create_peak_device"]
    return fitted["peak_device"] / fitted["compiled"] if known else None


def on_disk(found: dict) -> float:
    return next(iter(found["disk"].values()))["largest_difference"]


def inputs_moved(found: dict) -> float:
    """Return the memory that offloading layers' inputs saves, over the bytes of these inputs."""
    peak = {name: x["peak_device"] for name, x in found["activations"].items()}
    layers, rows, tokens, width, itemsize = 24, 8, 1024, 2048, 2  # of "gpu" in yardstick.SIZES
    return (peak["on the device"] - peak["in host memory"]) / (layers * rows * tokens * width * itemsize)


def blocked(found: dict) -> float:
    saved = next(iter(found["checkpoint"].values()))
    median = {name: x["median"] for name, x in saved["seconds"].items()}
    return median["save: the loop is blocked"] / median["copy to host memory"]


def bytes_of_largest(found: dict) -> float:
    """Return 16 bytes for each parameter of the largest model without offload, over the memory of all devices."""
    memory = devices(found) * found["machine"]["device_limit"]
    return 16 * found["largest"]["none"]["parameters"] / memory


EXPECTED = (
    Expectation(
        "check",
        "largest difference of a parameter to plain optax, float32, 4 steps",
        "ports.md",
        "agrees with the one-device loop to 1e-5",
        0.0,
        1e-5,
        farthest_from_optax,
    ),
    Expectation(
        "speed",
        "one GPU: time of stage 3 / plain optax, where nothing is sent",
        "gpu.md",
        "every stage on one device compiles to the plain program",
        0.97,
        1.03,
        ratio("stage 3", "replicated", several=False),
    ),
    Expectation(
        "speed",
        "several GPUs: time of stage 3 / layers gathered by hand",
        "stage3.md",
        "| **scan: gather on use, `prefetch=1`** | 2.00 | 95.5% | 1.07 | 0.7 |",
        0.5,
        1.0 + NOISE,
        ratio("stage 3", "gathered", several=True),
    ),
    Expectation(
        "plan",
        "planned peak / allocator's peak",
        "plan.md",
        "which is 0.03% more",
        0.97,
        1.03,
        planned_peak,
    ),
    Expectation(
        "plan",
        "least time / measured time of a step: never above 1, and peak rates are out of reach",
        "plan.md",
        "no kernel reaches the peak rates",
        0.5,
        1.0 + NOISE,
        planned_time,
    ),
    Expectation(
        "offload",
        "bytes per parameter in the memory of all hosts, optimizer state offloaded",
        "offload.md",
        "| stage 3, `optimizer=` | 2/N + gradients | 12/N |",
        11.8,
        12.2,
        bytes_on_hosts,
    ),
    Expectation(
        "offload",
        "time that offload adds to a step / time the link needs for the update's bytes",
        "offload.md",
        "which is the limit of the link",
        0.0,
        1.1,
        offload_cost,
    ),
    Expectation(
        "offload",
        "largest relative difference of a loss to the run without offload, bfloat16",
        "offload.md",
        "runs from the same values agree",
        0.0,
        1e-3,
        losses_of_offload,
    ),
    Expectation(
        "mocked",
        "a program of eight devices on one GPU: bytes of its arguments / 12 bytes for an eighth of the parameters",
        "precision.md",
        "| 3 | 4/N | 4/N | | 8/N | 16/N | 16/N |",
        0.98,
        1.05,
        eighth,
    ),
    Expectation(
        "torch",
        "stage 3 with cuDNN's attention / FSDP2, eager",
        "peers.md",
        "and 174 ms with cuDNN's",
        0.0,
        1.0 + NOISE,
        against_eager,
    ),
    Expectation(
        "torch",
        "(with / without offload, zerojax) / (the same, FSDP2)",
        "peers.md",
        "step took 3.2 times as long as without (1.3 billion parameters), and that of zerojax 2.08 times",
        0.0,
        1.0 + NOISE,
        against_torch,
    ),
    Expectation(
        "fp8",
        "time of a step with FP8 layers / in bfloat16",
        "fp8.md",
        "counts float8 products at the rates of the GPU for float8",
        0.5,
        1.0 + NOISE,
        fp8_gain,
    ),
    Expectation(
        "memory",
        "allocator's peak / compiled peak that `memory=` chose",
        "fit.md",
        "compares the prediction with the peak of the compiled program",
        0.95,
        1.03,
        chosen_peak,
    ),
    Expectation(
        "disk",
        "largest relative difference of a loss, parameters on disk and in memory, bfloat16",
        "offload.md",
        "compared with the same training in memory",
        0.0,
        1e-3,
        on_disk,
    ),
    Expectation(
        "activations",
        "memory saved by offloading layers' inputs / bytes of these inputs",
        "long_context.md",
        "262 KB are the inputs of the 32 layers",
        0.8,
        1.2,
        inputs_moved,
    ),
    Expectation(
        "checkpoint",
        "time for which a save blocks the loop / time of a copy to host memory",
        "checkpoint.md",
        "The loop waits only for the copy to host memory",
        0.0,
        1.5,
        blocked,
    ),
    Expectation(
        "largest",
        "16 bytes for each parameter of the largest model without offload / memory of all GPUs",
        "precision.md",
        "| 3 | 4/N | 4/N | | 8/N | 16/N | 16/N |",
        0.5,
        1.0,
        bytes_of_largest,
    ),
)


def verdicts(found: dict) -> list[dict[str, Any]]:
    """Return all expectations with what was measured."""
    rows = []
    for one in EXPECTED:
        verdict, value = ("not measured", None) if found.get("dry run") else one.judge(found)
        rows.append({**dataclasses.asdict(one), "measured": value, "verdict": verdict})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return verdicts as text: a line for the verdict, and a line for the page."""
    lines = ["", "what the documentation says, and what would refute it"]
    for one in rows:
        value = "" if one["measured"] is None else f" {one['measured']:.4g}"
        agrees = f"within {one['low']:g} to {one['high']:g}"
        lines.append(f"{one['verdict']:13s}{one['part']}: {one['figure']}:{value}, {agrees}")
        quote = " ".join(one["quote"].split())
        lines.append(f'{"":13s}docs/{one["page"]}: "{quote}"')
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(verdicts(json.loads(pathlib.Path(sys.argv[1]).read_text()))))
