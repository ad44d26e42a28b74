"""PPO on two ranks: one policy, learned from the rollouts of both.

The ranks are processes on the CPU with the environment variables of torchrun, forked from the test.
"""

import os
import pickle
import signal
import socket
import time
import traceback
from dataclasses import replace

import pytest
import torch

from esper.simic.agent.ppo import PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.gym.evaluation import evaluate
from esper.simic.gym.ppo_model import PPO, GymConfig
from esper.simic.ranks import RankLost, Ranks
from esper.tamiyo.policy.distributions import LegalChoices
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.network import PolicyConfig
from support.agents import collect, make_agent, rollout_of
from support.processes import fork

DEADLINE_S = 60
HALVES = (torch.tensor([0, 1]), torch.tensor([2, 3]))  # envs of the ranks
ROWS = dict(step_counts=(9, 4, 12, 11), forced_env=3)  # rank 1 decides in fewer steps
CONFIG = GymConfig(
    num_envs=3,
    horizon=16,
    policy=PolicyConfig(lstm_hidden_dim=8),
    ppo=PPOConfig(num_minibatches=2, ppo_epochs=2),
)
STEPS = 2 * CONFIG.num_envs * CONFIG.horizon  # of a round, of both ranks


@pytest.fixture
def on_two_ranks(tmp_path):
    """Runs work on two ranks; returns what it returned or raised on each, None if it ended."""

    def run(work):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        processes = [start_rank(work, rank, port, folder) for rank in range(2)]
        for process in processes:
            os.waitpid(process, 0)
        results = [folder / str(rank) for rank in range(2)]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]

    return run


def start_rank(work, rank, port, folder):
    process = fork()
    if process:
        return process
    try:
        signal.alarm(DEADLINE_S)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with one GPU has none for rank 1
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            result = error
        (folder / str(rank)).write_bytes(pickle.dumps(result))
    finally:
        os._exit(0)


def with_ranks(agent):
    """The same agent as one of the ranks; those of other ranks begin with other weights."""
    ranks = Ranks.of_torchrun()
    if ranks.rank:
        with torch.no_grad():
            for parameter in agent.policy.parameters():
                parameter.add_(1.0)
    return type(agent)(agent.policy, agent.config, ranks)


def half_of(buffer, env_ids):
    """A buffer with the rows of these envs."""
    half = TamiyoRolloutBuffer(
        len(env_ids),
        buffer.max_steps_per_env,
        buffer.state_dim,
        buffer.action_space,
        buffer.lstm_hidden_dim,
        buffer.lstm_layers,
        frame_size=buffer.frame_size,
    )
    for name, field in half._tensors.items():
        whole = buffer._tensors[name]
        field.copy_(whole[env_ids] if name.startswith("initial") else whole[:, env_ids])
    half.step_counts = buffer.step_counts[env_ids]
    return half


def shared_state(agent):
    """All that has to be equal on the ranks, besides the optimiser's moments."""
    state = agent.state_dict()
    return {**state["policy"], **{f"value {n}": v for n, v in state["value_normalizer"].items()}}


# -- what ranks learn together ---------------------------------------------------------------


@pytest.mark.parametrize("space", ["plain", "mixed", "dependent"])
def test_the_gradient_of_two_ranks_is_that_of_the_joint_minibatch(on_two_ranks, space):
    agent = make_agent(space, max_grad_norm=1e9, entropy_coefficient=0.3)
    rollout = rollout_of(collect(agent, **ROWS))
    legal = LegalChoices.from_masks(rollout.masks, agent.policy.action_space)
    decides = (legal.has_choice > 0) & rollout.valid
    counts = (int(rollout.valid.sum()), int(decides.sum()))
    decided_by_rank = [int(decides[:, envs].sum()) for envs in HALVES]
    assert decided_by_rank[0] != decided_by_rank[1]

    def gradients(agent, minibatch, counts):
        agent.learn_from(minibatch, counts)
        return [parameter.grad for parameter in agent.policy.parameters()]

    def work():
        mine = with_ranks(agent)
        envs = HALVES[mine.ranks.rank]
        return gradients(mine, rollout.of_envs(envs), counts)

    on_ranks = on_two_ranks(work)
    expected = gradients(agent, rollout, None)
    for found in on_ranks:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"images": ((3, 8, 8),)}, {"space": "mixed"}])
