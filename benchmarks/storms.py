"""Storms: kill, flip, fill, race and fuzz small runs, and count what goes wrong.

    PYTHONPATH=tests python benchmarks/storms.py            # about ten minutes of CPU time
    PYTHONPATH=tests python benchmarks/storms.py --quick    # fewer cases

Each case runs in a child process forked from this one, which has torch and Esper loaded already.

| storm | what happens | what must hold |
|---|---|---|
| kill points | SIGKILL before or after each fsync, rename and unlink | resumes, ends as an unbroken run |
| damaged files | one flipped bit, or a truncation | refused by name, or the same contents |
| full disk | a small tmpfs without space (needs the right to mount) | one-line error, last file intact |
| races | five processes start in one folder | one runs, four are refused in one line |
| signals | SIGINT, SIGTERM, SIGHUP | saved, exit status 128 + signal, resumes |
| flags | wrong values for every flag of every command | one-line error or accepted, no traceback |

Bars: 0 unreadable, 0 silently wrong, 0 tracebacks.
"""

import argparse
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked children have no thread pools

import torch

import adapt_practice.__main__
import esper
import esper.cli
import esper.cli.evaluate
import esper.cli.gym
import esper.cli.sites
import esper.cli.train
import esper.runtime.files
from esper.growing.growth import Growth

torch.set_num_threads(1)

TIME_LIMIT_S = 60.0
MEMORY_LIMIT = 8 * 2**30
TRAIN = shlex.split(
    "train --task known_gains --import support.synthetic_hosts --rounds 4 --checkpoint-every 1 --device cpu --host-batch.num-types 1 "
    "--host-batch.envs-per-type 8 --host-batch.siblings 2 --ppo.num-minibatches 2 --ppo.ppo-epochs 1 "
    "--growth.num-steps 4 --host-batch.episode-steps 4 --policy.lstm-hidden-dim 8 "
    "--policy.slot-dim 8 --policy.blueprint-dim 8"
)
GYM = shlex.split(
    "gym CartPole-v1 --total-steps 256 --num-envs 4 --episodes 1 --save-every 1 --horizon 16 "
    "--ppo.ppo-epochs 1 --policy.lstm-hidden-dim 8"
)


# -- children -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int  # exit status, or minus the signal that ended it
    output: str
    timed_out: bool = False

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


def fork(work: Callable[[], object], folder: Path) -> tuple[int, Path]:
    """Start `work` in a child whose output goes to a file; returns its process id and that file."""
    log = Path(tempfile.mkstemp(dir=folder, prefix="log.")[1])
    process = os.fork()
    if process:
        return process, log
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        work()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # an uncaught error, shown as the interpreter would show it
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process: int, log: Path, limit_s: float = TIME_LIMIT_S) -> Ended:
    deadline = time.monotonic() + limit_s
    timed_out = False
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            timed_out = True
            deadline = float("inf")
        time.sleep(0.005)
    output = log.read_text(errors="replace")
    log.unlink()
    return Ended(os.waitstatus_to_exitcode(status), output, timed_out)


def run(work: Callable[[], object], folder: Path, limit_s: float = TIME_LIMIT_S) -> Ended:
    return wait(*fork(work, folder), limit_s)


def command(arguments: list[str]) -> Callable[[], None]:
    if arguments[:1] == ["adapt_practice"]:
        return lambda: adapt_practice.__main__.main(arguments[1:])
    return lambda: esper.cli.main(arguments)


# -- kill points ----------------------------------------------------------------------------------


def kill_at(point: int, after: bool) -> None:
    """End this process at its `point`-th fsync, rename or unlink, before or after the call."""
    count = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == point and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if count == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return guarded

    os.fsync, os.replace, os.unlink = wrapped(os.fsync), wrapped(os.replace), wrapped(os.unlink)


