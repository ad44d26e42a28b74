"""How large an evaluation is: a small one for two CPU cores, the whole one for a GPU, and one for
data that a controller was not trained on."""

from dataclasses import dataclass

from esper.tolaria.host_batch import HostBatchConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Hosts, candidates and training of an evaluation; the counts decide how long it takes."""

    rents: tuple[float, ...] = (0.03, 0.08, 0.20)
    """Low, middle and high: every arm is scored at each."""
    num_widths: int = 8
    """Architectures judged on: this many of those held out from the controller's training."""
    repeats: int = 8
    """Hosts of each architecture and variant; with 8 and 4, 256 hosts an arm."""
    training_widths: int = 6
    """Architectures trained on that are searched and tuned on, with every variant trained on."""
    training_repeats: int = 2
    """Hosts of each of those."""
    learning_rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
    """Tried for hosts that nothing grows in; the best is used in every arm."""
    heuristic_scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    """The heuristic's beliefs about gains and about crowding are tried at each of these times."""
    num_plans: int = 64
    """Constant plans searched, on types trained on and on the types judged on."""
    finalists: int = 4
    """Plans of each type and rent that are trained once more, on other hosts, before one is chosen."""
    frontier_widths: tuple[int, ...] = (4, 6, 8, 10, 12, 16, 20, 24, 32)
    """Static hosts of one width, each with and without norm: a frontier that all hosts share."""
    widening_factors: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5)
    """Each host judged, all its widths times these, with and without norm: a frontier of its own."""
    width_search_share: float = 1.0
    """Of the arithmetic of a controller's training: what a search over static hosts of mixed widths
    may spend, the frontiers included. There may be fewer such hosts than that would pay for."""
    reference_seeds: tuple[str, ...] = ("conv_conv", "dense_dense")
    """Grown in every slot from the start: the first of these that the menu has, or its largest."""
    host_batch: HostBatchConfig | None = HostBatchConfig(minibatches=40, validation_rows=800)
    """How hosts train, but for their numbers; None: as in the controller's training."""
    max_macs: float = 5e7
    """Multiply-adds of one row through all hosts that train side by side; 8,000 of MNIST-1D's."""
    rng_seed: int = 0
    """Of the plans and widths that are tried."""

    def __post_init__(self) -> None:
        for name in ("num_widths", "repeats", "training_widths", "training_repeats", "num_plans"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; use 1 or more")
        if self.width_search_share < 0:
            raise ValueError(f"width_search_share={self.width_search_share}; use 0 or more")
        if not self.max_macs > 0:
            raise ValueError(f"max_macs={self.max_macs}; use a number above 0")
        if not self.rents or min(self.rents) < 0:
            raise ValueError(f"rents={self.rents}; use one or more of 0 or above")
        if not 1 <= self.finalists <= self.num_plans:
            raise ValueError(
                f"finalists={self.finalists} of num_plans={self.num_plans}; use 1 to num_plans"
            )
        if self.repeats < 2:
            raise ValueError(f"repeats={self.repeats}; a frontier needs two repeats or more")
        for name in ("frontier_widths", "widening_factors"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name}={sizes}; a frontier needs two sizes or more, rising")
        if self.frontier_widths[0] < 1:
            raise ValueError(f"frontier_widths={self.frontier_widths}; use widths of 1 or more")
        if self.widening_factors[0] != 1:
            raise ValueError(
                f"widening_factors={self.widening_factors}; begin with 1, the host as it is"
            )


PRESETS: dict[str, EvaluationConfig] = {
    # two CPU cores, about a minute: 36 hosts an arm; large differences show, small ones do not
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
        widening_factors=(1.0, 1.5, 2.0),  # a size takes three seconds
        width_search_share=0.05,
        host_batch=None,
    ),
    # one GPU, some minutes: 256 hosts an arm
    "full": EvaluationConfig(),
    # the same GPU, data that the controller was not trained on: 48 hosts an arm
    "transfer": EvaluationConfig(
        num_widths=4,
        repeats=3,
        training_repeats=1,
        heuristic_scales=(1.0,),
        num_plans=16,
        finalists=2,
        frontier_widths=(4, 8, 12, 16, 24, 32, 40),  # seeds of images are large
        width_search_share=0.02,  # what the controller's training took was paid elsewhere
    ),
    # the same, on data whose networks take a hundred times the arithmetic: 32 hosts an arm
    "transfer_large": EvaluationConfig(
        num_widths=4,
        repeats=2,
        training_widths=3,
        training_repeats=1,
        learning_rates=(1e-2, 2e-2, 4e-2),
        heuristic_scales=(1.0,),
        num_plans=8,
        finalists=2,
        frontier_widths=(4, 8, 12, 16, 24, 32),
        widening_factors=(1.0, 1.25, 1.5, 1.75, 2.0),
        width_search_share=0.0,
    ),
}


def evaluation_preset(name: str) -> EvaluationConfig:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {list(PRESETS)}")
    return PRESETS[name]
