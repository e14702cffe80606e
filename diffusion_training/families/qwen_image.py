"""Qwen-Image: a transformer with a Qwen2.5-VL text encoder (arXiv:2508.02324)."""

from typing import Any

import torch
from torch.nn.functional import pixel_shuffle

from diffusion_training.families.base import (
    Encoders,
    Family,
    Prompts,
    Tokens,
    from_sequence,
    make_patches,
    move_to_front,
    to_sequence,
)

# QwenImagePipeline.prompt_template_encode. The embeddings of its first 34 tokens are dropped.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class QwenImage(Family):
    """Alibaba's Qwen-Image. Latents are its VAE's in patches of 2 x 2, 64 channels."""

    name = "qwen-image"
    title = "Qwen-Image"
    pipeline = "QwenImagePipeline"
    model = "QwenImageTransformer2DModel"
    resolution = 1024
    vae_classes = ("AutoencoderKLQwenImage",)
    ignored_vae_settings = ()
    embeds_width = "joint_attention_dim"
    max_tokens = 512
    dropped_tokens = 34
    needs_lengths = True
    attention = (*Family.attention, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    other_layers = ("net.0.proj", "net.2")

    def prepare(self, tokenizer: Any, caption: str) -> str:
        return TEMPLATE.format(caption)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        (text_encoder,) = encoders.text_encoders
        mask = tokens["prompt_mask"]
        # without the head, whose logits would take 0.3 GB per caption
        output = text_encoder.base_model(
            input_ids=tokens["input_ids"], attention_mask=mask.long(), use_cache=False
        )
        prompts = move_to_front(output.last_hidden_state.float(), mask)
        return {
            "prompt_embeds": prompts["prompt_embeds"][:, self.dropped_tokens :],
            "prompt_mask": prompts["prompt_mask"][:, self.dropped_tokens :],
        }

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return vae.config.input_channels, 4 * vae.config.z_dim

    def downscale(self, vae: torch.nn.Module) -> int:
        return 2 * 2 ** len(vae.config.temperal_downsample)

    def prepare_images(self, vae: torch.nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
        """The VAE is for videos, so an image is a video of one frame."""
        return super().prepare_images(vae, pixel_values).unsqueeze(2)

    def read_latents(
        self, vae: torch.nn.Module, encoded: Any, size: tuple[int, ...]
    ) -> torch.Tensor:
        return make_patches(super().read_latents(vae, encoded, size).squeeze(2))

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        return pixel_shuffle(latents, 2).unsqueeze(2)

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        mean = torch.tensor(vae.config.latents_mean).repeat_interleave(4)  # of each patch's four
        std = torch.tensor(vae.config.latents_std).repeat_interleave(4)
        return {"scaling_factor": (1 / std).tolist(), "shift_factor": mean.tolist()}

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        """Embeddings are cut to the longest caption of the batch, as the pipeline does."""
        longest = int(prompts["prompt_lengths"].max())
        output = model(
            to_sequence(noisy),
            encoder_hidden_states=prompts["prompt_embeds"][:, :longest],
            encoder_hidden_states_mask=prompts["prompt_mask"][:, :longest],
            timestep=times,
            img_shapes=[[(1, *noisy.shape[2:])]] * len(noisy),
        )
        return from_sequence(output.sample, noisy).float()

    def find_model_fault(self, config: Any) -> str | None:
        if config.guidance_embeds or config.zero_cond_t or config.use_layer3d_rope:
            return "is for editing, layers or distilled guidance, which can't be trained here"
        return None

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked: dict[str, Any] = {**self.guidance_args(guidance_scale)}
        parts = {"": prompts}
        if guidance_scale > 1:
            parts["negative_"] = empty
        for prefix, part in parts.items():
            longest = int(part["prompt_mask"].sum(dim=1).max())
            asked[f"{prefix}prompt_embeds"] = part["prompt_embeds"][:, :longest]
            asked[f"{prefix}prompt_embeds_mask"] = part["prompt_mask"][:, :longest]
        return asked

    def guidance_args(self, guidance_scale: float) -> dict[str, float]:
        return {"true_cfg_scale": guidance_scale}

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        return ', negative_prompt=""'  # without it the pipeline uses no guidance