@dataclass
class Job:
    """Something that writes files, can be resumed, and whose end can be compared."""

    name: str
    start: Callable[[Path], Callable[[], object]]
    resume: Callable[[Path], Callable[[], object]]
    has_begun: Callable[[Path], bool]
    contents: Callable[[Path], Any]
    is_exact: bool = True  # a resumed run ends bit-equal to an unbroken one


def train_job(rounds: int = 4) -> Job:
    arguments = [str(rounds) if word == "4" and before == "--rounds" else word
                 for before, word in zip(["", *TRAIN], TRAIN, strict=False)]  # fmt: skip
    return Job(
        "train",
        lambda path: command([*arguments, "--out", str(path)]),
        lambda path: command(["train", "--resume", str(path)]),
        lambda path: (path / "config.json").exists(),
        lambda path: torch.load(path / "checkpoint.pt", weights_only=True),
    )


def gym_job(total_steps: int = 256) -> Job:
    arguments = [str(total_steps) if word == "256" else word for word in GYM]

    def resume(path: Path) -> Callable[[], object]:
        return command(["gym", "CartPole-v1", "--episodes", "1", "--out", str(path), "--resume"])  # fmt: skip

    return Job(
        "gym",
        lambda path: command([*arguments, "--out", str(path)]),
        resume,
        lambda path: (path / "checkpoint.pt").exists(),
        lambda path: torch.load(path / "checkpoint.pt", weights_only=True),
        is_exact=False,  # a resumed run begins new episodes
    )


def growth_job() -> Job:
    def work(path: Path) -> Callable[[], object]:
        return lambda: in_one_line(
            lambda: grow_small_model(path / "growth.pt", steps=24, save_every=3)
        )

    return Job(
        "Growth",
        work,
        work,
        lambda path: (path / "growth.pt").exists(),
        lambda path: torch.load(path / "growth.pt", weights_only=True)["contents"]["network"],
    )


