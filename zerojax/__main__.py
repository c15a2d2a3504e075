"""`python -m zerojax` is the command `zerojax`."""

from zerojax.cli import main

main()
