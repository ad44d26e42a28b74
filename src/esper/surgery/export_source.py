"""A traced model as a readable source file: layers in `__init__`, torch calls in `forward`.

If the trace contains a complete torch.nn layer, the file has that layer, so the model can be trained
further. Everything else is written as a torch function. Variable names are reused after their last
use, so a chain of layers reads `x = self.conv(x)`.
"""

import ast
import inspect
import keyword
import math
import operator
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby, takewhile
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from esper.surgery.branches import settings_of

aten = torch.ops.aten

NO_END = 2**63 - 1  # the traced end of an open slice

# fmt: off
_INFIX: dict[Any, str] = {
    aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/",
    aten.matmul.default: "@",
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//",
}
# operators with the same arguments, in the same order, as a Python function or method of that name
_FUNCTIONAL = {
    "adaptive_avg_pool2d", "avg_pool2d", "dropout", "elu", "gelu", "hardswish", "leaky_relu",
    "linear", "mish", "pad", "scaled_dot_product_attention", "silu", "softplus",
}
_METHODS = {"contiguous", "expand", "expand_as", "masked_fill", "repeat", "to", "view", "view_as"}
# fmt: on


class ExportError(RuntimeError):
    """A model cannot be exported to a format; the message names the cause and an alternative."""


def source_of(program: ExportedProgram, model: nn.Module) -> tuple[str, dict[str, Tensor]]:
    """The program as source code, and the weights that its `load` reads; `model` was traced."""
    given = program.graph_signature.user_inputs
    inputs = [node for node in program.graph.nodes if node.name in given]
    statements = list(_statements(program, model))
    attributes = _Attributes(program, statements)
    lines = _forward_lines(program, statements, attributes, inputs)
    text = _TEMPLATE.format(
        name=_identifier(type(model).__name__),
        inputs=", ".join(_described(node) for node in inputs),
        imports="import torch.nn.functional as F\n" if any("F." in s for s in lines) else "",
        params=attributes.num_params,
        layers="\n".join(f"        {line}" for line in attributes.declarations),
        arguments=", ".join(f"{node.name}: Tensor" for node in inputs),
        body="\n".join(f"        {line}" for line in lines),
    )
    return text, attributes.state


_TEMPLATE = '''\
"""{name}, grown: generated plain PyTorch code, free to edit.

    from model import load

    model = load()  # in eval mode, with the weights in model.pt next to this file

{params:,} parameters; input {inputs}.
"""

from pathlib import Path

import torch
{imports}from torch import Tensor, nn


class {name}(nn.Module):
    def __init__(self) -> None:
        super().__init__()
{layers}

    def forward(self, {arguments}):
{body}


def load(weights: str | Path = Path(__file__).with_name("model.pt")) -> {name}:
    model = {name}()
    model.load_state_dict(torch.load(weights, weights_only=True), assign=True)
    return model.eval()
'''


@dataclass(frozen=True)
class _Statement:
    """One line of `forward`: a torch call, or the call of a layer."""

    node: fx.Node  # its value is computed here
    inputs: tuple[fx.Node, ...]
    path: str  # of the module that the line belongs to
    layer: nn.Module | None = None


def _statements(program: ExportedProgram, model: nn.Module) -> Iterator[_Statement]:
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    modules = dict(model.named_modules())
    for (_, path), run in groupby(calls, key=_innermost):
        nodes = list(run)
        path = path if path in modules else ""  # nodes added by torch belong to no module
        layer = modules[path]
        inputs = _inputs_of_layer(program, nodes, layer, path)
        if inputs is not None:
            yield _Statement(nodes[-1], inputs, path, layer)
            continue
        for node in nodes:
            if node.users or (isinstance(node.target, torch._ops.OpOverload) and node.is_impure()):
                yield _Statement(node, tuple(node.all_input_nodes), path)


