"""Code and docs use plain words: some private expressions are rejected."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("src/**/*.py", "lab/**/*.py", "examples/*.py", "benchmarks/*.py", "docs/*.md", "*.md")
WORDS = {
    r"\b(is|are|was|were) told\b": "is reported, warns, raises",
    r"\banew\b": "again, from scratch",
    r"\b(to the bit|bit for bit)\b": "bit-exact",
    r"\b(goes on|going on|gone on|go on with)\b": "continues, resumes",
    r"\b(felt|feels)\b": "active, sees",
    r"\bof (one's|its|your|their) own\b(?! \w)": "custom, your own",
    r"\b(newborn|births)\b": "initialised, new",
    r"\b(nobody|whoever|everyone)\b": "the caller, none, all hosts",
    r"\bbeside\b": "next to, with",
    r"\b(goes|taken|took) back\b": "rolls back, restored",
    r"\bonce more\b": "again",
}


@pytest.mark.parametrize("pattern", WORDS)
def test_private_expressions_are_not_used(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for place in PLACES
        for path in ROOT.glob(place)
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line, flags=re.IGNORECASE)
    ]
    assert not found, f"write {WORDS[pattern]!r} instead:\n" + "\n".join(found)
