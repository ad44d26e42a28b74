"""The report of an evaluation as tables, Markdown and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from esper.runtime.files import atomic_write
from esper.runtime.plain_config import to_plain
from esper.simic.growth.train_config import TrainConfig
from growth_evaluation.arms import CONSTANT, HEURISTIC, LEARNED, ArmResult
from growth_evaluation.claims import (
    CONSTANT_PER_TYPE,
    FRONTIERS,
    HELPS,
    PUBLISHED,
    WIDTH_SEARCH,
    Results,
    VariantLeads,
    Verdict,
)
from growth_evaluation.estimates import Array, estimate, estimate_over_groups
from growth_evaluation.paired_experiment import PairedExperiment
from growth_evaluation.settings import EvaluationConfig
from growth_evaluation.static_hosts import FrontierKind
from growth_evaluation.tuning import Sweep

Rows = list[list[str]]  # of a table, header first
_FIELDS = ("validation", "test", "added_params", "params", "macs", "training_flops", "rolled_back")
_HELPED = {
    "holds": "growing helped",
    "fails": "growing did not help",
    "undecided": "it is undecided whether growing helped",
}
FEW_HOSTS = 256  # with fewer, differences below a point are noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """Every network's figures, the verdicts, and how long it took."""

    config: TrainConfig
    settings: EvaluationConfig
    results: Results
    verdicts: list[Verdict]
    variants: list[VariantLeads]
    learning_rates: Sweep
    heuristic: Sweep
    search_flops: dict[str, float]  # by arm
    seconds: float

    @property
    def experiment(self) -> PairedExperiment:
        return self.results.experiment

    @property
    def arms(self) -> Mapping[str, ArmResult]:
        return self.results.arms

    @property
    def num_controllers(self) -> int:
        return len(self.arms[LEARNED].scores)

    def summary(self) -> str:
        """How much was measured, and what differences it can show."""
        experiment = self.experiment
        hosts = f"{experiment.num_hosts} hosts per arm of {len(experiment.type_names)} types"
        cost = f"{self.seconds:.0f} s on {experiment.hosts.task.device}"
        size = f"{hosts} held out from training, {self.num_controllers} controller(s), {cost}."
        if experiment.num_hosts < FEW_HOSTS or self.num_controllers < 3:
            size += (
                " This is a small evaluation: only differences of several points are reliable. Use "
                f"--preset full ({FEW_HOSTS} hosts) with three or more controllers for claims."
            )
        return size

    def headline(self) -> str:
        """Whether growing helped, at each rent."""
        found = (verdict for verdict in self.verdicts if verdict.claim == HELPS)
        rents = [f"At rent {v.rent:g} {_HELPED[v.decision]}: {v.lead} points." for v in found]
        return " ".join(rents)

    def markdown(self) -> str:
        blocks = [
            f"# Evaluation on {self.config.task}",
            self.headline(),
            self.summary(),
            "## Arms",
            markdown_table(self.arm_table()),
            "Scores and accuracies are percentage points on test rows, ± half a 95 % interval over "
            "hosts. Arms share their hosts: compare them by the paired claims below, not by these "
            "intervals. Columns other than the scores are at rent "
            f"{self.settings.rents[self._middle]:g}. Training GFLOP includes removed seeds and "
            "validation. Search networks were trained before, to search or learn.",
            "## Claims",
            markdown_table(self.claim_table()),
            self.claim_note(),
            "k: runs a random search needs to match one run. Outside: networks beyond the sizes of "
            "the static hosts. Leads in (d) are points of accuracy.",
            self._costs(),
            "## Lead of the learned controller by data variant",
            markdown_table(self._variant_table()),
            "## Tuned on training types",
            f"Learning rate: {_sweep(self.learning_rates)}",
            f"Heuristic: {_sweep(self.heuristic)}",
        ]
        return "\n\n".join(blocks) + "\n"

    def arm_table(self) -> Rows:
        """Header and rows, one per arm, sorted by score at the middle rent."""
        header = ["arm", *(f"score, rent {rent:g}" for rent in self.settings.rents)]
        header += ["test accuracy", "params", "multiply-adds", "training GFLOP", "search networks"]
        return [header, *map(self._arm_row, self._ranked())]

    def claim_table(self) -> Rows:
        """Header and rows, one per claim, with a verdict at each rent."""
        rows = dict[str, list[str]]()
        for verdict in self.verdicts:
            claim = f"({verdict.claim.letter}) {verdict.claim.text}"
            rows.setdefault(claim, [claim]).append(str(verdict))
        rents = [f"rent {rent:g}" for rent in self.settings.rents]
        return [["claim: the learned controller ...", *rents], *rows.values()]

    def plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the figures of every network."""
        statics = self.results.statics
        return {
            "config": to_plain(self.config),
            "settings": to_plain(self.settings),
            "device": str(self.experiment.hosts.task.device),
            "seconds": self.seconds,
            "types": list(self.experiment.type_names),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "arms": {
                name: {
                    "rents": list(arm.rents),
                    "search_networks": arm.search_networks,
                    "axes": ["controller", "rent", "host"],
                    "score": arm.scores.tolist(),
                    **{field: arm.array(field).tolist() for field in _FIELDS},
                    "seeds": arm.outcome.blueprint.tolist(),
                }
                for name, arm in self.arms.items()
            },
            "search_flops": self.search_flops,
            "learning_rates": _plain_sweep(self.learning_rates),
            "heuristic": _plain_sweep(self.heuristic),
            "variants": [asdict(found) for found in self.variants],
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
        """Frontier lines, and arms as points, for `frontier_plot.py`."""
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

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Write JSON and Markdown; returns the two paths. The task is in their names unless it is
        MNIST-1D."""
        name = "evaluation" if self.config.task == "mnist1d" else f"evaluation_{self.config.task}"
        paths = Path(folder) / f"{name}.json", Path(folder) / f"{name}.md"
        for path, text in zip(paths, (json.dumps(self.plain()), self.markdown()), strict=True):
            atomic_write(path, methodcaller("write", text.encode()))
        return paths

    def _costs(self) -> str:
        """The cost of searches relative to that of training a controller."""
        controller = self.search_flops[LEARNED]
        grown = self.arms[LEARNED].array("training_flops").mean()
        names = (WIDTH_SEARCH, CONSTANT, CONSTANT_PER_TYPE, HEURISTIC)
        parts = [f"{name} {self.search_flops[name] / controller:.1%}" for name in names]
        return (
            f"Training a controller took {controller / 1e12:,.2f} TFLOP, as much as growing "
            f"{controller / grown:,.0f} networks with it. Searches, relative to that: "
            f"{', '.join(parts)}."
        )

    def _variant_table(self) -> Rows:
        """Leads on each variant, over two arms and the frontiers with the run's norm."""
        shown = [
            claim
            for claim in PUBLISHED
            if claim.rival in self.variants[0].leads
            and FRONTIERS.get(claim.rival, (0, self.config.norm, "params"))[1:]
            == (self.config.norm, "params")
        ]
        header = ["variant", "rent", *(f"{claim.measure} over {claim.rival}" for claim in shown)]
        rows = []
        for found in self.variants:
            cells = [str(found.leads[claim.rival]) for claim in shown]
            rows.append([found.variant, f"{found.rent:g}", *cells])
        return [header, *rows]

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

    @property
    def _middle(self) -> int:
        return (len(self.settings.rents) - 1) // 2

    def _ranked(self) -> list[ArmResult]:
        return sorted(self.arms.values(), key=lambda arm: -arm.scores[:, self._middle].mean())

    def claim_note(self) -> str:
        """How to read the table of claims."""
        covers = "other hosts of these types"
        if self.num_controllers > 1:
            covers += " and other controllers trained in the same way"
        return (
            "Leads are points of score, paired by host [95 % interval]. A claim holds if the "
            "interval is above its margin and fails if it is below. Intervals cover "
            f"{covers}. *: not significant after Holm correction over {len(self.verdicts)} verdicts."
        )

    def _arm_row(self, arm: ArmResult) -> list[str]:
        def cell(values: Array, scale: float = 1.0, digits: int = 0) -> str:
            """Mean ± half the interval."""
            found = estimate(scale * values)
            return f"{found.mean:,.{digits}f} ± {found.half_width:,.{digits}f}"

        test, params, macs, flops = (
            arm.array(name)[:, self._middle]
            for name in ("test", "params", "macs", "training_flops")
        )
        accuracies = [*(arm.scores[:, index] for index in range(len(arm.rents))), test]
        cells = [*(cell(shares, 100, 1) for shares in accuracies), cell(params), cell(macs)]
        return [arm.name, *cells, cell(flops, 1e-9, 2), f"{arm.search_networks:,}"]


def markdown_table(rows: Rows) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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


def _plain_sweep(sweep: Sweep) -> dict[str, Any]:
    return {"tried": sweep.tried, "results": sweep.results, "networks": sweep.num_networks}


def _sweep(sweep: Sweep) -> str:
    tried = [
        f"{', '.join(f'{name} {value:g}' for name, value in settings.items())}: {100 * result:.1f}"
        for settings, result in zip(sweep.tried, sweep.results, strict=True)
    ]
    return f"{'; '.join(tried)} ({sweep.num_networks:,} networks)."