def _innermost(node: fx.Node) -> tuple[str, str]:
    """The innermost module call that a node belongs to, and the module's path."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    key, (path, _) = list(stack.items())[-1]
    return key, path.partition("@")[0]  # torch marks the second call of a module with @1


def _inputs_of_layer(
    program: ExportedProgram, nodes: Sequence[fx.Node], layer: nn.Module, path: str
) -> tuple[fx.Node, ...] | None:
    """The input of a torch.nn layer that `nodes` compute completely; None if they do not."""
    if not type(layer).__module__.startswith("torch.nn.modules") or _constructor(layer) is None:
        return None
    weights = _weights(program)
    outside = {arg for node in nodes for arg in node.all_input_nodes} - set(nodes)
    inputs = tuple(node for node in outside if node.name not in weights)
    own = [weights[node.name] for node in outside if node.name in weights]
    owns_all = all(weight.rpartition(".")[0] == path for weight in own)
    leaving = [node for node in nodes if any(user not in nodes for user in node.users)]
    return inputs if owns_all and len(inputs) == 1 and leaving == [nodes[-1]] else None


def _constructor(layer: nn.Module) -> str | None:
    """The expression that builds a torch.nn layer, from its settings; None if that fails."""
    kind: Any = type(layer)
    arguments = inspect.signature(kind).parameters
    own = settings_of(layer)
    if any(layer.children()):
        return None
    try:
        with torch.device("meta"):
            needed = {n: own[n] for n, known in arguments.items() if known.default is known.empty}
            usual = settings_of(kind(**needed))
            given = needed | {name: value for name, value in own.items() if value != usual[name]}
            twin = kind(**given)
        ast.literal_eval(repr(given))  # raises for what has no literal, such as infinity
    except (KeyError, TypeError, ValueError):
        return None
    shapes = [{key: t.shape for key, t in x.state_dict().items()} for x in (layer, twin)]
    is_same = settings_of(twin) == own and repr(twin) == repr(layer)
    if not is_same or shapes[0] != shapes[1]:
        return None
    texts = [f"{name}={value!r}" for name, value in given.items()]
    for position, _ in enumerate(takewhile(lambda value: isinstance(value, int), needed.values())):
        texts[position] = texts[position].partition("=")[2]
    return f"nn.{kind.__name__}({', '.join(texts)})"


def _weights(program: ExportedProgram) -> dict[str, str]:
    """The path of each parameter, buffer and constant, by the name of its placeholder."""
    specs = program.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in specs if spec.target is not None}


class _Attributes:
    """What `__init__` declares: the layers and tensors that `forward` uses."""

    def __init__(self, program: ExportedProgram, statements: Sequence[_Statement]):
        self.declarations: list[str] = []
        self.state: dict[str, Tensor] = {}
        self.num_params = 0
        self._program = program
        self._weights = _weights(program)
        self._names: dict[str, str] = {}  # path -> attribute
        layers = {s.path: s.layer for s in statements if s.layer is not None}
        for path, layer in layers.items():
            self.declarations.append(f"self.{self._name(path)} = {_constructor(layer)}")
            self.num_params += sum(parameter.numel() for parameter in layer.parameters())
            for key, tensor in layer.state_dict().items():
                self.state[f"{self._names[path]}.{key}"] = tensor

    def value(self, node: fx.Node) -> str | None:
        """The expression for a weight, part of a layer or a separate attribute; None for others."""
        if node.name not in self._weights:
            return None
        path = self._weights[node.name]
        owner, _, last = path.rpartition(".")
        if owner in self._names:
            return f"{self.layer(owner)}.{last}"
        if path not in self._names:
            self._declare(path)
        return self.layer(path)

    def layer(self, path: str) -> str:
        return f"self.{self._names[path]}"

    def _declare(self, path: str) -> None:
        program = self._program
        tensor = program.state_dict.get(path, program.constants.get(path))
        assert isinstance(tensor, Tensor)
        name, empty = self._name(path), f"torch.empty({tuple(tensor.shape)})"
        if path in program.graph_signature.parameters:
            self.declarations.append(f"self.{name} = nn.Parameter({empty})")
            self.num_params += tensor.numel()
        else:
            self.declarations.append(f'self.register_buffer("{name}", {empty})')
        self.state[name] = tensor.detach()

    def _name(self, path: str) -> str:
        """A new, unique attribute name for a path."""
        plain = _identifier(path.replace(".", "_"))
        taken = {*self._names.values(), *dir(nn.Module)}
        numbered = chain([plain], (f"{plain}_{number}" for number in count(1)))
        self._names[path] = next(name for name in numbered if name not in taken)
        return self._names[path]


def _forward_lines(
    program: ExportedProgram,
    statements: Sequence[_Statement],
    attributes: _Attributes,
    inputs: Sequence[fx.Node],
) -> list[str]:
    """The lines of `forward`. Its variables x, y, z, ... are reused after their last use."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    last_use = {node: number for number, entry in enumerate(statements) for node in entry.inputs}
    last_use |= dict.fromkeys(output.all_input_nodes, len(statements))
    names = {node: node.name for node in inputs}  # of the values that are still needed

    def value(node: fx.Node) -> str:
        return attributes.value(node) or names[node]

    lines: list[str] = []
    section = ""
    for number, statement in enumerate(statements):
        if statement.layer is None:
            place, line = statement.path, _expression(statement.node, value)
        else:
            place = statement.path.rpartition(".")[0]
            line = f"{attributes.layer(statement.path)}({value(statement.inputs[0])})"
        if place and not f"{section}.".startswith(f"{place}."):
            lines.append(f"# {place}")
        section = place
        for node in [node for node in names if last_use.get(node, -1) <= number]:
            del names[node]
        free = chain("xyzuvw", (f"x{index}" for index in count(1)))
        names[statement.node] = next(name for name in free if name not in names.values())
        lines.append(f"{names[statement.node]} = {line}")
    if any("device" in line for line in lines):
        lines.insert(0, f"device = {inputs[0].name}.device")
    result: Any = pytree.tree_unflatten(output.args[0], program.call_spec.out_spec)
    return [*lines, f"return {_literal(result, value)}"]


