"""The denoiser of a text-to-image pipeline: checked against the data."""

import torch

from diffusion_training.batches import Models, Predict
from diffusion_training.errors import fail
from diffusion_training.latents.source import Data
from diffusion_training.models import check_shapes


def check_denoiser(
    models: Models,
    predict: Predict,
    what: str,
    source: str,
    data: Data,
    further: dict[str, torch.Tensor] | None = None,
) -> list[str]:
    """Stop with an error if the model to be trained does not fit the data.

    models: {its name: the model}. what: a word for it, such as U-Net. source: where it is from.
    further: additions of the script's `prepare_batch` to the condition, for one image, with any
        values. An entry [1, C, h, w] counts as C more channels.

    Returns the names of the weights that the prediction does not depend on.
    """
    family = data.family
    (model,) = models.values()
    name = f"the {what} of {source}"
    embeds_width = data.empty_prompt["prompt_embeds"].shape[-1]
    own_width = model.config[family.embeds_width]
    further = further or {}
    channels = sum(value.shape[1] for value in further.values() if value.dim() == 4)
    channels += data.latents.channels
    if (model.config.in_channels, own_width) != (channels, embeds_width):
        fail(
            f"{name} takes {model.config.in_channels} channels and embeddings of {own_width}, but "
            f"the data has {channels} and {embeds_width}: use the VAE and text encoder of this "
            "model"
        )
    if sentence := family.check_model(model.config):
        fail(f"{name} {sentence}")
    multiple = family.patch_size(model) * data.latents.downscale
    side = data.bucket_step or data.resolution
    if side % multiple:
        fail(f"{name} needs sides that are multiples of {multiple} pixels, not {side}")
    condition = {key: embeds[None] for key, embeds in data.empty_prompt.items()}
    if family.needs_lengths:
        condition["prompt_lengths"] = torch.tensor([data.empty_length])
    if family.needs_sizes:
        condition["time_ids"] = torch.zeros(1, 6)
    shape = [data.latents.channels, *data.latents.shape[1:]]
    return check_shapes(models, predict, name, shape, condition | further)
