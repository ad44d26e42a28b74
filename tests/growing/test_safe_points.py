"""A broken network goes back: to the last healthy one, then to the best committed one."""

import math

import pytest
import torch
from growing.small_models import WAIT, Script, act, germinate, mlp
from growing.small_runs import X, frozen_state, new_growth, stages, train
from torch import nn

from esper import Growth
from esper.leyline.stages import LifecycleOp, SeedStage

GROWN = germinate(0, blueprint=1, tempo=0)


def seed_weights(growth):
    return [p.detach().clone() for p in growth._network.slots[0].seed.parameters()]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def grown_run(*metrics, script=(GROWN,), **options):
    """A run after as many decisions as metrics, trained after each."""
    growth = new_growth(Script(*script), decisions=12, **options)
    for metric in metrics:
        train(growth)
        growth.decide(metric)
    return growth


def scored_run(*metrics, script, without, decisions=12):
    """A run that measures itself and is closed at the last of the metrics.

    Each is that of the whole network; without its uncommitted seeds it is `without`.
    """
    runs = []

    def score(batch):
        value = metrics[runs[0].step] if runs else metrics[0]
        if runs:
            states, network = runs[0]._network.states, runs[0]._network
            is_open = bool((states.has_seed & (states.stage != SeedStage.FOSSILIZED)).any())
            value = without if is_open and not network.uncommitted else value
        return torch.full((8,), value, dtype=torch.float64)

    growth = new_growth(Script(*script), decisions=decisions, val_loader=[0], score=score)
    runs.append(growth)
    for _ in metrics[:-1]:
        train(growth)
        growth.decide()
    train(growth)
    growth.close()
    return growth


def test_a_lost_metric_costs_one_step_of_training_and_no_seed():
    """The seed is never committed, so the only committed network is that of the first step."""
    growth = grown_run(0.3, 0.5, 0.7, 0.8)
    train(growth)
    growth.decide(0.85)
    healthy, seed = frozen_state(growth), seed_weights(growth)
    train(growth)
    growth.decide(math.nan)
    assert same(healthy, frozen_state(growth))
    assert same(seed, seed_weights(growth))
    assert [(r.step, r.to_step) for r in growth.ledger.rollbacks] == [(5, 4)]
    assert stages(growth)[0] == SeedStage.HOLDING
    assert growth.ledger.fate_of("s1") is None
    assert len(growth.optimizer.param_groups) == 2


def test_what_breaks_again_at_once_goes_back_to_the_best_committed_network():
    growth = new_growth(Script(WAIT, GROWN), decisions=9)
    train(growth)
    growth.decide(0.8)  # the best committed network: no seeds
    best = frozen_state(growth)
    for metric in (0.7, 0.7):  # a seed germinates and is felt
        train(growth)
        growth.decide(metric)
    for _ in range(2):
        train(growth)
        with torch.no_grad():
            growth.model[0].weight[0, 0] = math.nan
        growth.decide(0.75)
    assert same(best, frozen_state(growth))
    assert growth.seeds == {}
    assert stages(growth)[0] == SeedStage.EMBARGOED
    assert [r.to_step for r in growth.ledger.rollbacks] == [2, 0]
    assert growth.ledger.rollbacks[0].reason == "weights or buffers are not finite"
    assert growth.ledger.fate_of("s1").fate == "rolled_back"


def test_a_healthy_step_between_two_breaks_is_the_one_to_go_back_to():
    growth = grown_run(0.5, 0.6, math.nan, 0.6, math.nan)
    assert [(r.step, r.to_step) for r in growth.ledger.rollbacks] == [(2, 1), (4, 3)]
    assert growth.seeds


def test_a_seed_that_was_born_since_goes_and_its_slot_rests():
    growth = grown_run(0.5, math.nan)
    assert growth.seeds == {}
    assert stages(growth)[0] == SeedStage.EMBARGOED
    assert growth.ledger.fate_of("s1").fate == "rolled_back"


def test_a_seed_that_was_pruned_since_stays_pruned():
    script = (GROWN, WAIT, WAIT, act(LifecycleOp.PRUNE, 0))
    growth = grown_run(0.5, 0.6, 0.6, 0.6, math.nan, script=script)
    assert growth.seeds == {}
    assert growth.ledger.fate_of("s1").fate == "pruned"
    growth.close(math.nan)  # no network with that seed is left to keep
    assert growth.params == growth.ledger.before.params
    assert growth.best_metric == 0.5


def test_a_network_that_lost_a_seed_since_it_was_measured_is_not_kept_for_its_metric():
    script = (GROWN, germinate(1, blueprint=1, tempo=0), WAIT, act(LifecycleOp.PRUNE, 0))
    growth = grown_run(0.3, 0.5, 0.6, 0.9, script=script)
    growth.close(math.nan)
    assert growth.best_metric == 0.3
    assert growth.params == growth.ledger.before.params


COMMIT = act(LifecycleOp.FOSSILIZE, 0)


