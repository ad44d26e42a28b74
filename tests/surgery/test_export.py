"""Exports: what the files compute, in a process without esper, is what the grown model computes."""

import importlib.util
import os
import resource
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.blueprints import BLUEPRINTS, Site
from esper.leyline.constants import BlendStyle, SiteKind
from esper.surgery.export import FORMATS, ExportError, export
from esper.surgery.plain import Grown, folded
from esper.surgery.slots import Seed

SHAPES = {
    SiteKind.VECTOR: (6,),
    SiteKind.SERIES: (6, 9),
    SiteKind.IMAGE: (6, 5, 7),
    SiteKind.TOKENS: (4, 6),
}
ALPHA = 0.7


def grown(site: nn.Module, blueprint: str, shape: tuple[int, ...], style: BlendStyle, **kwargs):
    layers = BLUEPRINTS[blueprint].program(Site(shape)).module()
    for parameter in layers.parameters():  # a seed at birth would compute 0
        nn.init.normal_(parameter, std=0.4)
    return Grown(site, Seed(layers, per_token=kwargs.get("per_token", False)), ALPHA, style)


def menu(kind: SiteKind) -> list[str]:
    """Every blueprint that can grow at a kind of site; tokens are vectors, one by one."""
    seen = SiteKind.VECTOR if kind == SiteKind.TOKENS else kind
    names = [name for name, entry in BLUEPRINTS.items() if seen in entry.kinds]
    assert len(names) >= 4
    return names


