"""Load, try, call and identify the VAE, and all encoders together."""

import hashlib
import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderTiny

from diffusion_training.data.families import FAMILIES, Tokenizers
from diffusion_training.errors import explained, fail
from diffusion_training.latents.text_encoders import (
    encode_prompts,
    find_family,
    load_text_encoders,
    locating,
    read_pipeline,
)
from diffusion_training.training.models import compile_model, load_weights, put_on_device

VAES = {
    "AutoencoderKL": AutoencoderKL,
    "AutoencoderTiny": AutoencoderTiny,
    "AutoencoderDC": AutoencoderDC,
}
Encoders = tuple[torch.nn.Module, torch.nn.ModuleList]  # the VAE and the text encoders
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # for --mixed_precision


def load_models(
    args: Namespace, dtype: torch.dtype
) -> tuple[torch.nn.Module, torch.nn.ModuleList, Tokenizers]:
    """Load (the VAE, a ModuleList of the text encoders, their `Tokenizers`), on the CPU.

    SDXL has two text encoders and two tokenizers.
    """
    family = find_family(args)
    if family == "sdxl" and None in read_pipeline(args).get("text_encoder", [None]):
        fail(
            f"{args.pretrained_model_name_or_path} has one text encoder of two: "
            "a refiner can't be trained here"
        )
    if family == "sdxl" and (args.text_encoder_name_or_path or args.tokenizer_name_or_path):
        fail(
            "SDXL's encoders go together: "
            "leave --text_encoder_name_or_path and --tokenizer_name_or_path out"
        )
    with locating(args, args.vae_name_or_path, "vae", family) as (source, options):
        kind = AutoencoderKL.load_config(source, **options)["_class_name"]
        if kind not in VAES or (kind == "AutoencoderDC" and family != "prx"):
            raise ValueError(f"it is an {kind}, no AutoencoderKL or AutoencoderTiny")
        # An SDXL VAE with force_upcast overflows in float16. Stable Diffusion's all have it, by
        # default, but seldom overflow.
        exact = family == "sdxl" and AutoencoderKL.load_config(source, **options).get(
            "force_upcast", True
        )
        vae = load_weights(
            VAES[kind], source, **options, torch_dtype=torch.float32 if exact else dtype
        )
        for name in ("shift_factor", "latents_mean", "latents_std"):
            if vae.config.get(name) and (name != "shift_factor" or not FAMILIES[family].masked):
                raise ValueError(
                    f"it has a {name}, which a {FAMILIES[family].pipeline}Pipeline would leave out"
                )
    text_encoders, tokenizers = load_text_encoders(args, dtype, family)
    check_sides(vae, args)
    return vae.eval(), text_encoders.eval(), tokenizers


def check_sides(vae: torch.nn.Module, args: Namespace) -> None:
    """End the program if the VAE can't encode images of --resolution, or of its buckets."""
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(
            f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, "
            "which this VAE needs"
        )
    if args.bucket_step and (
        args.bucket_step % vae_scale_factor(vae) or (args.resolution or 0) % args.bucket_step
    ):
        turn = (
            f"it must divide --resolution {args.resolution} "
            f"and be a multiple of {vae_scale_factor(vae)}"
        )
        fail(f"--bucket_step {args.bucket_step} does not suit: {turn}, as this VAE needs")


def vae_scale_factor(vae: torch.nn.Module) -> int:
    """How many times smaller than an image its latents are, in height and in width."""
    return 2 ** (
        len(vae.config.get("block_out_channels") or vae.config.encoder_block_out_channels) - 1
    )


def has_moments(vae: torch.nn.Module) -> bool:
    """Whether a VAE returns the mean and std of latents, not the latents themselves."""
    return isinstance(vae, AutoencoderKL)


def describe_scale(vae: torch.nn.Module) -> dict[str, float]:
    """How pipelines scale latents to about unit size: (latents - shift) * scaling_factor."""
    return {
        "scaling_factor": vae.config.scaling_factor,
        "shift_factor": vae.config.get("shift_factor") or 0.0,
    }


def describe_latents(vae: torch.nn.Module, resolution: int, kind: str) -> dict[str, Any]:
    """The description of a VAE's latents in a cache; `kind` is moments or sample."""
    side, channels = resolution // vae_scale_factor(vae), vae.config.latent_channels
    return {
        "latents": kind,
        "latents_shape": [channels * (2 if kind == "moments" else 1), side, side],
    }


def try_models(vae: torch.nn.Module, text_encoders: torch.nn.ModuleList) -> None:
    """Encode a small image and two tokens, or end the program.

    A config may describe a model that can't be computed.
    """
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * vae_scale_factor(vae)
            latents = encode_images(
                vae, torch.zeros(1, vae.config.in_channels, side, side, device=vae.device)
            )
            vae.decode(latents[:, : vae.config.latent_channels].to(vae.dtype))
        with explained("the text encoder does not work"):
            ids = torch.zeros(1, 2, dtype=torch.long, device=vae.device)
            encode_prompts(
                text_encoders, {"input_ids": ids, "input_ids_2": ids, "prompt_mask": ids == 0}
            )


def encode_images(vae: torch.nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Images uint8 [N, C, H, W] -> mean and std of their latents, unscaled.

    They are float32 [N, 2 * latent_channels, h, w]. AutoencoderTiny and AutoencoderDC have no std:
    they give the latents themselves, [N, latent_channels, h, w].
    """
    images = (pixel_values / 127.5 - 1).to(vae.dtype)
    if not has_moments(vae):
        return vae.encode(images)[0].float()
    posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


def hash_weights(model: torch.nn.Module) -> str:
    """SHA-256 of the values and shapes of a model's weights.

    It does not depend on the files or on the names that the library gives to the weights.
    """

    def hash_weight(weight: torch.Tensor) -> str:
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        return digest.hexdigest()

    # in threads: all processes wait while gigabytes are hashed, which releases the GIL
    with ThreadPoolExecutor() as pool:
        digests = pool.map(hash_weight, model.parameters())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def describe_models(
    vae: torch.nn.Module, text_encoders: torch.nn.ModuleList, tokenizers: Tokenizers
) -> dict[str, Any]:
    """The properties of models that decide whether caches fit together.

    They must be the same in all caches of a run, and in its trainer.
    """
    described: dict[str, Any] = {}
    described["vae"] = {
        "class": type(vae).__name__,
        "sha256": hash_weights(vae),
        **describe_scale(vae),
    }
    for suffix, text_encoder, tokenizer in zip(("", "_2"), text_encoders, tokenizers, strict=False):
        probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
        vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
        vocabulary = hashlib.sha256(vocabulary.encode()).hexdigest()
        text = {"class": type(text_encoder).__name__, "sha256": hash_weights(text_encoder)}
        text |= {"clip_skip": text_encoders.clip_skip} if text_encoders.clip_skip else {}
        described[f"text_encoder{suffix}"] = text
        described[f"tokenizer{suffix}"] = {
            "sha256": vocabulary,
            "model_max_length": tokenizer.model_max_length,
        }
    if FAMILIES[tokenizers.family].masked:
        described["model_family"] = tokenizers.family
    return described


def place_encoders(exact_models: Encoders, device: torch.device, args: Namespace) -> Encoders:
    """Put the VAE and the text encoders on the device, in the precision of --mixed_precision.

    `exact_models` are the same models in float32.
    """
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae, text_encoders = models = (
        exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    )
    put_on_device(vae, device)
    text_encoders.to(device)
    if args.compile:  # only the parts that encoding calls
        for model in (vae.encoder, *text_encoders):
            compile_model(model, args.compile)
    return models
