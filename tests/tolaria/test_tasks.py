"""Tasks: the rows are the published ones, the test rows stay sealed, and every host reads its own order."""

import gzip
import random
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.constants import SiteKind
from esper.tolaria import data_files, tasks
from esper.tolaria.tasks import HeldOut, Task, few_rows, minibatch_indices, noisy, permuted, stack
from support.populations import random_task


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def mnist1d(data_dir):
    return lambda **options: tasks.mnist1d(data_dir=data_dir, **options)


def test_mnist1d_is_the_published_set_split_three_ways(mnist1d):
    from mnist1d.data import get_dataset_args, make_dataset

    published = make_dataset(get_dataset_args())
    task = mnist1d()
    x_test, y_test = task.held_out.open()
    x = torch.cat([task.train_x[0], task.validation_x[0], x_test[0]]).squeeze(1)
    y = torch.cat([task.train_y[0], task.validation_y[0], y_test[0]])
    expected_x = np.concatenate([published["x"], published["x_test"]])
    torch.testing.assert_close(x, torch.from_numpy(expected_x).float(), rtol=0, atol=0)
    assert y.tolist() == [*published["y"], *published["y_test"]]
    assert task.num_rows.tolist() == [3200]
    assert task.validation_y.shape == (1, 800)
    assert y_test.shape == (1, 1000)
    assert (task.input_shape, task.num_classes) == ((1, 40), 10)
    assert task.site_kind == SiteKind.SERIES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(train_y=torch.full((1, 60), 5)), "train_y: label 5; use 0 to 4"),
        (dict(train_y=torch.full((1, 60), -1)), "train_y: label -1; use 0 to 4"),
        (dict(validation_y=torch.full((1, 60), 10**9)), "validation_y: label 1000000000"),
        (dict(train_y=torch.zeros(1, 60)), "train_y is torch.float32"),
        (dict(train_y=torch.zeros(1, 59, dtype=torch.int64)), r"train_y is .*\(1, 59\)"),
        (dict(num_rows=torch.tensor([61])), r"num_rows is .*\[61\]"),
        (dict(num_rows=torch.tensor([0])), r"num_rows is .*\[0\]"),
        (dict(num_rows=torch.tensor([60.0])), "num_rows is torch.float32"),
        (dict(num_rows=torch.tensor([60, 60])), r"num_rows is .*\[60, 60\]"),
        (dict(names=("one", "two")), "train_x is .* expected \\[2 views"),
        (dict(validation_x=torch.zeros(1, 60, 1, 19)), "validation_x is .*1, 19"),
        (dict(train_x=torch.full((1, 60, 1, 20), torch.nan)), "train_x is not finite"),
        (
            dict(held_out=HeldOut(torch.zeros(1, 4, 1, 20), torch.full((1, 4), 9))),
            "test_y: label 9",
        ),
    ],
)
def test_a_task_that_kernels_would_read_out_of_bounds_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(random_task(), **change)


def test_generating_leaves_the_global_generators_alone(tmp_path):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    data_files.generate_mnist1d(tmp_path / "few.npz", 20, rng_seed=5)
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_the_kept_file_is_enough_and_its_absence_is_explained(mnist1d, tmp_path, monkeypatch):
    expected = mnist1d().train_x
    monkeypatch.setitem(sys.modules, "mnist1d", None)
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    assert torch.equal(mnist1d().train_x, expected)
    with pytest.raises(ModuleNotFoundError, match="pip install mnist1d"):
        tasks.mnist1d(data_dir=tmp_path)


def test_the_test_rows_are_handed_out_once(mnist1d):
    task = mnist1d()
    task.held_out.open()
    with pytest.raises(RuntimeError, match="read once"):
        task.held_out.open()
    with pytest.raises(RuntimeError, match="read once"):
        permuted(task, rng_seed=0)


def test_fresh_test_rows_are_new_and_like_the_old(mnist1d):
    x, y = mnist1d(fresh_test_rows=500).held_out.open()
    old = mnist1d()
    assert x.shape == (1, 500, 1, 40)
    assert torch.bincount(y[0]).tolist() == [50] * 10
    assert not torch.isin(x[0, :, 0, 0], old.train_x[0, :, 0, 0]).any()
    assert abs(x.std().item() - old.train_x.std().item()) < 0.05


