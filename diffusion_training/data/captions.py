"""Rows with captions -> images and tokens, and what is said of captions."""

import os

import torch

from diffusion_training.data.images import decode_image, name_image, shrink
from diffusion_training.errors import explain, is_machines_fault, printable
from diffusion_training.order import draw_choices


def transform(row, epoch, item, column, channels, args):
    """Stage 1, on CPU cores: a row of the source -> its caption and its pixels, cropped and resized in uint8.

    Returns {"row", "key", "text", "pixel_values": [channels, resolution, resolution], "skipped": why the row can't be
    used, else None}. Raises what is no fault of the row.
    """
    size, key, reason = args.resolution, name_image(row, item[column]), None
    folder = args.train_data_dir or args.dataset_name
    if os.path.isabs(key) and os.path.isdir(folder):
        key = os.path.relpath(key, folder)  # the same wherever the data lies
    try:
        y, x, _, choice = draw_choices(args.seed, epoch, row)
        text = item[args.caption_column]
        if isinstance(text, list) and text:
            text = text[int(choice * len(text))]
        if not isinstance(text, str):
            raise ValueError(f"the caption is {text!r:.60}")
        if args.skip_empty_captions and not text.strip():
            raise ValueError("the caption is empty")
        place = (0.5, 0.5) if args.center_crop else (y, x)
        image = decode_image(item[column], channels, min_size=args.min_size)
        image = shrink(image, size, place, args.image_interpolation_mode)
    except Exception as error:  # a placeholder keeps the batch in shape
        if is_machines_fault(error):  # or rows would be left out for good, and a run go on, on nothing
            raise
        text, image, reason = "", torch.zeros(channels, size, size, dtype=torch.uint8), explain(error)
        if isinstance(error, OSError) and error.errno is not None:  # it may be there another day
            reason = f"not read: {reason}"
    return {"row": row, "key": key, "text": text, "pixel_values": image, "skipped": reason}


def shorten(tokenizer, texts):
    """Captions without what can't become tokens anyway: a tokenizer takes minutes and gigabytes for megabytes."""
    return [text[: 128 * tokenizer.model_max_length] for text in texts]


def tokenize(tokenizer, texts):
    """Captions -> tokens [N, model_max_length], filled up or cut off."""
    texts = shorten(tokenizer, texts)
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids


def look_at_captions(rows, column):
    """Captions of up to 10,000 rows, evenly spread."""
    captions = rows.select_columns(column)[:: max(1, len(rows) // 10**4)][column]
    texts = [text[0] if isinstance(text, list) and text else text for text in captions]
    return [text for text in texts if isinstance(text, str)]


def say_equal(texts):
    """Say it if captions are all the same: as a rule that is a wrong column."""
    if len(texts) > 1 and len(set(texts)) == 1:
        print(f"All captions that were looked at say {printable(texts[0][:60])!r}: is it the right --caption_column?")


def say_cut(count, total, limit, where=""):
    """Say how many captions lose their end."""
    if count:
        print(f"{where}{count:,} of {total:,} captions have more than {limit} tokens, and lose what is beyond")


def are_cut(tokenizer, texts):
    """For each caption whether it has more tokens than the text encoder takes, and so loses its end."""
    return [bool(encoding.overflowing) for encoding in tokenizer(shorten(tokenizer, texts), truncation=True).encodings]
