"""What growth does on the side draws nothing from the randomness that training uses."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


@contextmanager
def untouched_randomness(model: nn.Module, *loaders: Iterable[Any]) -> Iterator[None]:
    """Generators are afterwards as they were: torch's on the CPU and on the model's devices,
    numpy's and Python's own, and those that DataLoaders were given.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    drawn = [(g, g.get_state()) for loader in loaders for g in _generators(loader)]
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)  # noqa: NPY002
            random.setstate(of_python)
            for generator, state in drawn:
                generator.set_state(state)


def _generators(loader: Iterable[Any]) -> Iterator[torch.Generator]:
    """Its own and its samplers'; each may come more than once."""
    if not isinstance(loader, DataLoader):
        return
    inner = getattr(loader.batch_sampler, "sampler", None)
    for part in (loader, loader.sampler, loader.batch_sampler, inner):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
