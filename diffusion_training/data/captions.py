"""Rows with captions -> images and tokens, and what is said of captions."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

import datasets
import torch

from diffusion_training.data.buckets import choose_size
from diffusion_training.data.families import FAMILIES, Tokenizers
from diffusion_training.data.folders import find_source
from diffusion_training.data.images import decode_image, name_image, plan_crop, shrink
from diffusion_training.data.texts import Text, choose_caption, list_captions, take_text
from diffusion_training.errors import explain, explained, is_machines_fault, printable
from diffusion_training.order import draw_choices


def transform(
    row: int, epoch: int | None, item: dict, column: str, channels: int, args: Namespace,
    target: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Stage 1, on CPU cores: a row of the source -> its caption and its pixels, cropped and resized in uint8.

    target: (height, width) of what is made of it; None: what `choose_size` says of the image.
    Returns {"row", "key", "text" (with --caption_weights what `list_captions` returns), "pixel_values": [channels,
    *target], "original_size": (height, width) of the image as it is stored, "crop_top_left": (top, left) of the crop,
    in pixels of the image as it is resized, "mask": [1, *target], if there is a column of masks, "skipped": why the
    row can't be used, else None}. Raises what is no fault of the row.
    """
    key, reason, mask = name_image(row, item[column]), None, None
    if os.path.isabs(key) and os.path.isabs(folder := find_source(args)):
        key = os.path.relpath(key, folder)  # the same wherever the data lies
    try:
        y, x, _, choice = draw_choices(args.seed, epoch, row)
        text = list_captions(item, args) if args.caption_weights else take_text(item, choice, args)
        place = (0.5, 0.5) if args.center_crop else (y, x)
        image = decode_image(item[column], channels, min_size=args.min_size)
        original_size = height, width = tuple(image.shape[-2:])
        target = target or choose_size(height, width, args)
        top, left, rows, columns = plan_crop(height, width, target, place)
        crop = round(top * target[0] / rows), round(left * target[1] / columns)
        image = shrink(image, target, place, args.image_interpolation_mode)
        if args.mask_column:
            mask = shrink(decode_mask(item[args.mask_column], original_size), target, place, "bilinear")
    except Exception as error:  # a placeholder keeps the batch in shape
        if is_machines_fault(error):  # or rows would be left out for good, and a run go on, on nothing
            raise
        original_size = target = target or (args.resolution, args.resolution)
        text = [""] * len(args.caption_weights) if args.caption_weights else ""
        image, reason = torch.zeros(channels, *target, dtype=torch.uint8), explain(error)
        crop, mask = (0, 0), image[:1]
        if isinstance(error, OSError) and error.errno is not None:  # it may be there another day
            reason = f"not read: {reason}"
    made = {"row": row, "key": key, "text": text, "pixel_values": image, "skipped": reason}
    made |= {"mask": mask} if args.mask_column else {}
    return {**made, "original_size": original_size, "crop_top_left": crop}


def decode_ahead(item: dict, column: str, channels: int, args: Namespace) -> dict:
    """A row whose image and mask are decoded, for whoever has `transform` make several sizes of it."""
    ahead, images = {}, ((column, channels, args.min_size), (args.mask_column, 1, 0))
    for name, kind, least in images[: 1 + bool(args.mask_column)]:
        with contextlib.suppress(Exception):  # `transform` meets it again, and judges
            ahead[name] = {**item[name], "pixels": decode_image(item[name], kind, min_size=least)}
    return item | ahead


def decode_mask(source: dict | None, size: Sequence[int]) -> torch.Tensor:
    """A mask as uint8 [1, *size], white where the loss counts: everywhere, where an image has none."""
    if source is None or source["bytes"] is source["path"] is None:
        return torch.full((1, *size), 255, dtype=torch.uint8)
    try:
        mask = decode_image(source, 1)
    except Exception as error:
        if is_machines_fault(error):
            raise
        raise ValueError(f"its mask: {explain(error)}") from error
    if tuple(mask.shape[-2:]) != tuple(size):
        raise ValueError(f"its mask has {mask.shape[-1]} x {mask.shape[-2]} pixels, the image {size[1]} x {size[0]}")
    return mask


def prepare(tokenizers: Tokenizers, texts: Sequence[str]) -> list[str]:
    """Captions as they are tokenized: as the family has it, without what can't become tokens anyway, since a tokenizer
    takes minutes and gigabytes for megabytes."""
    tokenizer, family = tokenizers[0], FAMILIES[tokenizers.family]
    texts = [text[: 128 * tokenizer.model_max_length] for text in texts]
    return [family.prepare(tokenizer, text) for text in texts] if family.prepare else texts


