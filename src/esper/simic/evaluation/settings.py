"""Sizes of an evaluation: `quick` for two CPU cores, `full` for a GPU, `transfer` for other data."""

from dataclasses import dataclass, replace

from esper.leyline.checks import require_at_least, require_positive
from esper.tolaria.host_batch import HostBatchConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Hosts, candidates and training of an evaluation; the counts set its duration."""

    rents: tuple[float, ...] = (0.03, 0.08, 0.20)  # every arm is scored at each
    num_widths: int = 8  # held-out architectures to compare arms on
    repeats: int = 8  # hosts per architecture and variant; with 4 variants 256 hosts per arm
    training_widths: int = 6  # training architectures to search and tune on
    training_repeats: int = 2  # hosts per training architecture and variant
    learning_rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)  # all arms use the best
    heuristic_scales: tuple[float, ...] = (0.5, 1.0, 2.0)  # tried for gain_scale and crowding
    num_plans: int = 64  # constant plans searched, on training types and on held-out types
    finalists: int = 4  # plans per type and rent that run on other hosts before one is chosen
    # widths of static hosts with one width in all layers, with and without norm
    frontier_widths: tuple[int, ...] = (4, 6, 8, 10, 12, 16, 20, 24, 32)
    # factors for all widths of each held-out host, with and without norm
    widening_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5)
    width_search_share: float = 1.0  # budget, as a share of a controller's training FLOPs
    # in the arm with all seeds from the start: the first on the menu, else the menu's largest
    reference_seeds: tuple[str, ...] = ("conv_conv", "dense_dense")
    # training of hosts, except their number; None: as in the controller's training
    host_batch: HostBatchConfig | None = HostBatchConfig(minibatches=40, validation_rows=800)
    max_macs: float = 5e7  # of one row through all hosts that train in parallel: 8,000 of MNIST-1D
    rng_seed: int = 0  # samples the plans and widths to try

    def __post_init__(self) -> None:
        counts = ("num_widths", "training_widths", "training_repeats", "num_plans", "finalists")
        require_at_least(self, 1, *counts)
        require_at_least(self, 2, "repeats")
        require_at_least(self, 0, "width_search_share")
        require_positive(self, "max_macs")
        if not self.rents or min(self.rents) < 0:
            raise ValueError(f"rents={self.rents}; use one or more numbers of 0 or above")
        if self.finalists > self.num_plans:
            raise ValueError(
                f"finalists={self.finalists} of num_plans={self.num_plans}; use 1 to num_plans"
            )
        for name in ("frontier_widths", "widening_factors"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name}={sizes}; a frontier needs two sizes or more, rising")
        if self.frontier_widths[0] < 1:
            raise ValueError(f"frontier_widths={self.frontier_widths}; use widths of 1 or more")
        if self.widening_factors[0] != 1:
            raise ValueError(
                f"widening_factors={self.widening_factors}; start with 1, the unchanged host"
            )


_TRANSFER = EvaluationConfig(
    num_widths=4,
    repeats=3,
    training_repeats=1,
    heuristic_scales=(1.0,),
    num_plans=16,
    finalists=2,
    frontier_widths=(4, 8, 12, 16, 24, 32, 40),
    width_search_share=0.02,  # the controller's training was paid for on another task
)

PRESETS: dict[str, EvaluationConfig] = {
    # two CPU cores, about a minute, 36 hosts per arm: only large differences show
    "quick": EvaluationConfig(
        rents=(0.05, 0.15),
        num_widths=4,
        repeats=3,
        training_widths=2,
        training_repeats=1,
        learning_rates=(1e-2, 2e-2),
        heuristic_scales=(1.0,),
        num_plans=5,
        finalists=1,
        frontier_widths=(4, 6, 8, 12, 16),
        widening_factors=(1.0, 1.5, 2.0),
        width_search_share=0.05,
        host_batch=None,
    ),
    # one GPU, some minutes, 256 hosts per arm
    "full": EvaluationConfig(),
    # one GPU, data that the controller did not train on, 48 hosts per arm
    "transfer": _TRANSFER,
    # the same for networks with a hundred times the multiply-adds, 32 hosts per arm
    "transfer_large": replace(
        _TRANSFER,
        repeats=2,
        training_widths=3,
        learning_rates=(1e-2, 2e-2, 4e-2),
        num_plans=8,
        frontier_widths=(4, 8, 12, 16, 24, 32),
        widening_factors=(1.0, 1.25, 1.5, 1.75, 2.0),
        width_search_share=0.0,
    ),
}


def evaluation_preset(name: str) -> EvaluationConfig:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; use one of {list(PRESETS)}")
    return PRESETS[name]
