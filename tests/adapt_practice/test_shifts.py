"""Every kind of shift keeps shapes and is fixed by its rng seed."""

from itertools import product

import pytest
import torch

from adapt_practice.scenarios import (
    HELD_OUT_KINDS,
    IMAGE_KINDS,
    INPUT_KINDS,
    OUTPUT_KINDS,
    draw_scenarios,
)
from adapt_practice.shifts import INPUT_SHIFTS, OUTPUT_SHIFTS, Shift

KINDS = [*INPUT_SHIFTS, *OUTPUT_SHIFTS, "noise+permute_labels", "mixture+new_classes", "none"]
CLASSES = 5


def rows(*shape, num=40):
    rng = torch.Generator().manual_seed(0)
    return torch.randn(num, *shape, generator=rng), torch.arange(num) % CLASSES


@pytest.mark.parametrize("kinds", KINDS)
def test_shapes_and_types_stay(kinds):
    for shape, strength in product([(1, 20), (3, 9, 8), (1, 8, 8), (20,)], [0.0, 0.5, 1.0]):
        x, y = rows(*shape)
        before = x.clone(), y.clone()
        shifted_x, shifted_y = Shift(kinds, strength, 3)(x, y, CLASSES)
        assert shifted_x.shape == x.shape
        assert shifted_x.dtype == x.dtype
        assert shifted_x.isfinite().all()
        assert shifted_y.shape == y.shape
        assert shifted_y.dtype == torch.int64
        assert 0 <= int(shifted_y.min()) <= int(shifted_y.max()) < CLASSES
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


@pytest.mark.parametrize("kinds", KINDS)
def test_the_rng_seed_fixes_a_shift(kinds):
    x, y = rows(1, 20)
    state = torch.get_rng_state()
    first, again = (Shift(kinds, 0.7, 5)(x, y, CLASSES) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", INPUT_SHIFTS)
def test_shifts_of_inputs_change_inputs_only(kind):
    x, y = rows(1, 20)
    shifted_x, shifted_y = Shift(kind, 0.7, 5)(x, y, CLASSES)
    assert not torch.equal(shifted_x, x)
    assert torch.equal(shifted_y, y)


@pytest.mark.parametrize("kind", OUTPUT_SHIFTS)
@pytest.mark.parametrize("seed", range(4))
def test_few_rows_and_test_rows_have_the_same_map_of_labels(kind, seed):
    x, y = rows(1, 20)
    shift = Shift(kind, 0.7, seed)
    new_names = shift(x[:CLASSES], torch.arange(CLASSES), CLASSES)[1]
    for part in (slice(0, 10), slice(10, None)):
        shifted_x, shifted_y = shift(x[part], y[part], CLASSES)
        assert torch.equal(shifted_x, x[part])
        assert torch.equal(shifted_y, new_names[y[part]])


@pytest.mark.parametrize(
    "kind", ["dead", "scramble", "local_gain", "gain", "echo", "resample", "power"]
)
def test_few_rows_and_test_rows_have_the_same_sensor(kind):
    """Shifts of the sensor treat a row the same whatever rows are next to it."""
    x, y = rows(1, 20)
    shift = Shift(kind, 0.7, 2)
    together = shift(x, y, CLASSES)[0]
    torch.testing.assert_close(shift(x[:7], y[:7], CLASSES)[0], together[:7])
    assert not torch.equal(Shift(kind, 0.7, 5)(x, y, CLASSES)[0], together)


def test_worked_examples():
    x, y = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([1])
    shifted = lambda kind, strength=0.0: Shift(kind, strength, 0)(x, y, 3)[0].flatten().tolist()  # noqa: E731
    assert shifted("sign") == [-1, 2, -3, -4]
    assert shifted("reverse") == [4, 3, -2, 1]
    assert shifted("rectify") == [1, 2, 3, 4]
    assert shifted("saturate") == [1, -1, 1, 1]
    assert shifted("swap_halves") == [3, 4, 1, -2]
    assert shifted("quantise", 1.0) == [0, -2, 4, 4]  # steps of 2, halves to even
    assert shifted("derivative", 1.0) == [6, -10, -2, 8]
    assert shifted("threshold", 1.0) == [0 if abs(v) < 1 else v for v in (1, -2, 3, 4)]
    assert int(Shift("move_labels", 0.0, 0)(x, torch.tensor([2]), 3)[1]) == 0


def test_swapped_and_merged_labels():
    x, y = rows(1, 4, num=CLASSES)
    for seed in range(5):
        swapped = Shift("swap_labels", 0.0, seed)(x, y, CLASSES)[1]
        assert int((swapped != y).sum()) == 2
        assert sorted(swapped.tolist()) == y.tolist()
        merged = Shift("merge_labels", 1.0, seed)(x, y, CLASSES)[1]
        assert len(merged.unique()) == 2  # 0.3 of five classes


def test_every_kind_is_practised_or_held_out():
    held_out = {kind for kinds in HELD_OUT_KINDS for kind in kinds.split("+")}
    known = {*INPUT_SHIFTS, *OUTPUT_SHIFTS, "new_classes"}
    assert {*INPUT_KINDS, *IMAGE_KINDS, *OUTPUT_KINDS} | held_out == known
    alone = {kinds for kinds in HELD_OUT_KINDS if "+" not in kinds}
    assert not alone & {*INPUT_KINDS, *OUTPUT_KINDS}


def test_scenarios_are_drawn_from_the_kinds_and_rows():
    scenarios = draw_scenarios(300, rng_seed=4)
    assert scenarios == draw_scenarios(300, rng_seed=4)
    kinds = {kind for scenario in scenarios for kind in scenario.shift.kinds.split("+")}
    assert kinds == {*INPUT_KINDS, *OUTPUT_KINDS, "none"}
    counts = torch.tensor([scenario.rows for scenario in scenarios]).float()
    assert 30 <= counts.min() <= counts.max() <= 1000
    assert 150 < counts.median() < 200  # log-uniform: the median is the geometric mean, 173
    assert len({scenario.shift.rng_seed for scenario in scenarios}) == 300