class Branches(nn.Module):
    """Every blueprint in every style at a kind of site, side by side."""

    def __init__(self, kind: SiteKind):
        super().__init__()
        per_token = kind == SiteKind.TOKENS
        shape = SHAPES[kind][-1:] if per_token else SHAPES[kind]
        width = shape[0]
        new_site = {
            SiteKind.VECTOR: lambda: nn.Linear(width, width),
            SiteKind.SERIES: lambda: nn.Conv1d(width, width, 3, padding=1),
            SiteKind.IMAGE: lambda: nn.Conv2d(width, width, 3, padding=1, bias=False),
            SiteKind.TOKENS: lambda: nn.Linear(width, width),
        }[kind]
        self.branches = nn.ModuleDict(
            {
                f"{name}_{style.name}": grown(new_site(), name, shape, style, per_token=per_token)
                for number, name in enumerate(menu(kind))
                for style in (BlendStyle((number + kind) % len(BlendStyle)),)
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: branch(x) for name, branch in self.branches.items()}


def by_the_formula(branch: Grown, x: Tensor) -> Tensor:
    """The blend of docs/lifecycle.md in float64; every token is an example of its own."""
    y = branch.site.double()(x.double())
    flat = y.reshape(-1, y.shape[-1]) if branch.seed.per_token else y
    seed = branch.seed.layers.double()(flat).reshape(y.shape)
    match branch.style:
        case BlendStyle.ADD:
            return y + ALPHA * seed
        case BlendStyle.MULTIPLY:
            return y * (1 + ALPHA * torch.tanh(seed))
        case BlendStyle.GATE:
            return y + ALPHA * torch.sigmoid(y) * seed


CLEAN_PROCESS = """
import sys
from pathlib import Path

class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "esper":
            raise ImportError("esper is not installed here")

sys.meta_path.insert(0, NoEsper())
import runpy
import onnxruntime
import torch

for folder in map(Path, sys.argv[1:]):
    program = torch.export.load(folder / "model.pt2").module()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    source = runpy.run_path(str(folder / "model.py"))["load"]()
    (name,) = [entry.name for entry in session.get_inputs()]
    outputs = []
    for x in torch.load(folder / "inputs.pt"):
        with torch.no_grad():
            flat = [torch.from_numpy(y) for y in session.run(None, {name: x.numpy()})]
            told = source(x)
            outputs.append({"torch": program(x), "source": told, "onnx": dict(zip(told, flat))})
    torch.save(outputs, folder / "outputs.pt")
assert not [name for name in sys.modules if name.startswith("esper")]
"""


def test_files_compute_the_formula_without_esper(tmp_path):
    """Every blueprint and every style at every kind of site, in every format, at two batch sizes.

    One test: with several, each test worker would export everything again.
    """
    torch.manual_seed(0)
    expected = {}
    for kind, shape in SHAPES.items():
        model, inputs = Branches(kind), [torch.randn(rows, *shape) for rows in (1, 5)]
        export(model, inputs[1], tmp_path / kind.name)
        torch.save(inputs, tmp_path / kind.name / "inputs.pt")
        expected[kind] = [
            {name: by_the_formula(branch, x) for name, branch in model.branches.items()}
            for x in inputs
        ]
    folders = [str(tmp_path / kind.name) for kind in SHAPES]
    subprocess.run([sys.executable, "-I", "-c", CLEAN_PROCESS, *folders], check=True, cwd=tmp_path)
    for kind, by_batch in expected.items():
        outputs = torch.load(tmp_path / kind.name / "outputs.pt")
        for want, have in zip(by_batch, outputs, strict=True):
            assert len(want) == len(menu(kind))
            assert {name.rpartition("_")[2] for name in want} == {s.name for s in BlendStyle}
            for file in FORMATS:
                assert list(have[file]) == list(want)
                for name in want:
                    torch.testing.assert_close(
                        have[file][name].double(),
                        want[name],
                        rtol=1e-5,
                        atol=1e-5,
                        msg=lambda told, at=f"{kind.name} {name} {file}": f"{at}: {told}",
                    )


def test_no_file_names_esper_or_the_place_it_was_made(tmp_path):
    site = nn.Conv1d(6, 6, 3, padding=1)
    model = nn.Sequential(grown(site, "attention", (6, 9), BlendStyle.GATE))
    files = [*export(model, torch.randn(2, 6, 9), tmp_path).values(), tmp_path / "model.pt"]
    assert len(files) == 4
    for file in files:
        content = file.read_bytes().lower()
        assert b"esper" not in content, file
        assert str(Path(__file__).parent).lower().encode() not in content, file


# ---- folding


def test_a_matrix_behind_a_linear_layer_leaves_no_trace():
    torch.manual_seed(0)
    cases = {
        "dense": (nn.Linear(3, 6, bias=False), (6,), torch.randn(4, 3)),
        "pointwise": (nn.Conv1d(3, 6, 5, stride=2), (6, 8), torch.randn(4, 3, 19)),
    }
    for blueprint, (site, shape, x) in cases.items():
        model = nn.Sequential(grown(site, blueprint, shape, BlendStyle.ADD)).double()
        small = folded(model)
        assert type(small[0]) is type(site)
        torch.testing.assert_close(small(x.double()), model(x.double()), rtol=1e-12, atol=1e-12)


def test_alpha_goes_into_the_last_layer_where_the_blend_is_linear_in_it():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 9, dtype=torch.float64)
    for style in BlendStyle:
        site = nn.Conv1d(6, 6, 3, padding=1)
        model = nn.Sequential(grown(site, "conv_conv", (6, 9), style)).double()
        small = folded(model)
        assert (small[0].alpha == 1.0) == (style != BlendStyle.MULTIPLY)
        torch.testing.assert_close(small(x), model(x), rtol=1e-12, atol=1e-12)
        assert model[0].alpha == ALPHA  # the model itself is left as it was


def test_what_cannot_merge_stays_two_layers():
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda *_: None)
    sites = {"subclass": Twice(6, 6), "hooked": hooked, "tied": tied, "block": nn.Sequential(tied)}
    sites["not linear"] = nn.ReLU()
    sites["made anew"] = nn.utils.spectral_norm(nn.Linear(6, 6)).eval()
    x = torch.randn(4, 6)
    for name, site in sites.items():
        model = nn.Sequential(grown(site, "dense", (6,), BlendStyle.ADD))
        if name == "tied":
            model.append(nn.Linear(6, 6))
            model[1].weight = tied.weight
        small = folded(model)
        assert isinstance(small[0], Grown), name
        torch.testing.assert_close(small(x), model(x))
    grouped = nn.Conv1d(6, 6, 3, padding=1, groups=2)
    model = nn.Sequential(grown(grouped, "pointwise", (6, 9), BlendStyle.ADD))
    assert isinstance(folded(model)[0], Grown)


# ---- models as users write them


class ResidualBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        block = grown(ResidualBlock(8), "conv_conv", (8, 6, 6), BlendStyle.GATE)
        self.blocks = nn.Sequential(ResidualBlock(8), block)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.register_buffer("shift", torch.rand(8, 1, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.blocks(x) * self.scale + self.shift
        x = F.max_pool2d(x, 2)
        return self.head(F.dropout(x.mean((2, 3)), 0.1, self.training))


class Output(OrderedDict):
    """A mapping of a class of its own, as some libraries return."""


class TokenNet(nn.Module):
    """Several inputs by name, tied weights, an encoder, a mapping as output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        layer.linear1 = grown(layer.linear1, "dense_dense", (16,), BlendStyle.ADD, per_token=True)
        layer.linear2 = grown(layer.linear2, "dense", (8,), BlendStyle.MULTIPLY, per_token=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, weight: Tensor | None = None) -> Output:
        hidden = self.encoder(self.embed(tokens))
        hidden = hidden if weight is None else hidden * weight[:, :, None]
        return Output(logits=self.head(hidden), pooled=hidden[:, 0], cache=None)


def read_back(files: dict[str, Path], example) -> dict[str, list[Tensor]]:
    """Each file's outputs, read with what a user would call."""
    import onnxruntime

    tensors = list(example.values()) if isinstance(example, dict) else [example]
    session = onnxruntime.InferenceSession(files["onnx"])
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    program = torch.export.load(files["torch"]).module()
    source = runpy.run_path(str(files["source"]))["load"]()
    with torch.no_grad():
        by_program = program(**example) if isinstance(example, dict) else program(example)
        by_source = source(**example) if isinstance(example, dict) else source(example)
    return {
        "torch": pytree.tree_leaves(by_program),
        "onnx": [torch.from_numpy(y) for y in session.run(None, feed)],
        "source": pytree.tree_leaves(by_source),
    }


def test_a_residual_cnn_with_batch_norm(tmp_path):
    torch.manual_seed(0)
    model = ResidualNet()
    model(torch.randn(16, 3, 12, 12))  # running statistics that are not those of birth
    x = torch.randn(3, 3, 12, 12)
    files = export(model, torch.randn(1, 3, 12, 12), tmp_path)  # one row is no constant
    model.eval()
    for name, (y,) in read_back(files, x).items():
        torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5, msg=name)


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    model = ResidualNet().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    export(model, torch.randn(2, 3, 12, 12), tmp_path, formats=("source",))
    assert model.training
    assert not model._forward_hooks
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_named_inputs_tied_weights_an_encoder_and_a_mapping(tmp_path):
    torch.manual_seed(0)
    model = TokenNet().eval()
    example = {"tokens": torch.randint(0, 11, (3, 5)), "weight": torch.rand(3, 5)}
    files = export(model, example, tmp_path)
    expected = model(**example)
    for name, (logits, pooled) in read_back(files, example).items():
        torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(pooled, expected["pooled"], rtol=1e-5, atol=1e-5, msg=name)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert sum(tuple(t.shape) == (11, 8) for t in state.values()) == 1  # tied: kept once


def test_a_model_that_takes_any_named_arguments(tmp_path):
    class Scaled(nn.Linear):
        def forward(self, input: Tensor, **more: Tensor) -> Tensor:
            return super().forward(input) * more["scale"]

    model, example = Scaled(4, 3), {"scale": torch.rand(3, 1), "input": torch.randn(3, 4)}
    for name, (y,) in read_back(export(model, example, tmp_path), example).items():
        torch.testing.assert_close(y, model(**example), rtol=1e-5, atol=1e-5, msg=name)


def test_a_seed_is_felt_without_gradients_too():
    """torch's fused encoder reads the layers' weights and would go past what has grown."""
    torch.manual_seed(0)
    model, tokens = TokenNet().eval(), torch.randint(0, 11, (3, 5))
    with torch.no_grad():
        logits = model(tokens)["logits"]
    torch.testing.assert_close(logits, model(tokens)["logits"])


class Rotary(nn.Module):
    """What language models do: tables made on the fly, gradient and autocast off, slices."""

    def __init__(self):
        super().__init__()
        self.register_buffer("speeds", torch.rand(4), persistent=False)
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.speeds
        x = self.mix(x) * torch.cat([angles.cos(), angles.sin()], dim=-1)
        rows, length, width = x[:, 1:-1, ::2].shape
        x = F.pad(x[:, 1:-1, ::2], (0, width)).view(rows, length, 2, width).transpose(1, 2)
        future = torch.full((length, length), float("-inf")).triu(1)
        return future.exp() @ x.reshape(rows, length, 2 * width), x.argmax(-1)


def test_code_that_is_not_layers(tmp_path):
    torch.manual_seed(0)
    model, x = Rotary(), torch.randn(3, 6, 8)
    files = export(model, torch.randn(5, 6, 8), tmp_path)
    for name, outputs in read_back(files, x).items():
        torch.testing.assert_close(outputs, list(model(x)), rtol=1e-5, atol=1e-5, msg=name)
    text = files["source"].read_text()
    assert "x = x[:, 1:-1]" in text
    assert "torch.arange(6, device=device)" in text  # wherever the input lies
    assert "torch.ops" not in text


def test_code_under_autocast_has_no_source(tmp_path):
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (x @ x.T).float()

    with pytest.raises(
        ExportError, match=r"cannot be written as source; try formats=\('torch', 'onnx'\)"
    ):
        export(Mixed(), torch.randn(3, 4), tmp_path, formats=("source",))


def test_the_source_file_can_be_trained_on(tmp_path):
    torch.manual_seed(0)
    file = export(ResidualNet(), torch.randn(2, 3, 12, 12), tmp_path, formats=("source",))["source"]
    model = runpy.run_path(str(file))["load"]().train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 12, 12)).square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert {key for key, _ in model.named_parameters()} <= moved
    assert any(
        key.endswith("running_mean") for key in moved
    )  # batch norm is a layer, not a formula


