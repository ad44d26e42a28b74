"""Run a model in eval mode without side effects."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from esper.growing.randomness import untouched_randomness


@contextmanager
def eval_mode(model: nn.Module, *loaders: Iterable[Any], with_grad: bool = False) -> Iterator[None]:
    """Eval mode without gradients; afterwards all modes and random generators are restored.

    Generators of `loaders` are restored too: a loader samples a number whenever it is started.
    With `with_grad` every weight is in the autograd graph, frozen ones too, and torch's fused
    encoder is off: it would skip modules or pass them nested tensors.
    """
    modes = [(module, module.training) for module in model.modules()]
    parameters = model.parameters() if with_grad else ()
    frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    with untouched_randomness(model, *loaders), torch.set_grad_enabled(with_grad):
        try:
            model.eval()
            torch.backends.mha.set_fastpath_enabled(has_fast_path and not with_grad)
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(has_fast_path)
            for parameter in frozen:
                parameter.requires_grad_(False)
            for module, training in modes:
                module.training = training
