"""A run's config: what it refuses, how it is kept, and what it draws hosts and data from."""

import json
import math
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from esper.leyline.factored_actions import FactoredActionSpace, Head
from esper.runtime.plain_config import from_plain, to_plain
from esper.simic.growth.hosts_and_data import load_hosts, load_task, training_hosts
from esper.simic.growth.train_config import PRESETS, TrainConfig
from esper.simic.gym.ppo_model import GymConfig
from esper.tolaria.environment import GrowthConfig, GrowthEnvironment
from esper.tolaria.tasks import mnist1d
from support.training_configs import NETWORKS, ORACLE


@pytest.mark.parametrize("config", [*PRESETS.values(), NETWORKS, ORACLE])
def test_a_config_survives_being_written_as_json(config):
    text = json.dumps(to_plain(config), allow_nan=False)
    assert from_plain(TrainConfig, json.loads(text)) == config


def test_numbers_without_a_word_in_json_survive_too():
    config = replace(ORACLE, growth=GrowthConfig(num_steps=12, params_budget=0.5))
    again = from_plain(TrainConfig, json.loads(json.dumps(to_plain(config))))
    assert again.growth.params_budget == 0.5
    assert again.growth.macs_budget == math.inf


def test_other_configs_are_kept_the_same_way():
    config = GymConfig(horizon=7, ppo=replace(GymConfig().ppo, head_entropy_weights={"op": 0.5}))
    assert from_plain(GymConfig, json.loads(json.dumps(to_plain(config)))) == config


def test_derived_fields_are_computed_again():
    space = FactoredActionSpace((Head("row", 3), Head("column", 4, given=("row",))))
    plain = json.loads(json.dumps(to_plain(space)))
    assert list(plain) == ["heads"]
    assert from_plain(FactoredActionSpace, plain) == space


@dataclass(frozen=True)
class Mixed:
    """The types of fields that no config has."""

    names: list[str]
    details: dict[str, str | float]
    inner: Head | None = None


def test_lists_dicts_and_unions_are_decoded():
    for mixed in (Mixed(["a"], {"b": 1.5, "c": "d"}), Mixed([], {}, Head("row", 3))):
        assert from_plain(Mixed, json.loads(json.dumps(to_plain(mixed)))) == mixed
    with pytest.raises(ValueError, match="details.b=None; expected float"):
        from_plain(Mixed, {"names": [], "details": {"b": None}})


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"roundz": 3}, "no setting 'roundz'; did you mean 'rounds'"),
        ({"ppo": {"learning_rat": 1.0}}, "'ppo.learning_rat'; did you mean 'learning_rate'"),
        ({"growth": {"xyzzy": 1}}, r"'growth.xyzzy'; there are \['num_steps'"),
        ({"rounds": "many"}, "rounds='many'; expected int"),
        ({"rounds": True}, "rounds=True; expected int"),
        ({"ppo": 3}, "ppo is 3, expected a PPOConfig"),
        ({"variants": "plain"}, "variants='plain'; expected"),
        ({"task": "mnist2d"}, "no task 'mnist2d'; there are data, mnist1d, .* of --import MODULE"),
        ({"task": "data"}, "task 'data' needs a path: use --data"),
        ({"data": "x.npz"}, "task 'mnist1d' does not read x.npz: leave out --data"),
        (
            {"imports": ["no_such_module"]},
            "module 'no_such_module' cannot be imported: ModuleNotFoundError",
        ),
        ({"imports": [".relative"]}, "module '.relative' cannot be imported"),
        ({"host_batch": {"batch_size": 0}}, "batch_size=0; use 1 or more"),
    ],
)
def test_what_a_config_does_not_know_is_refused_by_name(plain, message):
    with pytest.raises(ValueError, match=message):
        from_plain(TrainConfig, plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds=0; use 1 or more"),
        ({"observed_share": 1.5}, "observed_share=1.5; use a number from 0 to 1"),
        ({"growth": GrowthConfig(num_steps=9)}, "set both to the same number"),
        ({"variants": ("plain", "rows")}, "no variant 'rows'; use plain"),
        ({"variants": ("rows:1.5",)}, "no variant 'rows:1.5'"),
        ({"variants": ()}, "variants is empty"),
        ({"held_out_variants": ("plain",)}, r"\['plain'\] are both trained on and held out"),
        ({"held_out_widths": ("4-4",)}, r"\['4-4'\] cannot occur"),
        (
            {"widths": (4,), "held_out_widths": ()},
            "1 hosts to choose from, but host_batch.num_types=3",
        ),
        ({"ppo": replace(NETWORKS.ppo, num_minibatches=5)}, "12 hosts do not split"),
        ({"host_learning_rate": 0.0}, "host_learning_rate=0.0"),
    ],
)
def test_mistakes_are_found_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(NETWORKS, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"siblings": 3}, "envs_per_type=4 does not split into siblings=3"),
        ({"controls": 2}, "controls=2; use 0 to siblings - 1 = 1"),
        ({"constant_share": 1.5}, "constant_share=1.5; use a number from 0 to 1"),
        ({"constant_share": math.nan}, "constant_share=nan; use a number from 0 to 1"),
    ],
)
def test_a_batch_of_hosts_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(NETWORKS.host_batch, **changes)


