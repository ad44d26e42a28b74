"""`python -m esper`, for torchrun and where the command `esper` is not on the path."""

from esper.cli import main

if __name__ == "__main__":
    main()
