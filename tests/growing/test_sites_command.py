"""`esper sites`."""

import pytest

from esper.cli import main

SOURCE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

def with_example():
    return model(), torch.randn(3, 4)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "my_model"


@pytest.mark.parametrize("arguments", [["with_example"], ["model", "--shape", "4"]])
def test_it_lists_the_sites_of_ones_own_model(module, arguments, capsys):
    function, *options = arguments
    main(["sites", f"{module}:{function}", *options])
    shown = capsys.readouterr().out
    assert shown.startswith("44 parameters, 36 multiply-adds")
    assert "1     ReLU    VECTOR  (6,)" in shown
    assert "dense 42" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_model"], "does not name a function"),
        (["my_model:nothing"], "cannot be found"),
        (["no_such_module:model"], "cannot be found"),
        (["my_model:model"], "--shape 3 32 32"),
        (["my_model:model", "--shape", "5"], r"does not accept random numbers of --shape \(5,\)"),
    ],
)
@pytest.mark.usefixtures("module")
def test_mistakes_are_told_in_a_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["sites", *arguments])
