"""cli: commands -- `esper train`, `esper evaluate`, `esper sites` and `esper gym`."""

import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Flags are made from the fields of the configs: code and command line cannot disagree."""
    import tyro

    from esper.cli import evaluate, gym, sites, train

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "train": train.command(arguments),
                "evaluate": evaluate.evaluate,
                "sites": sites.sites,
                "gym": gym.gym,
            },
            prog="esper",
            description="Esper grows neural networks while they train.",
            args=arguments,
        )
    except ValueError as error:  # a user's mistake: what came and what works, without a traceback
        sys.exit(f"esper: {error}")
    except KeyboardInterrupt:
        sys.exit("esper: interrupted")
    except BrokenPipeError:  # whoever read what is printed, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
