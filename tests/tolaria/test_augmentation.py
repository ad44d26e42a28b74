"""Crops and flips: which pixels end up where, in every kernel, and the same after a restart."""

import pytest
import torch

from esper.kasmina.blueprints import menu_for
from esper.kasmina.hosts import build_host
from esper.leyline.constants import SiteKind
from esper.tolaria import batched
from esper.tolaria.augmentation import Augmentation
from esper.tolaria.host_batch import HostBatchConfig, PopulationBatch
from esper.tolaria.population import Population
from esper.tolaria.tasks import minibatch_indices
from support.populations import random_task

SHAPE = (3, 6, 5)
BOTH = Augmentation(crop=2, flip=True)


def windows(image, crop, flip):
    """Every result that is possible, cut out with slices."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * crop, width + 2 * crop, dtype=image.dtype)
    padded[:, crop : crop + height, crop : crop + width] = image
    corners = [(y, x) for y in range(2 * crop + 1) for x in range(2 * crop + 1)]
    cut = [padded[:, y : y + height, x : x + width] for y, x in corners]
    return cut + [window.flip(2) for window in cut] if flip else cut


@pytest.mark.parametrize("augmentation", [BOTH, Augmentation(crop=1), Augmentation(flip=True)])
def test_every_window_is_cut_out_equally_often(augmentation):
    count = 8000
    image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    changed = augmentation.apply(image.expand(count, *SHAPE), torch.arange(count) * 7919)
    possible = torch.stack(windows(image, augmentation.crop, augmentation.flip))
    is_same = (changed.unsqueeze(1) == possible).flatten(2).all(2)
    assert (is_same.sum(1) == 1).all()
    expected = count / len(possible)
    chi_squared = ((is_same.sum(0) - expected) ** 2 / expected).sum().item()
    degrees = len(possible) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def population(augmentation, kernels="eager", num_hosts=3, device="cpu", **options):
    host = build_host("conv2d", input_shape=SHAPE, num_classes=5, widths=(4, 4))
    menu, task = menu_for(SiteKind.IMAGE)[:2], random_task(SHAPE, num_views=2).to(device)
    return Population(
        host, menu, task, num_hosts=num_hosts, batch_size=8, kernels=kernels,
        view_ids=torch.arange(num_hosts) % 2, augmentation=augmentation, **options,
    )  # fmt: skip


def rows_of(trained, count=5):
    return minibatch_indices(0, trained.host_ids, range(count), 8, trained.task.num_rows[0])


def seen_by(trained, rows, monkeypatch):
    """The inputs `[M, P, batch, *shape]` and labels of all minibatches, in the eager kernels."""
    seen, read = [], batched.Feed.minibatch
    monkeypatch.setattr(
        batched.Feed, "minibatch", lambda feed, number: seen.append(read(feed, number)) or seen[-1]
    )
    trained.train(rows)
    monkeypatch.undo()
    inputs, labels = zip(*seen, strict=True)
    return torch.stack(inputs).movedim(-1, 2), torch.stack(labels)


def test_hosts_train_on_windows_of_their_own_rows(monkeypatch):
    trained = population(BOTH)
    rows = rows_of(trained)
    inputs, labels = seen_by(trained, rows, monkeypatch)
    for host, view in enumerate(trained.view_ids.tolist()):
        x, y = trained.task.train_x[view], trained.task.train_y[view]
        assert torch.equal(labels[:, host], y[rows[:, host]])
        for image, row in zip(inputs[:, host].flatten(0, 1), rows[:, host].flatten(), strict=True):
            assert any(torch.equal(image, window) for window in windows(x[row], 2, flip=True))


def test_images_depend_on_rng_seed_host_and_minibatch_only(monkeypatch):
    rows = rows_of(population(BOTH)).clone()
    rows[:] = rows[0, 0]  # every host reads the same rows in every minibatch

    def seen(count=5, **options):
        trained = population(BOTH, **options)
        if count < 5:
            first, _ = seen_by(trained, rows[:count], monkeypatch)
            rest, _ = seen_by(trained, rows[count:], monkeypatch)
            return torch.cat((first, rest))
        return seen_by(trained, rows, monkeypatch)[0]

    together = seen()
    assert torch.equal(seen(count=2), together)
    monkeypatch.setattr(batched, "MAX_AUGMENTED", 1)
    assert torch.equal(seen(), together)  # minibatches one by one
    siblings = seen(host_ids=torch.tensor([4, 1, 4]))
    assert torch.equal(siblings[:, 0], siblings[:, 2])
    assert torch.equal(siblings[:, 1], together[:, 1])
    assert not torch.equal(seen(rng_seed=1), together)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[:, 0], together[:, 2])


def test_a_new_episode_starts_with_the_first_images_again(monkeypatch):
    trained = population(BOTH)
    rows = rows_of(trained)
    first, _ = seen_by(trained, rows, monkeypatch)
    trained.reset(rng_seed=0)
    assert torch.equal(seen_by(trained, rows, monkeypatch)[0], first)


@pytest.mark.parametrize(
    ("kernels", "device"),
    [
        ("compiled", "cpu"),
        pytest.param("fused", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("augmentation", [Augmentation(), BOTH])
def test_kernels_train_colour_images_as_the_plain_code_does(augmentation, kernels, device):
    both = population(augmentation), population(augmentation, kernels, device=device)
    rows = rows_of(both[0], 40)
    losses = [trained.train(rows.to(trained.task.device)).cpu() for trained in both]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    weights = [trained.parameter_table.params.cpu() for trained in both]
    torch.testing.assert_close(*weights, rtol=1e-7, atol=1e-9)


def test_inputs_that_are_not_images_are_refused():
    host = build_host("conv1d", input_shape=(1, 20), num_classes=5, widths=(4, 4))
    config = HostBatchConfig(num_types=1, validation_rows=20, augment=Augmentation(flip=True))
    with pytest.raises(ValueError, match=r"augment.flip need images .* inputs are \(1, 20\)"):
        PopulationBatch([host], menu_for(SiteKind.SERIES), random_task(), config)
