"""Tasks: data sets as tensors on a device, and the order in which each host reads them.

    task = mnist1d()                                        # one view of one data set
    task = Task.from_arrays(x, y)                           # your data
    task = stack([task, permuted(task, rng_seed=1), few_rows(task, 600)])     # three
    rows = minibatch_indices(0, host_ids, range(20), 100, task.num_rows[view_ids])

Controllers and rewards see the training and validation rows. The test rows are sealed:
`task.held_out.open()` returns them once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from esper.kasmina.locality import locality
from esper.leyline.constants import SiteKind
from esper.tolaria.data_files import mnist1d_rows, read_data, read_idx, split_rows
from esper.tolaria.randomness import fold

_PURPOSE = -1  # first part of the keys for the order of rows; other keys start with a host id

DATA_DIR = Path("data")
FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it

PUBLISHED_RNG_SEED = 42  # of the published MNIST-1D


class HeldOut:
    """Test rows `[V, rows, ...]` and their labels, which can be read once."""

    def __init__(self, x: Tensor, y: Tensor):
        self._rows: tuple[Tensor, Tensor] | None = (x, y)

    def open(self) -> tuple[Tensor, Tensor]:
        """The rows and labels; a second call raises, since rows used twice are not a test."""
        x, y = self.sealed()
        self._rows = None
        return x, y

    @property
    def is_sealed(self) -> bool:
        return self._rows is not None

    def sealed(self) -> tuple[Tensor, Tensor]:
        """The rows and labels, to check or to copy them; they stay sealed."""
        if self._rows is None:
            raise RuntimeError("the test rows were read already; they can be read once")
        return self._rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """V views of a data set, of one input shape and set of classes; a host is given one view."""

    names: tuple[str, ...]  # of the views
    train_x: Tensor  # [V, rows, *input_shape]
    train_y: Tensor  # [V, rows]
    num_rows: Tensor  # [V], on the CPU: training rows of each view; the rest is padding
    validation_x: Tensor  # [V, rows, *input_shape]
    validation_y: Tensor  # [V, rows]
    held_out: HeldOut
    num_classes: int

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        *,
        x_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        name: str = "data",
        standardise: bool = True,
        rng_seed: int = 0,
    ) -> "Task":
        """Your data as a task: inputs and integer labels, one per row.

        `x` is `[rows, features]`, `[rows, channels, positions]` or `[rows, channels, height,
        width]`. Without test rows, a random sixth of the rows becomes the test rows; the same for
        validation. `standardise` scales each feature or channel by the training rows.
        """
        given = {"x": (x, y), "x_val": (x_val, y_val), "x_test": (x_test, y_test)}
        rows = {
            split: _checked_rows(split, *pair)
            for split, pair in given.items()
            if any(values is not None for values in pair)
        }
        for split in ("x_test", "x_val"):
            if split not in rows:
                rows[split], rows["x"] = _random_sixth(*rows["x"], rng_seed)
        train, validation, test = ([part.unsqueeze(0) for part in rows[split]] for split in given)
        task = cls(
            names=(name,),
            train_x=train[0],
            train_y=train[1],
            num_rows=torch.tensor([train[1].shape[1]]),
            validation_x=validation[0],
            validation_y=validation[1],
            held_out=HeldOut(test[0], test[1]),
            num_classes=_num_classes(torch.cat((train[1], validation[1], test[1]), dim=1)),
        )
        return task.map(lambda x: _standardised(x, task.train_x)) if standardise else task

    def __post_init__(self) -> None:
        """Bounds checks; the compiled kernels do none."""
        self._check_rows("train", self.train_x, self.train_y)
        self._check_rows("validation", self.validation_x, self.validation_y)
        if self.held_out.is_sealed:
            self._check_rows("test", *self.held_out.sealed())
        counts, available = self.num_rows, self.train_y.shape[1]
        is_count = counts.shape == (self.num_views,) and counts.dtype == torch.int64
        if not is_count or bool(((counts < 1) | (counts > available)).any()):
            raise ValueError(
                f"num_rows is {counts.dtype} {counts.tolist()}; expected {self.num_views} x int64 "
                f"from 1 to {available}, the rows of train_x"
            )

    def _check_rows(self, name: str, x: Tensor, y: Tensor) -> None:
        if len(x) != self.num_views or x.shape[2:] != self.train_x.shape[2:]:
            raise ValueError(
                f"{name}_x is {tuple(x.shape)}; expected [{self.num_views} views, rows, "
                f"*{self.input_shape}]"
            )
        if y.shape != x.shape[:2] or y.dtype != torch.int64:
            raise ValueError(
                f"{name}_y is {y.dtype} {tuple(y.shape)}; expected int64 {tuple(x.shape[:2])}"
            )
        if x.is_meta:
            return  # has no values
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name}_x is not finite; replace NaN and inf by numbers")
        is_wrong = (y < 0) | (y >= self.num_classes)
        if bool(is_wrong.any()):
            raise ValueError(
                f"{name}_y: label {int(y[is_wrong][0])}; use 0 to {self.num_classes - 1}"
            )

    @property
    def num_views(self) -> int:
        return len(self.names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train_x.shape[2:])

    @property
    def site_kind(self) -> SiteKind:
        """The kind of the inputs: vector, series or image."""
        return (SiteKind.VECTOR, SiteKind.SERIES, SiteKind.IMAGE)[len(self.input_shape) - 1]

    @property
    def device(self) -> torch.device:
        return self.train_x.device

    @cached_property
    def locality(self) -> Tensor:
        """Locality of each view's training rows, `[V]` on the CPU; see `locality`."""
        views = zip(self.train_x, self.num_rows.tolist(), strict=True)
        return torch.tensor([locality(rows[:count]) for rows, count in views])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Task":
        """The task on a device, its inputs in a floating-point type."""
        return replace(
            self.map(lambda x: x.to(device, dtype)),
            train_y=self.train_y.to(device),
            validation_y=self.validation_y.to(device),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "Task":
        """The task with `change` applied to all inputs, also the sealed ones."""
        test_x, test_y = self.held_out.sealed()
        return replace(
            self,
            train_x=change(self.train_x),
            validation_x=change(self.validation_x),
            held_out=HeldOut(change(test_x), test_y),
        )


TASKS: dict[str, Callable[..., Task]] = {}


def task(load: Callable[..., Task]) -> Callable[..., Task]:
    """Register a function that returns a task under its name, for `esper train --task NAME`.

    If its first argument can be given by position, `--data PATH` is that argument.
    """
    if load.__name__ in TASKS:
        raise ValueError(f"task {load.__name__!r} is registered already")
    TASKS[load.__name__] = load
    return load


@task
def data(path: Path | str) -> Task:
    """The rows in an `.npz` file, or in a folder of IDX or CIFAR-10 binary files.

    An `.npz` file holds the arrays `x` and `y` and, if there are splits, `x_val`, `y_val`, `x_test`
    and `y_test`: see `Task.from_arrays`.
    """
    return Task.from_arrays(**read_data(path), name=Path(path).stem)


@task
def mnist1d(
    *, data_dir: Path | str = DATA_DIR, fresh_test_rows: int = 0, fresh_rng_seed: int = 1
) -> Task:
    """MNIST-1D (Greydanus 2020), `[1, 40]`: 3200 rows to train, 800 to validate, 1000 to test.

    `fresh_test_rows` replaces the test rows by that many newly generated ones. Generated rows are
    stored in `data_dir`; if the file exists, the package `mnist1d` is not needed.
    """
    if fresh_test_rows and fresh_rng_seed == PUBLISHED_RNG_SEED:
        raise ValueError(
            f"fresh_rng_seed={fresh_rng_seed} generates the training rows again; use another"
        )
    x, y = mnist1d_rows(Path(data_dir), num_rows=5000, rng_seed=PUBLISHED_RNG_SEED)
    if fresh_test_rows:
        x_test, y_test = mnist1d_rows(Path(data_dir), fresh_test_rows, fresh_rng_seed)
        x, y = np.concatenate((x[:4000], x_test)), np.concatenate((y[:4000], y_test))
    return Task.from_arrays(**split_rows(x, y, 3200, 800), name="mnist1d", standardise=False)


@task
def digits() -> Task:
    """scikit-learn's 8x8 digits, `[1, 8, 8]`: 1197 rows to train, 300 to validate, 300 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = images[order].reshape(-1, 1, 8, 8)
    return Task.from_arrays(**split_rows(images, labels[order], 1197, 300), name="digits")


@task
def fashion_mnist(folder: Path | str = FASHION_MNIST_DIR) -> Task:
    """Fashion-MNIST, `[1, 28, 28]`: 50000 rows to train, 10000 to validate, 10000 to test.

    `folder` holds the four idx files, gzipped or not.
    """
    return Task.from_arrays(**read_idx(Path(folder)), name="fashion_mnist")


def permuted(task: Task, rng_seed: int) -> Task:
    """The task with the positions of its inputs permuted, which removes locality."""
    rng = torch.Generator().manual_seed(rng_seed)
    order = torch.randperm(task.train_x[0, 0].numel(), generator=rng).to(task.device)
    changed = task.map(lambda x: x.flatten(2)[..., order].view_as(x))
    return _renamed(changed, f"permuted {rng_seed}")


def few_rows(task: Task, num_rows: int) -> Task:
    """The task with only the first `num_rows` training rows."""
    if not 1 <= num_rows <= int(task.num_rows.min()):
        raise ValueError(f"num_rows={num_rows}; {task.names} has {task.num_rows.tolist()} rows")
    fewer = replace(
        task,
        train_x=task.train_x[:, :num_rows],
        train_y=task.train_y[:, :num_rows],
        num_rows=torch.full_like(task.num_rows, num_rows),
    )
    return _renamed(fewer, f"{num_rows} rows")


def noisy(task: Task, scale: float, rng_seed: int) -> Task:
    """The task with fixed Gaussian noise added to its inputs."""
    rng = torch.Generator().manual_seed(rng_seed)
    changed = task.map(lambda x: x + scale * torch.randn(x.shape, generator=rng).to(x))
    return _renamed(changed, f"noise {scale}")


def stack(tasks: Sequence[Task]) -> Task:
    """Tasks of one input shape as the views of a single task."""
    first = tasks[0]
    for task in tasks:
        given, expected = (
            (t.input_shape, t.num_classes, t.validation_y.shape[1]) for t in (task, first)
        )
        if given != expected:
            raise ValueError(
                f"{task.names} does not stack with {first.names}: input shape, classes and "
                f"validation rows are {given}, not {expected}"
            )
    most = max(task.train_y.shape[1] for task in tasks)
    test_x, test_y = zip(*(task.held_out.sealed() for task in tasks), strict=True)
    return Task(
        names=tuple(name for task in tasks for name in task.names),
        train_x=torch.cat([_padded(task.train_x, most) for task in tasks]),
        train_y=torch.cat([_padded(task.train_y, most) for task in tasks]),
        num_rows=torch.cat([task.num_rows for task in tasks]),
        validation_x=torch.cat([task.validation_x for task in tasks]),
        validation_y=torch.cat([task.validation_y for task in tasks]),
        held_out=HeldOut(torch.cat(test_x), torch.cat(test_y)),
        num_classes=first.num_classes,
    )


def minibatch_indices(
    rng_seed: int, host_ids: Tensor, steps: range, batch_size: int, num_rows: Tensor | int
) -> Tensor:
    """The rows that each host reads in some minibatch steps, `[len(steps), P, batch_size]`.

    A host reads all its `num_rows` (an int, or `[P]` on the CPU) in a new random order each epoch;
    minibatches may cross the end of an epoch. The rows at a step are a function of `rng_seed`, the
    host id and the step only, not of the other hosts or the device, so experiments can be paired.
    """
    device = host_ids.device
    counts = torch.as_tensor(num_rows).expand(len(host_ids))
    rows = torch.empty(len(host_ids), len(steps) * batch_size, dtype=torch.int64, device=device)
    first, last = steps.start * batch_size, steps.stop * batch_size
    for count in sorted(set(counts.tolist())):  # shuffle hosts with equally many rows together
        alike = (counts == count).nonzero().squeeze(1).to(device)
        rows[alike] = _reading_order(rng_seed, host_ids[alike], range(first, last), count)
    return rows.view(len(host_ids), len(steps), batch_size).transpose(0, 1)


def _reading_order(rng_seed: int, host_ids: Tensor, positions: range, count: int) -> Tensor:
    """The rows that hosts with `count` rows read at these positions, `[P, len(positions)]`.

    Every row gets a hash in every epoch; sorting the hashes shuffles the rows. The low bits of a
    key are its row, so the sorted keys give the order.
    """
    first_epoch = positions.start // count
    num_epochs = (positions.stop - 1) // count + 1 - first_epoch
    bits, device = count.bit_length(), host_ids.device
    rows = torch.arange(count, device=device)
    epochs = torch.arange(first_epoch, first_epoch + num_epochs, device=device).unsqueeze(1)
    keys = fold(rng_seed, _PURPOSE, host_ids.view(-1, 1, 1), epochs, rows)
    keys &= -1 << bits
    keys |= rows
    if keys.device.type == "cpu":
        ordered = torch.from_numpy(np.sort(keys.numpy()))  # eight times as fast as torch's sort
    else:
        ordered = keys.sort().values
    ordered &= (1 << bits) - 1
    skipped = positions.start - first_epoch * count
    return ordered.flatten(1)[:, skipped : skipped + len(positions)]


def _renamed(task: Task, variant: str) -> Task:
    return replace(task, names=tuple(f"{name}, {variant}" for name in task.names))


def _padded(rows: Tensor, length: int) -> Tensor:
    """`[V, rows, ...]` padded with zeros to a length."""
    missing = rows.new_zeros(rows.shape[0], length - rows.shape[1], *rows.shape[2:])
    return torch.cat([rows, missing], dim=1)


def _checked_rows(name: str, x: ArrayLike | None, y: ArrayLike | None) -> tuple[Tensor, Tensor]:
    """Inputs as float32 and labels as int64; `name` is that of the inputs."""
    labels_name = name.replace("x", "y", 1)
    if x is None or y is None:
        raise ValueError(f"{name} and {labels_name} belong together; give both or none")
    inputs, labels = (np.asarray(v.detach().cpu() if isinstance(v, Tensor) else v) for v in (x, y))
    shape = inputs.shape
    if inputs.dtype.kind not in "biuf" or inputs.ndim not in (2, 3, 4) or not inputs.size:
        raise ValueError(
            f"{name} is {inputs.dtype} {shape}; expected numbers [rows, features], [rows, channels, "
            "positions] or [rows, channels, height, width]"
        )
    if inputs.ndim == 4 and shape[3] in (1, 3, 4) and min(shape[1:3]) > 4:
        raise ValueError(
            f"{name} is {shape}; channels come first, as in {name}.transpose(0, 3, 1, 2)"
        )
    if labels.dtype.kind not in "iu" or labels.shape != shape[:1]:
        given = f"{labels_name} is {labels.dtype} {labels.shape}"
        raise ValueError(f"{given}; expected {shape[0]} integers, the numbers of the classes")
    with np.errstate(over="ignore"):
        rows = torch.from_numpy(inputs.astype(np.float32))
    return rows, torch.from_numpy(labels.astype(np.int64))


def _num_classes(labels: Tensor) -> int:
    """The number of classes; raises unless they are numbered from 0, without gaps."""
    found = set(torch.unique(labels).tolist())
    if len(found) == 1:
        raise ValueError(f"all rows have the label {min(found)}; use two classes or more")
    expected = set(range(len(found)))
    if found != expected:
        raise ValueError(
            f"label {min(found - expected)}, but none is {min(expected - found)}; number the "
            f"{len(found)} classes 0 to {len(found) - 1}"
        )
    return len(found)


def _random_sixth(
    x: Tensor, y: Tensor, rng_seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A sixth of the rows, sampled at random, and the others."""
    if len(y) < 6:
        raise ValueError(f"x has {len(y)} rows to split; use more, or give x_val and x_test")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(rng_seed))
    sixth, others = order[: len(y) // 6], order[len(y) // 6 :]
    return (x[sixth], y[sixth]), (x[others], y[others])


def _standardised(x: Tensor, reference: Tensor) -> Tensor:
    """Inputs with each feature or channel standardised by the training rows."""
    axes = (0, 1, *range(3, x.dim()))
    deviation, mean = torch.std_mean(reference, dim=axes, correction=0, keepdim=True)
    return (x - mean) / torch.where(deviation > 0, deviation, 1.0)
