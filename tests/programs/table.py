"""Measure the programs of the registry, and write the table of docs/layouts.md.

PYTHONPATH=. python tests/programs/table.py [--programs NAME ...] [--stages 1 3] [--causes]

With some programs their rows are replaced, and with some stages they are printed alone.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import page

if __name__ == "__main__":
    page.simulate()

import jax
from measured import SLACK, by_jit, by_zerojax, limits, sent_once
from programs import LAYOUTS, TABLE

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
STAGES = (0, 1, 2, 3)
HEADER = (
    "| program | what it is | FLOPs | temporary memory | beyond parameters, KiB | moved | in device view |\n"
    "|---|---|---|---|---|---|---|"
)


def together(values, form):
    """The values of all stages; one, if they are the same."""
    texts = [format(value, form) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def row(name, stages):
    """A program's row of the table."""
    plain, once = by_jit(name), sent_once(name)
    found, device = ([by_zerojax(name, s, view) for s in stages] for view in ("global", "device"))
    cells = (
        f"`{name}`",
        TABLE[name].about,
        together([c.flops / plain.flops for c in found], ".2f"),
        together([c.temporary / plain.temporary for c, s in zip(found, stages, strict=True) if s < 3] or [0], ".2f"),
        together([c.beyond / 1024 for c in found], ",.0f"),
        together([c.moved / once for c in found], ".2f"),
        together([c.moved / once for c in device], ".2f"),
    )
    return f"| {' | '.join(cells)} |"


def rendered(rows):
    """The tables as Markdown, one for each group; `rows` are those of programs."""
    lines = []
    for kind in dict.fromkeys(program.kind for program in LAYOUTS.values()):
        lines += ["", f"**{kind}**", "", HEADER, *(rows[n] for n, program in LAYOUTS.items() if program.kind == kind)]
    lines += page.shared(LAYOUTS)
    if excepted := page.excepted(LAYOUTS, "{} times those of plain jit"):
        lines += ["", "Exceptions:", "", *excepted]
    return "\n".join([*lines[1:], ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="*", choices=[*LAYOUTS], default=[*LAYOUTS], metavar="NAME")
    parser.add_argument("--stages", nargs="*", type=int, choices=STAGES, default=STAGES)
    parser.add_argument("--causes", action="store_true", help="print the largest collectives that are not of zerojax")
    given = parser.parse_args()
    rows, failed = {}, 0
    print(HEADER, flush=True)
    for name in given.programs:
        rows[name] = row(name, given.stages)
        print(rows[name], flush=True)
        for stage in given.stages:
            over = [one.name for one in limits(name, stage) if one.is_exceeded]
            failed += bool(over)
            if over:
                print(f"    stage {stage} exceeds {', '.join(over)}", flush=True)
            causes = by_zerojax(name, stage, "global").causes if given.causes else Counter()
            for cause, sent in causes.most_common(4):
                if sent > SLACK:
                    print(f"        {sent:,d} bytes: {cause}")
        jax.clear_caches()
    print(f"{failed} of {len(given.programs) * len(given.stages)} programs and stages exceed a limit")
    rows = page.rows_of(PAGE.read_text()) | rows
    if set(LAYOUTS) <= set(rows) and set(given.stages) == set(STAGES):
        page.write(PAGE, "table.py", rendered(rows))
    else:
        print("docs/layouts.md stays as it is: that needs all stages, and a row of each program")
    return 0


if __name__ == "__main__":
    sys.exit(main())
