"""What passes through a training step: a batch, what is made of it, the sums of the step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch

Models: TypeAlias = dict[str, torch.nn.Module]


class Batch(TypedDict, total=False):
    """A micro-batch as the loader gives it, of N images. Its tensors are on the device.

    Images have pixel_values, caches have latents, and both the other entries that their data have.
    """

    pixel_values: torch.Tensor  # [N, C, H, W], uint8 from 0 to 255, or float32 from 0 to 1
    latents: torch.Tensor  # float16 [N, numbers of a row]
    latents_shape: list[int]  # of a row of them: channels, height, width
    mask: torch.Tensor  # uint8, 255 where the loss counts; mirrored as the image is
    input_ids: torch.Tensor  # [N, tokens]
    input_ids_2: torch.Tensor
    prompt_embeds: torch.Tensor  # float16 [N, numbers of a row]
    pooled_prompt_embeds: torch.Tensor
    prompt_mask: torch.Tensor  # bool [N, tokens]
    prompt_lengths: list[int]
    original_size: torch.Tensor  # int [N, 2], height and width of the image as it is stored
    crop_top_left: torch.Tensor  # int [N, 2]
    flipped: torch.Tensor  # bool [N]
    weight: torch.Tensor  # [N], of each image's loss; 0 of one that can't be used
    skipped: list[tuple[str, str]]  # (name, reason) of images that can't be used
    waited: tuple[Any, Any]  # when the wait for this batch began and ended


# (models, noisy images, timesteps or shares of noise, condition) -> prediction, float32
Predict: TypeAlias = Callable[
    [Models, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor
]


class Prepared(NamedTuple):
    """A batch as the model and the loss take it, of N images."""

    images: torch.Tensor  # or latents: float32 [N, C, H, W] of about unit size
    condition: dict[str, torch.Tensor]  # {name: [N, ...]}, what the model gets besides
    loss_inputs: dict[str, torch.Tensor]  # {name: [N, ...]}, what only the loss needs


class StepSums(TypedDict):
    """What a step of this process adds up to: tensors without dimensions, on the device."""

    loss: torch.Tensor  # sum of weight * loss
    weight: torch.Tensor  # sum of weight
    grad_norm: torch.Tensor  # before clipping
