"""The report of an evaluation as table, Markdown, JSON and plot data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline.files import atomic_write
from esper.leyline.plain_config import to_plain
from esper.simic.evaluation.arms import (
    CONSTANT,
    CONSTANT_PER_TYPE,
    HEURISTIC,
    HOST_ALONE,
    LEARNED,
    WIDTH_SEARCH,
    ArmResult,
)
from esper.simic.evaluation.claims import CLAIMS, Results, VariantLeads, Verdict
from esper.simic.evaluation.searches import FrontierKind, Sweep
from esper.simic.evaluation.settings import EvaluationConfig
from esper.simic.evaluation.statistics import Array, Estimate, estimate, estimate_over_groups
from esper.simic.training.config import TrainConfig

Rows = list[list[str]]  # of a table, header first
_FIELDS = ("validation", "test", "added_params", "params", "macs", "training_flops", "rolled_back")
FEW_HOSTS = 256  # with fewer, differences below a point are noise


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationReport:
    """Every network's figures, the verdicts, and how long it took."""

    config: TrainConfig
    settings: EvaluationConfig
    results: Results
    learning_rates: Sweep
    heuristic: Sweep
    verdicts: list[Verdict]
    variants: list[VariantLeads]
    seconds: float

    @property
    def arms(self) -> Mapping[str, ArmResult]:
        return self.results.arms

    @property
    def num_controllers(self) -> int:
        return len(self.arms[LEARNED].scores)

    def summary(self) -> str:
        """How much was measured, and what differences it can show."""
        experiment = self.results.experiment
        size = (
            f"{experiment.num_hosts} hosts per arm of {len(experiment.type_names)} types held out "
            f"from training, {self.num_controllers} controller(s), "
            f"{self.seconds:.0f} s on {experiment.task.device}."
        )
        if experiment.num_hosts < FEW_HOSTS or self.num_controllers < 3:
            size += (
                " This is a small evaluation: only differences of several points are reliable. Use "
                f"--preset full ({FEW_HOSTS} hosts) with three or more controllers for claims."
            )
        return size

    def headline(self) -> str:
        """Whether growing helped, at each rent."""
        words = {
            "holds": "growing helped",
            "fails": "growing did not help",
            "undecided": "it is undecided whether growing helped",
        }
        found = [verdict for verdict in self.verdicts if verdict.rival == HOST_ALONE]
        return " ".join(
            f"At rent {v.rent:g} {words[v.decision]}: {v.lead} points of score." for v in found
        )

    def arm_table(self) -> Rows:
        """Header and rows, one per arm, sorted by score at the middle rent."""
        header = ["arm", *(f"score, rent {rent:g}" for rent in self.settings.rents)]
        header += ["test accuracy", "params", "multiply-adds", "training GFLOP", "search networks"]
        ranked = sorted(self.arms.values(), key=lambda arm: -arm.scores[:, self._middle].mean())
        return [header, *map(self._arm_row, ranked)]

    def claim_table(self) -> Rows:
        """Header and rows, one per claim, with a verdict at each rent."""
        rents, verdicts = self.settings.rents, {(v.rival, v.rent): v for v in self.verdicts}
        header = ["claim: the learned controller ...", *(f"rent {rent:g}" for rent in rents)]
        rows = [
            [f"({claim.letter}) {claim.text}", *(str(verdicts[claim.rival, r]) for r in rents)]
            for claim in CLAIMS
        ]
        return [header, *rows]

    def markdown(self) -> str:
        blocks = [
            f"# Evaluation on {self.config.task}",
            self.headline(),
            self.summary(),
            "## Arms",
            _markdown_table(self.arm_table()),
            self._arm_note(),
            self._costs(),
            "## Claims",
            _markdown_table(self.claim_table()),
            self.claim_note(),
            "## Lead of the learned controller by data variant",
            _markdown_table(self._variant_table()),
            "## Tuned on training types",
            f"Learning rate: {_sweep(self.learning_rates)}",
            f"Heuristic: {_sweep(self.heuristic)}",
        ]
        return "\n\n".join(blocks) + "\n"

    def plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the figures of every network."""
        experiment, statics = self.results.experiment, self.results.statics
        return {
            "config": to_plain(self.config),
            "settings": to_plain(self.settings),
            "device": str(experiment.task.device),
            "seconds": self.seconds,
            "types": list(experiment.type_names),
            "learning_rates": asdict(self.learning_rates),
            "heuristic": asdict(self.heuristic),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "variants": [asdict(found) for found in self.variants],
            "arms": {name: _plain_arm(arm) for name, arm in self.arms.items()},
            "statics": {
                "hosts": [host._asdict() for host in statics.hosts],
                "lines": statics.lines,
                "params": statics.sizes("params").tolist(),
                "macs": statics.sizes("macs").tolist(),
                "validation": statics.networks.validation.tolist(),
                "test": statics.networks.test.tolist(),
            },
            "plot": self.plot(),
        }

    def plot(self) -> dict[str, Any]:
        """Frontier lines, and arms as points, for `nissa.frontier_plot`."""
        names: dict[FrontierKind, str] = {"uniform": "one width", "own": "own host widened"}
        lines = [
            {"label": f"{name}, {'with' if norm else 'without'} norm", **self._line(kind, norm)}
            for kind, name in names.items()
            for norm in (False, True)
        ]
        points = [
            {"label": name, **_point(arm, index)}
            for name, arm in self.arms.items()
            for index in range(len(arm.rents))
        ]
        return {"lines": lines, "points": points}

    @property
    def file_name(self) -> str:
        """Name of its files; the task is part of it unless it is MNIST-1D."""
        return "evaluation" if self.config.task == "mnist1d" else f"evaluation_{self.config.task}"

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Write JSON and Markdown; returns the two paths."""
        folder = Path(folder)
        paths = folder / f"{self.file_name}.json", folder / f"{self.file_name}.md"
        for path, text in zip(paths, (json.dumps(self.plain()), self.markdown()), strict=True):
            atomic_write(path, methodcaller("write", text.encode()))
        return paths

    @property
    def _middle(self) -> int:
        return (len(self.settings.rents) - 1) // 2

    def _arm_note(self) -> str:
        return (
            "Scores and accuracies are percentage points on test rows, ± half a 95 % interval over "
            "hosts. Arms share their hosts: compare them by the paired claims below, not by these "
            "intervals. Columns other than the scores are at rent "
            f"{self.settings.rents[self._middle]:g}. Training GFLOP includes removed seeds and "
            "validation. Search networks were trained before, to tune, search or learn."
        )

    def _costs(self) -> str:
        """The cost of searches relative to that of training a controller."""
        learned = self.arms[LEARNED]
        controller, grown = learned.search.flops, learned.array("training_flops").mean()
        names = (WIDTH_SEARCH, CONSTANT, CONSTANT_PER_TYPE, HEURISTIC)
        parts = [f"{name} {self.arms[name].search.flops / controller:.1%}" for name in names]
        return (
            f"Training a controller took {controller / 1e12:,.2f} TFLOP, as much as growing "
            f"{controller / grown:,.0f} networks with it. Searches, relative to that: "
            f"{', '.join(parts)}."
        )

    def claim_note(self) -> str:
        """How to read the table of claims."""
        covers = "other hosts of these types"
        if self.num_controllers > 1:
            covers += " and other controllers trained in the same way"
        return (
            "Leads are points of score, in (d) of accuracy, paired by host [95 % interval]. A claim "
            "holds if the interval is above its margin and fails if it is below. Intervals cover "
            f"{covers}. *: not significant after Holm correction over {len(self.verdicts)} verdicts. "
            "k: runs a random search needs to match one run. Outside: networks beyond the sizes of "
            "the static hosts."
        )

    def _variant_table(self) -> Rows:
        """Leads on each variant, over two arms and the frontiers with the run's norm."""
        shown = [
            claim
            for claim in CLAIMS
            if claim.rival in self.variants[0].leads
            and (not claim.frontier or claim.frontier[1:] == (self.config.norm, "params"))
        ]
        header = ["variant", "rent", *(f"{claim.measure} over {claim.rival}" for claim in shown)]
        rows = []
        for found in self.variants:
            cells = [str(found.leads[claim.rival]) for claim in shown]
            rows.append([found.variant, f"{found.rent:g}", *cells])
        return [header, *rows]

    def _arm_row(self, arm: ArmResult) -> list[str]:
        middle = self._middle
        scores = [estimate(arm.scores[:, index]) for index in range(len(arm.rents))]
        test, params, macs, flops = (
            estimate(arm.array(name)[:, middle])
            for name in ("test", "params", "macs", "training_flops")
        )
        return [
            arm.name,
            *map(_with_interval, [*scores, test]),
            *(f"{size.mean:,.0f} ± {size.half_width:,.0f}" for size in (params, macs)),
            f"{flops.mean / 1e9:,.2f} ± {flops.half_width / 1e9:,.2f}",
            f"{arm.search.networks:,}",
        ]

    def _line(self, kind: FrontierKind, norm: bool) -> dict[str, list[float]]:
        """Mean accuracy and geometric mean size over a frontier's groups."""
        by_params = self.results.statics.frontier(kind, norm, "params")
        by_macs = self.results.statics.frontier(kind, norm, "macs")
        estimates = [estimate_over_groups(of_size) for of_size in by_params.accuracies]
        return {
            "params": _geometric_mean(by_params.sizes).tolist(),
            "macs": _geometric_mean(by_macs.sizes).tolist(),
            "accuracy": [e.mean for e in estimates],
            "low": [e.low for e in estimates],
            "high": [e.high for e in estimates],
        }


