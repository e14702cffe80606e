"""The encoders, which are VAEs and text encoders: loaded, tried, called, described for a cache."""

import contextlib
import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import diffusers
import torch

from diffusion_training.data.captions import tokenize
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import (
    Base,
    Encoders,
    Family,
    Prompts,
    Tokenizers,
    Tokens,
    hash_rules,
)
from diffusion_training.models import EXACT, compile_model, hash_weights, put_on_device


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


@contextlib.contextmanager
def locating(
    base: Base, own_path: str | None, subfolder: str, with_weights: bool = True
) -> Iterator[tuple[Any, dict]]:
    """Yield `Base.locate`'s result; an error in the block ends the program and names the part."""
    what = f"the {'model' if own_path else subfolder} of a {base.family.title} pipeline"
    with explained(f"{own_path or base.source} does not hold {what}"):
        yield base.locate(own_path, subfolder, with_weights)


def load_encoders(base: Base, dtype: torch.dtype, with_vae: bool = True) -> Encoders:
    """Load the VAE, the text encoders and their tokenizers, on the CPU.

    dtype: or `EXACT`, for the numbers of float32 in half the memory, at a lower speed.
    """
    text_encoders, tokenizers = load_text_encoders(base, dtype)
    base = replace(base, family=base.family.probe_encoders(text_encoders))
    tokenizers.family = base.family
    vae = None
    if with_vae:
        vae = load_vae(base, torch.float32 if dtype is EXACT else dtype)  # it is small
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
                raise ValueError(f"its config has {name}, by which latents are not scaled here")
        for name, scale in family.describe_scale(vae).items():
            if not isinstance(scale, int | float | list) or scale == []:
                raise ValueError(f"its config has no {name} that is a number")
    return vae.eval()


def load_text_encoders(base: Base, dtype: torch.dtype) -> tuple[torch.nn.ModuleList, Tokenizers]:
    """Load the text encoders and tokenizers, on the CPU. Stops with an error if that fails."""
    family = base.family
    if base.classes:
        return make_class_encoders(base)
    if base.source is None and base.text_encoder is None:
        fail(
            "give --pretrained_model_name_or_path or --text_encoder_name_or_path: captions need it"
        )
    text_encoders = torch.nn.ModuleList()
    tokenizers = Tokenizers([], family)
    for suffix in family.suffixes:
        with locating(base, base.text_encoder, f"text_encoder{suffix}") as (source, options):
            text_encoder = family.load_text_encoder(base, source, options, suffix, dtype)
        text_encoders.append(text_encoder)
        own_path = base.tokenizer or base.text_encoder
        part = f"tokenizer{suffix}"
        with locating(base, own_path, part, with_weights=False) as (source, options):
            options.pop("variant", None)
            tokenizer = family.load_tokenizer(source, options, text_encoder)
        tokenizers.append(tokenizer)
    check_clip_skip(base, text_encoders)
    max_tokens = family.count_max_tokens(base, text_encoders, tokenizers)
    for tokenizer in tokenizers:  # old files do not store how many tokens the text encoder takes
        tokenizer.model_max_length = max_tokens
    return text_encoders.eval(), tokenizers


def make_class_encoders(base: Base) -> tuple[torch.nn.ModuleList, Tokenizers]:
    """Make a text encoder and a tokenizer for class labels, in place of the base's."""
    family = base.family
    if not family.takes_classes:
        fail(f"{family.title} takes captions, not classes: leave --class_column out")
    if base.text_encoder is not None:
        fail("classes need no text encoder: leave --text_encoder_name_or_path out")
    # imported here, because few models take classes
    from diffusion_training.families.class_labels import (
        list_tokens,
        make_text_encoder,
        make_tokenizer,
    )

    tokens = list_tokens(base.classes, partial(family.prepare, None))
    known = {word: own[0] for own in tokens for word in own}
    known = {name: own[0] for name, own in zip(base.classes, tokens, strict=True)} | known
    text_encoders = torch.nn.ModuleList([make_text_encoder(tokens)])
    return text_encoders.eval(), Tokenizers([make_tokenizer(tokens)], family, known)


