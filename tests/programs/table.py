"""Measure programs, and write their rows into a table of the documentation.

PYTHONPATH=. python tests/programs/table.py layouts|published|kernels [--programs NAME ...]

Rows of other programs stay as they are. `--programs` without a name measures nothing, and writes the table anew.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of machine code alone, and half the time
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import kernel_measured
import measured
from kernel_registry import KERNELS, KINDS
from programs import LAYOUTS, PUBLISHED

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- table: end -->\n"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table on a page, with one row for each program.

    Attributes:
        name: Its name on the page.
        page: The page.
        programs: The programs by name, in order.
        columns: The names of the columns.
        cells: `cells(name)` measures a program: the cells of its row, and lines about limits that it exceeds.
    """

    name: str
    page: Path
    programs: Mapping[str, Any]
    columns: str
    cells: Callable

    def split(self) -> tuple[str, str, str]:
        """The page before the table, the table, and the page after it."""
        mark = f"<!-- table of tests/programs/table.py {self.name}: begin -->\n"
        before, rest = self.page.read_text().split(mark)
        table, after = rest.split(END, 1)
        return before + mark, table, END + after

    def rows(self) -> dict[str, str]:
        """The rows on the page."""
        return {line.split("`")[1]: line for line in self.split()[1].splitlines() if line.startswith("| `")}

    def write(self, rows: Mapping[str, str]) -> None:
        """Write rows, reasons and exceptions on the page."""
        rows = {name: rows[name] for name in self.programs if name in rows} | rows
        header = f"| {self.columns} |\n|{'---|' * (1 + self.columns.count('|'))}"
        kinds, lines = list(dict.fromkeys(program.kind for program in self.programs.values())), []
        # Rows of libraries that are not installed here stay.
        kind_of = lambda name: self.programs[name].kind if name in self.programs else kinds[-1]
        for kind in kinds:
            lines += ["", f"**{kind}**", ""] if len(kinds) > 1 else [""]
            lines += [header, *(rows[name] for name in rows if kind_of(name) == kind)]
        lines += ["", "In these programs, plain jit exchanges activations, too, and as many bytes are allowed:", ""]
        lines += [f"- `{name}`: {program.shared}." for name, program in self.programs.items() if program.shared]
        exceptions = [
            f"- `{name}`, {limit}, at most {one.most}: {one.why}."
            for name, program in self.programs.items()
            for limit, one in program.exceptions.items()
        ]
        lines += ["", "Exceptions, each with its column and the largest value:", "", *exceptions] if exceptions else []
        before, _, after = self.split()
        self.page.write_text(before + "\n".join([*lines[1:], ""]) + after)


def together(values, form=".2f"):
    """The values of all stages; one, if they are the same."""
    texts = [format(value, form) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def of_layout(name):
    plain, once, stages = measured.by_jit(name), measured.sent_once(name), range(4)
    found, device = ([measured.by_zerojax(name, s, view) for s in stages] for view in ("global", "device"))
    cells = (
        LAYOUTS[name].about,
        together(c.flops / plain.flops for c in found),
        together(c.temporary / plain.temporary for c in found[:3]),
        together((c.beyond / 1024 for c in found), ",.0f"),
        together(c.moved / once for c in found),
        together(c.moved / once for c in device),
    )
    return cells, [line for s in stages for line in measured.exceeded(name, s)]


def of_published(name):
    stages = (2, 3)
    ratios = [[x.found / x.base for x in measured.limits(name, s)[:3]] for s in stages]
    cells = PUBLISHED[name].about, ", ".join(map(str, stages)), *map(together, zip(*ratios, strict=True))
    return cells, [line for s in stages for line in measured.exceeded(name, s)]


def of_kernel(name):
    ((case, stage),) = (one for one in kernel_measured.cases(1) if one[0].name == name)
    kernel = KERNELS[name]
    form = " ".join(filter(None, (case.form, case.option, str(stage))))
    results = (kernel_measured.by_zerojax(case, stage, view) for view in kernel.views)
    error = max(kernel_measured.of_result(result, case) for result in results)
    ratios = (f"{x.found / x.base:.2f}" for x in kernel_measured.limits(case, stage))
    return (kernel.about, form, f"{error:.0e}", *ratios), kernel_measured.exceeded(case, stage)


BY_KIND = dict(sorted(KERNELS.items(), key=lambda item: KINDS.index(item[1].kind)))
OF_LAYOUTS = "program | what it is | FLOPs | temporary memory | beyond parameters, KiB | moved | in device view"
OF_PUBLISHED = "program | repository, and what it is | stages | FLOPs | temporary memory | passes"
OF_KERNELS = "loss | what has the kernel | form and stage | error | bytes sent | FLOPs | memory"
TABLES = {
    table.name: table
    for table in (
        Table("layouts", DOCS / "layouts.md", LAYOUTS, OF_LAYOUTS, of_layout),
        Table("published", DOCS / "layouts.md", PUBLISHED, OF_PUBLISHED, of_published),
        Table("kernels", DOCS / "kernels.md", BY_KIND, OF_KERNELS, of_kernel),
    )
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--programs", nargs="*", metavar="NAME")
    given = parser.parse_args()
    table = TABLES[given.table]
    for name in table.programs if given.programs is None else given.programs:
        cells, over = table.cells(name)
        row = f"| `{name}` | {' | '.join(cells)} |"
        print(row, *over, sep="\n    ", flush=True)
        table.write(table.rows() | {name: row})
        kernel_measured.forget()
    table.write(table.rows())


if __name__ == "__main__":
    main()
