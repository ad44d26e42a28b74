"""Export a grown model to files that do not need Esper: torch.export, ONNX and source code.

    export(model, example, "grown/")

    model.pt2     torch.export.load("model.pt2").module()
    model.onnx    onnxruntime.InferenceSession("model.onnx")
    model.py      a readable nn.Module; from model import load; load() reads model.pt next to it

The model is traced once, in eval mode, with a free batch size. Every file is made from that trace,
read back, and compared with the model at two batch sizes. A failed export writes no file and
leaves those of an earlier export unchanged.
"""

import contextlib
import importlib.util
import io
import logging
import os
import runpy
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from esper.runtime.files import atomic_write, is_running
from esper.surgery.export_source import NO_END, ExportError, source_of
from esper.surgery.inputs import arguments, batch_size, forward, map_rows, tensors
from esper.surgery.plain import folded

Exported = Callable[[Any], Any]  # an exported model: example -> outputs

_FILES = {"torch": "model.pt2", "onnx": "model.onnx", "source": "model.py"}
FORMATS = tuple(_FILES)
TOLERANCE = 1e-5  # largest difference between the model and its files; 1: the largest output

aten = torch.ops.aten

_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# limit of protobuf; larger models keep their weights in a second file
_LARGEST_ONNX_FILE = 2**31 - 2**20


def export(
    model: nn.Module,
    example: Any,
    path: str | Path,
    formats: Sequence[str] = FORMATS,
    *,
    tolerance: float = TOLERANCE,
) -> dict[str, Path]:
    """Write `model` to the folder `path`; returns the file of each format.

    `example` is a batch of the model's inputs: a tensor, a tuple of arguments or a dict of them.
    The batch size is free in all formats; every other axis is fixed by the example. `tolerance` is
    the largest difference from the model, as a share of its largest output.
    """
    formats = (formats,) if isinstance(formats, str) else formats
    _check_formats(formats)
    plain = folded(model).cpu().eval()
    _check_names(plain)
    plain.register_forward_hook(_plain_output)
    example = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), example)
    if batch_size(example) == 1:  # torch.export would treat it as a constant
        example = _doubled(example)
    program = _traced(plain, example)
    folder = Path(path)
    with _checked_folder(folder) as unchecked:
        for name in formats:
            exported = _WRITERS[name](program, plain, unchecked / _FILES[name])
            _check_equal(name, exported, plain, example, tolerance)
    _warn_of_others(folder, formats)
    return {name: folder / _FILES[name] for name in formats}


@contextlib.contextmanager
def _checked_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder, whose files are moved to `folder` if the block succeeds."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".unchecked-[0-9]*-*"):  # by a process that was killed
            if not is_running(int(left.name.split("-")[1])):
                shutil.rmtree(left)
        prefix = f".unchecked-{os.getpid()}-"
        with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as unchecked:
            yield Path(unchecked)
            for file in Path(unchecked).iterdir():
                file.replace(folder / file.name)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty


def _warn_of_others(folder: Path, formats: Sequence[str]) -> None:
    """Warn of files of other formats, which may be of another network."""
    names = (name for made, name in _FILES.items() if made not in formats)
    if others := [name for name in names if (folder / name).exists()]:
        warnings.warn(
            f"{folder} also holds {', '.join(others)} of an earlier export, perhaps of another "
            "network; delete it, or export that format too",
            stacklevel=4,
        )