def check_clip_skip(base: Base, text_encoders: torch.nn.ModuleList) -> None:
    """Stop if --clip_skip leaves no layer; with two encoders, it counts from the last but one."""
    if base.clip_skip is None:
        return
    layers = min(encoder.config.num_hidden_layers for encoder in text_encoders)
    if base.clip_skip >= layers - (len(text_encoders) > 1):
        fail(f"--clip_skip {base.clip_skip} leaves none of {layers} layers: give a smaller one")


def load_parts(base: Base, with_text: bool) -> dict[str, Any]:
    """Load the parts of a pipeline that are not trained, in float32: {name: model or tokenizer}.

    with_text: also load text encoders and tokenizers. Without them the pipeline needs embeddings.
    """
    if not with_text:
        return {"vae": load_vae(base, torch.float32)}
    encoders = load_encoders(base, torch.float32)
    text_parts = base.family.list_parts(encoders.text_encoders, encoders.tokenizers)
    return {"vae": encoders.vae} | text_parts


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
            side = max(64, 2 * family.downscale(vae))
            image_channels, channels = family.count_channels(vae)
            image = torch.zeros(1, image_channels, side, side, device=vae.device)
            latents = encode_images(encoders, image)
            family.decode(vae, latents[:, :channels])
        with explained("the text encoder does not work"):
            ids = torch.zeros(1, 2, dtype=torch.long, device=vae.device)
            tokens: Any = {f"input_ids{suffix}": ids for suffix in family.suffixes}
            encode_prompts(encoders, tokens | {"prompt_mask": ids == 0})


def encode_images(encoders: Encoders, pixel_values: torch.Tensor) -> torch.Tensor:
    """Images uint8 [N, C, H, W] -> latents float32, see `Family.read_latents`."""
    family, vae = encoders.family, encoders.vae
    encoded = vae.encode(family.prepare_images(vae, pixel_values))
    return family.read_latents(vae, encoded, pixel_values.shape[-2:])


def encode_prompts(encoders: Encoders, tokens: Tokens) -> Prompts:
    """Tokens -> the pipeline's embeddings, see `Family.encode`.

    Tokens of K captions per image, [N, K, model_max_length], give entries [N, K, ...].
    """
    if tokens["input_ids"].dim() == 2:
        return encoders.family.encode(encoders, tokens)
    parts: list[Any] = []
    for k in range(tokens["input_ids"].shape[1]):
        part: Any = {
            name: value if name == "references" else value[:, k]
            for name, value in dict[str, Any](tokens).items()
        }
        parts.append(encoders.family.encode(encoders, part))
    stacked = {name: torch.stack([part[name] for part in parts], dim=1) for name in parts[0]}
    counted = tokens["prompt_lengths"]  # -1 for a missing caption
    lengths = stacked.get("prompt_lengths", counted)
    lengths = torch.where(counted < 0, counted, lengths.to(counted.device))
    if "prompt_mask" in stacked:
        stacked["prompt_mask"] &= (counted >= 0)[..., None]
    return cast(Prompts, stacked | {"prompt_lengths": lengths.int()})


@torch.no_grad()
def encode_caption(
    encoders: Encoders, caption: str, references: list[Any] | None = None
) -> Prompts:
    """The embeddings of one caption, [1, ...], on the device of the text encoders.

    references: the images that the text encoder sees, if it sees any.
    """
    return encode_prompts(encoders, tokenize_on_device(encoders, caption, references))


def tokenize_on_device(
    encoders: Encoders, caption: str, references: list[Any] | None = None
) -> Tokens:
    device = next(encoders.text_encoders.parameters()).device
    tokens: Any = tokenize(encoders.tokenizers, [caption])
    tokens = {name: value.to(device) for name, value in tokens.items()}
    if references and encoders.family.reads_references:
        tokens["references"] = [references]
    return cast(Tokens, tokens)


