"""Measure losses with kernels, keep the figures, and write the table of docs/kernels.md from them.

PYTHONPATH=. python tests/programs/kernel_table.py [--names NAME ...] [--rounds 2] [--page]

A case that was measured before is replaced. With `--page`, nothing is measured. Libraries that are not installed
are left out.
"""

import argparse
import json
import sys
from pathlib import Path

import page

if __name__ == "__main__":
    page.simulate()

from kernel_measured import Case, by_jit, by_zerojax, cases, exceeded, forget, of_result, ratios
from kernel_registry import KERNELS, KINDS

ROOT = Path(__file__).parents[2]
PAGE, FIGURES = ROOT / "docs" / "kernels.md", ROOT / "benchmarks" / "results" / "kernels.json"
HEADER = (
    "| loss | what has the kernel | forms and stages | error | bytes sent | FLOPs | memory |\n"
    "|---|---|---|---|---|---|---|"
)


def measured(case: Case, stage: int) -> dict:
    """What a case gives and costs, as figures to keep."""
    errors = {view: of_result(by_zerojax(case, stage, view), case) for view in KERNELS[case.name].views}
    costs = ratios(case, stage, "global")._asdict()
    plain, over = of_result(by_jit(case), case), exceeded(case, stage)
    return {**case._asdict(), "stage": stage, "errors": errors, "plain": plain, **costs, "over": over}


def reason(name: str) -> str:
    """Why a loss exchanges activations."""
    return KERNELS[name].bare or KERNELS[name].shared


def form_of(figure: dict) -> str:
    """A case in a few characters."""
    return " ".join(filter(None, (figure["form"], figure["option"], str(figure["stage"]))))


def row(figures: list[dict]) -> str:
    """A loss's row of the table."""
    each = lambda key: " / ".join(f"{figure[key]:.2f}" for figure in figures)
    kernel = KERNELS[figures[0]["name"]]
    exact = " / ".join(f"{max(figure['errors'].values()):.0e}" for figure in figures)
    forms = ", ".join(map(form_of, figures))
    mark = " ¹" * bool(reason(kernel.name))
    cells = f"`{kernel.name}`{mark}", kernel.about, forms, exact, each("bytes"), each("flops"), each("memory")
    return f"| {' | '.join(cells)} |"


def rendered(figures: list[dict]) -> str:
    """The tables as Markdown, one for each kind."""
    lines = []
    for kind in KINDS:
        lines += ["", f"**{kind}**", "", HEADER]
        for name in (kernel.name for kernel in KERNELS.values() if kernel.kind == kind):
            of_name = [figure for figure in figures if figure["name"] == name]
            lines += [row(of_name)] if of_name else []
    reasons = sorted({*map(reason, KERNELS)} - {""})
    lines += ["", f"¹ What plain `jit` exchanges is allowed, too: {'; '.join(reasons)}."]
    if excepted := page.excepted(KERNELS, "{} times"):
        lines += ["", "Exceptions from 1.05:", "", *excepted]
    return "\n".join([*lines[1:], ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", choices=[*KERNELS], default=[*KERNELS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="leave out the first rounds")
    parser.add_argument("--page", action="store_true", help="write the page from the figures there are")
    given = parser.parse_args()
    key = lambda figure: (*(figure[name] for name in Case._fields), figure["stage"])
    figures = {key(figure): figure for figure in json.loads(FIGURES.read_text())} if FIGURES.exists() else {}
    wanted = cases(given.rounds)[given.first * len(KERNELS) :]
    for case, stage in [] if given.page else [one for one in wanted if one[0].name in given.names]:
        figure = measured(case, stage)
        figures[key(figure)] = figure
        print(row([figure]), *figure["over"], sep="\n    ", flush=True)
        FIGURES.write_text(json.dumps([*figures.values()], indent=1) + "\n")
        forget()
    page.write(PAGE, "kernel_table.py", rendered([*figures.values()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
