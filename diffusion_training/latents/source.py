"""Data of text-to-image trainers: latent caches, or images and captions encoded in each step."""

from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator

from diffusion_training.data.buckets import size_rows
from diffusion_training.data.captions import (
    are_cut,
    look_at_captions,
    say_cut,
    say_emptied,
    say_equal,
    tokenize_batch,
    transform,
)
from diffusion_training.data.families import FAMILIES, Tokenizers
from diffusion_training.data.images import shrink_masks
from diffusion_training.data.rows import RowDataset, load_rows, read_items
from diffusion_training.errors import fail
from diffusion_training.files import find_differences
from diffusion_training.latents.encoders import (
    DTYPES,
    describe_latents,
    describe_models,
    describe_scale,
    encode_images,
    has_moments,
    load_models,
    try_models,
)
from diffusion_training.latents.reader import Cache, load_cache
from diffusion_training.latents.stream import open_latents
from diffusion_training.latents.text_encoders import (
    describe_prompts,
    encode_empty_prompt,
    encode_prompts,
    find_family,
    is_sdxl,
)
from diffusion_training.order import Key, draw_choices
from diffusion_training.training.models import Prepared, put_on_device


class CaptionedImages(RowDataset):
    """Turns keys (epoch, row, weight, ...) of `step_batches` into a batch of images and captions.

    `dataset[keys]` is {"pixel_values": uint8 [N, C, H, W], "mask": uint8 [N, 1, H, W] where there
    are masks, "input_ids" and with SDXL "input_ids_2": [N, model_max_length], "original_size",
    "crop_top_left": [N, 2], "flipped": bool [N], "weight": [N], "skipped": [(name, reason)]}. A row
    that can't be used has weight 0.

    sizes: see `size_rows`.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        column: str,
        channels: int,
        tokenizers: Tokenizers,
        sizes: np.ndarray | None,
        args: Namespace,
    ) -> None:
        super().__init__(rows, column, args)
        self.channels, self.tokenizers, self.sizes = channels, tokenizers, sizes

    def __getitem__(self, keys: list[Key]) -> dict[str, Any]:
        targets = (
            self.sizes[[key[1] for key in keys]].tolist()
            if self.sizes is not None
            else [None] * len(keys)
        )
        items = [
            transform(row, epoch, item, self.column, self.channels, self.args, target)
            for (epoch, row, *_), item, target in zip(
                keys, read_items(self.rows, keys), targets, strict=True
            )
        ]
        flips = [
            self.args.random_flip and draw_choices(self.args.seed, *key[:2])[2] < 0.5
            for key in keys
        ]
        for flip, item in zip(flips, items, strict=True):
            item["pixel_values"] = item["pixel_values"].flip(-1) if flip else item["pixel_values"]
        weights = [
            0.0 if item["skipped"] else key[2] for key, item in zip(keys, items, strict=True)
        ]
        names = items[0].keys() & {"pixel_values", "mask"}
        return {
            **{name: torch.stack([item[name] for item in items]) for name in names},
            **tokenize_batch(self.tokenizers, self.args, [item["text"] for item in items], keys),
            **{
                name: torch.tensor([item[name] for item in items])
                for name in ("original_size", "crop_top_left")
            },
            "flipped": torch.tensor(flips),
            "weight": torch.tensor(weights),
            "skipped": [(item["key"], item["skipped"]) for item in items if item["skipped"]],
        }


def load_data(
    accelerator: Accelerator,
    families: Collection[str],
    args: Namespace,
    checkpoint: Path | None = None,
) -> tuple[torch.utils.data.Dataset, SimpleNamespace]:
    """Load caches, in the order of the checkpoint, or images with the models that encode them.

    families: the model families that the trainer accepts.

    Returns (dataset, frozen). `frozen` has what `encode_batch` needs:
    vae, text_encoders: None where a cache holds their outputs.
    empty_prompt: {name: embedding} for dropped captions.
    cache: the cache.json, or what it would be.
    pixels: side of the square of pixels that one latent covers.
    lengths: number of tokens of the empty prompt, for a family whose models get lists; else None.
    """
    if (family := find_family(args)) not in families:
        other = "train_flow.py" if FAMILIES[family].masked else "train_text_to_image.py"
        fail(
            f"{args.pretrained_model_name_or_path} is a pipeline of the family {family}: "
            f"{other} trains it"
        )
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae = text_encoders = None
    if args.latents_dir:
        caches = {folder: load_cache(folder) for folder in args.latents_dir}
        cache, empty_prompt, _ = caches[args.latents_dir[0]]
        args.clip_skip = args.clip_skip or cache["text_encoder"].get("clip_skip")
        args.caption_weights = args.caption_weights or cache["transform"].get("caption_weights")
        if accelerator.is_main_process:
            check_caches(caches, args)
        accelerator.wait_for_everyone()
        args.resolution = args.resolution or cache["transform"]["resolution"]
        # a thread reads faster than processes, which would have to pass the data on
        args.dataloader_num_workers = 0
        dataset = open_latents(accelerator, caches, checkpoint, args)
        dataset.caption_weights = args.caption_weights
        empty_prompt = {
            name: x if x.dtype == torch.bool else x.float() for name, x in empty_prompt.items()
        }
        empty_prompt = {name: x.to(accelerator.device) for name, x in empty_prompt.items()}
        if cache["text_cache"] == "ids":
            _, text_encoders, tokenizers = load_models(args, dtype)
            text_encoders.requires_grad_(False).to(accelerator.device)
            if vars(args).get("shuffle_caption"):
                dataset.tokenizers, dataset.args = tokenizers, args
    else:
        args.resolution = args.resolution or (1024 if is_sdxl(args) else 512)
        rows, column = load_rows(args, args.streaming, [args.caption_column])
        vae, text_encoders, tokenizers = load_models(args, dtype)
        put_on_device(vae.requires_grad_(False), accelerator.device)
        text_encoders.requires_grad_(False).to(accelerator.device)
        try_models(vae, text_encoders)
        empty_prompt = encode_empty_prompt(text_encoders, tokenizers, args)
        kind = "moments" if has_moments(vae) else "sample"
        cache = {"vae": describe_scale(vae), **describe_latents(vae, args.resolution, kind)}
        if accelerator.is_main_process:
            texts = look_at_captions(rows, args.caption_column)
            say_equal(texts, args)
            say_emptied(tokenizers, texts)
            cut = are_cut(tokenizers, texts or [""])
            say_cut(sum(cut), len(cut), tokenizers[0].model_max_length)
        sizes = size_rows(accelerator, rows, column, args)
        dataset = CaptionedImages(rows, column, vae.config.in_channels, tokenizers, sizes, args)
    frozen = SimpleNamespace(
        vae=vae, text_encoders=text_encoders, empty_prompt=empty_prompt, cache=cache
    )
    # Z-Image's model gets lists of prompts, so their lengths must be known
    frozen.lengths = int(empty_prompt["prompt_mask"].sum()) if family == "z-image" else None
    frozen.pixels = args.resolution // cache["latents_shape"][-1]
    return dataset, frozen


def check_caches(caches: dict[str, Cache], args: Namespace) -> None:
    """Stop with an error if a cache was made with other models, or lacks what the flags ask for."""
    first, _, _ = next(iter(caches.values()))
    vae, text_encoders, tokenizers = load_models(args, torch.float32)  # only to compare them
    try_models(vae, text_encoders)
    if first["text_cache"] == "ids":
        text_encoders.clip_skip = None  # not part of the cache: the captions are encoded here
    description = describe_models(vae, text_encoders, tokenizers)
    description |= describe_latents(vae, first["transform"]["resolution"], first["latents"])
    description |= describe_prompts(encode_empty_prompt(text_encoders, tokenizers, args), args)
    description |= {"text_cache": first["text_cache"], "features": first.get("features")}
    for folder, (cache, _, _) in caches.items():
        if differences := find_differences(
            {name: cache.get(name) for name in description}, description
        ):
            fail(
                f"{folder} does not fit these models or the first cache "
                f"({', '.join(differences)}): choose others"
            )
        if vars(args).get("shuffle_caption") and cache["text_cache"] != "ids":
            fail(
                f"--shuffle_caption: {folder} has embeddings of captions as they are: make it "
                "with --text_cache ids"
            )
        say_cut(
            cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0], f"{folder}: "
        )
        found = (
            len(args.caption_weights or []),
            len(cache["transform"].get("caption_weights") or []),
        )
        if found[0] != found[1]:
            fail(f"--caption_weights: {found[0]} of them, and {folder} was made with {found[1]}")
        if args.random_flip and not cache["transform"]["random_flip"]:
            fail(f"--random_flip: {folder} was made without, so it holds no mirrored latents")
        if args.resolution not in (None, cache["transform"]["resolution"]):
            fail(
                f"--resolution {args.resolution}: {folder} holds "
                f"{cache['transform']['resolution']} px"
            )


def encode_batch(batch: dict, frozen: SimpleNamespace, caption_dropout: float) -> Prepared:
    """Turn a loaded batch into (latents, prompts, loss_inputs).

    latents: float32 [N, C, h, w], of about unit variance; sampled anew each time from the VAE's
    distribution.
    prompts: {name: tensor [N, ...]} as from `encode_prompts`, a share `caption_dropout` of them
    replaced by the empty prompt.
    loss_inputs: {"mask": [N, 1, h, w], in [0, 1]} where there are masks, else {}.
    """
    cache, loss_inputs = frozen.cache, {}
    if "latents" in batch:  # of a cache
        latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    else:
        latents = encode_images(frozen.vae, batch["pixel_values"])
    if "prompt_embeds" in batch:
        shapes = {
            name: cache.get(f"{name}_shape", empty.shape)
            for name, empty in frozen.empty_prompt.items()
        }
        prompts = {name: batch[name].to(frozen.empty_prompt[name].dtype) for name in shapes}
        prompts = {name: numbers.unflatten(1, shapes[name]) for name, numbers in prompts.items()}
    else:
        prompts = encode_prompts(frozen.text_encoders, batch)
    if cache["latents"] == "moments":
        mean, std = latents.chunk(2, dim=1)
        # By shape, not `like` the mean: a VAE's strides must not decide which number goes where.
        latents = mean + std * torch.randn(mean.shape, device=mean.device)
    # Contiguous, as from a cache: a VAE's memory layout must not decide how the model computes, or
    # which numbers its dropout hits.
    shift, factor = cache["vae"].get("shift_factor", 0.0), cache["vae"]["scaling_factor"]
    latents = ((latents - shift) * factor).contiguous()
    # Guidance needs an unconditional model, which is trained with dropped captions
    # (arXiv:2207.12598).
    if frozen.lengths is None:
        dropped = torch.rand(len(latents), device=latents.device) < caption_dropout
    else:  # on the CPU, so that nothing waits for the device to know how long captions are
        dropped = torch.rand(len(latents)) < caption_dropout
        # a list of one where --train_batch_size auto repeats an image
        lengths = torch.tensor(batch["prompt_lengths"]).expand(len(latents))
        prompts["prompt_lengths"] = torch.where(dropped, frozen.lengths, lengths)
        dropped = dropped.to(latents.device, non_blocking=True)
    for name, empty in frozen.empty_prompt.items():
        prompts[name] = torch.where(dropped.view(-1, *[1] * empty.dim()), empty, prompts[name])
    if "mask" in batch:
        mask, size = batch["mask"], (1, *latents.shape[-2:])
        mask = mask.unflatten(1, size) if "latents" in batch else shrink_masks(mask, frozen.pixels)
        mask = torch.where(batch["flipped"].view(-1, 1, 1, 1), mask.flip(-1), mask)
        loss_inputs["mask"] = mask / 255
    return latents, prompts, loss_inputs