def test_permuting_moves_the_same_positions_in_every_split(mnist1d):
    task, other = mnist1d(), permuted(mnist1d(), rng_seed=4)
    order = [
        int((task.train_x[0, :50, 0] == column.unsqueeze(1)).all(0).nonzero())
        for column in other.train_x[0, :50, 0].unbind(-1)
    ]
    assert sorted(order) == list(range(40))
    assert order != list(range(40))
    assert torch.equal(other.validation_x, task.validation_x[..., order])
    assert torch.equal(other.held_out.open()[0], task.held_out.open()[0][..., order])
    assert not torch.equal(permuted(mnist1d(), rng_seed=5).train_x, other.train_x)


def test_noise_is_added_once_and_of_the_given_scale(mnist1d):
    task, other = mnist1d(), noisy(mnist1d(), 0.5, rng_seed=4)
    for before, after in zip(inputs(task), inputs(other), strict=True):
        assert abs((after - before).std().item() - 0.5) < 0.02
    assert torch.equal(noisy(mnist1d(), 0.5, rng_seed=4).train_x, other.train_x)


def inputs(task):
    return task.train_x, task.validation_x, task.held_out.open()[0]


def test_variants_stack_as_views_of_one_task(mnist1d):
    task = stack([mnist1d(), permuted(few_rows(mnist1d(), 600), 1), noisy(mnist1d(), 0.3, 2)])
    assert task.num_views == 3
    assert task.num_rows.tolist() == [3200, 600, 3200]
    assert task.train_x.shape == (3, 3200, 1, 40)
    assert task.validation_x.shape == (3, 800, 1, 40)
    assert task.names[1] == "mnist1d, 600 rows, permuted 1"
    assert torch.equal(task.train_x[1, :600], permuted(mnist1d(), 1).train_x[0, :600])
    assert (task.train_x[1, 600:] == 0).all()
    assert task.held_out.open()[0].shape == (3, 1000, 1, 40)


def test_each_view_has_the_locality_of_its_own_training_rows(mnist1d):
    base = mnist1d()
    variants = [base, permuted(base, 1), few_rows(base, 600), noisy(base, 1.0, 2)]
    found = stack(variants).locality
    assert found.tolist() == [variant.locality.item() for variant in variants]
    plain, shuffled, few, noise = found.tolist()
    assert plain > 0.8
    assert abs(few - plain) < 0.01  # padding is no row
    assert abs(shuffled) < 0.2
    assert 0.3 < noise < 0.6
    assert tasks.digits().locality.item() > 0.3


def test_locality_knows_nothing_of_rows_that_are_not_trained_on(mnist1d):
    base = few_rows(mnist1d(), 600)
    test_x, test_y = base.held_out.sealed()
    other = replace(
        base,
        train_x=torch.cat([base.train_x, torch.randn(1, 300, 1, 40)], dim=1),  # past num_rows
        train_y=torch.cat([base.train_y, torch.zeros(1, 300, dtype=torch.int64)], dim=1),
        validation_x=torch.randn_like(base.validation_x),
        held_out=HeldOut(torch.randn_like(test_x), test_y),
    )
    assert torch.equal(other.locality, base.locality)
    changed = replace(base, train_x=torch.randn_like(base.train_x))
    assert not torch.equal(changed.locality, base.locality)


def test_a_task_moves_with_its_sealed_rows(mnist1d):
    task = mnist1d().to("meta", torch.float64)
    x, _ = task.held_out.open()
    for tensor in (task.train_x, task.validation_x, x):
        assert (tensor.device.type, tensor.dtype) == ("meta", torch.float64)
    assert task.train_y.device.type == task.validation_y.device.type == "meta"
    assert task.num_rows.device.type == "cpu"


