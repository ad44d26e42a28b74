"""Accuracy of static networks by their size."""

import numpy as np
from numpy.typing import NDArray

from growth_evaluation.estimates import Array, Estimate, estimate, variance_of_mean

Groups = NDArray[np.int64]


class Frontier:
    """Accuracy by network size in each of G groups, linear in log size and flat beyond the ends.

    A group is the data, or the data and the host, that a network is compared on.
    """

    def __init__(self, sizes: Array, accuracies: Array):
        """`sizes [n, G]`, rising along n, and `accuracies [n, G, repeats]`."""
        if len(sizes) < 2 or bool((np.diff(sizes, axis=0) <= 0).any()) or accuracies.shape[2] < 2:
            raise ValueError(
                f"a frontier needs two sizes or more, rising, with two networks each; got sizes "
                f"{sizes.tolist()} and accuracies {accuracies.shape}"
            )
        self.sizes, self.accuracies = sizes, accuracies

    def at(self, size: Array, group: Groups) -> Array:
        """Accuracy at each size `[..., H]` in its group `[H]`."""
        means = self.accuracies.mean(-1)[:, group]
        found: Array = np.einsum("n...h,nh->...h", self._weights(size, group), means)
        return found

    def excess(self, accuracy: Array, size: Array, group: Groups) -> Estimate:
        """Accuracy of networks `[H]` or `[K, H]` minus the frontier's at their sizes and groups.

        The frontier's own noise enters with the weights of the interpolation. With small groups it
        also appears as a spread between hosts; the interval is then slightly too wide.
        """
        accuracy, size = np.atleast_2d(accuracy), np.atleast_2d(size)
        in_group = np.eye(self.sizes.shape[1])[group]  # [H, G]
        weights = np.einsum("nkh,hg->ng", self._weights(size, group), in_group) / size.size
        parts = np.einsum("ng,ngr->gr", weights, self.accuracies)
        return estimate(accuracy - self.at(size, group), [variance_of_mean(part) for part in parts])

    def covers(self, size: Array, group: Groups) -> float:
        """Share of the sizes `[..., H]` within the size range of their groups `[H]`."""
        first, last = self.sizes[0, group], self.sizes[-1, group]
        return float(((size >= first) & (size <= last)).mean())

    def _weights(self, size: Array, group: Groups) -> Array:
        """Interpolation weights of a group's n networks at `size [..., H]`, `[n, ..., H]`."""
        logs = np.log(self.sizes)[:, np.broadcast_to(group, size.shape)]
        passed = np.clip((np.log(size) - logs[:-1]) / np.diff(logs, axis=0), 0.0, 1.0)
        return -np.diff(passed, axis=0, prepend=1.0, append=0.0)
