"""Measure the published programs, keep the figures, and write their table in docs/layouts.md from them.

PYTHONPATH=. python tests/programs/published_table.py [--programs NAME ...] [--stages 2 3] [--page]

A program that was measured before at a stage is replaced. With `--page`, nothing is measured.
"""

import argparse
import json
import sys
from pathlib import Path

import page

if __name__ == "__main__":
    page.simulate()

import jax
from measured import by_jit, by_zerojax, exceeded, sent_once
from programs import PUBLISHED
from table import PAGE, together

FIGURES = Path(__file__).parents[2] / "benchmarks" / "results" / "published.json"
HEADER = (
    "| program | repository, and what it is | stages | FLOPs | temporary memory | passes |\n|---|---|---|---|---|---|"
)


def measured(name: str, stage: int) -> dict[str, float]:
    """What a program costs at a stage, relative to plain jit and to one gather of all parameters."""
    plain, found = by_jit(name), by_zerojax(name, stage, "global")
    return {
        "flops": found.flops / plain.flops,
        "memory": found.temporary / plain.temporary,
        "passes": found.gathered / sent_once(name),
    }


def row(name: str, figures: dict[str, dict[str, float]]) -> str:
    """A program's row of the table, from its figures by stage."""
    column = lambda key: together([figures[stage][key] for stage in sorted(figures)], ".2f")
    cells = (
        f"`{name}`",
        PUBLISHED[name].about,
        ", ".join(sorted(figures)),
        *map(column, ("flops", "memory", "passes")),
    )
    return f"| {' | '.join(cells)} |"


def rendered(figures: dict) -> str:
    """The table as Markdown, and the reasons for its exceptions."""
    lines = [HEADER, *(row(name, figures[name]) for name in PUBLISHED if name in figures)]
    allowed = page.excepted(PUBLISHED, "{}")
    return "\n".join([*lines, *page.shared(PUBLISHED), "", "Exceptions:", "", *allowed, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="*", choices=[*PUBLISHED], default=[*PUBLISHED], metavar="NAME")
    parser.add_argument("--stages", nargs="*", type=int, choices=(1, 2, 3), default=(2, 3))
    parser.add_argument("--page", action="store_true", help="write the page from the figures of before")
    given = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in [] if given.page else given.programs:
        for stage in given.stages:
            figures.setdefault(name, {})[str(stage)] = measured(name, stage)
            print(name, stage, figures[name][str(stage)], *exceeded(name, stage), flush=True)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        jax.clear_caches()
    page.write(PAGE, "published_table.py", rendered(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
