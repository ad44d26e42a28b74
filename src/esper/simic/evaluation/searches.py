"""The searches of an evaluation: learning rate, heuristic, constant plans, static networks.

All of them choose by validation rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.kasmina.hosts import Host
from esper.leyline.factored_actions import ActionMasks
from esper.leyline.reports import Reports
from esper.simic.evaluation.experiment import Arm, ArmOutcome, Cost, PairedExperiment, combine
from esper.simic.evaluation.statistics import Frontier, RandomSearch
from esper.simic.rewards import growth_score
from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.scripted import ConstantPlan, follow_plan
from esper.tolaria.optimizers import AdamW

NEVER = 1 << 30
LATEST_START = 3  # a plan starts within the first third of training
UNIFORM_SHARE = 0.25  # of the plans, at most: one blueprint in every slot
RAMP_STEPS = 2
FIRST_RNG_SEED, FINAL_RNG_SEED = 1, 4  # hosts of a search are not those that arms are compared on


# Settings tuned before arms are compared


@dataclass(frozen=True)
class Sweep:
    """Settings tried, and the validation result of each."""

    tried: tuple[dict[str, float], ...]
    results: tuple[float, ...]
    cost: Cost

    @property
    def best(self) -> dict[str, float]:
        return self.tried[self.results.index(max(self.results))]


def tune_learning_rate(
    experiment: PairedExperiment, learning_rates: Sequence[float], *, rng_seed: int
) -> Sweep:
    """Accuracy of hosts without seeds at each learning rate."""
    outcomes = [
        replace(experiment, optimizer=AdamW(learning_rate=rate)).run(
            [Arm("host alone", ConstantPlan(()))], rng_seed=rng_seed
        )[0]
        for rate in learning_rates
    ]
    return Sweep(
        tuple({"learning_rate": rate} for rate in learning_rates),
        tuple(float(outcome.validation.mean()) for outcome in outcomes),
        Cost.of(outcomes),
    )


def tune_heuristic(
    experiment: PairedExperiment, scales: Sequence[float], rents: Sequence[float], *, rng_seed: int
) -> Sweep:
    """The heuristic's score with two of its constants scaled: `gain_scale` and `crowding`."""
    usual = HeuristicConfig()
    tried = tuple(
        {"gain_scale": usual.gain_scale * gain, "crowding": usual.crowding * crowding}
        for gain, crowding in product(scales, scales)
    )
    arms = [
        Arm("heuristic", HeuristicController(replace(usual, **settings)), tuple(rents))  # type: ignore[arg-type]
        for settings in tried
    ]
    outcomes = experiment.run(arms, rng_seed=rng_seed)
    scores = tuple(float(outcome.scores(rents, "validation").mean()) for outcome in outcomes)
    return Sweep(tried, scores, Cost.of(outcomes))


# Constant plans: fixed seeds in fixed slots at fixed steps. Their networks do not depend on the
# rent, so each candidate is trained once and scored at every rent.


@dataclass(frozen=True, eq=False)
class Plans:
    """M plans, each field `[M, S]`."""

    step: Tensor  # NEVER: nothing grows in this slot
    blueprint: Tensor

    def __len__(self) -> int:
        return len(self.step)


