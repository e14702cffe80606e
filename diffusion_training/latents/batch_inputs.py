"""What a loaded batch holds for a trainer: prompts, references, sizes, masks, pixels."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from diffusion_training.batches import TextToImageBatch
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.encoders import encode_prompts, place_decoder
from diffusion_training.data.images import shrink_masks

# Apple's GPUs. For SDXL's sizes and crops, float32 is as exact up to 8192 pixels
WITHOUT_FLOAT64 = {"mps"}


def read_prompts(batch: TextToImageBatch, data: Data) -> dict[str, torch.Tensor]:
    """The entries of `Prompts` for the captions of a batch. Tokens are encoded."""
    if "prompt_embeds" not in batch:
        return dict(encode_prompts(data.loaded_encoders, cast(Any, batch)))
    embeds = dict[str, Any](batch)
    return {
        name: embeds[name].to(empty.dtype).unflatten(1, (-1, *empty.shape[1:]))
        for name, empty in data.empty_prompt.items()
    }


def read_lengths(
    batch: TextToImageBatch, prompts: dict[str, torch.Tensor], data: Data
) -> torch.Tensor:
    """How many tokens the captions of a batch have, int [N] on the CPU."""
    count = len(prompts["prompt_embeds"])
    lengths = torch.tensor(batch["prompt_lengths"]).expand(count)  # one length, in a search
    if "input_ids" in batch:  # these may count bytes
        return prompts.get("prompt_lengths", lengths)
    return lengths


def read_mask(batch: TextToImageBatch, data: Data, size: Sequence[int]) -> torch.Tensor:
    """The mask of the loss for latents of a size, from 0 to 1, [N, 1, h, w]."""
    if "latents" in batch:
        return batch["mask"].unflatten(1, (1, *size)) / 255
    return shrink_masks(batch["mask"], data.latents.downscale) / 255


def read_references(batch: TextToImageBatch, data: Data) -> dict[str, torch.Tensor]:
    """The entries of `Prompts` for the references of a batch of a cache."""
    given = dict[str, Any](batch)
    found = {}
    for number, (height, width, *side) in enumerate(given.get("reference_sizes", ())):
        if height:
            name = f"reference_{number}"
            latents = given[name].float().unflatten(1, (-1, height, width))
            found[name] = latents.contiguous()
            found[f"{name}_size"] = latents.new_empty(len(latents), 0, *side)
    return found


def make_time_ids(
    original_size: torch.Tensor,
    crop_top_left: torch.Tensor,
    target_size: Sequence[int],
    flipped: torch.Tensor,
) -> torch.Tensor:
    """SDXL's conditioning, float32 [N, 6]: original size, crop corner, target size.

    original_size, crop_top_left: int [N, 2], the corner in pixels of the resized image
    (arXiv:2307.01952, algorithm 1). target_size: (height, width). For images that are `flipped`
    [N], the corner is that of the mirrored image. The result is float32 in any precision, because
    bfloat16 can't represent numbers like 1365.
    """
    is_exact = original_size.device.type not in WITHOUT_FLOAT64
    sizes = original_size.to(torch.float64 if is_exact else torch.float32)
    height, width = sizes.unbind(1)
    # width of the crop, in pixels of the stored image
    columns = torch.minimum(width, (height * target_size[1] / target_size[0]).round().clamp(min=1))
    beyond = (width * target_size[1] / columns).round() - target_size[1] - crop_top_left[:, 1]
    left = torch.where(flipped, beyond.clamp(min=0), crop_top_left[:, 1])
    # filled on the device: a list would have to be sent to it
    target = [torch.full_like(left, side) for side in target_size]
    return torch.stack([height, width, crop_top_left[:, 0], left, *target], dim=1).float()


@torch.no_grad()
def read_pixels(data: Data, vae: Any, batch: TextToImageBatch) -> torch.Tensor:
    """The images of a loaded batch, uint8 [N, C, H, W]. A cache's are decoded from latents."""
    if "latents" not in batch:
        return batch["pixel_values"]
    latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    latents = latents[:, : data.latents.channels]  # the mean
    place_decoder(vae, latents.device)
    images = data.family.decode(vae, latents)
    if images.dim() == 5:  # of a video VAE, one frame
        images = images[:, :, 0]
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().byte()
