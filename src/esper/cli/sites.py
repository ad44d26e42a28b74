"""`esper sites module:factory`: list where a model can grow."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from esper.surgery.plain import working_sites
from esper.surgery.sites import count_macs, count_params, site_table, trace_sites

EXAMPLES = 2  # in the random batch for --shape


def sites(factory: tyro.conf.Positional[str], shape: tuple[int, ...] = ()) -> None:
    """List where a model can grow, and which seeds fit there.

    Args:
        factory: "module:function", called without arguments; it returns a model, or a model and
            an example batch of its inputs. Modules in the working directory are found
        shape: of one input example, if the function returns only the model: --shape 3 32 32
    """
    model, example = load(factory, shape)
    trace = trace_sites(model, example)
    chosen = trace.choose(None, ())
    found = working_sites(model, chosen, example)
    print(f"{count_params(model):,} parameters, {count_macs(model, example):,} multiply-adds")
    print(site_table(found))
    for name, why in trace.not_wider.items():
        print(f"{name} cannot get wider: {why}")
    for site in chosen:
        if site not in found:
            print(f"{site.name}: other code of the model needs the size that it has")


def load(factory: str, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """The model that a factory returns, and an example batch."""
    if any(size < 1 for size in shape):
        raise ValueError(f"--shape {shape}; use numbers of 1 or more, such as --shape 3 32 32")
    function = function_named(factory)
    try:
        made = function()
    except Exception as error:  # raised by the user's code
        raise ValueError(f"{factory!r} raised {_line(error)}") from error
    if isinstance(made, nn.Module):
        if not shape:
            raise ValueError(
                f"{factory!r} returns only a model; return (model, example), or give the shape of an "
                "example: --shape 3 32 32"
            )
        model, example = made, torch.randn(EXAMPLES, *shape)
        given = f"random numbers of --shape {shape}"
        advice = ". For other inputs, such as tokens, return (model, example) from the function"
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        model, example = made
        given, advice = "the example", ""
    else:
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ValueError(
            f"{factory!r} returned a {type(made).__name__}{size}; return an nn.Module, or a model "
            "and an example batch of its inputs"
        )
    try:
        count_macs(model, example)
    except Exception as error:  # any code may fail in the user's model
        raise ValueError(f"the model does not accept {given}: {_line(error)}{advice}") from error
    return model, example


def function_named(factory: str) -> Callable[[], Any]:
    """The function or class `module:name`; modules in the working directory are found."""
    module_name, _, name = factory.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ValueError(f"{factory!r} does not name a function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # raised by the user's code
        raise ValueError(f"{factory!r} cannot be imported: {_line(error)}") from error
    finally:
        sys.path.pop(0)
    return function  # type: ignore[no-any-return]


def _line(error: Exception) -> str:
    """The error in one line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
