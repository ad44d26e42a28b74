"""Run a model in eval mode without side effects, on random generators too."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader


@contextmanager
def eval_mode(model: nn.Module, *loaders: Iterable[Any], with_grad: bool = False) -> Iterator[None]:
    """Eval mode without gradients; afterwards all modes and random generators are restored.

    Generators of `loaders` are restored too: a loader samples a number whenever it is started.
    With `with_grad` every weight is in the autograd graph, frozen ones too, and torch's fused
    encoder is off: it would skip modules or pass them nested tensors. Compiled code is not used.
    """
    with (
        untouched_randomness(model, *loaders),
        torch.set_grad_enabled(with_grad),
        uncompiled(model),
        ExitStack() as undo,
    ):
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        if with_grad:
            mha = torch.backends.mha
            undo.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            for parameter in model.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    undo.callback(parameter.requires_grad_, False)
                    parameter.requires_grad_(True)
        yield


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Without the code that `Module.compile` made: it would be compiled again for passing hooks."""
    with ExitStack() as undo:
        for module in model.modules():
            if call := module._compiled_call_impl:
                undo.callback(setattr, module, "_compiled_call_impl", call)
                module._compiled_call_impl = None
        yield


def watch_hooks(model: nn.Module) -> None:
    """For a model that is compiled in place: compile it again when a seed is added or removed.

    By default torch does not compare the hooks of modules with those that it compiled, and stops
    compiling after 8 changes.
    """
    if not any(module._compiled_call_impl for module in model.modules()):
        return
    config = torch._dynamo.config
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        config.recompile_limit = max(config.recompile_limit, 64)
        torch.compiler.reset()  # for code that was compiled before


@contextmanager
def untouched_randomness(model: nn.Module, *loaders: Iterable[Any]) -> Iterator[None]:
    """Restore all generators afterwards: torch's on the CPU and on the model's devices, numpy's,
    Python's, and those of DataLoaders.
    """
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as undo:
        undo.callback(set_random_states, random_states(devices))
        for generator in (g for loader in loaders for g in _generators(loader)):
            undo.callback(generator.set_state, generator.get_state())
        yield


def random_states(cuda_devices: Iterable[int]) -> dict[str, Any]:
    """States of the global generators of torch, Python and numpy, as tensors and numbers."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": {device: torch.cuda.get_rng_state(device) for device in cuda_devices},
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys)), *rest],
    }


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    for device, state in states["cuda"].items():
        torch.cuda.set_rng_state(state, device)
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002


def _generators(loader: Iterable[Any]) -> Iterator[torch.Generator]:
    """The loader's generator and those of its samplers; one may be yielded twice."""
    if not isinstance(loader, DataLoader):
        return
    inner = getattr(loader.batch_sampler, "sampler", None)
    for part in (loader, loader.sampler, loader.batch_sampler, inner):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
