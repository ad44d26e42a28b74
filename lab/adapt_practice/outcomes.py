"""What tables of trials say: the results that a controller learns from, and the best rates."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from adapt_practice.trials import TrialSettings, TrialTable, held_out_rows
from esper.adapting.controller import ANCHORS, AdaptationController, Known, validation_criterion
from esper.adapting.plans import MENU, PLANS, Plan


class Outcomes(NamedTuple):
    """The results of every choice in N scenarios; NaN: not offered."""

    signals: Tensor  # [N, S]
    held_out: Tensor  # [N] rows that validate
    added: Tensor  # [N, choices] parameters relative to the model
    validation: Tensor  # [N, choices]
    test: Tensor  # [N, choices]

    @property
    def known(self) -> Known:
        """What a policy knows before it proposes."""
        return Known(*self[:3], usual=self.validation[:, ANCHORS])

    def kept(self, controller: AdaptationController, *, budget: float, tries: int) -> Tensor:
        """The choice that a controller keeps in each scenario, `[N]`."""
        validate = partial(picked, self.validation)
        return controller.choose_many(self.known, validate, budget=budget, tries=tries)


def picked(table: Tensor, choices: Tensor) -> Tensor:
    """The entries of choices `[N]` in a table `[N, choices]`."""
    return table.gather(1, choices[:, None])[:, 0]


def outcomes_of(tables: Sequence[TrialTable], plans: Sequence[Plan] = MENU) -> Outcomes:
    """Tables as what a controller learns from: every plan and learning rate is a choice."""
    columns = torch.tensor([PLANS.index(plan) for plan in plans])
    parts = []
    for table in tables:
        criterion = validation_criterion(table.validation_accuracy, table.validation_loss)
        shape = len(table.rows), len(PLANS), criterion.shape[-1]
        added = table.added[:, None].expand_as(criterion)
        whole = [torch.full(shape, torch.nan) for _ in range(3)]
        for full, part in zip(whole, (added, criterion, table.test_accuracy), strict=True):
            full[:, columns] = part
        held_out = held_out_rows(table.rows, TrialSettings.validation_share)
        parts.append((table.signals, held_out, *(full.flatten(1) for full in whole)))
    return Outcomes(*map(torch.cat, zip(*parts, strict=True)))


def choose_rates(table: TrialTable) -> tuple[Tensor, Tensor]:
    """Validation criterion and test accuracy `[E, A]` at the learning rate that validates best.

    The criterion is the accuracy; the loss decides between equal ones.
    """
    criterion = validation_criterion(table.validation_accuracy, table.validation_loss)
    best = criterion.nan_to_num(-torch.inf).argmax(-1, keepdim=True)
    return criterion.gather(-1, best)[..., 0], table.test_accuracy.gather(-1, best)[..., 0]
