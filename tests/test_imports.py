"""Which package may import which, read from the source of every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import esper

SOURCE = Path(__file__).parents[1] / "src" / "esper"
LAB = {folder.name for folder in (SOURCE.parents[1] / "lab").iterdir() if folder.is_dir()}

# package -> the packages it may import
ALLOWED = {
    "runtime": set(),
    "leyline": {"runtime"},
    "kasmina": {"runtime", "leyline"},
    "tamiyo": {"runtime", "leyline", "kernels"},
    "nissa": {"runtime", "leyline"},
    "kernels": {"runtime", "leyline", "kasmina", "tolaria"},
    "tolaria": {"runtime", "leyline", "kasmina", "kernels"},
    "simic": {"runtime", "leyline", "kasmina", "kernels", "tamiyo", "tolaria", "nissa"},
    "surgery": {"runtime", "leyline", "kasmina"},
    "growing": {"runtime", "leyline", "kasmina", "tamiyo", "surgery", "nissa"},
    "adapting": {"runtime", "leyline", "kasmina", "tamiyo", "surgery", "nissa"},
    "cli": {"runtime", "leyline", "surgery", "simic", "nissa"},
}


def imported_packages(path: Path) -> set[str]:
    """The esper packages that a module imports, wherever in the file the import stands."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that they can be checked"
            module = node.module or ""
            if module == "esper":
                names += [f"esper.{alias.name}" for alias in node.names]
            else:
                names.append(module)
    return {n.split(".")[1] for n in names if n.startswith("esper.")}


def all_imports(path: Path) -> set[str]:
    """The first name of every module that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_follow_the_arrows():
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem == "cli"]
    assert {package_of(path) for path in modules} >= set(ALLOWED)
    for path in modules:
        package = package_of(path)
        stray = imported_packages(path) - ALLOWED[package] - {package}
        assert not stray, f"{path.relative_to(SOURCE)} must not import {sorted(stray)}"


def test_the_package_does_not_import_the_lab():
    assert {"adapt_practice", "growth_evaluation"} <= LAB
    modules = [*SOURCE.rglob("*.py")]
    assert modules
    for path in modules:
        assert not all_imports(path) & LAB, path.relative_to(SOURCE)


def test_a_wrong_arrow_is_seen(tmp_path):
    module = tmp_path / "wrong.py"
    module.write_text(
        "def f():\n    from esper.simic.agent import gae\n    from esper import tamiyo"
    )
    assert imported_packages(module) == {"simic", "tamiyo"}
    module.write_text(
        "def f():\n    from adapt_practice.trials import fit\n    import numpy.linalg"
    )
    assert all_imports(module) == {"adapt_practice", "numpy"}


def test_the_core_imports_only_torch_and_numpy():
    optional = ["numba", "triton", "gymnasium", "tensorboard", "mnist1d", "sklearn", "tyro", "rich"]
    optional += ["onnx", "onnxscript", "onnxruntime"]
    core = sorted(set(ALLOWED) - {"nissa", "cli"})
    modules = [
        ".".join(("esper", *path.relative_to(SOURCE).with_suffix("").parts))
        for package in core
        for path in (SOURCE / package).rglob("*.py")
        if path.stem != "__init__" and not {"numba", "triton"} & set(path.stem.split("_"))
    ]
    assert modules
    # torch itself may load optional packages; what it loads alone does not count against us
    code = (
        "import sys, importlib, torch, torch.utils.flop_counter\n"
        "before = set(sys.modules)\n"
        f"for m in {modules!r}:\n"
        "    importlib.import_module(m)\n"
        f"    loaded = sorted(o for o in {optional!r} if o in sys.modules and o not in before)\n"
        "    assert not loaded, (m, loaded)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_listed_and_resolves():
    assert sorted(esper.__all__) == sorted([*esper._PUBLIC, "__version__"])
    assert set(esper.__all__) <= set(dir(esper))
    for name in esper._PUBLIC:
        assert getattr(esper, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        esper.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import os; before = dict(os.environ); import esper; assert os.environ == before",
        "from esper.cli import main; main(['--help'])",
        "from esper.cli import main; main([])",
    ],
)
def test_importing_esper_and_listing_its_commands_does_not_import_torch(code):
    code += "\nimport sys\nassert not {'torch', 'tyro', 'numpy'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "main" not in code or "gym " in result.stdout