def _plain_arm(arm: ArmResult) -> dict[str, Any]:
    return {
        "rents": list(arm.rents),
        "searched": asdict(arm.search),
        "axes": ["controller", "rent", "host"],
        "score": arm.scores.tolist(),
        **{name: arm.array(name).tolist() for name in _FIELDS},
        "seeds": arm.outcome.seeds.blueprint.tolist(),
    }


def _point(arm: ArmResult, index: int) -> dict[str, float]:
    """An arm at one rent: mean accuracy and geometric mean sizes over hosts."""
    found = estimate(arm.array("test")[:, index])
    params, macs = (
        float(_geometric_mean(arm.array(name)[:, index].flatten())) for name in ("params", "macs")
    )
    return {
        "rent": arm.rents[index],
        "params": params,
        "macs": macs,
        "accuracy": found.mean,
        "low": found.low,
        "high": found.high,
    }


def _geometric_mean(values: Array) -> Array:
    """Over the last axis."""
    mean: Array = np.exp(np.log(values).mean(-1))
    return mean


def _with_interval(found: Estimate) -> str:
    """Mean ± half the interval, in points."""
    return f"{100 * found.mean:.1f} ± {100 * found.half_width:.1f}"


def _sweep(sweep: Sweep) -> str:
    tried = [
        f"{', '.join(f'{name} {value:g}' for name, value in settings.items())}: {100 * result:.1f}"
        for settings, result in zip(sweep.tried, sweep.results, strict=True)
    ]
    return f"{'; '.join(tried)} ({sweep.cost.networks:,} networks)."


def _markdown_table(rows: Rows) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
