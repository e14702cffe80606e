"""Stable Diffusion 1 and 2, and Stable Diffusion XL: U-Nets with CLIP text encoders."""

from types import SimpleNamespace
from typing import Any

import torch

from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokens
from diffusion_training.models import call_unet


class Float32(torch.nn.Module):
    """In place of a text encoder: pipelines draw in the precision of their text encoder."""

    dtype = torch.float32

    def __init__(self, device: torch.device, projection_dim: int | None = None) -> None:
        super().__init__()
        self.device = device
        self.config = SimpleNamespace(projection_dim=projection_dim)


class StableDiffusion(Family):
    """Stable Diffusion 1 and 2 (arXiv:2112.10752)."""

    name = "sd"
    title = "Stable Diffusion"
    pipeline = "StableDiffusionPipeline"
    model = "UNet2DConditionModel"
    folder = "unet"
    script = "train_text_to_image.py"
    ignored_vae_settings = ("shift_factor", "latents_mean", "latents_std")
    masked = False
    ragged = False
    has_clip_skip = True
    named_in_cache = False
    features: tuple[str, ...] = ()
    samples_one_by_one = False
    other_layers = (
        "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv2", "conv_shortcut",
    )  # fmt: skip
    text_part = "cond_stage_model"  # how a single file calls the text encoders

    def recognizes(self, class_name: str) -> bool:
        others = ("StableDiffusionXL", "StableDiffusion3")
        return class_name.startswith("StableDiffusion") and not class_name.startswith(others)

    def recognizes_file(self, names: set[str]) -> bool:
        has_unet = "model.diffusion_model.input_blocks.0.0.weight" in names
        return has_unet and any(name.startswith(f"{self.text_part}.") for name in names)

    def choose_text_encoder(
        self, base: Base, source: str | None, options: dict[str, Any], suffix: str
    ) -> tuple[Any, dict[str, Any]]:
        import transformers

        if suffix:
            return transformers.CLIPTextModelWithProjection, {}
        return transformers.CLIPTextModel, {}

    def choose_tokenizer(self) -> Any:
        import transformers

        return transformers.CLIPTokenizer

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """The last hidden state; with clip_skip an earlier one, with the norm of the last."""
        (text_encoder,) = encoders.text_encoders
        if not encoders.clip_skip:
            return {"prompt_embeds": text_encoder(tokens["input_ids"])[0].float()}
        layers = text_encoder(tokens["input_ids"], output_hidden_states=True).hidden_states
        # transformers 4 had a part of that name
        body = getattr(text_encoder, "text_model", text_encoder)
        embeds = body.final_layer_norm(layers[-1 - encoders.clip_skip])
        return {"prompt_embeds": embeds.float()}

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        return call_unet(model, noisy, times, {"encoder_hidden_states": prompts["prompt_embeds"]})

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        if "text_encoder" not in parts:
            parts = parts | {"text_encoder": Float32(parts["unet"].device)}
        absent = {"safety_checker": None, "feature_extractor": None}
        return super().build(parts | absent | {"requires_safety_checker": False}, base, resolution)

    def check_model(self, config: Any) -> str | None:
        embed_type = config.addition_embed_type
        if (embed_type == "text_time") == self.needs_sizes:
            return None
        return f"has addition_embed_type {embed_type!r}: SDXL's is text_time, and no other's"

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        return f", clip_skip={clip_skip}" if clip_skip else ""

    def usage_before(self, clip_skip: int | None) -> str:
        if not clip_skip:
            return ""
        # with transformers 4 it has such a part
        alias = 'vars(pipeline.text_encoder)["text_model"] = pipeline.text_encoder'
        return f"\n{alias}  # where clip_skip looks for it"

    def read_lora(
        self, path: Any, model: torch.nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        import diffusers

        weights, alphas, metadata = getattr(diffusers, self.pipeline).lora_state_dict(
            str(path.parent),
            weight_name=path.name,
            unet_config=model.config,
            return_lora_metadata=True,
        )
        return weights, alphas or {}, metadata or {}

    def name_for_sd_scripts(self, model: torch.nn.Module) -> str:
        return "sd_v2" if model.config.cross_attention_dim == 1024 else "sd_v1"


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL (arXiv:2307.01952): two text encoders; the U-Net is told sizes."""

    name = "sdxl"
    title = "Stable Diffusion XL"
    pipeline = "StableDiffusionXLPipeline"
    resolution = 1024
    suffixes = ("", "_2")
    needs_sizes = True
    features = ("sdxl",)
    text_part = "conditioner"

    def recognizes(self, class_name: str) -> bool:
        return class_name.startswith("StableDiffusionXL")

    def check(self, base: Base) -> str | None:
        if None in base.index.get("text_encoder", [None]):
            return f"{base.name} has one text encoder of two: a refiner can't be trained here"
        if base.text_encoder or base.tokenizer:
            flags = "--text_encoder_name_or_path and --tokenizer_name_or_path"
            return f"SDXL's encoders go together: leave {flags} out"
        return None

    def needs_exact_vae(self, config: dict[str, Any]) -> bool:
        # This VAE overflows in float16 where it says so. Stable Diffusion's all say so, by default,
        # and seldom do.
        return config.get("force_upcast", True)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """The last layer but one of both encoders side by side, and the second one's projection."""
        first, second = encoders.text_encoders
        first_output = first(tokens["input_ids"], output_hidden_states=True)
        second_output = second(tokens["input_ids_2"], output_hidden_states=True)
        layer = -2 - encoders.clip_skip
        layers = [output.hidden_states[layer] for output in (first_output, second_output)]
        return {
            "prompt_embeds": torch.cat(layers, dim=-1).float(),
            "pooled_prompt_embeds": second_output.text_embeds.float(),
        }

    def encode_empty(self, encoders: Encoders, base: Base, tokens: Tokens) -> Prompts:
        """Zeros, unless model_index.json says otherwise: SDXL was trained with them."""
        empty = super().encode_empty(encoders, base, tokens)
        if base.index.get("force_zeros_for_empty_prompt", True):
            return {
                "prompt_embeds": torch.zeros_like(empty["prompt_embeds"]),
                "pooled_prompt_embeds": torch.zeros_like(empty["pooled_prompt_embeds"]),
            }
        return empty

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        is_zero = not any(embeds.any() for embeds in empty_prompt.values())
        return {"force_zeros_for_empty_prompt": is_zero}

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        condition = {
            "encoder_hidden_states": prompts["prompt_embeds"],
            "text_embeds": prompts["pooled_prompt_embeds"],
            "time_ids": prompts["time_ids"],
        }
        return call_unet(model, noisy, times, condition)

    def ask(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked = super().ask(prompts, empty, guidance_scale)
        pooled = prompts["pooled_prompt_embeds"]
        asked["pooled_prompt_embeds"] = pooled
        if guidance_scale > 1:
            asked["negative_pooled_prompt_embeds"] = empty["pooled_prompt_embeds"].expand_as(pooled)
        return asked

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        if "text_encoder_2" not in parts:
            config = parts["unet"].config
            sizes_width = 6 * config.addition_time_embed_dim
            projection_dim = config.projection_class_embeddings_input_dim - sizes_width
            device = parts["unet"].device
            stand_ins = {
                "text_encoder": Float32(device),
                "text_encoder_2": Float32(device, projection_dim),
            }
            parts = parts | stand_ins
        zeros = base.index.get("force_zeros_for_empty_prompt", True)
        options = {"force_zeros_for_empty_prompt": zeros, "add_watermarker": False}
        return Family.build(self, parts | options, base, resolution)

    def usage_before(self, clip_skip: int | None) -> str:
        return ""

    def name_for_sd_scripts(self, model: torch.nn.Module) -> str:
        return "sdxl_base_v1-0"
