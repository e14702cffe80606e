"""A loaded batch -> latents, prompts and mask, as the trainers' inputs."""

from typing import Any, cast

import torch

from diffusion_training.batches import Prepared, TextToImageBatch
from diffusion_training.data.images import make_time_ids, shrink_masks
from diffusion_training.families.base import Encoders
from diffusion_training.latents.encoders import encode_images, encode_prompts
from diffusion_training.latents.source import Data
from diffusion_training.memory import move, place_decoder


def encode_batch(batch: TextToImageBatch, data: Data, caption_dropout: float) -> Prepared:
    """A loaded batch -> latents [N, C, h, w], prompts, and the mask of the loss.

    Each time, other latents are drawn from the VAE's distribution. The empty prompt replaces a
    share `caption_dropout` of the captions. The mask is in [0, 1], [N, 1, h, w].
    """
    if "latents" in batch:  # from a cache
        latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    else:
        latents = encode_images(cast(Encoders, data.encoders), batch["pixel_values"])
    if "prompt_embeds" in batch:
        embeds = dict[str, Any](batch)
        prompts = {
            name: embeds[name].to(empty.dtype).unflatten(1, (-1, *empty.shape[1:]))
            for name, empty in data.empty_prompt.items()
        }
    else:
        prompts = dict(encode_prompts(cast(Encoders, data.encoders), cast(Any, batch)))
    if data.latents.kind == "moments":
        mean, std = latents.chunk(2, dim=1)
        # By shape, not `randn_like`: a VAE's strides must not decide which number goes where.
        latents = mean + std * torch.randn(mean.shape, device=mean.device)
    # Contiguous, as a cache has them: a VAE's memory layout must not decide how the model computes.
    latents = ((latents - data.latents.shift) * data.latents.factor).contiguous()
    drop_captions(batch, prompts, data, caption_dropout)
    prompts |= scale_references(batch, data)
    size = latents.shape[-2:]
    if data.family.needs_sizes:
        target = [data.latents.downscale * side for side in size]
        prompts["time_ids"] = make_time_ids(
            batch["original_size"], batch["crop_top_left"], target, batch["flipped"]
        )
    loss_inputs = {}
    if "mask" in batch:
        if "latents" in batch:
            mask = batch["mask"].unflatten(1, (1, *size))
        else:
            mask = shrink_masks(batch["mask"], data.latents.downscale)
        loss_inputs["mask"] = mask / 255
    return Prepared(latents, prompts, loss_inputs)


def scale_references(batch: TextToImageBatch, data: Data) -> dict[str, torch.Tensor]:
    """The entries of `Prompts` for the references of a batch of a cache."""
    given = dict[str, Any](batch)
    found = {}
    for number, (height, width, *side) in enumerate(given.get("reference_sizes", ())):
        if height:
            name = f"reference_{number}"
            latents = given[name].float().unflatten(1, (-1, height, width))
            if data.family.scales_references:
                latents = (latents - data.latents.shift) * data.latents.factor
            found[name] = latents.contiguous()
            found[f"{name}_size"] = latents.new_empty(len(latents), 0, *side)
    return found


def drop_captions(
    batch: TextToImageBatch, prompts: dict[str, torch.Tensor], data: Data, share: float
) -> None:
    """Replace a share of the captions with the empty prompt.

    This trains the unconditional prediction that guidance needs (arXiv:2207.12598).
    """
    count, device = len(prompts["prompt_embeds"]), prompts["prompt_embeds"].device
    if data.family.needs_lengths:  # drawn on the CPU, where lengths are read, so nothing waits
        dropped = torch.rand(count) < share
        lengths = torch.tensor(batch["prompt_lengths"]).expand(count)  # one length, in a search
        if "input_ids" in batch:  # these lengths include a template
            lengths = prompts.get("prompt_lengths", lengths - data.family.dropped_tokens)
        prompts["prompt_lengths"] = torch.where(dropped, data.empty_length, lengths)
        dropped = move(dropped, device)
    else:
        dropped = torch.rand(count, device=device) < share
    for name, empty in data.empty_prompt.items():
        # a batch of short captions has fewer tokens
        empty = empty[: prompts[name].shape[1]]
        shape = [-1] + [1] * empty.dim()
        prompts[name] = torch.where(dropped.view(shape), empty, prompts[name])


@torch.no_grad()
def read_pixels(data: Data, vae: Any, batch: TextToImageBatch) -> torch.Tensor:
    """The images of a loaded batch, uint8 [N, C, H, W]. A cache's are decoded from latents."""
    if "latents" not in batch:
        return batch["pixel_values"]
    latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    latents = latents[:, : data.latents.channels]  # the mean
    place_decoder(vae, latents.device)
    images = vae.decode(data.family.unpack_latents(vae, latents).to(vae.dtype))[0]
    if images.dim() == 5:  # of a video VAE, one frame
        images = images[:, :, 0]
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().byte()
