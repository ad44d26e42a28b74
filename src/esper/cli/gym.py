"""`esper gym ENV_ID`: PPO on a Gymnasium environment."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from esper.cli import stop_after_signal, this_command
from esper.nissa.console import ProgressSink
from esper.runtime.checks import whole_number
from esper.runtime.interruption import stop_on_interrupt
from esper.runtime.locked_folder import LockedFolder
from esper.simic.agent.ppo import TrainingFailed
from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.ppo_model import PPO, GymConfig

_DEFAULTS, _TOTAL_STEPS = GymConfig(), 100_000


def gym(
    env_id: tyro.conf.Positional[str],
    config: Annotated[GymConfig, tyro.conf.arg(name="")] = _DEFAULTS,
    total_steps: int = _TOTAL_STEPS,
    episodes: int = 20,
    save_every: int = 10,
    out: Path | None = None,
    resume: bool = False,
) -> None:
    """Train PPO on a Gymnasium environment, then evaluate it.

    Ctrl-C, SIGTERM and SIGHUP finish the step, save, and print the command that continues.

    Args:
        env_id: a registered environment, or "module:EnvId"
        total_steps: environment steps to learn from
        episodes: played at the end, without learning
        save_every: rounds between checkpoints
        out: folder for checkpoint, agent and TensorBoard curves; runs/ENV_ID by default
        resume: continue from the checkpoint in `out`, with its settings, on --device
    """
    counts = {"episodes": episodes, "save_every": save_every, "total_steps": total_steps}
    for name, count in counts.items():
        whole_number(name, count, 1)
    out = out or Path("runs") / env_id.replace(":", "_").replace("/", "_")
    checkpoint = out / "checkpoint.pt"
    device = "" if config.device == _DEFAULTS.device else f" --device {config.device}"
    resume_command = f"{this_command()} gym {env_id}{device} --out {out} --resume"
    if resume and not checkpoint.exists():
        raise ValueError(f"no {checkpoint} to resume from; leave out --resume to start a new run")
    others = replace(config, device=_DEFAULTS.device)
    if resume and (others, total_steps) != (_DEFAULTS, _TOTAL_STEPS):
        raise ValueError(f"--resume uses the settings in {checkpoint}; leave out other flags")
    model = None if resume else PPO(env_id, config=config)
    with LockedFolder(out):
        if model is None:
            model = PPO.load(checkpoint, env_id, device=config.device)
        elif checkpoint.exists():
            raise ValueError(
                f"{out} already holds a run; resume it with `{resume_command}`, or choose another "
                "folder with --out"
            )
        print(describe(model, out))
        try:
            stopped_by = _train(model, None if resume else total_steps, out, save_every)
            if stopped_by is None:
                model.save(out / "agent.pt")
        except (OSError, TrainingFailed) as error:
            reason = str(error)
            if isinstance(error, TrainingFailed):
                model.save(out / "agent.pt")
                reason += f"\nthe last good agent is saved as {out / 'agent.pt'}"
            advice = "no checkpoint was written yet"
            if checkpoint.exists():
                advice = f"resume from the last checkpoint with\n  {resume_command}"
            done = f"the run stopped after {model.num_steps:,} steps"
            raise ValueError(f"{reason}\n{done}; {advice}") from error
        if stopped_by is not None:
            done = f"stopped after {model.num_steps:,} steps; resume with\n  {resume_command}"
            stop_after_signal(stopped_by, done)
    returns = evaluate(model, env_id, episodes).returns
    mean = f"return {returns.mean():.2f} +- {returns.std():.2f} over {episodes} episodes"
    print(f"{mean}; agent saved as {out / 'agent.pt'}")


def describe(model: PPO, out: Path) -> str:
    """Environments, heads, masks and device of a run."""
    envs = model.envs
    key = model.config.mask_key
    sources = {"info": f"info[{key!r}]", "observation": f"observation[{key!r}]"}
    sources |= {"method": "action_masks()", "none": "none, all legal"}
    heads = ", ".join(map(str, envs.spec.action_space))
    seen = [f"{envs.spec.num_features} features"]
    seen += [f"an image of {' x '.join(map(str, shape))}" for shape in envs.spaces.images]
    return (
        f"{envs.num_envs} envs, {', '.join(seen)}, heads {heads}, masks: "
        f"{sources[envs.mask_source]}; policy on {model.config.device}; writing to {out}"
    )


def _train(model: PPO, total_steps: int | None, out: Path, save_every: int) -> int | None:
    """Train to the end or to a signal, then write the checkpoint; returns the signal."""
    shown: dict[str, Callable[[float], str]] = {
        "episode/return": lambda mean: f"return {mean:,.3g}",
        "time/steps_per_second": lambda speed: f"{speed:,.3g} steps/s",
    }
    done, end = model.num_steps, total_steps or model.total_steps
    with ProgressSink(end, shown, done=done) as progress, stop_on_interrupt() as should_stop:

        def callback(step: int, metrics: dict[str, float]) -> None:
            progress.record(step, metrics)
            if metrics["progress/rounds"] % save_every == 0:
                model.save(out / "checkpoint.pt")

        model.learn(total_steps, callback, log_dir=out, should_stop=should_stop)
        model.save(out / "checkpoint.pt")
        return should_stop.signal
