"""Stable Diffusion 1 and 2, and Stable Diffusion XL: U-Nets with CLIP text encoders."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file

from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokens, catch_inputs
from diffusion_training.families.original_layout import (
    merge_clip,
    merge_open_clip,
    merge_vae,
    rename_unet,
)

# {kohya's name of a weight of a LoRA: PEFT's}
KOHYA_PARTS = {
    "lora_down.weight": "lora_A.weight",
    "lora_up.weight": "lora_B.weight",
    "dora_scale": "dora_scale",
    "lokr_w1": "lokr_w1",
    "lokr_w2": "lokr_w2",
    "lokr_w2_a": "lokr_w2_a",
    "lokr_w2_b": "lokr_w2_b",
}


class Float32(torch.nn.Module):
    """Stands in for the text encoder: pipelines read their dtype from it."""

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
    features: tuple[str, ...] = ()
    precision = "float16"  # which all GPUs support
    samples_one_by_one = False
    text_part = "cond_stage_model"  # prefix of the text encoders in a single file

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
        """The last hidden state; with clip_skip an earlier one, normalized like the last."""
        (text_encoder,) = encoders.text_encoders
        if not encoders.clip_skip:
            return {"prompt_embeds": text_encoder(tokens["input_ids"])[0].float()}
        layers = text_encoder(tokens["input_ids"], output_hidden_states=True).hidden_states
        embeds = text_encoder.final_layer_norm(layers[-1 - encoders.clip_skip])
        return {"prompt_embeds": embeds.float()}

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        if "text_encoder" not in parts:
            parts = parts | {"text_encoder": Float32(parts["unet"].device)}
        absent = {"safety_checker": None, "feature_extractor": None}
        return super().build(parts | absent | {"requires_safety_checker": False}, base, resolution)

    def find_model_fault(self, config: Any) -> str | None:
        embed_type = config.addition_embed_type
        if (embed_type == "text_time") == self.needs_sizes:
            return None
        return (
            f"has addition_embed_type {embed_type!r} (SDXL: 'text_time', Stable Diffusion: None), "
            "so it does not fit the text encoders"
        )

    def find_input_fault(self, config: Any, channels: int, width: int) -> str | None:
        if config.in_channels > config.out_channels == channels:
            return (
                "is for inpainting, edits or another task, which is not trained here: it takes "
                f"{config.in_channels} channels and predicts {channels}"
            )
        return super().find_input_fault(config, channels, width)

    def list_inputs(self, model: torch.nn.Module, prompts: Prompts) -> set[str]:
        base = Base(self, None, None, {})
        scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)  # else there is a warning
        parts = {"unet": model, "vae": None, "scheduler": scheduler}
        pipeline = self.build(parts, base, self.resolution)
        on_cpu = {"_execution_device": torch.device("cpu")}  # the model may have no weights
        pipeline.__class__ = type(self.pipeline, (type(pipeline),), on_cpu)
        pipeline.set_progress_bar_config(disable=True)
        cpu: Any = {name: embeds.cpu() for name, embeds in dict[str, Any](prompts).items()}
        latents = torch.zeros(1, model.config.in_channels, 8, 8)  # else they are drawn
        asked = self.call_args(cpu, cpu, 1.0) | self.size_args(64, 64)
        draw = partial(pipeline, **asked, latents=latents, num_inference_steps=1)
        return catch_inputs(model, draw)

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        return f", clip_skip={clip_skip}" if clip_skip else ""

    def usage_before(self, clip_skip: int | None) -> list[str]:
        if not clip_skip:
            return []
        # transformers 4 has such a part already
        alias = 'vars(pipeline.text_encoder)["text_model"] = pipeline.text_encoder'
        return [f"{alias}  # where clip_skip looks for it"]

    def convert_lora(
        self, path: Any, model: torch.nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read kohya's files here, because diffusers' reader guesses names and drops magnitudes.

        They use diffusers' or the published names of layers, with _ for each dot.
        """
        file = load_file(path)
        if not any(key.startswith(("lora_unet_", "lora_te")) for key in file):
            return super().convert_lora(path, model)
        names = [name for name, _ in model.named_modules()]
        published = rename_unet(names, model.config.layers_per_block)
        layers = {published[name].replace(".", "_"): name for name in names}
        layers |= {name.replace(".", "_"): name for name in names}
        weights = {}
        alphas = {}
        for key, value in file.items():
            kohya, _, part = key.partition(".")
            layer = layers.get(kohya.removeprefix("lora_unet_"))
            if key.startswith("lora_te"):
                weights[f"text_encoder.{key}"] = value
            elif layer is None or part not in [*KOHYA_PARTS, "alpha"]:
                raise ValueError(f"it holds {key}, which is not used here")
            elif part == "alpha":
                alphas[f"unet.{layer}"] = value
            else:
                weights[f"unet.{layer}.{KOHYA_PARTS[part]}"] = value
        return weights, alphas, {}

    def is_version_2(self, model: torch.nn.Module) -> bool:
        """Whether a U-Net is of Stable Diffusion 2, whose text encoder is OpenCLIP's."""
        return model.config.cross_attention_dim == 1024

    def describe_for_sd_scripts(self, model: torch.nn.Module) -> dict[str, str]:
        is_version_2 = self.is_version_2(model)
        version = "sd_v2" if is_version_2 else "sd_v1"
        return {"ss_base_model_version": version, "ss_v2": str(is_version_2)}  # A1111 reads ss_v2

    def name_architecture(self, model: torch.nn.Module, predicts_velocity: bool) -> str:
        if not self.is_version_2(model):
            return "stable-diffusion-v1"
        return f"stable-diffusion-v2-{'768-v' if predicts_velocity else '512'}"

    def guess_objective(self, names: set[str], header: dict[str, str]) -> dict[str, Any]:
        """v-prediction and zero terminal SNR, by the marks that ComfyUI looks for."""
        objective: dict[str, Any] = {}
        says_velocity = header.get("modelspec.prediction_type", "").lower().startswith("v")
        if "v_pred" in names or says_velocity:
            objective["prediction_type"] = "v_prediction"
        if "ztsnr" in names:
            objective |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        return objective

    def merge(self, pipeline: Any) -> dict[str, torch.Tensor]:
        unet = pipeline.unet
        vae = pipeline.vae
        if type(vae).__name__ != "AutoencoderKL":
            raise ValueError(f"its VAE is an {type(vae).__name__}, not an AutoencoderKL")
        names = rename_unet(unet.state_dict(), unet.config.layers_per_block)
        levels = len(vae.config.block_out_channels)
        parts = {
            "model.diffusion_model.": {names[k]: x for k, x in unet.state_dict().items()},
            "first_stage_model.": merge_vae(vae.state_dict(), levels),
            **self.merge_text_encoders(pipeline),
        }
        merged = {
            prefix + name: value.detach().cpu().contiguous()
            for prefix, weights in parts.items()
            for name, value in weights.items()
        }
        config = pipeline.scheduler.config
        if config.prediction_type == "v_prediction":
            merged["v_pred"] = torch.tensor([])
            if config.get("rescale_betas_zero_snr"):
                merged["ztsnr"] = torch.tensor([])
        return merged

    def merge_text_encoders(self, pipeline: Any) -> dict[str, dict[str, torch.Tensor]]:
        """{prefix: weights} of the text encoders in a single file."""
        weights = pipeline.text_encoder.state_dict()
        if self.is_version_2(pipeline.unet):
            return {"cond_stage_model.model.": merge_open_clip(weights)}
        return {"cond_stage_model.transformer.": merge_clip(weights)}


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL (arXiv:2307.01952): two text encoders, and a U-Net that takes sizes."""

    name = "sdxl"
    title = "Stable Diffusion XL"
    pipeline = "StableDiffusionXLPipeline"
    resolution = 1024
    suffixes = ("", "_2")
    needs_sizes = True
    features = ("sdxl",)
    text_part = "conditioner"

    def find_fault(self, base: Base) -> str | None:
        if None in base.index.get("text_encoder", [None]):
            return f"{base.name} has only one text encoder: SDXL's refiner can't be trained here"
        if base.text_encoder or base.tokenizer:
            flags = "--text_encoder_name_or_path and --tokenizer_name_or_path"
            return f"SDXL's text encoders can't be replaced: leave {flags} out"
        return None

    def needs_exact_vae(self, config: dict[str, Any]) -> bool:
        # SDXL's VAEs overflow in float16 if they set force_upcast. Those of Stable Diffusion set it
        # by default, but seldom overflow.
        return config.get("force_upcast", True)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """The second-to-last layers of both encoders, joined, and the second one's projection."""
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
        """Zeros, as SDXL was trained, except if model_index.json turns them off."""
        empty = super().encode_empty(encoders, base, tokens)
        if base.index.get("force_zeros_for_empty_prompt", True):
            empty["prompt_embeds"].zero_()
            empty["pooled_prompt_embeds"].zero_()
        return empty

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        is_zero = not any(embeds.any() for embeds in empty_prompt.values())
        return {"force_zeros_for_empty_prompt": is_zero}

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked = super().call_args(prompts, empty, guidance_scale)
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
            parts = parts | {
                "text_encoder": Float32(device),
                "text_encoder_2": Float32(device, projection_dim),
            }
        zeros = base.index.get("force_zeros_for_empty_prompt", True)
        options = {"force_zeros_for_empty_prompt": zeros, "add_watermarker": False}
        return Family.build(self, parts | options, base, resolution)

    def usage_before(self, clip_skip: int | None) -> list[str]:
        return []

    def describe_for_sd_scripts(self, model: torch.nn.Module) -> dict[str, str]:
        return {"ss_base_model_version": "sdxl_base_v1-0"}

    def name_architecture(self, model: torch.nn.Module, predicts_velocity: bool) -> str:
        return "stable-diffusion-xl-v1-base"

    def merge_text_encoders(self, pipeline: Any) -> dict[str, dict[str, torch.Tensor]]:
        first = pipeline.text_encoder.state_dict()
        second = pipeline.text_encoder_2.state_dict()
        return {
            "conditioner.embedders.0.transformer.": merge_clip(first),
            "conditioner.embedders.1.model.": merge_open_clip(second),
        }
