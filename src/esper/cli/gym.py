"""`esper gym ENV_ID`: PPO on a Gymnasium environment."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from esper.leyline.interruption import stop_on_interrupt
from esper.leyline.protocols import EventSink
from esper.nissa.console import ProgressSink
from esper.nissa.tensorboard import TensorBoardSink
from esper.simic.agent.ppo import TrainingFailed
from esper.simic.training.gymnasium import GymConfig, GymTraining, evaluate
from esper.simic.training.locked_folder import LockedFolder

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

_DEFAULTS, _TOTAL_STEPS = GymConfig(), 100_000


def gym(
    env_id: tyro.conf.Positional[str],
    config: Annotated[GymConfig, tyro.conf.arg(name="")] = _DEFAULTS,
    total_steps: int = _TOTAL_STEPS,
    num_envs: int = 8,
    episodes: int = 20,
    save_every: int = 10,
    out: Path | None = None,
    resume: bool = False,
) -> None:
    """Train PPO on a Gymnasium environment, then evaluate it.

    Ctrl-C finishes the step, saves, and says how to go on.

    Args:
        env_id: a registered environment, or "module:EnvId"
        total_steps: environment steps to learn from
        num_envs: environments side by side
        episodes: played at the end, without learning
        save_every: rounds between checkpoints
        out: where checkpoint, agent and TensorBoard curves go; runs/ENV_ID if not given
        resume: go on from the checkpoint in `out`, with the settings saved there, on --device
    """
    for name, count in (("num_envs", num_envs), ("episodes", episodes), ("save_every", save_every)):
        if count < 1:
            raise ValueError(f"{name}={count}; use 1 or more")
    out = out or Path("runs") / env_id.replace(":", "_").replace("/", "_")
    checkpoint = out / "checkpoint.pt"
    device = "" if config.device == _DEFAULTS.device else f" --device {config.device}"
    again = f"esper gym {env_id} --num-envs {num_envs}{device} --out {out} --resume"
    if resume and not checkpoint.exists():
        raise ValueError(f"no {checkpoint} to go on from; leave --resume out to begin")
    settings = (replace(config, device=_DEFAULTS.device), total_steps)
    if resume and settings != (_DEFAULTS, _TOTAL_STEPS):
        raise ValueError(f"--resume goes on with the settings in {checkpoint}; leave others out")
    envs = _make(env_id, num_envs)
    training = None if resume else GymTraining(envs, total_steps, config)
    with LockedFolder(out):
        if training is None:
            training = GymTraining.resume(checkpoint, envs, device=config.device)
        elif checkpoint.exists():
            raise ValueError(
                f"{out} holds a run already; go on with `{again}`, or choose another folder with "
                "--out"
            )
        print(describe(training, out))
        try:
            is_finished = _train(training, checkpoint, out, save_every)
        except TrainingFailed as error:
            training.agent.save(out / "agent.pt")
            last = f"; its last checkpoint goes on with\n  {again}" if checkpoint.exists() else ""
            raise ValueError(
                f"{error}\nthe agent before that is saved as {out / 'agent.pt'}{last}"
            ) from error
        if not is_finished:
            print(f"stopped after {training.progress.steps:,} steps; go on with\n  {again}")
            return
        training.agent.save(out / "agent.pt")
    result = evaluate(training.agent, envs, episodes)
    print(
        f"return {result.returns.mean():.2f} +- {result.returns.std():.2f} over {episodes} "
        f"episodes; agent saved as {out / 'agent.pt'}"
    )


def _make(env_id: str, num_envs: int) -> "VectorEnv[Any, Any, Any]":
    import gymnasium

    try:
        return gymnasium.make_vec(env_id, num_envs=num_envs, vectorization_mode="sync")
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"{error} `gymnasium.pprint_registry()` lists what there is") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env_id} cannot be made: {error}") from error


def describe(training: GymTraining, out: Path) -> str:
    """What runs where: nothing is chosen in silence."""
    envs, config = training.envs, training.config
    sources = {"info": "info['action_mask']", "method": "action_masks()", "none": "none, all legal"}
    heads = ", ".join(f"{head.name}[{head.size}]" for head in envs.spaces.action_space)
    return (
        f"{envs.num_envs} envs, {envs.spaces.num_features} features, heads {heads}, masks: "
        f"{sources[envs.mask_source]}; policy on {config.device}; writing to {out}"
    )


def _train(training: GymTraining, checkpoint: Path, out: Path, save_every: int) -> bool:
    """Whether training came to its end; if not, the checkpoint holds all of it."""
    shown = {"episode/return": "return", "time/steps_per_second": "steps/s"}
    done = training.progress.steps
    with ExitStack() as stack, stop_on_interrupt() as should_stop:
        sinks: list[EventSink] = [
            stack.enter_context(ProgressSink(training.total_steps, shown, done=done)),
            stack.enter_context(TensorBoardSink(out, first_step=done + 1)),
        ]

        def on_round(step: int, metrics: dict[str, float]) -> None:
            for sink in sinks:
                sink.record(step, metrics)
            if training.progress.rounds % save_every == 0:
                training.save(checkpoint)

        training.run(on_round, should_stop=should_stop)
        training.save(checkpoint)
    return training.is_finished
