"""Dataclasses as plain containers and back, for JSON files and checkpoints.

    plain = to_plain(TrainConfig())
    config = from_plain(TrainConfig, plain)

An unknown key or a value of the wrong type raises a ValueError that names the field.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def to_plain(config: Any) -> Any:
    """Dicts, lists, numbers and strings; inf and NaN become strings, which JSON can hold."""
    if is_dataclass(config):
        return {f.name: to_plain(getattr(config, f.name)) for f in fields(config) if f.init}
    if isinstance(config, Mapping):
        return {name: to_plain(value) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value) for value in config]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    return config


def from_plain(kind: type[Config], plain: Mapping[str, Any], where: str = "") -> Config:
    """A dataclass of type `kind`; missing fields take their defaults."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where or 'the config'} is {plain!r}, expected a {kind.__name__}")
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind) if entry.init]  # type: ignore[arg-type]
    for name in plain:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {names}"
            raise ValueError(f"no setting {_path(where, name)!r}; {hint}")
    return kind(**{n: _value(hints[n], value, _path(where, n)) for n, value in plain.items()})


def differences(plain: Any, other: Any, *, word: str = "was") -> list[str]:
    """The settings that differ between two plain configs, such as "rounds is 3, was 2"."""
    mine, others = dict(leaves(plain)), dict(leaves(other))
    return [
        f"{name} is {mine.get(name)}, {word} {others.get(name)}"
        for name in mine | others
        if mine.get(name) != others.get(name)
    ]


def flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names; lists become text."""
    is_kept = (bool, int, float, str)
    return {n: value if isinstance(value, is_kept) else str(value) for n, value in leaves(plain)}


def leaves(nested: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the value of each entry of nested mappings."""
    if not isinstance(nested, Mapping):
        yield where, nested
        return
    for name, value in nested.items():
        yield from leaves(value, _path(where, name))


def _value(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type that its field declares."""
    origin, choices = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, where)
    if origin in (Union, UnionType):
        return _one_of(choices, value, where)
    if origin is Literal and value in choices:
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_value(choices[0], item, where) for item in value)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: _value(choices[1], item, _path(where, name)) for name, item in value.items()}
    if hint is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    if type(value) is hint or hint is Any:
        return value
    raise ValueError(f"{where}={value!r}; expected {getattr(hint, '__name__', hint)}")


def _one_of(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """A plain value as one of the types of a union."""
    if type(value) in choices:
        return value
    others = [choice for choice in choices if choice is not type(None)]
    for choice in others[:-1]:
        with suppress(ValueError):
            return _value(choice, value, where)
    return _value(others[-1], value, where)


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