def _check_formats(formats: Sequence[str]) -> None:
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"no formats {unknown}; there are {list(FORMATS)}")
    missing = [name for name in _ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if "onnx" in formats and missing:
        raise ExportError(
            f"ONNX needs {', '.join(missing)}: pip install 'esper-lite[export]', or leave ONNX out "
            "with formats=('torch', 'source')"
        )


def _check_names(model: nn.Module) -> None:
    """Raise for names that could become code: torch and the source file write names into code."""
    named = chain(model.named_modules(), model.named_parameters(), model.named_buffers())
    for name, _ in named:
        if not name.isprintable() or any(sign in name for sign in "\"'\\"):
            raise ExportError(
                f"the name {name!r} cannot be exported: it has a line break, a quote, a backslash "
                "or a sign that cannot be printed; rename that module or weight"
            )


def _doubled(example: Any) -> Any:
    """The batch with every row twice."""
    return map_rows(example, lambda rows: rows.repeat_interleave(2, 0))


def _plain_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Turn custom mappings and tuples into plain ones, which load anywhere."""
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if value is not None}
    return tuple(output) if isinstance(output, tuple) else output


def _traced(model: nn.Module, example: Any) -> ExportedProgram:
    args, kwargs = arguments(example)
    known = signature(model.forward).parameters.values()
    if kwargs and any(parameter.kind == parameter.VAR_KEYWORD for parameter in known):
        model.forward = _with_names(model.forward, kwargs)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors(example):
        if tensor.dim() > 0 and len(tensor) == batch_size(example):
            shapes[tensor] = {0: Dim.DYNAMIC}
    free_batch = shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
    entered = [""]  # modules whose forward has not returned
    try:
        with contextlib.ExitStack() as hooks, _quiet(), _OneHead():
            for name, module in model.named_modules():
                enter = lambda *_, name=name: entered.append(name)  # noqa: E731
                hooks.enter_context(module.register_forward_pre_hook(enter))
                leave = lambda *_: entered.__delitem__(-1)  # noqa: E731  returns None
                hooks.enter_context(module.register_forward_hook(leave))
            program = torch.export.export(model, args, kwargs, dynamic_shapes=free_batch)
    except Exception as error:
        kind = type(model.get_submodule(entered[-1])).__name__
        raise ExportError(
            f"torch.export cannot trace {f'{entered[-1]!r}' if entered[-1] else 'the model'} ({kind}): "
            f"{str(error).strip().splitlines()[0]}\nEvery format is made from that trace. Rewrite "
            "that part without Python branches on tensor values and with a free batch size. "
            "torch.save(model.state_dict(), ...) works without a trace."
        ) from error
    _tidy(program)
    return program


def _with_names(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """The function with these arguments in its signature: torch cannot trace `**kwargs`."""

    def named(**given: Any) -> Any:
        return function(**given)

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    named.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return named


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's internal log messages and warnings."""
    logger = logging.getLogger("torch.onnx")
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # it logs which optional packages are missing
        # raised by torch itself when it copies a program
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        yield


def _tidy(program: ExportedProgram) -> None:
    """Remove checks and conversions without effect, file paths, and the names of Esper's classes."""
    _inline_regions(program.graph_module)
    graph = program.graph
    for node in list(graph.nodes):
        for note in ("stack_trace", "torch_fn", "custom"):
            node.meta.pop(note, None)
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {
                key: (path, "torch.nn.modules.module.Module" if kind.startswith("esper.") else kind)
                for key, (path, kind) in stack.items()
            }
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()


def _inline_regions(module: fx.GraphModule) -> None:
    """Inline code under no_grad or disabled autocast: it computes the same."""
    graph = module.graph
    for node in list(graph.nodes):
        is_autocast = node.target is torch.ops.higher_order.wrap_with_autocast
        is_off = is_autocast and node.args[2] is False  # (device, dtype, enabled, ...)
        if not is_off and node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        place = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node))
        region = module.get_submodule(node.args[place].target)
        assert isinstance(region, fx.GraphModule)
        _inline_regions(region)
        inputs = [entry for entry in region.graph.nodes if entry.op == "placeholder"]
        with graph.inserting_before(node):
            given = dict(zip(inputs, node.args[place + 1 :], strict=True))
            outputs: Any = graph.graph_copy(region.graph, given)
        for user in list(node.users):  # each selects one output
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is aten.to.dtype:
        return bool(node.args[0].meta["val"].dtype == node.args[1])  # type: ignore[union-attr]
    is_whole = node.args[2:] in ((0, NO_END), (None, NO_END), ())
    return node.target is aten.slice.Tensor and is_whole


class _OneHead(TorchFunctionMode):
    """Traces attention over `[batch, tokens, width]` as that of one head: ONNX requires that axis."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if func is not F.scaled_dot_product_attention or args[0].dim() != 3:
            return func(*given[0], **given[1])
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.unsqueeze(1) if x.dim() == 3 else x, given
        )
        return func(*args, **kwargs).squeeze(1)


def _write_torch(program: ExportedProgram, model: nn.Module, file: Path) -> Exported:
    memory = io.BytesIO()  # torch may abort the process when it writes to a full disk
    torch.export.save(program, memory)
    atomic_write(file, lambda out: out.write(memory.getbuffer()))
    module = torch.export.load(file).module()
    return lambda example: forward(module, example)


def _write_onnx(program: ExportedProgram, model: nn.Module, file: Path) -> Exported:
    import onnxruntime

    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    is_large = size > _LARGEST_ONNX_FILE
    try:
        with _quiet():
            torch.onnx.export(program, f=file, verbose=False, external_data=is_large)
    except torch.onnx.OnnxExporterError as error:
        cause = error.__cause__ or error
        raise ExportError(
            f"no ONNX file: {str(cause).strip().splitlines()[0]}\n"
            "formats=('torch', 'source') leave it out"
        ) from error
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(example: Any) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in tensors(example)]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    return run


def _write_source(program: ExportedProgram, model: nn.Module, file: Path) -> Exported:
    text, state = source_of(program, model)
    memory = io.BytesIO()  # as above
    torch.save(state, memory)
    atomic_write(file, lambda out: out.write(text.encode()))
    atomic_write(file.with_name("model.pt"), lambda out: out.write(memory.getbuffer()))
    loaded = runpy.run_path(str(file))["load"]()
    return lambda example: loaded(*tensors(example))


# each writes a file and returns what was read back from it
_WRITERS = {"torch": _write_torch, "onnx": _write_onnx, "source": _write_source}


def _check_equal(
    name: str, exported: Exported, model: nn.Module, example: Any, tolerance: float
) -> None:
    """Raise unless the file computes the same as the model, at two batch sizes."""
    for batch in (example, _doubled(example)):
        with torch.no_grad():
            expected, got = tensors(forward(model, batch)), tensors(exported(batch))
        for want, have in zip(expected, got, strict=True):
            rounding = torch.finfo(want.dtype).eps if want.is_floating_point() else 0.0
            want, have = want.double(), have.double()
            scale = float(want.where(want.isfinite(), 0.0).abs().amax()) or 1.0
            allowed = max(tolerance, 4 * rounding) * scale
            if not torch.allclose(have, want, 0.0, allowed, equal_nan=True):
                off = (have - want).abs().max().item()
                others = tuple(other for other in FORMATS if other != name)
                raise ExportError(
                    f"the {name} file is off by {off:.2g} at {batch_size(batch)} rows, where the "
                    f"largest output is {scale:.2g}; allow more with tolerance={off / scale:.1g}, or "
                    f"leave it out with formats={others}"
                )
