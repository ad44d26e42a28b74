"""A run that has stopped learning warns, once for each reason."""

import warnings

import pytest

from esper.nissa.health import HealthMonitor

HEALTHY = {
    "ppo/normalized_entropy/op": 0.3,
    "ppo/normalized_entropy/slot": float("nan"),  # it never has a choice
    "ppo/explained_variance": 0.7,
    "ppo/value_loss": 0.4,
    "ppo/ppo_epochs_run": 4.0,
    "ppo/update_undone": 0.0,
    "episode/germinations": 1.5,
}
SIGNS = {
    "entropy": ({"ppo/normalized_entropy/op": 4e-4}, 10, "for 10 rounds, head 'op'.*entropy"),
    "critic": ({"ppo/explained_variance": -0.1}, 20, "for 20 rounds.*explained variance below 0"),
    "kl": ({"ppo/ppo_epochs_run": 1.0}, 10, "for 10 rounds, target_kl"),
    "germinations": ({"episode/germinations": 0.0}, 10, "for 10 rounds, no seed has germinated"),
}


def warned(monitor, metrics, rounds):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(rounds):
            monitor.check(metrics)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("change", "rounds", "message"), SIGNS.values(), ids=SIGNS)
def test_a_sign_of_trouble_warns_once(change, rounds, message):
    monitor, sick = HealthMonitor(ppo_epochs=10), HEALTHY | change
    assert not warned(monitor, sick, rounds - 1)
    assert not warned(monitor, HEALTHY, 1)  # rounds count in a row
    assert not warned(monitor, sick, rounds - 1)
    with pytest.warns(UserWarning, match=message):
        monitor.check(sick)
    assert not warned(monitor, sick, 2 * rounds)


def test_a_healthy_run_does_not_warn():
    assert not warned(HealthMonitor(ppo_epochs=10), HEALTHY, 50)


@pytest.mark.parametrize(
    ("ppo_epochs", "change"),
    [
        (1, {"ppo/ppo_epochs_run": 1.0}),  # all the passes there are
        (10, {"ppo/ppo_epochs_run": 1.0, "ppo/update_undone": 1.0}),  # stopped for another reason
        (10, {"ppo/explained_variance": float("nan")}),  # returns do not vary
        (10, {"ppo/explained_variance": -9.0, "ppo/value_loss": 0.01}),  # they hardly vary
    ],
)
def test_other_causes_of_the_same_numbers_do_not_warn(ppo_epochs, change):
    assert not warned(HealthMonitor(ppo_epochs), HEALTHY | change, 50)


def test_gymnasium_metrics_need_no_germinations():
    metrics = {name: value for name, value in HEALTHY.items() if "germinations" not in name}
    assert not warned(HealthMonitor(ppo_epochs=10), metrics, 50)