def test_digits_are_standardised_images_without_shared_rows():
    task = tasks.digits()
    x_test, y_test = task.held_out.open()
    assert (task.input_shape, task.site_kind) == ((1, 8, 8), SiteKind.IMAGE)
    assert [task.train_y.shape[1], task.validation_y.shape[1], y_test.shape[1]] == [1197, 300, 300]
    assert abs(task.train_x.mean().item()) < 1e-5
    assert abs(task.train_x.std().item() - 1) < 1e-5
    everything = torch.cat([task.train_x[0], task.validation_x[0], x_test[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797


def write_idx(path, array, compress):
    header = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path = path.with_name(path.name + ".gz") if compress else path
    path.write_bytes(gzip.compress(content) if compress else content)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("load", [tasks.fashion_mnist, tasks.data])
def test_a_folder_of_idx_files_is_read(tmp_path, compress, load):
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (n, 3, 2)) for name, n in [("train", 60), ("t10k", 20)]}
    labels = {name: np.arange(len(rows)) % 10 for name, rows in images.items()}
    for name in images:
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", images[name], compress)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", labels[name], compress)
    task = load(tmp_path)
    x_test, y_test = task.held_out.open()
    assert task.train_x.shape == (1, 50, 1, 3, 2)
    assert task.validation_y[0].tolist() == labels["train"][50:].tolist()
    assert y_test[0].tolist() == labels["t10k"].tolist()
    train = images["train"][:50]
    expected = (images["t10k"] - train.mean()) / train.std()
    torch.testing.assert_close(x_test[0, :, 0], torch.from_numpy(expected).float())


def test_missing_fashion_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte nor .*--data FOLDER"):
        tasks.fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"else", b"\0\0\x08", b"\0\0\x08\x01\0\0\0\x09few", b"\0\0\x0d\x01\0\0\0\x01" + bytes(4)],
)
@pytest.mark.parametrize("compress", [True, False])
def test_a_damaged_idx_file_is_named(tmp_path, content, compress):
    path = tmp_path / "train-images-idx3-ubyte"
    if compress:
        path, content = path.with_name(path.name + ".gz"), gzip.compress(content)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is damaged, or is not an idx"):
        tasks.data(tmp_path)