def candidate_plans(
    count: int, num_slots: int, num_blueprints: int, num_steps: int, generator: torch.Generator
) -> Plans:
    """The plan without seeds, some with one blueprint in every slot at step 0, and random ones.

    Random plans have one or more seeds; three in four of them start at step 0.
    """
    shape = (count, num_slots)

    def sample(below: int, *size: int) -> Tensor:
        return torch.randint(below, size, generator=generator)

    rank = torch.rand(shape, generator=generator).argsort(dim=1)
    is_grown = rank < 1 + sample(num_slots, count, 1)
    is_grown[0] = False
    is_late = torch.rand(count, 1, generator=generator) < 0.25
    start = torch.where(is_late, sample(max(1, num_steps // LATEST_START), count, 1), 0)
    step = torch.where(is_grown, start.expand(shape), NEVER)
    blueprint = sample(num_blueprints, *shape)
    num_uniform = min(num_blueprints, int(UNIFORM_SHARE * count))
    uniform = slice(1, 1 + num_uniform)
    step[uniform], blueprint[uniform] = 0, torch.arange(num_uniform).unsqueeze(1)
    return Plans(step, blueprint)


class PlanPerEnv:
    """A controller that follows plan `choice [N]` in each env."""

    def __init__(self, plans: Plans, choice: Tensor):
        self._step, self._blueprint = plans.step[choice], plans.blueprint[choice]

    def begin(self, env_ids: Tensor) -> None:
        """No state to reset."""

    def decide(self, reports: Reports, masks: ActionMasks) -> Tensor:
        return follow_plan(reports, masks, self._step, self._blueprint, RAMP_STEPS)


def plan_arm(name: str, plans: Plans, choice: Tensor, rents: Sequence[float]) -> Arm:
    """An arm that follows plan `choice [lanes, H]` in each host."""
    return Arm(name, PlanPerEnv(plans, choice.flatten()), tuple(rents))


def run_plans(experiment: PairedExperiment, plans: Plans, *, rng_seed: int) -> ArmOutcome:
    """Every plan on every host, `[M, H]`."""
    hosts = experiment.num_hosts
    arms = [
        plan_arm("plans", plans, part.unsqueeze(1).expand(-1, hosts), [0.1] * len(part))
        for part in torch.split(torch.arange(len(plans)), experiment.max_lanes)
    ]
    return combine(torch.cat, experiment.run(arms, rng_seed=rng_seed))


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """The best of some plans, and how all of them did."""

    plans: Plans
    best: Tensor  # index of the best plan, [R, types]
    pool: ArmOutcome  # every plan on every host, [M, H]
    cost: Cost

    def random_search(self, rent: float) -> RandomSearch:
        """Plans tried at random on each host, at a rent."""
        validation, test = (self.pool.scores([rent], rows) for rows in ("validation", "test"))
        return RandomSearch(validation.numpy(), test.numpy())


def search_plans(
    experiment: PairedExperiment,
    plans: Plans,
    rents: Sequence[float],
    *,
    num_types: int,
    finalists: int,
) -> PlanSearch:
    """The plan with the best mean validation score for each rent and type, in two rounds.

    Consecutive hosts form a type; `num_types=1` pools all hosts. In the second round the
    `finalists` run on other hosts, because the first round favours the plans it selected.
    """
    pool = run_plans(experiment, plans, rng_seed=FIRST_RNG_SEED)
    per_plan = (len(plans), num_types, -1)
    scores = torch.stack(
        [pool.scores([rent], "validation").view(per_plan).mean(dim=2) for rent in rents]
    )  # [R, M, types]
    if finalists == 1:
        return PlanSearch(plans, scores.argmax(dim=1), pool, Cost.of([pool]))
    first, top = scores.topk(finalists, dim=1)
    choice = top.repeat_interleave(experiment.num_hosts // num_types, dim=2).flatten(0, 1)
    lane_rents = [rent for rent in rents for _ in range(finalists)]
    arm = plan_arm("finals", plans, choice, lane_rents)
    (finals,) = experiment.run([arm], rng_seed=FINAL_RNG_SEED)
    again = finals.scores(lane_rents, "validation").view(len(rents), finalists, num_types, -1)
    winner = (first + again.mean(dim=3)).argmax(dim=1, keepdim=True)
    return PlanSearch(plans, top.gather(1, winner).squeeze(1), pool, Cost.of([pool, finals]))


# Static networks: hosts of other widths, with and without norm, trained without growth. The uniform
# frontier has one width in all layers and is shared by all hosts. The own frontier is each host
# with all layers widened by the same factor. All static networks together are the width search.

Widths = tuple[int, ...]
FrontierKind = Literal["uniform", "own"]
Size = Literal["params", "macs"]
FrontierLines = Mapping[FrontierKind, tuple[tuple[Widths, ...], ...]]
"""Rising widths: one line of uniform hosts, and one line for each host that is evaluated."""


class StaticHost(NamedTuple):
    widths: Widths
    norm: bool


def frontier_lines(
    uniform: Sequence[int], hosts: Sequence[Host], factors: Sequence[float]
) -> FrontierLines:
    """Hosts of one width, and each of `hosts` widened by the factors."""
    own = [tuple(site.width for site in host.sites) for host in hosts]
    return {
        "uniform": (tuple((width,) * len(own[0]) for width in uniform),),
        "own": tuple(widen(widths, factors) for widths in own),
    }


def widen(widths: Widths, factors: Sequence[float]) -> tuple[Widths, ...]:
    """All widths times each factor, rounded to the nearest integer (halves up)."""
    wider = tuple(tuple(int(width * factor + 0.5) for width in widths) for factor in factors)
    if len(set(wider)) < len(factors):
        raise ValueError(
            f"widening_factors={tuple(factors)} give a host of widths {widths} the same widths "
            f"twice: {wider}; use factors further apart"
        )
    return wider


def candidate_widths(
    lines: FrontierLines,
    cost: Callable[[StaticHost], float],
    budget: float,
    generator: torch.Generator,
) -> tuple[StaticHost, ...]:
    """All hosts of the frontiers, then mixed widths in random order until the budget is spent.

    Mixed widths combine those of the uniform frontier. All hosts come with and without norm.
    """

    def both(widths: Iterable[Widths]) -> list[StaticHost]:
        return [StaticHost(w, norm) for w in widths for norm in (False, True)]

    (uniform,) = lines["uniform"]
    mixed = both(product(*zip(*uniform, strict=True)))
    hosts = dict.fromkeys(both(chain(uniform, *lines["own"])))
    left = budget - sum(map(cost, hosts))
    for number in torch.randperm(len(mixed), generator=generator).tolist():
        host = mixed[number]
        if host not in hosts:
            left -= cost(host)
            if left < 0:
                break
            hosts[host] = None
    return tuple(hosts)


@dataclass(frozen=True, eq=False)
class StaticPool:
    """A static networks on V views, `repeats` of each."""

    hosts: tuple[StaticHost, ...]
    lines: FrontierLines
    networks: ArmOutcome  # [A, V, repeats]

    def sizes(self, by: Size) -> Tensor:
        """Parameters or multiply-adds of the networks, `[A]`."""
        size: Tensor = getattr(self.networks, by)[:, 0, 0]
        return size

    def frontier(self, kind: FrontierKind, norm: bool, by: Size) -> Frontier:
        """Accuracy by size; the groups are (line, view), in this order."""
        index = {host: number for number, host in enumerate(self.hosts)}
        chosen = torch.tensor(
            [[index[StaticHost(widths, norm)] for widths in line] for line in self.lines[kind]]
        ).T  # [n, lines]
        test = self.networks.test
        on_views = self.sizes(by)[chosen].repeat_interleave(test.shape[1], dim=1)
        return Frontier(on_views.numpy(), test[chosen].flatten(1, 2).numpy())


def train_static(
    experiment: PairedExperiment,
    hosts: Sequence[StaticHost],
    built: Sequence[Host],
    lines: FrontierLines,
) -> StaticPool:
    """Train every host on the experiment's views and repeats; `lines` must be among `hosts`."""
    views, repeats = len(experiment.view_ids), experiment.repeats
    site = experiment.hosts[0].sites[0]
    smallest = min(experiment.menu, key=lambda blueprint: blueprint.program(site).num_params)
    without_seeds = replace(experiment, menu=(smallest,))  # reserves the least memory for seeds
    outcomes = [
        replace(without_seeds, hosts=part).run([Arm("static", ConstantPlan(()))])[0]
        for part in _split_by_size(built, experiment.max_macs / (repeats * views))
    ]

    def join(parts: list[Tensor]) -> Tensor:
        joined = torch.cat([part[0] for part in parts])
        return joined.view(-1, views, repeats, *joined.shape[1:])

    return StaticPool(tuple(hosts), lines, combine(join, outcomes))


def _split_by_size(hosts: Sequence[Host], max_macs: float) -> list[tuple[Host, ...]]:
    """The hosts in order, in parts of at most `max_macs` multiply-adds or of a single host."""
    parts, total = [list[Host]()], 0.0
    for host in hosts:
        if parts[-1] and total + host.macs > max_macs:
            parts.append([])
            total = 0.0
        parts[-1].append(host)
        total += host.macs
    return [tuple(part) for part in parts]


def width_search(
    pool: StaticPool, alone: ArmOutcome, rents: Sequence[float], experiment: PairedExperiment
) -> ArmOutcome:
    """For each host and rent the static network with the best validation score on its view.

    Networks smaller than the host are left out, since growth cannot shrink a host. `alone` is the
    host without growth, `[1, R, H]`. Hosts of one type get different repeats of a network.
    """
    view = experiment.view_of_host
    repeat = torch.arange(experiment.num_hosts) % experiment.repeats
    host_params, host_macs = alone.host_params[0, 0], alone.macs[0, 0]
    added = pool.sizes("params").unsqueeze(1) - host_params  # [A, H]
    accuracy = pool.networks.validation.mean(dim=2)[:, view]
    added_macs = pool.sizes("macs").unsqueeze(1) / host_macs - 1  # during all of training
    charge = experiment.growth.compute_price * added_macs
    chosen = torch.stack(
        [
            torch.where(
                added >= 0,
                growth_score(accuracy, added, host_params, torch.tensor(rent), charge),
                -torch.inf,
            ).argmax(dim=0)
            for rent in rents
        ]
    )  # [R, H]
    return replace(
        pool.networks.at((chosen, view, repeat)),
        host_params=host_params.expand(chosen.shape),
        added_params=added.gather(0, chosen),
        compute_charge=charge.gather(0, chosen),
    )
