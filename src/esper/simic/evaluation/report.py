"""The report of an evaluation as tables, Markdown and JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from esper.runtime.files import atomic_write
from esper.runtime.plain_config import to_plain
from esper.simic.evaluation.arms import LEARNED, ArmResult, Array
from esper.simic.evaluation.claims import HELPS, Verdict, estimate
from esper.simic.evaluation.experiment import EvaluationConfig, PairedExperiment
from esper.simic.growth.train_config import TrainConfig

Rows = list[list[str]]  # of a table, header first
_FIELDS = ("validation", "test", "added_params", "params", "macs", "training_flops", "rolled_back")
_HELPED = {
    "holds": "growing helped",
    "fails": "growing did not help",
    "undecided": "it is undecided whether growing helped",
}
FEW_HOSTS = 256  # with fewer, differences below a point are noise


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationReport:
    """Every network's figures, the verdicts, and how long it took."""

    config: TrainConfig
    settings: EvaluationConfig
    experiment: PairedExperiment
    arms: Mapping[str, ArmResult]
    verdicts: list[Verdict]
    seconds: float

    @property
    def num_controllers(self) -> int:
        return len(self.arms[LEARNED].scores)

    def summary(self) -> str:
        """How much was measured, and what differences it can show."""
        experiment = self.experiment
        hosts = f"{experiment.num_hosts} hosts per arm of {len(experiment.type_names)} types"
        cost = f"{self.seconds:.0f} s on {experiment.task.device}"
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

    def brief(self) -> str:
        """Two lines: whether growing helped, and how it compares with other ways to grow."""
        rent = self.settings.rents[0]
        first, *later = [verdict for verdict in self.verdicts if verdict.claim == HELPS]
        learned, doubt = self.arms[LEARNED], {"undecided": " (undecided)"}
        added, host = (learned.array(name)[:, 0].mean() for name in ("added_params", "host_params"))
        leads = (
            f"{v.claim.rival} {100 * v.lead.mean:+.1f}{doubt.get(v.decision, '')}"
            for v in self.verdicts
            if v.claim != HELPS and v.rent == rent
        )
        helped = _HELPED[first.decision]
        return (
            f"{helped[0].upper()}{helped[1:]}: {first.lead} points over the same networks ungrown, "
            f"with {added / host:.0%} more parameters (rent {rent:g})"
            f"{''.join(f'; at rent {v.rent:g}: {v.lead}' for v in later)}.\n"
            f"Lead over other ways to grow: {', '.join(leads)}. {self.experiment.num_hosts} networks "
            "per way, of widths and data that it never saw."
        )

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
        ]
        return "\n\n".join(blocks) + "\n"

    def figures(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Score and half its interval in points, by rent and arm; the best arm comes last."""
        figures: dict[str, dict[str, tuple[float, float]]] = {}
        for index, rent in enumerate(self.settings.rents):
            found = {arm.name: estimate(100 * arm.scores[:, index]) for arm in self._ranked()[::-1]}
            figures[f"rent {rent:g}"] = {n: (e.mean, e.half_width) for n, e in found.items()}
        return figures

    def plain(self) -> dict[str, Any]:
        """Everything as JSON values, with the figures of every network."""
        return {
            "config": to_plain(self.config),
            "settings": to_plain(self.settings),
            "device": str(self.experiment.task.device),
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
        }

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Write JSON and Markdown; returns the two paths. The task is in their names unless it is
        MNIST-1D."""
        name = "evaluation" if self.config.task == "mnist1d" else f"evaluation_{self.config.task}"
        paths = Path(folder) / f"{name}.json", Path(folder) / f"{name}.md"
        for path, text in zip(paths, (json.dumps(self.plain()), self.markdown()), strict=True):
            atomic_write(path, methodcaller("write", text.encode()))
        return paths

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
