"""The columns of a latent cache."""

import functools
import math
from argparse import Namespace

import numpy as np
import pyarrow as pa
import xxhash
from tqdm.auto import tqdm

# Features beyond Stable Diffusion's. A cache with any other feature is refused.
BY_COLUMNS = "records by columns"
FEATURES = {"sdxl", "ragged latents", "ragged embeddings", "masks", "captions", BY_COLUMNS}
# files with the embeddings of a dropped caption
EMPTY = {"prompt_embeds": "empty_prompt", "pooled_prompt_embeds": "empty_pooled"}
# columns whose length varies if there are several sizes
LATENTS = ("latents", "latents_flipped", "mask")
PROMPTS = ("prompt_embeds", "input_ids")  # columns whose length varies if padding is left out
# columns that hold all captions of an image, if it has several
TEXTS = (*PROMPTS, "pooled_prompt_embeds", "input_ids_2")


def count_rows(args: Namespace) -> int:
    """How many rows of the source form a batch of `encode`.

    With several sizes there are more, so that there are some rows of each size.
    """
    return args.batch_size * (4 if args.bucket_step else 1)


def make_column(numbers: list[np.ndarray], good: list[int], ragged: bool) -> pa.Array:
    """An Arrow column of lists, made of the numbers of the rows whose indices are in `good`.

    `ragged`: the lists differ in length.
    """
    length, found = len(numbers[0]), [numbers[i] for i in good]
    values = pa.array(np.concatenate(found or [numbers[0][:0]]))
    if ragged:
        return pa.ListArray.from_arrays(
            pa.array(np.cumsum([0, *map(len, found)]), pa.int32()), values
        )
    return pa.FixedSizeListArray.from_arrays(values, length)


def count_captions(cache: dict) -> int:
    """How many captions a row of a cache can hold."""
    return (
        len(cache["transform"]["caption_weights"]) if "captions" in cache.get("features", []) else 1
    )


def describe_columns(cache: dict) -> dict[str, pa.DataType]:
    """The numeric columns of a cache, and their Arrow types."""
    features, count = cache.get("features", []), count_captions(cache)
    sdxl, ragged, masked = (
        name in features for name in ("sdxl", "ragged latents", "ragged embeddings")
    )
    lengths = {
        name: [] if masked else [count * math.prod(cache[f"{name}_shape"])]
        for name in [*EMPTY][: 1 + sdxl]
    }
    kinds = {name: pa.list_(pa.float16(), *length) for name, length in lengths.items()}
    if cache["text_cache"] == "ids":
        tokens = pa.list_(pa.int32(), *[] if masked else [count * cache["prompt_embeds_shape"][0]])
        kinds = dict.fromkeys(["input_ids", "input_ids_2"][: 1 + sdxl], tokens)
    if "captions" in features:
        # number of tokens of each caption, -1 for a missing one
        kinds["prompt_lengths"] = pa.list_(pa.int32(), count)
    if sdxl:
        kinds |= dict.fromkeys(["original_size", "crop_top_left"], pa.list_(pa.int32(), 2))
    _, *size = cache["latents_shape"]
    for name in ["latents"] + ["latents_flipped"] * cache["transform"]["random_flip"]:
        kinds[name] = pa.list_(pa.float16(), *[] if ragged else [math.prod(cache["latents_shape"])])
    if "masks" in features:
        kinds["mask"] = pa.list_(pa.uint8(), *[] if ragged else [math.prod(size)])
    if ragged:
        kinds["size"] = pa.list_(pa.int32(), 2)  # height and width of the latents
    return kinds


def count_bytes(cache: dict, tokens: float | None = None) -> tuple[int, int]:
    """The size of a row in bytes: (all its numbers, only those of its captions).

    If sizes differ, it is that of a square image. `tokens` is the mean number of tokens of a
    caption, if padding is left out.
    """
    numbers = {
        "latents": math.prod(cache["latents_shape"]),
        "mask": math.prod(cache["latents_shape"][1:]),
    }
    if tokens is not None:
        tokens *= count_captions(cache)
        numbers |= {"prompt_embeds": tokens * cache["prompt_embeds_shape"][1], "input_ids": tokens}
    found = {
        name: (numbers[name.removesuffix("_flipped")] if pa.types.is_list(kind) else kind.list_size)
        * kind.value_type.bit_width // 8
        for name, kind in describe_columns(cache).items()
    }  # fmt: skip
    found = {name: round(size) for name, size in found.items()}
    return sum(found.values()), sum(
        size for name, size in found.items() if "prompt" in name or "ids" in name
    )


