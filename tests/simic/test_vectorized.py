"""Training on growing hosts: known gains are found, rewards telescope, ended envs sit out."""

import pytest
import torch

from esper.kasmina.host_reports import seed_costs
from esper.kasmina.lifecycle import remove_live_seeds
from esper.leyline.stages import SeedStage
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.growth.growth_envs import GrowthEnvs
from esper.simic.growth.rewards import ROLLBACK_PENALTY, growth_score
from esper.simic.growth.train_config import TrainConfig
from esper.simic.trainer import Trainer
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.policy.slot_heads import tamiyo_policy
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from support.synthetic_hosts import FOUR_TYPES, HOST_ACCURACY, HOST_PARAMS, SyntheticHosts


def make_trainer(num_envs, host_batch=None, *, rng_seed=0, **settings):
    environment = GrowthEnvironment(host_batch or SyntheticHosts(num_envs), rng_seed=rng_seed)
    ppo = PPOConfig(**({"gamma": 1.0} | settings))
    return trainer_on(environment, PolicyConfig(lstm_hidden_dim=64), ppo, rng_seed)


def trainer_on(environment, policy, ppo, rng_seed=0):
    torch.manual_seed(rng_seed)
    host_batch = environment.host_batch
    layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
    agent = PPOAgent(tamiyo_policy(layout, policy), ppo)
    envs = GrowthEnvs(environment, "cpu", start_score=HOST_ACCURACY)
    return Trainer(envs, agent, horizon=25, rng_seed=rng_seed)


def play(trainer):
    """One round with the most likely actions."""
    trainer.collect(deterministic=True)
    return trainer.envs.episodes


def test_the_oracle_environment_is_learned():
    """One of three short runs gains half of what the best plan gains; two gained 84 % or more."""
    shares = (share_of_the_best_plan(24, rounds=16, rng_seed=rng_seed) for rng_seed in (1, 2, 0))
    assert any(share >= 0.5 for share in shares)


@pytest.mark.slow
def test_the_oracle_environment_is_solved():
    """The frozen policy gains at least 95 % of what the best plan gains, for 2 of 3 rng seeds."""
    shares = [share_of_the_best_plan(64, rounds=70, rng_seed=rng_seed) for rng_seed in range(3)]
    assert sum(share >= 0.95 for share in shares) >= 2, shares


def share_of_the_best_plan(num_envs, *, rounds, rng_seed):
    """What a policy gains after training, over all rents."""
    trainer = make_trainer(
        num_envs, rng_seed=rng_seed, learning_rate=2e-3, entropy_coefficient=0.005,
        gae_lambda=0.99, ppo_epochs=4,
    )  # fmt: skip
    for number in range(rounds):
        trainer.collect()
        assert trainer.learn(number / rounds)["ppo/first_ratio_error"] < 1e-5
    found = possible = 0.0
    for _ in range(4):
        episodes = play(trainer)
        best = trainer.envs.environment.host_batch.best_scores(episodes.rent)
        found += float((episodes.scores - HOST_ACCURACY).sum())
        possible += float((best - HOST_ACCURACY).sum())
    return found / possible


@pytest.mark.slow
def test_what_to_grow_is_learned_by_type_of_data():
    """Knowing the type trebles what the best constant plan gains; 2 of 3 rng seeds find most."""
    shares = [share_of_knowing_the_type(rng_seed) for rng_seed in range(3)]
    assert sum(share > 0.5 for share in shares) >= 2, shares


def share_of_knowing_the_type(rng_seed, rounds=70):
    """What a policy gains after training: 0 as the best constant plan, 1 as the best by type."""
    host_batch = SyntheticHosts(64, FOUR_TYPES)
    trainer = make_trainer(64, host_batch, rng_seed=rng_seed, **vars(TrainConfig().ppo))
    for number in range(rounds):
        trainer.collect()
        trainer.learn(number / rounds)
    found = blind = possible = 0.0
    for _ in range(4):
        episodes = play(trainer)
        found += float((episodes.scores - HOST_ACCURACY).sum())
        blind += float((host_batch.best_blind_scores(episodes.rent) - HOST_ACCURACY).sum())
        possible += float((host_batch.best_scores(episodes.rent) - HOST_ACCURACY).sum())
    assert possible > 2.5 * blind > 0
    return (found - blind) / (possible - blind)


