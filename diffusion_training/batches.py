"""The types of a training step's values: a batch, the inputs of model and loss, the sums."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch

Models: TypeAlias = dict[str, torch.nn.Module]


class Batch(TypedDict, total=False):
    """A micro-batch of N images from the loader. Its tensors are on the device.

    Image data has pixel_values, a cache has latents. The other entries depend on the data.
    """

    pixel_values: torch.Tensor  # [N, C, H, W], uint8 from 0 to 255, or float32 from 0 to 1
    latents: torch.Tensor  # float16 [N, numbers per row]
    latents_shape: list[int]  # channels, height and width of a row's latents
    mask: torch.Tensor  # uint8, 255 where the loss counts; mirrored with the image
    input_ids: torch.Tensor  # [N, tokens]
    input_ids_2: torch.Tensor
    prompt_embeds: torch.Tensor  # float16 [N, numbers per row]
    pooled_prompt_embeds: torch.Tensor
    prompt_mask: torch.Tensor  # bool [N, tokens]
    prompt_lengths: list[int]
    original_size: torch.Tensor  # int [N, 2], height and width of the image file
    crop_top_left: torch.Tensor  # int [N, 2]
    flipped: torch.Tensor  # bool [N]
    weight: torch.Tensor  # [N], factors of the images' losses; 0 for one that can't be used
    skipped: list[tuple[str, str]]  # (name, reason) of images that can't be used
    waited: tuple[Any, Any]  # when the wait for this batch began and ended


# (models, noisy images, timesteps or shares of noise, condition) -> prediction, float32
Predict: TypeAlias = Callable[
    [Models, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor
]


class Prepared(NamedTuple):
    """A batch of N images as inputs for the model and the loss."""

    images: torch.Tensor  # or latents: float32 [N, C, H, W] of about unit variance
    condition: dict[str, torch.Tensor]  # {name: [N, ...]}, the model's other inputs
    loss_inputs: dict[str, torch.Tensor]  # {name: [N, ...]}, inputs of the loss only


class StepSums(TypedDict):
    """The sums of this process's step: tensors without dimensions, on the device."""

    loss: torch.Tensor  # sum of weight * loss
    weight: torch.Tensor  # sum of weight
    grad_norm: torch.Tensor  # before clipping
