"""The code does not get larger: who adds a feature clears as many lines elsewhere."""

from pathlib import Path

import esper

SOURCE = Path(esper.__file__).parent
LAB = Path(__file__).parents[1] / "lab"
# lower them when lines are removed
MOST_LINES = {"kernels": 2_750, "all other packages": 21_950, "lab": 1_260}


def test_the_code_has_no_more_lines_than_agreed():
    lines = dict.fromkeys(MOST_LINES, 0)
    for path in [*SOURCE.rglob("*.py"), *LAB.rglob("*.py")]:
        is_kernel = path.is_relative_to(SOURCE / "kernels")
        package = "kernels" if is_kernel else "all other packages"
        package = "lab" if path.is_relative_to(LAB) else package
        lines[package] += len(path.read_text().splitlines())
    assert all(lines.values())
    for package, most in MOST_LINES.items():
        assert lines[package] <= most, (
            f"{package} have {lines[package]:,} lines, more than {most:,}"
        )
