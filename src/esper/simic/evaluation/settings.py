"""Sizes of an evaluation: `quick` for two CPU cores, `full` for a GPU."""

from dataclasses import dataclass

from esper.leyline.checks import require_at_least, require_positive
from esper.tolaria.host_batch import HostBatchConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Hosts, candidates and training of an evaluation; the counts set its duration."""

    rents: tuple[float, ...] = (0.03, 0.08, 0.20)  # every arm is scored at each
    num_widths: int = 8  # held-out architectures to compare arms on
    repeats: int = 8  # hosts per architecture and variant; with 4 variants 256 hosts per arm
    training_widths: int = 6  # training architectures to search constant plans on
    training_repeats: int = 2  # hosts per training architecture and variant
    num_plans: int = 64  # constant plans searched
    finalists: int = 4  # plans per rent that run on other hosts before one is chosen
    # training of hosts, except their number; None: as in the controller's training
    host_batch: HostBatchConfig | None = HostBatchConfig(minibatches=40, validation_rows=800)
    max_macs: float = 5e7  # of one row through all hosts that train in parallel: 8,000 of MNIST-1D
    rng_seed: int = 0  # samples the plans to try

    def __post_init__(self) -> None:
        counts = ("num_widths", "training_widths", "training_repeats", "num_plans", "finalists")
        require_at_least(self, 1, *counts)
        require_at_least(self, 2, "repeats")
        require_positive(self, "max_macs")
        if not self.rents or min(self.rents) < 0:
            raise ValueError(f"rents={self.rents}; use one or more numbers of 0 or above")
        if self.finalists > self.num_plans:
            raise ValueError(
                f"finalists={self.finalists} of num_plans={self.num_plans}; use 1 to num_plans"
            )


PRESETS: dict[str, EvaluationConfig] = {
    # two CPU cores, about a minute, 36 hosts per arm: only large differences show
    "quick": EvaluationConfig(
        rents=(0.05, 0.15),
        num_widths=4,
        repeats=3,
        training_widths=2,
        training_repeats=1,
        num_plans=5,
        finalists=1,
        host_batch=None,
    ),
    # one GPU, some minutes, 256 hosts per arm
    "full": EvaluationConfig(),
}