@pytest.mark.parametrize("name", ["value_coefficient", "entropy_coefficient"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_coefficients_of_the_loss_are_finite(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; use a finite number"):
        replace(NETWORKS.ppo, **{name: value})
    with pytest.raises(ValueError, match=f"head_entropy_weights.op={value}; use a finite number"):
        replace(NETWORKS.ppo, head_entropy_weights={"op": value})


@pytest.mark.parametrize("name", ["compute_price", "params_budget", "macs_budget"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_prices_and_budgets_are_not_negative(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; use 0 or more"):
        GrowthConfig(**{name: value})


@pytest.mark.parametrize(
    ("min_rent", "max_rent", "message"),
    [
        (0.0, 0.3, "min_rent=0.0; use a finite number above 0"),
        (0.1, math.inf, "max_rent=inf; use a finite number above 0"),
        (0.4, 0.3, "max_rent=0.3; use 0.4 or more"),
    ],
)
def test_rents_are_an_interval(min_rent, max_rent, message):
    with pytest.raises(ValueError, match=message):
        GrowthConfig(min_rent=min_rent, max_rent=max_rent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device=cuda cannot be used here"):
        replace(NETWORKS, device="cuda").resolved_device()


def test_held_out_hosts_are_never_drawn_and_all_others_are():
    config = NETWORKS
    environment = GrowthEnvironment(training_hosts(config), config.growth, rng_seed=0)
    seen: set[tuple[str, str]] = set()
    for _ in range(20):
        environment.reset()
        host_batch = environment.host_batch
        seen |= set(
            zip(
                host_batch.host_names,
                [config.variants[v] for v in host_batch.view_ids],
                strict=True,
            )
        )
    every = {"-".join(map(str, widths)) for widths in product((2, 4), repeat=3)}
    assert {host for host, _ in seen} == every - {"4-2-4"}
    assert {variant for _, variant in seen} == {"plain", "rows:50"}


def test_a_host_is_named_by_its_widths():
    hosts = load_hosts(NETWORKS, mnist1d(), ((2, 4, 2),))
    assert [site.width for site in hosts[0].sites] == [2, 4, 2]


def test_variants_are_what_their_names_say():
    base = mnist1d()
    task = load_task(NETWORKS, ("plain", "permuted:4", "rows:50", "noise:0.5"))
    assert torch.equal(task.train_x[0], base.train_x[0])
    assert task.num_rows.tolist() == [3200, 3200, 50, 3200]
    assert not torch.equal(task.train_x[1], base.train_x[0])
    assert torch.equal(task.train_x[1].sort(dim=-1).values, base.train_x[0].sort(dim=-1).values)
    noise = task.train_x[3] - base.train_x[0]
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
