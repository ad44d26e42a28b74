"""Masked distributions over the heads of a factored action: categorical, or squashed Gaussians.

All heads are scored at once. Their choices are concatenated, `[..., C]`; internally each head is a
row of a grid `[..., H, M]`, where M is the size of the largest head. One log-softmax then covers
all rules about masks, because masked logits get two constants:

- a masked choice gets a logit of -1e30: its probability and gradient are exactly 0;
- choice 0, when masked, gets half of that. A row without a legal choice puts all its weight on
  action 0: log-prob, entropy and gradient are exactly 0. Next to any real logit the half is as
  impossible as the whole.

A continuous head is a row with one choice, which adds exactly 0; `SquashedGaussians` score it.
Arithmetic is float32 for logits of any dtype.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import hardtanh, softplus

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace
from esper.runtime.devices import DeviceConstant, constant

LARGEST_LOGIT = 1e29  # logits are clipped to this, up and down
# far below any logit, and far enough above the lowest float that gradients times it are finite
MASKED = -1e30
_IMPOSSIBLE = MASKED / 4  # between the log-probs of legal and of masked choices
_NOT_FINITE = "logits are not finite, log-prob"

LOG_STD_BOUNDS = (-5.0, 2.0)  # of squashed Gaussians
_LOG_SQRT_2_PI = 0.5 * math.log(2.0 * math.pi)
# a trapezoid rule over a standard normal: it converges for a wide Gaussian too, where
# Gauss-Hermite nodes are too far apart to see the bend of tanh
_points = torch.linspace(-5.0, 5.0, 65, dtype=torch.float64)
_density = torch.exp(-0.5 * _points.square())
_NODES = DeviceConstant(_points.float())
_WEIGHTS = DeviceConstant((_density / _density.sum()).float())


class MaskedFactoredCategorical:
    """The heads' distributions, each given the earlier choices that were made.

    `logits` and `masks` are `[..., C]`. With `floor`, each head is mixed with the uniform
    distribution over its k legal choices: p' = (1 - floor) p + floor / k. Sampling and scoring use
    the same p'. Continuous heads have no floor; their `log_std` `[continuous heads]` is passed
    here, their mean is their logit. To score the same masks repeatedly, build `legal` once.
    Values are not checked here, because they may be on a GPU: a NaN logit gives NaN.
    """

    def __init__(
        self,
        action_space: FactoredActionSpace,
        logits: Tensor,
        masks: Tensor,
        *,
        legal: "LegalChoices | None" = None,
        floor: float = 0.0,
        log_std: Tensor | None = None,
    ):
        action_space.check_packed(logits)
        if masks.shape != logits.shape or masks.dtype != torch.bool:
            raise ValueError(
                f"masks are {masks.dtype} {tuple(masks.shape)}, expected {torch.bool} "
                f"{tuple(logits.shape)}"
            )
        check_floor(floor)
        self.action_space = action_space
        self.masks = masks
        self._legal = legal
        grid = _grid(action_space)
        # a clamp whose gradient is one operation
        bounded = hardtanh(logits.float(), -LARGEST_LOGIT, LARGEST_LOGIT)
        is_legal = grid.of_masks(masks) if legal is None else legal.grid
        filled = torch.where(is_legal, grid.of(bounded), grid.fill.on(logits.device))
        self._log_probs = filled.log_softmax(dim=-1)  # [..., H, M]
        if floor > 0.0:
            self._log_probs = _mix_with_uniform(filled, self._log_probs, floor)
        self._gaussians: SquashedGaussians | None = None
        if action_space.continuous:
            assert log_std is not None, "continuous heads need log_std"
            self._numbers = action_space.continuous_on(logits.device)
            self._columns = _columns_of_numbers(action_space, logits.device)
            means = bounded.index_select(-1, self._columns)
            is_used = masks.index_select(-1, self._columns)
            self._gaussians = SquashedGaussians(means, log_std, is_used)

    @property
    def probs(self) -> Tensor:
        """Probabilities `[..., H, M]`, each head's choices first, then zeros up to M."""
        return self._log_probs.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probs `[..., H]` of `actions` `[..., H]`; at most -1e29 for a masked choice."""
        choices = self.action_space.choices(actions)
        scores = self._log_probs.gather(-1, choices.unsqueeze(-1)).squeeze(-1)
        return self._insert(
            scores, lambda numbers: numbers.log_prob(actions.index_select(-1, self._numbers))
        )

    def entropy(self) -> Tensor:
        """Entropies `[..., H]` in nats."""
        entropies = -(self.probs * self._log_probs).sum(dim=-1)
        return self._insert(entropies, SquashedGaussians.entropy)

    def normalize(self, entropies: Tensor) -> Tensor:
        """Entropies from `entropy` as a share of the uniform one, 0 to 1; 0 without a choice.

        For a continuous head: the width of the uniform distribution with the same entropy, as a
        share of (-1, 1).
        """

        # with one legal choice the entropy is exactly 0, so the divisor does not matter
        def widths(numbers: SquashedGaussians) -> Tensor:
            return numbers.is_used * entropies.index_select(-1, self._numbers).exp() / 2

        return self._insert(entropies / self.legal.log_counts, widths)

    @property
    def legal(self) -> "LegalChoices":
        """The legal choices, computed on first use."""
        if self._legal is None:
            self._legal = LegalChoices.from_masks(self.masks, self.action_space)
        return self._legal

    def sample(self, noise: Tensor) -> Tensor:
        """A sample of every head, `[..., H]`; never a masked choice. Numbers are before tanh.

        `noise` `[..., C]` is from `draw_noise`. Of exponential clocks with rates p, choice i rings
        first with probability p_i.
        """
        clocks = _grid(self.action_space).of(noise)
        choices = self.probs.detach().div_(clocks).argmax(dim=-1)

        def numbers(gaussians: SquashedGaussians) -> Tensor:
            return gaussians.sample(noise.index_select(-1, self._columns))

        return self._insert(choices, numbers)

    def mode(self) -> Tensor:
        """The likeliest choice of every head, `[..., H]`; the median of a continuous head."""
        return self._insert(self._log_probs.argmax(dim=-1), SquashedGaussians.median)

    def _insert(
        self, values: Tensor, of_numbers: Callable[["SquashedGaussians"], Tensor]
    ) -> Tensor:
        """Values of all heads `[..., H]`, with those of the continuous heads put in."""
        if self._gaussians is None:
            return values
        return values.float().index_copy(-1, self._numbers, of_numbers(self._gaussians))


class LegalChoices(NamedTuple):
    """All that a distribution needs of its masks `[..., C]`; independent of the logits."""

    grid: Tensor  # bool [..., H, M]: the masks, with a row for each head
    counts: Tensor  # float [..., H]: legal choices of each head; 2 for a number that is used
    log_counts: Tensor  # [..., H]: entropy of the uniform distribution; log 2 without a choice
    has_choice: Tensor  # float [...]: 1 where some head has more than one choice, 0 elsewhere

    @classmethod
    def from_masks(cls, masks: Tensor, action_space: FactoredActionSpace) -> "LegalChoices":
        grid = _grid(action_space).of_masks(masks)
        counts = grid.sum(dim=-1, dtype=torch.float32)
        if action_space.continuous:  # log 2 is the entropy of the uniform distribution on (-1, 1)
            counts.index_add_(
                -1, numbers := action_space.continuous_on(masks.device), counts[..., numbers]
            )
        log_counts = counts.clamp(min=2.0).log()
        return cls(grid, counts, log_counts, (counts > 1).any(dim=-1).float())


class SquashedGaussians(NamedTuple):
    """K independent numbers per row; one that is not used is 0 and adds nothing.

    A number a in (-1, 1) is tanh(u), where u is a Gaussian sample. Actions hold u. Log-probs are
    densities of a: log p(a) = log N(u; mean, std) - log(1 - tanh(u)^2).

    The entropy of a has no closed form. It is the Gaussian's entropy plus the mean of
    log(1 - tanh(u)^2), computed with 65 nodes: no random numbers, and an error below 1e-3 nats for
    every std within `LOG_STD_BOUNDS`.
    """

    mean: Tensor  # [..., K], before tanh
    log_std: Tensor  # [K]
    is_used: Tensor  # bool [..., K]

    def log_prob(self, samples: Tensor) -> Tensor:
        """Log-densities `[..., K]` of the numbers whose values before tanh are `samples`."""
        log_std = self.log_std.clamp(*LOG_STD_BOUNDS)
        distance = (samples - self.mean) * (-log_std).exp()
        density = -0.5 * distance.square() - log_std - _LOG_SQRT_2_PI
        return torch.where(self.is_used, density - _log_slope(samples), 0.0)

    def entropy(self) -> Tensor:
        """Differential entropies `[..., K]` in nats: at most log 2, and below 0 if narrow."""
        log_std = self.log_std.clamp(*LOG_STD_BOUNDS)
        device = self.mean.device
        points = self.mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * _NODES.on(device)
        entropy = log_std + 0.5 + _LOG_SQRT_2_PI + _log_slope(points) @ _WEIGHTS.on(device)
        return torch.where(self.is_used, entropy, 0.0)

    def sample(self, noise: Tensor) -> Tensor:
        """Samples before tanh, `[..., K]`, from standard normal `noise` `[..., K]`."""
        std = self.log_std.clamp(*LOG_STD_BOUNDS).exp()
        return torch.where(self.is_used, torch.addcmul(self.mean, std, noise), 0.0)

    def median(self) -> Tensor:
        """The medians before tanh, `[..., K]`."""
        return torch.where(self.is_used, self.mean, 0.0)


def _log_slope(samples: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), without overflow for large u."""
    return 2.0 * (math.log(2.0) - samples - softplus(-2.0 * samples))


