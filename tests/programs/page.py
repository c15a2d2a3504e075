"""What the scripts that write a page's table of measured programs share."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END = "<!-- table: end -->\n"


def simulate() -> None:
    """Simulate eight devices. Call this before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of machine code alone, and half the time
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def rows_of(page: str) -> dict[str, str]:
    """The rows of programs on the page."""
    return {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}


def write(page: Path, script: str, table: str) -> None:
    """Replace the table that a script wrote on a page."""
    mark = f"<!-- table of tests/programs/{script}: begin -->\n"
    before, rest = page.read_text().split(mark)
    page.write_text(before + mark + table + END + rest.split(END, 1)[1])


def excepted(programs: Mapping[str, Any], most: str) -> list[str]:
    """A line for each exception. `most` formats the factor."""
    return [
        f"- `{name}`, {limit}, at most {most.format(one.most)}: {one.why}."
        for name, program in programs.items()
        for limit, one in program.exceptions.items()
    ]


def shared(programs: Mapping[str, Any]) -> list[str]:
    """The programs in which plain jit exchanges activations, with the reason."""
    reasons = [f"- `{name}`: {program.shared}." for name, program in programs.items() if program.shared]
    return ["", "Plain jit exchanges activations in these programs too, so as much is allowed:", "", *reasons]
