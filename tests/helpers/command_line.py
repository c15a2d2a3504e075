"""Run the command line in the process of the test."""

from typer.testing import CliRunner

from zerojax.cli import app


def run(*arguments):
    """The outcome of `zerojax ARGUMENTS`."""
    return CliRunner().invoke(app, [str(x) for x in arguments])


def refused(*arguments):
    """The one line that a command says to which something wrong was given."""
    outcome = run(*arguments)
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stderr.startswith("zerojax: ")
    assert outcome.stderr.count("\n") == 1
    assert outcome.stdout == ""
    return outcome.stderr
