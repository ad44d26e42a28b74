"""Reports: what a controller sees of N growing hosts, one tensor per field.

All of it is known to the user of a training run. A value that may be missing has a bool flag next
to it; where the flag is False, the value is undefined.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline.arrays import TensorFields

ACCURACY_HISTORY = 5  # number of validation accuracies kept

_DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


def _array(shape: str, kind: str = "float") -> Any:
    """A tensor field: its axes (see `Reports`; K: accuracy history) and its dtype."""
    return field(metadata={"shape": shape, "dtype": _DTYPES[kind]})


@dataclass(frozen=True, kw_only=True, eq=False)
class Reports(TensorFields):
    """One report per env. N envs, S slots, B blueprints, H heads; accuracy is 0 to 1."""

    # per env
    step: Tensor = _array("N", "int")  # decisions made so far in the episode
    steps_left: Tensor = _array("N", "int")  # decisions until the end, this one included
    validation_loss: Tensor = _array("N")
    accuracy_history: Tensor = _array("NK")  # validation accuracies, the latest first
    accuracy_history_known: Tensor = _array("NK", "bool")
    host_params: Tensor = _array("N")  # of the host without any seed
    host_macs: Tensor = _array("N")  # multiply-adds per example, without any seed
    params: Tensor = _array("N")  # host and all seeds in it now
    macs: Tensor = _array("N")
    params_left: Tensor = _array("N")  # left of the budget; inf: no limit
    macs_left: Tensor = _array("N")
    seeds_left: Tensor = _array("N", "int")  # germinations left of the limit
    train_rows: Tensor = _array("N", "int")  # number of training rows
    locality: Tensor = _array("N")  # mean correlation of neighbouring input positions, or 0
    rent: Tensor = _array("N")  # score charged per unit of log(1 + added params / host params)
    compute_price: Tensor = _array("N")  # score charged for multiply-adds x time
    last_action: Tensor = _array("NH", "int")
    last_action_known: Tensor = _array("N", "bool")  # False on the first step
    # per slot
    stage: Tensor = _array("NS", "int")  # SeedStage
    stage_age: Tensor = _array("NS", "int")  # steps in this stage
    total_age: Tensor = _array("NS", "int")  # steps since germination
    alpha: Tensor = _array("NS")
    alpha_target: Tensor = _array("NS")
    blueprint: Tensor = _array("NS", "int")  # -1: no seed
    seed_params: Tensor = _array("NS")
    seed_macs: Tensor = _array("NS")
    site_kind: Tensor = _array("NS", "int")  # SiteKind
    site_width: Tensor = _array("NS")  # channels
    site_depth: Tensor = _array("NS")  # position in the host: 0 at the first slot, 1 at the last
    gradient_norm: Tensor = _array("NS")  # of the seed's weights, root mean square
    gradient_known: Tensor = _array("NS", "bool")
    contribution: Tensor = _array("NS")  # validation accuracy that is lost without the seed
    contribution_error: Tensor = _array("NS")  # its standard error
    contribution_known: Tensor = _array("NS", "bool")
    contribution_age: Tensor = _array("NS", "int")  # steps since it was measured
    # per slot and blueprint
    fits: Tensor = _array("NSB", "bool")  # the blueprint can grow at this site
    cost_params: Tensor = _array("NSB")
    cost_macs: Tensor = _array("NSB")
    reach: Tensor = _array("NSB")  # share of the positions that one output sees, 0 to 1
    depth: Tensor = _array("NSB")  # number of layers with weights

    def __post_init__(self) -> None:
        sizes = (*self.fits.shape, self.last_action.shape[-1], ACCURACY_HISTORY)
        letters = dict(zip("NSBHK", sizes, strict=True))
        for entry in fields(self):
            value = getattr(self, entry.name)
            shape = tuple(letters[letter] for letter in entry.metadata["shape"])
            dtype = entry.metadata["dtype"]
            assert (value.shape, value.dtype) == (shape, dtype), entry.name

    @property
    def num_envs(self) -> int:
        return self.fits.shape[0]

    @property
    def num_slots(self) -> int:
        return self.fits.shape[1]

    @property
    def num_blueprints(self) -> int:
        return self.fits.shape[2]

    @property
    def device(self) -> torch.device:
        return self.fits.device

    @property
    def validation_known(self) -> Tensor:
        """Whether there is a validation loss and accuracy yet, bool `[N]`."""
        return self.accuracy_history_known[:, 0]

    @property
    def progress(self) -> Tensor:
        """Completed share of each env's episode, 0 to 1, `[N]`."""
        return self.step / (self.step + self.steps_left).clamp(min=1)
