"""How much memory and disk does training take? Counted from published shapes.

    python benchmarks/memory.py                       # some minutes, on any machine, without a GPU
    python benchmarks/memory.py --models SDXL         # within two minutes of processor time
    python benchmarks/memory.py --plans --models SDXL Z-Image  # what --fit chooses on each card
    python benchmarks/memory.py --models my/unet/config.json  # a model of your own

Prints tables, for one process unless a table names several GPUs. GB is 1e9 bytes. No weights are
loaded:

1. Cards: the first way to train a whole model, in the order of the tables, that fits into a card;
   and what `--fit auto` chooses for the recipe of a LoRA, or the flags to add to the recipe.
   Then the plans of `--fit auto` with their estimates: GB in a step, GB while samples are drawn
   without the VAE, GB of the host, and the share of a step's operations that are computed twice.
2. A training step with one image: memory of the device, in each way to train, and with `--shard` on
   several GPUs.
3. Memory that each further image adds to a step.
4. Samples: memory of the device while they are drawn.
5. Disk: a row of the cache, a checkpoint, the result.
6. Text encoders: their size, and the operations that tokens in place of embeddings
   (`--text_cache ids`) add to a step of a U-Net.
7. Memory of the host at the start of a run.
8. Operations of a training step of a U-Net, per image.
9. Activations that the forward pass keeps, per image, in float32.
10. The largest batches of U-Nets for `train_unconditional.py`.

A LoRA has the layers that --lora_layers chooses by default, and the rank of
diffusion_training/families/lora_settings.py, or 16 where that file has no model.

Weights, gradients, moments and EMA weights are counted by the code that prints them before step 1.
Activations are counted as `--fit` counts them before step 1, block by block, under autocast, but on
a simulated GPU with tensors that have shapes only. Of blocks that are alike, one is computed.
Attention is one fused kernel. A GPU needs some memory for itself and for gaps between tensors, so a
tenth of a card stays free.
"""

import argparse
import contextlib
import copy
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from diffusers import UNet2DModel
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_text_to_image
import train_unconditional
from diffusion_training.batches import Prepared
from diffusion_training.blocks import compute_in_float32, list_outer_blocks
from diffusion_training.families.base import Family, Prompts
from diffusion_training.families.known import load_family
from diffusion_training.families.lora_layers import COMMON, LAYERS
from diffusion_training.families.lora_settings import SETTINGS, LoraSettings
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.models import cast_weights, start_average
from diffusion_training.training.lora.block_swap import BlockSwap
from diffusion_training.training.lora.lora import add_lora
from diffusion_training.training.lora.quantization import BLOCK, list_quantizable
from diffusion_training.training.step import plans
from diffusion_training.training.step.costs import count_disk, count_flops, count_memory
from diffusion_training.training.step.fit import Estimate, choose_plan
from diffusion_training.training.step.plans import (
    ALL,
    MemoryPlan,
    Meter,
    Recorder,
    Segment,
    StepMemory,
    record_step,
)
from diffusion_training.training.step.sharding import share_memory

ROOT = Path(__file__).parent.parent
SD2 = json.loads((ROOT / "configs/stable_diffusion_v2_base_unet.json").read_text())
SD1 = {**SD2, "attention_head_dim": 8, "cross_attention_dim": 768, "use_linear_projection": False}
SDXL = json.loads((ROOT / "configs/stable_diffusion_xl_base_unet.json").read_text())
VIT_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
VIT_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}
VIT_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_8B = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_0_6B = QWEN3_4B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    "tie_word_embeddings": False,
}
# the language half is Qwen3 8B
QWEN3_VL_8B = {
    "text_config": QWEN3_8B,
    "vision_config": {"out_hidden_size": 4096},
    "tie_word_embeddings": False,
}
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
KL = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
FLUX_KL = KL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
KLEIN = {"guidance_embeds": False, "num_layers": 5, "num_single_layers": 20}
KLEIN |= {"num_attention_heads": 24, "joint_attention_dim": 7680}
KLEIN_9B = KLEIN | {"num_layers": 8, "num_single_layers": 24}
KLEIN_9B |= {"num_attention_heads": 32, "joint_attention_dim": 12288}
# diffusers' scripts convert_sd3_to_diffusers.py and convert_cosmos_to_diffusers.py
SD3_LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
SD3_MEDIUM = SD3_LARGE | {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}
COSMOS_2B = {"num_attention_heads": 16, "extra_pos_embed_type": None, "rope_scale": (1.0, 4.0, 4.0)}
RANKS = {each.title.removesuffix(" (stills)"): each.rank for each in SETTINGS.values()}
CARDS = (8, 12, 16, 24, 48, 80)  # GB as they are sold, which are 2**30 bytes
PLAN_CARDS = (8, 12, 16, 24, 32, 80)


@dataclass(frozen=True)
class Published:
    """A published model.

    Its parts are (name of a class, config). The classes are diffusers'; those of most text encoders
    are transformers'.
    """

    family: str
    config: dict[str, Any]  # of the U-Net or transformer
    vae: tuple[str, dict[str, Any]]
    encoders: tuple[tuple[str, dict[str, Any]], ...]
    side: int  # pixels of its images
    tokens: int  # of a caption, with padding


def read_prx(name: str) -> Published:
    config = json.loads((ROOT / f"configs/{name}.json").read_text())
    return Published("prx", config, ("AutoencoderKL", FLUX_KL), (("Gemma2Model", {}),), 512, 256)


