"""Action spaces check their heads; masks check their shapes and find the rows that apply."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import factored_actions
from esper.leyline.factored_actions import (
    OP_HEADS,
    ActionMasks,
    FactoredActionSpace,
    Head,
    audit_action_space,
    tamiyo_action_space,
)
from esper.leyline.stages import LifecycleOp

CHAIN = FactoredActionSpace(
    (
        Head("a", 2),
        Head("b", 3, given=("a",)),
        Head("c", 2, given=("b",)),
        Head("d", 4, given=("a", "c")),
        Head("e", 5, given=("a", "c")),
        Head("f", 2),
    )
)


def random_masks(space: FactoredActionSpace, num_envs: int, rng_seed: int) -> dict:
    generator = torch.Generator().manual_seed(rng_seed)
    return {
        name: torch.rand(num_envs, *space.mask_shape(name), generator=generator) < 0.6
        for name in space.names
    }


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((), "at least one head"),
        ((Head("a", 2), Head("a", 3)), "appears twice"),
        ((Head("a", 0),), "size 0"),
        ((Head("a", 2.5),), "size 2.5; use an int from 1"),
        ((Head("a", True),), "size True; use an int"),
        ((Head("a", 2**40),), "use an int from 1 to 1048576"),
        ((Head("a", 2, given=("b",)), Head("b", 2)), r"given \['b'\]"),
    ],
)
def test_impossible_heads_are_refused(heads: tuple[Head, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FactoredActionSpace(heads)


def test_the_layout_of_a_space_follows_from_its_heads() -> None:
    assert CHAIN.num_heads == 6
    assert CHAIN.num_choices == 18
    assert CHAIN.slices[3] == slice(7, 11)
    assert CHAIN.given_indices == ((), (0,), (1,), (0, 2), (0, 2), ())
    assert CHAIN.unconditional == (0, 5)
    assert CHAIN.mask_shape("d") == (2, 2, 4)
    assert CHAIN.head_groups == (range(1), range(1, 2), range(2, 3), range(3, 5), range(5, 6))
    assert [part.sizes for part in CHAIN.group_spaces] == [(2,), (3,), (2,), (4, 5), (2,)]
    assert audit_action_space().group_spaces == (audit_action_space(),)


def test_splitting_gives_every_head_its_part() -> None:
    packed = torch.randn(7, CHAIN.num_choices)
    assert torch.equal(torch.cat(list(CHAIN.split(packed).values()), dim=-1), packed)
    assert torch.equal(CHAIN.view(packed, "d"), packed[:, 7:11])
    with pytest.raises(ValueError, match=r"expected \[..., 18\]"):
        CHAIN.check_packed(packed[:, 1:])
    with pytest.raises(ValueError, match="no head 'z'"):
        CHAIN.view(packed, "z")


@given(num_envs=st.integers(1, 6), rng_seed=st.integers(0, 2**31))
def test_a_row_is_the_masks_entry_at_the_earlier_choices(num_envs: int, rng_seed: int) -> None:
    parts = random_masks(CHAIN, num_envs, rng_seed)
    masks = ActionMasks(CHAIN, parts)
    actions = torch.stack([torch.randint(size, (num_envs,)) for size in CHAIN.sizes], dim=-1)
    expected = []
    for head, (name, earlier) in enumerate(zip(CHAIN.names, CHAIN.given_indices, strict=True)):
        rows = [parts[name][(env, *actions[env, list(earlier)])] for env in range(num_envs)]
        expected.append(torch.stack(rows))
        assert torch.equal(masks[name], parts[name])
        assert torch.equal(masks.row(head, actions), expected[-1])
    for same in (masks, masks.to("cpu"), ActionMasks(CHAIN, masks.groups)):
        applied = [same.rows(group, actions) for group in CHAIN.head_groups]
        assert torch.equal(torch.cat(applied, dim=-1), torch.cat(expected, dim=-1))
    assert masks.to("cpu") is masks
    assert masks.to("meta").device.type == "meta"


def test_an_earlier_choice_out_of_range_is_refused() -> None:
    masks = ActionMasks(CHAIN, random_masks(CHAIN, 3, 0))
    for head, wrong in ((1, 2), (1, -1), (3, 2)):
        actions = torch.zeros(3, CHAIN.num_heads, dtype=torch.int64)
        actions[1, CHAIN.given_indices[head][-1]] = wrong
        with pytest.raises(ValueError, match=f"env 1, head .*choice {wrong}; there are 2"):
            masks.row(head, actions)


def test_the_sizes_of_the_audit_space_are_constants() -> None:
    names = ("NUM_SLOTS", "NUM_BLUEPRINTS", "NUM_BLENDS", "NUM_OPS")
    sizes = tuple(getattr(factored_actions, name) for name in names)
    assert audit_action_space().sizes == sizes == (3, 5, 3, 4)


def test_masks_of_a_wrong_shape_or_type_are_refused_by_head() -> None:
    parts = random_masks(CHAIN, 3, 0)
    for name, wrong in itertools.product(
        CHAIN.names, (lambda m: m[..., :-1], lambda m: m[:2], lambda m: m.float())
    ):
        if name == "a" and wrong(parts["a"]).shape[0] != 3:
            continue  # the first head says how many envs there are
        with pytest.raises(ValueError, match=f"mask of head '{name}'.*expected torch.bool"):
            ActionMasks(CHAIN, {**parts, name: wrong(parts[name])})
    with pytest.raises(ValueError, match=r"heads \['f'\] are missing"):
        ActionMasks(CHAIN, {name: parts[name] for name in CHAIN.names[:-1]})
    with pytest.raises(ValueError, match=r"no heads \['z'\]"):
        ActionMasks(CHAIN, {**parts, "z": parts["a"]})


def test_all_legal_is_legal_everywhere() -> None:
    masks = ActionMasks.all_legal(CHAIN, 3)
    assert all(masks[name].shape == (3, *CHAIN.mask_shape(name)) for name in CHAIN.names)
    assert all(masks[name].all() for name in CHAIN.names)


def test_every_head_of_tamiyo_is_used_by_some_op_and_slots_by_all_but_waiting() -> None:
    space = tamiyo_action_space(3, 8)
    assert list(OP_HEADS) == list(LifecycleOp)
    assert {name for names in OP_HEADS.values() for name in names} == set(space.names) - {"op"}
    for op, names in OP_HEADS.items():
        assert ("slot" in names) == (op != LifecycleOp.WAIT)
