"""`esper train`: train Tamiyo to grow networks, then compare it with other controllers."""

import sqlite3
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import tyro

from esper.cli import stop_after_signal, this_command
from esper.cli.evaluate import PresetName, evaluate_with_bar
from esper.cli.sites import function_named
from esper.leyline.records import RoundRecord
from esper.nissa.console import ProgressSink
from esper.nissa.database import RunDatabase, reasons_if_all_rolled_back
from esper.nissa.event_sink import EventSink
from esper.nissa.run_view import SMOOTHED_ROUNDS
from esper.nissa.tensorboard import TensorBoardSink, log_picture
from esper.runtime.devices import machine_facts
from esper.runtime.interruption import stop_on_interrupt
from esper.runtime.plain_config import differences, to_plain
from esper.simic.agent.ppo import TrainingFailed
from esper.simic.growth.comparison import PRESETS as COMPARISONS
from esper.simic.growth.comparison import prepare
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.hosts_and_data import choice_labels, host_kind, with_checksum
from esper.simic.growth.run_folder import RunFiles, RunFolder, read_config
from esper.simic.growth.train_config import PRESETS, TrainConfig

Sinks = Sequence[Callable[[], EventSink]]
SHOWN: dict[str, Callable[[float], str]] = {
    "episode/lead": lambda lead: f"{100 * lead:+.1f} points over ungrown siblings",
    "episode/added_params": lambda added: f"{added:+,.0f} params",
}


def command(arguments: list[str]) -> Callable[..., None]:
    """The command, with the defaults of the preset or config that `arguments` name."""
    chosen, defaults = defaults_of(arguments)

    def train(
        settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = defaults,
        preset: PresetName = chosen,
        config: Path | None = None,
        out: Path | None = None,
        resume: Path | None = None,
        sink: tuple[str, ...] = (),
    ) -> None:
        """Train a controller (Tamiyo) to grow networks; without arguments, on MNIST-1D in a few minutes.

        Ctrl-C, SIGTERM and SIGHUP finish the step, save, and print the command that continues.

        Args:
            preset: quick (two CPU cores) or full (a GPU); other flags change it
            config: the config.json of another run, in place of a preset; other flags change it
            out: the run's folder; runs/PRESET-NUMBER by default
            resume: the folder of a run to continue, bit-exact
            sink: classes that record the metrics too, as module:Class; see docs/metrics.md
        """
        sinks = [function_named(name) for name in sink]
        if resume and (settings != PRESETS[chosen] or out is not None or config is not None):
            raise ValueError(
                f"--resume {resume} uses the settings in {RunFiles(resume).config}; leave out "
                "other flags"
            )
        if resume is not None:
            RunFiles(resume).read_config()  # raises before a folder without a run is locked
            run_training(RunFolder(resume), sinks=sinks)
            return
        settings = with_checksum(settings)
        folder = out or _free_folder("config" if config else preset)
        training = GrowthTraining(settings)  # finds mistakes before the folder is made
        prepare(settings, COMPARISONS["quick"])
        run_training(RunFolder.create(folder, settings), training, sinks)

    return train