CLIP_L = ("CLIPTextModel", VIT_L)
CLIP_G = ("CLIPTextModelWithProjection", VIT_G)
SD_KL = ("AutoencoderKL", KL)
FLUX2_KL = ("AutoencoderKLFlux2", {})
QWEN_KL = ("AutoencoderKLQwenImage", {})
QWEN_VL = ("Qwen2_5_VLForConditionalGeneration", QWEN_VL_7B)
QWEN3_VL = ("Qwen3VLForConditionalGeneration", QWEN3_VL_8B)
QWEN3_VL_4B = (QWEN3_VL[0], {"text_config": QWEN3_4B, "vision_config": {"out_hidden_size": 2560}})
T5 = ("T5EncoderModel", T5_XXL)
ANIMA_TEXT = (("Qwen3Model", QWEN3_0_6B), ("AnimaTextConditioner", {}))
SD3_KL = ("AutoencoderKL", FLUX_KL)
SD3_TEXT = (("CLIPTextModelWithProjection", VIT_L), CLIP_G, T5)
UMT5 = ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384})
WAN_KL = ("AutoencoderKLWan", {})
WAN_2_2_KL = (
    "AutoencoderKLWan",
    {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 16,
    },
)
# of Wan 2.1 T2V 1.3B and Wan 2.2 TI2V 5B; that of the 14B has the defaults of diffusers' class
WAN_1_3B = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
WAN_5B = {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30}
WAN_5B |= {"in_channels": 48, "out_channels": 48}
QWEN_2_1_KL = ("AutoencoderKLQwenImage21", {})
# To add a family: a line with its published configs. {}: the defaults of diffusers' class. Those of
# Qwen-Image 2.1 give the sizes of the published files in 16 bits: 14.2 GB, the text encoder 17.5.
MODELS = {
    "Stable Diffusion 1.5": Published("sd", SD1, SD_KL, (CLIP_L,), 512, 77),
    "Stable Diffusion 2": Published("sd", SD2, SD_KL, (("CLIPTextModel", VIT_H),), 512, 77),
    "SDXL": Published("sdxl", SDXL, SD_KL, (CLIP_L, CLIP_G), 1024, 77),
    "PRX 163M": read_prx("prx_163m"),
    "PRX 1.2B": read_prx("prx_1.2b"),
    "Z-Image": Published(
        "z-image", {}, ("AutoencoderKL", FLUX_KL), (("Qwen3Model", QWEN3_4B),), 1024, 512
    ),
    "FLUX.2 klein 4B": Published(
        "flux2-klein", KLEIN, FLUX2_KL, (("Qwen3ForCausalLM", QWEN3_4B),), 1024, 512
    ),
    "FLUX.2 klein 9B": Published(
        "flux2-klein", KLEIN_9B, FLUX2_KL, (("Qwen3ForCausalLM", QWEN3_8B),), 1024, 512
    ),
    "Qwen-Image": Published("qwen-image", {}, QWEN_KL, (QWEN_VL,), 1024, 512),
    "FLUX.1-dev": Published(
        "flux", {"guidance_embeds": True}, ("AutoencoderKL", FLUX_KL), (CLIP_L, T5), 1024, 512
    ),
    "FLUX.3 klein": Published("flux3", {}, FLUX2_KL, (QWEN3_VL_4B,), 1024, 512),
    "Krea 2": Published("krea2", {}, QWEN_KL, (QWEN3_VL_4B,), 1024, 512),
    "Stable Diffusion 3.5 Medium": Published("sd3", SD3_MEDIUM, SD3_KL, SD3_TEXT, 1024, 333),
    "Stable Diffusion 3.5 Large": Published("sd3", SD3_LARGE, SD3_KL, SD3_TEXT, 1024, 333),
    "Anima": Published("anima", COSMOS_2B, QWEN_KL, ANIMA_TEXT, 1024, 512),
    "Qwen-Image 2.1": Published("qwen-image-2.1", {}, QWEN_2_1_KL, (QWEN3_VL,), 1024, 512),
    "Wan 2.1 1.3B": Published("wan", WAN_1_3B, WAN_KL, (UMT5,), 640, 512),
    "Wan 2.1 14B": Published("wan", {}, WAN_KL, (UMT5,), 640, 512),
    "Wan 2.2 TI2V 5B": Published("wan-2.2-5b", WAN_5B, WAN_2_2_KL, (UMT5,), 960, 512),
}


@dataclass(frozen=True)
class Way:
    """A way to train. name: its column in the tables."""

    name: str
    is_lora: bool = False
    mixed_precision: str = "bf16"
    gradient_checkpointing: bool = True
    optimizer: str = "adamw"
    use_ema: bool = True
    base_precision: str | None = None
    swaps_blocks: bool = False  # --blocks_to_swap all
    full_bf16: bool = False  # the weights in bfloat16
    half_side: bool = False  # half the usual resolution
    num_processes: int = 1  # several with --shard

    @property
    def precision(self) -> str:
        """That of the weights, as of --mixed_precision."""
        return self.mixed_precision if self.is_lora or self.full_bf16 else "no"

    @property
    def plan(self) -> MemoryPlan:
        if self.swaps_blocks:
            return replace(ALL, swapped=sys.maxsize)
        return ALL if self.gradient_checkpointing else MemoryPlan()


FULL = (
    Way("float32", mixed_precision="no", gradient_checkpointing=False),
    Way("bf16", gradient_checkpointing=False),
    Way("bf16, GC"),
    Way("bf16, GC, 8-bit", optimizer="adamw8bit"),
    Way("bf16, GC, 8-bit, no EMA", optimizer="adamw8bit", use_ema=False),
    Way("bf16, GC, Adafactor, no EMA", optimizer="adafactor", use_ema=False),
    Way("full bf16, GC", optimizer="adafactor", use_ema=False, full_bf16=True),
    Way(
        "full bf16, GC, half the side",
        optimizer="adafactor",
        use_ema=False,
        full_bf16=True,
        half_side=True,
    ),
)
LORA = (
    Way("float32", is_lora=True, mixed_precision="no", gradient_checkpointing=False),
    Way("bf16", is_lora=True, gradient_checkpointing=False),
    Way("bf16, GC", is_lora=True),
    Way("bf16, GC, int8", is_lora=True, base_precision="int8"),
    Way("bf16, GC, nf4", is_lora=True, base_precision="nf4"),
    Way("bf16, swap", is_lora=True, swaps_blocks=True),
    Way("bf16, GC, nf4, half the side", is_lora=True, base_precision="nf4", half_side=True),
    Way("bf16, swap, half the side", is_lora=True, swaps_blocks=True, half_side=True),
)
SHARDED = tuple(Way(f"{number} GPUs", num_processes=number) for number in (2, 4, 8))
# Models of the last tables and their resolutions; the files are for train_unconditional.py.
U_NETS = {"Stable Diffusion 1.5": (256, 512), "Stable Diffusion 2": (256, 512)}
U_NETS |= {"SDXL": (512, 1024)}
KEPT = {"unet_32.json": (32,), "unet_64.json": (64, 128, 256), "unet_128.json": (128,)}
KEPT |= {"unet_256.json": (64, 128, 256)}
KEPT |= {"Stable Diffusion 2": (256, 512), "SDXL": (512, 1024)}