def test_features_are_scaled_after_the_first_update_and_never_again():
    trainer = make_trainer(8)
    scales = trainer.agent.policy.heads.scales
    trainer.collect()
    assert not scales.is_fitted
    trainer.learn()
    after_one = {name: value.clone() for name, value in scales.state_dict().items()}
    assert after_one["is_fitted"]
    assert after_one["center"].any()
    trainer.collect()
    assert trainer.learn()["ppo/first_ratio_error"] < 1e-5
    for name, value in scales.state_dict().items():
        assert torch.equal(value, after_one[name]), name


def committed_params(environment):
    states = environment.host_batch.states
    seed_params, _ = seed_costs(environment._facts, states)
    return (seed_params * (states.stage == SeedStage.FOSSILIZED)).sum(dim=-1)


def test_rewards_sum_to_the_score_of_the_committed_network():
    trainer = make_trainer(16)
    trainer.collect()
    environment, rewards = trainer.envs.environment, trainer.buffer.rewards
    host_batch, committed = environment.host_batch, committed_params(environment)
    rent = trainer.envs.episodes.rent
    expected = growth_score(
        host_batch.committed_accuracy(), committed, torch.full((16,), HOST_PARAMS), rent
    )
    torch.testing.assert_close(rewards.sum(dim=1), expected - HOST_ACCURACY)
    torch.testing.assert_close(trainer.envs.scores, expected)
    assert trainer.buffer.terminated.sum(dim=1).tolist() == [1] * 16
    assert trainer.buffer.terminated[:, -1].all()


class BreaksAtStep(SyntheticHosts):
    """Env 1 is rolled back at step 3."""

    def reset(self, generator):
        self.steps = 0
        return super().reset(generator)

    def train_step(self, transition):
        evidence = super().train_step(transition)
        self.steps += 1
        if self.steps == 3:
            self._states = remove_live_seeds(self._states, torch.tensor([1])).states
            evidence.rolled_back[1] = True
        return evidence


def test_a_rolled_back_env_pays_the_penalty_and_sits_out():
    trainer = make_trainer(4, BreaksAtStep(4))
    trainer.collect()
    scores = trainer.envs.episodes.scores
    assert scores.isnan().tolist() == [False, True, False, False]
    assert trainer.buffer.step_counts.tolist() == [25, 3, 25, 25]
    torch.testing.assert_close(trainer.buffer.rewards[1, 2], torch.tensor(ROLLBACK_PENALTY))
    assert trainer.buffer.episode_boundaries.tolist() == [[0, 0, 25], [1, 0, 3], [2, 0, 25], [3, 0, 25]]  # fmt: skip
    trainer.agent.update(trainer.buffer)


def test_an_env_is_compared_with_all_of_its_siblings_episode_even_if_its_own_ends_early():
    trainer, own_rewards = make_trainer(4, BreaksAtStep(4, siblings=2)), []
    of = trainer.envs._rewards

    def remembered(*step):
        own_rewards.append(of(*step))
        return own_rewards[-1]

    trainer.envs._rewards = remembered
    trainer.collect()
    own = torch.stack(own_rewards, 1)  # [N, T], on after the end of env 1
    learned_from = trainer.buffer.rewards
    torch.testing.assert_close(learned_from[1, :3].sum(), own[1, :3].sum() - own[0].sum())
    torch.testing.assert_close(learned_from[0], own[0] - own[1])
    torch.testing.assert_close(learned_from[2], own[2] - own[3])
    torch.testing.assert_close(learned_from[1, :2], own[1, :2] - own[0, :2])


def test_a_budget_is_never_exceeded_and_compute_is_charged():
    host_batch = SyntheticHosts(32)
    environment = GrowthEnvironment(
        host_batch, GrowthConfig(params_budget=0.3, max_germinations=2, compute_price=0.5)
    )
    trainer = trainer_on(environment, PolicyConfig(lstm_hidden_dim=16), PPOConfig(gamma=1.0))
    trainer.collect()
    reports = environment.observe()
    assert (reports.params - reports.host_params <= 0.3 * HOST_PARAMS).all()
    assert (reports.seeds_left >= 0).all()
    assert (reports.params > reports.host_params).any()
    uncharged = growth_score(
        host_batch.committed_accuracy(), committed_params(environment), reports.host_params, reports.rent
    )  # fmt: skip
    used = environment._compute > 0
    assert used.any()
    assert (trainer.envs.scores[used] < uncharged[used]).all()


def test_the_share_of_the_best_is_0_for_ungrown_hosts_and_1_for_the_best():
    host_batch, rent = SyntheticHosts(3), torch.tensor([0.02, 0.05, 0.1])
    assert host_batch.share_of_best(host_batch.best_scores(rent), rent) == 1.0
    assert host_batch.share_of_best(torch.full((3,), HOST_ACCURACY), rent) == 0.0
