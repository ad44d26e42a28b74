"""The page on the rollout buffer names code and tests that exist, and its numbers are right."""

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import getattr_static
from pathlib import Path

import pytest

from esper.leyline.factored_actions import audit_action_space
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "rollout-buffer.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def rows(section: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / "src" / "esper" / path).exists()


def has_name(path: str, name: str) -> bool:
    """Whether a module of Esper has a dotted name, such as a class and its method or field."""
    found = import_module("esper." + path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        if is_dataclass(found) and part in {field.name for field in fields(found)}:
            return True
        if found is TamiyoRolloutBuffer:
            found = found(1, 1, 1, audit_action_space())  # its fields are set by __init__
        if (found := getattr_static(found, part, None)) is None:
            return False
    return True


@pytest.mark.parametrize("here", [row[1] for row in rows("Names")])
def test_the_names_exist(here):
    tokens = re.findall(r"`(.*?)`", here)
    assert tokens
    for token in tokens:
        path, _, name = token.partition(": ")
        assert exists(path), token
        assert not name or has_name(path, name), token


def test_the_guards_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for _, settled, guards in rows("Requirements"):
        assert "`" in guards
        for token in re.findall(r"`(.*?)`", settled + guards):
            if "/" in token:
                assert exists(token), token
            elif token.startswith("test_"):
                assert f"def {token}(" in tests, token


GAMMA, LAMBDA = 0.9, 0.8
REWARDS, VALUES = (1, 2, 3, 10, 20, 30), (1, 1.5, 2, 40, 41, 42)
FORMULAS = {  # the values that follow rows 2 and 5, and whether the accumulator stops at row 2
    "two gates (exact)": (7, 50, True),
    "one gate": (40, 50, False),
    "one gate, without B's bootstrap": (40, 0, False),
    "truncation treated as termination": (0, 50, True),
    "V of the last row instead of V(final)": (2, 50, True),
}


def advantages_of_a(after_a: float, after_b: float, stops: bool) -> list[float]:
    next_values = (*VALUES[1:3], after_a, *VALUES[4:], after_b)
    advantage, found = 0.0, []
    for t in reversed(range(6)):
        carried = 0.0 if stops and t == 2 else GAMMA * LAMBDA * advantage
        advantage = REWARDS[t] + GAMMA * next_values[t] - VALUES[t] + carried
        found.insert(0, advantage)
    return found[:3]


def test_the_worked_example_is_right():
    table = dict(rows("Why one gate is wrong"))
    assert table.keys() == FORMULAS.keys()
    for formula, arguments in FORMULAS.items():
        stated = [float(number) for number in table[formula].split(",")]
        assert advantages_of_a(*arguments) == pytest.approx(stated, abs=6e-3), formula
