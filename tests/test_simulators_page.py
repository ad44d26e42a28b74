"""The code on the page about simulators runs as it stands, and its numbers are right."""

import re
from pathlib import Path

import pytest

import esper
from esper.simic.agent.ppo import PPOConfig
from esper.simic.gym.ppo_model import GymConfig
from support.batched_environments import Counters, PointMasses
from support.pages import run_page
from support.torch_models import SAME_STEP

PAGE = (Path(__file__).parents[1] / "docs" / "simulators.md").read_text()


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        return run_page("simulators.md", num_blocks=3)


def test_the_page_runs_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_page("simulators.md", num_blocks=3)
    printed = capsys.readouterr().out
    assert (tmp_path / "masses.pt").exists()
    for shown in re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL):
        assert shown in printed or shown.startswith("final observations:")


def test_the_line_about_final_observations_is_that_of_the_page(capsys):
    env = PointMasses(4, compute_final_obs=False)
    esper.PPO(env, config=GymConfig(horizon=16, action_bound=1.0)).learn(64)
    (line,) = re.findall(r"^final observations: .*\n", PAGE, flags=re.MULTILINE)
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("envs", "sizes"),
    [
        (PointMasses(6), dict(features=3, heads=1, choices=1, has_numbers=True)),
        (Counters(SAME_STEP), dict(features=5, heads=1, choices=3)),
        (Counters(SAME_STEP, "picture"), dict(features=3, heads=1, choices=3, pixels=60)),
    ],
    ids=["numbers", "choices", "pictures"],
)
def test_the_size_of_a_rollout_is_that_of_the_formula(envs, sizes, names):
    config = GymConfig(horizon=24, action_bound=1.0)
    trainer = esper.PPO(envs, config=config).trainer
    trainer.collect()
    buffer = trainer.buffer
    found = buffer._arena.memory.nbytes + buffer._bad_state.nbytes + trainer._noise.nbytes
    expected = names["rollout_bytes"](24, envs.num_envs, **sizes)
    alignment = 64 * len(buffer._arena.tensors)
    assert expected <= found <= expected + alignment


def test_the_defaults_in_the_table_are_those_of_the_code():
    table = PAGE.partition("## From rsl_rl")[2]
    num_found = 0
    for row in re.findall(r"^\| .* \|$", table, flags=re.MULTILINE)[1:]:
        cell = row.split("|")[3]
        for name, value in re.findall(r"`(?:\w+\.)?(\w+)` = ([\w.\"-]+)", cell):
            config = GymConfig() if hasattr(GymConfig(), name) else PPOConfig()
            config = GymConfig().ppo if "in `GymConfig`" in cell else config
            assert getattr(config, name) == eval(value), name
            num_found += 1
    assert num_found >= 12
