"""The code on a page of the documentation, run as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_page(name: str, num_blocks: int) -> dict[str, object]:
    """Run all python blocks of a page in one namespace, and return it."""
    path = ROOT / "docs" / name
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    assert len(blocks) == num_blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
    return names
