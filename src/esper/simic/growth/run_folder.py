"""The folder of a growth run: its files, a lock, and the current and previous checkpoint.

| file | contents |
|---|---|
| `config.json` | every setting of the run |
| `checkpoint.pt` | the run after its last saved round; `checkpoint.previous.pt`: the save before |
| `controller.pt` | the controller at that round |
| `run.sqlite` | rounds, episodes and decisions |
| `events.out.*` | TensorBoard curves |
"""

import json
from pathlib import Path
from typing import Self

from esper.runtime.files import UnreadableFile, atomic_write
from esper.runtime.locked_folder import LockedFolder
from esper.runtime.plain_config import differences, from_plain, to_plain
from esper.simic.growth.growth_training import GrowthTraining
from esper.simic.growth.train_config import TrainConfig

_CONFIG_VERSION = 2


class RunFiles:
    """Paths of a run's files."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.checkpoint = path / "checkpoint.pt"
        self.previous_checkpoint = path / "checkpoint.previous.pt"
        self.controller = path / "controller.pt"
        self.database = path / "run.sqlite"

    def read_config(self) -> TrainConfig:
        if not self.config.exists():
            raise ValueError(f"{self.path} is not the folder of a run: it has no config.json")
        return read_config(self.config)


def read_config(path: Path) -> TrainConfig:
    """The settings in a `config.json`."""
    try:
        plain = json.loads(path.read_text())
        version = plain.pop("version", _CONFIG_VERSION)
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not the JSON of a config: {error}") from error
    if version != _CONFIG_VERSION:
        raise ValueError(f"{path} is a config of version {version}; expected {_CONFIG_VERSION}")
    return from_plain(TrainConfig, plain)


class RunFolder(LockedFolder):
    """The folder of a run in this process."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.files = RunFiles(Path(path))
        self._saved_round: int | None = None  # by this process

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig) -> Self:
        """A folder for a new run; raises if it already holds one."""
        folder = cls(path)
        if folder.files.config.exists():
            folder.close()
            raise ValueError(
                f"{path} already holds a run; resume it with `esper train --resume {path}`, or "
                "choose another folder with --out"
            )
        plain = {"version": _CONFIG_VERSION, **to_plain(config)}
        text = json.dumps(plain, indent=2, allow_nan=False) + "\n"
        atomic_write(folder.files.config, lambda file: file.write(text.encode()))
        return folder

    def resume(self) -> GrowthTraining:
        """The run after its last checkpoint, or from the start if none was written yet."""
        files, config = self.files, self.files.read_config()
        if not files.checkpoint.exists():
            if files.previous_checkpoint.exists() or files.controller.exists():
                raise ValueError(f"{files.checkpoint} is missing; {self._advice()}")
            return GrowthTraining(config)
        try:
            training = GrowthTraining.resume(files.checkpoint)
        except UnreadableFile as error:
            raise ValueError(f"{error}; {self._advice()}") from error
        if changed := differences(to_plain(config), to_plain(training.config)):
            raise ValueError(
                f"{files.config} was changed after the run had started: {'; '.join(changed)}. "
                "Change it back, or start a new run with these settings"
            )
        return training

    def _advice(self) -> str:
        """What to do about a checkpoint that cannot be resumed."""
        previous = self.files.previous_checkpoint
        try:
            GrowthTraining.resume(previous)
        except (UnreadableFile, FileNotFoundError):
            return "start a new run in another folder"
        before = f"{previous.name} is the checkpoint before it; to resume from there, run"
        return f"{before}\n  cp {previous} {self.files.checkpoint}"

    def save(self, training: GrowthTraining) -> None:
        """Write checkpoint and controller; the previous checkpoint is kept."""
        files = self.files
        if training.rounds_done == self._saved_round:
            return
        if files.checkpoint.exists():
            before = files.checkpoint.read_bytes()
            atomic_write(files.previous_checkpoint, lambda file: file.write(before))
        training.save(files.checkpoint)
        training.controller().save(files.controller)
        self._saved_round = training.rounds_done