def test_a_gzip_file_cut_short_is_named(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((9, 3, 2)), compress=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        tasks.data(tmp_path)


def write_cifar(folder, num_batches=2, num_rows=30):
    """CIFAR-10's binary files: a label, then the red, green and blue bytes."""
    rng, written = np.random.default_rng(1), {}
    for name in [*(f"data_batch_{n + 1}" for n in range(num_batches)), "test_batch"]:
        labels, pixels = np.arange(num_rows) % 10, rng.integers(0, 256, (num_rows, 3, 32, 32))
        records = np.concatenate((labels[:, None], pixels.reshape(num_rows, -1)), axis=1)
        (folder / f"{name}.bin").write_bytes(records.astype(np.uint8).tobytes())
        written[name] = pixels
    return written


def test_a_folder_of_cifar_files_is_read(tmp_path):
    written = write_cifar(tmp_path)
    (tmp_path / "readme.html").write_text("also in the archive")
    task = tasks.data(tmp_path)
    assert task.train_x.shape == (1, 50, 3, 32, 32)
    assert task.validation_y[0].tolist() == [n % 10 for n in range(20, 30)]
    train = np.concatenate((written["data_batch_1"], written["data_batch_2"]))[:50]
    mean, std = (f(train, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    expected = torch.from_numpy((written["test_batch"] - mean) / std).float()
    torch.testing.assert_close(task.held_out.open()[0][0], expected)


def test_a_damaged_or_missing_cifar_file_is_named(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes(3072))
    with pytest.raises(ValueError, match="test_batch.bin has 3072 bytes, not a multiple of 3073"):
        tasks.data(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError, match="test_batch.bin"):
        tasks.data(tmp_path)


def test_a_folder_without_known_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no data that are known: .*test_batch.bin"):
        tasks.data(tmp_path)


ROWS, LABELS = np.random.default_rng(2).normal(3, 2, (60, 2, 5)), np.arange(60) % 3


def test_your_arrays_become_a_task():
    splits = dict(x_val=ROWS[40:50], y_val=LABELS[40:50], x_test=ROWS[50:], y_test=LABELS[50:])
    task = Task.from_arrays(ROWS[:40], torch.from_numpy(LABELS[:40]), **splits, name="mine")
    assert (task.names, task.num_classes, task.input_shape) == (("mine",), 3, (2, 5))
    assert task.num_rows.tolist() == [40]
    assert task.validation_y[0].tolist() == LABELS[40:50].tolist()
    train = ROWS[:40]
    mean, std = train.mean(axis=(0, 2), keepdims=True), train.std(axis=(0, 2), keepdims=True)
    expected = torch.from_numpy((ROWS[50:] - mean) / std).float()
    torch.testing.assert_close(task.held_out.open()[0][0], expected)
    unchanged = Task.from_arrays(ROWS[:40], LABELS[:40], **splits, standardise=False)
    torch.testing.assert_close(unchanged.validation_x[0], torch.from_numpy(ROWS[40:50]).float())


def test_rows_without_splits_are_split_at_random_and_each_is_used_once():
    x = np.arange(60.0).reshape(60, 1)
    tasks_by_seed = [Task.from_arrays(x, LABELS, rng_seed=s, standardise=False) for s in (0, 0, 1)]
    parts = [
        [part.flatten().tolist() for part in (t.train_x, t.validation_x, t.held_out.open()[0])]
        for t in tasks_by_seed
    ]
    assert [len(part) for part in parts[0]] == [42, 8, 10]
    assert sorted(value for part in parts[0] for value in part) == x.flatten().tolist()
    assert parts[0] == parts[1] != parts[2]
    for inputs, labels in zip(
        tasks_by_seed[0].train_x[0], tasks_by_seed[0].train_y[0], strict=True
    ):
        assert int(inputs) % 3 == int(labels)


def test_many_channels_of_few_positions_are_not_taken_for_channels_last():
    assert Task.from_arrays(np.ones((60, 64, 3, 3)), LABELS).input_shape == (64, 3, 3)


def test_a_constant_feature_stays_finite():
    x = np.stack((np.full(60, 7.0), np.arange(60.0)), axis=1)
    assert (Task.from_arrays(x, LABELS).train_x[..., 0] == 0).all()


BAD_ARRAYS = {
    "wrong axes": (dict(x=ROWS[0, 0]), r"x is float64 \(5,\); expected numbers \[rows, features\]"),
    "no rows": (dict(x=ROWS[:0], y=LABELS[:0]), r"x is float64 \(0, 2, 5\); expected"),
    "text": (dict(x=np.full((60, 2), "a")), "x is <U1 .*; expected numbers"),
    "channels last": (dict(x=np.zeros((60, 8, 8, 3))), "channels come first, as in x.transpose"),
    "too few labels": (dict(y=LABELS[:9]), r"y is int64 \(9,\); expected 60 integers"),
    "labels in a column": (dict(y=LABELS[:, None]), r"y is int64 \(60, 1\); expected 60 integers"),
    "labels not integers": (dict(y=LABELS / 2), r"y is float64 \(60,\); expected 60 integers"),
    "names as labels": (dict(y=np.full(60, "cat")), r"y is <U3 .*; expected 60 integers"),
    "NaN": (dict(x=np.where(ROWS > 6, np.nan, ROWS)), "x is not finite"),
    "too large": (dict(x=ROWS * 1e300), "x is not finite"),
    "one class": (dict(y=LABELS * 0), "all rows have the label 0; use two classes"),
    "labels from 1": (dict(y=LABELS + 1), "label 3, but none is 0; number the 3 classes 0 to 2"),
    "negative labels": (dict(y=LABELS - 1), "label -1, but none is 2"),
    "half a split": (dict(x_val=ROWS), "x_val and y_val belong together"),
    "other shape": (dict(x_test=ROWS[..., 1:], y_test=LABELS), r"test_x is \(1, 60, 2, 4\); expected"),
    "too few rows": (dict(x=ROWS[:5], y=LABELS[:5]), "x has 5 rows to split"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_arrays_that_are_no_task_are_refused(case, tmp_path):
    changes, message = BAD_ARRAYS[case]
    arrays = {"x": ROWS, "y": LABELS, **changes}
    with pytest.raises(ValueError, match=message):
        Task.from_arrays(**arrays)
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        tasks.data(tmp_path / "mine.npz")


def test_an_npz_file_is_read_with_its_splits(tmp_path):
    arrays = dict(x=ROWS, y=LABELS, x_val=ROWS[:7], y_val=LABELS[:7])
    np.savez_compressed(tmp_path / "mine.npz", **arrays)
    task, expected = tasks.data(tmp_path / "mine.npz"), Task.from_arrays(**arrays)
    assert task.names == ("mine",)
    for one, other in zip(inputs(task), inputs(expected), strict=True):
        assert torch.equal(one, other)


def test_a_file_that_is_no_npz_is_named(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(FileNotFoundError, match="mine.npz"):
        tasks.data(path)
    np.savez(path, x=ROWS, y=LABELS)
    whole = path.read_bytes()
    at = whole.index(b"PK\x01\x02") + 10  # the compression method of the first array
    unknown_method = whole[:at] + b"!" + whole[at + 1 :]
    for content in (b"", b"text", whole[:-30], whole[:900] + b"!" + whole[901:], unknown_method):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"mine.npz is damaged, or not an .npz file") as caught:
            tasks.data(path)
        assert "pickle" not in str(caught.value)
    np.savez(path, x=ROWS, y=np.array([{}, None] * 30))
    with pytest.raises(ValueError, match=r"mine.npz is damaged, or not an .npz file of numbers"):
        tasks.data(path)
    with path.open("wb") as file:
        np.save(file, ROWS)
    with pytest.raises(ValueError, match=r"mine.npz is damaged, or not an .npz file"):
        tasks.data(path)
    np.savez(path, x_train=ROWS, y=LABELS)
    with pytest.raises(ValueError, match=r"mine.npz holds .*x_train.*; use x and y"):
        tasks.data(path)


def test_a_task_is_registered_once(monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", {})

    @tasks.task
    def mine():
        return Task.from_arrays(ROWS, LABELS)

    assert list(tasks.TASKS) == ["mine"]


def test_a_checksum_is_that_of_names_and_contents(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"one")
    (tmp_path / "folder").mkdir()
    before, of_file = data_files.checksum(tmp_path), data_files.checksum(tmp_path / "a.bin")
    (tmp_path / "folder" / "below").write_bytes(b"not read")
    assert data_files.checksum(tmp_path) == before
    (tmp_path / "a.bin").write_bytes(b"two")
    assert data_files.checksum(tmp_path) != before
    assert data_files.checksum(tmp_path / "a.bin") != of_file
    (tmp_path / "a.bin").write_bytes(b"one")
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    assert data_files.checksum(tmp_path) != before


@given(
    st.integers(0, 2**40),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(0, 30),
)
def test_every_epoch_reads_every_row_once(rng_seed, num_rows, batch_size, first):
    counts = torch.tensor(num_rows)
    hosts = torch.arange(len(num_rows))
    everything = minibatch_indices(rng_seed, hosts, range(60), batch_size, counts)
    for host, count in enumerate(num_rows):
        read = everything[:, host].flatten()
        epochs = read[: len(read) // count * count].view(-1, count)
        assert (epochs.sort().values == torch.arange(count)).all()
    later = minibatch_indices(rng_seed, hosts, range(first, first + 3), batch_size, counts)
    assert torch.equal(later, everything[first : first + 3])


def test_a_hosts_order_does_not_depend_on_the_others():
    hosts, counts = torch.tensor([7, 3, 90]), torch.tensor([320, 60, 1000])
    together = minibatch_indices(5, hosts, range(4, 9), 32, counts)
    assert together.shape == (5, 3, 32)
    for i in range(3):
        alone = minibatch_indices(5, hosts[i : i + 1], range(4, 9), 32, counts[i : i + 1])
        assert torch.equal(alone[:, 0], together[:, i])


def test_orders_differ_between_hosts_epochs_and_rng_seeds():
    hosts = torch.tensor([0, 1])
    first = minibatch_indices(0, hosts, range(2), 500, 500)
    other = minibatch_indices(1, hosts, range(2), 500, 500)
    orders = torch.cat([first.flatten(0, 1), other.flatten(0, 1)])
    agreements = (orders.unsqueeze(0) == orders.unsqueeze(1)).sum(-1).fill_diagonal_(0)
    assert agreements.max() < 10  # two random orders of 500 agree in one place, give or take


def test_orders_are_uniform():
    """Over many hosts each row comes first, and each pair of rows comes in a row, equally often."""
    num_hosts, count = 20_000, 10
    orders = minibatch_indices(3, torch.arange(num_hosts), range(1), count, count)[0]
    expected = num_hosts / count
    for position in range(count):
        observed = torch.bincount(orders[:, position], minlength=count)
        chi_squared = ((observed - expected) ** 2 / expected).sum().item()
        assert chi_squared < 33.7  # 9 degrees of freedom: exceeded once in 10,000
    pairs = torch.bincount(orders[:, 4] * count + orders[:, 5], minlength=count**2)
    observed = pairs.view(count, count)[~torch.eye(count, dtype=torch.bool)]
    expected = num_hosts / (count * (count - 1))
    assert ((observed - expected) ** 2 / expected).sum().item() < 150  # 89 degrees of freedom
