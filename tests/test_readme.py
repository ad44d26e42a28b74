"""What the README says of the packages, its files and its code is so."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGES = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \|$", README, flags=re.MULTILINE)


@pytest.mark.parametrize(("package", "role", "what"), PACKAGES)
def test_the_map_says_what_the_packages_say(package, role, what):
    docstring = importlib.import_module(f"esper.{package}").__doc__
    assert docstring.strip().splitlines()[0] == f"{package}: {role} -- {what}."


def test_every_package_is_on_the_map():
    folders = {path.parent.name for path in (ROOT / "src" / "esper").glob("*/__init__.py")}
    assert {package for package, _, _ in PACKAGES} == folders


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/ppo.md", "CONTRIBUTING.md"])  # fmt: skip
def test_named_files_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:src|docs|examples|tests|benchmarks)/[\w/.-]+\.(?:py|md))`", text))
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_the_imports_in_the_readme_work(block):
    for line in block.splitlines():
        if line.startswith(("import ", "from ")):
            exec(line, {})
    assert compile(block, "README.md", "exec")