def tokenize(tokenizers: Tokenizers, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """Captions -> {"input_ids": tokens [N, model_max_length], filled up or cut off; "input_ids_2": of a second; of a
    family that leaves padding out "prompt_mask": bool [N, model_max_length], where there are tokens}. Of K captions in
    each of N lists [N, K, model_max_length], and "prompt_lengths": int32 [N, K], how many tokens of each a cache has,
    -1 for one that is missing."""
    if texts and isinstance(texts[0], list):
        there = torch.tensor([[text is not None for text in row] for row in texts])
        batch = tokenize(tokenizers, [text or "" for row in texts for text in row])
        batch = {name: tokens.unflatten(0, there.shape) for name, tokens in batch.items()}
        if "prompt_mask" in batch:
            batch["prompt_mask"] &= there[..., None]
        counted = batch.get("prompt_mask", torch.ones_like(batch["input_ids"])).sum(dim=-1)
        return batch | {"prompt_lengths": torch.where(there, counted, -1).int()}
    texts, options = prepare(tokenizers, texts), {"padding": "max_length", "truncation": True}
    found = [tokenizer(texts, **options, return_tensors="pt") for tokenizer in tokenizers]
    batch = dict(zip(("input_ids", "input_ids_2"), (tokens.input_ids for tokens in found), strict=False))
    if FAMILIES[tokenizers.family].masked:
        batch["prompt_mask"] = found[0].attention_mask.bool()
    return batch


def tokenize_batch(tokenizers: Tokenizers, args: Namespace, texts: Iterable[Text], keys: Iterable[tuple]) -> dict:
    """The captions of rows, or lists of them, and their keys (epoch, row, ...) -> what a batch has of them."""
    chosen = [choose_caption(text, key[0], key[1], args) for text, key in zip(texts, keys, strict=True)]
    tokens: dict[str, Any] = dict(tokenize(tokenizers, chosen))
    if "prompt_mask" in tokens:
        tokens["prompt_lengths"] = tokens["prompt_mask"].sum(dim=1).tolist()
    return tokens


def look_at_captions(rows: datasets.Dataset | datasets.IterableDataset, column: str | list[str]) -> list[str]:
    """Captions of up to 10,000 rows, evenly spread, of a column or several; of a stream those of the first 100."""
    found = rows.select_columns(column)
    if isinstance(found, datasets.IterableDataset):
        with explained("the stream can't be read"):
            captions = [text for row in found.take(100) for text in row.values()]
    else:
        captions = [text for texts in found[:: max(1, len(rows) // 10**4)].values() for text in texts]
    texts = [text[0] if isinstance(text, list) and text else text for text in captions]
    return [text for text in texts if isinstance(text, str)]


def say_equal(texts: list[str], args: Namespace) -> None:
    """Say it if captions are all the same, and not by a flag: as a rule that is a wrong column."""
    if len(texts) > 1 and len(set(texts)) == 1 and texts[0] != args.instance_prompt and not args.folder_repeats:
        print(f"All captions that were looked at say {printable(texts[0][:60])!r}: is it the right --caption_column?")


def say_cut(count: int, total: int, limit: int, where: str = "") -> None:
    """Say how many captions lose their end."""
    if count:
        print(f"{where}{count:,} of {total:,} captions have more than {limit} tokens, and lose what is beyond")


def say_emptied(tokenizers: Tokenizers, texts: list[str]) -> None:
    """Say how many captions have words, and none once they are prepared for the tokenizer."""
    emptied = [text for text, left in zip(texts, prepare(tokenizers, texts), strict=True) if text.strip() and not left]
    if emptied:
        such = f"such as {printable(emptied[0][:60])!r}"
        print(f"{len(emptied):,} of {len(texts):,} captions are left without a word, {such}: see docs/from-scratch.md")


def count_tokens(tokenizers: Tokenizers, texts: list[str]) -> float | None:
    """How many tokens captions have on average, as far as the text encoder takes them; None where padding is kept."""
    if not texts or not FAMILIES[tokenizers.family].masked:
        return None
    lengths = [len(ids) for ids in tokenizers[0](prepare(tokenizers, texts), truncation=True).input_ids]
    return sum(lengths) / len(lengths)


def are_cut(tokenizers: Tokenizers, texts: Sequence[Text]) -> list[bool]:
    """For each caption, or list of them, whether one has more tokens than text encoders take, and loses its end."""
    if texts and isinstance(texts[0], list):
        cut = iter(are_cut(tokenizers, [text or "" for row in texts for text in row]))
        return [any([next(cut) for _ in row]) for row in texts]
    # A second tokenizer takes as many, and knows the same words.
    encodings = tokenizers[0](prepare(tokenizers, texts), truncation=True).encodings
    return [bool(encoding.overflowing) for encoding in encodings]
