"""Text encoders and tokenizers: finding their family, loading, calling and recognizing them."""

import contextlib
import functools
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion_training.data.captions import tokenize
from diffusion_training.data.families import FAMILIES, Tokenizers
from diffusion_training.errors import explain, explained, fail
from diffusion_training.latents.columns import EMPTY
from diffusion_training.latents.single_file import open_base
from diffusion_training.training.models import load_weights

# cached, because each report would ask the hub again
load_once = functools.lru_cache(DiffusionPipeline.load_config)


def locate_model(args: Namespace, own_path: str | None, subfolder: str) -> tuple[str | None, dict]:
    """Return where a model is: (hub id or folder, options).

    A model with a flag of its own is not looked for in the pipeline.
    """
    if own_path is not None:
        return own_path, {"cache_dir": args.cache_dir}
    options = {
        "cache_dir": args.cache_dir,
        "subfolder": subfolder,
        "revision": args.revision,
        "variant": args.variant,
    }
    return open_base(args), options


def read_pipeline(args: Namespace) -> dict[str, Any]:
    """Return a pipeline's model_index.json; {} for models given one by one or in a bare folder."""
    source = open_base(args)
    if (
        source is None
        or os.path.isdir(source)
        and not os.path.isfile(os.path.join(source, "model_index.json"))
    ):
        return {}
    load = DiffusionPipeline.load_config if os.path.isdir(source) else load_once
    with explained(f"{source} can't be opened as a pipeline"):
        return load(source, cache_dir=args.cache_dir, revision=args.revision)


def find_family(args: Namespace) -> str:
    """Return the family of the models: --model_family, else as in model_index.json, else sd."""
    kind = read_pipeline(args).get("_class_name", "")
    found = next(
        (name for name, family in FAMILIES.items() if kind.startswith(family.pipeline)), None
    )
    wanted = vars(args).get("model_family")
    # a new PRX model may use the parts of a Stable Diffusion pipeline
    if wanted and found not in (wanted, None) and (wanted, found) != ("prx", "sd"):
        fail(
            f"--model_family {wanted}: {args.pretrained_model_name_or_path} is a {kind}, of "
            f"the family {found}"
        )
    return wanted or found or "sd"


def is_sdxl(args: Namespace) -> bool:
    """Whether the models are those of Stable Diffusion XL, which has two text encoders."""
    return find_family(args) == "sdxl"


def choose_class(
    args: Namespace, source: str, options: dict, family: str, suffix: str
) -> tuple[Any, dict]:
    """Return (class of a text encoder, further options to load it with)."""
    if not FAMILIES[family].masked:
        return (CLIPTextModelWithProjection if suffix else CLIPTextModel), {}
    # teaches transformers the class that PRX was published with
    import diffusers.pipelines.prx  # noqa: F401

    if args.text_encoder_name_or_path is None and "text_encoder" in (index := read_pipeline(args)):
        return getattr(transformers, index["text_encoder"][1]), {}
    config = transformers.AutoConfig.from_pretrained(source, **options)
    if config.model_type == "clip":  # a whole CLIP, with its image encoder
        return CLIPTextModel, {}
    kind = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), transformers.AutoModel)
    return kind, {"is_encoder_decoder": False} if config.model_type == "t5gemma" else {}


@contextlib.contextmanager
def locating(
    args: Namespace, own_path: str | None, subfolder: str, family: str
) -> Iterator[tuple[Any, dict]]:
    """Yield `locate_model`'s result; an error inside stops the script and names the location."""
    source, options = locate_model(args, own_path, subfolder)
    try:
        yield source, options
    except Exception as error:
        what = f"the {options.get('subfolder', 'model')} of a {FAMILIES[family].title} pipeline"
        fail(f"{source} does not hold {what} ({explain(error)})")


