"""Where growing helps and where it does not: each variant of the data by itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from esper.simic.evaluation.arms import CONSTANT, HOST_ALONE, LEARNED, ArmResult
from esper.simic.evaluation.claims import FRONTIER_CLAIMS
from esper.simic.evaluation.statistics import Estimate, estimate
from esper.simic.evaluation.trial import Trial
from esper.simic.evaluation.widened import StaticPool, frontier_groups, host_views


@dataclass(frozen=True)
class OnVariant:
    """What the learned controller's networks are worth on one variant of the data, at one rent."""

    variant: str
    rent: float
    leads: dict[str, Estimate]  # of score, over an arm
    excesses: dict[str, Estimate]  # of accuracy, over a static frontier


def by_variant(
    arms: Mapping[str, ArmResult], statics: StaticPool, judged: Trial
) -> list[OnVariant]:
    """Leads over the host alone and the best constant, and the excess over each frontier."""
    learned, view_of_host = arms[LEARNED], host_views(judged).numpy()
    frontiers = [
        (claim, statics.frontier(claim.kind, norm=claim.norm, by=claim.size))
        for claim in FRONTIER_CLAIMS
    ]
    found = []
    for number, view in enumerate(judged.view_ids):
        hosts = view_of_host == number
        for index, rent in enumerate(learned.rents):
            leads = {
                rival: estimate((learned.scores - arms[rival].scores)[:, index, hosts])
                for rival in (HOST_ALONE, CONSTANT)
            }
            excesses = {}
            for claim, frontier in frontiers:
                group = frontier_groups(claim.kind, judged)[hosts]
                accuracy, size = (
                    learned.array(field)[:, index, hosts] for field in ("test", claim.size)
                )
                excesses[claim.rival] = frontier.excess(accuracy, size, group)
            found.append(OnVariant(judged.task.names[view], rent, leads, excesses))
    return found