def defaults_of(arguments: list[str]) -> tuple[PresetName, TrainConfig]:
    """The name of the preset on a command line, and the settings that its flags change."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--task", "--data"):
        parser.add_argument(flag, nargs="?")
    given = parser.parse_known_args(arguments)[0]
    if given.preset and given.config:
        raise ValueError("--preset and --config are both where settings start; use one of them")
    # tyro refuses an unknown preset
    name: PresetName = given.preset if given.preset in PRESETS else "quick"
    settings = PRESETS[name]
    if given.config:  # a new run has its own checksum
        settings = replace(read_config(Path(given.config)), data_checksum="")
    if given.data and not given.task and not settings.data:
        settings = replace(settings, task="data", data=given.data)
    return name, settings


def run_training(
    folder: RunFolder, training: GrowthTraining | None = None, sinks: Sinks = ()
) -> None:
    """Train a new run, or the one in the folder; then evaluate it."""
    files = folder.files
    resume_command = f"{this_command()} train --resume {files.path}"
    with folder:
        training = training or folder.resume()
        print(describe(training, files))
        try:
            stopped_by = _train(training, folder, sinks)
        except (OSError, sqlite3.Error, TrainingFailed, ValueError) as error:
            where = f"{files.database}: " if isinstance(error, sqlite3.Error) else ""
            raise ValueError(
                f"{where}{error}\nthe run stopped in round {training.rounds_done + 1}; resume from "
                f"its last checkpoint with\n  {resume_command}"
            ) from error
    if stopped_by is not None:
        done = f"stopped after {training.rounds_done} of {training.config.rounds} rounds"
        stop_after_signal(stopped_by, f"{done}; resume with\n  {resume_command}")
    if reasons := reasons_if_all_rolled_back(files.database):
        raise ValueError(
            f"every host was rolled back in every round ({reasons}), so nothing was learned; start "
            "a new run with other settings, such as a lower --host-learning-rate"
        )
    comparison = evaluate_with_bar(files.path, "quick")
    comparison.save(files.path)
    log_picture(files.path, "evaluation", comparison.figures())
    print(comparison.brief())
    print(f'Grow your model with it: esper.grow(..., controller="{files.controller}")')
    watch = f"{this_command()} watch {files.path}"
    print(f"Everything is in {files.path}; look at it with: {watch}")


def describe(training: GrowthTraining, files: RunFiles) -> str:
    """Hosts, controller, device and size of a run."""
    config, hosts = training.config, training.environment.host_batch
    weights = sum(weight.numel() for weight in training.agent.policy.parameters())
    start = f"from round {training.rounds_done + 1} " if training.rounds_done else ""
    return (
        f"{config.data or config.task} on {hosts.task.device}, {hosts.find_kernels()} kernels; "
        f"seeds: {', '.join(hosts.blueprint_names)}\n"
        f"trained on {len(config.training_widths)} {host_kind(config, hosts.task)} hosts with "
        f"{config.num_layers} layers of {', '.join(map(str, config.widths))} and "
        f"{', '.join(config.variants)}\n"
        f"held out: {', '.join(config.held_out_widths)} and {', '.join(config.held_out_variants)}\n"
        f"controller: {weights:,} weights on {training.agent.device}, torch {torch.__version__}\n"
        f"{config.rounds} rounds {start}of {config.num_envs} hosts x {config.growth.num_steps} "
        f"decisions x {config.host_batch.minibatches} minibatches; writing to {files.path}"
    )


def _train(training: GrowthTraining, folder: RunFolder, more_sinks: Sinks = ()) -> int | None:
    """Train to the last round or to a signal, then write the checkpoint; returns the signal."""
    config, files = training.config, folder.files
    with ExitStack() as stack, stop_on_interrupt() as should_stop:
        database = stack.enter_context(_open_database(training, files))
        done, window = training.rounds_done, SMOOTHED_ROUNDS
        curves = TensorBoardSink(files.path, first_step=done + 1, settings=to_plain(config))
        text = "the first run compiles CPU kernels: about a minute, once"
        bar = ProgressSink(config.rounds, SHOWN, unit="rounds", done=done, window=window, text=text)
        sinks: list[EventSink] = [curves, bar, *(make() for make in more_sinks)]
        for sink in sinks:
            stack.enter_context(sink)

        def save() -> None:
            database.flush()  # first: a resumed run needs the rounds before its checkpoint
            folder.save(training)

        def on_round(record: RoundRecord) -> None:
            database.add(record)
            for sink in sinks:
                sink.record(record.round, record.metrics)
            if record.round % config.checkpoint_every == 0:
                save()

        training.run(on_round, should_stop=should_stop)
        save()
        return should_stop.signal


def _open_database(training: GrowthTraining, files: RunFiles) -> RunDatabase:
    """The run's database; warns if rounds are missing, or if a resumed run may not be bit-exact."""
    details = {"device": str(training.agent.device), **machine_facts()}
    done, environment = training.rounds_done, training.environment
    choices, space = choice_labels(environment), environment.action_space
    database = RunDatabase(
        files.database, space, choices=choices, details=details, rounds_done=done
    )
    if missing := done - database.rounds_found:
        print(f"warning: {files.database} lacks {missing} of the {done} rounds before this one")
    changed = differences(details, {**details, **database.previous_details})
    if done and changed:
        effect = "the results will not be bit-exact those of a run that never stopped"
        print(f"warning: {'; '.join(changed)} before; {effect}")
    return database


def _free_folder(preset: str) -> Path:
    """The first folder that does not exist."""
    number = next(n for n in count(1) if not Path("runs", f"{preset}-{n}").exists())
    return Path("runs") / f"{preset}-{number}"
