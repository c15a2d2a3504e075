"""Run the command line in the process of the test."""

from typer.testing import CliRunner

from zerojax.cli import app


def run(*arguments):
    """The outcome of `zerojax ARGUMENTS`."""
    return CliRunner().invoke(app, [str(x) for x in arguments])
