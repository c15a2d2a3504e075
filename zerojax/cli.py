"""The command `zerojax`: estimate memory, plan a step, look after checkpoints.

JAX is imported when a command needs it, and runs on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED = 2
app = typer.Typer(
    help="ZeRO for JAX: estimate memory, plan a step, look after checkpoints.",
    add_completion=False,
)

Directory = Annotated[Path, typer.Argument(help="Where a Checkpointer saves.", show_default=False)]
Step = Annotated[int | None, typer.Option(help="Which checkpoint.", show_default="the newest")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Which checkpoint.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file of the checkpoints in DIRECTORY against its digest."""

    def check() -> list[int]:
        from zerojax.checkpoint.verifying import verify_steps

        return verify_steps(directory, step)

    intact = attempted(check)
    show({"intact": intact} if as_json else "\n".join(f"step {one}: intact" for one in intact), as_json=as_json)


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating parameters, as to bfloat16.", show_default="as they are")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the parameters of a checkpoint in DIRECTORY to safetensors in OUT."""

    def write() -> list[Path]:
        from zerojax.checkpoint.export import export_checkpoint

        return export_checkpoint(directory, out, step=step, dtype=dtype)

    written = [str(path) for path in attempted(write)]
    show({"written": written} if as_json else "\n".join(written), as_json=as_json)


@app.command()
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A number of parameters, as 7.5e9; or FILE.py:NAME, a function that gives parameters (it is not run, "
            "only traced), or a Flax module and the inputs of its init.",
            show_default=False,
        ),
    ],
    devices: Annotated[list[int] | None, typer.Option(help="How many; may be repeated.", show_default="8")] = None,
    stage: Annotated[list[int] | None, typer.Option(help="Which; may be repeated.", show_default="all")] = None,
    optimizer: Annotated[str, typer.Option(help="Of optax, by name, or FILE.py:NAME, a transformation.")] = "adamw",
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="bf16 for a number, else as the model is")
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help="host or disk: where optimizer state waits.", show_default="the device")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it too, into this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes per device and bytes sent per step, for every stage, before anything is built."""

    def found() -> Any:
        from zerojax import user_code
        from zerojax.planning import estimate as estimates

        check_png(png)
        return estimates.estimate(
            user_code.model(model),
            tx=user_code.transformation(optimizer),
            devices=tuple(devices or (8,)),
            stages=tuple(stage or range(4)),
            precision=user_code.precision(precision),
            offload=user_code.offload(offload),
        )

    estimated = attempted(found)
    if png is not None:
        attempted(lambda: drawn("memory", estimated, png))
    if as_json:
        totals = [{**dataclasses.asdict(row), "total": row.total} for row in estimated.rows]
        show({**dataclasses.asdict(estimated), "rows": totals}, as_json=True)
    else:
        show(estimated)


@app.command()
def plan(
    file: Annotated[
        str,
        typer.Argument(
            help="FILE.py or FILE.py:NAME, a function without arguments that returns (step, state, batch, *args); "
            "shapes are enough. The name is make_step unless given.",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(help="After --: options of the file itself.", show_default=False)
    ] = None,
    topology: Annotated[str, typer.Option(help="Absent GPUs: h200:8, h100:64, a100-80:16, b200:8x8.")] = "h200:8",
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.", show_default="as in FILE")] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Look for the largest that fits; takes some compilations more.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw its timeline, into this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the step in FILE for absent GPUs: memory, communication, time, and whether it fits."""
    # XLA warns of every program that does not fit; the plan says so itself.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    def found() -> Any:
        from zerojax import user_code
        from zerojax.gpus.topology import Topology
        from zerojax.planning.plan import plan, rows_of, with_rows

        Topology.parse(topology)  # before the file is run
        check_png(png)
        if batch is not None and batch < 1:
            raise ValueError(f"--batch {batch}: a batch of at least 1 row is required.")
        step, state, rows, *args = user_code.program(file, options or ())
        if batch is not None and rows_of(rows) is None:
            raise ValueError(
                f"--batch {batch}: the leaves of the batch that {file} gives have different numbers of rows on dim 0, "
                f"or none. Leave --batch out, and give such a batch in the file."
            )
        rows = rows if batch is None else with_rows(rows, batch)
        try:
            with user_code.beside(user_code.place_of(file)[0]):  # tracing runs its code, too
                return plan(step, state, rows, *args, topology=topology, largest_batch=largest_batch)
        except (ValueError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise ValueError(f"{file} cannot be planned: {type(error).__name__}: {error}") from error

    made = attempted(found)
    if png is not None:
        attempted(lambda: drawn("timeline", made, png))
    show(made.to_dict() if as_json else made, as_json=as_json)


@app.command()
def doctor(
    path: Annotated[Path, typer.Option(help="A folder on the disk whose speed is wanted.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Look at versions, devices, bandwidths, and whether offloading gives right numbers here; status 1 if not."""

    def found() -> list:
        from zerojax.doctor import examine

        findings = []
        for finding in examine(path):
            findings.append(finding)
            if not as_json:
                verdict = ("ok ", "green") if finding.ok else ("BAD", "bold red")
                show(f"  {finding.name:24s} {finding.found}", verdict)
        return findings

    findings = attempted(found, on_cpu=False)
    if as_json:
        show([dataclasses.asdict(finding) for finding in findings], as_json=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def show(found: Any, *before: tuple[str, str], as_json: bool = False) -> None:
    """Print what was found, in colours where that is a terminal; no line is broken.

    Args:
        found: As its `str` has it; for JSON, what that is made of.
        before: Words in front of it, each with its style.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.highlighter import ReprHighlighter
    from rich.text import Text

    Console(soft_wrap=True).print(Text.assemble(*before, ReprHighlighter()(str(found))))


def check_png(png: Path | None) -> None:
    """Refuse a picture's file before the work that it would be drawn of."""
    if png is not None and not png.parent.is_dir():
        raise ValueError(f"--png {png}: there is no folder {png.parent}. Make it first.")


def drawn(picture: str, of: Any, png: Path) -> None:
    """Write a picture of `plot` into a file."""
    from zerojax import plot

    getattr(plot, picture)(of).savefig(png, dpi=150)


def attempted(work: Callable[[], Any], *, on_cpu: bool = True) -> Any:
    """Do something, without an accelerator unless it is looked for; an error is one line and exit status 2."""
    if on_cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return work()
    except Exception as error:
        print(f"zerojax: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(FAILED) from None


def main() -> None:
    """Run the command line; when it is used wrongly, that is one line and exit status 2, too."""
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except Exception as error:
        said = getattr(error, "format_message", None)  # what typer's own errors have
        if said is None:
            raise
        print(f"zerojax: {' '.join(said().split()).rstrip('.')}. See zerojax --help.", file=sys.stderr)
        status = FAILED
    sys.exit(status)
