"""Runs on a user's data: what is recorded, found again and refused."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import esper
from esper.cli import main, train
from esper.runtime.plain_config import to_plain
from esper.simic.growth.comparison import on_task
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.hosts_and_data import load_hosts, load_menu, load_task, training_hosts
from esper.simic.growth.run_folder import RunFiles, RunFolder
from esper.simic.growth.train_config import PRESETS
from support.training_configs import NETWORKS

MODULE = """
import numpy as np
import esper
from esper.kasmina.layers import Conv, Flatten, Linear, Relu
from esper.leyline.constants import SiteKind

@esper.tasks.task
def {name}(path=None):
    rows = np.random.default_rng(0).normal(size=(120, 1, 16))
    return esper.Task.from_arrays(rows, np.arange(120) % 2, name=str(path))

@esper.host
def {name}_host(input_shape, num_classes, widths, norm):
    return (*((Conv(width), Relu()) for width in widths), (Flatten(), Linear(num_classes)))

@esper.blueprint(SiteKind.SERIES)
def {name}_seed(site):
    return (Conv(site.width, kernel=1),)
"""


def write_rows(path, shape=(3, 8, 8), num_rows=120, rng_seed=0):
    rng, labels = np.random.default_rng(rng_seed), np.arange(num_rows) % 3
    np.savez(path, x=rng.integers(0, 256, (num_rows, *shape), dtype=np.uint8), y=labels)
    return path


def on_data(path, **changes):
    menu = PRESETS["quick"].menu
    return replace(NETWORKS, task="data", data=str(path), menu=menu, widths=(2, 4), **changes)


def with_batch(config, **changes):
    return replace(config, host_batch=replace(config.host_batch, **changes))


@pytest.fixture
def colour(tmp_path):
    """A run on colour images, of two rounds."""
    config = on_data(write_rows(tmp_path / "mine.npz"), rounds=2)
    return with_batch(config, validation_rows=12)


def test_a_run_on_colour_images_resumes_bit_exact(colour, tmp_path):
    whole, half = GrowthTraining(colour), GrowthTraining(colour)
    whole.run()
    half.run(should_stop=lambda: half.rounds_done == 1)
    assert half.rounds_done == 1
    half.save(tmp_path / "checkpoint.pt")
    resumed = GrowthTraining.resume(tmp_path / "checkpoint.pt")
    resumed.run()
    assert torch.equal(resumed.envs.episodes.accuracy, whole.envs.episodes.accuracy)
    for name, weight in whole.agent.policy.state_dict().items():
        assert torch.equal(weight, resumed.agent.policy.state_dict()[name]), name


@pytest.mark.parametrize(
    ("shape", "kind", "seeds"),
    [((12,), "mlp", 4), ((2, 16), "conv1d", 4), ((3, 8, 8), "conv2d", 4)],
)
def test_data_of_every_kind_have_hosts_and_seeds_that_fit(tmp_path, shape, kind, seeds):
    config = on_data(write_rows(tmp_path / "mine.npz", shape))
    task = load_task(config, ("plain",))
    hosts = load_hosts(config, task, ((2, 4, 2),))
    assert hosts == load_hosts(replace(config, host=kind), task, ((2, 4, 2),))
    menu = load_menu(config, task)
    assert len(menu) == seeds
    assert all(entry.fits(site) for entry in menu for site in hosts[0].sites)
    with pytest.raises(ValueError, match=r"none fits a slot"):
        load_menu(replace(config, menu=("attention",), host="mlp"), task)


def test_the_data_are_recorded_and_other_data_refused(colour, tmp_path, monkeypatch):
    path = tmp_path / "mine.npz"
    monkeypatch.chdir(tmp_path)
    training = GrowthTraining(replace(colour, data="mine.npz"))
    assert training.config.data == str(path)
    assert len(training.config.data_checksum) == 64
    training.save("checkpoint.pt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    GrowthTraining.resume(tmp_path / "checkpoint.pt")
    write_rows(path, rng_seed=1)
    with pytest.raises(ValueError, match=r"mine.npz has changed since the run was started"):
        GrowthTraining.resume(tmp_path / "checkpoint.pt")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine.npz"):
        GrowthTraining.resume(tmp_path / "checkpoint.pt")


def test_controllers_are_evaluated_on_a_users_data(colour, tmp_path):
    other = write_rows(tmp_path / "other.npz", (12,))
    there = on_task(colour, "data", str(other))
    assert (there.task, there.host, there.menu) == ("data", "auto", ())
    assert there.data_checksum
    training_hosts(there)
    back = on_task(there, "mnist1d")
    assert (back.task, back.data, back.data_checksum) == ("mnist1d", "", "")


def test_a_task_with_several_views_is_refused(monkeypatch):
    two = esper.tasks.stack([esper.tasks.mnist1d()] * 2)
    monkeypatch.setitem(esper.tasks.TASKS, "two", lambda: two)
    with pytest.raises(ValueError, match="task 'two' must return an esper.Task with one view"):
        training_hosts(replace(NETWORKS, task="two"))


# -- the command line -------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """The configs that `esper train` starts runs with; nothing is trained."""
    configs = []

    def note(folder, training=None, sinks=()):
        configs.append(folder.files.read_config())
        folder.close()

    monkeypatch.setattr(train, "run_training", note)
    return configs


SMALL = [
    "--device=cpu", "--widths", "2", "4", "--held-out-widths", "4-2-4", "--host_batch.num-types=2",
    "--host_batch.batch-size=8", "--host_batch.validation-rows=10", "--variants", "plain",
    "--held-out-variants", "permuted:3",
]  # fmt: skip


def test_data_are_named_by_their_path(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "mine.npz")
    main(["train", "--data", "mine.npz", *SMALL])
    main(["train", "--task=data", f"--data={tmp_path / 'mine.npz'}", *SMALL])
    assert started[0] == started[1]
    assert (started[0].task, started[0].data) == ("data", str(tmp_path / "mine.npz"))


def test_modules_register_tasks_hosts_and_blueprints(started, tmp_path, monkeypatch, registries):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "my_growth_module.py").write_text(MODULE.format(name="mine"))
    flags = ["--import", "my_growth_module", "--task", "mine", "--host", "mine_host"]
    main(["train", *flags, "--menu", "mine_seed", *SMALL])
    assert started[0].imports == ("my_growth_module",)
    assert training_hosts(started[0]).blueprint_names == ("mine_seed",)
    (tmp_path / "folder").mkdir()
    main(["train", *flags, "--data", "folder", *SMALL])  # an argument of the function
    assert training_hosts(started[1]).task.names[0] == str(tmp_path / "folder")


def test_modules_are_imported_for_a_config_that_is_read(tmp_path, monkeypatch, registries):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_other_module.py").write_text(MODULE.format(name="other"))
    plain = {**to_plain(NETWORKS), "imports": ["my_other_module"], "task": "other"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert RunFiles(tmp_path).read_config().task == "other"
    assert "other" in esper.tasks.TASKS


def test_a_run_starts_from_the_config_of_another(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (write_rows(tmp_path / f"{n}.npz", rng_seed=n) for n in (1, 2))
    main(["train", "--data", str(first), "--rounds", "7", *SMALL, "--out", "run"])
    start = ["train", "--config", "run/config.json"]
    main([*start, "--ppo.clip", "0.3", "--data", str(second)])
    expected = replace(started[0], data=str(second), ppo=replace(started[0].ppo, clip=0.3))
    assert replace(started[1], data_checksum=started[0].data_checksum) == expected
    assert started[1].data_checksum != started[0].data_checksum
    assert (tmp_path / "runs" / "config-1").exists()
    for wrong, message in [
        (["--preset", "full"], "--preset and --config"),
        (["--resume", "run"], "leave out other flags"),
    ]:
        with pytest.raises(SystemExit, match=message):
            main([*start, *wrong])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 99}', "config of version 99; expected 2"),
        ('{"version": 2, "roundz": 3}', "no setting 'roundz'; did you mean 'rounds'"),
        ('{"rounds": "many"}', "rounds='many'; expected int"),
        ("{", "is not the JSON of a config"),
        ("[1, 2]", "is not the JSON of a config"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.json").write_text(text)
    with pytest.raises(SystemExit, match=f"esper: .*{message}"):
        main(["train", "--config", "theirs.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data none.npz", ".*none.npz: No such file or directory"),
        ("--data text.npz", "text.npz is damaged, or not an .npz file"),
        ("--data nan.npz", "x is not finite"),
        ("--data one_class.npz", "all rows have the label 0"),
        ("--data few.npz", "few has 63 training and 12 validation rows, .* use these flags: --v"),
        ("--data folder", "folder has no data that are known"),
        ("--data", ""),
        ("--config none.json", "none.json"),
        ("--task fashion_mnist", "neither .*train-images-idx3-ubyte nor .*--data FOLDER"),
        ("--task digits --data few.npz", "task 'digits' does not read few.npz"),
        ("--task no_such_task", "no task 'no_such_task'; there are data, mnist1d"),
        ("--import no_such_module", "module 'no_such_module' cannot be imported"),
        ("--import boom", "module 'boom' cannot be imported: KeyError: 'no such key'$"),
    ],
)
def test_a_mistake_about_the_data_is_one_line_and_leaves_nothing(
    flags, message, tmp_path, monkeypatch
):
    mnist1d = esper.tasks.mnist1d()
    monkeypatch.setitem(esper.tasks.TASKS, "mnist1d", lambda: mnist1d)  # whatever the folder
    missing = (tmp_path / "fashion",)  # also where the data set is installed
    monkeypatch.setattr(esper.tasks.fashion_mnist, "__defaults__", missing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.npz").write_text("no numbers")
    (tmp_path / "boom.py").write_text("{}['no such key']")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rows, labels = np.zeros((90, 1, 16)), np.arange(90) % 2
    np.savez("few.npz", x=rows, y=labels)
    np.savez("nan.npz", x=rows + np.nan, y=labels)
    np.savez("one_class.npz", x=rows, y=labels * 0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        main(["train", *flags.split()])
    if message:  # the others are refused by the parser
        assert re.match(f"esper: .*{message}", str(stop.value))
        assert "\n" not in str(stop.value)
    assert sorted(tmp_path.iterdir()) == before


def test_the_flags_named_for_few_rows_work(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "few.npz", num_rows=90)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--data", "few.npz", "--device=cpu"])
    flags = str(stop.value).partition("use these flags: ")[2].split()
    main(["train", "--data", "few.npz", "--device=cpu", *flags])
    assert len(started) == 1


def test_changed_data_are_refused_by_resume(colour, tmp_path):
    training = GrowthTraining(colour)
    RunFolder.create(tmp_path / "run", training.config).close()
    write_rows(tmp_path / "mine.npz", rng_seed=1)
    with pytest.raises(SystemExit, match=r"mine.npz has changed since the run was started"):
        main(["train", "--resume", str(tmp_path / "run")])
