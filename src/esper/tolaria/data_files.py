"""Files of data sets as arrays: `.npz`, IDX and CIFAR-10 binary folders, and MNIST-1D.

    arrays = read_data("my_data.npz")     # or a folder
    task = Task.from_arrays(**arrays)

Every problem with a file is a ValueError or an OSError that names it.
"""

import gzip
import hashlib
import random
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from esper.runtime.files import atomic_write

NAMES = ("x", "y", "x_val", "y_val", "x_test", "y_test")
Arrays = dict[str, Any]  # arrays of these names; the splits may be missing

_CIFAR_SHAPE = (3, 32, 32)
_DAMAGE = (ValueError, EOFError, OSError, zlib.error)  # raised for the contents of a file


def read_data(path: Path | str) -> Arrays:
    """The rows and labels in an `.npz` file, or in a folder of IDX or CIFAR-10 binary files."""
    path = Path(path)
    if not path.is_dir():
        return _read_npz(path)
    if list(path.glob("data_batch_*.bin")):
        return _read_cifar(path)
    if list(path.glob("*-ubyte*")):
        return read_idx(path)
    raise ValueError(
        f"{path} has no data that are known: neither train-images-idx3-ubyte (or .gz) and the three "
        "files with it, nor data_batch_1.bin and test_batch.bin"
    )


def checksum(path: Path | str) -> str:
    """SHA-256 of a file with its name, or of all files in a folder."""
    path, digest = Path(path), hashlib.sha256()
    for file in sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def split_rows(x: np.ndarray, y: np.ndarray, num_train: int, num_validation: int) -> Arrays:
    """Rows to train on, then to validate on; the others are to test on."""
    ends = (num_train, num_train + num_validation)
    pairs = zip(np.split(x, ends), np.split(y, ends), strict=True)
    return dict(zip(NAMES, (array for pair in pairs for array in pair), strict=True))


def read_idx(folder: Path) -> Arrays:
    """Images `[rows, 1, height, width]` and labels of MNIST or Fashion-MNIST, gzipped or not."""
    kinds = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images", "labels")]
    x, y, x_test, y_test = (_read_idx_file(folder, kind) for kind in kinds)
    return _validate_on_last(x[:, None], y, x_test[:, None], y_test)


def mnist1d_rows(data_dir: Path, num_rows: int, rng_seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[rows, 1, 40]` and labels, read from `data_dir` or generated and stored there."""
    path = data_dir / f"mnist1d_{num_rows}_{rng_seed}.npz"
    if not path.exists():
        generate_mnist1d(path, num_rows, rng_seed)
    arrays = _read_npz(path)
    return arrays["x"][:, None], arrays["y"]


def generate_mnist1d(path: Path, num_rows: int, rng_seed: int) -> None:
    if num_rows % 10:
        raise ValueError(f"{num_rows} rows of MNIST-1D; it has ten classes, use a multiple of 10")
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} does not exist and the package that generates it is not installed: "
            "pip install mnist1d, or copy the file from a machine that has it"
        ) from error
    settings = get_dataset_args()
    settings.num_samples, settings.seed = num_rows, rng_seed
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    made = make_dataset(settings)  # seeds both generators
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    x = np.concatenate([made["x"], made["x_test"]]).astype(np.float32)
    y = np.concatenate([made["y"], made["y_test"]]).astype(np.int64)
    atomic_write(path, lambda file: np.savez(file, x=x, y=y))


def _read_npz(path: Path) -> Arrays:
    with path.open("rb") as content:
        try:
            with np.load(content) as file:
                arrays = dict(file.items())
        except (*_DAMAGE, AttributeError, TypeError, KeyError, RuntimeError, BadZipFile) as error:
            raise ValueError(
                f"{path} is damaged, or not an .npz file of numbers, as numpy.savez(path, x=x, y=y) "
                "writes"
            ) from error
    if not {"x", "y"} <= set(arrays) <= set(NAMES):
        raise ValueError(f"{path} holds {list(arrays)}; use x and y, and for splits {NAMES[2:]}")
    return arrays


def _read_cifar(folder: Path) -> Arrays:
    """CIFAR-10's binary version: records of a label and the bytes of a colour image."""
    batches = [_read_records(path) for path in sorted(folder.glob("data_batch_*.bin"))]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return _validate_on_last(x, y, *_read_records(folder / "test_batch.bin"))


def _read_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    content, size = np.fromfile(path, np.uint8), 1 + int(np.prod(_CIFAR_SHAPE))
    if len(content) == 0 or len(content) % size:
        raise ValueError(f"{path} has {len(content)} bytes, not a multiple of {size} as CIFAR-10's")
    records = content.reshape(-1, size)
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE), records[:, 0]


def _read_idx_file(folder: Path, kind: str) -> np.ndarray:
    """The bytes of an idx file, gzipped or not, in the shape that its header gives."""
    num_axes = 3 if kind.endswith("images") else 1
    path = folder / f"{kind}-idx{num_axes}-ubyte"
    zipped = path.with_name(path.name + ".gz")
    if not (path.exists() or zipped.exists()):
        raise FileNotFoundError(
            f"neither {path} nor {zipped.name} exists; name the folder of the four idx files with "
            "--data FOLDER (Fashion-MNIST: Debian's package dataset-fashion-mnist, or "
            "github.com/zalandoresearch/fashion-mnist, data/fashion)"
        )
    try:
        content = gzip.decompress(zipped.read_bytes()) if zipped.exists() else path.read_bytes()
        if content[:4] != bytes((0, 0, 8, num_axes)):
            raise ValueError("its header is another one")
        shape = np.frombuffer(content, ">i4", num_axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged, or is not an idx file of bytes ({error})") from error


def _validate_on_last(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
) -> Arrays:
    """Rows to train and to test on; the last sixth of the former becomes the validation rows."""
    first = len(x) - len(x) // 6
    splits = (x[:first], y[:first], x[first:], y[first:], x_test, y_test)
    return dict(zip(NAMES, splits, strict=True))
