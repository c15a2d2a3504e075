"""`python -m zerojax` is the command `zerojax`."""

from .cli import main

main()
