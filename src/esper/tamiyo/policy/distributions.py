"""Masked categorical distributions over the heads of a factored action.

All heads are scored at once. Their choices lie side by side `[..., C]`; inside, each head has a
row of its own in a grid `[..., H, M]`, M the size of the largest head. Two constants make every
rule about masks fall out of one log-softmax, with no special case behind it:

- a masked choice gets a logit of -1e30, so its probability and its gradient are exactly 0;
- choice 0, when masked, gets half of that. A row with no legal choice thus puts all its weight on
  action 0: log-prob, entropy, KL and gradient are exactly 0. Next to any real logit the half is
  as impossible as the whole.

Arithmetic is float32 whatever the logits are.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace

LARGEST_LOGIT = 1e29  # beyond it, up or down, logits are taken for equal
# far below any logit, and far enough above the lowest float that gradients times it stay finite
MASKED = -1e30


class MaskedFactoredCategorical:
    """The heads' distributions, each given the earlier choices that were made.

    `logits` and `masks` are `[..., C]`. With `floor`, each head is mixed with the uniform
    distribution over its legal choices: p' = (1 - floor) p + floor / k. Sampling and scoring see
    the same p'. A caller who scores under the same masks again and again makes `legal` of them
    once and passes it along. Values are not checked here (they may lie on a device): a NaN logit
    gives NaN.
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
        tables = _tables(action_space, logits.device)
        # a clamp whose gradient is one operation
        bounded = hardtanh(logits.float(), -LARGEST_LOGIT, LARGEST_LOGIT)
        is_legal = tables.mask_grid(masks) if legal is None else legal.grid
        filled = torch.where(is_legal, tables.to_grid(bounded), tables.fill)
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

    def normalized_entropy(self) -> Tensor:
        """Entropies as a share of that of an even choice, 0 to 1; 0 where there is no choice."""
        return self.normalize(self.entropy())

    def normalize(self, entropies: Tensor) -> Tensor:
        """What `entropy` returned as `normalized_entropy` returns it."""
        # with one legal choice the entropy is exactly 0, whatever it is divided by
        return entropies / self.legal.log_counts

    @property
    def legal(self) -> "LegalChoices":
        """What there is to choose from."""
        if self._legal is None:
            self._legal = LegalChoices.from_masks(self.masks, self.action_space)
        return self._legal

    def kl(self, other: "MaskedFactoredCategorical") -> Tensor:
        """KL(self || other) `[..., H]`, for distributions under the same masks."""
        return (self.probs * (self._log_probs - other._log_probs)).sum(dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A draw for every head, `[..., H]`; never a masked choice."""
        probs = self.probs.detach()
        # The first of exponential clocks with rates p rings with probability p. The bounds keep
        # 0 / clock at 0 and the likeliest choice's p / clock above it, for any clock drawn.
        clocks = torch.empty_like(probs).exponential_(generator=generator).clamp_(1e-30, 1e3)
        return probs.div_(clocks).argmax(dim=-1)

    def mode(self) -> Tensor:
        """The likeliest choice of every head, `[..., H]`."""
        return self._log_probs.argmax(dim=-1)


class LegalChoices(NamedTuple):
    """What masks `[..., C]` say whatever the logits are."""

    grid: Tensor  # bool [..., H, M]: the masks, with a row for each head
    counts: Tensor  # float [..., H]: how many choices each head has
    log_counts: Tensor  # [..., H]: the entropy of an even choice; log 2 where there is no choice
    has_choice: Tensor  # float [...]: 1 where some head has more than one choice, 0 elsewhere

    @classmethod
    def from_masks(cls, masks: Tensor, action_space: FactoredActionSpace) -> "LegalChoices":
        grid = _tables(action_space, masks.device).mask_grid(masks)
        counts = grid.sum(dim=-1, dtype=torch.float32)
        log_counts = counts.clamp(min=2.0).log()
        return cls(grid, counts, log_counts, (counts > 1).any(dim=-1).float())


def decide(
    action_space: FactoredActionSpace,
    masks: ActionMasks,
    logits_of: Callable[[int, Tensor], Tensor],
    *,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices `[N, H]`, their log-probs `[N, H]` and the mask rows that applied `[N, C]`.

    Heads are decided in order, a run of them (`action_space.head_groups`) at a time:
    `logits_of(run, actions)` returns the logits `[N, choices of the run]`, from the choices
    `[N, heads before the run]` made so far.
    """
    actions = torch.empty(masks.num_envs, 0, dtype=torch.int64, device=masks.device)
    chosen, log_probs, rows = [], [], []
    for run, (heads, part) in enumerate(
        zip(action_space.head_groups, action_space.group_spaces, strict=True)
    ):
        row = masks.rows(heads, actions)
        chances = MaskedFactoredCategorical(part, logits_of(run, actions), row, floor=floor)
        chosen.append(chances.mode() if deterministic else chances.sample(generator))
        log_probs.append(chances.log_prob(chosen[-1]))
        rows.append(row)
        actions = _join(chosen)
    # a single row is the caller's own mask, who may change it
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


class _Tables(NamedTuple):
    """Constants of an action space on a device."""

    num_heads: int
    columns: Tensor | None  # [H * M]: where the grid's entries lie in [..., C]; None: as they are
    is_choice: Tensor  # [H, M]: False behind a head's last choice, where a column is any one
    fill: Tensor  # [H, M]: what a masked choice's logit is replaced by

    def to_grid(self, packed: Tensor) -> Tensor:
        """`[..., C]` as `[..., H, M]`; what lies behind a head's last choice means nothing."""
        if self.columns is not None:
            packed = packed.index_select(-1, self.columns)
        size = packed.shape[-1] // self.num_heads  # said, so that a batch may be empty
        return packed.view(*packed.shape[:-1], self.num_heads, size)

    def mask_grid(self, masks: Tensor) -> Tensor:
        grid = self.to_grid(masks)
        return grid if self.columns is None else grid & self.is_choice


_TABLES: dict[tuple[tuple[int, ...], torch.device], _Tables] = {}


def _tables(action_space: FactoredActionSpace, device: torch.device) -> _Tables:
    key = (action_space.sizes, device)
    tables = _TABLES.get(key)
    if tables is None:
        with torch.inference_mode(False):  # whoever asks first, others may want gradients
            tables = _TABLES[key] = _build_tables(action_space, device)
    return tables


def _build_tables(action_space: FactoredActionSpace, device: torch.device) -> _Tables:
    sizes = action_space.sizes
    numbers = torch.arange(max(sizes))
    is_choice = numbers < torch.tensor(sizes).unsqueeze(-1)
    starts = torch.tensor([part.start for part in action_space.slices])
    columns = torch.where(is_choice, starts.unsqueeze(-1) + numbers, 0)
    fill = torch.full(is_choice.shape, MASKED, dtype=torch.float32)
    fill[:, 0] = MASKED / 2
    is_rectangle = min(sizes) == max(sizes)
    return _Tables(
        len(sizes),
        None if is_rectangle else columns.flatten().to(device),
        is_choice.to(device),
        fill.to(device),
    )


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
