"""PPO: exact before the first step, right by the formulas, and undone when it goes wrong."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch

from esper.leyline.factored_actions import ActionMasks, FactoredActionSpace, Head
from esper.leyline.sequences import SequenceParts
from esper.simic.agent.ppo import (
    FIRST_RATIO_TOLERANCE,
    PPOAgent,
    PPOConfig,
    TrainingFailed,
    ppo_loss,
    rollout_rows,
)
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, TamiyoRolloutStep
from esper.tamiyo.policy.feature_scales import RunningNormalizer
from esper.tamiyo.policy.network import PolicyConfig, RecurrentState
from esper.tamiyo.policy.plain_heads import flat_policy

FEATURES, NUM_ENVS, NUM_STEPS = 5, 4, 12
SPACES = {
    "one head": FactoredActionSpace((Head("move", 3),)),
    "independent heads": FactoredActionSpace((Head("a", 3), Head("b", 2), Head("c", 4))),
    "conditional heads": FactoredActionSpace(
        (Head("op", 3), Head("slot", 2, given=("op",)), Head("kind", 4, given=("op", "slot")))
    ),
}


def make_agent(space, *, layers=1, floor=0.0, rng_seed=0, device="cpu", **settings):
    torch.manual_seed(rng_seed)
    policy = flat_policy(
        space, FEATURES, PolicyConfig(lstm_hidden_dim=8, lstm_layers=layers, floor=floor)
    )
    for parameter in policy.parameters():  # far from uniform, so that errors show
        parameter.data += 0.3 * torch.randn_like(parameter)
    return PPOAgent(policy.to(device), PPOConfig(**({"num_minibatches": 2} | settings)))


def random_masks(space, num_envs):
    """Masks that differ per env and row; conditional heads often have nothing to choose."""
    masks = {}
    for head in space:
        mask = torch.rand(num_envs, *space.mask_shape(head.name)) < 0.6
        if not head.given:
            mask[torch.arange(num_envs), torch.randint(head.size, (num_envs,))] = True
        masks[head.name] = mask
    return ActionMasks(space, masks)


def collect(agent, *, num_steps=NUM_STEPS, start_state=None, forced_env=None):
    """A rollout with ragged rows, several episodes a row and both kinds of ends."""
    space, config = agent.policy.action_space, agent.policy.config
    buffer = TamiyoRolloutBuffer(
        NUM_ENVS,
        num_steps + 2,
        FEATURES,
        space,
        config.lstm_hidden_dim,
        config.lstm_layers,
        agent.device,
    )
    state = start_state or agent.policy.initial_state(NUM_ENVS)
    for name in ("states", "values", "rewards", "log_probs"):
        buffer.fields[name].fill_(torch.nan)  # padding may hold anything
    for t in range(num_steps):
        features = torch.randn(NUM_ENVS, FEATURES) * 3 + 1
        masks = random_masks(space, NUM_ENVS)
        if forced_env is not None:
            for head in space:
                masks[head.name][forced_env] = False
                if not head.given:
                    masks[head.name][forced_env, 0] = True
        decision = agent.act(features.to(agent.device), masks.to(agent.device), state)
        terminated, truncated = torch.rand(2, NUM_ENVS) < 0.15
        step = TamiyoRolloutStep(features, decision.actions, decision.log_probs, decision.masks,
                                 decision.values, torch.randn(NUM_ENVS), terminated, truncated,
                                 torch.randn(NUM_ENVS), state.h, state.c)  # fmt: skip
        stays = torch.arange(NUM_ENVS) <= t  # env 0 starts first: rows are ragged
        env_ids = stays.nonzero()[:, 0]
        buffer.add_batch(step.select(env_ids), env_ids)
        ended = (terminated | truncated | ~stays)[:, None, None].to(agent.device)
        state = RecurrentState(*(torch.where(ended, 0.0, s) for s in decision.state))
    return buffer


# -- exact before the first step ------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_ratios_are_one_before_the_first_step(space, layers, floor):
    agent = make_agent(space, layers=layers, floor=floor, ppo_epochs=1)
    start = RecurrentState(*torch.randn(2, NUM_ENVS, layers, 8))
    for _ in range(3):  # also once the normalisers have seen something
        metrics = agent.update(collect(agent, start_state=start))
        assert metrics["first_ratio_error"] < 1e-5


def test_ratios_that_are_not_one_before_the_first_step_warn_once():
    agent = make_agent(SPACES["one head"], ppo_epochs=1)
    buffer = collect(agent)
    assert bool((buffer.terminated | buffer.truncated).any())
    for field in (buffer.terminated, buffer.truncated, buffer.bootstrap_values):
        field.zero_()  # as if no episode had ended
    with pytest.warns(UserWarning, match="first_ratio_error.*not reset.*masks.*features") as caught:
        errors = [agent.update(buffer)["first_ratio_error"] for _ in range(2)]
    assert min(errors) > FIRST_RATIO_TOLERANCE
    assert len(caught) == 1


def test_a_state_that_is_not_reset_is_refused():
    agent = make_agent(SPACES["one head"], ppo_epochs=1)
    buffer = collect(agent)
    env, _, end = buffer.episode_boundaries[0].tolist()
    buffer.hidden_h[env, end] = 0.1
    weights = copy.deepcopy(agent.policy.state_dict())
    with pytest.raises(ValueError, match=f"env {env}, step {end}: the recurrent state was not"):
        agent.update(buffer)
    for name, weight in agent.policy.state_dict().items():
        assert torch.equal(weight, weights[name])


# -- the loss by its formulas, in float64, row by row ---------------------------------------------


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def slow_loss(agent, buffer, parameters):
    """The PPO loss of a whole rollout from the formulas: plain loops, float64, no shared code."""
    config, space = agent.config, agent.policy.action_space
    field = {
        name: view.double() for name, view in buffer.fields.items() if view.is_floating_point()
    }
    scales = agent.policy.heads.scales
    mean, std = scales.mean, (scales.variance + 1e-8).sqrt()
    value_mean = agent.value_normalizer.mean
    value_std = (agent.value_normalizer.variance + 1e-8).sqrt()

    def linear(name, x):
        return parameters[f"{name}.weight"] @ x + parameters[f"{name}.bias"]

    surrogates, entropy_terms, value_terms = [], [], []
    for env in range(NUM_ENVS):
        h, c = (field[f"hidden_{k}"][env, 0, 0] for k in "hc")
        for t in range(int(buffer.step_counts[env])):
            if t > 0 and (
                buffer.fields["terminated"][env, t - 1] or buffer.fields["truncated"][env, t - 1]
            ):
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            x = ((field["states"][env, t] - mean) / std).clamp(-10, 10)
            encoded = torch.tanh(linear("heads.encoder.0", x))
            gates = (
                parameters["core.weight_ih_l0"] @ encoded + parameters["core.bias_ih_l0"]
                + parameters["core.weight_hh_l0"] @ h + parameters["core.bias_hh_l0"]
            )  # fmt: skip
            i, f, g, o = gates.chunk(4)
            c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
            h = sigmoid(o) * torch.tanh(c)
            core = encoded + h
            both = linear("readout", core)
            actions = buffer.fields["actions"][env, t].tolist()
            mask = buffer.fields["masks"][env, t]
            logits = {"op": both[:3]} if "op" in space.names else {"move": both[:3]}
            if "op" in space.names:
                slot = (
                    linear("heads.groups.0.mix", core)
                    + parameters["heads.groups.0.chosen.0.weight"][actions[0]]
                )
                logits["slot"] = linear("heads.groups.0.readout", torch.tanh(slot))
                kind = (
                    linear("heads.groups.1.mix", core)
                    + parameters["heads.groups.1.chosen.0.weight"][actions[0]]
                    + parameters["heads.groups.1.chosen.1.weight"][actions[1]]
                )
                logits["kind"] = linear("heads.groups.1.readout", torch.tanh(kind))
            entropy = torch.zeros((), dtype=torch.float64)
            log_ratios = []
            had_a_choice = False
            for index, head in enumerate(space):
                legal = mask[space.slices[index]].nonzero()[:, 0].tolist()
                if not legal:
                    continue
                odds = torch.stack([logits[head.name][k] for k in legal])
                log_p = odds - torch.log(torch.exp(odds).sum())
                log_ratios.append(
                    log_p[legal.index(actions[index])] - field["log_probs"][env, t, index]
                )
                if len(legal) > 1:
                    had_a_choice = True
                    weight = config.head_entropy_weights.get(head.name, 1.0)
                    entropy = entropy - weight * (torch.exp(log_p) * log_p).sum() / math.log(
                        len(legal)
                    )
            if had_a_choice:
                gain = field["advantages"][env, t]
                ratio = torch.exp(sum(log_ratios))
                clipped = torch.clamp(ratio, 1 - config.clip, 1 + config.clip)
                surrogates.append(torch.minimum(ratio * gain, clipped * gain))
                entropy_terms.append(entropy)
            target = (field["returns"][env, t] - value_mean[0]) / value_std[0]
            value_terms.append((both[3] - target) ** 2)
    return (
        -torch.stack(surrogates).sum() / len(entropy_terms)
        + config.value_coefficient * 0.5 * torch.stack(value_terms).mean()
        - config.entropy_coefficient * torch.stack(entropy_terms).mean()
    )


class KeepGradients:
    """Stands in for the optimiser: keeps gradients and their weights, and changes nothing."""

    def __init__(self, optimizer):
        self.optimizer, self.kept, self.weights = optimizer, None, None

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self):
        named = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.kept = [p.grad.clone() for p in named]
        self.weights = [p.detach().clone() for p in named]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("one head", {}),
        ("conditional heads", dict(head_entropy_weights={"slot": 0.5})),
    ],
)
def test_the_gradient_is_that_of_the_formulas(name, settings):
    agent = make_agent(SPACES[name], num_minibatches=1, ppo_epochs=1, max_grad_norm=1e9,
                       entropy_coefficient=0.3, **settings)  # fmt: skip
    agent.update(collect(agent))  # normalisers have seen something
    buffer = collect(agent, forced_env=2)
    log_probs = buffer.fields["log_probs"]  # of an older policy: some ratios are clipped
    log_probs += torch.where(log_probs < 0, 0.4 * torch.randn(log_probs.shape), 0.0)
    frozen = copy.deepcopy(agent.policy.heads.scales)
    agent.optimizer = KeepGradients(agent.optimizer)
    with pytest.warns(UserWarning, match="first_ratio_error"):
        metrics = agent.update(buffer)
    assert 0.1 < metrics["clip_fraction"] < 0.9
    assert 0.0 < metrics["decided_fraction"] < 1.0
    agent.policy.heads.scales = frozen  # the update moved it afterwards, and the encoder with it
    names = [name for name, _ in agent.policy.named_parameters()]
    doubles = {
        name: weight.double().requires_grad_()
        for name, weight in zip(names, agent.optimizer.weights, strict=True)
    }
    loss = slow_loss(agent, buffer, doubles)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    for parameter_name, kept in zip(names, agent.optimizer.kept, strict=True):
        expected = doubles[parameter_name].grad
        torch.testing.assert_close(
            kept.double(), expected, rtol=1e-4, atol=1e-6, msg=parameter_name
        )


# -- rows that must not count ---------------------------------------------------------------------


def test_steps_with_one_legal_action_teach_the_critic_only():
    agent = make_agent(SPACES["independent heads"], num_minibatches=1)
    buffer = collect(agent, forced_env=0)
    agent.config = replace(agent.config, value_coefficient=0.0)
    buffer.compute_advantages_and_returns()
    batch, layout = buffer.get_batched_sequences(), buffer.sequence_layout()
    initial = RecurrentState(batch.initial_hidden_h, batch.initial_hidden_c)
    was_forced = layout.rows // layout.max_steps == 0
    assert was_forced.any()

    def gradients(change):
        rows = rollout_rows(batch, layout)
        rows = rows._replace(advantages=torch.where(was_forced, change, rows.advantages))
        (steps,) = agent.policy.gather(
            batch.states, batch.actions, batch.masks, SequenceParts((layout,)), initial
        )
        scores = agent.policy.evaluate(steps, layout)
        loss, measured = ppo_loss(
            scores, rows, agent.policy.action_space, torch.ones(3), agent.config
        )
        agent.policy.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in agent.policy.parameters()], measured

    some, measured = gradients(0.0)
    assert measured["decided_fraction"] <= 1 - was_forced.float().mean()
    others, _ = gradients(1e6)
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b)
    assert max(g.abs().max() for g in some) > 1e-4


def test_normalisers_see_stored_rows_only():
    agent = make_agent(SPACES["one head"])
    buffer = collect(agent)
    agent.update(buffer)
    rows = buffer.sequence_layout().gather(buffer.fields["states"]).double()
    torch.testing.assert_close(agent.policy.heads.scales.mean, rows.mean(dim=0))
    torch.testing.assert_close(agent.policy.heads.scales.variance, rows.var(dim=0, correction=0))
    returns = buffer.sequence_layout().gather(buffer.fields["returns"]).double()
    torch.testing.assert_close(agent.value_normalizer.mean[0], returns.mean())
    assert agent.value_normalizer.count == len(buffer)


def test_values_are_handed_out_in_units_of_the_reward():
    agent = make_agent(SPACES["one head"])
    agent.value_normalizer.update(torch.tensor([[100.0], [300.0]]))
    masks = ActionMasks.all_legal(SPACES["one head"], NUM_ENVS)
    features, state = torch.randn(NUM_ENVS, FEATURES), agent.policy.initial_state(NUM_ENVS)
    raw = agent.policy.value(features, state)
    expected = raw * 100 + 200
    torch.testing.assert_close(agent.value(features, state), expected)
    torch.testing.assert_close(agent.act(features, masks, state).values, expected)


def test_a_new_scale_of_values_leaves_what_is_predicted():
    agent = make_agent(SPACES["one head"])
    features, state = torch.randn(NUM_ENVS, FEATURES), agent.policy.initial_state(NUM_ENVS)
    masks = ActionMasks.all_legal(SPACES["one head"], NUM_ENVS)
    raw = agent.value(features, state)
    agent._rescale_values(torch.tensor([1.0, 2.0, 6.0]))
    before = agent.value(features, state)
    # the first statistics are taken as they come
    torch.testing.assert_close(before, raw * (14 / 3) ** 0.5 + 3)
    likely = agent.act(features, masks, state, deterministic=True)
    for returns in (torch.tensor([100.0, 300.0, 320.0]), torch.tensor([-5.0, 900.0])):
        agent._rescale_values(returns)
        torch.testing.assert_close(agent.value(features, state), before, rtol=1e-4, atol=1e-3)
    assert agent.value_normalizer.count == 8
    after = agent.act(features, masks, state, deterministic=True)
    assert torch.equal(after.log_probs, likely.log_probs)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
def test_what_is_learned_does_not_depend_on_the_scale_of_rewards(scale):
    def learned(scale):
        torch.manual_seed(0)
        policy = flat_policy(SPACES["one head"], FEATURES, PolicyConfig(lstm_hidden_dim=8))
        agent = PPOAgent(policy, PPOConfig(num_minibatches=2))
        for rng_seed in range(4):
            torch.manual_seed(rng_seed)
            buffer = collect(agent)
            for name in ("rewards", "bootstrap_values"):
                buffer.fields[name].mul_(scale)
            agent.update(buffer, generator=torch.Generator().manual_seed(rng_seed))
        return agent.policy.state_dict()

    plain = learned(1.0)
    for name, weight in learned(scale).items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["one head", "conditional heads"])
def test_a_new_mean_of_features_leaves_what_is_made_of_an_observation(name):
    agent = make_agent(SPACES[name])
    agent.policy.double()
    torch.manual_seed(1)
    features = torch.randn(NUM_ENVS, FEATURES, dtype=torch.float64) * 3
    state = RecurrentState(*torch.randn(2, NUM_ENVS, 1, 8, dtype=torch.float64))
    masks = ActionMasks.all_legal(SPACES[name], NUM_ENVS)

    def made():
        decision = agent.act(features, masks, state, deterministic=True)
        return decision.log_probs, decision.values, agent.value(features, state), *decision.state

    spread = torch.randn(50, FEATURES, dtype=torch.float64)
    spread = (spread - spread.mean(dim=0)) / spread.std(dim=0, correction=0)
    agent.policy.heads.update_scales(spread * 3 + 1)
    before = made()
    # as many rows again, their mean elsewhere, their spread such that the scale of all stays at 3
    distance = torch.tensor([3.0, -3.0, 1.0, 0.0, 4.0], dtype=torch.float64)
    agent.policy.heads.update_scales(spread * (9 - distance.square() / 2).sqrt() + 1 + distance)
    normalizer = agent.policy.heads.scales
    torch.testing.assert_close(normalizer.mean, 1 + distance / 2)
    torch.testing.assert_close(normalizer.std, torch.full_like(distance, 3))
    for old, new in zip(before, made(), strict=True):
        torch.testing.assert_close(new, old, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_the_first_statistics_move_what_the_encoder_reads_and_later_ones_only_scale_it():
    agent = make_agent(SPACES["one head"], ppo_epochs=1)
    agent.optimizer = KeepGradients(agent.optimizer)  # all that changes is what scaling changes
    normalizer, encoder = agent.policy.heads.scales, agent.policy.heads.encoder
    features = torch.randn(NUM_ENVS, FEATURES)
    for is_first in (True, False, False):
        weight, bias = (p.detach().clone().double() for p in encoder.parameters())
        old_mean = normalizer.mean.clone()
        agent.update(collect(agent))
        assert (normalizer.mean - old_mean).abs().min() > 1e-3
        middle = normalizer.mean if is_first else old_mean
        expected = torch.tanh((features - middle) / normalizer.std @ weight.T + bias)
        found = agent.policy.heads.encode(features)[0].detach()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_running_statistics_do_not_depend_on_how_rows_arrive():
    rows = torch.randn(100, 3, dtype=torch.float64) * 5 + 7
    pieces = RunningNormalizer(3)
    for piece in rows.split([1, 9, 50, 0, 40]):
        pieces.update(piece)
    torch.testing.assert_close(pieces.mean, rows.mean(dim=0))
    torch.testing.assert_close(pieces.variance, rows.var(dim=0, correction=0))
    torch.testing.assert_close(pieces.denormalize(pieces.normalize(rows)), rows)


# -- when it goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("rng_seed", range(6))  # the bad env is in the first minibatch or the last
def test_an_update_that_is_not_finite_is_undone_and_the_run_stops_after_several(rng_seed):
    agent = make_agent(SPACES["one head"], max_failed_updates=2, rng_seed=rng_seed)
    agent.update(collect(agent))
    before = copy.deepcopy(agent.state_dict())
    buffer = collect(agent)
    buffer.fields["log_probs"][0, 0] = -3e38  # its ratio is not finite
    metrics = agent.update(buffer)
    assert metrics["update_undone"] == 1.0
    after = agent.state_dict()
    assert after["failed_updates"] == 1
    for key in ("policy", "value_normalizer"):
        for name, tensor in before[key].items():
            assert torch.equal(after[key][name], tensor), name
    for index, moments in before["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(after["optimizer"]["state"][index][name], tensor), name
    with pytest.raises(TrainingFailed, match="2 updates in a row"):
        agent.update(buffer)
    agent.failed_updates = 0
    assert agent.update(collect(agent))["update_undone"] == 0.0


def test_a_rollout_that_cannot_be_scored_leaves_the_agent_as_it_was():
    agent = make_agent(SPACES["one head"])
    before = copy.deepcopy(agent.state_dict())
    buffer = collect(agent)
    buffer.fields["actions"][3, 0] = 77
    with pytest.raises(ValueError, match="77"):
        agent.update(buffer)
    for name, tensor in before["policy"].items():
        assert torch.equal(agent.state_dict()["policy"][name], tensor), name
    assert agent.value_normalizer.count == 0


def test_gradients_are_clipped_to_their_norm():
    agent = make_agent(SPACES["one head"], num_minibatches=1, ppo_epochs=1, max_grad_norm=1e-3)
    agent.optimizer = KeepGradients(agent.optimizer)
    metrics = agent.update(collect(agent))
    norm = torch.stack([g.norm() for g in agent.optimizer.kept]).norm()
    assert metrics["gradient_norm"] > 1e-2
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_statistics_that_are_loaded_are_those_that_scale():
    normalizer, other = RunningNormalizer(1), RunningNormalizer(1)
    other.update(torch.tensor([[1.0], [5.0]]))
    values = torch.tensor([[4.0]])
    assert normalizer.normalize(values) == 4.0
    normalizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(normalizer.normalize(values), torch.tensor([[0.5]]))
    torch.testing.assert_close(normalizer.denormalize(values), torch.tensor([[11.0]]))
    normalizer.update(torch.tensor([[3.0], [3.0]]))
    torch.testing.assert_close(normalizer.denormalize(values), torch.tensor([[3 + 4 * 2**0.5]]))


def test_far_outliers_are_clipped_once_there_are_statistics():
    normalizer = RunningNormalizer(1, limit=10.0)
    assert normalizer.normalize(torch.tensor([[50.0]])) == 50.0
    normalizer.update(torch.tensor([[-1.0], [1.0]]))
    assert normalizer.normalize(torch.tensor([[50.0]])) == 10.0


def test_the_passes_stop_when_the_policy_has_moved_far_enough():
    eager = make_agent(SPACES["one head"], ppo_epochs=10, learning_rate=0.05, target_kl=0.01)
    assert eager.update(collect(eager))["ppo_epochs_run"] < 10
    free = make_agent(SPACES["one head"], ppo_epochs=10, learning_rate=0.05, target_kl=None)
    assert free.update(collect(free))["ppo_epochs_run"] == 10


@pytest.mark.gpu
def test_a_pass_waits_once_for_the_device_and_a_minibatch_never():
    def waits(**settings):
        agent = make_agent(
            SPACES["conditional heads"],
            device="cuda",
            target_kl=None,
            learning_rate=1e-5,
            **settings,
        )
        for _ in range(2):  # the first compiles and allocates
            buffer = collect(agent)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                agent.update(buffer)
                torch.cuda.set_sync_debug_mode("default")
        return len([w for w in caught if "synchronizing" in str(w.message)])

    once = waits(ppo_epochs=2, num_minibatches=1)
    assert waits(ppo_epochs=2, num_minibatches=4) == once
    assert waits(ppo_epochs=5, num_minibatches=4) == once + 3


def test_the_learning_rate_falls_to_zero():
    agent = make_agent(SPACES["one head"], learning_rate=0.1, learning_rate_schedule="linear")
    assert agent.update(collect(agent), progress=0.75)["learning_rate"] == pytest.approx(0.025)


def test_an_entropy_bonus_that_falls_is_that_much_smaller():
    def weights_after(progress, **settings):
        agent = make_agent(
            SPACES["conditional heads"], learning_rate_schedule="constant", **settings
        )
        agent.update(collect(agent), progress=progress, generator=torch.Generator().manual_seed(0))
        return torch.cat([weight.detach().flatten() for weight in agent.policy.parameters()])

    fallen = weights_after(0.75, entropy_coefficient=0.4, entropy_schedule="linear")
    torch.testing.assert_close(fallen, weights_after(0.75, entropy_coefficient=0.1))
    assert not torch.allclose(fallen, weights_after(0.75, entropy_coefficient=0.4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(clip=0.0), "clip=0.0"),
        (dict(learning_rate=lambda _: 1e-3), "learning_rate=<function.*; use a finite number"),
        (dict(gamma=1.5), "gamma=1.5"),
        (dict(ppo_epochs=0), "ppo_epochs=0"),
        (dict(head_entropy_weights={"mvoe": 1.0}), "no head 'mvoe'"),
        (dict(target_kl=-1.0), "target_kl=-1.0"),
        (dict(entropy_coefficient=math.nan), "entropy_coefficient=nan"),
        (dict(learning_rate_schedule="cosine"), "learning_rate_schedule='cosine'"),
        (dict(entropy_schedule="cosine"), "entropy_schedule='cosine'"),
    ],
)
def test_mistakes_in_the_settings_are_named(settings, message):
    def use():
        agent = make_agent(SPACES["one head"], **settings)
        agent.update(collect(agent))

    with pytest.raises(ValueError, match=message):
        use()


def test_an_empty_rollout_is_an_error():
    agent = make_agent(SPACES["one head"])
    with pytest.raises(ValueError, match="no steps"):
        agent.update(collect(agent, num_steps=0))
