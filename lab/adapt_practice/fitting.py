"""Train the changes of many models at once with Adam.

Every tensor has a leading axis of P replicas. The models have the same layers and places, but their
own weights, rows and learning rates. `torch.vmap` maps the forward pass over P.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.adapting.adapted import call_with

_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_WARM_UP = 3  # steps before a graph is captured

LossOf = Callable[[dict[str, Tensor], Tensor], Tensor]  # of a change, at step `[1]` on the device


def fit(
    change: Mapping[str, Tensor],
    loss_of: LossOf,
    *,
    rates: Tensor,
    steps: int,
    first: Collection[str] = (),
    by_relative_gradient: bool = False,
    as_graph: bool = False,
) -> dict[str, Tensor]:
    """The trained change; `change` itself is not written to.

    `loss_of` sums the loss over replicas. `rates` are the learning rates, `[P]`, or `[1]` for a
    single change without an axis of replicas; they fall to zero along a cosine.
    `by_relative_gradient` also multiplies them by the norm of each tensor's gradient relative to
    its weights, divided by the largest (Auto-RGN of Lee et al., "Surgical fine-tuning", ICLR 2023).
    The names in `first` train alone for the first half of the steps. With `as_graph`, each phase on
    a GPU is one captured graph: launching many small kernels would take longer than they do.
    """
    trained = {name: tensor.detach().clone() for name, tensor in change.items()}
    clock = torch.zeros(1, dtype=torch.int64, device=rates.device)
    cosine = 0.5 * (1 + torch.cos(math.pi * torch.arange(steps + 1, device=clock.device) / steps))
    moments = {n: (torch.zeros_like(t), torch.zeros_like(t)) for n, t in trained.items()}
    half = steps // 2 if first else 0

    def step(active: list[str]) -> None:
        leaves = {n: tensor.detach().requires_grad_(n in active) for n, tensor in trained.items()}
        loss = loss_of(leaves, clock)
        wanted = [leaves[name] for name in active]
        # some weights may not take part, such as those of an auxiliary output
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            rate = rates * cosine[clock]
            scaled = [rate] * len(active)
            if by_relative_gradient:
                sizes = [trained[name].flatten(1).norm(dim=1).clamp(min=1e-6) for name in active]
                norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients])
                norms = norms / torch.stack(sizes)
                scaled = [rate * norm for norm in norms / norms.amax(0).clamp(min=1e-12)]
            clock.add_(1)
            for names, waited in ((alone, 0), (later, half)):
                entries = [
                    (trained[name], gradient, rate, *moments[name])
                    for name, gradient, rate in zip(active, gradients, scaled, strict=True)
                    if name in names
                ]
                if entries:
                    _adam_update((clock - waited).float(), entries)

    alone, later = ([n for n in trained if (n in first) == part] for part in (True, False))
    for active, count in ((alone, half), ([*trained], steps - half)):
        if as_graph and rates.is_cuda and active and count > _WARM_UP:
            _replay(partial(step, active), count, rates.device)
            continue
        for _ in range(count if active else 0):
            step(active)
    return {name: tensor.detach() for name, tensor in trained.items()}


def _adam_update(number: Tensor, entries: Sequence[tuple[Tensor, ...]]) -> None:
    """Update number `number` of Adam, in place: tensors, gradients, rates, first, second moments."""
    tensors, gradients, rates, firsts, seconds = map(list, zip(*entries, strict=True))
    torch._foreach_lerp_(firsts, gradients, 1 - _BETAS[0])
    torch._foreach_mul_(seconds, _BETAS[1])
    torch._foreach_addcmul_(seconds, gradients, gradients, value=1 - _BETAS[1])
    # 1 - beta ** number, exact in float32 also for the first steps
    from_first, from_second = (-torch.expm1(number * math.log(beta)) for beta in _BETAS)
    corrected = {id(rate): rate * from_second.sqrt() / from_first for rate in rates}
    shaped = [
        corrected[id(rate)].view(-1, *(1,) * (tensor.dim() - 1))
        if tensor.dim()
        else corrected[id(rate)].squeeze(0)
        for tensor, rate in zip(tensors, rates, strict=True)
    ]
    changes = torch._foreach_mul(firsts, shaped)
    sizes = torch._foreach_sqrt(seconds)
    torch._foreach_add_(sizes, _EPSILON)
    torch._foreach_div_(changes, sizes)
    torch._foreach_sub_(tensors, changes)


def _replay(step: Callable[[], None], count: int, device: torch.device) -> None:
    """Call `step` so often: after a few steps it is captured as a graph and replayed."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(count - _WARM_UP):
        graph.replay()


def logits_of_many(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs `[P, rows, classes]` of P models with weights `[P, ...]` for rows `[P, rows, ...]`."""
    logits: Tensor = over_models(lambda weights, x: call_with(model, weights, (x,)))(weights, x)
    return logits


def over_models(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one model's tensors as one of those of P models, `[P, ...]`."""

    def mapped(*stacked: Any) -> Any:
        with ConvolutionsAsProducts():
            return torch.vmap(call)(*stacked)

    return mapped


class ConvolutionsAsProducts(TorchFunctionMode):
    """Inside the block, convolutions are matrix products over unfolded inputs.

    Mapped over replicas, a convolution would become one with P groups, which is slow; a product
    becomes a batched product.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.conv1d, torch.conv2d):
            result = _convolved(func, *args, **(kwargs or {}))
            if result is not None:
                return result
        if func is F.group_norm and args[0].dim() > 3:  # torch maps it over one axis only
            return func(args[0].flatten(2), *args[1:], **(kwargs or {})).view_as(args[0])
        return func(*args, **(kwargs or {}))


def _convolved(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    axes = 1 if func is torch.conv1d else 2
    stride, padding, dilation = (
        (value,) * axes if isinstance(value, int) else value
        for value in (stride, padding, dilation)
    )
    if groups != 1 or isinstance(padding, str) or any(d != 1 for d in dilation):
        return None
    x = F.pad(x, [side for pad in reversed(padding) for side in (pad, pad)])
    for axis in range(axes):
        x = x.unfold(2 + axis, weight.shape[2 + axis], stride[axis])
    kernel = weight.flatten(1)  # [out, channels * taps]
    columns = x.movedim(1, 1 + axes)  # [rows, *positions, channels, *taps]
    columns = columns.reshape(*columns.shape[: 1 + axes], -1)
    y = columns @ kernel.T
    if bias is not None:
        y = y + bias
    return y.movedim(-1, 1)
