"""`esper sites module:factory`: list where a model can grow."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from esper.growing.sites import count_macs, count_params, site_table, trace_sites

EXAMPLES = 2  # in the random batch for --shape


def sites(factory: tyro.conf.Positional[str], shape: tuple[int, ...] = ()) -> None:
    """List where a model can grow, and which seeds fit there.

    Args:
        factory: "module:function", called without arguments; it returns a model, or a model and
            an example batch of its inputs. Modules in the working directory are found
        shape: of one input example, if the function returns only the model: --shape 3 32 32
    """
    model, example = load(factory, shape)
    found = trace_sites(model, example).choose(None, ())
    print(f"{count_params(model):,} parameters, {count_macs(model, example):,} multiply-adds")
    print(site_table(found))


def load(factory: str, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """The model that a factory returns, and an example batch."""
    module_name, _, function = factory.partition(":")
    if not function:
        raise ValueError(f"{factory!r} does not name a function; write module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{factory!r} cannot be found: {error}") from error
    finally:
        sys.path.pop(0)
    made = make()
    if isinstance(made, nn.Module):
        if not shape:
            raise ValueError(
                f"{factory!r} returns only a model; return (model, example), or give the shape of an "
                "example: --shape 3 32 32"
            )
        return made, _random_batch(made, shape)
    model, example = made
    return model, example


def _random_batch(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """A batch of random numbers; raises if the model does not accept it."""
    example = torch.randn(EXAMPLES, *shape)
    try:
        count_macs(model, example)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the model does not accept random numbers of --shape {shape}: {error}. For other "
            "inputs, such as tokens, return (model, example) from the function"
        ) from error
    return example
