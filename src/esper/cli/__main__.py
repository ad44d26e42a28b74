"""`python -m esper.cli`, where the command `esper` is not on the path."""

from esper.cli import main

if __name__ == "__main__":
    main()