def test_the_source_shows_layers_and_sections(tmp_path):
    export(ResidualNet(), torch.randn(2, 3, 12, 12), tmp_path, formats=("source",))
    text = (tmp_path / "model.py").read_text()
    assert "class ResidualNet(nn.Module):" in text
    assert "self.stem = nn.Conv2d(3, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))" in text
    assert "x = self.stem(x)" in text
    assert "# blocks.0" in text
    assert "torch.ops" not in text


def test_settings_that_a_layer_does_not_show_are_in_the_source(tmp_path):
    torch.manual_seed(0)
    layers = [
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d(2, divisor_override=3),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.ConvTranspose2d(3, 3, 3, 2, 1, 1),
        nn.InstanceNorm2d(3, affine=True),
    ]
    model, x = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), *layers), torch.randn(4, 3, 8, 8)
    file = export(model, x, tmp_path, formats=("source",))["source"]
    assert "count_include_pad=False)" in file.read_text()
    source = runpy.run_path(str(file))["load"]()
    assert [type(layer) for layer in source.children()] == [type(layer) for layer in model]
    torch.testing.assert_close(source(x), model.eval()(x), rtol=1e-5, atol=1e-5)


# ---- errors


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_part_that_cannot_be_traced_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Decides()))
    with pytest.raises(ExportError, match=r"cannot trace '1.1' \(Decides\)"):
        export(model, torch.randn(2, 3), tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_a_fixed_batch_size_is_an_error(tmp_path):
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, 3)

    with pytest.raises(ExportError, match="free batch size"):
        export(Fixed(), torch.randn(2, 3), tmp_path)


def test_missing_packages_and_unknown_formats_are_said_before_any_work(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "onnx" in name else find_spec(name)
    )
    with pytest.raises(ExportError, match=r"onnxruntime: pip install 'esper-lite\[export\]'"):
        export(nn.Linear(3, 3), torch.randn(2, 3), tmp_path)
    export(nn.Linear(3, 3), torch.randn(2, 3), tmp_path, formats=("torch", "source"))
    with pytest.raises(ValueError, match=r"no formats \['tflite'\]; there are"):
        export(nn.Linear(3, 3), torch.randn(2, 3), tmp_path, formats=("tflite",))


def test_one_format_may_be_given_by_its_name(tmp_path):
    assert list(export(nn.Linear(3, 3), torch.randn(2, 3), tmp_path, formats="torch")) == ["torch"]
    with pytest.raises(ValueError, match=r"no formats \['tflite'\]; there are"):
        export(nn.Linear(3, 3), torch.randn(2, 3), tmp_path, formats="tflite")


