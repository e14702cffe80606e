"""FLUX.2 klein: a transformer with double and single blocks, and a Qwen3 text encoder.

Black Forest Labs published a 4B and a 9B model of the same form, https://bfl.ai/models/flux-2-klein.
"""

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch.nn.functional import pixel_shuffle

from diffusion_training.families.base import (
    Base,
    Encoders,
    Family,
    Prompts,
    Tokens,
    attend_to,
    format_chat,
    from_sequence,
    make_patches,
    to_sequence,
)

MOST_REFERENCE_SIDE = 1024  # pixels of a square reference; the pipeline shrinks larger ones
TEXT_LAYERS = (9, 18, 27)  # hidden states of the text encoder that are used as embeddings


class Flux2Klein(Family):
    """Black Forest Labs' FLUX.2 klein. Latents are its VAE's in patches of 2 x 2, 128 channels."""

    name = "flux2-klein"
    title = "FLUX.2 klein"
    pipeline = "Flux2KleinPipeline"
    model = "Flux2Transformer2DModel"
    resolution = 1024
    vae_classes = ("AutoencoderKLFlux2",)
    embeds_width = "joint_attention_dim"
    max_tokens = 512
    ragged = False  # the transformer gets the embeddings of padding too, and no mask
    features = ("ragged ids",)
    attention = (
        *Family.attention, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "to_qkv_mlp_proj",
    )  # fmt: skip
    other_layers = ("linear_in", "linear_out")
    takes_references = True

    def is_distilled(self, base: Base) -> bool:
        return bool(base.index.get("is_distilled"))

    def prepare(self, tokenizer: Any, caption: str) -> str:
        return format_chat(tokenizer, caption, enable_thinking=False)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        (text_encoder,) = encoders.text_encoders
        (tokenizer,) = encoders.tokenizers
        mask = tokens["prompt_mask"]
        # A cache of tokens holds no padding, but the transformer takes its embeddings.
        ids = torch.where(mask, tokens["input_ids"], tokenizer.pad_token_id)
        # without the head, whose logits would take 0.3 GB per caption
        output = text_encoder.base_model(
            input_ids=ids,
            attention_mask=attend_to(mask),
            output_hidden_states=True,
            use_cache=False,
        )
        layers = [output.hidden_states[layer] for layer in TEXT_LAYERS]
        return {"prompt_embeds": torch.cat(layers, dim=-1).float()}

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return vae.config.in_channels, 4 * vae.config.latent_channels

    def downscale(self, vae: torch.nn.Module) -> int:
        return 2 * super().downscale(vae)

    def read_latents(
        self, vae: torch.nn.Module, encoded: Any, size: tuple[int, ...]
    ) -> torch.Tensor:
        return make_patches(super().read_latents(vae, encoded, size))

    def choose_reference_side(self, resolution: int, count: int) -> int:
        return min(resolution, MOST_REFERENCE_SIDE)

    def encode_references(self, vae: torch.nn.Module, rows: list[list[Any]]) -> list[torch.Tensor]:
        processor = VaeImageProcessor(vae_scale_factor=1)  # keeps the size
        latents = []
        for images in zip(*rows, strict=True):
            pixels = [processor.preprocess(image).to(vae.device, vae.dtype) for image in images]
            both = [self.read_latents(vae, vae.encode(each), each.shape[-2:]) for each in pixels]
            latents.append(torch.cat([each.chunk(2, dim=1)[0] for each in both]))
        return latents

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        return pixel_shuffle(latents, 2)

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        std = torch.sqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps)
        mean = vae.bn.running_mean.float()
        return {"scaling_factor": (1 / std).tolist(), "shift_factor": mean.tolist()}

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        """Position ids are (time, row, column, word): text has words, an image rows and columns.

        The time of the image is 0, and that of references is 10, 20, ...
        """
        embeds = prompts["prompt_embeds"]
        given = dict[str, Any](prompts)
        images = [noisy]
        while (name := f"reference_{len(images) - 1}") in given:
            images.append(given[name])
        zero = torch.zeros(1, dtype=torch.long, device=noisy.device)
        words = torch.arange(embeds.shape[1], device=noisy.device)
        places = []
        for number, image in enumerate(images):
            rows, columns = (torch.arange(side, device=noisy.device) for side in image.shape[2:])
            places.append(torch.cartesian_prod(zero + 10 * number, rows, columns, zero))
        sequence = to_sequence(noisy)
        if len(images) > 1:
            sequence = torch.cat([to_sequence(image) for image in images], dim=1)
        output = model(
            sequence,
            encoder_hidden_states=embeds,
            timestep=times,
            img_ids=torch.cat(places),
            txt_ids=torch.cartesian_prod(zero, zero, zero, words),
        )
        tokens = noisy.shape[2] * noisy.shape[3]
        return from_sequence(output.sample[:, :tokens], noisy).float()

    def find_model_fault(self, config: Any) -> str | None:
        if config.guidance_embeds:
            return "has a guidance embedding, so it is not FLUX.2 klein"
        return None

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        options = {"is_distilled": self.is_distilled(base)}
        return super().build(parts | options, base, resolution)

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        # padding counts, so the pipeline must pad as far as the training did
        return f", max_sequence_length={max_tokens}" if max_tokens else ""

    def choose_layers(self, model: torch.nn.Module, which: str) -> list[str]:
        """Single blocks need full names, because `attn.to_out` is not a layer in double blocks."""
        layers = super().choose_layers(model, which)
        if which in ("attention", "all"):
            count = model.config.num_single_layers
            layers += [f"single_transformer_blocks.{i}.attn.to_out" for i in range(count)]
        return layers
