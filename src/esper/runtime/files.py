"""Esper's files: written atomically, checked on reading, loaded without executing code.

    write_file(path, "controller", {"weights": ...}, version=3)
    contents = read_file(path, "controller", version=3)

Every checkpoint and controller uses this one format: a zip archive as `torch.save` writes it, with
a header (format, kind, version). Contents are tensors and plain containers. Raise the `version` of
a kind when its contents change. Every problem with a file raises `UnreadableFile`.
"""

import copy
import io
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from esper.runtime.devices import machine_facts
from esper.runtime.plain_config import leaves

_FORMAT = "esper checkpoint"
_DIFFERENCES_SHOWN = 8
_FOLDER = 0x10  # the zip attribute of a folder


class UnreadableFile(ValueError):
    """A file that is damaged, or of another kind, version or layout than expected."""


def write_file(
    path: str | Path, kind: str, contents: Mapping[str, Any], *, version: int = 1
) -> None:
    """Replace `path` atomically; contents that could not be read back raise a ValueError."""
    header = {"format": _FORMAT, "version": version, "kind": kind, "machine": machine_facts()}
    memory = io.BytesIO()  # torch.save may abort the process when it writes to a full disk

    def write_and_read(file: BinaryIO) -> None:
        file.write(memory.getbuffer())
        file.flush()
        torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)

    try:
        torch.save(header | {"contents": _without_numpy_scalars(dict(contents))}, memory)
        atomic_write(Path(path), write_and_read)
    except (pickle.PickleError, AttributeError, TypeError) as error:  # all raised by pickle
        raise ValueError(
            f"{path} was not written: it could not be read back ({_cause(error)}). A file may hold "
            "tensors, numbers and strings, in plain dicts, lists and tuples"
        ) from error


def read_file(
    path: str | Path,
    kind: str,
    *,
    version: int = 1,
    device: str | None = "cpu",
    resumes: bool = False,
) -> dict[str, Any]:
    """The contents of a file of this kind and version; `device` None keeps each tensor's own.

    With `resumes`, a warning says if the run will not be bit-exact on this machine.
    """
    path = Path(path)
    if not _is_intact(path):
        raise UnreadableFile(f"{path} is damaged, or not a file that Esper wrote")
    try:
        loaded = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnreadableFile(
            f"{path} holds more than tensors and plain containers; it was not read"
        ) from error
    except (RuntimeError, ValueError, KeyError, EOFError) as error:  # a zip file of another kind
        raise UnreadableFile(f"{path} is not a file that Esper wrote") from error
    is_ours = isinstance(loaded, dict) and {"format", "kind", "version", "contents"} <= set(loaded)
    if not is_ours or loaded["format"] != _FORMAT:
        raise UnreadableFile(f"{path} is not a file that Esper wrote")
    if loaded["kind"] != kind:
        raise UnreadableFile(f"{path} is a file of kind {loaded['kind']!r}; expected {kind!r}")
    if loaded["version"] != version:
        raise UnreadableFile(
            f"{path} holds version {loaded['version']} of the kind {kind!r}; this version of Esper "
            f"reads version {version}"
        )
    if resumes:
        _warn_of_another_machine(path, loaded.get("machine", {}))
    contents: dict[str, Any] = loaded["contents"]
    return contents


def _warn_of_another_machine(path: Path, then: dict[str, str | int]) -> None:
    now = machine_facts()
    changed = [
        f"{name} {then[name]}, now {now[name]}"
        for name in now
        if then.get(name, now[name]) != now[name]
    ]
    if changed:
        warnings.warn(
            f"{path} was written with {'; '.join(changed)}: the resumed run will not be bit-exact",
            stacklevel=4,
        )


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file in one step: after a kill at any instant either the old or the new one exists.

    Unfinished files that killed processes left for the same path are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.partial")
    for name in os.listdir(path.parent):
        if (found := unfinished.fullmatch(name)) and not is_running(int(found[1])):
            path.with_name(name).unlink(missing_ok=True)
    # the process id keeps two writers apart
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)


def require_same_layout(found: Any, expected: Any, path: str | Path) -> None:
    """Raise if keys, shapes or dtypes differ from those of `expected`."""
    layouts, right = ({n: _layout(v) for n, v in leaves(part)} for part in (found, expected))
    differences = [f"{name}: missing" for name in right if name not in layouts]
    differences += [f"{name}: not expected" for name in layouts if name not in right]
    differences += [
        f"{name}: found {layouts[name]}, expected {right[name]}"
        for name in right
        if layouts.get(name, right[name]) != right[name]
    ]
    if more := differences[_DIFFERENCES_SHOWN:]:
        differences[_DIFFERENCES_SHOWN:] = [f"and {len(more)} more"]
    if differences:
        raise UnreadableFile(f"{path} does not fit:\n  " + "\n  ".join(differences))


def _layout(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def is_running(process: int) -> bool:
    """Whether a process of this machine runs; one that was killed may wait for its parent."""
    try:
        os.kill(process, 0)  # signal 0 only checks
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    stat = Path(f"/proc/{process}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def _is_intact(path: Path) -> bool:
    """Whether the zip archive's checksums hold; torch.load verifies none of them."""
    with path.open("rb") as file:  # a missing file raises FileNotFoundError
        try:
            archive = ZipFile(file)
            # torch reads an entry marked as a folder as empty and leaves its tensor uninitialised
            is_marked = any(part.external_attr & _FOLDER for part in archive.infolist())
            return not is_marked and archive.testzip() is None
        except (BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error):
            return False  # the damage is in the names, lengths or flags


def _without_numpy_scalars(value: Any) -> Any:
    """Python numbers in place of numpy scalars, which `weights_only` refuses to read."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        plain = copy.copy(value)  # keeps the attributes of a state_dict
        plain.clear()
        for key, item in value.items():
            plain[_without_numpy_scalars(key)] = _without_numpy_scalars(item)
        return plain
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy_scalars, value))
    return value


def _cause(error: Exception) -> str:
    """The first sentence of the error, without torch's advice to trust the file."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return (text.strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
