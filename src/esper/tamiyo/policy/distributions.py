"""Masked categorical distributions over the heads of a factored action.

All heads are scored at once. Their choices are concatenated, `[..., C]`; internally each head is a
row of a grid `[..., H, M]`, where M is the size of the largest head. One log-softmax then covers
all rules about masks, because masked logits get two constants:

- a masked choice gets a logit of -1e30: its probability and gradient are exactly 0;
- choice 0, when masked, gets half of that. A row without a legal choice puts all its weight on
  action 0: log-prob, entropy and gradient are exactly 0. Next to any real logit the half is as
  impossible as the whole.

Arithmetic is float32 for logits of any dtype.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from esper.leyline.devices import DeviceConstant
from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace

LARGEST_LOGIT = 1e29  # logits are clipped to this, up and down
# far below any logit, and far enough above the lowest float that gradients times it are finite
MASKED = -1e30


class MaskedFactoredCategorical:
    """The heads' distributions, each given the earlier choices that were made.

    `logits` and `masks` are `[..., C]`. With `floor`, each head is mixed with the uniform
    distribution over its k legal choices: p' = (1 - floor) p + floor / k. Sampling and scoring use
    the same p'. To score the same masks repeatedly, build `legal` from them once and pass it.
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
    ):
        _check_packed(action_space, logits, masks, floor)
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

    @property
    def probs(self) -> Tensor:
        """Probabilities `[..., H, M]`, each head's choices first, then zeros up to M."""
        return self._log_probs.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probs `[..., H]` of `actions` `[..., H]`; at most -1e29 for a masked choice."""
        return self._log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropies `[..., H]` in nats."""
        return -(self.probs * self._log_probs).sum(dim=-1)

    def normalize(self, entropies: Tensor) -> Tensor:
        """Entropies from `entropy` as a share of the uniform one, 0 to 1; 0 without a choice."""
        # with one legal choice the entropy is exactly 0, so the divisor does not matter
        return entropies / self.legal.log_counts

    @property
    def legal(self) -> "LegalChoices":
        """The legal choices, computed on first use."""
        if self._legal is None:
            self._legal = LegalChoices.from_masks(self.masks, self.action_space)
        return self._legal

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A sample of every head, `[..., H]`; never a masked choice."""
        probs = self.probs.detach()
        # Of exponential clocks with rates p, choice i rings first with probability p_i. The bounds
        # keep p / clock at 0 for masked choices, and above 0 for the likeliest one.
        clocks = torch.empty_like(probs).exponential_(generator=generator).clamp_(1e-30, 1e3)
        return probs.div_(clocks).argmax(dim=-1)

    def mode(self) -> Tensor:
        """The likeliest choice of every head, `[..., H]`."""
        return self._log_probs.argmax(dim=-1)


class LegalChoices(NamedTuple):
    """All that a distribution needs of its masks `[..., C]`; independent of the logits."""

    grid: Tensor  # bool [..., H, M]: the masks, with a row for each head
    counts: Tensor  # float [..., H]: legal choices of each head
    log_counts: Tensor  # [..., H]: entropy of the uniform distribution; log 2 without a choice
    has_choice: Tensor  # float [...]: 1 where some head has more than one choice, 0 elsewhere

    @classmethod
    def from_masks(cls, masks: Tensor, action_space: FactoredActionSpace) -> "LegalChoices":
        grid = _grid(action_space).of_masks(masks)
        counts = grid.sum(dim=-1, dtype=torch.float32)
        log_counts = counts.clamp(min=2.0).log()
        return cls(grid, counts, log_counts, (counts > 1).any(dim=-1).float())


def choose_actions(
    action_space: FactoredActionSpace,
    masks: ActionMasks,
    logits_of: Callable[[int, Tensor], Tensor],
    *,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices `[N, H]`, their log-probs `[N, H]` and the mask rows that applied `[N, C]`.

    Heads are chosen in order, one of `action_space.head_groups` at a time:
    `logits_of(group, actions)` returns the logits `[N, choices of the group]` given the choices
    made so far, `[N, heads before the group]`.
    """
    actions = torch.empty(masks.num_envs, 0, dtype=torch.int64, device=masks.device)
    chosen, log_probs, rows = [], [], []
    for group, (heads, space) in enumerate(
        zip(action_space.head_groups, action_space.group_spaces, strict=True)
    ):
        row = masks.rows(heads, actions)
        head = MaskedFactoredCategorical(space, logits_of(group, actions), row, floor=floor)
        chosen.append(head.mode() if deterministic else head.sample(generator))
        log_probs.append(head.log_prob(chosen[-1]))
        rows.append(row)
        actions = _join(chosen)
    # a single row is the caller's own mask, which the caller may change later
    return actions, _join(log_probs), rows[0].clone() if len(rows) == 1 else _join(rows)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


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


def _check_packed(
    action_space: FactoredActionSpace, logits: Tensor, masks: Tensor, floor: float
) -> None:
    num_choices = action_space.num_choices
    if logits.shape[-1:] != (num_choices,) or masks.shape != logits.shape:
        raise ValueError(
            f"got logits {tuple(logits.shape)} and masks {tuple(masks.shape)}, expected both "
            f"[..., {num_choices}] for heads "
            f"{dict(zip(action_space.names, action_space.sizes, strict=True))}"
        )
    if masks.dtype != torch.bool:
        raise ValueError(f"masks are {masks.dtype}, expected {torch.bool}")
    check_floor(floor)


def check_floor(floor: float) -> None:
    if not 0.0 <= floor < 1.0:
        raise ValueError(f"floor={floor}; use 0 or more and less than 1")
