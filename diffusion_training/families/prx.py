"""PRX: a transformer that is trained from scratch, with a T5Gemma text encoder."""

import functools
from typing import Any

import torch

from diffusion_training.families.base import (
    Base,
    Encoders,
    Family,
    Prompts,
    Tokens,
    attend_to,
    move_to_front,
)


@functools.cache
def open_text_cleaner() -> Any:
    from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor  # here: it takes a second

    return TextPreprocessor()


class PRX(Family):
    """Photoroom's PRX."""

    name = "prx"
    title = "PRX"
    pipeline = "PRXPipeline"
    model = "PRXTransformer2DModel"
    vae_classes = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")
    embeds_width = "context_in_dim"
    max_tokens = 256
    borrows_from = ("sd",)
    attention = ()

    def prepare(self, tokenizer: Any, caption: str) -> str:
        """In lower case, without addresses, Chinese and most signs, as PRXPipeline cleans it."""
        return open_text_cleaner().clean_text(caption)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        (text_encoder,) = encoders.text_encoders
        mask = tokens["prompt_mask"]
        output = text_encoder(input_ids=tokens["input_ids"], attention_mask=attend_to(mask))
        return move_to_front(output.last_hidden_state.float(), mask)

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        output = model(
            noisy,
            times,
            encoder_hidden_states=prompts["prompt_embeds"],
            attention_mask=prompts["prompt_mask"],
        )
        return output.sample.float()

    def patch_size(self, model: torch.nn.Module) -> int:
        return model.config.patch_size

    def ask(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked = super().ask(prompts, empty, guidance_scale)
        mask = prompts["prompt_mask"]
        asked |= {"prompt_attention_mask": mask, "use_resolution_binning": False}
        if guidance_scale > 1:
            asked["negative_prompt_attention_mask"] = empty["prompt_mask"].expand_as(mask)
        return asked

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        vae = parts["vae"]
        if vae.config.get("shift_factor", 0.0) is None:  # PRXPipeline would subtract it
            vae.register_to_config(shift_factor=0.0)
        return super().build(parts | {"default_sample_size": resolution}, base, resolution)

    def usage(self, resolution: int, clip_skip: int | None) -> str:
        return "" if resolution in (256, 512, 1024) else ", use_resolution_binning=False"
