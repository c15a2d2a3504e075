"""The table: which files of others are run, how their optimizers are sharded, what they count, and why a test is not.

python tests/outside/suites.py      writes the table into docs/outside.md
"""

import dataclasses
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "outside.md"
MARKS = ("<!-- table of tests/outside/suites.py: begin -->\n", "<!-- table: end -->\n")

# Of which the counts below are; with others the reasons are checked, and not the counts.
VERSIONS = {"jax": "0.12.0.1", "optax": "0.2.8", "flax": "0.12.12"}


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why some tests of a file do not pass.

    Attributes:
        tests: A regular expression: `Class::test` of all of them, and of no other.
        outcome: "skipped" by the file itself, "failed", or "left out" by us.
        why: The reason.
        without_us: Whether it fails without zerojax, too; that is run.
        shown: The tests in words; None: as the expression.
    """

    tests: str
    outcome: str
    why: str
    without_us: bool = False
    shown: str | None = None


@dataclasses.dataclass(frozen=True)
class File:
    """A file of tests.

    Attributes:
        path: Below the root of its package.
        names: What is sharded; as for `plugin.Wrapping`, `placed` and `versions` too.
        passed: How many tests pass.
        skipped: How many skip themselves.
        failed: How many fail.
        left_out: How many are not run.
        reasons: For each test that does not pass.
    """

    path: str
    names: tuple[str, ...]
    passed: int
    skipped: int = 0
    failed: int = 0
    left_out: int = 0
    reasons: tuple[Reason, ...] = ()
    placed: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self):
        return Path(self.path).name


@dataclasses.dataclass(frozen=True)
class Suite:
    """Files that one process runs in one way.

    Attributes:
        title: What is wrapped, in words.
        package: Whose files they are.
        files: The files.
        mesh: Size, axis and type of axis.
        needs: Modules that the files import beside.
    """

    title: str
    package: str
    files: tuple[File, ...]
    mesh: tuple[int, str, str] = (2, "data", "Auto")
    needs: tuple[str, ...] = ()


def all_but(test, kept, shown, why):
    """A reason to leave out all cases of a test but those with some numbers; `shown` follows the test's name."""
    return Reason(rf"{test}(?!({'|'.join(map(str, kept))})$)\d+", "left out", why, shown=test + shown)


NUMBERS = "parameters are Python numbers: zerojax raises an error, because a number cannot be sharded"
MESSAGE = "it expects the error messages of another version of JAX"
OWN_PROGRAM = "inside of `jax.pmap`, each device runs its own program: zerojax raises an error"

PYTHON_NUMBERS = Reason(r"ExtraArgsTest::test_extra_args(_positional_params)?", "failed", NUMBERS)
PMAP = Reason(r"ConditionalityTest::test_apply_if_finite_pmap", "failed", OWN_PROGRAM)
BAD_TREES = Reason(r"\w+::test_(selective_)?bad_structure(_raises)?", "failed", MESSAGE, without_us=True)

