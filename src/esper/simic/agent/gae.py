"""Generalised advantage estimation, exact at every kind of episode end.

Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(2016), with two gates: termination gates the bootstrap, any episode end gates the accumulator.

    next_value   = 0                    if terminated[t]
                 = bootstrap_values[t]  if truncated[t] or t is the env's last stored row
                 = values[t+1]          otherwise
    delta[t]     = rewards[t] + gamma * next_value - values[t]
    advantage[t] = delta[t] + (0 if the episode ends at t, or the row does,
                               else gamma * gae_lambda * advantage[t+1])
    returns[t]   = advantage[t] + values[t]
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from esper.kernels.gae import GaeInputs, GaeKernel
from esper.leyline.constants import DEFAULT_GAE_LAMBDA, DEFAULT_GAMMA


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    *,
    step_counts: Tensor | None = None,
    gamma: float = DEFAULT_GAMMA,
    gae_lambda: float = DEFAULT_GAE_LAMBDA,
    kernel: str = "auto",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a rollout, both `[N, T]` and without gradient.

    The tensors may have any strides. A rollout buffer is time-major, so its `[N, T]` fields are not
    contiguous; if all have the same strides, nothing is copied.

    Args:
        bootstrap_values: V of the observation that followed a row, before any reset. Read only
            where `truncated` is set and at an env's last stored row, and not where `terminated`.
        step_counts: stored rows per env, int64 `[N]`, on the CPU or on the data's device; the
            rows past them may hold anything and come back 0. None: every row is stored.
        kernel: "auto" takes the fastest of `available_kernels`.
        out: where to write advantages and returns; by default new tensors. Memory that the process
            already has is several times faster than new pages.

    Under `torch.compile` the whole call is one opaque operator, so its caller has no graph break.
    """
    inputs = GaeInputs(
        rewards, values, terminated, truncated, bootstrap_values, step_counts, gamma, gae_lambda
    )
    if is_compiling():
        # Dispatching an operator costs as much as the whole kernel on a small rollout, so only
        # compiled callers use it.
        with torch.no_grad():
            fresh = _operator(*inputs, kernel)
        if out is None:
            advantages, returns = fresh
            return advantages, returns
        return out[0].copy_(fresh[0]), out[1].copy_(fresh[1])
    return _run(inputs, kernel, out)


def available_kernels(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels that can run here for such data, the fastest first."""
    names = []
    if dtype in (torch.float32, torch.float64):
        if device.type == "cpu" and find_spec("numba"):
            names.append("numba")
        if device.type == "cuda" and find_spec("triton"):
            names.append("triton")
    return (*names, "reference")


@torch.library.custom_op(
    "esper::compute_gae",
    mutates_args=(),
    schema="(Tensor rewards, Tensor values, Tensor terminated, Tensor truncated, "
    "Tensor bootstrap_values, Tensor? step_counts, float gamma, float gae_lambda, str kernel) "
    "-> (Tensor, Tensor)",
)
def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, kernel = GaeInputs(*arguments[:-1]), arguments[-1]
    return _run(inputs, kernel, None)


@_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, kernel = GaeInputs(*arguments[:-1]), arguments[-1]
    _kernel_for(inputs, kernel)
    shape = inputs.rewards.shape
    return inputs.rewards.new_empty(shape), inputs.rewards.new_empty(shape)


def _run(
    inputs: GaeInputs, kernel: str, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    run = _kernel_for(inputs, kernel)
    if out is None:
        out = (torch.empty_like(inputs.rewards), torch.empty_like(inputs.rewards))
    else:
        _check_out(out, inputs.rewards)
    if _have_one_layout(inputs, out):
        run(inputs, *out)
        return out
    copies = [tensor.contiguous() for tensor in inputs[:5]]
    advantages = torch.empty_like(copies[0])
    returns = torch.empty_like(copies[0])
    contiguous = dict(zip(GaeInputs._fields[:5], copies, strict=True))
    run(inputs._replace(**contiguous), advantages, returns)  # type: ignore[arg-type]
    return out[0].copy_(advantages), out[1].copy_(returns)


def _check_out(out: tuple[Tensor, Tensor], rewards: Tensor) -> None:
    for name, given in zip(("advantages", "returns"), out, strict=True):
        is_like = given.shape == rewards.shape and given.dtype == rewards.dtype
        if not is_like or given.device != rewards.device:
            raise _mismatch(name, given, rewards.dtype, list(rewards.shape), str(rewards.device))


def _have_one_layout(inputs: GaeInputs, out: tuple[Tensor, Tensor]) -> bool:
    """Whether all `[N, T]` tensors have the same strides; written out, because it is called often."""
    strides = inputs.rewards.stride()
    return (
        inputs.values.stride() == strides
        and inputs.terminated.stride() == strides
        and inputs.truncated.stride() == strides
        and inputs.bootstrap_values.stride() == strides
        and out[0].stride() == strides
        and out[1].stride() == strides
    )


def _kernel_for(inputs: GaeInputs, kernel: str) -> GaeKernel:
    """The kernel for these inputs; raises for errors that show without reading a tensor's content."""
    rewards, values, terminated, truncated, bootstrap_values, step_counts, gamma, gae_lambda = (
        inputs
    )
    shape, dtype, device = rewards.shape, rewards.dtype, rewards.device
    if len(shape) != 2 or not dtype.is_floating_point:
        raise ValueError(
            f"rewards is {dtype} {list(shape)}; expected a floating-point tensor [N, T]"
        )
    for name, given, expected in (
        ("values", values, dtype),
        ("terminated", terminated, torch.bool),
        ("truncated", truncated, torch.bool),
        ("bootstrap_values", bootstrap_values, dtype),
    ):
        if given.shape != shape or given.dtype != expected or given.device != device:
            raise _mismatch(name, given, expected, list(shape), str(device))
    if step_counts is not None and (
        step_counts.shape != shape[:1]
        or step_counts.dtype != torch.int64
        or (step_counts.device != device and step_counts.device.type != "cpu")
    ):
        where = "cpu" if device.type == "cpu" else f"cpu or {device}"
        raise _mismatch("step_counts", step_counts, torch.int64, list(shape[:1]), where)
    if not (0.0 <= gamma <= 1.0 and 0.0 <= gae_lambda <= 1.0):
        raise ValueError(f"gamma={gamma}, gae_lambda={gae_lambda}; use numbers from 0 to 1")
    return _load(kernel, device, dtype)


def _mismatch(
    name: str, given: Tensor, dtype: torch.dtype, shape: list[int], where: str
) -> ValueError:
    return ValueError(
        f"{name} is {given.dtype} {list(given.shape)} on {given.device}; "
        f"expected {dtype} {shape} on {where}, to match rewards"
    )


@cache
def _load(kernel: str, device: torch.device, dtype: torch.dtype) -> GaeKernel:
    """The function of a kernel; its compiler is imported here and not before."""
    available = available_kernels(device, dtype)
    name = available[0] if kernel == "auto" else kernel
    if name not in available:
        raise ValueError(
            f"kernel={kernel!r} is not available for {dtype} on {device}; "
            f"expected one of {', '.join(map(repr, ('auto', *available)))}"
        )
    module = {"numba": "numba_cpu", "triton": "triton_cuda", "reference": "reference"}[name]
    return cast(GaeKernel, import_module(f"esper.kernels.gae.{module}").gae)
