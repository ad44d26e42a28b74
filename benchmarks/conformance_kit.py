"""Conformance checks for PPO implementations; `conformance.py` runs them on several libraries.

conformance(gae=my_gae, masked_probs=my_probs)  # {"six rows": "pass", ...}
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5
GAMMA, GAE_LAMBDA = 0.5, 0.8
# Rewards, values, terminated, truncated, V(next observation before any reset), and the advantages,
# worked by hand. A limit cuts row 1; row 3 terminates, and so does row 4 at its limit; row 5 is
# unfinished. V of an observation that terminates an episode is not 0, and must not matter.
_SIX_ROWS: tuple[list[float] | list[bool], ...] = (
    [1.0, 2.0, 3.0, 4.0, 5.0, 7.0],
    [2.0, 4.0, 6.0, 2.0, 4.0, 8.0],
    [False, False, False, True, True, False],
    [False, True, False, False, True, False],
    [4.0, 8.0, 2.0, 6.0, 8.0, 4.0],
    [1.8, 2.0, -1.2, 2.0, 1.0, 1.0],
)


def conformance(
    *,
    gae: Any = None,
    masked_probs: Any = None,
    step: Any = None,
    unroll: Any = None,
    ratios: Any = None,
) -> dict[str, str]:
    """By the name of a check "pass", or what went wrong. Only the functions given are checked.

    An exception in a function, or a result of another type or shape, is a "FAIL" with its text.

    Args:
        gae: advantages `[N, T]` from rewards, values, terminated, truncated, V of the next
            observation (all `[N, T]`), gamma, lambda, and `step_counts=` `[N]` for ragged rows
        masked_probs: probabilities `[B, C]` from logits and masks (True: legal) `[B, C]`
        step: a recurrent policy's output `[N, K]` and next state from an observation `[N, 4]`, the
            state (None at first) and episode starts `[N]`
        unroll: the same outputs `[T, N, K]` from `[T, N, 4]` and `[T, N]`, as learning sees them;
            needs `step`
        ratios: new over old probabilities of a rollout before the first optimiser step

    A function raises NotImplementedError, with the reason, for what it does not support.
    """
    if unroll is not None and step is None:
        raise ValueError("unroll is compared with step; pass step= too")
    checks: dict[str, tuple[Any, Callable[[Any], None]]] = {
        "six rows": (gae, _six_rows),
        "splits": (gae, _splits),
        "ragged rows": (gae, _ragged),
        "masks": (masked_probs, _masks),
        "state reset": (step, _resets),
        "unrolled": (
            unroll,
            lambda unroll: _near(unroll(*_episodes()), _stepped(step), "step, env, output"),
        ),
        "ratio 1": (ratios, lambda ratios: _near(ratios(), torch.ones(()), "ratio")),
    }
    results = {}
    for name, (function, check) in checks.items():
        if function is not None:
            try:
                check(function)
                results[name] = "pass"
            except NotImplementedError as error:
                results[name] = f"none: {error}"
            except Exception as error:  # of a check, or of the function under test
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                results[name] = f"FAIL: {kind}{error}"
    return results


def _six_rows(gae: Any) -> None:
    *rows, expected = (torch.tensor([column]) for column in _SIX_ROWS)
    _near(gae(*rows, GAMMA, GAE_LAMBDA), expected, "env, row")


def _splits(gae: Any) -> None:
    """A rollout, its envs one by one, and its parts where it is cut at ends of episodes."""
    rows = _rows()
    expected = _advantages(*rows)
    for env in (slice(0, 5), *(slice(i, i + 1) for i in range(5))):
        for row in (slice(0, 20), slice(0, 12), slice(12, 20)):
            found = gae(*(column[env, row] for column in rows), GAMMA, GAE_LAMBDA)
            part = f"envs {env.start} to {env.stop - 1}, rows {row.start} to {row.stop - 1}"
            _near(found, expected[env, row], f"{part}: env, row")


def _ragged(gae: Any) -> None:
    """Rows past an env's count may hold anything."""
    rows, counts = _rows(), [20, 3, 11, 1, 7]
    expected = [_advantages(*(c[i : i + 1, :n] for c in rows))[0] for i, n in enumerate(counts)]
    for column in (rows[0], rows[1], rows[4]):
        column[torch.arange(20) >= torch.tensor(counts)[:, None]] = torch.nan
    together = gae(*rows, GAMMA, GAE_LAMBDA, step_counts=torch.tensor(counts))
    for env, count in enumerate(counts):
        _near(together[env, :count], expected[env], f"env {env}, row")


