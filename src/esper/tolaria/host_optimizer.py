"""AdamW as row operations: one update for all hosts and seeds of a parameter table.

It follows `torch.optim.AdamW`, with a learning rate per host and a step count per part: the host
itself and the seed in each slot. Columns without a seed are zero in parameters, gradients and
moments. An update keeps them zero, so no mask is needed.
"""

from dataclasses import dataclass

from torch import Tensor

from esper.tolaria.parameter_table import ParameterTable


@dataclass(frozen=True, kw_only=True)
class AdamW:
    learning_rate: float = 2e-2
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def update(self, table: ParameterTable, part_of_column: Tensor, learning_rates: Tensor) -> None:
        """One step of all rows in place, at learning rates `[P, 1]`; `table.steps` include it."""
        params, grads, (mean, square) = table.params, table.grads, table.moments
        steps, (beta_mean, beta_square) = table.steps.clamp(min=1), self.betas
        mean.lerp_(grads, 1 - beta_mean)
        square.mul_(beta_square).addcmul_(grads, grads, value=1 - beta_square)
        mean_scale = learning_rates / (1 - beta_mean**steps)
        square_scale = (1 - beta_square**steps).rsqrt()
        params.mul_(1 - learning_rates * self.weight_decay)
        scale = square.sqrt().mul_(square_scale.index_select(1, part_of_column)).add_(self.epsilon)
        params.addcdiv_(mean * mean_scale.index_select(1, part_of_column), scale, value=-1)