def grow_small_model(path: Path, steps: int, save_every: int) -> Growth:
    """A training loop that resumes from `path` if it is there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )  # fmt: skip
    x = torch.randn(32, 6)
    y = torch.randint(3, (32,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = Growth(model, optimizer, example=x, decisions=steps + 1)
    if path.exists():
        growth.load(path)
    for step in range(growth.step, steps):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        growth.after_step()
        growth.decide(float(torch.exp(-loss.detach())))
        if (step + 1) % save_every == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            growth.save(path)
    return growth


def kill_points(job: Job, folder: Path, limit: int) -> Counter[str]:
    """Kill at every point (or `limit` of them, evenly), resume, compare with an unbroken run."""
    whole = folder / f"{job.name}-whole"
    counted = Counter[str]()
    count_file = folder / "count"

    def counting() -> None:
        calls = 0

        def counted_call(call: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                return call(*arguments, **options)

            return inner

        os.fsync, os.replace, os.unlink = map(counted_call, (os.fsync, os.replace, os.unlink))
        job.start(whole)()
        count_file.write_text(str(calls))

    first = run(counting, folder)
    assert first.status == 0, f"{job.name}: the unbroken run failed\n{first.output}"
    expected, points = job.contents(whole), int(count_file.read_text())
    cases = [(point, after) for point in range(1, points + 1) for after in (False, True)]
    for point, after in cases[:: max(1, len(cases) // limit)]:
        path = folder / f"{job.name}-{point}-{after}"

        def killed(path: Path = path, point: int = point, after: bool = after) -> None:
            kill_at(point, after)
            job.start(path)()

        run(killed, folder)
        again = job.resume(path) if job.has_begun(path) else job.start(path)
        ended = run(again, folder)
        counted["cases"] += 1
        counted["tracebacks"] += ended.has_traceback
        if ended.status != 0:
            counted["unreadable"] += 1
            print(f"  {job.name} {point} {after}: {ended.output[-300:]}")
        elif job.is_exact and not same(job.contents(path), expected):
            counted["silently wrong"] += 1
        leftovers = [p for p in path.iterdir() if p.name.endswith(".partial") or ".probe" in p.name]
        counted["leftover files"] += len(leftovers)
        shutil.rmtree(path)
    return counted


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)


# -- damaged files --------------------------------------------------------------------------------


def readers(folder: Path) -> Iterator[tuple[str, Path, Callable[[Path], Any]]]:
    """The kinds of file, each with the code that users read it with, and what it then holds."""
    from esper.simic.growth.growth_training import GrowthTraining
    from esper.tamiyo.learned import LearnedController

    def checkpoint(path: Path) -> Any:
        return GrowthTraining.resume(path).trainer.state_dict()

    def growth(path: Path) -> Any:
        return grow_small_model(path, steps=24, save_every=99)._network.capture()["weights"]

    train, gym = folder / "train-whole", folder / "gym-whole"
    yield "train checkpoint", train / "checkpoint.pt", checkpoint
    yield "previous checkpoint", train / "checkpoint.previous.pt", checkpoint
    yield (
        "controller",
        train / "controller.pt",
        lambda p: LearnedController.load(p).policy.state_dict(),
    )
    yield "PPO checkpoint", gym / "checkpoint.pt", lambda p: esper.PPO.load(p).agent.state_dict()
    yield "PPO model", gym / "agent.pt", lambda p: esper.PPO.load(p).agent.state_dict()
    yield "growth", folder / "Growth-whole" / "growth.pt", growth


def damaged(path: Path, read: Callable[[Path], Any], cases: int, folder: Path) -> Counter[str]:
    """Flip `cases` bits and truncate `cases` times; a read must be refused by name or be right."""
    whole, right = path.read_bytes(), read(path)
    rng, counted = random.Random(0), Counter[str]()
    for case in range(2 * cases):
        data = bytearray(whole)
        if case < cases:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        broken = folder / "broken.pt"
        broken.write_bytes(data)
        counted["cases"] += 1
        try:
            found = read(broken)
        except esper.runtime.files.UnreadableFile:
            counted["refused"] += 1
        except Exception as error:
            counted["tracebacks"] += 1
            print(f"  {path.name}: {type(error).__name__}: {error}")
        else:
            counted["silently wrong"] += not same(found, right)
    return counted


# -- full disk ------------------------------------------------------------------------------------


def full_disk(folder: Path, spare: int) -> dict[str, Counter[str] | None]:
    """Every writer on a full disk; None if a tmpfs cannot be mounted."""
    mount = folder / "small-disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        return {"any": None}
    try:
        return {job.name: _fill_up(job, mount, folder, spare) for job in disk_jobs()}
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def disk_jobs() -> list[Job]:
    return [train_job(), gym_job(total_steps=8192), growth_job(), export_job()]


def export_job() -> Job:
    """A grown model exported in all formats with its page, again and again."""

    def work(path: Path) -> Callable[[], object]:
        def export() -> None:
            growth = grow_small_model(path / "growth.pt", steps=10, save_every=2)
            for number in range(20):
                growth.export(path / f"export-{number}", formats=("torch", "source"))
                esper.write_page(growth.ledger, path / "run.html")

        return lambda: in_one_line(export)

    return replace(growth_job(), name="export and page", start=work)


def in_one_line(work: Callable[[], object]) -> None:
    """End like a command of Esper: an OSError is one line and status 1."""
    try:
        work()
    except OSError as error:
        sys.exit(f"esper: {error}")


def _fill_up(job: Job, mount: Path, folder: Path, spare: int) -> Counter[str]:
    """Start the job, fill the disk up to `spare` bytes, and resume when there is space again."""
    counted, path = Counter[str](), mount / job.name.replace(" ", "-")
    for free in (0, spare):
        process, log = fork(job.start(path), folder)
        deadline = time.monotonic() + TIME_LIMIT_S
        while not job.has_begun(path) and is_alive(process) and time.monotonic() < deadline:
            time.sleep(0.005)
        filler = mount / "filler"
        with suppress(OSError), filler.open("wb") as file:
            file.write(bytes(max(shutil.disk_usage(mount).free - free, 0)))
        ended = wait(process, log)
        counted["cases"] += 1
        counted["tracebacks"] += ended.has_traceback
        counted["aborted"] += ended.status < 0
        counted["ended before"] += ended.status == 0
        filler.unlink(missing_ok=True)
        again = run(job.resume(path) if job.has_begun(path) else job.start(path), folder)
        counted["unreadable"] += again.status != 0
        if ended.has_traceback or again.status:
            print(f"  {job.name}: {ended.output[-400:]}\n  then: {again.output[-300:]}")
        shutil.rmtree(path, ignore_errors=True)
    return counted


def is_alive(process: int) -> bool:
    """Whether a child has not ended; it is not waited for."""
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


# -- races and signals ----------------------------------------------------------------------------


def races(job: Job, folder: Path, repeats: int) -> Counter[str]:
    counted = Counter[str]()
    for number in range(repeats):
        path = folder / f"race-{job.name}-{number}"
        started = [fork(job.start(path), folder) for _ in range(5)]
        ended = [wait(*child) for child in started]
        counted["cases"] += 5
        counted["tracebacks"] += sum(end.has_traceback for end in ended)
        # a late one may find the run finished: it is refused as well
        counted["silently wrong"] += sum(end.status == 0 for end in ended) != 1
    return counted


def signals(job: Job, folder: Path) -> Counter[str]:
    """Send each signal while the job trains: after its first checkpoint, long before its end."""
    counted = Counter[str]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        path = folder / f"signal-{job.name}-{number}"
        process, log = fork(job.start(path), folder)
        deadline = time.monotonic() + TIME_LIMIT_S
        while not (path / "checkpoint.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process, number)
        ended = wait(process, log)
        counted["cases"] += 1
        counted["tracebacks"] += ended.has_traceback
        if ended.status != 128 + number:
            counted["silently wrong"] += 1
            print(f"  {job.name}, signal {number}: status {ended.status}, {ended.output[-200:]}")
        counted["unreadable"] += run(job.resume(path), folder).status != 0
    return counted


# -- flags ----------------------------------------------------------------------------------------

WRONG = ("0", "-1", "nan", "inf", "-inf", "1e9", "1e30", "2.5", "x", "", "\u0663", "True", "../x")


def flags_of(config: Any, prefix: str = "") -> Iterator[str]:
    for entry in fields(config):
        value = getattr(config, entry.name)
        name = f"{prefix}{entry.name.replace('_', '-')}"
        if is_dataclass(value):
            yield from flags_of(value, f"{name}.")
        else:
            yield f"--{name}"


def flag_cases(rng: random.Random, count: int) -> list[list[str]]:
    from esper.simic.growth.train_config import PRESETS

    train = [*flags_of(PRESETS["quick"]), "--preset", "--out", "--resume"]
    gym = ["--horizon", "--rng-seed", "--device", "--masks", "--num-envs", "--total-steps", "--episodes", "--save-every", "--out"]  # fmt: skip
    gym += [flag for flag in train if flag.startswith(("--ppo.", "--policy."))]
    cases = [[*TRAIN, "--rounds", "1", flag, value] for flag in train for value in WRONG]
    cases += [[*GYM, "--total-steps", "64", flag, value] for flag in gym for value in WRONG]
    cases = rng.sample(cases, min(len(cases), count))
    cases += [["gym", name] for name in ("", "x", "x:y", "../x:Y", "Nope-v0", "CartPole-v1:x")]
    cases += [["evaluate", *rest] for rest in ([], ["x"], ["/"], ["."], ["--preset", "x"], ["x", "--task", "y"])]  # fmt: skip
    cases += [["sites", name] for name in ("", "x", "os:getcwd", "os:nope", ".:x", "..:y", "storm_models:syntax", "storm_models:none", "storm_models:number", "storm_models:needs", "storm_models:raises")]  # fmt: skip
    cases += [["sites", "storm_models:model", "--shape", *shape] for shape in (["-1"], ["0"], ["x"], ["1e9"], ["3", "3"], ["1000000000"])]  # fmt: skip
    cases += [["adapt_practice", *rest] for rest in (["x"], ["--help"], ["--preset", "x"], ["--out", "/"], ["--out", "."], ["--device", ""], ["--device", "x"], ["--rng-seed", "nan"], ["--rng-seed", ""])]  # fmt: skip
    cases += [["adapt_practice", "--scenarios", value] for value in WRONG]
    cases += [[], ["x"], ["--help"], ["train", "--ppo.lr", "1"], ["train", "--help"]]
    return cases


MODELS = """
from torch import nn
def model(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
def none(): return None
def number(): return 3
def needs(a): return model()
def raises(): raise RuntimeError("no model today")
"""


def fuzz_flags(folder: Path, count: int) -> Counter[str]:
    home = folder / "fuzz"
    home.mkdir()
    (home / "storm_models.py").write_text(MODELS)
    counted, before = Counter[str](), Path.cwd()
    os.chdir(home)
    try:
        for number, arguments in enumerate(flag_cases(random.Random(0), count)):
            if arguments[:1] in (["train"], ["gym"]) and "--out" not in arguments:
                arguments = [*arguments, "--out", str(home / str(number))]
            ended = run(command(arguments), folder, limit_s=15.0)
            counted["cases"] += 1
            counted["ran past the limit"] += ended.timed_out
            counted["accepted"] += ended.status == 0
            if ended.has_traceback or (ended.status < 0 and not ended.timed_out):
                counted["tracebacks"] += 1
                print(f"  {' '.join(arguments)}\n    {ended.output.strip()[-300:]}")
            elif ended.status and (home / str(number)).exists():
                counted["folder left after a mistake"] += not ended.timed_out
            shutil.rmtree(home / str(number), ignore_errors=True)
    finally:
        os.chdir(before)
    return counted


# -- the table ------------------------------------------------------------------------------------


@dataclass
class Table:
    rows: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, name: str, counted: Counter[str] | None) -> None:
        if counted is None:
            print(f"{name}: not possible here")
            return
        self.rows[name] = counted
        print(f"{name}: " + ", ".join(f"{what} {count}" for what, count in counted.items()), flush=True)  # fmt: skip

    def bars(self) -> dict[str, Any]:
        bars = {}
        for what in ("unreadable", "silently wrong", "tracebacks", "aborted", "leftover files", "folder left after a mistake"):  # fmt: skip
            value = sum(row[what] for row in self.rows.values())
            bars[what.replace(" ", "_")] = {"value": value, "bar": 0, "met": value == 0}
        return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--only", default="", help="part of a storm's name")
    asked = parser.parse_args()
    points, flips, fuzzed = (6, 40, 60) if asked.quick else (40, 200, 420)
    table = Table()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [train_job(), gym_job(), growth_job()]
        if asked.only in "kill points, damaged files":
            for job in jobs:  # also writes the files that are damaged below
                table.add(f"kill points, {job.name}", kill_points(job, folder, points))
            for kind, path, read in readers(folder):
                table.add(f"damaged files, {kind}", damaged(path, read, flips, folder))
        if asked.only in "full disk":
            for kind, counted in full_disk(folder, spare=20_000).items():
                table.add(f"full disk, {kind}", counted)
        if asked.only in "races":
            for job in jobs[:2]:
                table.add(f"races, {job.name}", races(job, folder, 1 if asked.quick else 3))
        if asked.only in "signals":
            for job in (train_job(rounds=100), gym_job(total_steps=8192)):
                table.add(f"signals, {job.name}", signals(job, folder))
        if asked.only in "flags":
            table.add("flags", fuzz_flags(folder, fuzzed))
    print(json.dumps({"benchmark": "storms", "device": "cpu", "bars": table.bars()}))


if __name__ == "__main__":
    main()
