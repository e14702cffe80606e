"""Text encoders and tokenizers: loaded, called, and described for a cache."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, cast

import torch

from diffusion_training.data.captions import tokenize
from diffusion_training.errors import amount, explain, fail
from diffusion_training.families.base import Base, Encoders, Prompts, Tokenizers, Tokens
from diffusion_training.latents.columns import EMPTY
from diffusion_training.models import load_weights


@contextlib.contextmanager
def locating(base: Base, own_path: str | None, subfolder: str) -> Iterator[tuple[Any, dict]]:
    """Yield `Base.locate`'s result; an error in the block ends the program and names the part."""
    source, options = base.locate(own_path, subfolder)
    try:
        yield source, options
    except Exception as error:
        what = f"the {options.get('subfolder', 'model')} of a {base.family.title} pipeline"
        fail(f"{source} does not hold {what} ({explain(error)})")


def load_text_encoders(base: Base, dtype: torch.dtype) -> tuple[torch.nn.ModuleList, Tokenizers]:
    """Load the text encoders and tokenizers, on the CPU. Stops with an error if that fails."""
    family = base.family
    text_encoders = torch.nn.ModuleList()
    tokenizers = Tokenizers([], family)
    for suffix in family.suffixes:
        with locating(base, base.text_encoder, f"text_encoder{suffix}") as (source, options):
            text_class, more = family.choose_text_encoder(base, source, options, suffix)
            text_encoder = load_weights(text_class, source, **options, **more, torch_dtype=dtype)
        text_encoders.append(text_encoder)
        own_path = base.tokenizer or base.text_encoder
        with locating(base, own_path, f"tokenizer{suffix}") as (source, options):
            options.pop("variant", None)
            tokenizer = family.choose_tokenizer().from_pretrained(source, **options)
            if len(tokenizer) < 256:  # without files, transformers makes one with two tokens
                raise ValueError("it has no vocabulary")
            known = text_encoder.get_input_embeddings().num_embeddings
            if len(tokenizer) > known or tokenizer.pad_token is None:
                raise ValueError("it has more tokens than the text encoder, or no padding token")
        tokenizers.append(tokenizer)
    check_clip_skip(base, text_encoders)
    max_tokens = count_max_tokens(base, text_encoders, tokenizers)
    for tokenizer in tokenizers:  # old files do not store how many tokens the text encoder takes
        tokenizer.model_max_length = max_tokens
    return text_encoders.eval(), tokenizers


def check_clip_skip(base: Base, text_encoders: torch.nn.ModuleList) -> None:
    """Stop if --clip_skip leaves no layer; with two encoders, it counts from the last but one."""
    if base.clip_skip is None:
        return
    layers = min(encoder.config.num_hidden_layers for encoder in text_encoders)
    if base.clip_skip >= layers - (len(text_encoders) > 1):
        fail(f"--clip_skip {base.clip_skip} leaves none of {layers} layers: give a smaller one")


def count_max_tokens(base: Base, text_encoders: torch.nn.ModuleList, tokenizers: Tokenizers) -> int:
    """How many tokens of a caption are read, including those of a template."""
    limits = [tokenizer.model_max_length for tokenizer in tokenizers]
    for encoder in text_encoders:
        limits.append(getattr(encoder.config, "max_position_embeddings", math.inf))
    if base.max_tokens and base.max_tokens > min(limits):
        fail(
            f"--max_sequence_length {base.max_tokens} is too large: the text encoder takes "
            f"{min(limits)} tokens"
        )
    family = base.family
    most = base.max_tokens or family.max_tokens or math.inf
    count = min(*limits, most + family.dropped_tokens)
    if count < family.dropped_tokens + 2:  # for the first and the last token
        fail(
            f"captions get {amount(int(count) - family.dropped_tokens, 'token')}, but need 2: "
            "check --max_sequence_length, and model_max_length in the tokenizer's config"
        )
    return count


def encode_prompts(encoders: Encoders, tokens: Tokens) -> Prompts:
    """Tokens -> the pipeline's embeddings, see `Family.encode`.

    Tokens of K captions per image, [N, K, model_max_length], give entries [N, K, ...].
    """
    if tokens["input_ids"].dim() == 2:
        return encoders.family.encode(encoders, tokens)
    parts: list[dict[str, Any]] = []
    for k in range(tokens["input_ids"].shape[1]):
        part: Any = {name: value[:, k] for name, value in dict[str, Any](tokens).items()}
        parts.append(dict(encoders.family.encode(encoders, part)))
    stacked = {name: torch.stack([part[name] for part in parts], dim=1) for name in parts[0]}
    lengths = tokens["prompt_lengths"]  # -1 for a missing caption
    lengths = torch.where(lengths < 0, lengths, lengths - encoders.family.dropped_tokens)
    return cast(Prompts, stacked | {"prompt_lengths": lengths})


@torch.no_grad()
def encode_caption(encoders: Encoders, caption: str) -> Prompts:
    """The embeddings of one caption, [1, ...], on the device of the text encoders."""
    return encode_prompts(encoders, tokenize_on_device(encoders, caption))


def tokenize_on_device(encoders: Encoders, caption: str) -> Tokens:
    device = next(encoders.text_encoders.parameters()).device
    tokens = tokenize(encoders.tokenizers, [caption])
    return cast(Tokens, {name: value.to(device) for name, value in tokens.items()})


@torch.no_grad()
def encode_empty_prompt(encoders: Encoders, base: Base) -> dict[str, torch.Tensor]:
    """The embeddings of a dropped caption, equal to the pipeline's: float32, for one image."""
    tokens = tokenize_on_device(encoders, "")
    empty = encoders.family.encode_empty(encoders, base, tokens)
    return {name: embeds[0] for name, embeds in dict[str, Any](empty).items()}


def describe_prompts(encoders: Encoders, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The settings of captions in cache.json. empty_prompt: see `encode_empty_prompt`."""
    shapes = {
        f"{name}_shape": list(embeds.shape)
        for name, embeds in empty_prompt.items()
        if name in EMPTY
    }
    return shapes | encoders.family.describe_empty(empty_prompt)
