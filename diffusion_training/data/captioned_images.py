"""Images and captions that are encoded in every step: opened, and as a data set."""

from argparse import Namespace
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torchvision.transforms.v2.functional import pil_to_tensor

from diffusion_training.batches import CaptionedBatch
from diffusion_training.data.buckets import choose_sizes
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.captioned_flags import weigh_captions
from diffusion_training.data.captions import (
    are_cut,
    report_cut,
    report_emptied,
    report_equal,
    sample_captions,
    tokenize_batch,
    tokenize_longest,
)
from diffusion_training.data.encoders import (
    check_sides,
    describe_latents,
    encode_empty_prompt,
    load_encoders,
    try_encoders,
)
from diffusion_training.data.prompts import encode_class_prompts, encode_validation_prompts
from diffusion_training.data.references import add_references, list_reference_columns
from diffusion_training.data.rows import ImageRows, RowDataset, load_rows, read_items
from diffusion_training.data.texts import CaptionChoice, choose_caption, choose_captions
from diffusion_training.data.transform_settings import Transform, make_transform
from diffusion_training.data.transforms import read_text, transform_row
from diffusion_training.draws import Key, draw_choices
from diffusion_training.families.base import Base, Tokenizers
from diffusion_training.launch import Launch
from diffusion_training.models import EXACT, put_on_device

MIRRORED = {"pixel_values", "mask", "conditioning_pixel_values"}


def open_images(launch: Launch, base: Base, args: Namespace, with_references: bool) -> Data:
    """The data of images and captions, with the encoders that each step needs, on the device."""
    resolution = args.resolution or base.family.resolution
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    caption_weights = weigh_captions(args)
    images = load_rows(
        args,
        args.streaming,
        [args.caption_column],
        add_references=add_references if with_references else None,
    )
    references = list_reference_columns(images.rows, args) if with_references else ()
    texts = (
        sample_captions(images.rows, args.caption_column, args.caption_prefix)
        if launch.is_main
        else []
    )
    in_float32 = launch.dtype == torch.float32
    encoders = None
    if in_float32:
        encoders = load_encoders(base, launch.dtype)
    elif launch.is_main and (args.validation_prompts or args.class_prompt):
        encoders = load_encoders(base, EXACT, with_vae=False)
    validation = encode_validation_prompts(launch, base, encoders, args)
    class_prompts = encode_class_prompts(launch, base, encoders, texts, args)
    if encoders:
        base = replace(base, family=encoders.family)  # it has found out what it needs
    if not in_float32:
        encoders = None  # free them before the same models are loaded in 16 bits
    encoders = encoders or load_encoders(base, launch.dtype)
    base = replace(base, family=encoders.family)
    check_sides(base.family.downscale(encoders.vae), resolution, args.bucket_step)
    put_on_device(encoders.vae.requires_grad_(False), launch.device)
    encoders.text_encoders.requires_grad_(False).to(launch.device)
    try_encoders(encoders)
    if launch.is_main:
        if not references:
            report_equal(texts, args)
        report_emptied(encoders.tokenizers, texts)
        cut = are_cut(encoders.tokenizers, texts or [""])
        limit = encoders.tokenizers[0].model_max_length
        report_cut(sum(cut), len(cut), limit, base.family.caption_unit)
    channels, _ = base.family.count_channels(encoders.vae)
    transform = make_transform(
        args,
        images.column,
        images.mask_column,
        caption_weights,
        channels,
        resolution,
        references,
        reference_side=resolution,
    )
    sizes = choose_sizes(launch.accelerator, images.rows, transform, num_workers)
    kind = "moments" if base.family.has_moments(encoders.vae) else "sample"
    dataset = CaptionedImages(
        images,
        transform,
        encoders.tokenizers,
        choose_captions(args, caption_weights, [args.caption_prefix]),
        sizes,
        args.shuffle_buffer,
    )
    return Data(
        dataset=dataset,
        family=base.family,
        latents=describe_latents(base.family, encoders.vae, resolution, kind),
        empty_prompt=encode_empty_prompt(encoders, base),
        encoders=encoders,
        validation=validation,
        class_prompts=class_prompts,
        resolution=resolution,
        bucket_step=args.bucket_step,
        clip_skip=base.clip_skip,
        caption_weights=caption_weights,
        mask_column=images.mask_column,
        num_workers=num_workers,
        captions=texts,
    )


class CaptionedImages(RowDataset):
    """Turns keys of `step_batches` into a batch of images and tokens: `dataset[keys]`.

    A row that can't be used has weight 0. sizes: see `choose_sizes`.
    """

    def __init__(
        self,
        images: ImageRows,
        transform: Transform,
        tokenizers: Tokenizers,
        choice: CaptionChoice,
        sizes: np.ndarray | None,
        shuffle_buffer: int,
    ) -> None:
        super().__init__(images, transform.source, shuffle_buffer)
        self.transform = transform
        self.tokenizers = tokenizers
        self.choice = choice
        self.sizes = sizes

    def caption(self, row: int) -> str:
        """The caption that a row has if it is held out. Raises ValueError if there is none."""
        (item,) = read_items(self.rows, [(None, row)])
        return choose_caption(read_text(row, None, item, self.transform), None, row, self.choice)

    def __getitem__(self, keys: list[Key]) -> CaptionedBatch:
        items = []
        for (epoch, number, weight, *_), row in zip(keys, read_items(self.rows, keys), strict=True):
            target = None if self.sizes is None else self.sizes[number].tolist()
            item = transform_row(number, epoch, row, self.transform, target)
            flip = draw_choices(self.transform.seed, epoch, number)[2] < 0.5
            item["flipped"] = bool(self.transform.random_flip and flip)
            if self.transform.reference_columns:
                item |= self.stack_references(item)
            for name in item.keys() & MIRRORED if item["flipped"] else ():
                item[name] = item[name].flip(-1)
            item["weight"] = 0.0 if item["skipped"] else weight
            items.append(item)
        texts = [item["text"] for item in items]
        batch = tokenize_batch(self.tokenizers, self.choice, texts, keys)
        for name in items[0].keys() & MIRRORED:
            batch[name] = torch.stack([item[name] for item in items])
        for name in ("original_size", "crop_top_left", "flipped", "weight"):
            batch[name] = torch.tensor([item[name] for item in items])
        batch["skipped"] = [(item["key"], item["skipped"]) for item in items if item["skipped"]]
        return cast(CaptionedBatch, batch)

    def stack_references(self, item: dict) -> dict:
        """The references of a row as channels, uint8 [3 * references, H, W], cropped as its image.

        A row whose references have another size than its image is skipped.
        """
        count = len(self.transform.reference_columns)
        skipped = item["skipped"]
        if not skipped and not (item["is_aligned"] and len(item["references"]) == count):
            skipped = "it has no reference of its own size"
        stacked = torch.zeros(3 * count, *item["pixel_values"].shape[1:], dtype=torch.uint8)
        if not skipped:
            stacked = torch.cat([pil_to_tensor(image) for image in item["references"]])
        return {"conditioning_pixel_values": stacked, "skipped": skipped}

    def longest(self, row: int) -> CaptionedBatch:
        batch = super().longest(row)
        return cast(CaptionedBatch, batch | tokenize_longest(self.tokenizers, self.choice))
