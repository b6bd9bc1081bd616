"""`python -m tilewright`: the command line without an installed script."""

from tilewright.cli import main

if __name__ == "__main__":
    main()
