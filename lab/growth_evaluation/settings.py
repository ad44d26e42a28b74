"""The sizes of an evaluation: hosts, candidates and searches."""

from dataclasses import dataclass, replace

from esper.runtime.checks import require_at_least, require_positive
from esper.simic.growth.comparison import PRESETS, ComparisonConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(ComparisonConfig):
    """Hosts and constant plans of an evaluation; the counts set its duration."""

    training_widths: int = 6  # training architectures to search constant plans on
    training_repeats: int = 2  # hosts per training architecture and variant
    num_plans: int = 64  # constant plans searched
    finalists: int = 4  # plans per rent that run on other hosts before one is chosen
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
            raise ValueError(f"finalists={self.finalists}; use 1 to num_plans={self.num_plans}")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What is tuned and searched, in addition to an `EvaluationConfig`."""

    learning_rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)  # all arms use the best
    heuristic_scales: tuple[float, ...] = (0.5, 1.0, 2.0)  # tried for gain_scale and crowding
    # widths of static hosts with one width in all layers, with and without norm
    frontier_widths: tuple[int, ...] = (4, 6, 8, 10, 12, 16, 20, 24, 32)
    # factors for all widths of each held-out host, with and without norm; the first is 1
    widening_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5)
    width_search_share: float = 1.0  # budget, as a share of a controller's training FLOPs
    # in the arm with all seeds from the start: the first on the menu, else the menu's largest
    reference_seeds: tuple[str, ...] = ("conv_conv", "dense_dense")


TRAINED_ON = "mnist1d"
_QUICK = PRESETS["quick"]
_OTHER_DATA = EvaluationConfig(
    num_widths=4, repeats=3, training_repeats=1, num_plans=16, finalists=2
)
_OTHER_SEARCH = SearchConfig(
    heuristic_scales=(1.0,),
    frontier_widths=(4, 8, 12, 16, 24, 32, 40),
    width_search_share=0.02,  # the controller's training was paid for on another task
)
Sizes = tuple[EvaluationConfig, SearchConfig]
SIZES: dict[str, Sizes] = {
    "quick": (
        EvaluationConfig(
            rents=_QUICK.rents,
            num_widths=_QUICK.num_widths,
            repeats=_QUICK.repeats,
            training_widths=2,
            training_repeats=1,
            num_plans=5,
            finalists=1,
        ),
        SearchConfig(
            learning_rates=(1e-2, 2e-2),
            heuristic_scales=(1.0,),
            frontier_widths=(4, 6, 8, 12, 16),
            widening_factors=(1.0, 1.5, 2.0),
            width_search_share=0.05,
        ),
    ),
    "full": (EvaluationConfig(), SearchConfig()),
    # data that the controllers did not train on, 48 hosts per arm
    "digits": (_OTHER_DATA, _OTHER_SEARCH),
    # networks with a hundred times the multiply-adds, 32 hosts per arm
    "fashion_mnist": (
        replace(_OTHER_DATA, repeats=2, training_widths=3, num_plans=8),
        replace(
            _OTHER_SEARCH,
            learning_rates=(1e-2, 2e-2, 4e-2),
            frontier_widths=(4, 8, 12, 16, 24, 32),
            widening_factors=(1.0, 1.25, 1.5, 1.75, 2.0),
            width_search_share=0.0,
        ),
    ),
}
