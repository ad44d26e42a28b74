"""Why a seed was kept or pruned stands in the ledger, in the controller's words."""

import pytest
import torch

from esper.leyline.stages import LifecycleOp
from esper.nissa.page import page_data
from support.growth_loops import new_growth, train
from support.models import WAIT, Script, act, germinate

LIFE = (germinate(0, blueprint=1, tempo=0), WAIT, WAIT)
ENDS = {
    "pruned": act(LifecycleOp.PRUNE, 0, alpha_speed=1),  # over two steps
    "kept": act(LifecycleOp.FOSSILIZE, 0),
}


class Talker(Script):
    """Says at which step it did what."""

    def reasons(self, reports, masks, actions):
        op = LifecycleOp(int(actions[0, 0])).name
        return [f"{op} at {int(reports.step)}"]


def run(controller):
    growth = new_growth(controller, decisions=12)
    for _ in range(8):
        train(growth)
        growth.decide(0.5)
    return growth.ledger


@pytest.mark.parametrize("fate", ENDS)
def test_a_fate_has_the_reason_that_the_controller_gave(fate):
    ledger = run(Talker(*LIFE, ENDS[fate]))
    said = f"{'PRUNE' if fate == 'pruned' else 'FOSSILIZE'} at 3"
    assert [ledger.decisions[step].reason for step in (0, 3)] == ["GERMINATE at 0", said]
    told = ledger.fate_of("s1")
    assert (told.fate, told.reason) == (fate, said)
    assert page_data(ledger)["seeds"][0]["why"] == said
    assert [event["reason"] for event in page_data(ledger)["events"]] == ["GERMINATE at 0", said]


@pytest.mark.parametrize("fate", ENDS)
def test_without_one_ledger_and_page_say_so_and_what_was_known(fate):
    ledger = run(Script(*LIFE, ENDS[fate]))
    assert ledger.fate_of("s1").reason == "the controller gave no reason; never measured"
    assert page_data(ledger)["events"][1]["reason"] == "the controller gave no reason"


def test_what_was_known_is_what_was_measured_until_then():
    growth = new_growth(Script(*LIFE, ENDS["kept"]), measures_itself=True)
    for _ in range(6):
        train(growth)
        growth.decide()
    ledger = growth.ledger
    known = next(state for step, state in ledger.states_of("s1") if step == 3)
    gain = ledger.show_gain(known.contribution, known.contribution_error)
    reason = f"the controller gave no reason; switching the seed off would cost {gain}"
    assert page_data(ledger)["events"][1]["reason"] == reason


def test_the_heuristic_gives_a_reason_for_all_that_it_does():
    torch.manual_seed(0)
    growth = new_growth("heuristic", decisions=15)
    while not growth.is_closed:
        train(growth)
        growth.decide(0.5)
    acted = [decision for decision in growth.ledger.decisions if decision.op != "WAIT"]
    assert acted
    assert all(decision.reason for decision in acted)


def test_the_reason_for_a_prune_is_that_of_the_prune():
    """Not that of hurrying it along afterwards."""
    slowly = act(LifecycleOp.PRUNE, 0, alpha_speed=3)
    ledger = run(Talker(*LIFE, slowly, act(LifecycleOp.ADVANCE, 0)))
    assert [decision.op for decision in ledger.decisions[3:5]] == ["PRUNE", "ADVANCE"]
    assert ledger.fate_of("s1").reason == "PRUNE at 3"
