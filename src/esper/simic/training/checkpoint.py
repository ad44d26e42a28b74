"""Files that hold all of a run: written at once or not at all, read without executing code.

    write_checkpoint(path, "gymnasium run", contents)
    contents = read_checkpoint(path, "gymnasium run")

A file is written beside its destination and then renamed over it, so that a kill at any instant
leaves either the old checkpoint or the new one; a file that was damaged since is refused. Contents
are tensors and plain containers; who changes what a kind of checkpoint holds raises its `version`.
"""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from esper.leyline.whole_files import replace_file

_MAGIC = "esper checkpoint"
_PLAIN = (bool, int, float, str, bytes, type(None))
_DIFFERENCES_SHOWN = 8
_FOLDER = 0x10  # a zip file's mark of a folder


class CheckpointMismatch(ValueError):
    """A checkpoint that does not fit: another version, another kind or other shapes."""


def write_checkpoint(
    path: str | Path, kind: str, contents: Mapping[str, Any], *, version: int = 1
) -> None:
    """Replace `path` in one step, once the new contents are safely on the disk."""
    path = Path(path)
    _require_plain(contents, "contents")
    header = {"format": _MAGIC, "version": version, "kind": kind}
    replace_file(path, lambda file: torch.save(header | {"contents": dict(contents)}, file))


def read_checkpoint(path: str | Path, kind: str, *, version: int = 1) -> dict[str, Any]:
    """The contents of a checkpoint of this kind and version, its tensors on the CPU."""
    path = Path(path)
    if not _is_whole(path):
        raise CheckpointMismatch(f"{path} is not a checkpoint, or a damaged one")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise CheckpointMismatch(
            f"{path} holds more than tensors and plain containers; it was not read"
        ) from error
    except (RuntimeError, ValueError) as error:  # a zip file of another kind
        raise CheckpointMismatch(f"{path} is not a checkpoint of this library") from error
    if not isinstance(loaded, dict) or loaded.get("format") != _MAGIC:
        raise CheckpointMismatch(f"{path} is not a checkpoint of this library")
    if loaded["kind"] != kind:
        raise CheckpointMismatch(f"{path} holds a {loaded['kind']}, expected a {kind}")
    if loaded["version"] != version:
        raise CheckpointMismatch(
            f"{path} holds version {loaded['version']} of a {kind}; this library reads "
            f"version {version}"
        )
    contents: dict[str, Any] = loaded["contents"]
    return contents


def _is_whole(path: Path) -> bool:
    """Whether it is a zip file, as torch writes them, whose checksums hold: torch reads none."""
    with path.open("rb") as file:  # missing is another matter
        try:
            archive = ZipFile(file)
            # what is marked as a folder torch takes for empty, and leaves its tensor as it finds it
            is_marked = any(part.external_attr & _FOLDER for part in archive.infolist())
            return not is_marked and archive.testzip() is None
        except (BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error):
            return False  # the damage is in the names, the lengths or the flags


def require_same_layout(found: Any, expected: Any, path: str | Path) -> None:
    """Refuse contents whose keys, shapes or dtypes are not those of `expected`."""
    differences = list(_differences(found, expected, ""))
    if not differences:
        return
    shown = differences[:_DIFFERENCES_SHOWN]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    raise CheckpointMismatch(f"{path} does not fit:\n  " + "\n  ".join(shown))


def _differences(found: Any, expected: Any, where: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        yield from (f"{where}{key}: missing" for key in expected if key not in found)
        yield from (f"{where}{key}: not expected" for key in found if key not in expected)
        for key in expected:
            if key in found:
                yield from _differences(found[key], expected[key], f"{where}{key}.")
    elif _layout(found) != _layout(expected):
        yield f"{where.rstrip('.')}: found {_layout(found)}, expected {_layout(expected)}"


def _layout(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _require_plain(value: Any, where: str) -> None:
    """Only what can be read back without executing code."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_plain(key, f"{where}, a key")
            _require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):
        raise ValueError(
            f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings "
            "and plain containers of them"
        )
