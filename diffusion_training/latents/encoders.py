"""VAEs, and all encoders together: loading, trying, calling and recognizing them."""

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

VAES = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny, "AutoencoderDC": AutoencoderDC}
Encoders = tuple[torch.nn.Module, torch.nn.ModuleList]  # the VAE and the text encoders
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of --mixed_precision


def load_models(args: Namespace, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.ModuleList, Tokenizers]:
    """(the VAE, a ModuleList of the text encoders, their `Tokenizers`), on the CPU; SDXL has two of these."""
    family = find_family(args)
    if family == "sdxl" and None in read_pipeline(args).get("text_encoder", [None]):
        fail(f"{args.pretrained_model_name_or_path} has one text encoder of two: a refiner can't be trained here")
    if family == "sdxl" and (args.text_encoder_name_or_path or args.tokenizer_name_or_path):
        fail("SDXL's encoders go together: leave --text_encoder_name_or_path and --tokenizer_name_or_path out")
    with locating(args, args.vae_name_or_path, "vae", family) as (source, options):
        kind = AutoencoderKL.load_config(source, **options)["_class_name"]
        if kind not in VAES or (kind == "AutoencoderDC" and family != "prx"):
            raise ValueError(f"it is an {kind}, no AutoencoderKL or AutoencoderTiny")
        # SDXL's overflows in float16 where it says so; Stable Diffusion's all say so, by default, and seldom do
        exact = family == "sdxl" and AutoencoderKL.load_config(source, **options).get("force_upcast", True)
        vae = load_weights(VAES[kind], source, **options, torch_dtype=torch.float32 if exact else dtype)
        for name in ("shift_factor", "latents_mean", "latents_std"):
            if vae.config.get(name) and (name != "shift_factor" or not FAMILIES[family].masked):
                raise ValueError(f"it has a {name}, which a {FAMILIES[family].pipeline}Pipeline would leave out")
    text_encoders, tokenizers = load_text_encoders(args, dtype, family)
    check_sides(vae, args)
    return vae.eval(), text_encoders.eval(), tokenizers


def check_sides(vae: torch.nn.Module, args: Namespace) -> None:
    """End the program if images of --resolution, or of its buckets, can't become latents of a VAE."""
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, which this VAE needs")
    if args.bucket_step and (args.bucket_step % vae_scale_factor(vae) or (args.resolution or 0) % args.bucket_step):
        turn = f"it must divide --resolution {args.resolution} and be a multiple of {vae_scale_factor(vae)}"
        fail(f"--bucket_step {args.bucket_step} does not suit: {turn}, as this VAE needs")


def vae_scale_factor(vae: torch.nn.Module) -> int:
    """How many times smaller than the image the latents are in height and in width."""
    return 2 ** (len(vae.config.get("block_out_channels") or vae.config.encoder_block_out_channels) - 1)


def has_moments(vae: torch.nn.Module) -> bool:
    """Whether a VAE gives mean and std of the latents, and not the latents themselves."""
    return isinstance(vae, AutoencoderKL)


def describe_scale(vae: torch.nn.Module) -> dict[str, float]:
    """How latents become numbers of about unit size, as the pipelines have it: (latents - shift) * scaling_factor."""
    return {"scaling_factor": vae.config.scaling_factor, "shift_factor": vae.config.get("shift_factor") or 0.0}


def describe_latents(vae: torch.nn.Module, resolution: int, kind: str) -> dict[str, Any]:
    """What a cache says of its latents if they are of this VAE; `kind`: moments or sample."""
    side, channels = resolution // vae_scale_factor(vae), vae.config.latent_channels
    return {"latents": kind, "latents_shape": [channels * (2 if kind == "moments" else 1), side, side]}


def try_models(vae: torch.nn.Module, text_encoders: torch.nn.ModuleList) -> None:
    """Encode a small image and two tokens, or end the program: a config may say what can't be computed."""
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * vae_scale_factor(vae)
            latents = encode_images(vae, torch.zeros(1, vae.config.in_channels, side, side, device=vae.device))
            vae.decode(latents[:, : vae.config.latent_channels].to(vae.dtype))
        with explained("the text encoder does not work"):
            ids = torch.zeros(1, 2, dtype=torch.long, device=vae.device)
            encode_prompts(text_encoders, {"input_ids": ids, "input_ids_2": ids, "prompt_mask": ids == 0})


def encode_images(vae: torch.nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Images uint8 [N, C, H, W] -> mean and std of their latents, float32 [N, 2 * latent_channels, h, w], unscaled.

    Of one that has no std, AutoencoderTiny or AutoencoderDC, the latents themselves: [N, latent_channels, h, w].
    """
    images = (pixel_values / 127.5 - 1).to(vae.dtype)
    if not has_moments(vae):
        return vae.encode(images)[0].float()
    posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


def hash_weights(model: torch.nn.Module) -> str:
    """SHA-256 of a model's weights: of their values and shapes, whatever the files and the library call them."""

    def hash_weight(weight: torch.Tensor) -> str:
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool:  # gigabytes, and all processes wait; hashing lets other threads run
        digests = pool.map(hash_weight, model.parameters())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def describe_models(
    vae: torch.nn.Module, text_encoders: torch.nn.ModuleList, tokenizers: Tokenizers
) -> dict[str, Any]:
    """What has to be the same in the models of two caches, or of a cache and a trainer, for them to fit."""
    described: dict[str, Any] = {}
    described["vae"] = {"class": type(vae).__name__, "sha256": hash_weights(vae), **describe_scale(vae)}
    for suffix, text_encoder, tokenizer in zip(("", "_2"), text_encoders, tokenizers, strict=False):
        probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
        vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
        vocabulary = hashlib.sha256(vocabulary.encode()).hexdigest()
        text = {"class": type(text_encoder).__name__, "sha256": hash_weights(text_encoder)}
        text |= {"clip_skip": text_encoders.clip_skip} if text_encoders.clip_skip else {}
        described[f"text_encoder{suffix}"] = text
        described[f"tokenizer{suffix}"] = {"sha256": vocabulary, "model_max_length": tokenizer.model_max_length}
    if FAMILIES[tokenizers.family].masked:
        described["model_family"] = tokenizers.family
    return described


def place_encoders(exact_models: Encoders, device: torch.device, args: Namespace) -> Encoders:
    """VAE and text encoders on the device in the precision that is asked for; `exact_models` are they in float32."""
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae, text_encoders = models = exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    put_on_device(vae, device)
    text_encoders.to(device)
    if args.compile:  # the parts that the encoding calls
        for model in (vae.encoder, *text_encoders):
            compile_model(model, args.compile)
    return models
