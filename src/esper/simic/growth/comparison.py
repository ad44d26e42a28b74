"""Does growing help? A learned controller and its rivals, on hosts held out from training.

    comparison = evaluate_run(Path("runs/quick-1"), PRESETS["quick"])
    print(comparison.markdown())

An *arm* is a controller. Host h has the same architecture, initial weights, data, data order and
rent in every arm, so arms are compared host by host.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.protocols import Controller, StepOutcome
from esper.runtime.files import atomic_write
from esper.simic.growth.hosts_and_data import load_hosts, load_menu, load_task, with_checksum
from esper.simic.growth.rewards import growth_score
from esper.simic.growth.run_folder import RunFiles
from esper.simic.growth.train_config import TrainConfig
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.learned import LearnedController
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.scripted import ConstantPlan, FixedSchedule, RandomController
from esper.tolaria.environment import GrowthEnvironment
from esper.tolaria.host_batch import PopulationBatch
from esper.tolaria.host_optimizer import AdamW
from esper.tolaria.tasks import Task

HOST_ALONE, LEARNED = "host alone", "learned"

OnPhase = Callable[[int, str], None]  # phases that are done, and the one that starts
NUM_PHASES = 7  # a constant plan is chosen, then six arms grow
TestRows = tuple[Tensor, Tensor]  # inputs [V, rows, *shape], labels [V, rows]


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """The size of a comparison."""

    rents: tuple[float, ...] = (0.03, 0.08, 0.20)  # every arm grows all hosts at each
    num_widths: int = 8  # architectures: held out, to compare on; trained on, to choose a plan
    repeats: int = 8  # held-out hosts of each architecture and variant of the data


PRESETS = {
    # two CPU cores, half a minute, 36 hosts per arm: only large differences show
    "quick": ComparisonConfig(rents=(0.05, 0.15), num_widths=4, repeats=3),
    "full": ComparisonConfig(),  # one GPU, some minutes, 256 hosts per arm
}


def evaluate_run(
    run: Path, settings: ComparisonConfig, task: str = "", data: str = "", on_phase: OnPhase = print
) -> "Comparison":
    """Compare a run's controller with its rivals; `task` and `data` name other data than its own."""
    files, rents = RunFiles(run), settings.rents
    config = files.read_config()
    if not files.controller.exists():
        raise ValueError(f"{run} has no controller yet; the first checkpoint will write it")
    controller = LearnedController.load(files.controller, config.resolved_device())
    if task or data:
        config = on_task(config, task or "data", data)
    training, held_out = prepare(config, settings)
    on_phase(0, f"trying constant plans on {training.num_hosts} training hosts")
    arms: dict[str, Controller] = {
        HOST_ALONE: ConstantPlan(),
        "random controller": RandomController(torch.Generator().manual_seed(0)),
        "fixed schedule": FixedSchedule(),
        "best constant": best_constant(training, rents, held_out.num_hosts),
        "heuristic": HeuristicController(),
        LEARNED: controller,
    }
    test_rows = held_out.task.held_out.open()  # once, after everything was chosen
    grown: dict[str, GrownHosts] = {}
    for name, arm in arms.items():
        on_phase(len(grown) + 1, f"growing {held_out.num_hosts} held-out hosts: {name}")
        grown[name] = held_out.grow(arm, rents, test_rows)
    return Comparison(config.task, rents, grown)


def best_constant(hosts: "PairedHosts", rents: Sequence[float], num_hosts: int) -> ConstantPlan:
    """For `num_hosts` other hosts, the plan with the best mean validation score at each rent.

    The plans: no seeds, and each blueprint in every slot from the first step.
    """
    num_blueprints = len(load_menu(hosts.config, hosts.task))
    plans = [ConstantPlan(), *(ConstantPlan(0, number) for number in range(num_blueprints))]
    # a plan does not look at the rent: the same networks are scored at all rents
    grown = [hosts.grow(plan, rents[:1]) for plan in plans]
    scores = torch.stack([networks.scores(rents).mean(dim=1) for networks in grown])
    best = [plans[index] for index in scores.argmax(dim=0).tolist()]
    step = torch.stack([plan.step for plan in best])
    blueprint = torch.stack([plan.blueprint for plan in best])
    return ConstantPlan(*(each.repeat(num_hosts).unsqueeze(1) for each in (step, blueprint)))


