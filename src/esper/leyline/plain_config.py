"""Configs and records as plain containers and back, for files and checkpoints.

    plain = to_plain(TrainConfig())
    config = from_plain(TrainConfig, plain)

Unknown keys and values of a wrong type raise a ValueError that names them.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def to_plain(config: Any) -> Any:
    """Dicts, lists, numbers and strings; a number that JSON has no word for becomes its name."""
    if is_dataclass(config):
        return {entry.name: to_plain(getattr(config, entry.name)) for entry in fields(config)}
    if isinstance(config, Mapping):
        return {name: to_plain(value) for name, value in config.items()}
    if isinstance(config, tuple):
        return [to_plain(value) for value in config]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    return config


def from_plain(kind: type[Config], plain: Mapping[str, Any], where: str = "") -> Config:
    """The config of a kind; fields that are left out have their defaults."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where or 'the config'} is {plain!r}, expected a {kind.__name__}")
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for name in plain:
        if name not in names:
            raise ValueError(f"no setting {_path(where, name)!r}{_nearest(name, names)}")
    return kind(**{n: _value(hints[n], value, _path(where, n)) for n, value in plain.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """A plain value as its field wants it."""
    origin, choices = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, where)
    if origin in (Union, UnionType):
        if value is None and type(None) in choices:
            return None
        kinds = [choice for choice in choices if choice is not type(None)]
        exact = (kind for kind in kinds if type(value) is kind)
        return _value(next(exact, kinds[0]), value, where)
    if origin is Literal and value in choices:
        return value
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_value(choices[0], item, where) for item in value)
    if origin in (Mapping, dict) and isinstance(value, Mapping):
        return {name: _value(choices[1], item, _path(where, name)) for name, item in value.items()}
    if hint is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    if type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r}; expected {getattr(hint, '__name__', hint)}")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _nearest(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {names}"
