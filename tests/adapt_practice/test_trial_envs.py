"""Episodes over recorded outcomes: legal choices, rewards that add up, and learning."""

from typing import NamedTuple

import pytest
import torch

from adapt_practice.outcomes import Outcomes, outcomes_of
from adapt_practice.training import RENT, REWARD_SCALE, AdaptConfig, TrialEnvs, learn
from adapt_practice.trials import TrialTable
from esper.adapting.controller import (
    ACTION_SPACE,
    ANCHORS,
    MAX_TRIES,
    AdaptationController,
    Tries,
    choices_of,
    validation_criterion,
)
from esper.adapting.plans import KNOWN_RULES, MENU, PLANS, RATES
from esper.adapting.signals import SIGNALS
from support.rollouts import act_and_step, row_for

CHOICES = len(PLANS) * len(RATES)
AS_IS = ANCHORS[0]
CHOSEN = [c for c in range(CHOICES) if c == AS_IS or c >= len(RATES)]  # nothing has one rate


def outcomes(num=30, rng_seed=0):
    """Random results; a third of the plans is not offered, and the menu's costs vary."""
    rng = torch.Generator().manual_seed(rng_seed)
    added = torch.rand(num, len(PLANS), generator=rng)
    added[torch.rand(num, len(PLANS), generator=rng) < 0.3] = torch.nan
    added[:, [plan not in MENU for plan in PLANS]] = torch.nan
    added[:, 0] = 0.0
    added = added[..., None].expand(-1, -1, len(RATES)).flatten(1)
    validation, test = (torch.rand(num, CHOICES, generator=rng) for _ in range(2))
    for start in range(1, len(RATES)):  # a plan that changes nothing has one result
        validation[:, start], test[:, start] = validation[:, 0], test[:, 0]
    missing = added.isnan()
    signals = torch.randn(num, len(SIGNALS), generator=rng)
    return Outcomes(
        signals,
        torch.randint(2, 60, (num,), generator=rng),
        added,
        validation.masked_fill(missing, torch.nan),
        test.masked_fill(missing, torch.nan),
    )


def legal_actions(masks, rng):
    """One legal action per env, head by head, read from the masks by hand."""
    rows = []
    for env in range(masks["place"].shape[0]):
        taken: tuple[int, ...] = ()
        for head in ACTION_SPACE:
            allowed = masks[head.name][(env, *taken)].nonzero().flatten()
            pick = int(torch.randint(len(allowed), (), generator=rng))
            taken = (*taken, int(allowed[pick]))
        rows.append(taken)
    return torch.tensor(rows)


class Taken(NamedTuple):
    """A step of all envs."""

    is_real: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor


class Watched:
    """Plays a round of random legal actions and keeps what happened in each env."""

    def __init__(self, found, num_envs=64, rng_seed=0):
        self.envs = TrialEnvs(found, num_envs, rng_seed)
        rng = torch.Generator().manual_seed(rng_seed)
        self.envs.begin_round()
        row = row_for(self.envs)
        observed = self.envs.observe(row)
        assert observed.starts.all()
        self.scenarios, self.first = self.envs._scenarios, row.states.clone()
        self.budgets, self.tries = self.envs._tries.budgets, self.envs._tries.left
        self.steps = []
        round_over = False
        while not round_over:
            actions = legal_actions(self.envs.observe(row).masks, rng)
            stepped, _ = act_and_step(self.envs, actions, row)
            round_over = stepped.round_over
            taken = Taken(stepped.is_real, row.rewards.clone(), row.terminated.clone())
            self.steps.append((choices_of(actions), taken))


def near_best(values, held_out):
    """Choices within half a standard error of the best accuracy, by hand."""
    best = max(values.values())
    right = (min(max(best, 0.0), 1.0) * held_out + 1) / (held_out + 2)
    return {
        c for c, v in values.items() if v >= best - 0.5 * (right * (1 - right) / held_out) ** 0.5
    }