def draw_noise(
    action_space: FactoredActionSpace,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random numbers `[*shape, C]` for `choose_actions`: exponential, and normal for numbers.

    The bounds keep p / clock at 0 for masked choices, and above 0 for the likeliest one.
    """
    noise = torch.empty(*shape, action_space.num_choices, device=device)
    noise.exponential_(generator=generator).clamp_(1e-30, 1e3)
    if action_space.continuous:
        columns = _columns_of_numbers(action_space, device)
        normal = torch.empty(*shape, len(columns), device=device).normal_(generator=generator)
        noise.index_copy_(-1, columns, normal)
    return noise


@cache
def normal_nodes() -> "np.ndarray[Any, Any]":
    """The nodes of the trapezoid rule and their weights, `[2, 65]`, for the compiled loss."""
    return np.stack([_NODES.on(torch.device("cpu")), _WEIGHTS.on(torch.device("cpu"))])


def _columns_of_numbers(action_space: FactoredActionSpace, device: torch.device) -> Tensor:
    """The columns of `[..., C]` that belong to continuous heads."""
    starts = tuple(action_space.slices[head].start for head in action_space.continuous)
    return constant(starts, device)


class Choices(NamedTuple):
    """What `choose_actions` returns."""

    actions: Tensor  # [N, H]; numbers are before tanh
    log_probs: Tensor  # [N, H]
    masks: Tensor  # [N, C]: the mask rows that applied

    @classmethod
    def empty(
        cls, action_space: FactoredActionSpace, num_envs: int, device: torch.device
    ) -> "Choices":
        heads, choices = action_space.num_heads, action_space.num_choices
        return cls(
            torch.empty(num_envs, heads, dtype=action_space.action_dtype, device=device),
            torch.empty(num_envs, heads, device=device),
            torch.empty(num_envs, choices, dtype=torch.bool, device=device),
        )


def choose_actions(
    action_space: FactoredActionSpace,
    masks: ActionMasks,
    logits_of: Callable[[int, Tensor], Tensor],
    *,
    noise: Tensor | None,
    floor: float = 0.0,
    log_std: Tensor | None = None,
    checks: "ChoiceChecks | None" = None,
    out: Choices | None = None,
) -> Choices:
    """The choice of every head, in order, one of `action_space.head_groups` at a time.

    `logits_of(group, actions)` returns the logits `[N, choices of the group]`, given the actions
    `[N, H]` in which the heads before the group are filled in. `noise` `[N, C]` is from
    `draw_noise`; None takes the likeliest choices. `log_std` is that of all continuous heads.

    On a CPU `checks` raises for logits that are not finite and heads without a legal choice. On a
    GPU that would wait for it: check a whole rollout instead.
    """
    if out is None:
        out = Choices.empty(action_space, masks.num_envs, masks.device)
    is_known, are_right = True, True
    for group in range(len(action_space.head_groups)):
        logits = logits_of(group, out.actions)
        if logits.device.type == "cpu" and logits.dtype == torch.float32:
            are_right &= _choose_group_compiled(
                action_space, group, logits, masks.groups[group], noise, floor, log_std, out
            )
        else:
            choose_group(action_space, group, logits, masks, noise, floor, log_std, out)
            is_known = False
    if checks is not None and out.actions.device.type == "cpu" and not (is_known and are_right):
        checks.check_fresh(*out)
    return out


def choose_group(
    action_space: FactoredActionSpace,
    group: int,
    logits: Tensor,
    masks: ActionMasks,
    noise: Tensor | None,
    floor: float,
    log_std: Tensor | None,
    out: Choices,
) -> None:
    """The choices of one head group, written to `out`: the plain twin of the compiled kernel."""
    heads = action_space.head_groups[group]
    space = action_space.group_spaces[group]
    columns = slice(action_space.slices[heads.start].start, action_space.slices[heads[-1]].stop)
    if log_std is not None:
        before = sum(head < heads.start for head in action_space.continuous)
        log_std = log_std[before : before + len(space.continuous)]
    rows = masks.rows(heads, out.actions)
    head = MaskedFactoredCategorical(space, logits, rows, floor=floor, log_std=log_std)
    chosen = head.mode() if noise is None else head.sample(noise[:, columns])
    out.actions[:, heads.start : heads.stop] = chosen
    out.log_probs[:, heads.start : heads.stop] = head.log_prob(chosen)
    out.masks[:, columns] = rows


def _choose_group_compiled(
    action_space: FactoredActionSpace,
    group: int,
    logits: Tensor,
    legal: Tensor,
    noise: Tensor | None,
    floor: float,
    log_std: Tensor | None,
    out: Choices,
) -> bool:
    from esper.kernels.choices.numba_choices import choose

    heads = action_space.head_groups[group]
    table = heads_table(action_space)
    log_stds = np.zeros(len(table), dtype=np.float32)
    if log_std is not None:
        log_stds[list(action_space.continuous)] = log_std.detach().clamp(*LOG_STD_BOUNDS).numpy()
    is_sampled = noise is not None
    clocks = (
        out.log_probs.new_empty(len(logits), action_space.num_choices) if noise is None else noise
    )
    are_right: bool = choose(
        logits.detach().numpy(),
        legal.reshape(len(logits), -1, logits.shape[1]).numpy(),
        clocks.numpy(),
        table,
        (heads.start, heads.stop),
        log_stds,
        np.float32(floor),
        is_sampled,
        out.actions.numpy(),
        out.log_probs.numpy(),
        out.masks.numpy(),
    )
    return are_right


@cache
def heads_table(action_space: FactoredActionSpace) -> "np.ndarray[Any, Any]":
    """The heads as rows that the compiled kernel reads: columns, kind, strides of given heads."""
    num_heads = action_space.num_heads
    table = np.zeros((num_heads, 3 + num_heads), dtype=np.int64)
    for head, columns in enumerate(action_space.slices):
        table[head, :3] = columns.start, columns.stop, head in action_space.continuous
        stride = 1
        for earlier in reversed(action_space.given_indices[head]):
            table[head, 3 + earlier] = stride
            stride *= action_space.sizes[earlier]
    return table


class ChoiceChecks:
    """Checks of the choices of one action space."""

    def __init__(self, action_space: FactoredActionSpace):
        self.action_space = action_space
        largest = torch.finfo(torch.float32).max  # a number may be anything finite
        firsts = [-largest if head.continuous else 0 for head in action_space]
        lasts = [largest if head.continuous else head.size - 1 for head in action_space]
        self._range = DeviceConstant(torch.tensor([firsts, lasts]))
        self._offsets = DeviceConstant(torch.tensor([part.start for part in action_space.slices]))
        self._conditional = DeviceConstant(torch.tensor([bool(h.given) for h in action_space]))

    def check_fresh(self, actions: Tensor, log_probs: Tensor, masks: Tensor) -> None:
        """Raise for new choices `[N, H]` from logits that are not finite, or without a legal one.

        A head that is given no other head needs a legal choice.
        """
        columns = self.action_space.choices(actions) + self._offsets.on(actions.device)
        has_legal = masks.gather(-1, columns) | self._conditional.on(actions.device)
        wrong = (~((log_probs > _IMPOSSIBLE) & has_legal)).nonzero()
        if not len(wrong):
            return
        env, head = wrong[0].tolist()
        is_bad = not log_probs[env, head] > _IMPOSSIBLE
        problem = f"{_NOT_FINITE} {log_probs[env, head]}" if is_bad else "no legal choice"
        raise ValueError(f"env {env}, head {self.action_space.names[head]!r}: {problem}")

    def in_range(self, actions: Tensor) -> Tensor:
        """Stored choices `[..., H]` clamped to their range, so that they can be looked up."""
        return actions.clamp(*self._range.on(actions.device)).nan_to_num()

    def is_scored(self, actions: Tensor, log_probs: Tensor) -> Tensor:
        """Whether stored choices `[..., H]` are in range, legal (or 0 if none is) and a number."""
        is_possible = log_probs.detach() > _IMPOSSIBLE
        return is_possible & (self.in_range(actions) == actions)

    def check_stored(
        self, actions: Tensor, log_probs: Tensor, masks: Tensor, valid: Tensor
    ) -> None:
        """Raise for stored choices `[T, N, H]` that `is_scored` refuses, in rows that hold a step."""
        wrong = (~self.is_scored(actions, log_probs) & valid.unsqueeze(-1)).nonzero()
        if not len(wrong):
            return
        step, env, head = wrong[0].tolist()
        where = f"env {env}, step {step}, head {self.action_space.names[head]!r}"
        log_prob = log_probs[step, env, head]
        if head in self.action_space.continuous:
            is_bad = log_prob.isnan() and actions[step, env, head].isfinite()
            number = float(actions[step, env, head])
            if not is_bad:
                raise ValueError(f"{where}: the number {number} cannot be scored")
        if log_prob.isnan():
            raise ValueError(f"{where}: {_NOT_FINITE} {log_prob}")
        legal = masks[step, env, self.action_space.slices[head]].nonzero()[:, 0].tolist()
        action = int(actions[step, env, head])
        raise ValueError(f"{where}: action {action} is not legal; legal here: {legal or 'only 0'}")


def _mix_with_uniform(filled: Tensor, log_probs: Tensor, floor: float) -> Tensor:
    """Log-probs of (1 - floor) p + floor / k, masked choices still at -1e30."""
    is_legal = filled > MASKED / 4
    uniform = torch.where(is_legal, 0.0, filled).softmax(dim=-1)
    mixed = torch.lerp(log_probs.exp(), uniform, floor)
    is_possible = ~(mixed <= 0.0)  # NaN stays NaN
    # the inner where keeps the gradient of log(0) out
    return torch.where(is_possible, torch.where(is_possible, mixed, 1.0).log(), MASKED)


class _Grid:
    """Maps the choices of heads with these sizes to a grid with a row per head."""

    def __init__(self, sizes: tuple[int, ...]):
        self.num_heads, self.size = len(sizes), max(sizes)
        numbers = torch.arange(self.size)
        is_choice = numbers < torch.tensor(sizes).unsqueeze(-1)  # [H, M]
        starts = torch.tensor([0, *accumulate(sizes)][:-1]).unsqueeze(-1)
        columns = torch.where(is_choice, starts + numbers, 0).flatten()
        fill = torch.full(is_choice.shape, MASKED)
        fill[:, 0] = MASKED / 2
        self.is_rectangle = min(sizes) == max(sizes)  # then the grid is a view
        self.columns = DeviceConstant(columns)  # [H * M]: columns of [..., C]
        self.is_choice = DeviceConstant(is_choice)  # False after a head's last choice
        self.fill = DeviceConstant(fill)  # [H, M]: logits of masked choices

    def of(self, packed: Tensor) -> Tensor:
        """`[..., C]` as `[..., H, M]`; entries after a head's last choice are arbitrary."""
        if not self.is_rectangle:
            packed = packed.index_select(-1, self.columns.on(packed.device))
        return packed.view(*packed.shape[:-1], self.num_heads, self.size)

    def of_masks(self, masks: Tensor) -> Tensor:
        grid = self.of(masks)
        return grid if self.is_rectangle else grid & self.is_choice.on(masks.device)


_GRIDS: dict[tuple[int, ...], _Grid] = {}


def _grid(action_space: FactoredActionSpace) -> _Grid:
    sizes = action_space.sizes
    if sizes not in _GRIDS:
        with torch.inference_mode(False):  # a later caller may need gradients
            _GRIDS[sizes] = _Grid(sizes)
    return _GRIDS[sizes]


def check_floor(floor: float) -> None:
    if not 0.0 <= floor < 1.0:
        raise ValueError(f"floor={floor}; use 0 or more and less than 1")