def load_text_encoders(
    args: Namespace, dtype: torch.dtype, family: str
) -> tuple[torch.nn.ModuleList, Tokenizers]:
    """Return (ModuleList of the text encoders, their `Tokenizers`), on the CPU.

    Stops with an error if they can't be loaded.
    """
    masked, text_encoders, tokenizers = (
        FAMILIES[family].masked,
        torch.nn.ModuleList(),
        Tokenizers([], family),
    )
    for suffix in ("", "_2") if family == "sdxl" else ("",):
        with locating(args, args.text_encoder_name_or_path, f"text_encoder{suffix}", family) as (
            source,
            options,
        ):
            text_class, more = choose_class(args, source, options, family, suffix)
            text_encoders.append(
                load_weights(text_class, source, **options, **more, torch_dtype=dtype)
            )
        own_path = args.tokenizer_name_or_path or args.text_encoder_name_or_path
        with locating(args, own_path, f"tokenizer{suffix}", family) as (source, options):
            options.pop("variant", None)
            tokenizer = (transformers.AutoTokenizer if masked else CLIPTokenizer).from_pretrained(
                source, **options
            )
            # without files, transformers makes a tokenizer that knows two tokens
            if len(tokenizer) < 256:
                raise ValueError("no vocabulary")
            known = text_encoders[-1].get_input_embeddings().num_embeddings
            if len(tokenizer) > known or tokenizer.pad_token is None:
                raise ValueError(
                    "it has other tokens than the text encoder, or none to fill up with"
                )
            tokenizers.append(tokenizer)
    wanted = vars(args).get("max_sequence_length")
    if wanted and not masked:
        fail(
            f"--max_sequence_length {wanted} does nothing for {FAMILIES[family].title}: leave "
            "it out"
        )
    if (skip := vars(args).get("clip_skip")) is not None:
        if masked:
            fail(f"--clip_skip {skip} does nothing for {FAMILIES[family].title}: leave it out")
        layers = min(encoder.config.num_hidden_layers for encoder in text_encoders)
        if skip >= layers - (family == "sdxl"):
            fail(f"--clip_skip {skip} leaves nothing of {layers} layers: give a smaller one")
        for encoder in text_encoders:
            # a pipeline's clip_skip looks for the norm there; vars() adds no submodule
            if not hasattr(encoder, "text_model"):
                vars(encoder)["text_model"] = encoder
    limits = [tokenizer.model_max_length for tokenizer in tokenizers]
    limits += [
        getattr(encoder.config, "max_position_embeddings", math.inf) for encoder in text_encoders
    ]
    if masked:
        if wanted and wanted > min(limits):
            fail(f"--max_sequence_length {wanted}: the text encoder takes {min(limits)} tokens")
        limits.append(wanted or FAMILIES[family].max_length)
    for tokenizer in tokenizers:  # old ones do not know the text encoder's limit
        tokenizer.model_max_length = min(limits)
    text_encoders.layer, text_encoders.clip_skip = FAMILIES[family].layer, skip
    return text_encoders, tokenizers


