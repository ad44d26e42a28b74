"""Limits on the size of the grown model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple


class SeedCost(NamedTuple):
    """The cost of one possible seed."""

    name: str  # blueprint and site
    params: int
    macs: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hard limits on the whole grown model, its own weights included; None: no limit."""

    params: int | None = None
    """Parameters in total."""
    macs: int | None = None
    """Multiply-adds per example in total."""

    def __post_init__(self) -> None:
        for name, limit in list(vars(self).items()):
            if limit is not None and not (isinstance(limit, Real) and float(limit) > 0):
                raise ValueError(f"Budget({name}={limit!r}); use a number above 0, such as 20_000")
            if limit is not None:
                object.__setattr__(self, name, None if limit == math.inf else math.floor(limit))

    def check(self, model_params: int, model_macs: int) -> None:
        """Raise if the model itself exceeds the budget."""
        for name, limit, own in (
            ("params", self.params, model_params),
            ("macs", self.macs, model_macs),
        ):
            if limit is not None and limit < own:
                raise ValueError(
                    f"Budget({name}={limit:,}) is below the model's own {own:,}; the budget is for "
                    f"the whole grown model: use more than {own:,}"
                )

    def check_room(self, model_params: int, model_macs: int, seeds: Sequence[SeedCost]) -> None:
        """Raise if none of the possible seeds fits into the budget."""
        params_left = math.inf if self.params is None else self.params - model_params
        macs_left = math.inf if self.macs is None else self.macs - model_macs
        if any(seed.params <= params_left and seed.macs <= macs_left for seed in seeds):
            return
        by_params = min(seeds, key=lambda seed: (seed.params, seed.macs))
        by_macs = min(seeds, key=lambda seed: (seed.macs, seed.params))
        smallest = by_params if by_params.params > params_left else by_macs
        raise ValueError(
            f"{self} leaves no room to grow: the model itself has {model_params:,} parameters and "
            f"{model_macs:,} multiply-adds, and its smallest seed ({smallest.name}) adds "
            f"{smallest.params:,} and {smallest.macs:,}; the budget is for the whole grown model"
        )

    def describe(self, model_params: int, model_macs: int) -> str:
        """The model's size and its limits, in one line."""
        parts = (
            ("parameters", self.params, model_params),
            ("multiply-adds per example", self.macs, model_macs),
        )
        return "; ".join(
            f"{own:,} {name}, " + ("no limit" if limit is None else f"at most {limit:,} grown")
            for name, limit, own in parts
        )
