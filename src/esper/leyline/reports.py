"""What a controller may know about N growing hosts, as struct-of-arrays tensors.

Everything here is something a user of a training run would know. Evidence that does not exist
yet is flagged as missing by a bool next to it; the value beside a False flag means nothing.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from esper.leyline.arrays import TensorFields

ACCURACY_HISTORY = 5  # validation accuracies kept, the latest first

_DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


def _array(shape: str, kind: str = "float") -> Any:
    """A tensor field: its shape in the project's letters (K: accuracy history) and its kind."""
    return field(metadata={"shape": shape, "dtype": _DTYPES[kind]})


@dataclass(frozen=True, kw_only=True, eq=False)
class Reports(TensorFields):
    """One report per env. N envs, S slots, B blueprints, H heads; accuracy is 0 to 1."""

    # per env
    step: Tensor = _array("N", "int")  # decisions made so far in the episode
    steps_left: Tensor = _array("N", "int")  # decisions until the end, this one included
    validation_loss: Tensor = _array("N")
    validation_accuracy: Tensor = _array("N")
    validation_known: Tensor = _array("N", "bool")  # False before the first validation
    accuracy_history: Tensor = _array("NK")  # the latest first: validation_accuracy itself
    accuracy_history_known: Tensor = _array("NK", "bool")
    host_params: Tensor = _array("N")  # of the host without any seed
    host_macs: Tensor = _array("N")  # multiply-adds per example, likewise
    params: Tensor = _array("N")  # host and all seeds in it now
    macs: Tensor = _array("N")
    params_left: Tensor = _array("N")  # what the budget still allows; inf: no limit
    macs_left: Tensor = _array("N")
    seeds_left: Tensor = _array("N", "int")  # germinations that the seed limit still allows
    train_rows: Tensor = _array("N", "int")  # that there are to train on
    locality: Tensor = _array("N")  # mean correlation of neighbouring input positions, or 0
    rent: Tensor = _array("N")  # score charged per unit of log(1 + added params / host params)
    compute_price: Tensor = _array("N")  # score charged for multiply-adds x time
    last_action: Tensor = _array("NH", "int")
    last_action_known: Tensor = _array("N", "bool")  # False on the first step
    last_action_succeeded: Tensor = _array("N", "bool")
    # per slot
    slot_exists: Tensor = _array("NS", "bool")  # hosts in one batch may have fewer slots
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
    site_depth: Tensor = _array("NS")  # how far into the host: 0 at its first slot, 1 at its last
    gradient_norm: Tensor = _array("NS")  # of the seed's weights, root mean square
    gradient_known: Tensor = _array("NS", "bool")
    contribution: Tensor = _array("NS")  # validation accuracy lost when the seed is switched off
    contribution_error: Tensor = _array("NS")  # its standard error
    contribution_known: Tensor = _array("NS", "bool")
    contribution_age: Tensor = _array("NS", "int")  # steps since it was measured
    # per slot and blueprint
    fits: Tensor = _array("NSB", "bool")  # can grow at this site at all
    cost_params: Tensor = _array("NSB")
    cost_macs: Tensor = _array("NSB")
    reach: Tensor = _array("NSB")  # share of the positions that one output sees, 0 to 1
    depth: Tensor = _array("NSB")  # weight layers in a row

    def __post_init__(self) -> None:
        num_envs, num_slots, num_blueprints = self.fits.shape
        letters = {
            "N": num_envs,
            "S": num_slots,
            "B": num_blueprints,
            "H": self.last_action.shape[-1],
            "K": ACCURACY_HISTORY,
        }
        for entry in fields(self):
            value = getattr(self, entry.name)
            shape = tuple(letters[letter] for letter in entry.metadata["shape"])
            dtype = entry.metadata["dtype"]
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise ValueError(
                    f"report {entry.name!r}: got {value.dtype} {tuple(value.shape)}, expected "
                    f"{dtype} {shape} ([{', '.join(entry.metadata['shape'])}])"
                )

    @classmethod
    def shapes(cls) -> dict[str, str]:
        """Each field's axes, in the project's letters."""
        return {entry.name: entry.metadata["shape"] for entry in fields(cls)}

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
    def progress(self) -> Tensor:
        """Share of each env's episode that is over, 0 to 1, `[N]`."""
        return self.step / (self.step + self.steps_left).clamp(min=1)

    def select(self, env_ids: Tensor) -> "Reports":
        """The reports of some envs, in the order of `env_ids`."""
        return self.at(env_ids)
