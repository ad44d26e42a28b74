"""Validation of all hosts: loss, accuracy, and the contribution of each seed.

One batched pass measures all three: each slot that has seeds adds a copy of the batch in which it
is switched off. So contributions are paired differences on the same examples.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.tolaria.population import Population

# rows per pass, of one host and of all hosts: limits memory
CHUNK_ROWS = 400
MAX_CHUNK_ROWS = 128 * CHUNK_ROWS


class HostValidation(NamedTuple):
    """Results for P hosts, on the population's device; accuracy is 0 to 1."""

    loss: Tensor  # [P]
    accuracy: Tensor  # [P]
    contribution: Tensor  # [P, S]: accuracy lost when the slot's seed is switched off
    contribution_error: Tensor  # [P, S]: its standard error, examples paired
    contribution_known: Tensor  # [P, S], on the CPU: the slot has an active seed


def validate_hosts(population: Population, num_rows: int | None = None) -> HostValidation:
    """Evaluate every host on the first `num_rows` validation rows of its view (default: all)."""
    task = population.task
    rows = task.validation_x[:, :num_rows]
    num_rows = rows.shape[1]
    weights = population.parameter_table.params
    loss, correct = weights.new_zeros(2, population.num_hosts).unbind()
    # sums of correct answers lost without a slot's seed, and of their squares
    gains = weights.new_zeros(2, population.num_hosts, population.num_slots)
    for x, labels in _chunks(population, rows, task.validation_y):
        logits, slots = population.ablated_logits(x)
        loss += F.cross_entropy(logits[:, :, 0], labels, reduction="none").sum(1)
        is_correct = _is_correct(logits, labels.unsqueeze(1))  # [P, 1 + K, batch]
        correct += is_correct[:, 0].sum(1)
        if slots:
            gain = is_correct[:, :1] - is_correct[:, 1:]
            sums = torch.stack((gain.sum(-1), gain.square().sum(-1)))
            gains.index_add_(2, torch.tensor(slots, device=sums.device), sums)
    mean, mean_square = gains / num_rows
    variance = (mean_square - mean.square()) * (num_rows / max(1, num_rows - 1))
    return HostValidation(
        loss=loss / num_rows,
        accuracy=correct / num_rows,
        contribution=mean,
        contribution_error=(variance.clamp(min=0) / num_rows).sqrt(),
        contribution_known=population.states.is_active,
    )


def accuracy_on(population: Population, x: Tensor, labels: Tensor) -> Tensor:
    """Every host's accuracy `[P]` on rows `[V, rows, *shape]` of its view, such as test rows."""
    correct = x.new_zeros(population.num_hosts)
    for part, part_labels in _chunks(population, x, labels):
        correct += _is_correct(population.logits(part), part_labels).sum(1)
    return correct / x.shape[1]


def _chunks(population: Population, x: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each host's rows in chunks: inputs `[P, *shape, batch]` and labels `[P, batch]`."""
    views = population.view_ids.to(x.device)
    chunk = min(CHUNK_ROWS, max(1, MAX_CHUNK_ROWS // population.num_hosts))
    for start in range(0, x.shape[1], chunk):
        rows = slice(start, min(start + chunk, x.shape[1]))
        yield (
            x[:, rows].index_select(0, views).movedim(1, -1),
            labels[:, rows].index_select(0, views),
        )


def _is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).to(logits.dtype)
