"""PRX: a transformer that is trained from scratch, with a T5Gemma text encoder."""

import functools
import inspect
from typing import Any

import torch
from diffusers import AutoencoderKL

from diffusion_training.families.base import (
    Base,
    Encoders,
    Family,
    Prompts,
    Tokens,
    attend_to,
    move_to_front,
    set_shift,
)


@functools.cache
def open_text_cleaner() -> Any:
    from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor  # the import takes a second

    return TextPreprocessor()


class PRX(Family):
    """Photoroom's PRX."""

    name = "prx"
    title = "PRX"
    pipeline = "PRXPipeline"
    model = "PRXTransformer2DModel"
    vae_classes = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLFlux2")
    embeds_width = "context_in_dim"
    max_tokens = 256
    borrows_from = ("sd",)
    takes_classes = True
    suggests_lora = False

    def prepare(self, tokenizer: Any, caption: str) -> str:
        """In lower case, without URLs, Chinese and most symbols, as PRXPipeline cleans it."""
        return open_text_cleaner().clean_text(caption)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        (text_encoder,) = encoders.text_encoders
        mask = tokens["prompt_mask"]
        output = text_encoder(input_ids=tokens["input_ids"], attention_mask=attend_to(mask))
        return move_to_front(output.last_hidden_state.float(), mask)

    def load_vae(
        self, class_name: str, source: str | None, options: dict[str, Any], dtype: torch.dtype
    ) -> torch.nn.Module:
        """FLUX.2's VAE becomes an AutoencoderKL, which PRXPipeline can use.

        PRXPipeline takes one shift and one factor, here from means over the VAE's channels.
        """
        if class_name != "AutoencoderKLFlux2":
            return super().load_vae(class_name, source, options, dtype)
        # in float32, because the means would differ in bfloat16
        loaded = super().load_vae(class_name, source, options, torch.float32)
        known = inspect.signature(AutoencoderKL).parameters
        config = {name: value for name, value in loaded.config.items() if name in known}
        variance = loaded.bn.running_var + loaded.config.batch_norm_eps
        config["scaling_factor"] = float(variance.mean().rsqrt())
        config["shift_factor"] = float(loaded.bn.running_mean.mean())
        vae = AutoencoderKL(**config)
        weights = loaded.state_dict().items()
        vae.load_state_dict({name: value for name, value in weights if not name.startswith("bn.")})
        return vae.to(dtype)

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

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked = super().call_args(prompts, empty, guidance_scale)
        mask = prompts["prompt_mask"]
        asked |= {"prompt_attention_mask": mask, "use_resolution_binning": False}
        if guidance_scale > 1:
            asked["negative_prompt_attention_mask"] = empty["prompt_mask"].expand_as(mask)
        return asked

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        set_shift(parts["vae"])
        return super().build(parts | {"default_sample_size": resolution}, base, resolution)

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        return "" if resolution in (256, 512, 1024) else ", use_resolution_binning=False"