def _expression(node: fx.Node, value: Callable[[fx.Node], str]) -> str:
    target, args, kwargs = node.target, list(node.args), dict(node.kwargs)
    if target in _INFIX and kwargs.pop("alpha", 1) == 1 and not kwargs and len(args) == 2:
        return f" {_INFIX[target]} ".join(_literal(arg, value) for arg in args)
    if target is operator.getitem:
        return f"{_literal(args[0], value)}[{_literal(args[1], value)}]"
    if target is aten.sym_size.int:
        return f"{_literal(args[0], value)}.shape[{args[1]}]"
    if target is aten.slice.Tensor and len(args) > 1:
        return _slice(args, value)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise ExportError(f"{target} cannot be written as source; try formats=('torch', 'onnx')")
    given = [_literal(arg, value) for arg in args]
    name = target.overloadpacket.__name__
    # leave out the defaults that a trace adds
    named = [
        f"{key}={_literal(arg, value)}"
        for key, arg in node.kwargs.items()
        if (key, arg) not in (("layout", torch.strided), ("pin_memory", False))
    ]
    if name in _METHODS:
        return f"{given[0]}.{name}({', '.join([*given[1:], *named])})"
    # torch's own functions are made from the operators
    is_torch = isinstance(getattr(torch, name, None), BuiltinFunctionType)
    plain = f"F.{name}" if name in _FUNCTIONAL else f"torch.{name}" if is_torch else ""
    function = plain or f"torch.ops.{target}"
    return f"{function}({', '.join([*given, *named])})"


def _slice(args: Sequence[Any], value: Callable[[fx.Node], str]) -> str:
    x, axis, *bounds = args
    start, stop, step = [*bounds, *[None] * 3][:3]
    parts = ["" if start in (None, 0) else _literal(start, value)]
    parts += ["" if stop in (None, NO_END) else _literal(stop, value)]
    parts += [] if step in (None, 1) else [_literal(step, value)]
    return f"{_literal(x, value)}[{':, ' * axis if axis >= 0 else '..., '}{':'.join(parts)}]"


def _literal(argument: Any, value: Callable[[fx.Node], str]) -> str:
    """An expression for an argument or an output: values in lists, tuples and dicts."""
    if isinstance(argument, fx.Node):
        return value(argument)
    if isinstance(argument, dict):
        items = (f"{key!r}: {_literal(item, value)}" for key, item in argument.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(argument, list | tuple):
        inner = ", ".join(_literal(item, value) for item in argument)
        if isinstance(argument, list):
            return f"[{inner}]"
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, torch.device):
        return "device"  # of the input, so that the file runs on any device
    if isinstance(argument, float) and not math.isfinite(argument):
        return f'float("{argument}")'
    return repr(argument)


def _described(node: fx.Node) -> str:
    tensor = node.meta["val"]
    axes = ["batch" if isinstance(size, torch.SymInt) else str(size) for size in tensor.shape]
    return f"{node.name} {str(tensor.dtype).removeprefix('torch.')} [{', '.join(axes)}]"


def _identifier(text: str) -> str:
    """A name like `text`, in the form that Python stores and with at most one leading underscore.

    Python changes attribute names that begin with two.
    """
    letters = unicodedata.normalize("NFKC", text)
    name = "".join(letter if f"_{letter}".isidentifier() else "_" for letter in letters)
    name = f"_{name.lstrip('_')}" if name.startswith("__") else name
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"_{name}"
