"""Optimisers as row operations: one update for all hosts and seeds of a parameter table.

They follow `torch.optim.AdamW` and `torch.optim.SGD`, with a learning rate per host and a step
count per part: the host itself and the seed in each slot. Columns without a seed are zero in
parameters, gradients and moments. An update keeps them zero, so no mask is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class OptimizerRows(NamedTuple):
    """Rows of P hosts: an update reads them and changes parameters and moments in place."""

    params: Tensor  # [P, D]
    grads: Tensor  # [P, D]
    moments: Sequence[Tensor]  # [P, D] each
    steps: Tensor  # [P, parts]: steps of each part, this one included
    part_of_column: Tensor  # [D]


class Optimizer(Protocol):
    """An update rule; initial moments are zero."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def num_moments(self) -> int: ...

    def update(self, rows: OptimizerRows, learning_rates: Tensor) -> None:
        """One step of all rows in place, at learning rates `[P, 1]`."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamW:
    learning_rate: float = 2e-2
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    num_moments = 2

    def update(self, rows: OptimizerRows, learning_rates: Tensor) -> None:
        params, grads, (mean, square), steps, part_of_column = rows
        beta_mean, beta_square = self.betas
        mean.lerp_(grads, 1 - beta_mean)
        square.mul_(beta_square).addcmul_(grads, grads, value=1 - beta_square)
        mean_scale = learning_rates / (1 - beta_mean**steps)
        square_scale = (1 - beta_square**steps).rsqrt()
        params.mul_(1 - learning_rates * self.weight_decay)
        scale = square.sqrt().mul_(square_scale.index_select(1, part_of_column)).add_(self.epsilon)
        params.addcdiv_(mean * mean_scale.index_select(1, part_of_column), scale, value=-1)


@dataclass(frozen=True, kw_only=True)
class SGD:
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0

    num_moments = 1

    def update(self, rows: OptimizerRows, learning_rates: Tensor) -> None:
        params, grads, (velocity,), _, _ = rows
        velocity.mul_(self.momentum).add_(grads)
        if self.weight_decay:
            velocity.add_(params, alpha=self.weight_decay)
        params.addcmul_(velocity, learning_rates, value=-1)
