"""The data set of images and captions that are encoded in every step."""

from typing import cast

import numpy as np
import torch
from torchvision.transforms.v2.functional import pil_to_tensor

from diffusion_training.batches import CaptionedBatch
from diffusion_training.data.captions import (
    read_text,
    tokenize_batch,
    tokenize_longest,
    transform_row,
)
from diffusion_training.data.rows import ImageRows, RowDataset, read_items
from diffusion_training.data.texts import CaptionChoice, choose_caption
from diffusion_training.data.transforms import Transform
from diffusion_training.families.base import Tokenizers
from diffusion_training.order import Key, draw_choices

MIRRORED = {"pixel_values", "mask", "conditioning_pixel_values"}


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
