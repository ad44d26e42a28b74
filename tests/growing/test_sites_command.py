"""`esper sites`."""

import pytest

from esper.cli import main

SOURCE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

def with_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))

def with_example():
    return model(), torch.randn(3, 4)

def with_arguments(width):
    return model()

def none():
    return None

def number():
    return 3

def three():
    return model(), torch.randn(3, 4), None

def class_and_example():
    return nn.Linear, torch.randn(3, 4)

def wrong_example():
    return model(), torch.randn(3, 5)

def fails():
    raise KeyError("width\\nsecond line")

constant = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def model(:\n")
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


@pytest.mark.usefixtures("module")
def test_it_says_why_a_layer_cannot_get_wider(capsys):
    main(["sites", "my_model:with_norm", "--shape", "4"])
    assert "0 cannot get wider: LayerNorm follows it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_model"], "does not name a function"),
        (["my_model:nothing"], "cannot be imported: AttributeError.*no attribute 'nothing'"),
        (["no_such_module:model"], "cannot be imported: ModuleNotFoundError"),
        (["my_model:model"], "--shape 3 32 32"),
        (["my_model:model", "--shape", "5"], r"does not accept random numbers of --shape \(5,\)"),
        (["my_model:with_arguments"], "raised TypeError.*'width'"),
        (["my_model:none"], "returned a NoneType; return an nn.Module, or a model and an example"),
        (["my_model:number", "--shape", "4"], "returned a int; return an nn.Module"),
        (["my_model:three"], "returned a tuple of 3"),
        (["my_model:class_and_example"], "returned a tuple of 2.*model and an example"),
        (["my_model:wrong_example"], "the model does not accept the example"),
        (["my_model:fails"], "raised KeyError: .*width"),
        (["my_model:constant"], "raised TypeError: .int. object is not callable"),
        (["my_model:model", "--shape", "-1"], r"--shape \(-1,\); use numbers of 1 or more"),
        (["my_model:model", "--shape", "4", "0"], r"--shape \(4, 0\); use numbers of 1 or more"),
        (["broken:model"], "cannot be imported.*SyntaxError.*broken.py, line 1"),
        ([".:x"], "write module:function"),
        (["../my_model:x"], "write module:function"),
        ([":x"], "write module:function"),
        (["my_model:"], "write module:function"),
        (["os:getcwd"], "returned a str; return an nn.Module"),
    ],
)
@pytest.mark.usefixtures("module")
def test_mistakes_are_reported_in_a_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as stopped:
        main(["sites", *arguments])
    assert len(str(stopped.value).splitlines()) == 1