def compare_captions(cache: dict, tokens: float | None) -> dict[str, int]:
    """{choice of --text_cache: bytes of a row's captions}, whichever choice the cache has."""
    plain = {
        **cache,
        "features": [name for name in cache.get("features", []) if name != "ragged embeddings"],
    }
    kinds = {"ids": (cache, "ids", tokens), "embeddings": (cache, "embeddings", tokens)}
    if tokens is not None:
        kinds["embeddings with padding"] = plain, "embeddings", None
    return {
        name: count_bytes({**of, "text_cache": kind}, n)[1] for name, (of, kind, n) in kinds.items()
    }


def describe_size(
    rows: int | None, shards: int, cache: dict, tokens: float | None, args: Namespace
) -> str:
    """A sentence about the size of a cache with so many rows and shards.

    `rows` is None for a stream.
    """
    most = "up to " if args.bucket_step else ""  # no size has more pixels than the square
    if "ragged embeddings" in cache.get("features", []):
        most, tokens = "about ", tokens or cache["prompt_embeds_shape"][0]
    row_bytes, text_bytes = count_bytes(cache, tokens)
    show = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
    each = f"{most}{show(row_bytes)} ({show(text_bytes)} of it the caption's) and the text"
    sentence = f"A stream, of which each row is {each}"
    if rows is not None:
        sentence = f"{rows:,} rows of {each}: {most}{show(rows * row_bytes)} in {shards:,} shards"
    if args.dry_run:
        sizes = [
            f"{show((rows or 1) * size)} as {kind}"
            for kind, size in compare_captions(cache, tokens).items()
        ]
        sentence += f"; captions take {', '.join(sizes)}"
    return sentence


def take_caption(numbers: np.ndarray, lengths: np.ndarray, number: int, ragged: bool) -> np.ndarray:
    """Take the numbers of one caption from those of all captions of a row.

    `lengths` holds the number of tokens of each caption, -1 for a missing one.
    """
    if not ragged:
        return numbers.reshape(len(lengths), -1)[number]
    ends = np.maximum(lengths, 0).cumsum()
    width = len(numbers) // ends[-1]
    return numbers[(ends[number] - lengths[number]) * width : ends[number] * width]


def pad_prompts(rows: list[np.ndarray], length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad rows of numbers [tokens * width] with zeros.

    Returns (array [N, length * width]; bool [N, length], true for tokens).
    """
    padded = np.zeros((len(rows), length * width), rows[0].dtype)
    for row, found in zip(padded, rows, strict=True):
        row[: len(found)] = found
    return padded, np.arange(length) < np.array([[len(row) // width] for row in rows])


class Ragged:
    """The rows of an Arrow column whose lists differ in length, as views of its numbers."""

    def __init__(self, column: pa.ListArray) -> None:
        self.offsets, self.numbers = column.offsets.to_numpy(), column.values.to_numpy()

    def __getitem__(self, row: int) -> np.ndarray:
        row %= len(self.offsets) - 1  # it may be negative
        return self.numbers[self.offsets[row] : self.offsets[row + 1]]


def view_rows(column: pa.Array) -> Ragged | np.ndarray:
    """Give access to the rows of an Arrow column of lists by their number, without a copy."""
    if pa.types.is_list(column.type):
        return Ragged(column)
    return column.flatten().to_numpy().reshape(len(column), -1)


def checksum_row(row: dict[str, np.ndarray]) -> int:
    """xxh3 of the numbers in a row of a cache, in the order of the columns' names.

    `row` is {column: numbers of the row, such as float16 latents}.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(row):
        digest.update(row[name])
    return digest.intdigest()