def test_two_halves_of_a_rollout_end_an_update_as_the_whole(on_two_ranks, settings):
    agent = make_agent(**settings, num_minibatches=1, ppo_epochs=3, target_kl=None)
    buffer = collect(agent, **ROWS)
    last_values = torch.linspace(-1, 1, 4)

    def work():
        mine = with_ranks(agent)
        envs = HALVES[mine.ranks.rank]
        metrics = mine.update(half_of(buffer, envs), last_values[envs])
        return metrics, shared_state(mine)

    on_ranks = on_two_ranks(work)
    expected = agent.update(buffer, last_values), shared_state(agent)
    torch.testing.assert_close(on_ranks[0], on_ranks[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(on_ranks[0], expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_statistics_are_those_of_the_rows_of_all_ranks(on_two_ranks):
    torch.manual_seed(0)
    rounds = [1e4 + torch.randn(20, 3), torch.randn(7, 3)]
    parts = [(rows[:5], rows[5:]) for rows in rounds] + [(rounds[0], rounds[0][:0])]

    def work():
        ranks = Ranks.of_torchrun()
        normalizer = RunningNormalizer(3, uncentered=1)
        for of_ranks in parts:
            normalizer.update(of_ranks[ranks.rank], ranks.sum_)
        return normalizer.state_dict()

    expected = RunningNormalizer(3, uncentered=1)
    for rows in (*rounds, rounds[0]):
        expected.update(rows)
    for found in on_two_ranks(work):
        torch.testing.assert_close(found, expected.state_dict(), rtol=1e-12, atol=1e-12)


def test_a_bad_rollout_on_one_rank_changes_no_weights_and_ends_both(on_two_ranks):
    agent = make_agent("plain", num_minibatches=1)
    buffer = collect(agent, **ROWS)

    def work():
        mine = with_ranks(agent)
        before = {name: value.clone() for name, value in shared_state(mine).items()}
        half = half_of(buffer, HALVES[mine.ranks.rank])
        if mine.ranks.rank == 1:  # a choice that its mask forbids
            half.masks[0, 2] = False
            half.masks[0, 2, 0] = half.masks[0, 2, 3] = half.masks[0, 2, 5] = True
            half.actions[0, 2] = 1
        try:
            mine.update(half, torch.zeros(2))
        except (RankLost, ValueError) as error:
            torch.testing.assert_close(shared_state(mine), before, rtol=0, atol=0)
            return error

    first, second = on_two_ranks(work)
    assert isinstance(first, RankLost)
    assert str(second) == "env 0, step 2, head 'a': action 1 is not legal; legal here: [0]"


# -- esper.PPO --------------------------------------------------------------------------------


def learned(model):
    """What has to be equal on all ranks after training."""
    progress = vars(model.trainer.progress)
    return shared_state(model.agent) | {
        f"progress {n}": torch.tensor(v) for n, v in progress.items()
    }


def test_ranks_play_different_episodes_and_stay_equal(on_two_ranks, tmp_path, capfd):
    def work():
        model = PPO("CartPole-v1", config=CONFIG)
        first_observations = torch.stack([torch.as_tensor(o) for o in model.envs._observations])
        seen = []
        model.learn(3 * STEPS, callback=lambda steps, metrics: seen.append((steps, metrics)),
                    log_dir=tmp_path / f"logs of {model.agent.ranks.rank}")  # fmt: skip
        evaluate(model, "CartPole-v1", episodes=1)
        metrics = [
            (steps, {n: v for n, v in found.items() if not n.startswith("time")})
            for steps, found in seen
        ]
        return learned(model), metrics, model.trainer.buffer.states.clone(), first_observations

    first, second = on_two_ranks(work)
    torch.testing.assert_close(first[:2], second[:2], rtol=0, atol=0, equal_nan=True)
    assert [steps for steps, _ in first[1]] == [STEPS, 2 * STEPS, 3 * STEPS]
    assert first[1][0][1]["ppo/rows"] == STEPS
    assert "episode/return" in first[1][-1][1]
    starts = torch.cat([first[3], second[3]])  # no env of a rank begins as one of the other
    assert len(starts.unique(dim=0)) == 2 * CONFIG.num_envs
    assert not torch.equal(first[2], second[2])
    assert (tmp_path / "logs of 0").exists()
    assert not (tmp_path / "logs of 1").exists()
    assert capfd.readouterr().out.count("masks: none found") == 1


def test_a_rank_that_ends_ends_the_other_within_seconds(on_two_ranks):
    for lost in range(2):

        def work(lost=lost):
            model = PPO("CartPole-v1", config=CONFIG)
            rank = model.agent.ranks.rank

            def end(steps, metrics):
                if rank == lost:
                    os._exit(1)

            start = time.monotonic()
            try:
                model.learn(10 * STEPS, callback=end)
            except RankLost as error:
                return str(error), time.monotonic() - start

        message, seconds = on_two_ranks(work)[1 - lost]
        assert message.startswith("another rank has ended or does not answer, so this one ends")
        assert "\n" not in message
        assert seconds < 10


def test_all_ranks_stop_where_one_does(on_two_ranks):
    def work():
        model = PPO("CartPole-v1", config=CONFIG)
        rank = model.agent.ranks.rank
        model.learn(5 * STEPS, callback=lambda steps, _: rank == 0)
        after_callback = model.num_steps
        asked = iter(range(1000))
        model.learn(should_stop=lambda: rank == 1 and next(asked) == 20)
        after_stop = model.num_steps
        model.learn()
        return after_callback, after_stop, model.num_steps, learned(model)

    first, second = on_two_ranks(work)
    assert first[:3] == (STEPS, 2 * STEPS, 5 * STEPS)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_run_resumes_on_as_many_ranks(on_two_ranks, tmp_path):
    path = tmp_path / "two ranks.pt"
    alone = tmp_path / "one process.pt"
    PPO("CartPole-v1", config=CONFIG).learn(1).save(alone)

    def save():
        model = PPO("CartPole-v1", config=CONFIG)
        rank = model.agent.ranks.rank
        model.save(tmp_path / f"of rank {rank}.pt")
        model.learn(4 * STEPS, callback=lambda steps, _: steps < 2 * STEPS)
        model.save(path)
        return [rng.get_state() for rng in (model.trainer.action_rng, model.trainer.shuffle_rng)]

    def resume():
        model = PPO.load(path, "CartPole-v1")
        started = model.num_steps, model.trainer.action_rng.get_state()
        model.learn()
        with pytest.raises(ValueError, match="num_ranks=1, but this is num_ranks=2"):
            PPO.load(alone, "CartPole-v1")
        PPO.load(alone).predict(torch.zeros(4).numpy())
        return started, learned(model)

    saved_rngs = on_two_ranks(save)
    assert (tmp_path / "of rank 0.pt").exists()
    assert not (tmp_path / "of rank 1.pt").exists()
    resumed, again = on_two_ranks(resume), on_two_ranks(resume)
    torch.testing.assert_close(resumed[0][1], resumed[1][1], rtol=0, atol=0)
    torch.testing.assert_close(resumed, again, rtol=0, atol=0)
    assert not torch.equal(saved_rngs[0][0], saved_rngs[1][0])
    for rank in range(2):
        num_steps, action_rng = resumed[rank][0]
        assert num_steps == 2 * STEPS
        assert torch.equal(action_rng, saved_rngs[rank][0])
    assert int(resumed[0][1]["progress steps"]) == 4 * STEPS
    with pytest.raises(ValueError, match="num_ranks=2, but this is num_ranks=1"):
        PPO.load(path, "CartPole-v1")
    PPO.load(path).predict(torch.zeros(4).numpy())


def test_settings_that_differ_between_ranks_are_refused(on_two_ranks):
    def work():
        rank = int(os.environ["RANK"])
        PPO("CartPole-v1", config=replace(CONFIG, num_envs=3 + rank))

    for error in on_two_ranks(work):
        assert str(error) == "num_envs is [3, 4] on the ranks; use the same on all"


def test_a_single_process_has_no_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.of_torchrun() is None


def test_a_gpu_of_another_rank_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = Ranks(rank=5, size=8, local_rank=1)
    ranks.require_own(torch.device("cuda:1"))
    ranks.require_own(torch.device("cpu"))
    assert ranks.device("cuda") == "cuda:1"
    with pytest.raises(ValueError, match="rank 5 would use cuda:0, which is not its own GPU"):
        ranks.require_own(torch.device("cuda:0"))