def test_files_of_an_earlier_export_are_told(tmp_path):
    model, example = nn.Linear(3, 2), torch.randn(4, 3)
    export(model, example, tmp_path, formats=("torch", "source"))
    export(model, example, tmp_path, formats=("source", "torch"))
    with pytest.warns(UserWarning, match=r"also holds model.py of an earlier export"):
        export(model, example, tmp_path, formats="torch")


def test_an_example_without_rows_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="an empty batch of inputs"):
        export(nn.Linear(3, 3), torch.randn(0, 3), tmp_path)


def test_what_onnx_does_not_know_is_said(tmp_path):
    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    with pytest.raises(ExportError, match=r"(?s)bessel_j0.*formats=\('torch', 'source'\)"):
        export(Bessel(), torch.randn(2, 3), tmp_path)
    assert list(tmp_path.iterdir()) == []  # not the torch file either, which was written first
    export(Bessel(), torch.randn(2, 3), tmp_path, formats=("torch", "source"))


def test_a_file_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    wrong = ("def load():\n    return lambda x: x + 0.1\n", {})
    monkeypatch.setattr(sys.modules[export.__module__], "source_of", lambda *_: wrong)
    with pytest.raises(ExportError, match=r"off by 0.1 at 2 rows.*formats=\('torch', 'onnx'\)"):
        export(nn.Identity(), torch.zeros(2, 3), tmp_path, formats=("source",))
    assert list(tmp_path.iterdir()) == []


def test_the_tolerance_is_relative_to_the_largest_output_and_can_be_set(tmp_path, monkeypatch):
    wrong = ("def load():\n    return lambda x: x + 0.1\n", {})
    monkeypatch.setattr(sys.modules[export.__module__], "source_of", lambda *_: wrong)
    export(nn.Identity(), torch.tensor([[2e4, 0.0]] * 2), tmp_path, formats=("source",))
    small = torch.tensor([[20.0, 0.0]] * 2)
    with pytest.raises(ExportError, match=r"largest output is 20; allow more with tolerance=0.005"):
        export(nn.Identity(), small, tmp_path, formats=("source",))
    export(nn.Identity(), small, tmp_path, formats=("source",), tolerance=0.01)


def test_an_export_that_fails_leaves_the_last_one_as_it_was(tmp_path, monkeypatch):
    example = torch.zeros(2, 3)
    files = export(nn.Linear(3, 3), example, tmp_path, formats=("torch", "source"))
    assert {file.parent for file in files.values()} == {tmp_path}
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(before) == ["model.pt", "model.pt2", "model.py"]
    wrong = ("def load():\n    return lambda x: x + 0.1\n", {})
    monkeypatch.setattr(sys.modules[export.__module__], "source_of", lambda *_: wrong)
    with pytest.raises(ExportError, match="off by"):
        export(nn.Linear(3, 3), example, tmp_path, formats=("torch", "source"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


class Named(nn.Module):
    """A layer and a weight of its own, in a module of any name."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight) + 1

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(nn.Linear(10, 8), self.Inner()))

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[self.name](x)


@pytest.mark.parametrize(
    "name",
    [
        "a\n        open('executed', 'w')\n        #",
        "a\n",
        "a\r",
        "a\x00",
        'a", None); open("executed", "w"); ("',
    ],
)
def test_a_name_that_could_become_code_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="the name .* cannot be exported.*rename"):
        export(Named(name), torch.randn(4, 10), tmp_path / "grown", formats=("torch", "source"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["__hidden", "___", "a b", "x²", "ﬁrst", "схема", "# a", "()"])
def test_odd_names_become_attributes(name, tmp_path):
    export(Named(name), torch.randn(4, 10), tmp_path, formats=("source",))


@pytest.mark.parametrize("formats", [("torch",), ("source",), ("onnx",)])
def test_an_export_to_a_full_disk_raises_and_leaves_nothing(formats, tmp_path):
    model, example = nn.Linear(64, 64), torch.randn(2, 64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # stands for a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            export(model, example, tmp_path / "grown", formats)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_next_export_removes_what_a_killed_one_left(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    left, running = (
        tmp_path / f".unchecked-{process}-abc" for process in (killed.pid, os.getppid())
    )
    for folder in (left, running):
        folder.mkdir()
        (folder / "model.pt2").write_bytes(b"half")
    export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path, formats="torch")
    assert sorted(tmp_path.iterdir()) == [running, tmp_path / "model.pt2"]
