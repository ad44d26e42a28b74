"""Limits on the size of the grown model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real


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

    def left(self, params: int, macs: int) -> tuple[float, float]:
        """What a network of this size leaves of the limits; negative if it exceeds them."""
        most = [math.inf if limit is None else limit for limit in (self.params, self.macs)]
        return most[0] - params, most[1] - macs

    def check_room(
        self, model_params: int, model_macs: int, seeds: Sequence[tuple[str, int, int]]
    ) -> None:
        """Raise if no seed fits into the budget; each is a name, parameters and multiply-adds."""
        params_left, macs_left = self.left(model_params, model_macs)
        if any(params <= params_left and macs <= macs_left for _, params, macs in seeds):
            return
        least = min(seeds, key=lambda seed: seed[1:])
        if least[1] <= params_left:
            least = min(seeds, key=lambda seed: (seed[2], seed[1]))
        raise ValueError(
            f"{self} leaves no room to grow: the model itself has {model_params:,} parameters and "
            f"{model_macs:,} multiply-adds, and its smallest seed ({least[0]}) adds {least[1]:,} and "
            f"{least[2]:,}; the budget is for the whole grown model"
        )

    def describe(self, model_params: int, model_macs: int) -> str:
        """The model's size and its limits, in one line."""
        params, macs = (
            "no limit" if limit is None else f"at most {limit:,} grown"
            for limit in (self.params, self.macs)
        )
        own_macs = f"{model_macs:,} multiply-adds per example"
        return f"{model_params:,} parameters, {params}; {own_macs}, {macs}"
