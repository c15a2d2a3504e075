"""The command `zerojax`: estimate memory, plan and compare a step, verify and export checkpoints.

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
app = typer.Typer(add_completion=False)

Directory = Annotated[Path, typer.Argument(help="Where a Checkpointer saves.", show_default=False)]
Step = Annotated[int | None, typer.Option(help="Which checkpoint.", show_default="the newest")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_version(asked: bool) -> None:
    """Print the version, and end."""
    if asked:
        from zerojax.version import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Estimate memory, plan and compare a step, verify and export checkpoints: ZeRO for JAX."""


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

    intact = run_or_exit(check, as_json=as_json)
    text = "\n".join(f"step {number}: intact" for number in intact)
    print_result({"intact": intact} if as_json else text, as_json=as_json)


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating parameters, as to bfloat16.", show_default="as they are")
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(help="FILE.py:NAME, a dict of names in other libraries; runs FILE.", show_default="as they are"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the parameters of a checkpoint in DIRECTORY to safetensors in OUT."""

    def write() -> list[Path]:
        from zerojax import user_code
        from zerojax.checkpoint.export import export_checkpoint

        names = None if mapping is None else user_code.load_object(mapping)
        return export_checkpoint(directory, out, step=step, dtype=dtype, mapping=names)

    written = [str(path) for path in run_or_exit(write, as_json=as_json)]
    print_result({"written": written} if as_json else "\n".join(written), as_json=as_json)


@app.command()
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A number of parameters, as 7.5e9; or FILE.py:NAME, a function that returns parameters (it is only "
            "traced), or a Flax module and the inputs of its init. Runs FILE.",
            show_default=False,
        ),
    ],
    devices: Annotated[
        list[str] | None,
        typer.Option(help="Number of devices, or hosts of GPUs as h100:128x8; may be repeated.", show_default="8"),
    ] = None,
    stage: Annotated[list[int] | None, typer.Option(help="ZeRO stage; may be repeated.", show_default="all")] = None,
    optimizer: Annotated[str, typer.Option(help="Of optax, by name, or FILE.py:NAME, a transformation.")] = "adamw",
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="bf16 for a number, else as the model is")
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help="Offload optimizer state to host or disk.", show_default="the device")
    ] = None,
    shard_axis: Annotated[str | None, typer.Option(help="Of hosts: gpu shards within them (HSDP).")] = None,
    params_axis: Annotated[str | None, typer.Option(help="Of hosts: gpu shards parameters within them.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it, to this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate bytes per device and bytes sent per step, for every stage, before anything is built."""

    def compute() -> Any:
        from zerojax import user_code
        from zerojax.planning import estimate as estimates

        check_png(png)
        return estimates.estimate(
            user_code.load_model(model),
            tx=user_code.load_transformation(optimizer),
            devices=[int(count) if count.lstrip("-").isdigit() else count for count in devices or ["8"]],
            stages=tuple(stage or range(4)),
            precision=user_code.parse_precision(precision),
            offload=user_code.parse_offload(offload),
            shard_axis=shard_axis,
            params_axis=params_axis,
        )

    estimated = run_or_exit(compute, as_json=as_json)
    if png is not None:
        run_or_exit(lambda: save_plot("memory", estimated, png), as_json=as_json)
    if as_json:
        totals = [{**dataclasses.asdict(row), "total": row.total} for row in estimated.rows]
        print_result({**dataclasses.asdict(estimated), "rows": totals}, as_json=True)
    else:
        print_result(estimated)


@app.command()
def plan(
    file: Annotated[
        str,
        typer.Argument(
            help="FILE.py or FILE.py:NAME, a function without arguments that returns (step, state, batch, *args); "
            "shapes are enough. The name is make_step unless given. Runs FILE.",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of the file itself.", show_default=False)
    ] = None,
    topology: Annotated[str, typer.Option(help="Absent GPUs: h200:8, h100:64, a100-80:16, b200:8x8.")] = "h200:8",
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.", show_default="as in FILE")] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest that fits; takes some more compilations.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw its timeline, to this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the step in FILE for absent GPUs: memory, communication, time, and whether it fits."""
    # XLA warns of every program that does not fit; the plan says so itself.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    def compute() -> Any:
        from zerojax import user_code
        from zerojax.gpus.topology import Topology
        from zerojax.planning.plan import plan
        from zerojax.planning.shapes import rows_of, with_rows

        Topology.parse(topology)  # fails before the file is run
        check_png(png)
        if batch is not None and batch < 1:
            raise ValueError(f"--batch {batch}: a batch of at least 1 row is required.")
        step, state, rows, *args = user_code.load_program(file, options or ())
        if batch is not None and rows_of(rows) is None:
            raise ValueError(
                f"--batch {batch}: the leaves of the batch that {file} gives have different numbers of rows on dim 0, "
                f"or none. Give every leaf as many."
            )
        rows = rows if batch is None else with_rows(rows, batch)
        try:
            with user_code.running(user_code.split_reference(file)[0]):  # tracing runs its code
                return plan(step, state, rows, *args, topology=topology, largest_batch=largest_batch)
        except (ValueError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise ValueError(f"{file} cannot be planned: {type(error).__name__}: {error}") from error

    compiled = run_or_exit(compute, as_json=as_json)
    if png is not None:
        run_or_exit(lambda: save_plot("timeline", compiled, png), as_json=as_json)
    print_result(compiled.to_dict() if as_json else compiled, as_json=as_json)


@app.command()
def compare(
    file: Annotated[
        str,
        typer.Argument(
            help="FILE.py or FILE.py:NAME, a function without arguments that returns (step, state, batch, *args), "
            "arrays. The name is make_step unless given. Runs FILE.",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of the file itself.", show_default=False)
    ] = None,
    stage: Annotated[list[int] | None, typer.Option(help="ZeRO stage; may be repeated.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Take two steps of FILE on one device and on its mesh; exit status 1 if they differ, or are not finite.

    On the CPU there are 8 simulated devices, unless FILE or XLA_FLAGS makes another number.
    """
    simulated = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{simulated} {os.environ.get('XLA_FLAGS', '')}".strip()  # the last one counts

    def compute() -> Any:
        from zerojax import user_code
        from zerojax.planning.compare import compare_step

        step, state, batch, *args = user_code.load_program(file, options or ())
        path, _ = user_code.split_reference(file)
        with user_code.running(path):  # tracing runs its code
            return compare_step(step, state, batch, *args, stages=tuple(stage or range(4)))

    comparison = run_or_exit(compute, as_json=as_json)
    print_result({**dataclasses.asdict(comparison), "ok": comparison.ok} if as_json else comparison, as_json=as_json)
    if not comparison.ok:
        raise typer.Exit(1)


@app.command()
def deepspeed(
    config: Annotated[Path, typer.Argument(help="A DeepSpeed configuration, as ds_config.json.", show_default=False)],
    auto: Annotated[
        list[str] | None, typer.Option(help='What to take for "auto", as optimizer.params.lr=3e-4; may be repeated.')
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Data-parallel workers.", show_default=False)] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Python for an optax transformation, where the file has none.")
    ] = None,
) -> None:
    """Print the Python that does what a DeepSpeed configuration says, and key by key what became of it."""

    def read() -> Any:
        from zerojax import user_code
        from zerojax.deepspeed import from_deepspeed

        given = dict(map(user_code.parse_setting, auto or []))
        return from_deepspeed(config, auto=given, devices=devices, optimizer=optimizer)

    typer.echo(str(run_or_exit(read, as_json=False)))


@app.command()
def doctor(
    path: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, bandwidths, and whether offloading is correct here; exit status 1 if not."""

    def check() -> list:
        from zerojax.doctor import examine

        findings = []
        for finding in examine(path):
            findings.append(finding)
            if not as_json:
                verdict = ("ok ", "green") if finding.ok else ("BAD", "bold red")
                print_result(f"  {finding.name:24s} {finding.result}", verdict)
        return findings

    findings = run_or_exit(check, as_json=as_json, on_cpu=False)
    if as_json:
        print_result([dataclasses.asdict(finding) for finding in findings], as_json=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def print_result(result: Any, *before: tuple[str, str], as_json: bool = False) -> None:
    """Print a result, in colours on a terminal; lines are not wrapped.

    Args:
        result: To print as its `str`, or as JSON.
        before: Words to print before it, each with its style.
        as_json: Whether to print JSON.
    """
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console
    from rich.highlighter import ReprHighlighter
    from rich.text import Text

    Console(soft_wrap=True).print(Text.assemble(*before, ReprHighlighter()(str(result))))


def check_png(png: Path | None) -> None:
    """Refuse a picture's path before any work is done."""
    if png is not None and not png.parent.is_dir():
        raise ValueError(f"--png {png}: there is no folder {png.parent}. Make it first.")


def save_plot(name: str, data: Any, png: Path) -> None:
    """Write a picture of the module `plot` to a file."""
    from zerojax import plot

    getattr(plot, name)(data).savefig(png, dpi=150)


def run_or_exit(command: Callable[[], Any], *, as_json: bool, on_cpu: bool = True) -> Any:
    """Run a command, on the CPU unless told otherwise; an error is one line, JSON if wanted, and exit status 2."""
    if on_cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return command()
    except Exception as error:
        print_error(" ".join(str(error).split()) or type(error).__name__, as_json=as_json)
        raise typer.Exit(FAILED) from None


def print_error(text: str, *, as_json: bool) -> None:
    """Print an error to standard error and, where JSON is wanted, as `{"error": ...}` to standard output."""
    print(f"zerojax: {text}", file=sys.stderr)
    if as_json:
        print_result({"error": text}, as_json=True)


def main() -> None:
    """Run the command line; wrong usage is one line and exit status 2, too."""
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except Exception as error:
        message = getattr(error, "format_message", None)  # typer's own errors have it
        if message is None:
            raise
        text = f"{' '.join(message().split()).rstrip('.')}. See zerojax --help."
        print_error(text, as_json="--json" in sys.argv)
        status = FAILED

    sys.exit(status)
