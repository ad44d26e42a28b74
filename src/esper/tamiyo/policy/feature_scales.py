"""Features scaled to mean 0 and variance 1: by running statistics, or fitted once for Tamiyo."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.features import FeatureLayout

LEAST_STD = 0.1  # amplify a near-constant feature at most 10x
LIMIT = 3.0  # clip to 3 standard deviations
_ONE = FeatureLayout(1, 1)  # scales of env, slot and blueprint, laid out as for one of each
SumOverRanks = Callable[[Sequence[Tensor]], None]  # in place, as `Ranks.sum_`


class Moments(NamedTuple):
    """How many rows there are, and what their columns are like, in float64."""

    num_rows: Tensor | float
    mean: Tensor  # [width]
    variance: Tensor  # [width]

    @classmethod
    def of(cls, rows: Tensor) -> "Moments":
        """Of rows `[R, width]`."""
        if len(rows) == 0:
            none = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
            return cls(0.0, none, none)
        variance, mean = torch.var_mean(rows.double(), dim=0, correction=0)
        return cls(float(len(rows)), mean, variance)

    def of_ranks(self, sum_: SumOverRanks) -> "Moments":
        """Of the rows of all ranks; the mean comes first, so that no digits cancel."""
        count = torch.zeros_like(self.mean[0]) + self.num_rows
        mean = count * self.mean
        sum_([count, mean])
        mean /= count.clamp(min=1.0)
        squares = self.num_rows * (self.variance + (self.mean - mean).square())
        sum_([squares])
        return Moments(count, mean, squares / count.clamp(min=1.0))


class RunningNormalizer(nn.Module):
    """Scales rows `[..., width]` to mean 0 and variance 1 with the statistics seen so far.

    The first `uncentered` columns are divided by their root mean square instead: 0 stays 0.

    Statistics change only in `update`, so all rows between two updates are scaled alike. Before
    the first update values stay as they are.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    bound: Tensor
    lower_bound: Tensor
    center: Tensor
    scale: Tensor
    factor: Tensor

    def __init__(
        self, width: int, *, limit: float = 10.0, epsilon: float = 1e-8, uncentered: int = 0
    ):
        super().__init__()
        self.uncentered = uncentered
        self.limit = limit  # clip to this many standard deviations
        self.register_buffer("bound", torch.tensor(torch.inf))  # `limit` from the first update on
        self.epsilon = epsilon
        # float64: sums over millions of rows stay exact enough to merge
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # what scaling reads, in float32; CUDA graphs may read these tensors, so they change in place
        self.register_buffer("lower_bound", -self.bound, persistent=False)
        self.register_buffer("center", torch.zeros(width), persistent=False)
        self.register_buffer("scale", self.std.float(), persistent=False)
        self.register_buffer("factor", 1.0 / self.scale, persistent=False)
        self.register_load_state_dict_post_hook(_refresh)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, rows: Tensor, sum_: SumOverRanks | None = None) -> None:
        """Merge the rows `[R, width]` into the statistics; with `sum_`, those of all ranks."""
        if len(rows) or sum_ is not None:
            self.merge(Moments.of(rows), sum_)

    @torch.no_grad()
    def merge(self, batch: Moments, sum_: SumOverRanks | None = None) -> None:
        """Merge rows given by their moments (Chan et al. 1979); with `sum_`, of all ranks."""
        if sum_ is not None:
            batch = batch.of_ranks(sum_)
        count, batch_mean, batch_variance = batch
        batch_variance[: self.uncentered] += batch_mean[: self.uncentered].square()
        batch_mean[: self.uncentered] = 0.0
        total = self.count + count
        share = count / total
        delta = batch_mean - self.mean
        spread = (1 - share) * self.variance + share * batch_variance
        self.variance.copy_(spread + share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.copy_(total)
        self.bound.fill_(self.limit)
        _refresh(self)

    @property
    def std(self) -> Tensor:
        """The divisor, `[width]`."""
        return (self.variance + self.epsilon).sqrt()

    def normalize(self, values: Tensor) -> Tensor:
        centered = values - self.center
        return centered.mul_(self.factor).clamp_(self.lower_bound, self.bound)

    def denormalize(self, values: Tensor) -> Tensor:
        return torch.addcmul(self.center, values, self.scale)


def _refresh(normalizer: nn.Module, _: object = None) -> None:
    assert isinstance(normalizer, RunningNormalizer)
    std = normalizer.std
    normalizer.center.copy_(normalizer.mean)
    normalizer.scale.copy_(std)
    normalizer.factor.copy_(1.0 / std)
    normalizer.lower_bound.copy_(-normalizer.bound)


class FeatureScales(nn.Module):
    """A centre and a scale for each feature of a block; 0 and 1 before `fit`, and for flags.

    They are part of the weights: a controller keeps the scales of its training on other data.
    Blueprints are scaled but not centred, because one that does not fit has to stay all 0.
    """

    center: Tensor
    scale: Tensor
    is_fitted: Tensor

    def __init__(self, layout: FeatureLayout):
        super().__init__()
        self.layout = layout
        self.register_buffer("center", torch.zeros(_ONE.width))
        self.register_buffer("scale", torch.ones(_ONE.width))
        self.register_buffer("is_fitted", torch.tensor(False))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Scaled features of env, slots and blueprints, as `layout.split` returns them."""
        centers, scales = _ONE.split(self.center), _ONE.split(self.scale)
        blocks = zip(self.layout.split(features), centers, scales, strict=True)
        return tuple(((x - center) * scale).clamp_(-LIMIT, LIMIT) for x, center, scale in blocks)

    @torch.no_grad()
    def fit(self, features: Tensor) -> None:
        """Fit the scales to the features `[R, F]`, without blueprints that do not fit."""
        env, slots, blueprints = self.layout.split(features)
        rows = (env, slots.flatten(0, 1), blueprints[self.layout.blueprint_fits(blueprints)])
        is_flag = _ONE.is_flag().to(features.device)
        blocks = zip(rows, *map(_ONE.split, (self.center, self.scale, is_flag)), strict=True)
        for part, center, scale, flags in blocks:
            if len(part):
                variance, mean = torch.var_mean(part, dim=0, correction=0)
                center.copy_(torch.where(flags, 0.0, mean))
                scale.copy_(torch.where(flags, 1.0, 1 / variance.sqrt().clamp(min=LEAST_STD)))
        _ONE.split(self.center)[2].zero_()
        self.is_fitted.fill_(True)
