"""What a controller is shown of a user's data: its rows and its locality, by grow and by Growth."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import esper
from esper import Growth
from esper.growing.data_facts import LEAST_ROWS, USUAL_TRAIN_ROWS, DataFacts, count_rows
from esper.kasmina.locality import locality
from support.models import Script, build

SMOOTH = torch.randn(40, 1, 16, generator=torch.Generator().manual_seed(0)).cumsum(-1)
LABELS = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(SMOOTH, LABELS, strict=True))


def test_rows_are_counted_where_a_loader_can_tell():
    x = SMOOTH[:8]
    data = TensorDataset(SMOOTH, LABELS)
    assert count_rows(DataLoader(data, batch_size=16, shuffle=True), x) == 40
    assert count_rows([(x, LABELS[:8])] * 5, x) == 40
    assert count_rows([((x, x), LABELS[:8])] * 5, (x, x)) == 40
    assert count_rows([({"x": x, "scale": 2}, LABELS[:8])] * 3, {"x": x, "scale": 2}) == 24
    assert count_rows(DataLoader(Stream(), batch_size=16), x) is None
    assert count_rows((batch for batch in [x]), x) is None


def test_locality_is_that_of_the_first_input_with_positions():
    expected = locality(SMOOTH)
    assert expected > 0.7
    tokens, vector = torch.zeros(40, 7, dtype=torch.int64), torch.randn(40, 5)
    for example in (SMOOTH, (tokens, SMOOTH), {"vector": vector, "x": SMOOTH}):
        assert DataFacts.of(example, 40) == DataFacts(40, expected)
    for example in (tokens, vector, (10 * SMOOTH).long(), (tokens, vector)):
        assert DataFacts.of(example, None) == DataFacts(USUAL_TRAIN_ROWS, 0.0)


def test_a_few_rows_say_nothing_of_locality():
    """Two smooth rows have correlations of 1 and -1 alone."""
    assert DataFacts.of(SMOOTH[:2], 40).locality == 0.0
    assert DataFacts.of(SMOOTH[: LEAST_ROWS - 1], 40).locality == 0.0
    assert DataFacts.of(SMOOTH[:LEAST_ROWS], 40).locality > 0.7


def test_grow_shows_the_controller_its_loaders_rows_and_locality():
    controller = Script()
    model, _ = build("series")
    loader = DataLoader(TensorDataset(SMOOTH[:32], LABELS[:32]), batch_size=16)
    validation = [(torch.randn(8, 1, 16), LABELS[:8])]
    esper.grow(
        model,
        loader,
        validation,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        controller=controller,
        steps=4,
        decisions=2,
        progress=False,
    )
    assert len(controller.reports) == 2
    for reports in controller.reports:
        assert reports.train_rows.tolist() == [32]
        assert reports.locality.tolist() == pytest.approx([locality(SMOOTH[:16])])


def growth_on(example, controller, **options):
    model: nn.Module = build("series")[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Growth(model, optimizer, example=example, controller=controller, decisions=4, **options)


def test_a_loop_of_ones_own_says_how_many_rows_there_are():
    controller = Script()
    growth_on(SMOOTH, controller, train_rows=1234).decide(0.5)
    assert controller.reports[0].train_rows.tolist() == [1234]
    assert controller.reports[0].locality.tolist() == pytest.approx([locality(SMOOTH)])


def test_a_run_goes_on_with_the_data_it_was_shown_whatever_the_new_example(tmp_path):
    first, second = Script(), Script()
    growth = growth_on(SMOOTH, first, train_rows=1234)
    growth.save(tmp_path / "growth.pt")
    growth.decide(0.5)
    resumed = growth_on(torch.randn(8, 1, 16), second)
    resumed.load(tmp_path / "growth.pt")
    resumed.decide(0.5)
    (before,), (after,) = first.reports, second.reports
    assert after.train_rows.tolist() == before.train_rows.tolist() == [1234]
    assert torch.equal(after.locality, before.locality)
