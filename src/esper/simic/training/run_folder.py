"""A run's folder: what lies where in it, one process at a time, and checkpoints that survive.

    with RunFolder.create("runs/first", config) as folder:
        folder.save(training)
    with RunFolder.reopen("runs/first") as folder:
        training = folder.resume()

| file | what |
|---|---|
| `config.json` | every setting of the run |
| `checkpoint.pt` | the run after its last saved round, `checkpoint.previous.pt` the one before |
| `controller.pt` | the controller as it was then |
| `run.sqlite` | rounds, episodes and decisions |
| `events.out.*` | TensorBoard's curves |
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from esper.leyline.files import UnreadableFile, atomic_write
from esper.leyline.plain_config import from_plain, to_plain
from esper.simic.training.config import TrainConfig
from esper.simic.training.growth_training import GrowthTraining
from esper.simic.training.locked_folder import LockedFolder


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def previous_checkpoint(self) -> Path:
        return self.path / "checkpoint.previous.pt"

    @property
    def controller(self) -> Path:
        return self.path / "controller.pt"

    @property
    def database(self) -> Path:
        return self.path / "run.sqlite"

    def read_config(self) -> TrainConfig:
        if not self.config.exists():
            raise ValueError(f"{self.path} is not the folder of a run: it has no config.json")
        try:
            plain = json.loads(self.config.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.config} is not JSON: {error}") from error
        return from_plain(TrainConfig, plain)


class RunFolder:
    """The folder of a run that is going on here; a lock keeps others out of it."""

    def __init__(self, path: str | Path):
        self.files = RunFiles(Path(path))
        self._folder = LockedFolder(path)
        self._saved_round: int | None = None  # by this process

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig) -> Self:
        """A folder for a new run; one that holds a run already is refused."""
        folder = cls(path)
        if folder.files.config.exists():
            folder.close()
            raise ValueError(
                f"{path} holds a run already; go on with `esper train --resume {path}`, "
                "or choose another folder with --out"
            )
        text = json.dumps(to_plain(config), indent=2, allow_nan=False) + "\n"
        atomic_write(folder.files.config, lambda file: file.write(text.encode()))
        return folder

    @classmethod
    def reopen(cls, path: str | Path) -> Self:
        """The folder of a run to go on with."""
        RunFiles(Path(path)).read_config()  # a folder without a run is not touched
        return cls(path)

    def resume(self) -> GrowthTraining:
        """The run after its last checkpoint, or from the beginning if it never came to one."""
        if not self.files.checkpoint.exists():
            return GrowthTraining(self.files.read_config())
        try:
            return GrowthTraining.resume(self.files.checkpoint)
        except UnreadableFile as error:
            raise ValueError(f"{error}; {self._way_out()}") from error

    def _way_out(self) -> str:
        """What to do about a checkpoint that cannot be gone on from."""
        previous = self.files.previous_checkpoint
        try:
            GrowthTraining.resume(previous)
        except (UnreadableFile, FileNotFoundError):
            return "train anew, in another folder"
        return (
            f"{previous.name} is the checkpoint before it: copy it to {self.files.checkpoint} to go "
            "on from there"
        )

    def save(self, training: GrowthTraining) -> None:
        """Checkpoint and controller; the checkpoint of an earlier round is kept beside it."""
        files = self.files
        if training.rounds_done == self._saved_round:
            return
        if files.checkpoint.exists():
            before = files.checkpoint.read_bytes()
            atomic_write(files.previous_checkpoint, lambda file: file.write(before))
        training.save(files.checkpoint)
        training.controller().save(files.controller)
        self._saved_round = training.rounds_done

    def close(self) -> None:
        """Let others in."""
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
