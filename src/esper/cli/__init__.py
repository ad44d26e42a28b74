"""cli: commands -- `esper train`, `evaluate`, `watch`, `compare`, `sites` and `gym`."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

# command -> summary; each is a function in the module of its name
_COMMANDS = {
    "train": "Train a controller to grow networks; without arguments, on MNIST-1D in a few minutes.",
    "evaluate": "Compare a trained controller with other ways to grow, on held-out hosts and data.",
    "watch": "Show runs on a local page while they train.",
    "compare": "Print how two runs differ: results and settings.",
    "sites": "List where a model can grow, and what could grow there.",
    "gym": "Train PPO on a Gymnasium environment, then evaluate it.",
}

_EXTRAS = {"gymnasium": "gym"}  # module -> the extra that installs it
_EXTRAS |= dict.fromkeys(("tyro", "rich", "tensorboard", "scipy", "sklearn", "mnist1d"), "train")


def main(arguments: list[str] | None = None) -> None:
    """Run a command line; flags are generated from the fields of the configs."""
    with one_line_errors():
        _run(sys.argv[1:] if arguments is None else arguments)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Inside the block, mistakes of users end the process with one line instead of a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (name := (error.name or "").partition(".")[0]) not in _EXTRAS:
            raise
        sys.exit(f"esper: {name} is not installed; run: pip install 'esper-lite[{_EXTRAS[name]}]'")
    except (ValueError, OSError) as error:  # a user's mistake: no traceback
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        sys.exit(f"esper: {message}")
    except KeyboardInterrupt:
        print("esper: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (MemoryError, RuntimeError) as error:
        from torch import OutOfMemoryError  # in an error only: the help does not import torch

        # on a CPU torch raises a plain RuntimeError
        is_out_of_memory = isinstance(error, MemoryError | OutOfMemoryError)
        if not is_out_of_memory and "DefaultCPUAllocator" not in str(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        sys.exit(f"esper: out of memory ({reason}); use smaller settings")


def this_command() -> str:
    """How a shell can call this command again."""
    if Path(sys.argv[0]).name != "esper":
        return "python -m esper"
    return "esper" if sys.argv[0] == shutil.which("esper") else sys.argv[0]


def stop_after_signal(number: int, message: str) -> NoReturn:
    """Print how to continue, and exit with the status of a process that this signal ended."""
    try:
        print(message, flush=True)
    except OSError:  # the terminal is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + number)


def _run(arguments: list[str]) -> None:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "--version"):
        print(import_module("esper").__version__ if name == "--version" else _help())
        return
    if name not in _COMMANDS:
        near = "".join(f"did you mean {match!r}? " for match in get_close_matches(name, _COMMANDS))
        raise ValueError(f"no command {name!r}; {near}there are {', '.join(_COMMANDS)}")
    if "" not in sys.path:
        sys.path.append("")  # modules to --import may be in the current folder
    if name == "train" and not {"-h", "--help"} & set(arguments):
        print("starting: Python loads torch, then the data are made or read", flush=True)
    # idle threads of torch sleep; spinning costs `train` a third of its CPU time
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name == "gym":  # small products are fastest with one thread
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    import tyro  # after the help: with torch, it takes seconds

    module = import_module(f"esper.cli.{name}")
    # the defaults of `train` are those of its --preset
    command = module.command(arguments) if name == "train" else getattr(module, name)
    # `import` cannot be the name of a field
    flags = [re.sub("^--import(?==|$)", "--imports", flag) for flag in arguments[1:]]
    tyro.cli(command, prog=f"esper {name}", args=flags)


def _help() -> str:
    """The list of commands, without importing any of them."""
    lines = "\n".join(f"  {name:8} {what}" for name, what in _COMMANDS.items())
    return (
        "usage: esper COMMAND [FLAGS]\n\n"
        f"Esper adapts trained models, and grows neural networks while they train.\n\n{lines}\n\n"
        "`esper COMMAND --help` lists the flags of a command."
    )