def encode_prompts(
    text_encoders: torch.nn.ModuleList, batch: dict, skip: bool = True
) -> dict[str, torch.Tensor]:
    """Encode tokens {"input_ids", "input_ids_2": [N, model_max_length]} as the pipeline does.

    Returns, in float32, {"prompt_embeds": [N, model_max_length, D]}, the last hidden state. With
    SDXL, these are the last but one hidden states of both encoders side by side, and
    "pooled_prompt_embeds" [N, D2], the second encoder's projection, is added (arXiv:2307.01952,
    section 2.1). With "prompt_mask", bool [N, model_max_length], embeddings that it leaves out are
    set to 0 and moved to the end, and the mask in the new order is added.

    skip: apply --clip_skip, which takes an earlier layer, as in the pipeline. With Stable
    Diffusion, the norm of the last layer is applied to it.
    """
    # [N, captions, model_max_length]: the first captions of all images, then the second ones, ...
    if batch["input_ids"].dim() == 3:
        names = batch.keys() & {"input_ids", "input_ids_2", "prompt_mask"}
        numbers = range(batch["input_ids"].shape[1])
        found = [
            encode_prompts(text_encoders, {name: batch[name][:, k] for name in names})
            for k in numbers
        ]
        found = {name: torch.stack([one[name] for one in found], dim=1) for name in found[0]}
        return found | {"prompt_lengths": batch["prompt_lengths"]}
    if "prompt_mask" in batch:
        return encode_masked(text_encoders[0], batch, text_encoders.layer)
    clip_skip = (skip and text_encoders.clip_skip) or 0
    if len(text_encoders) == 1 and not clip_skip:
        return {"prompt_embeds": text_encoders[0](batch["input_ids"])[0].float()}
    if len(text_encoders) == 1:
        found = text_encoders[0](batch["input_ids"], output_hidden_states=True).hidden_states[
            -1 - clip_skip
        ]
        return {"prompt_embeds": text_encoders[0].text_model.final_layer_norm(found).float()}
    one, two = text_encoders
    one = one(batch["input_ids"], output_hidden_states=True)
    two = two(batch["input_ids_2"], output_hidden_states=True)
    layer = -2 - clip_skip
    prompt_embeds = torch.cat([one.hidden_states[layer], two.hidden_states[layer]], dim=-1)
    return {"prompt_embeds": prompt_embeds.float(), "pooled_prompt_embeds": two.text_embeds.float()}


def encode_masked(
    text_encoder: torch.nn.Module, batch: dict, layer: int
) -> dict[str, torch.Tensor]:
    """`encode_prompts` for a family that leaves padding out."""
    mask = batch["prompt_mask"]
    # a missing caption attends to all its tokens: attention to none would be 0 / 0
    seen = (mask | ~mask.any(dim=1, keepdim=True)).long()
    found = text_encoder(
        input_ids=batch["input_ids"], attention_mask=seen, output_hidden_states=layer != -1
    )
    prompt_embeds = (found.last_hidden_state if layer == -1 else found.hidden_states[layer]).float()
    # some tokenizers pad on the left
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    prompt_embeds = prompt_embeds.gather(1, order[..., None].expand_as(prompt_embeds))
    return {"prompt_embeds": prompt_embeds.masked_fill(~mask[..., None], 0), "prompt_mask": mask}


@torch.no_grad()
def encode_empty_prompt(
    text_encoders: torch.nn.ModuleList, tokenizers: Tokenizers, args: Namespace
) -> dict[str, torch.Tensor]:
    """Return the pipeline's embeddings of a dropped caption, {name: float32}, for one image.

    They encode "", with the last layer even with --clip_skip. They are zeros where model_index.json
    asks for that, as SDXL's does, because it was trained so.
    """
    ids = {
        name: ids.to(text_encoders[0].device) for name, ids in tokenize(tokenizers, [""]).items()
    }
    empty_prompt = {
        name: embeds[0] for name, embeds in encode_prompts(text_encoders, ids, skip=False).items()
    }
    zeros = is_sdxl(args) and read_pipeline(args).get("force_zeros_for_empty_prompt", True)
    return {
        name: torch.zeros_like(embeds) if zeros else embeds for name, embeds in empty_prompt.items()
    }


def describe_prompts(empty_prompt: dict[str, torch.Tensor], args: Namespace) -> dict[str, Any]:
    """Return the fields of cache.json that describe the result of `encode_empty_prompt`."""
    shown = {name: embeds for name, embeds in empty_prompt.items() if name in EMPTY}
    described: dict[str, Any] = {
        f"{name}_shape": list(embeds.shape) for name, embeds in shown.items()
    }
    if is_sdxl(args):
        described["force_zeros_for_empty_prompt"] = not any(
            embeds.any() for embeds in empty_prompt.values()
        )
    return described