def test_rewards_add_up_to_the_worth_of_the_kept_choice():
    found = outcomes()
    game = Watched(found)
    for env, scenario in enumerate(game.scenarios.tolist()):
        *tried, kept = (int(choices[env]) for choices, step in game.steps if step.is_real[env])
        assert len(tried) == int(game.tries[env])
        legal = [c for c in CHOSEN if found.added[scenario, c] <= game.budgets[env]]
        known = {a for a in ANCHORS if a in legal}
        for choice in tried:
            assert choice in set(legal) - known or known == set(legal)
            known.add(choice)
        values = {c: float(found.validation[scenario, c]) for c in known}
        assert kept in near_best(values, int(found.held_out[scenario]))
        worth = {c: float(found.test[scenario, c] - RENT * found.added[scenario, c]) for c in legal}
        expected = REWARD_SCALE * (worth[kept] - sum(worth.values()) / len(legal))
        total = sum(float(step.rewards[env]) for _, step in game.steps)
        assert total == pytest.approx(expected, abs=1e-4)


def test_episodes_end_when_the_policy_has_decided_after_its_tries():
    game = Watched(outcomes())
    assert {*game.tries.tolist()} == {*range(1, MAX_TRIES + 1)}
    assert len(game.steps) == MAX_TRIES + 1
    for number, (_, step) in enumerate(game.steps):
        assert torch.equal(step.terminated, game.tries == number)
        assert torch.equal(step.is_real, game.tries >= number)
        assert not step.rewards[~step.is_real].any()


def allowed_choices(masks, env):
    """The choices that four masks allow together."""
    allowed = set()
    for place in masks["place"][env].nonzero().flatten().tolist():
        for what in masks["what"][env, place].nonzero().flatten().tolist():
            for head in masks["head"][env, place, what].nonzero().flatten().tolist():
                for rate in masks["rate"][env, place, what, head].nonzero().flatten().tolist():
                    allowed.add(int(choices_of(torch.tensor([[place, what, head, rate]]))))
    return allowed


def test_masks_allow_exactly_the_legal_choices_that_were_not_tried():
    found = outcomes(4)
    budgets = torch.tensor([torch.inf, 0.5, 0.1, 0.0])
    tries = Tries(found.known, budgets, torch.full((4,), 2))
    legal = [{c for c in CHOSEN if found.added[env, c] <= budgets[env]} for env in range(4)]
    assert legal[3] == {AS_IS}  # nothing is free but the model as it is
    new = [options - set(ANCHORS) or {AS_IS} for options in legal]  # all was tried: it may be again
    assert [allowed_choices(tries.masks(), env) for env in range(4)] == new
    chosen = [*map(min, new)]
    tries.record(torch.tensor(chosen), torch.zeros(4))
    new = [options - {choice} or {AS_IS} for options, choice in zip(new, chosen, strict=True)]
    assert [allowed_choices(tries.masks(), env) for env in range(4)] == new


def test_what_is_kept_validates_within_half_a_standard_error_of_the_best():
    found = outcomes(3)
    free = torch.where(found.added.isnan(), 0.0, found.added)
    held_out = torch.tensor([8, 8, 10_000])
    found.validation[:, ANCHORS] = torch.tensor([0.5, 0.1, 0.45, 0.4])
    limit, tries = torch.full((3,), torch.inf), torch.tensor([2, 2, 2])
    state = Tries(found._replace(held_out=held_out, added=free).known, limit, tries)
    state.record(torch.tensor([7, 8, 8]), torch.tensor([0.5, 0.6, 0.6]))
    state.record(torch.tensor([9, 10, 10]), torch.tensor([torch.nan, 0.55, 0.55]))
    assert state.left.tolist() == [0, 0, 0]
    assert state.last.tolist() == [9, 10, 10]
    masks = state.masks()
    as_is, _, lp_ft, _ = ANCHORS
    assert allowed_choices(masks, 0) == {7, as_is, lp_ft}  # half of the error is .09
    assert allowed_choices(masks, 1) == {8, 10}
    assert allowed_choices(masks, 2) == {8}


