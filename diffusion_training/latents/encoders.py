"""VAEs, and all encoders together: loaded, tried, called, and described for a cache."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from diffusion_training.errors import explained, fail
from diffusion_training.families.base import Base, Encoders, Family
from diffusion_training.latents.text_encoders import encode_prompts, load_text_encoders, locating
from diffusion_training.models import compile_model, hash_weights, put_on_device


@dataclass(frozen=True)
class Latents:
    """The kind, shape and scale of latents."""

    kind: str  # "moments": mean and standard deviation; "sample": the latents themselves
    # as cached: (channels, or twice as many for moments; height; width)
    shape: tuple[int, ...]
    # (latents - shift) * factor has about unit variance; a tensor has a number for each channel
    shift: float | torch.Tensor
    factor: float | torch.Tensor
    downscale: int  # side in pixels of the square that a latent covers

    @property
    def channels(self) -> int:
        return self.shape[0] // (2 if self.kind == "moments" else 1)


def load_encoders(base: Base, dtype: torch.dtype) -> Encoders:
    """Load the VAE, the text encoders and their tokenizers, on the CPU."""
    vae = load_vae(base, dtype)
    text_encoders, tokenizers = load_text_encoders(base, dtype)
    return Encoders(base.family, vae, text_encoders, tokenizers, base.clip_skip or 0)


def load_vae(base: Base, dtype: torch.dtype) -> torch.nn.Module:
    """Load the VAE, on the CPU. Stops with an error if the family's pipeline can't use it."""
    family = base.family
    with locating(base, base.vae, "vae") as (source, options):
        config = diffusers.AutoencoderKL.load_config(source, **options)
        class_name = config["_class_name"]
        if class_name not in family.vae_classes:
            raise ValueError(f"its class is {class_name}, not {' or '.join(family.vae_classes)}")
        if family.needs_exact_vae(config):
            dtype = torch.float32
        vae = family.load_vae(class_name, source, options, dtype)
        for name in family.ignored_vae_settings:
            if vae.config.get(name):
                raise ValueError(f"it has a {name}, which a {family.pipeline} would ignore")
        for name, scale in family.describe_scale(vae).items():
            if scale is None:
                raise ValueError(f"its config has no {name}")
    return vae.eval()


def load_parts(base: Base, with_text: bool) -> dict[str, Any]:
    """Load the parts of a pipeline that are not trained, in float32: {name: model or tokenizer}.

    with_text: also load text encoders and tokenizers. Without them the pipeline needs embeddings.
    """
    if not with_text:
        return {"vae": load_vae(base, torch.float32)}
    encoders = load_encoders(base, torch.float32)
    parts: dict[str, Any] = {"vae": encoders.vae}
    for suffix, text_encoder, tokenizer in zip(
        base.family.suffixes, encoders.text_encoders, encoders.tokenizers, strict=True
    ):
        parts |= {f"text_encoder{suffix}": text_encoder, f"tokenizer{suffix}": tokenizer}
    return parts


def check_sides(downscale: int, resolution: int | None, bucket_step: int | None) -> None:
    """Stop with an error if the VAE can't encode images of these sides."""
    if resolution is not None and resolution % downscale:
        fail(f"--resolution {resolution} is not a multiple of {downscale}, which this VAE needs")
    if bucket_step and (bucket_step % downscale or (resolution or 0) % bucket_step):
        fail(
            f"--bucket_step {bucket_step} must divide --resolution {resolution} and be a multiple "
            f"of {downscale}, which this VAE needs"
        )


def describe_latents(family: Family, vae: torch.nn.Module, resolution: int, kind: str) -> Latents:
    """The `Latents` of images of a resolution; kind: moments or sample."""
    side = resolution // family.downscale(vae)
    _, channels = family.count_channels(vae)
    scale = family.describe_scale(vae)
    return Latents(
        kind=kind,
        shape=(channels * (2 if kind == "moments" else 1), side, side),
        shift=place_scale(scale["shift_factor"], vae.device),
        factor=place_scale(scale["scaling_factor"], vae.device),
        downscale=family.downscale(vae),
    )


def place_scale(scale: float | list[float], device: torch.device) -> float | torch.Tensor:
    """Return a number of `Family.describe_scale`, or a list of them as tensor [channels, 1, 1]."""
    if isinstance(scale, list):
        return torch.tensor(scale, device=device).view(-1, 1, 1)
    return scale


def try_encoders(encoders: Encoders) -> None:
    """Encode a small image and a few tokens. Stops with an error if a config is wrong."""
    family = encoders.family
    vae = encoders.vae
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * family.downscale(vae)
            image_channels, channels = family.count_channels(vae)
            image = torch.zeros(1, image_channels, side, side, device=vae.device)
            latents = encode_images(encoders, image)
            vae.decode(family.unpack_latents(latents[:, :channels]).to(vae.dtype))
        with explained("the text encoder does not work"):
            count = family.dropped_tokens + 2
            ids = torch.zeros(1, count, dtype=torch.long, device=vae.device)
            encode_prompts(
                encoders, {"input_ids": ids, "input_ids_2": ids, "prompt_mask": ids == 0}
            )


def encode_images(encoders: Encoders, pixel_values: torch.Tensor) -> torch.Tensor:
    """Images uint8 [N, C, H, W] -> latents float32, see `Family.encode_images`."""
    images = (pixel_values / 127.5 - 1).to(encoders.vae.dtype)
    return encoders.family.encode_images(encoders.vae, images)


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Identify a tokenizer by its vocabulary, how it splits a text, and its maximal length."""
    probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
    digest = hashlib.sha256(vocabulary.encode()).hexdigest()
    return {"sha256": digest, "model_max_length": tokenizer.model_max_length}


def describe_models(encoders: Encoders) -> dict[str, Any]:
    """Describe the models. Two caches, or a cache and its trainer, must agree on this."""
    family = encoders.family
    vae = encoders.vae
    described: dict[str, Any] = {
        "vae": {"class": type(vae).__name__, "sha256": hash_weights(vae)}
        | family.describe_scale(vae)
    }
    parts = zip(family.suffixes, encoders.text_encoders, encoders.tokenizers, strict=True)
    for suffix, text_encoder, tokenizer in parts:
        text: dict[str, Any] = {
            "class": type(text_encoder).__name__,
            "sha256": hash_weights(text_encoder),
        }
        if encoders.clip_skip:
            text["clip_skip"] = encoders.clip_skip
        described[f"text_encoder{suffix}"] = text
        described[f"tokenizer{suffix}"] = describe_tokenizer(tokenizer)
    if family.named_in_cache:
        described["model_family"] = family.name
    return described


def place_encoders(
    exact: Encoders, base: Base, dtype: torch.dtype, device: torch.device, compile: str | None
) -> Encoders:
    """The encoders on the device, in `dtype`; exact: the same models in float32."""
    encoders = exact if dtype == torch.float32 else load_encoders(base, dtype)
    put_on_device(encoders.vae, device)
    encoders.text_encoders.to(device)
    if compile:  # the parts that the encoding calls
        for model in (encoders.vae.encoder, *encoders.text_encoders):
            compile_model(model, compile)
    return encoders