@torch.no_grad()
def encode_empty_prompt(
    encoders: Encoders, base: Base, references: list[Any] | None = None
) -> dict[str, torch.Tensor]:
    """The embeddings of a dropped caption, equal to the pipeline's: float32, for one image."""
    tokens = tokenize_on_device(encoders, "", references)
    empty = encoders.family.encode_empty(encoders, base, tokens)
    kept = {
        name: value for name, value in dict[str, Any](empty).items() if name != "prompt_lengths"
    }
    return {name: embeds[0] for name, embeds in kept.items()}


def describe_tokenizer(tokenizer: Any, text: str) -> dict[str, Any]:
    """Identify a tokenizer by its vocabulary, how it splits a text, and its maximal length."""
    probe = tokenizer(text, truncation=True).input_ids
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
    digest = hashlib.sha256(vocabulary.encode()).hexdigest()
    return {"sha256": digest, "model_max_length": tokenizer.model_max_length}


def describe_models(encoders: Encoders, with_old: bool = False) -> dict[str, Any]:
    """Describe the models. Two caches, or a cache and its trainer, must agree on this.

    with_old: see `hash_weights`.
    """
    family = encoders.family
    vae = encoders.vae
    described: dict[str, Any] = {
        "model_family": family.name,
        "vae": {"class": type(vae).__name__, "sha256": hash_weights(vae, with_old)}
        | family.describe_scale(vae),
    }
    clip_skip = {"clip_skip": encoders.clip_skip} if encoders.clip_skip else {}
    text = "" if encoders.tokenizers.classes else "The quick brown fox, 123 times!"
    libraries = [f"{name} {version(name)}" for name in ("tokenizers", "transformers")]
    rules = {"libraries": ", ".join(libraries)}
    parts = zip(family.suffixes, encoders.text_encoders, encoders.tokenizers, strict=True)
    for suffix, text_encoder, tokenizer in parts:
        described[f"text_encoder{suffix}"] = {
            "class": type(text_encoder).__name__,
            "sha256": hash_weights(text_encoder, with_old),
        } | clip_skip
        described[f"tokenizer{suffix}"] = describe_tokenizer(tokenizer, text)
        rules[f"tokenizer{suffix}"] = hash_rules(tokenizer)
    return described | {"tokenizer_rules": rules}


def place_encoders(encoders: Encoders, device: torch.device, compile: str | None) -> None:
    """Move the encoders to a device, and compile the parts that the encoding calls."""
    put_on_device(encoders.vae, device)
    encoders.text_encoders.to(device)
    if compile:
        for model in (encoders.vae.encoder, *encoders.text_encoders):
            compile_model(model, compile)


def place_decoder(vae: Any, device: torch.device) -> None:
    """Put a VAE on a device. It decodes one image at a time, on the CPU if a GPU lacks the memory.

    A whole batch may need more memory than a training step.
    """
    vae.to(device).enable_slicing()
    decode, find = type(vae).decode, weakref.ref(vae)  # a cycle would keep it on the GPU
    fits = True

    def decode_rows(
        vae: Any, latents: torch.Tensor, *times: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor]:
        if not times:
            return decode(vae, latents, **options)
        # sliced by diffusers 0.42, LTX's VAE would get the latents of another image for a time
        rows = zip(latents.split(1), *(each.split(1) for each in times), strict=True)
        return (torch.cat([decode(vae, *row, **options)[0] for row in rows]),)

    def decode_where_it_fits(
        latents: torch.Tensor, *further: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor]:
        nonlocal fits
        held: Any = find()
        given = [latents, *(each for each in further if each is not None)]
        options["return_dict"] = False
        if fits:
            with contextlib.suppress(torch.OutOfMemoryError):
                return decode_rows(held, *given, **options)
            print("\nImages are decoded on the CPU: the GPU has too little free memory", flush=True)
            fits = False
        images = decode_rows(held.to("cpu"), *(each.cpu() for each in given), **options)[0]
        held.to(device)  # a pipeline may choose the device of its next image by the VAE's
        return (images.to(latents.device),)

    vae.decode = decode_where_it_fits