def on_task(config: TrainConfig, task: str, data: str = "") -> TrainConfig:
    """The same widths and variants on other data."""
    if task == config.task and not data:
        return config
    config = replace(config, host="auto", menu=())
    return with_checksum(replace(config, task=task, data=data, data_checksum=""))


def prepare(config: TrainConfig, settings: ComparisonConfig) -> tuple["PairedHosts", "PairedHosts"]:
    """Hosts of training types, to choose a plan on, and hosts that were held out.

    Raises if nothing was held out; `esper train` calls it before it trains.
    """
    if not config.held_out_widths and not config.held_out_variants:
        raise ValueError(
            "nothing was held out from the controller's training; train with held_out_widths or "
            "held_out_variants to evaluate it"
        )
    seen, unseen = config.variants, config.held_out_variants or config.variants
    task = load_task(config, (*seen, *unseen))
    most = settings.num_widths
    trained_on = config.training_widths[:: max(1, len(config.training_widths) // most)][:most]
    held_out = [tuple(map(int, name.split("-"))) for name in config.held_out_widths[:most]]
    training = PairedHosts(config, task, trained_on, range(len(seen)), repeats=2)
    views = range(len(seen), task.num_views)
    return training, PairedHosts(config, task, held_out or trained_on, views, settings.repeats)


@dataclass(frozen=True, eq=False)
class PairedHosts:
    """H hosts that every arm grows: architectures x views x repeats, in this order."""

    config: TrainConfig  # hosts train as they do in the controller's training
    task: Task
    widths: Sequence[tuple[int, ...]]  # of each architecture
    view_ids: Sequence[int]  # of the task
    repeats: int

    @property
    def num_hosts(self) -> int:
        return len(self.widths) * len(self.view_ids) * self.repeats

    def grow(
        self, controller: Controller, rents: Sequence[float], test_rows: TestRows | None = None
    ) -> "GrownHosts":
        """Every host trained once per rent; their accuracy on validation rows or on `test_rows`."""
        environment = self.untrained(rents)
        *_, outcome = play(environment, controller)
        reports, accuracy = environment.observe(), outcome.accuracy
        if test_rows is not None:
            x, labels = test_rows
            accuracy = environment.host_batch.accuracy_on(x, labels.to(x.device))
        charge = reports.compute_price * outcome.added_compute
        fields = (accuracy, reports.host_params, outcome.added_params, charge)
        return GrownHosts(*(field.double().view(-1, len(rents)).T for field in fields))

    def untrained(self, rents: Sequence[float], rng_seed: int = 0) -> GrowthEnvironment:
        """Every host once per rent: env h * len(rents) + r is host h at rent r.

        Another `rng_seed` gives other hosts of the same types.
        """
        config, task = self.config, self.task
        size = replace(
            config.host_batch,
            num_types=len(self.widths),
            envs_per_type=len(self.view_ids) * self.repeats * len(rents),
            siblings=len(rents),  # equal in all but the rent
            controls=0,
            validation_rows=min(config.host_batch.validation_rows, task.validation_y.shape[1]),
        )
        hosts, menu = load_hosts(config, task, tuple(self.widths)), load_menu(config, task)
        optimizer = AdamW(learning_rate=config.host_learning_rate)
        host_batch = PopulationBatch(hosts, menu, task, size, optimizer=optimizer)
        views = torch.tensor(self.view_ids).repeat_interleave(self.repeats * len(rents))
        host_batch.new_hosts(hosts, views.repeat(len(hosts)), rng_seed)
        environment = GrowthEnvironment(host_batch, config.growth)
        environment.begin(host_batch.facts(), torch.tensor(rents).repeat(self.num_hosts))
        return environment


def play(environment: GrowthEnvironment, controller: Controller) -> Iterator[StepOutcome]:
    """Play one episode under a controller, a step at a time."""
    controller.begin(torch.arange(environment.num_envs))
    for _ in range(environment.config.num_steps):
        reports = environment.observe()
        masks = compute_batch_masks(reports, environment.action_space)
        yield environment.step(controller.decide(reports, masks))


class GrownHosts(NamedTuple):
    """Finished networks, each `[rents, H]`."""

    accuracy: Tensor  # 0 to 1
    host_params: Tensor
    added_params: Tensor  # of committed seeds
    compute_charge: Tensor

    def scores(self, rents: Sequence[float]) -> Tensor:
        """`[rents, H]`; networks of a single rent are scored at all of `rents`."""
        rent = torch.tensor(rents, dtype=torch.float64).unsqueeze(1)
        sizes = self.added_params, self.host_params
        return growth_score(self.accuracy, *sizes, rent, self.compute_charge)


class Estimate(NamedTuple):
    """A mean over hosts, and half its 95 % Student-t interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Tensor) -> "Estimate":
        """From `[H]`, such as the differences of two arms."""
        from scipy.special import stdtrit

        error = float(values.std()) / math.sqrt(len(values))
        return cls(float(values.mean()), float(stdtrit(len(values) - 1, 0.975)) * error)

    @property
    def is_decided(self) -> bool:
        """Whether 0 is outside the interval; without any spread the mean is certain."""
        return abs(self.mean) > self.half_width or self.half_width == 0

    def __str__(self) -> str:
        """In percentage points, such as "+3.7 [+3.2, +4.3]"."""
        ends = self.mean - self.half_width, self.mean + self.half_width
        mean, low, high = (f"{100 * value:+.1f}" for value in (self.mean, *ends))
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Comparison:
    """What every arm reached on test rows of the held-out data."""

    task: str
    rents: tuple[float, ...]
    arms: Mapping[str, GrownHosts]

    def scores(self, arm: str) -> Tensor:
        """`[rents, H]`."""
        return self.arms[arm].scores(self.rents)

    def leads(self, arm: str, rival: str) -> list[Estimate]:
        """By how much an arm's score is above a rival's at each rent, paired by host."""
        return list(map(Estimate.of, self.scores(arm) - self.scores(rival)))

    def figures(self) -> dict[str, dict[str, Estimate]]:
        """The score of every arm at every rent; the best arm comes last."""
        figures = {}
        for index, rent in enumerate(self.rents):
            scores = {arm: Estimate.of(self.scores(arm)[index]) for arm in self.arms}
            ranked = sorted(scores, key=lambda arm: scores[arm].mean)
            figures[f"rent {rent:g}"] = {arm: scores[arm] for arm in ranked}
        return figures

    def brief(self) -> str:
        """Two lines: whether growing helped, and how it compares with other ways to grow."""
        lead, *later = self.leads(LEARNED, HOST_ALONE)
        helped = "Growing helped" if lead.mean > 0 else "Growing did not help"
        if not lead.is_decided:
            helped = "It is undecided whether growing helped"
        learned = self.arms[LEARNED]
        added = learned.added_params[0].mean() / learned.host_params[0].mean()
        rents = zip(self.rents[1:], later, strict=True)
        others = []
        for rival in self.arms:
            if rival not in (HOST_ALONE, LEARNED):
                over = self.leads(LEARNED, rival)[0]
                doubt = "" if over.is_decided else " (undecided)"
                others.append(f"{rival} {100 * over.mean:+.1f}{doubt}")
        return (
            f"{helped}: {lead} points over the same networks ungrown, with {added:.0%} more "
            f"parameters (rent {self.rents[0]:g})"
            f"{''.join(f'; at rent {rent:g}: {lead}' for rent, lead in rents)}.\n"
            f"Lead over other ways to grow: {', '.join(others)}. {learned.accuracy.shape[1]} "
            "networks per way, of widths and data that it never saw."
        )

    def table(self) -> str:
        """Every arm at every rent, the best first, in columns that a terminal shows aligned."""
        rows = [["at", "arm", "score", "parameters", "over host alone", "learned leads it by"]]
        for index, (rent, scores) in enumerate(self.figures().items()):
            for arm, score in reversed(scores.items()):
                params = (self.arms[arm].host_params + self.arms[arm].added_params)[index].mean()
                over_host = "" if arm == HOST_ALONE else str(self.leads(arm, HOST_ALONE)[index])
                behind = "" if arm == LEARNED else str(self.leads(LEARNED, arm)[index])
                cells = [rent, arm, f"{100 * score.mean:.1f}", f"{params:,.0f}"]
                rows.append([*cells, over_host, behind])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)

    def markdown(self) -> str:
        note = (
            "Points of score on test rows, mean [95 % interval]; leads are paired by host. With fewer "
            "than 256 networks per way, only differences of several points are reliable."
        )
        blocks = (f"# Evaluation on {self.task}", *self.brief().splitlines(), self.table(), note)
        return "\n\n".join(blocks) + "\n"

    def save(self, folder: Path) -> Path:
        """Write the report; the task is in its name unless it is MNIST-1D."""
        name = "evaluation" if self.task == "mnist1d" else f"evaluation_{self.task}"
        path = folder / f"{name}.md"
        atomic_write(path, lambda file: file.write(self.markdown().encode()))
        return path
