"""Warnings about a run that has stopped learning.

health = HealthMonitor(ppo_epochs=10)
health.check(metrics)  # of each round
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping

ENTROPY_FLOOR = 1e-3  # share of a uniform choice
VALUE_LOSS_FLOOR = 0.1  # below, the critic is accurate on the scale of all returns so far
ROUNDS = 10  # in a row before a sign is reported; twice as many for the critic

Sign = tuple[str, bool, int, str]  # name, is present in this round, rounds, what to do


class HealthMonitor:
    """Warns about each sign of trouble once per run, when it has shown in enough rounds in a row."""

    def __init__(self, ppo_epochs: int):
        self._ppo_epochs = ppo_epochs
        self._rounds_in_a_row: Counter[str] = Counter()
        self._warned: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> None:
        """Read the metrics of a round."""
        for name, is_present, needed, text in _signs(metrics, self._ppo_epochs):
            rounds = self._rounds_in_a_row[name] + 1 if is_present else 0
            self._rounds_in_a_row[name] = rounds
            if rounds >= needed and name not in self._warned:
                self._warned.add(name)
                warnings.warn(f"for {rounds} rounds, {text}", stacklevel=3)


def _signs(metrics: Mapping[str, float], ppo_epochs: int) -> Iterator[Sign]:
    for name, entropy in metrics.items():
        if name.startswith("ppo/normalized_entropy/"):
            head = name.rpartition("/")[2]
            yield (
                name,
                entropy < ENTROPY_FLOOR,  # not a number if the head never had a choice
                ROUNDS,
                f"head {head!r} has made the same choices without exploring (entropy near 0); "
                "unless the task is solved, raise entropy_coefficient or lower learning_rate",
            )
    # In a solved task returns hardly vary, and an accurate critic explains none of it.
    is_inaccurate = metrics["ppo/value_loss"] > VALUE_LOSS_FLOOR
    yield (
        "explained variance",
        is_inaccurate and metrics["ppo/explained_variance"] < 0,
        2 * ROUNDS,
        "the critic has predicted returns worse than their mean (explained variance below 0); "
        "lower learning_rate, or check that the observations tell how an episode will end",
    )
    stopped = metrics["ppo/ppo_epochs_run"] == 1 and not metrics["ppo/update_undone"]
    yield (
        "kl",
        stopped and ppo_epochs > 1,
        ROUNDS,
        "target_kl has stopped the update after its first pass; lower learning_rate or raise "
        "target_kl",
    )
    yield (
        "germinations",
        metrics.get("episode/germinations") == 0,
        ROUNDS,
        "no seed has germinated, so nothing more is learned about growing; raise "
        "entropy_coefficient or lower the rent",
    )