# -------------------------------------------------------------------------------------------------
# models without weights, and their memory


def to_sequence(latents: torch.Tensor) -> torch.Tensor:
    """[N, C, h, w] -> [N, h * w, C]."""
    return latents.flatten(2).transpose(1, 2)


def from_sequence(sequence: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[N, h * w, C] -> [N, C, h, w], with the shape of `like`."""
    return sequence.transpose(1, 2).reshape(like.shape)


class QwenImage21(Family):
    """Qwen-Image 2.1, which trainers record from its pipeline."""

    model = "QwenImage21Transformer2DModel"
    embeds_width = "context_in_dim"

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, vae.config.z_dim

    def downscale(self, vae: torch.nn.Module) -> int:
        return vae.config.scale_factor_spatial

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        return latents.unsqueeze(2)

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        """Call the blocks like the model, which reads the places of image tokens from a mask.

        A simulated GPU has no values to read, but here these are the last tokens.
        """
        height, width = noisy.shape[2:]
        texts = model.txt_in(prompts["prompt_embeds"])
        hidden = torch.cat([texts, model.img_in(to_sequence(noisy))], dim=1)
        tokens = texts.shape[1]
        with unset_fake_temporarily(), torch.device("cpu"):
            is_image = torch.arange(hidden.shape[1]) >= tokens
            places = model.pos_embed([(1, height, width)], is_image, is_image.device)
        is_image, places = is_image.to(noisy.device), places.to(noisy.device)
        embedded = model.time_text_embed(torch.cat([times, times.new_zeros(1)]), hidden)
        modulation = model.modulation(embedded)
        for block in model.transformer_blocks:
            given = (hidden, modulation, places, None, is_image, None, None, None)
            given += ([(0, tokens, True)], None)
            hidden = block(*given)
        output = model.proj_out(model.norm_out(hidden, embedded, is_image))
        return from_sequence(output[:, tokens:], noisy).float()


@dataclass
class Tokens(Family):
    """A transformer that trainers record from its pipeline, and that takes a sequence of tokens.

    channels: of a latent. axes: numbers of a token's place. further: other inputs, by their shapes
    for one image. merged: whether a place of text and image is in one list.
    """

    model: str
    channels: int = 64
    axes: int = 3
    pixels: int = 16  # on a side of a token
    width: str = "joint_attention_dim"
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layers: int = 0  # of the text encoder, whose embeddings are stacked
    merged: bool = False

    @property
    def embeds_width(self) -> str:  # type: ignore[override]
        return self.width

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, self.channels

    def downscale(self, vae: torch.nn.Module) -> int:
        return self.pixels

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        channels = vae.config.get("latent_channels") or vae.config.z_dim
        side = latents.shape[-1] * 2
        unpacked = latents.new_zeros(len(latents), channels, side, side)
        return unpacked.unsqueeze(2) if "z_dim" in vae.config else unpacked

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        embeds = prompts["prompt_embeds"]
        tokens = noisy.shape[2] * noisy.shape[3]
        texts = embeds.shape[1]
        given = {name: noisy.new_zeros(len(noisy), *shape) for name, shape in self.further}
        if self.layers:
            embeds = embeds.unsqueeze(2).expand(-1, -1, self.layers, -1)
        if self.merged:
            given["position_ids"] = noisy.new_zeros(texts + tokens, self.axes)
        else:
            given["img_ids"] = noisy.new_zeros(tokens, self.axes)
            given["txt_ids"] = noisy.new_zeros(texts, self.axes)
        output = model(to_sequence(noisy), encoder_hidden_states=embeds, timestep=times, **given)
        return from_sequence(output.sample, noisy).float()


class Klein(Tokens):
    """FLUX.2 klein, whose cache holds the embeddings of padding as well."""

    ragged = False


class QwenImage(Tokens):
    """Qwen-Image, which gets the shape of an image in place of its tokens' places."""

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        output = model(
            to_sequence(noisy),
            encoder_hidden_states=prompts["prompt_embeds"],
            encoder_hidden_states_mask=prompts["prompt_mask"],
            timestep=times,
            img_shapes=[[(1, *noisy.shape[2:])]] * len(noisy),
        )
        return from_sequence(output.sample, noisy).float()


class ZImage(Family):
    """Z-Image, which takes lists."""

    model = "ZImageTransformer2DModel"
    embeds_width = "cap_feat_dim"

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        output = model(list(noisy.unsqueeze(2)), times, list(prompts["prompt_embeds"])).sample
        return torch.stack(output).squeeze(2).float()


@dataclass
class Grid(Family):
    """A transformer that trainers record from its pipeline, and that takes latents as they are.

    further: see `Tokens`. is_video: whether latents have a time, and there is a mask of padding.
    """

    model: str
    width: str
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()
    is_video: bool = False

    @property
    def embeds_width(self) -> str:  # type: ignore[override]
        return self.width

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, 16

    def downscale(self, vae: torch.nn.Module) -> int:
        return 8

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        return latents.unsqueeze(2) if self.is_video else latents

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        given = {name: noisy.new_zeros(len(noisy), *shape) for name, shape in self.further}
        given |= {"timestep": times, "encoder_hidden_states": prompts["prompt_embeds"]}
        if not self.is_video:
            return model(noisy, **given).sample.float()
        sides = [8 * side for side in noisy.shape[2:]]
        given["padding_mask"] = noisy.new_zeros(1, 1, *sides)
        return model(noisy.unsqueeze(2), **given).sample.squeeze(2).float()


@dataclass
class Wan(Family):
    """Wan with a still for a video, which trainers record from its pipeline."""

    channels: int = 16
    pixels: int = 8  # per latent along a side
    model = "WanTransformer3DModel"
    embeds_width = "text_dim"

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, self.channels

    def downscale(self, vae: torch.nn.Module) -> int:
        return self.pixels

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        return latents.unsqueeze(2)

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        output = model(noisy.unsqueeze(2), times, prompts["prompt_embeds"]).sample
        return output.squeeze(2).float()


RECORDED = {
    "wan": Wan,
    "wan-2.2-5b": partial(Wan, channels=48, pixels=16),
    "z-image": ZImage,
    "flux2-klein": partial(Klein, "Flux2Transformer2DModel", channels=128, axes=4),
    "qwen-image": partial(QwenImage, "QwenImageTransformer2DModel"),
    "sd3": partial(
        Grid, "SD3Transformer2DModel", "joint_attention_dim", (("pooled_projections", (2048,)),)
    ),
    "anima": partial(Grid, "CosmosTransformer3DModel", "text_embed_dim", is_video=True),
    "qwen-image-2.1": QwenImage21,
    "flux": partial(
        Tokens, "FluxTransformer2DModel", further=(("pooled_projections", (768,)), ("guidance", ()))
    ),
    "flux3": partial(Tokens, "Flux3Transformer2DModel", channels=128, axes=4),
    "krea2": partial(
        Tokens, "Krea2Transformer2DModel", width="text_hidden_dim", layers=12, merged=True
    ),
}


def find_family(name: str) -> Family:
    return RECORDED[name]() if name in RECORDED else load_family(name)


def predict(family: Family, model: Any, *inputs: Any) -> torch.Tensor:
    """The prediction of a denoiser, as its trainer calls it. inputs: latents, times, prompts."""
    if family.folder == "unet":
        return train_text_to_image.predict_noise({"unet": model}, *inputs)
    return family.predict(model, *inputs)


def make_denoiser(model: Published) -> Any:
    return getattr(diffusers, find_family(model.family).model).from_config(model.config)


def make_vae(model: Published) -> Any:
    name, config = model.vae
    return getattr(diffusers, name)(**config)


def make_encoders(model: Published) -> list[Any]:
    made = []
    for name, config in model.encoders:
        if hasattr(diffusers, name):  # a part of the pipeline that goes on from the text encoder
            made.append(getattr(diffusers, name)(**config))
        else:
            kind = getattr(transformers, name)
            made.append(kind(kind.config_class(**config)))
    return made


def count_numbers(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def prepare_lora(name: str, denoiser: Any, mixed_precision: str) -> None:
    """Add the adapter of a LoRA, with the model's usual rank and layers."""
    which = LAYERS.get(type(denoiser).__name__, COMMON).default
    rank = RANKS.get(name, LoraSettings._field_defaults["rank"])
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
    add_adapter(name, denoiser, which, rank, dtype)


def add_adapter(name: str, denoiser: Any, which: str, rank: int, dtype: torch.dtype) -> None:
    flags = argparse.Namespace(
        rank=rank,
        lora_type="lora",
        lora_alpha=None,
        lora_layers=which,
        lora_dropout=0.0,
        use_dora=False,
    )
    family = find_family(MODELS[name].family)
    if MODELS[name].family in RECORDED:  # trainers record it from its pipeline
        layers = Recorded.choose_layers(family, denoiser, which)
    else:
        layers = family.choose_layers(denoiser, which)
    add_lora(denoiser, layers, "", dtype, flags)


def count_adapter(name: str, which: str) -> int:
    """The weights of a LoRA of rank 1 on a set of layers."""
    with init_empty_weights(include_buffers=False):
        denoiser = make_denoiser(MODELS[name])
        add_adapter(name, denoiser, which, 1, torch.float32)
    return sum(weight.numel() for weight in denoiser.parameters() if weight.requires_grad)


@functools.lru_cache(maxsize=3)
def prepare_denoiser(name: str, is_lora: bool, precision: str) -> Any:
    """Make a model without weights, with the adapter of a LoRA. Don't change it: it is kept.

    precision: of the weights, see `Way.precision`.
    """
    model = MODELS[name]
    with init_empty_weights(include_buffers=False):
        denoiser = make_denoiser(model)
        if is_lora:
            prepare_lora(name, denoiser, precision)
        elif precision == "bf16":
            cast_weights(denoiser, torch.bfloat16, trained=True)
    return denoiser


@functools.lru_cache(maxsize=3)
def prepare_average(denoiser: Any) -> Any:
    """Make the EMA weights of a model of `prepare_denoiser`. They share its frozen weights."""
    return start_average({"model": denoiser})


def count_held(name: str, way: Way) -> dict[str, int]:
    """Count the bytes that a step holds, without activations, by kind; see `count_memory`."""
    return {**count_held_in(name, replace(way, name="", half_side=False))}


@functools.cache
def count_held_in(name: str, way: Way) -> dict[str, int]:
    denoiser = prepare_denoiser(name, way.is_lora, way.precision)
    with torch.device("meta"):
        layers = []
        if way.base_precision:
            layers = [denoiser.get_submodule(layer) for layer in list_quantizable(denoiser)]
        averaged = prepare_average(denoiser) if way.use_ema else {}
        held = count_memory({"model": denoiser}, averaged, [], 1, way.optimizer)
        if way.num_processes > 1:
            held = share_memory(held, {"model": denoiser}, way.num_processes, 0)
    # fewer bits in place of 16, float32 scales, and one layer at a time in 16 bits
    for layer in layers:
        numbers = layer.in_features * layer.out_features
        scales = layer.out_features if way.base_precision == "int8" else numbers / BLOCK
        size = {"int8": 1, "nf4": 0.5}[way.base_precision]
        held["weights"] -= int(numbers * (2 - size) - 4 * scales)
    held["weights"] += 2 * max((x.in_features * x.out_features for x in layers), default=0)
    return held


# -------------------------------------------------------------------------------------------------
# activations


FAKES = FakeTensorMode(allow_non_fake_inputs=True)
# A GPU's autocast computes these in float32, and a CPU's does not
IN_FLOAT32 = ("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softmax.int", "rsqrt")
IN_FLOAT32 += ("pow.Tensor_Scalar", "exp", "sum.dim_IntList", "linalg_vector_norm")


@contextlib.contextmanager
def fake_device() -> Iterator[Meter]:
    """Compute with tensors that have shapes only, on a CPU whose autocast is that of a GPU.

    Without a GPU, torch computes no backward pass of such tensors on one.
    """

    def widen(operator: Any, *args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*tree_map_only(torch.Tensor, torch.Tensor.float, args), **options)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in IN_FLOAT32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(widen, operator), "AutocastCPU")
        with FAKES, torch.device("cpu"), Meter(torch.device("cpu")) as meter:
            yield meter


@functools.lru_cache(maxsize=3)
def make_weights(denoiser: Any) -> dict[str, torch.Tensor]:
    """Weights on the device of `fake_device` for a model of `prepare_denoiser`: {name: weight}."""
    named = [*denoiser.named_parameters(remove_duplicate=False)]
    named += denoiser.named_buffers(remove_duplicate=False)
    moved: dict[int, Any] = {}
    for _, weight in named:
        if id(weight) not in moved:
            copied = torch.empty(weight.shape, dtype=weight.dtype)
            if isinstance(weight, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, weight.requires_grad)
            moved[id(weight)] = copied
    return {key: moved[id(weight)] for key, weight in named}


def make_inputs(model: Published, config: Any, side: int, images: int) -> tuple[Any, Any, Any]:
    """Make latents, times and prompts for some images of `side` pixels."""
    family = find_family(model.family)
    with torch.device("meta"):
        vae = make_vae(model)
    _, channels = family.count_channels(vae)
    side //= family.downscale(vae)
    prompts: dict[str, Any] = {
        "prompt_embeds": torch.zeros(images, model.tokens, config[family.embeds_width])
    }
    if family.masked:
        prompts["prompt_mask"] = torch.ones(images, model.tokens, dtype=torch.bool)
    if family.needs_lengths:
        # not a tensor: models read it, and fake ones have no values
        prompts["prompt_lengths"] = np.full(images, model.tokens)
    if family.needs_sizes:
        prompts["pooled_prompt_embeds"] = torch.zeros(images, VIT_G["projection_dim"])
        prompts["time_ids"] = torch.zeros(images, 6)
    return torch.zeros(images, channels, side, side), torch.zeros(images), prompts


def copy_later(value: Any) -> Any:
    """A function that makes a tensor like the given one, or returns the value that it is."""
    if not torch.is_tensor(value):
        return lambda: value
    shape, options = value.shape, {"dtype": value.dtype, "requires_grad": value.requires_grad}
    return lambda: torch.empty(shape, **options)


class FirstOfEqual(Recorder):
    """Calls only the first of segments whose weights and inputs are alike, and counts all."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # and functions that make its result, and the operations of both passes
        self.known: dict[Any, tuple[Segment, Any, int]] = {}
        self.copies: list[torch.Tensor] = []

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        with super().calling():
            yield
        self.copies.clear()  # as autocast frees them

    def call(
        self, segment: torch.nn.Module, place: int, forward: Any, *args: Any, **options: Any
    ) -> Any:
        leaves = [*segment.parameters(), *tree_leaves((args, options))]
        facts = [
            (each.shape, each.dtype, each.requires_grad) if torch.is_tensor(each) else repr(each)
            for each in leaves
        ]
        key = type(segment), *facts
        meter = self.meter
        if key in self.known:
            like, make, operations = self.known[key]
            between = meter.held - self.last
            self.inputs.append((args, options))
            result = tree_map(lambda each: each(), make)
            self.copies.append(torch.empty(like.copies, dtype=torch.uint8))
            meter.operations += operations
            self.segments.append(replace(like, place=place, between=between))
            self.last = meter.peak = meter.held
        else:
            before = meter.operations
            result = super().call(segment, place, forward, *args, **options)
            make = tree_map(copy_later, result)
            self.known[key] = self.segments[-1], make, meter.operations - before
        if not torch.is_grad_enabled():  # no graph keeps them
            self.inputs.clear()
        return result


@functools.cache
def record(
    name: str,
    side: int,
    is_lora: bool,
    mixed_precision: str,
    images: int,
    precision: str,
    cache_enabled: bool = True,
    draws: bool = False,
) -> StepMemory:
    """Compute a step block by block, as --fit does.

    precision: of the weights. cache_enabled: autocast keeps its copies of weights while the model
    computes; with --shard it does not. draws: compute a sample instead, without a backward pass.
    """
    model = MODELS[name]
    family = find_family(model.family)
    denoiser = prepare_denoiser(name, is_lora, precision)
    with fake_device() as meter, patch.object(plans, "Recorder", FirstOfEqual):
        weights = make_weights(denoiser)
        # Transformers keep tensors that they have computed. The copy has the same weights.
        shared = [*denoiser.parameters(), *denoiser.buffers()]
        with unset_fake_temporarily():
            denoiser = copy.deepcopy(denoiser, {id(weight): weight for weight in shared})
        denoiser.train(not draws)
        autocast = torch.autocast(
            "cpu", torch.bfloat16, mixed_precision == "bf16", cache_enabled=cache_enabled
        )
        inputs = make_inputs(model, denoiser.config, side, images)

        def compute() -> torch.Tensor:
            with autocast:
                prediction = predict(family, denoiser, *inputs)
            return prediction.square().mean()

        with _reparametrize_module(denoiser, weights), torch.set_grad_enabled(not draws):
            frees_gradients = not is_lora and precision == "bf16"
            return record_step({family.folder: denoiser}, compute, meter, frees_gradients)


@functools.cache
def count_drawn(
    name: str, side: int, is_lora: bool, precision: str, cache_enabled: bool = True
) -> int:
    """Count the bytes that drawing a sample adds. For guidance two images pass the denoiser."""
    step = record(name, side, is_lora, "bf16", 2, precision, cache_enabled, draws=True)
    return replace(step, gradients=0).count(MemoryPlan())


@functools.cache
def count_decoding(name: str, side: int) -> tuple[int, int]:
    """Count the bytes of (the VAE, decoding one image), in float32."""
    model = MODELS[name]
    family = find_family(model.family)
    with fake_device() as meter, torch.no_grad():
        vae = make_vae(model).eval()
        _, channels = family.count_channels(vae)
        side //= family.downscale(vae)
        before = meter.peak = meter.held
        family.decode(vae, torch.zeros(1, channels, side, side))
        return 4 * count_numbers(vae), meter.peak - before


@functools.cache
def list_swappable(name: str, precision: str) -> list[int]:
    """The bytes of each segment of a LoRA's base that can be on the host."""
    denoiser = prepare_denoiser.__wrapped__(name, True, precision)
    with torch.device("meta"):
        BlockSwap(denoiser, "all", torch.device("meta"))
    return denoiser.block_swap.list_sizes()


@functools.cache
def estimate(name: str, way: Way, images: int = 1) -> Estimate:
    """What --fit knows before step 1, without VAE and text encoders.

    The recipes add up gradients of several images in a step. With --shard each process holds its
    share of the gradients all the time.
    """
    side = MODELS[name].side // (2 if way.half_side else 1)
    cached = way.num_processes == 1
    given = way.mixed_precision, images, way.precision, cached
    step = record(name, side, way.is_lora, *given)
    held = count_held(name, way)
    if not cached:
        step = replace(step, gradients=0)
    elif not way.full_bf16:
        step = replace(step, adds_up=True)
        del held["gradients"]
    drawn = count_drawn(name, side, way.is_lora, way.precision, cached)
    can_swap = way.is_lora and not way.base_precision
    swappable = list_swappable(name, way.precision) if can_swap else []
    return Estimate(step, sum(held.values()) - sum(swappable), 0, drawn, swappable, 0)


def count_step(name: str, way: Way, images: int = 1) -> int:
    """Count all bytes of a training step with some images."""
    return estimate(name, way, images).count_step(way.plan)


def count_drawing(name: str, way: Way, plan: MemoryPlan | None = None) -> int:
    """Count all bytes on the device while samples are drawn and decoded."""
    known = estimate(name, way)
    vae, decoding = count_decoding(name, MODELS[name].side // (2 if way.half_side else 1))
    more = vae + max(0, decoding - known.drawn)
    return known.count_drawing(plan or way.plan) + more


# -------------------------------------------------------------------------------------------------
# U-Nets


def count_flops_of(name: str, side: int) -> int:
    """Count the operations of a forward and backward pass on one image, as the trainers do."""
    model = MODELS[name]

    def loss(models: Any, prepared: Prepared, weight: torch.Tensor) -> torch.Tensor:
        times = torch.zeros(1)
        prompts: Any = prepared.condition
        return predict(
            find_family(model.family), models["unet"], prepared.clean, times, prompts
        ).sum()

    with torch.device("meta"):
        unet = make_denoiser(model)
        latents, _, prompts = make_inputs(model, unet.config, side, 1)
    objective: Any = SimpleNamespace(loss=loss)
    return count_flops({"unet": unet}, objective, Prepared(latents, prompts, {}))


def make_unet(name: str) -> UNet2DModel:
    """Make a U-Net for train_unconditional.py. name: a file in configs/, or a path."""
    path = Path(name) if Path(name).is_file() else ROOT / "configs" / name
    return UNet2DModel.from_config(UNet2DModel.load_config(path))


@functools.cache
def count_kept(name: str, side: int) -> int:
    """Count the bytes of activations per image of a model in KEPT."""
    with fake_device():
        if name in MODELS:
            model = MODELS[name]
            unet = make_denoiser(model)
            latents, times, prompts = make_inputs(model, unet.config, side, 1)
            call = functools.partial(predict, find_family(model.family), unet.train())
        else:
            unet = make_unet(name)
            shape = 1, unet.config.in_channels, side, side
            latents, times, prompts = torch.zeros(shape), torch.zeros(1), {}
            call = functools.partial(train_unconditional.predict_noise, {"unet": unet.train()})
        weights = {id(weight) for weight in unet.parameters()}
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor if tensor._base is None else tensor._base
            if id(whole) not in weights:
                # kept alive, so that no address is reused
                kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(latents, times, prompts)
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def count_encoding(name: str, side: int) -> float:
    """Count the text encoders' operations, as a share of a training step's."""
    model = MODELS[name]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        for encoder in make_encoders(model):
            encoder(torch.ones(1, model.tokens).long())
    return counter.get_total_flops() / count_flops_of(name, side)


# -------------------------------------------------------------------------------------------------
# the tables


def print_table(title: str, columns: list[str], rows: Iterator[list[str]]) -> None:
    head = f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for row in rows:
        print(f"{head}| {' | '.join(row)} |", flush=True)
        head = ""  # of a table without rows nothing is printed


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f}"


def choose_way(name: str, card: int) -> str:
    """The first way that fits into nine tenths of a card; with a * if its samples do not fit."""
    room = 0.9 * card * 2**30
    fitting = [way for way in FULL[1:] if count_step(name, way) <= room]
    for way in fitting:
        if count_drawing(name, way) <= room:
            return way.name
    return f"{fitting[0].name}*" if fitting else "no"


def list_cards(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        yield [name, *(choose_way(name, card) for card in CARDS)]


def describe_choice(known: Estimate, plan: MemoryPlan) -> str:
    """What --fit chooses, in a cell."""
    if plan.swapped:
        return f"swap {known.count_swapped(plan)[1] / 1e9:.0f} GB"
    share = known.step.share_repeated(plan)
    return f"GC {100 * share:.0f} %" if plan.checkpointed else "plain"


def choose_flags(name: str, images: int, card: int) -> str:
    """What --fit chooses for a LoRA on a card, else the first flags that make it fit.

    The VAE may decode on the CPU (*), and the text encoders may encode there (E), if they do not
    fit besides 2 GB for the VAE and its activations.
    """
    room = 0.9 * card * 2**30
    _, way, _, *quantized, _, small_quantized, small = LORA
    fitting = [
        (way, plan)
        for way in (way, *quantized, small, small_quantized)
        if (plan := choose_plan(estimate(name, way, images), room))
    ]
    if not fitting:
        return "no"
    way, plan = fitting[0]
    cell = describe_choice(estimate(name, way, images), plan)
    if way.base_precision:
        cell = way.base_precision
    elif plan.swapped and len(fitting) > 1 and (other := fitting[1][0].base_precision):
        cell += f" or {other}"
    cell += ", half the side" * way.half_side
    with torch.device("meta"):
        encoders = sum(map(count_numbers, make_encoders(MODELS[name])))
    decodes = count_drawing(name, way, plan) <= room
    return cell + ", E" * (2 * encoders + 2e9 > room) + " *" * (not decodes)


def list_choices(names: list[str]) -> Iterator[list[str]]:
    """The plan of --fit auto for a LoRA on each card, with its estimate."""
    for name in names:
        known = estimate(name, LORA[1])
        for card in PLAN_CARDS:
            plan = choose_plan(known, 0.9 * card * 2**30)
            cells = ["nothing fits", *[""] * 4]
            if plan:
                sizes = known.count_step(plan), known.count_drawing(plan)
                cells = [
                    plan.describe(),
                    *map(gigabytes, (*sizes, known.count_swapped(plan)[1])),
                    f"{100 * known.step.share_repeated(plan):.0f} %",
                ]
            yield [name, f"{card} GB", *cells]


def list_recipes(names: list[str]) -> Iterator[list[str]]:
    """LoRAs, and those that edit, whose references take as much as a second image."""
    edits = ("FLUX.2 klein 4B", "Qwen-Image 2.1")
    rows = [(name, name, 1) for name in names]
    rows += [(f"{name} (edits)", name, 2) for name in edits if name in names]
    for title, name, images in rows:
        yield [title, *(choose_flags(name, images, card) for card in CARDS)]


def list_sharded(names: list[str]) -> Iterator[list[str]]:
    """Memory of a step on each of several GPUs, and the smallest card for step and samples."""
    for name in names:
        cells = [name]
        for way in SHARDED:
            step = count_step(name, way)
            most = max(step, count_drawing(name, way))
            fitting = [card for card in CARDS if most <= 0.9 * card * 2**30]
            cells.append(f"{gigabytes(step)} ({f'{fitting[0]} GB' if fitting else 'no'})")
        yield cells


def list_steps(names: list[str], ways: tuple[Way, ...]) -> Iterator[list[str]]:
    for name in names:
        yield [name, *(gigabytes(count_step(name, way)) for way in ways)]


def list_images(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        cells = [name]
        for way in (*FULL[1:3], *LORA[1:3]):
            cells.append(gigabytes(count_step(name, way, 2) - count_step(name, way)))
        yield cells


def list_samples(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        for side in (MODELS[name].side // 2, MODELS[name].side):
            vae, decoding = count_decoding(name, side)
            most = max(decoding, count_drawn(name, side, True, "bf16"))
            yield [name, str(side), gigabytes(vae), gigabytes(most)]


def list_parts(names: list[str]) -> Iterator[list[str]]:
    """Memory without activations: full training, and a LoRA with its base."""
    for name in names:
        held = count_held(name, FULL[1])
        cells = [name, f"{held['gradients'] / 4e9:.2f}", gigabytes(sum(held.values()))]
        for way in (*FULL[3:6], *LORA[2:5]):
            cells.append(gigabytes(sum(count_held(name, way).values())))
        yield cells


def list_disk(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        model = MODELS[name]
        family = find_family(model.family)
        with torch.device("meta"):
            denoiser = make_denoiser(model)
            latents, _, prompts = make_inputs(model, denoiser.config, model.side, 1)
            frozen = [make_vae(model), *make_encoders(model)]
            checkpoint, result = count_disk({"model": denoiser}, True, "adamw")
            small, _ = count_disk({"model": denoiser}, False, "adafactor")
            prepare_lora(name, denoiser, "bf16")
            lora, _ = count_disk({"model": denoiser}, True, "adamw")
        embeds = prompts["prompt_embeds"].numel()
        if family.ragged and family.masked:
            text = f"{2 * embeds / model.tokens / 1e3:.1f} kB a token"
        else:
            text = f"{2 * embeds / 1e3:,.0f} kB"
        yield [
            name,
            f"{2 * 2 * latents.numel() / 1e3:,.0f} kB",  # mean and deviation, in 16 bits
            text,
            gigabytes(checkpoint),
            gigabytes(small),
            gigabytes(result + 4 * sum(map(count_numbers, frozen))),
            f"{lora / 1e9:.2f}",
        ]


def count_exact(model: Published) -> int:
    """The bytes of VAE and text encoders at the start, from files in 16 bits; see `EXACT`."""
    usual = torch.get_default_dtype()
    total = 4 * count_numbers(make_vae(model))
    torch.set_default_dtype(torch.bfloat16)
    try:
        encoders = make_encoders(model)
    finally:
        torch.set_default_dtype(usual)
    largest = 0
    for encoder in encoders:
        if not compute_in_float32(encoder):
            total += 4 * count_numbers(encoder)
            continue
        total += sum(weight.nbytes for weight in encoder.parameters())
        largest = max(largest, *(4 * count_numbers(each) for each in list_outer_blocks(encoder)))
    return total + largest  # one block at a time is in float32 as well


def list_host(names: list[str]) -> Iterator[list[str]]:
    """Memory of the first process: with the encoders, then with the model."""
    for name in names:
        model = MODELS[name]
        with torch.device("meta"):
            frozen = count_exact(model)
            trained = count_numbers(make_denoiser(model))
        yield [name, gigabytes(frozen), gigabytes(2 * trained)]


def list_encoders(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        with torch.device("meta"):
            numbers = sum(map(count_numbers, make_encoders(MODELS[name])))
        shares = [f"{100 * count_encoding(name, side):.1f} %" for side in U_NETS.get(name, ())]
        yield [name, gigabytes(4 * numbers), gigabytes(2 * numbers), " / ".join(shares)]


def list_operations(names: list[str]) -> Iterator[list[str]]:
    for name in names:
        for side in U_NETS.get(name, ()):
            yield [name, str(side), f"{count_flops_of(name, side) / 1e12:.2f}"]


def list_batches(names: list[str]) -> Iterator[list[str]]:
    """The largest batch of each U-Net for train_unconditional.py at the size of its config."""
    for name in names:
        with torch.device("meta"):
            unet = make_unet(name)
        side = unet.config.sample_size
        room = [0.9 * card * 2**30 - 20 * count_numbers(unet) for card in CARDS]
        batches = [max(0, int(bytes_left / count_kept(name, side))) for bytes_left in room]
        yield [name, str(side), *map(str, batches)]


def list_kept(names: list[str]) -> Iterator[list[str]]:
    for name, sides in KEPT.items():
        if name not in names:
            continue
        counts = [count_kept(name, side) for side in sides]
        for side, count in zip(sides, counts, strict=True):
            yield [name, str(side), f"{count / 1e6:,.0f}", f"{count / counts[0]:.1f}"]


def read_width(family: Family, config: dict[str, Any]) -> tuple[Any, ...]:
    """The width of the embeddings that a config takes, and whether it takes SDXL's sizes."""
    model = getattr(diffusers, family.model)
    with torch.device("meta"):
        config = model.from_config(config).config
    return config[family.embeds_width], config.get("addition_embed_type")


def read_model(path: str) -> str:
    """Add the model of a config to MODELS or KEPT, or raise ValueError. Returns its name.

    A model for latents gets the VAE, the text encoders and the size of images of the published
    model that has its class and takes the same embeddings.
    """
    config = json.loads(Path(path).read_text())
    kind = config.get("_class_name")
    if kind == "UNet2DModel":
        KEPT[path] = (config["sample_size"],)
        return path
    known = []
    for model in [*MODELS.values()]:
        family = find_family(model.family)
        known.append(family.model)
        if family.model != kind:
            continue
        if read_width(family, config) == read_width(family, model.config):
            MODELS[path] = replace(model, config=config)
            return path
    names = ", ".join(sorted({*known, "UNet2DModel"}))
    raise ValueError(
        f"{path}: _class_name is {kind}, with other embeddings than the published models have: "
        f"known are {names}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*MODELS, *(name for name in KEPT if name not in MODELS)]
    parser.add_argument(
        "--models",
        nargs="+",
        default=every,
        help=f"some of {', '.join(every)}, or JSON files: configs of your own models",
    )
    parser.add_argument(
        "--plans", action="store_true", help="print only what --fit auto chooses for LoRAs"
    )
    args = parser.parse_args(argv)
    given = args.models
    for i, name in enumerate(given):
        if name not in every:
            try:
                given[i] = read_model(name)
            except (OSError, ValueError) as error:
                parser.error(f"--models {name}: {error}")
    names = [name for name in given if name in MODELS]
    unets = [name for name in given if name not in MODELS]
    planned = ["model", "card", "plan", "a step", "samples", "of the host", "computed twice"]
    if args.plans:
        print_table("Plans of --fit auto", planned, list_choices(names))
        return
    cards = [f"{card} GB" for card in CARDS]
    # hardly anybody trains in float32, or a whole model at half the side
    full, lora = FULL[1:-1], LORA[1:]
    print_table("Cards: the whole model", ["model", *cards], list_cards(names))
    print_table("Cards: a LoRA", ["model", *cards], list_recipes(names))
    print_table("Plans of --fit auto", planned, list_choices(names))
    columns = ["model", *(way.name for way in SHARDED)]
    print_table("A step, the whole model with --shard", columns, list_sharded(names))
    for title, ways in (("the whole model", full), ("a LoRA", lora)):
        columns = ["model", *(way.name for way in ways)]
        print_table(f"A step, {title}", columns, list_steps(names, ways))
    columns = ["model", "billion weights", "AdamW, EMA", "8-bit, EMA", "8-bit, no EMA"]
    columns += ["Adafactor, no EMA", "LoRA, bf16 base", "LoRA, int8 base"]
    columns += ["LoRA, nf4 base"]
    print_table("Held without activations", columns, list_parts(names))
    columns = ["model", "whole, bf16", "whole, GC", "LoRA, bf16", "LoRA, GC"]
    print_table("Each further image", columns, list_images(names))
    columns = ["model", "px", "VAE", "activations"]
    print_table("Samples", columns, list_samples(names))
    columns = ["model", "latents", "embeddings", "checkpoint", "checkpoint, Adafactor, no EMA"]
    columns += ["pipeline", "checkpoint of a LoRA"]
    print_table("Disk", columns, list_disk(names))
    columns = ["text encoders of", "float32", "16 bits", "operations, as a share of a step's"]
    print_table("Text encoders", columns, list_encoders(names))
    columns = ["model", "VAE and text encoders", "base of a LoRA, 16 bits"]
    print_table("Memory of the host", columns, list_host(names))
    print_table("Operations", ["U-Net", "px", "TFLOP per image"], list_operations(names))
    columns = ["U-Net", "px", "MB per image", "relative to smallest px"]
    print_table("Activations in float32", columns, list_kept(given))
    columns = ["U-Net", "px", *cards]
    print_table("The largest batch without captions, float32", columns, list_batches(unets))


if __name__ == "__main__":
    main()
