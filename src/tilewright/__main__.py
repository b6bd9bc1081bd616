"""`python -m tilewright`: the command line without an installed script."""

from tilewright.cli import main

main()
