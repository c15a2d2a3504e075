"""The command `zerojax`: look after checkpoints. JAX is imported when a command needs it, and runs on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

FAILED = 2
app = typer.Typer(help="Look after the checkpoints of zerojax.", no_args_is_help=True, add_completion=False)

Directory = Annotated[Path, typer.Argument(help="Where a Checkpointer saves.", show_default=False)]
Step = Annotated[int | None, typer.Option(help="Which checkpoint.", show_default="the newest")]


@app.command()
def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Which checkpoint.", show_default="all")] = None,
) -> None:
    """Check every file of the checkpoints in DIRECTORY against its digest."""

    def check() -> list[int]:
        from .checkpoint.restoring import verify_steps

        return verify_steps(directory, step)

    for one in attempted(check):
        print(f"step {one}: intact")


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating parameters, as to bfloat16.", show_default="as they are")
    ] = None,
) -> None:
    """Write the parameters of a checkpoint in DIRECTORY to safetensors in OUT."""

    def write() -> list[Path]:
        from .checkpoint.export import export_checkpoint

        return export_checkpoint(directory, out, step=step, dtype=dtype)

    for path in attempted(write):
        print(path)


def attempted(work: Callable[[], Any]) -> Any:
    """Do something; an error is one line and exit status 2."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return work()
    except Exception as error:
        print(f"zerojax: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(FAILED) from None


def main() -> None:
    """Run the command line."""
    app()
