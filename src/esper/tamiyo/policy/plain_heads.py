"""Encoder and heads for any factored action space, flat features and images.

policy = flat_policy(action_space, num_features=17)
"""

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.factored_actions import FactoredActionSpace
from esper.tamiyo.policy.feature_scales import Moments, RunningNormalizer, SumOverRanks
from esper.tamiyo.policy.network import FactoredRecurrentActorCritic, PolicyConfig, Scene
from esper.tamiyo.policy.policy_layers import POLICY_GAIN, embedding, linear, mlp

ImageShape = tuple[int, int, int]  # channels, height, width
_ROWS_AS_FLOATS = 1024  # of pictures at a time, while their statistics are taken


def flat_policy(
    action_space: FactoredActionSpace,
    num_features: int,
    config: PolicyConfig | None = None,
    *,
    num_previous: int = 0,
    images: tuple[ImageShape, ...] = (),
    encoder: nn.Module | None = None,
) -> FactoredRecurrentActorCritic:
    """A policy for any action space, features `[B, F]` (previous step, numbers) and images.

    All images of an observation are frames `[B, P]` uint8: each flattened, channels first.

    A custom `encoder(numbers, *images)` returns `[B, any width]`. It gets the scaled flat features
    `[B, numbers]` without those of the previous step, and each image `[B, channels, height, width]`,
    scaled too. It is copied.
    """
    config = config or PolicyConfig()
    heads = PlainHeads(action_space, num_features, config, num_previous, images, encoder)
    return FactoredRecurrentActorCritic(action_space, heads, config)


class PlainHeads(nn.Module):
    """An encoder, and heads that see the earlier choices they are given.

    The encoder is an MLP; with images, a small CNN for each as well; or a custom module. Flat
    features are scaled with running statistics, which `update_scales` changes. The channels of
    images are scaled once, from the first rollout.
    """

    def __init__(
        self,
        action_space: FactoredActionSpace,
        feature_size: int,
        config: PolicyConfig,
        num_previous: int = 0,
        images: tuple[ImageShape, ...] = (),
        encoder: nn.Module | None = None,
    ):
        super().__init__()
        self.feature_size = feature_size
        self.images = images
        self._image_sizes = [math.prod(shape) for shape in images]
        self.frame_size = sum(self._image_sizes)
        # in an episode's first step there is no previous one: its features are 0, and stay 0
        self.scales = RunningNormalizer(feature_size, uncentered=num_previous)
        self.image_scales = nn.ModuleList(
            RunningNormalizer(channels, epsilon=1e-5) for channels, _, _ in images
        )
        width = config.lstm_hidden_dim
        self.is_custom = encoder is not None
        self._unseen = num_previous if self.is_custom else 0  # by the encoder
        self.encoder: nn.Module
        if encoder is not None:
            self.encoder = _copy_of(encoder)
        elif images:
            self.encoder = _ImageEncoder(feature_size, images, config)
        else:
            self.encoder = mlp(feature_size, width, config.encoder_layers)
        if self.is_custom or images:
            self.join = mlp(self._unseen + self._encoded_width(), width, 1)
        if num_previous:  # its random effect would be noise; weights of 0 learn what it is worth
            reader = self.join if self.is_custom else self.encoder
            nn.init.zeros_(next(reader.parameters()).data[:, :num_previous])
        later = zip(action_space.head_groups[1:], action_space.group_spaces[1:], strict=True)
        self.groups = nn.ModuleList(
            _PlainGroup(action_space, action_space.given_indices[heads.start], space, width)
            for heads, space in later
        )

    def encode(self, features: Tensor, frames: Tensor | None = None) -> tuple[Tensor, Scene]:
        """The core's input `[B, width]`."""
        if not self.images and not self.is_custom:
            encoded: Tensor = self.encoder(self.scales.normalize(features))
            return encoded, ()
        scaled = [
            scales.normalize(pixels).movedim(-1, 1) for pixels, scales in self._pixels(frames)
        ]
        numbers = self.scales.normalize(features)
        unseen, seen = numbers[:, : self._unseen], numbers[:, self._unseen :]
        return self.join(torch.cat((unseen, self.encoder(seen, *scaled)), dim=-1)), ()

    @torch.no_grad()
    def _encoded_width(self) -> int:
        """The width of the encoder's output, found with zeros."""
        numbers = (self.feature_size - self._unseen,)
        inputs = [torch.zeros(2, *shape) for shape in (numbers, *self.images)]
        try:
            encoded = self.encoder(*inputs)
        except Exception as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in inputs)
            raise ValueError(
                f"the encoder failed when it was called with {shapes}, which are numbers [B, width] "
                f"and each image [B, channels, height, width]: {error}"
            ) from error
        if not isinstance(encoded, Tensor) or encoded.ndim != 2 or len(encoded) != 2:
            got = tuple(encoded.shape) if isinstance(encoded, Tensor) else type(encoded).__name__
            raise ValueError(f"the encoder returned {got} for 2 rows; expected a tensor (2, width)")
        return encoded.shape[1]

    def _pixels(self, frames: Tensor | None) -> Iterator[tuple[Tensor, RunningNormalizer]]:
        """Images as floats `[B, height, width, channels]`, 0 to 1, and their scales."""
        if not self.images:
            return
        assert frames is not None
        images = torch.split(frames, self._image_sizes, dim=-1)
        for image, shape, scales in zip(images, self.images, self.image_scales, strict=True):
            assert isinstance(scales, RunningNormalizer)
            yield image.reshape(-1, *shape).movedim(1, -1) / 255.0, scales

    def logits(self, group: int, core: Tensor, scene: Scene, actions: Tensor) -> Tensor:
        """Logits of a head group after the first, `[B, choices of the group]`."""
        logits: Tensor = self.groups[group - 1](core, actions)
        return logits

    @torch.no_grad()
    def update_scales(
        self,
        features: Tensor,
        frames: Tensor | None = None,
        sum_: SumOverRanks | None = None,
    ) -> None:
        """Update the running statistics with features `[R, F]` and pictures `[R, P]`.

        With `sum_`, they are those of all ranks.

        When the mean moves, the shift is folded into the encoder's first bias: the policy's output
        on a given observation does not change. Otherwise a policy that leans to one side would
        move the mean, and lean further with every update. The first update is applied as is.
        """
        if frames is not None and any(scales.count == 0 for scales in self.image_scales):
            self._update_image_scales(frames, sum_)
        scales = self.scales
        if not self.feature_size or (self.is_custom and scales.count > 0):
            return  # a custom encoder has no first layer that is known: its scales stay
        old_mean, is_first = scales.mean.clone(), scales.count == 0
        scales.update(features, sum_)
        shift = ((scales.mean - old_mean) / scales.std).masked_fill(is_first, 0.0)
        if not self.is_custom:
            weight, bias, *_ = self.encoder.parameters()
            bias.add_(weight.double() @ shift.double())

    def _update_image_scales(self, frames: Tensor, sum_: SumOverRanks | None) -> None:
        totals = [RunningNormalizer(shape[0]).to(frames.device) for shape in self.images]
        for some in torch.split(frames, _ROWS_AS_FLOATS):
            for (pixels, _), total in zip(self._pixels(some), totals, strict=True):
                total.update(pixels.flatten(0, -2))
        for scales, total in zip(self.image_scales, totals, strict=True):
            assert isinstance(scales, RunningNormalizer)
            scales.merge(Moments(total.count, total.mean, total.variance), sum_)