def test_a_network_counts_as_committed_once_its_seeds_are():
    """The best was measured at step 3, before the commitment at step 5."""
    growth = new_growth(Script(GROWN, WAIT, WAIT, WAIT, WAIT, COMMIT), decisions=12)
    for metric in (0.3, 0.5, 0.6, 0.9, 0.7):
        train(growth)
        growth.decide(metric)
        if metric == 0.9:
            best, seed = frozen_state(growth), seed_weights(growth)
    assert growth.best_metric == 0.3
    growth.decide(0.7)
    growth.close(0.8)
    assert growth.best_metric == 0.9
    assert same(best, frozen_state(growth))
    assert same(seed, seed_weights(growth))
    assert growth.ledger.fate_of("s1").fate == "kept"


TWO = (GROWN, germinate(1, blueprint=1, tempo=0), WAIT, WAIT, COMMIT)


def test_a_network_with_a_seed_that_was_never_committed_does_not_count():
    growth = scored_run(0.5, 0.6, 0.6, 0.9, 0.7, 0.7, 0.7, script=TWO, without=0.4, decisions=7)
    assert growth.is_closed
    assert growth.best_metric == 0.5
    assert growth.seeds == {}


def test_who_stops_early_keeps_the_best_network_whoever_measured_it():
    """The controller had not come to commit the second seed: that says nothing against it."""
    told = grown_run(0.5, 0.6, 0.6, 0.9, 0.7, 0.7, script=TWO)
    told.close(0.7)
    measured = scored_run(0.5, 0.6, 0.6, 0.9, 0.7, 0.7, 0.7, script=TWO, without=0.4)
    for growth in (told, measured):
        assert growth.is_closed
        assert growth.best_metric == 0.9
        assert list(growth.seeds) == ["1", "5"]
        assert growth.plain_model()
        assert {growth.ledger.fate_of(seed).fate for seed in ("s1", "s2")} == {"kept"}
    assert measured.ledger.fate_of("s2").reason == "the best metric was measured with it"


def test_at_the_end_the_peak_with_all_its_seeds_counts_if_no_one_could_commit_them():
    growth = grown_run(0.5, 0.6, 0.6, 0.95, 0.6)
    growth.decisions = 6
    growth.decide(0.7)
    assert growth.best_metric == 0.95
    assert growth.seeds


def test_who_stops_early_is_not_left_with_less_than_the_best_committed_network():
    growth = scored_run(0.8, 0.6, 0.7, 0.7, script=(GROWN,), without=0.5)
    assert growth.best_metric == 0.8
    assert growth.seeds == {}


def test_what_breaks_twice_goes_back_to_the_best_with_its_seeds_before_the_best_committed():
    """The seed is at full weight from step 2 on; nothing is committed after step 0."""
    growth = grown_run(0.3, 0.5, 0.6, 0.9, 0.7, *[math.nan] * 3)
    assert [r.to_step for r in growth.ledger.rollbacks] == [4, 3, 0]
    assert growth.seeds == {}


def test_a_network_is_not_gone_back_to_twice():
    """The best with its seeds is the last: once it has broken again it is no way out."""
    growth = grown_run(0.3, 0.5, 0.6, 0.9, *[math.nan] * 2)
    assert [r.to_step for r in growth.ledger.rollbacks] == [3, 0]


def test_a_network_on_a_ramp_does_not_count():
    """Of 0.9 the seed had half its weight."""
    growth = grown_run(
        0.3, 0.9, 0.7, 0.6, 0.6, script=(germinate(0, blueprint=1), WAIT, WAIT, WAIT, COMMIT)
    )
    growth.close(0.6)
    assert growth.best_metric == 0.7


def test_a_network_with_an_earlier_seed_of_the_slot_does_not_count():
    again = (GROWN, WAIT, act(LifecycleOp.PRUNE, 0), WAIT, WAIT, GROWN, WAIT, COMMIT)
    growth = grown_run(0.3, 0.5, 0.9, 0.5, 0.5, 0.5, 0.6, 0.7, script=again)
    growth.close(0.65)
    assert growth.best_metric == 0.7


def test_a_rollback_does_not_forget_the_best_network_with_the_seeds_of_today():
    """The seed is younger than its steps once a step was taken back, and still the same."""
    script = (GROWN, *[WAIT] * 7, COMMIT)
    growth = grown_run(0.3, 0.5, 0.6, 0.9, 0.7, math.nan, 0.7, 0.7, 0.7, script=script)
    growth.close(0.7)
    assert growth.best_metric == 0.9
    assert growth.seeds


