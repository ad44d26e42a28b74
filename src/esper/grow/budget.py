"""How large the grown model may become."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hard limits on the whole grown model, its own weights included; None: no limit."""

    params: int | None = None
    """Parameters in all."""
    macs: int | None = None
    """Multiply-adds per example in all."""

    def check(self, model_params: int, model_macs: int) -> None:
        """Raise if the model is over its budget before anything has grown."""
        for name, limit, own in (
            ("params", self.params, model_params),
            ("macs", self.macs, model_macs),
        ):
            if limit is not None and limit < own:
                raise ValueError(
                    f"Budget({name}={limit:,}) is below the model's own {own:,}; the budget is for "
                    f"the whole grown model: use more than {own:,}"
                )

    def describe(self, model_params: int, model_macs: int) -> str:
        """What the model has and what it may have, in a line."""
        parts = (
            ("parameters", self.params, model_params),
            ("multiply-adds per example", self.macs, model_macs),
        )
        return "; ".join(
            f"{own:,} {name}, " + ("no limit" if limit is None else f"at most {limit:,} grown")
            for name, limit, own in parts
        )