def _copy_of(encoder: nn.Module) -> nn.Module:
    """A custom encoder to train; raises where acting and learning would differ."""
    if not isinstance(encoder, nn.Module):
        raise ValueError(f"encoder is {encoder!r}; pass an nn.Module, such as MyEncoder()")
    for name, part in encoder.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise ValueError(
                f"the encoder's {name or 'module'} is a {type(part).__name__}: learning and acting "
                "would see other statistics; use LayerNorm or GroupNorm"
            )
    return copy.deepcopy(encoder)


class _ImageEncoder(nn.Module):
    """An MLP for the flat features, and convolutions for each image; see `_PICTURES`."""

    def __init__(self, num_numbers: int, images: tuple[ImageShape, ...], config: PolicyConfig):
        super().__init__()
        width = config.lstm_hidden_dim
        self.numbers = mlp(num_numbers, width, config.encoder_layers) if num_numbers else None
        self.images = nn.ModuleList(_convolutions(shape) for shape in images)

    def forward(self, numbers: Tensor, *images: Tensor) -> Tensor:
        parts = [encode(image) for encode, image in zip(self.images, images, strict=True)]
        if self.numbers is not None:
            parts.insert(0, self.numbers(numbers))
        return torch.cat(parts, dim=-1)


class _Pictures(NamedTuple):
    """The layers for pictures up to a size: (filters, kernel, stride) each, then one linear layer."""

    largest_side: float
    convolutions: tuple[tuple[int, int, int], ...]
    width: int


_PICTURES = (
    _Pictures(11, ((16, 3, 1), (32, 3, 1)), 128),  # such as MiniGrid's 7 x 7
    _Pictures(32, ((16, 3, 2), (32, 3, 2)), 128),
    # "Human-level control through deep reinforcement learning" (Mnih et al. 2015)
    _Pictures(math.inf, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 256),
)


def _convolutions(shape: ImageShape) -> nn.Sequential:
    """Layers for pictures of one shape, `[B, channels, height, width]` to `[B, 128 or 256]`."""
    channels, *sides = shape
    pictures = next(row for row in _PICTURES if max(sides) <= row.largest_side)
    layers: list[nn.Module] = []
    for filters, kernel, stride in pictures.convolutions:
        padding = max(
            0, -(-(kernel - min(sides)) // 2)
        )  # of a side that is shorter than the kernel
        layers += [nn.Conv2d(channels, filters, kernel, stride, padding), nn.ReLU()]
        sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), mlp(channels * math.prod(sides), pictures.width, 1))


class _PlainGroup(nn.Module):
    """Heads given the same earlier choices: core and choices mixed, then one linear layer."""

    def __init__(
        self,
        action_space: FactoredActionSpace,
        given: tuple[int, ...],
        group_space: FactoredActionSpace,
        width: int,
    ):
        super().__init__()
        self.given = given
        self.mix = linear(width, width)
        self.chosen = nn.ModuleList(embedding(action_space.sizes[g], width) for g in given)
        self.readout = linear(width, group_space.num_choices, gain=POLICY_GAIN)

    def forward(self, core: Tensor, actions: Tensor) -> Tensor:
        mixed = self.mix(core)
        for index, chosen in zip(self.given, self.chosen, strict=True):
            mixed = mixed + chosen(actions[:, index].long())
        logits: Tensor = self.readout(mixed.tanh())
        return logits