def _advantages(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, next_values: Tensor
) -> Tensor:
    """The definition in float64: termination gates V(next), any end gates the later rows."""
    advantages, later = torch.zeros(rewards.shape, dtype=torch.float64), torch.zeros(())
    for t in reversed(range(rewards.shape[1])):
        next_value = torch.where(terminated[:, t], 0.0, next_values[:, t].double())
        delta = rewards[:, t].double() + GAMMA * next_value - values[:, t].double()
        later = torch.where(terminated[:, t] | truncated[:, t], 0.0, later)
        later = advantages[:, t] = delta + GAMMA * GAE_LAMBDA * later
    return advantages


def _masks(masked_probs: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(200, 6, generator=rng)).requires_grad_()
    masks = torch.rand(200, 6, generator=rng) < 0.5
    masks[torch.arange(200), torch.randint(6, (200,), generator=rng)] = True
    probs = masked_probs(logits, masks)
    exact = logits.detach().double().masked_fill(~masks, -torch.inf).softmax(-1)
    _near(probs.detach(), exact, "row, choice")
    assert (probs[~masks] == 0).all(), "an illegal choice has a probability above 0"
    (gradient,) = torch.autograd.grad(probs[masks].square().sum(), logits)
    # exact zeros are not asked for: a normaliser over all choices leaves rounding of 1e-8
    _near(gradient[~masks], torch.zeros(()), "the gradient of an illegal choice")


def _resets(step: Any) -> None:
    """Env 0 starts an episode at step 4: what came before does not matter, nor do other envs."""
    shift, extra_start = torch.zeros(9, 3, 4), torch.zeros(9, 3, dtype=torch.bool)
    shift[:3, 0] = 1.0
    extra_start[2, 0] = True
    outputs, other = _stepped(step), _stepped(step, shift)
    assert (other[:3, 0] != outputs[:3, 0]).any(), "the policy does not read its observations"
    if (other[3, 0] == outputs[3, 0]).all():
        raise NotImplementedError("no memory: outputs do not depend on earlier observations")
    _near(other[4:, 0], outputs[4:, 0], "not reset at an episode's start: step after it, output")
    _near(other[:, 1:], outputs[:, 1:], "an env sees another one: step, env, output")
    other = _stepped(step, starts=extra_start)
    _near(other[:, 1:], outputs[:, 1:], "reset when another env starts: step, env, output")


def _stepped(step: Any, shift: Tensor | float = 0.0, starts: Tensor | bool = False) -> Tensor:
    """Outputs for `_episodes` with a change of the observations, and more starts."""
    (observations, usual), state, outputs = _episodes(), None, []
    for observation, start in zip(observations + shift, usual | starts, strict=True):
        output, state = step(observation, state, start)
        outputs.append(output.detach())
    return torch.stack(outputs)


def _rows() -> list[Tensor]:
    """Random columns of five envs, 20 rows each; every episode ends at row 11."""
    rng = torch.Generator().manual_seed(1)
    rewards, values, next_values = (torch.randn(5, 20, generator=rng) for _ in range(3))
    ends = torch.rand(5, 20, generator=rng)
    ends[:, 11] = 0.95
    terminated, truncated = ends < 0.1, (ends > 0.9) | (ends < 0.05)  # some are both
    is_end = terminated | truncated  # elsewhere the next observation is that of the next row
    next_values[:, :-1] = torch.where(is_end[:, :-1], next_values[:, :-1], values[:, 1:])
    return [rewards, values, terminated, truncated, next_values]


def _episodes() -> tuple[Tensor, Tensor]:
    """Observations `[9, 3, 4]` and where episodes start `[9, 3]`."""
    starts = torch.zeros(9, 3, dtype=torch.bool)
    starts[0] = starts[4, 0] = starts[6, 2] = True
    return torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(2)), starts


def _near(found: Any, expected: Tensor, what: str) -> None:
    """Compare tensors of one shape; a scalar is expected of every element."""
    assert isinstance(found, Tensor), f"got {type(found).__name__}, expected a tensor"
    shape, found = tuple(expected.shape or found.shape), found.detach()
    assert found.shape == shape, f"got shape {tuple(found.shape)}, expected {shape}"
    assert found.numel(), "got an empty tensor"
    is_near = (found - expected).abs() <= TOLERANCE * (1 + expected.abs())  # False for NaN
    if not is_near.all():
        place = (~is_near).nonzero()[0].tolist()
        values = [f"{float(t.expand_as(is_near)[tuple(place)]):.4g}" for t in (found, expected)]
        raise AssertionError(f"{what} {place} is {values[0]}, expected {values[1]}")