@pytest.mark.parametrize(("scale", "spoiled"), [(math.inf, math.nan), (1e25, math.inf)])
def test_statistics_that_are_not_finite_are_a_rollback(scale, spoiled):
    """The weights are sound after a bad batch whose step was skipped; the outputs are not."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = Growth(model, optimizer, example=X, controller=Script(), decisions=8)
    growth.decide(0.4)
    train(growth)
    with torch.no_grad():
        model(X * scale)
    assert str(float(model[1].running_var[0])) == str(spoiled)
    growth.decide(0.9)
    assert growth.ledger.rollbacks[0].reason == "weights or buffers are not finite"
    assert growth.best_metric == 0.4
    assert bool(model.eval()(X).isfinite().all())


@pytest.mark.parametrize(
    "buffer",
    [
        torch.tensor([0.0, -math.inf]),  # a mask
        torch.tensor([math.nan]),  # a place that waits for its value
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
    ],
)
def test_buffers_that_were_never_finite_numbers_are_no_fault(buffer):
    model = mlp()
    model.register_buffer("odd", buffer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = Growth(model, optimizer, example=X, controller=Script(), decisions=8)
    growth.decide(0.4)
    train(growth)
    growth.decide(0.5)
    assert growth.ledger.rollbacks == []


def test_a_cache_of_another_size_is_no_fault():
    model = mlp()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = Growth(model, optimizer, example=X, controller=Script(), decisions=8)
    growth.decide(0.4)
    model.cache = torch.full((2, 2), -math.inf).triu(1)
    growth.decide(0.5)
    assert growth.ledger.rollbacks == []


@pytest.mark.parametrize(("metric", "reason"), [(0.3, "fell from 0.8"), (math.nan, "not a number")])
def test_a_collapse_or_a_lost_metric_is_a_rollback(metric, reason):
    growth = new_growth(Script(GROWN))
    growth.decide(0.8)
    train(growth)
    growth.decide(metric)
    assert reason in growth.ledger.rollbacks[0].reason
    assert not growth.optimizer.state  # as it was then: before the first step


def test_a_dip_before_anything_has_grown_is_the_models_own():
    """Nothing of its training is taken back for it, nor the seed that is born in it."""
    growth = new_growth(Script(WAIT, WAIT, GROWN), decisions=12)
    for metric in (0.3, 0.8, 0.3, 0.25, 0.2):
        train(growth)
        before = frozen_state(growth)
        growth.decide(metric)
        assert same(before, frozen_state(growth))
    assert growth.seeds
    assert growth.best_metric == 0.8
    growth.decide(0.09)  # now it is broken, by what it was in the dip
    assert growth.ledger.rollbacks[0].reason == "the metric fell from 0.2 to 0.09"
    train(growth)
    growth.decide(math.nan)
    assert len(growth.ledger.rollbacks) == 2


def test_a_lost_metric_is_a_rollback_before_anything_has_grown():
    growth = new_growth(Script())
    growth.decide(0.8)
    growth.decide(math.nan)
    assert growth.ledger.rollbacks[0].to_step == 0


def test_a_collapse_is_one_from_the_last_step_too():
    """0.4 is no collapse beside the best committed network, but beside the one just measured."""
    growth = grown_run(0.3, 0.6, 0.9, 0.4)
    assert growth.ledger.rollbacks[0].reason == "the metric fell from 0.9 to 0.4"


@pytest.mark.parametrize(("breaks", "stage"), [(1, "FOSSILIZED"), (2, "EMBARGOED")])
def test_a_commitment_stands_until_the_best_network_has_none(breaks, stage):
    script = (GROWN, WAIT, act(LifecycleOp.FOSSILIZE, 0))
    growth = grown_run(0.8, 0.7, 0.7, *[0.1] * breaks, script=script)
    assert stages(growth)[0] == SeedStage[stage]
    assert growth.ledger.fate_of("s1").fate == ("kept" if breaks == 1 else "rolled_back")


def test_a_run_that_ends_broken_keeps_its_last_healthy_network_if_it_is_the_best():
    growth = grown_run(0.3, 0.6, 0.7)
    train(growth)
    growth.model.eval()
    last = growth.model(X)
    growth.model.train()
    growth.decide(0.9)
    train(growth)
    growth.close(math.nan)
    growth.model.eval()
    assert torch.equal(growth.plain_model()(X), last)
    assert growth.best_metric == 0.9


def test_what_a_broken_network_shows_is_no_evidence():
    script = Script(GROWN)
    growth = new_growth(script, decisions=9, measures_itself=True)
    for _ in range(3):
        train(growth)
        growth.decide()
    known = growth._evidence.contribution[0, 0].clone()
    train(growth)
    with torch.no_grad():
        growth.model[0].weight[0, 0] = math.nan
    growth.decide()
    report = script.reports[-1]
    assert growth.seeds
    assert bool(report.contribution_known[0, 0])
    assert torch.equal(report.contribution[0, 0], known)
    assert int(report.contribution_age[0, 0]) == 1


def test_a_resumed_run_goes_back_as_the_first_would(tmp_path):
    growth = grown_run(0.3, 0.6, 0.7)
    growth.save(tmp_path / "growth.pt")
    other = new_growth(Script(), decisions=12)
    other.load(tmp_path / "growth.pt")
    for run in (growth, other):
        torch.manual_seed(0)
        train(run)
        run.decide(math.nan)
    assert same(frozen_state(growth), frozen_state(other))
    assert same(seed_weights(growth), seed_weights(other))
    assert other.ledger.rollbacks[0].to_step == 2