def test_source_signals_are_hidden_in_about_half_of_the_episodes():
    found = outcomes()._replace(signals=torch.ones(30, len(SIGNALS)))
    features = Watched(found, num_envs=400).first[:, : len(SIGNALS)]
    of_source = torch.tensor(
        [s == "has_source" or s.endswith(("mean_shift", "spread_shift")) for s in SIGNALS]
    )
    assert features[:, ~of_source].eq(1).all()
    shown = features[:, of_source]
    assert torch.equal(shown.amin(1), shown.amax(1))
    assert 140 < shown[:, 0].sum() < 260


def test_outcomes_of_tables_by_hand():
    rng = torch.Generator().manual_seed(0)
    plans = [KNOWN_RULES[name] for name in ("nothing", "LP-FT")]
    accuracy, loss, test = (torch.rand(3, 2, len(RATES), generator=rng) for _ in range(3))
    loss[0, 0, 0] = 50.0
    table = TrialTable(
        torch.randn(3, len(SIGNALS)), torch.tensor([30, 40, 50]), torch.tensor([0.0, 0.9]),
        accuracy, loss, test, ("sign",) * 3,
    )  # fmt: skip
    found = outcomes_of([table, table], plans)
    assert found.signals.shape == (6, len(SIGNALS))
    assert found.held_out.tolist() == [8, 10, 12] * 2
    column = PLANS.index(plans[1]) * len(RATES)
    for row in range(6):
        for rate in range(len(RATES)):
            expected = accuracy[row % 3, 1, rate] - 0.01 * loss[row % 3, 1, rate]
            assert float(found.validation[row, column + rate]) == pytest.approx(float(expected))
            assert found.test[row, column + rate] == test[row % 3, 1, rate]
            assert float(found.added[row, column + rate]) == pytest.approx(0.9)
    assert float(found.validation[0, 0]) == pytest.approx(float(accuracy[0, 0, 0]) - 0.1)
    assert int((~found.test[0].isnan()).sum()) == 2 * len(RATES)


def test_a_diverged_training_validates_worse_than_any_other():
    accuracy, loss = torch.tensor([0.2, 0.2]), torch.tensor([torch.nan, 9.0])
    diverged, other = validation_criterion(accuracy, loss).tolist()
    assert diverged < other


def toy(num=200, rng_seed=0):
    """One signal says which of two plans is right; the validation rows say nothing."""
    rng = torch.Generator().manual_seed(rng_seed)
    signals = torch.zeros(num, len(SIGNALS))
    says = torch.rand(num, generator=rng) < 0.5
    signals[:, SIGNALS.index("accuracy")] = torch.where(says, 1.0, -1.0)
    added, validation, test = (torch.full((num, CHOICES), torch.nan) for _ in range(3))
    good, bad = (PLANS.index(KNOWN_RULES[n]) * len(RATES) for n in ("head only", "LP-FT"))
    for column in (AS_IS, good, bad):
        added[:, column], validation[:, column] = 0.0, 0.6
    validation[:, AS_IS], test[:, AS_IS] = 0.5, 0.5
    test[:, good], test[:, bad] = says.float(), (~says).float()
    held_out = torch.full((num,), 20)
    return Outcomes(signals, held_out, added, validation, test), says, good, bad


def test_ppo_learns_which_plan_a_signal_asks_for():
    found, says, good, bad = toy()
    lines = []
    config = AdaptConfig(num_envs=128, rounds=10, hidden=16, architectures=("mlp 64",))
    controller = learn(found, config, lines.append)
    fresh, says, good, bad = toy(rng_seed=1)
    choices = fresh.kept(controller, budget=torch.inf, tries=1)
    assert isinstance(controller, AdaptationController)
    right = choices == torch.where(says, good, bad)
    assert right.float().mean() > 0.95
    assert len(lines) == 5
