"""Where each feature is in its block."""

from esper.tamiyo.policy.features import _TABLES


def positions(block: str) -> dict[str, tuple[int, int]]:
    """Start and width of each feature of a block, by name."""
    return next(table.positions for table in _TABLES if table.block == block)