SUITES = {
    "alias": Suite(
        "every optimizer of `optax.alias`",
        "optax",
        (
            File(
                "_src/alias_test.py",
                ("alias",),
                passed=318,
                skipped=1,
                left_out=304,
                reasons=(
                    all_but(
                        "AliasTest::test_optimization", (12, 18), ", all but 2", "10 000 steps each: adafactor is run"
                    ),
                    all_but(
                        "AliasTest::test_state_shape_dtype_shard_stability",
                        range(3, 198, 6),
                        ", all but float64",
                        "what zerojax does is the same for each type",
                    ),
                    all_but(
                        "LBFGSTest::test_against_plain_implementation",
                        (4,),
                        ", all but 1",
                        "the implementation compared with takes most of the time; 3 amplifies rounding past its 1e-5, "
                        "without zerojax, too, where programs are compiled with optimisation",
                    ),
                    Reason(
                        r"AliasTest::test_optimization18",
                        "skipped",
                        "adafactor without a rate is not expected to converge",
                    ),
                ),
                placed=("_setup_parabola", "_setup_rosenbrock"),
            ),
        ),
        needs=("sklearn", "scipy"),
    ),
    "contrib": Suite(
        "every optimizer of `optax.contrib`, some in `mechanize`, `schedule_free` and `reduce_on_plateau`",
        "optax",
        (
            File(
                "contrib/_common_test.py",
                ("_get_opt_factory",),
                passed=184,
                skipped=3,
                left_out=358,
                reasons=(
                    all_but(
                        "ContribTest::test_optimizers",
                        (51,),
                        ", all but 1",
                        "30 000 steps each: Muon of a matrix and a vector is run",
                    ),
                    all_but(
                        "ContribTest::test_optimizers_accept_extra_args",
                        range(42),
                        " of `mechanize` around others",
                        "with optimizers that are run alone above",
                    ),
                    all_but(
                        "ContribTest::test_state_shape_dtype_shard_stability",
                        range(3, 84, 4),
                        ", all but float64",
                        "what zerojax does is the same for each type",
                    ),
                    all_but(
                        "ContribTest::test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such",
                        range(18),
                        " of wrappers",
                        "the wrapper is not used",
                    ),
                    Reason(
                        r"ContribTest::test_optimizers_can_be_wrapped_in_inject_hyperparams20",
                        "skipped",
                        "`reduce_on_plateau` does not support it",
                    ),
                    Reason(
                        r"ContribTest::test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such\d+",
                        "skipped",
                        "the optimizer takes no schedule",
                    ),
                ),
                placed=("_setup_parabola", "_setup_rosenbrock", "_setup_mixed_tensor_target"),
            ),
        ),
    ),
    "explicit": Suite(
        "every optimizer of `sharding_test`, on a mesh of Explicit axes",
        "optax",
        (
            File(
                "_src/sharding_test.py",
                ("optax",),
                passed=79,
                failed=1,
                reasons=(
                    Reason(
                        r"ShardingTest::test_microbatch_with_explicit_sharding_sharded",
                        "failed",
                        "`optax.microbatching` reshapes a sharded dim, which this jax refuses",
                        without_us=True,
                    ),
                ),
                versions={"jax": "1"},
            ),
        ),
        mesh=(8, "x", "Explicit"),
    ),
    "inside": Suite(
        "transformations inside of others: `optax.masked(zero_shard(tx), mask)`",
        "optax",
        (
            File("transforms/_accumulation_test.py", ("alias", "transform"), passed=12),
            File(
                "transforms/_combining_test.py",
                ("alias", "transform", "_accumulation"),
                passed=14,
                failed=1,
                reasons=(PYTHON_NUMBERS,),
            ),
            File(
                "transforms/_conditionality_test.py",
                ("alias", "transform", "_constraining"),
                passed=8,
                failed=1,
                reasons=(PMAP,),
            ),
            File("transforms/_constraining_test.py", ("transform", "_accumulation"), passed=3),
            File("transforms/_freezing_test.py", ("alias",), passed=21, failed=2, reasons=(BAD_TREES,)),
            File("transforms/_layouts_test.py", ("alias",), passed=1),
            File("transforms/_masking_test.py", ("alias", "transform"), passed=20),
            File("transforms/_monitoring_test.py", ("alias", "_clipping"), passed=2),
        ),
    ),
    "outside": Suite(
        "transformations around others: `zero_shard(optax.masked(tx, mask))`",
        "optax",
        (
            File("transforms/_accumulation_test.py", ("combine", "_accumulation"), passed=12),
            File(
                "transforms/_adding_test.py",
                ("_adding",),
                passed=2,
                failed=1,
                reasons=(
                    Reason(
                        r"AddingTest::test_none_argument",
                        "failed",
                        "it passes no gradients: zerojax raises an error, because gradients must have the structure of "
                        "the parameters",
                    ),
                ),
            ),
            File("transforms/_clipping_test.py", ("_clipping",), passed=9),
            File(
                "transforms/_combining_test.py",
                ("_combining",),
                passed=12,
                failed=3,
                reasons=(
                    PYTHON_NUMBERS,
                    Reason(
                        r"PartitionTest::test_extra_args",
                        "failed",
                        "it branches on an extra argument in Python; numbers are traced, as under `jax.jit`",
                    ),
                ),
            ),
            File("transforms/_conditionality_test.py", ("_conditionality",), passed=8, failed=1, reasons=(PMAP,)),
            File("transforms/_constraining_test.py", ("combine",), passed=3),
            File(
                "transforms/_freezing_test.py",
                ("_freezing",),
                passed=20,
                failed=3,
                reasons=(
                    BAD_TREES,
                    Reason(r"FreezeTest::test_partial_prefix_mask_behavior", "failed", NUMBERS),
                ),
            ),
            File("transforms/_layouts_test.py", ("_layouts",), passed=1),
            File(
                "transforms/_masking_test.py",
                ("_masking",),
                passed=17,
                failed=3,
                reasons=(
                    Reason(
                        r"MaskedTest::test_tree_map_params",
                        "failed",
                        "it changes the state by its logical shapes; a small leaf of it is flat in storage",
                    ),
                    Reason(r"MaskedTest::test_tree_mismatch_fails[01]", "failed", NUMBERS),
                ),
            ),
            File(
                "transforms/_monitoring_test.py",
                ("_combining",),
                passed=1,
                failed=1,
                reasons=(
                    Reason(
                        r"MonitoringTest::test_monitor",
                        "failed",
                        "the first update of `optax.monitor` adds leaves to its state: zerojax raises an error, "
                        "because it plans shards from `init`",
                    ),
                ),
            ),
        ),
    ),
    "nnx": Suite(
        "every optimizer of `nnx.Optimizer`'s tests",
        "flax",
        (
            File(
                "tests/nnx/optimizer_test.py",
                ("optax",),
                passed=38,
                failed=1,
                reasons=(
                    Reason(
                        r"TestOptimizer::test_sharding_propagation",
                        "failed",
                        "its context mesh has one device, and the optimizer's has two",
                    ),
                ),
            ),
        ),
    ),
}


def rendered():
    """The table as Markdown."""
    lines = []
    for suite in SUITES.values():
        size, axis, kind = suite.mesh
        of_mesh = f"{size} devices over {'an Explicit' if kind == 'Explicit' else 'an'} axis `{axis}`"
        lines += ["", f"**{suite.package}: {suite.title}**, {of_mesh}, stage 3", ""]
        lines += ["| file | passed | skipped | failed | not run |", "|---|---|---|---|---|"]
        counts = lambda f: (f.passed, f.skipped, f.failed, f.left_out)
        lines += [f"| `{f.path}` | {' | '.join(str(n or '') for n in counts(f))} |" for f in suite.files]
        rows = [(f, reason) for f in suite.files for reason in f.reasons]
        if rows:
            lines += ["", "| not passed | of | why |", "|---|---|---|"]
        for f, reason in rows:
            theirs = "; fails without zerojax, too" if reason.without_us else ""
            tests = (reason.shown or reason.tests).replace("|", "\\|")
            lines.append(f"| {reason.outcome}: `{tests}` | `{f.name}` | {reason.why}{theirs} |")
    return "\n".join([*lines[1:], ""])


def written(page):
    """The page with the table of now."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + rendered() + MARKS[1] + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
