"""Define the command `zerojax`: estimate memory, plan and compare a step, launch a run, verify and export checkpoints.

JAX is imported only when a command needs it, so that `--help` prints at once. `launch` and `doctor` use all devices,
and all other commands use the CPU.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED = 2
app = typer.Typer(add_completion=False)


def argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


STEP_FUNCTION = (
    "FILE.py or FILE.py:NAME. NAME, by default make_step, is a function without arguments that returns (step, state, "
    "batch, *args). The code of FILE is run."
)
Directory = Annotated[Path, argument("DIRECTORY", "The directory of a Checkpointer.")]
File = Annotated[str, argument("FILE", STEP_FUNCTION)]
Options = Annotated[list[str] | None, argument("ARGUMENTS", "Arguments of FILE itself, after --.")]
Stages = Annotated[list[int] | None, typer.Option("--stage", help="A ZeRO stage. May be repeated.", show_default="all")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def print_version(asked: bool) -> None:
    if asked:
        from zerojax.version import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Estimate memory, plan and compare a training step, launch a run, verify and export checkpoints: ZeRO for JAX."""


@app.command()
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="The step to verify.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file of the checkpoints in DIRECTORY against its digest."""
    with errors_in_one_line(as_json):
        from zerojax.checkpoint.manifest import verify_steps

        intact = verify_steps(directory, step)
    text = "\n".join(f"step {number}: intact" for number in intact)
    print_result({"intact": intact} if as_json else text, as_json=as_json)


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, argument("OUT", "The folder to write.")],
    step: Annotated[int | None, typer.Option(help="The step to export.", show_default="the newest")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="A floating type to cast floating parameters to, such as bfloat16.", show_default="as saved"),
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(
            help="FILE.py:NAME. NAME is a dict from names in the safetensors file to parameters, to write the names "
            "and shapes of another library. The code of FILE is run.",
            show_default="the names in the checkpoint",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the parameters of a checkpoint in DIRECTORY as safetensors to OUT."""
    with errors_in_one_line(as_json):
        from zerojax import user_code
        from zerojax.checkpoint.export import export_checkpoint

        names = None if mapping is None else user_code.load_object(mapping)
        written = export_checkpoint(directory, out, step=step, dtype=dtype, mapping=names)
    paths = list(map(str, written))
    print_result({"written": paths} if as_json else "\n".join(paths), as_json=as_json)


@app.command()
def estimate(
    model: Annotated[
        str,
        argument(
            "MODEL",
            "A number of parameters, such as 7.5e9; or FILE.py:NAME. NAME is a function that returns parameters or an "
            "NNX module, which is only traced, or a tree of parameters. The code of FILE is run.",
        ),
    ],
    devices: Annotated[
        list[str] | None,
        typer.Option(
            help="A number of devices; or hosts of GPUs: h100:128x8 is 128 hosts with 8 each. May be repeated.",
            show_default="8",
        ),
    ] = None,
    stage: Stages = None,
    optimizer: Annotated[
        str, typer.Option(help="Name of an optax optimizer, or FILE.py:NAME of a transformation.")
    ] = "adamw",
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16.", show_default="bf16 for a number, otherwise the model's types"),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="host or disk: where to keep optimizer state. host+params or disk+params: and parameters, at stage 3.",
            show_default="the device",
        ),
    ] = None,
    shard_axis: Annotated[
        str | None, typer.Option(help="gpu shards everything within each host and replicates it over hosts (HSDP).")
    ] = None,
    params_axis: Annotated[str | None, typer.Option(help="gpu shards only parameters within each host.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the bytes per device and the bytes sent per step, for every stage, without making any arrays."""
    with errors_in_one_line(as_json):
        from zerojax import user_code
        from zerojax.config.tuning import Tuning
        from zerojax.planning import estimate as estimates

        estimated = estimates.estimate(
            user_code.load_model(model),
            tx=user_code.load_transformation(optimizer),
            devices=[int(count) if count.lstrip("-").isdigit() else count for count in devices or ["8"]],
            stages=tuple(stage or range(4)),
            precision=user_code.parse_precision(precision),
            offload=user_code.parse_offload(offload),
            tuning=Tuning(shard_axis=shard_axis, params_axis=params_axis),
        )
    if as_json:
        totals = [{**dataclasses.asdict(row), "total": row.total} for row in estimated.rows]
        print_result({**dataclasses.asdict(estimated), "rows": totals}, as_json=True)
    else:
        print_result(estimated)


@app.command()
def plan(
    file: File,
    options: Options = None,
    topology: Annotated[
        str, typer.Option(help="The GPUs to compile for: h200:8, h100:64, a100-80:16, or hosts of GPUs, b200:8x8.")
    ] = "h200:8",
    rates: Annotated[
        Path | None,
        typer.Option(
            help="A file that zerojax doctor --json wrote on such a GPU: the rates that it achieves.",
            show_default="usual shares of the peak rates",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of the global batch.", show_default="as in FILE")] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest batch that fits, by compiling several times.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print tables of blocks, collectives, kernels and rates.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the step in FILE for GPUs that this machine does not have, and say whether it fits, and its time.

    State and batch may be shapes.
    """
    # Hide XLA's warnings about programs that do not fit, because the plan says whether the step fits.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with errors_in_one_line(as_json):
        from zerojax import user_code
        from zerojax.gpus.devices import Rates, Topology
        from zerojax.planning import plan as plans
        from zerojax.planning.absent_program import rows_of, with_rows

        Rates.parse(rates).of(Topology.parse(topology))  # fails before the file is run
        if batch is not None and batch < 1:
            raise ValueError(f"--batch {batch}: a batch of at least 1 row is required.")
        step, state, rows, *args = user_code.load_program(file, options or ())
        if batch is not None and rows_of(rows) is None:
            raise ValueError(
                f"--batch {batch}: the leaves of the batch that {file} gives have different numbers of rows on dim 0, "
                f"or none. Give every leaf as many rows."
            )
        rows = rows if batch is None else with_rows(rows, batch)
        try:
            with user_code.running(user_code.split_reference(file)[0]):  # tracing runs the file's code
                given = {"topology": topology, "largest_batch": largest_batch, "rates": rates}
                compiled = plans.plan(step, state, rows, *args, **given)
        except (ValueError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise ValueError(f"{file} cannot be planned: {type(error).__name__}: {error}") from error
    print_result(compiled.to_dict() if as_json else compiled.details if verbose else compiled, as_json=as_json)


@app.command()
def compare(file: File, options: Options = None, stage: Stages = None, as_json: AsJson = False) -> None:
    """Run two steps of FILE on one device and on its mesh, and compare the results.

    State and batch must be arrays. On the CPU, 8 devices are simulated, unless FILE or XLA_FLAGS sets another number.

    The exit status is 1 if the results differ or are not finite.
    """
    simulated = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{simulated} {os.environ.get('XLA_FLAGS', '')}".strip()  # XLA takes the last number
    with errors_in_one_line(as_json):
        from zerojax import user_code
        from zerojax.planning.compare import compare as compare_step

        step, state, batch, *args = user_code.load_program(file, options or ())
        with user_code.running(user_code.split_reference(file)[0]):  # tracing runs the file's code
            comparison = compare_step(step, state, batch, *args, stages=tuple(stage or range(4)))
    print_result({**dataclasses.asdict(comparison), "ok": comparison.ok} if as_json else comparison, as_json=as_json)
    if not comparison.ok:
        raise typer.Exit(1)


@app.command()
def launch(
    file: Annotated[Path, argument("FILE", "A Python program that calls jax.distributed.initialize().")],
    options: Options = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Simulated CPU devices per process.", show_default="process i uses GPU i")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How many times the run may start again after a failure.")] = 0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for the other processes to end after a failure.")] = 10,
) -> None:
    """Run FILE in several processes on this host, to test a program that is written for many hosts.

    Each line of output starts with the number of its process. If a process fails, the others are ended. A restart after
    a kill (SIGKILL) has one process fewer, so that a test can lose a host. Ctrl-C and SIGTERM end the run.

    The exit status is that of the process that failed first, or 128 plus the number of the signal that ended it.
    """
    with errors_in_one_line(as_json=False, on_cpu=False):
        if not file.is_file():
            raise ValueError(f"{file}: there is no such file. Give the path of a Python program.")
        from zerojax.launcher import run_processes

        command = [sys.executable, str(file), *(options or ())]
        status = run_processes(command, processes, devices=devices, restarts=restarts, grace=grace)
    raise typer.Exit(status)


@app.command()
def doctor(
    path: Annotated[Path, typer.Option(help="A folder on the disk to measure.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check versions, devices, bandwidths, and whether offloading is correct on this machine.

    It also prints how many tokens per step, for each TFLOP/s of the devices, a step with parameters on disk must have
    so that the disk is not the limit. With --json, it prints the measured rates, too, for `zerojax plan --rates FILE`.
    The exit status is 1 if a check fails.
    """
    findings = []
    with errors_in_one_line(as_json, on_cpu=False):
        from zerojax.doctor import examine

        for finding in examine(path):
            findings.append(finding)
            if not as_json:
                verdict = ("ok ", "green") if finding.ok else ("BAD", "bold red")
                print_result(f"  {finding.name:24s} {finding.result}", verdict)
    if as_json:
        print_result([dataclasses.asdict(finding) for finding in findings], as_json=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def print_result(result: Any, *before: tuple[str, str], as_json: bool = False) -> None:
    """Print a result as JSON or as text, after the words in `before` with their styles. A terminal shows colours."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console
    from rich.highlighter import ReprHighlighter
    from rich.text import Text

    Console(soft_wrap=True).print(Text.assemble(*before, ReprHighlighter()(str(result))))


@contextlib.contextmanager
def errors_in_one_line(as_json: bool, *, on_cpu: bool = True) -> Iterator[None]:
    """Enter a context that prints any error in one line, and then ends the command with exit status 2."""
    if on_cpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        yield
    except Exception as error:
        print_error(" ".join(str(error).split()) or type(error).__name__, as_json=as_json)
        raise typer.Exit(FAILED) from None


def print_error(text: str, *, as_json: bool) -> None:
    print(f"zerojax: {text}", file=sys.stderr)
    if as_json:
        print_result({"error": text}, as_json=True)


def main() -> None:
    """Run the command line. Wrong usage also prints one line, and ends with exit status 2."""
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except Exception as error:
        message = getattr(error, "format_message", None)  # only typer's own errors have this method
        if message is None:
            raise
        text = f"{' '.join(message().split()).rstrip('.')}. See zerojax --help."
        print_error(text, as_json="--json" in sys.argv)
        status = FAILED

    sys.exit(status)
