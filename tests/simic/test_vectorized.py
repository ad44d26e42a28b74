"""Vectorised training: host batches with known gains are solved; rewards telescope; ended envs sit out."""

import torch

from esper.kasmina.lifecycle import remove_live_seeds
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.rewards import ROLLBACK_PENALTY, growth_score
from esper.simic.training.config import PRESETS
from esper.simic.training.vectorized import VectorizedTrainer
from esper.tamiyo.policy.features import FeatureLayout
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.synthetic_hosts import FOUR_TYPES, HOST_ACCURACY, HOST_PARAMS, SyntheticHosts


def make_trainer(num_envs, host_batch=None, *, rng_seed=0, **settings):
    torch.manual_seed(rng_seed)
    environment = GrowthEnvironment(host_batch or SyntheticHosts(num_envs), rng_seed=rng_seed)
    host_batch = environment.host_batch
    layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
    policy = FactoredRecurrentActorCritic(
        environment.action_space, layout, PolicyConfig(lstm_hidden_dim=64)
    )
    config = PPOConfig(**({"gamma": 1.0} | settings))
    return VectorizedTrainer(
        environment,
        PPOAgent(policy, config),
        max_steps=25,
        start_score=HOST_ACCURACY,
        rng_seed=rng_seed,
    )


def test_the_oracle_environment_is_solved():
    """The frozen policy gains at least 95 % of what the best plan gains, over all rents."""
    trainer = make_trainer(
        64, learning_rate=2e-3, entropy_coefficient=0.005, gae_lambda=0.99, ppo_epochs=4
    )
    for number in range(70):
        trainer.collect()
        assert trainer.learn(progress=number / 70)["first_ratio_error"] < 1e-5
    found = possible = 0.0
    for _ in range(4):
        episodes = trainer.collect(deterministic=True)
        best = trainer.environment.host_batch.best_scores(episodes.rent)
        found += (episodes.scores - HOST_ACCURACY).sum()
        possible += (best - HOST_ACCURACY).sum()
    assert found / possible >= 0.95, f"reached {found / possible:.3f} of the optimum"


def test_what_to_grow_is_learned_by_type_of_data():
    """Knowing the type trebles what the best constant plan gains; most of that is found."""
    host_batch = SyntheticHosts(64, FOUR_TYPES)
    trainer = make_trainer(64, host_batch, **vars(PRESETS["oracle"].ppo))
    for number in range(70):
        trainer.collect()
        trainer.learn(progress=number / 70)
    found = blind = possible = 0.0
    for _ in range(4):
        episodes = trainer.collect(deterministic=True)
        found += (episodes.scores - HOST_ACCURACY).sum()
        blind += (host_batch.best_blind_scores(episodes.rent) - HOST_ACCURACY).sum()
        possible += (host_batch.best_scores(episodes.rent) - HOST_ACCURACY).sum()
    share = (found - blind) / (possible - blind)
    assert possible > 2.5 * blind > 0
    assert share > 0.5, f"reached {share:.2f} of what knowing the type is worth"


def test_features_are_scaled_after_the_first_update_and_never_again():
    trainer = make_trainer(8)
    scales = trainer.agent.policy.heads.scales
    trainer.collect()
    assert not scales.is_fitted
    trainer.learn()
    after_one = {name: value.clone() for name, value in scales.state_dict().items()}
    assert after_one["is_fitted"]
    assert after_one["env_center"].any()
    trainer.collect()
    assert trainer.learn()["first_ratio_error"] < 1e-5
    for name, value in scales.state_dict().items():
        assert torch.equal(value, after_one[name]), name


def test_rewards_sum_to_the_score_of_the_committed_network():
    trainer = make_trainer(16)
    rent = trainer.collect().rent
    host_batch, rewards = trainer.environment.host_batch, trainer.buffer._fields["rewards"]
    committed = trainer.environment._committed_params()
    expected = growth_score(
        host_batch.committed_accuracy(), committed, torch.full((16,), HOST_PARAMS), rent
    )
    torch.testing.assert_close(rewards.sum(dim=1), expected - HOST_ACCURACY)
    torch.testing.assert_close(trainer.reward.scores, expected)
    assert trainer.buffer._fields["terminated"].sum(dim=1).tolist() == [1] * 16
    assert trainer.buffer._fields["terminated"][:, -1].all()


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
    scores = trainer.collect().scores
    assert scores.isnan().tolist() == [False, True, False, False]
    assert trainer.buffer.step_counts.tolist() == [25, 3, 25, 25]
    torch.testing.assert_close(
        trainer.buffer._fields["rewards"][1, 2], torch.tensor(ROLLBACK_PENALTY)
    )
    assert trainer.buffer.episode_boundaries.tolist() == [[0, 0, 25], [1, 0, 3], [2, 0, 25], [3, 0, 25]]  # fmt: skip
    trainer.agent.update(trainer.buffer)


def test_an_env_is_compared_with_all_of_its_siblings_episode_even_if_its_own_ends_early():
    trainer, own_rewards = make_trainer(4, BreaksAtStep(4, siblings=2)), []
    of = trainer.reward.of

    def remembered(*step):
        own_rewards.append(of(*step))
        return own_rewards[-1]

    trainer.reward.of = remembered
    trainer.collect()
    own = torch.stack(own_rewards, 1)  # [N, T], on after the end of env 1
    learned_from = trainer.buffer._fields["rewards"]
    torch.testing.assert_close(learned_from[1, :3].sum(), own[1, :3].sum() - own[0].sum())
    torch.testing.assert_close(learned_from[0], own[0] - own[1])
    torch.testing.assert_close(learned_from[2], own[2] - own[3])
    torch.testing.assert_close(learned_from[1, :2], own[1, :2] - own[0, :2])


def test_a_budget_is_never_exceeded_and_compute_is_charged():
    host_batch = SyntheticHosts(32)
    environment = GrowthEnvironment(
        host_batch, GrowthConfig(params_budget=0.3, max_germinations=2, compute_price=0.5)
    )
    layout = FeatureLayout(host_batch.num_slots, host_batch.num_blueprints)
    policy = FactoredRecurrentActorCritic(
        environment.action_space, layout, PolicyConfig(lstm_hidden_dim=16)
    )
    trainer = VectorizedTrainer(environment, PPOAgent(policy, PPOConfig(gamma=1.0)), max_steps=25)
    trainer.collect()
    reports = environment.observe()
    assert (reports.params - reports.host_params <= 0.3 * HOST_PARAMS).all()
    assert (reports.seeds_left >= 0).all()
    assert (reports.params > reports.host_params).any()
    uncharged = growth_score(
        host_batch.committed_accuracy(), environment._committed_params(), reports.host_params, reports.rent
    )  # fmt: skip
    used = environment._compute > 0
    assert used.any()
    assert (trainer.reward.scores[used] < uncharged[used]).all()
