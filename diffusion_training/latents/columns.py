"""The columns of a latent cache: one list says what each holds, and all code goes through it.

To cache a further feature: an entry in `EXTRA_COLUMNS` and, in precompute_latents.py, a line in
`encode` that computes it.
"""

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from tqdm.auto import tqdm

from diffusion_training.families.known import FAMILIES

BY_COLUMNS = "records by columns"
# Files of the embeddings that take the place of a caption that is left out
EMPTY = {"prompt_embeds": "empty_prompt", "pooled_prompt_embeds": "empty_pooled"}


@dataclass(frozen=True)
class Column:
    """A column of numbers: what it holds for each row."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of a value; the largest, if they differ in size
    is_ragged: bool = False  # do values differ in size?
    is_padded: bool = False  # are they filled up to `shape` in a batch, with a mask?
    is_of_caption: bool = False  # does it hold a value for each caption of an image?
    num_values: int = 1  # of a row: its captions
    mirrored: str | None = None  # the column of the mirrored image's values
    is_map: bool = False  # are a mirrored image's values these, with the last axis reversed?
    is_in_batch: bool = True  # is it part of a trainer's batch?
    is_optional: bool = False  # does a trainer read it only where it asks for it?

    @property
    def arrow_type(self) -> pa.DataType:
        numbers = [] if self.is_ragged else [self.num_values * math.prod(self.shape)]
        return pa.list_(pa.from_numpy_dtype(np.dtype(self.dtype)), *numbers)

    def make_array(self, rows: Sequence[np.ndarray]) -> pa.Array:
        """The Arrow array of some rows' numbers."""
        values = np.concatenate([np.zeros(0, self.dtype), *rows])
        if not self.is_ragged:
            return pa.FixedSizeListArray.from_arrays(pa.array(values), self.arrow_type.list_size)
        offsets = np.cumsum([0, *map(len, rows)])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))

    def count_bytes(self, tokens: float | None) -> int:
        """Bytes of a row, at most; tokens: of a caption, on average, where padding is left out."""
        shape: Sequence[float] = self.shape
        if self.is_padded and tokens is not None:
            shape = [tokens, *self.shape[1:]]
        return int(self.num_values * math.prod(shape) * np.dtype(self.dtype).itemsize)

    def choose_caption_part(
        self, numbers: np.ndarray, lengths: np.ndarray, number: int
    ) -> np.ndarray:
        """One caption's part of a row's numbers; lengths: tokens of each, -1 of a missing one."""
        if not self.is_ragged:
            return numbers.reshape(len(lengths), -1)[number]
        ends = np.maximum(lengths, 0).cumsum()
        width = len(numbers) // ends[-1]
        return numbers[(ends[number] - lengths[number]) * width : ends[number] * width]

    def pad(self, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of numbers -> (an array [N, numbers] filled up with zeros, bool [N, tokens])."""
        width = math.prod(self.shape[1:])
        padded = np.zeros((len(rows), math.prod(self.shape)), rows[0].dtype)
        for full, numbers in zip(padded, rows, strict=True):
            full[: len(numbers)] = numbers
        lengths = np.array([[len(numbers) // width] for numbers in rows])
        return padded, np.arange(self.shape[0]) < lengths

    @property
    def checksum(self) -> str:
        """The column that holds its checksum: one of its own, if not every trainer reads it."""
        return f"{self.name}_checksum" if self.is_optional else "checksum"


# Features of your own, such as Column("dino", "float16", (256, 384), is_optional=True). A cache
# that has one is refused where its entry is missing here.
EXTRA_COLUMNS: tuple[Column, ...] = ()


def list_columns(cache: dict) -> list[Column]:
    """The columns of numbers of a cache; cache: what cache.json says."""
    features = cache.get("features", [])
    num_captions = count_captions(cache)
    captions: dict[str, Any] = {"is_of_caption": True, "num_values": num_captions}
    # padding is left out
    ragged_text = "ragged embeddings" in features or "ragged ids" in features
    padding: dict[str, Any] = {"is_ragged": ragged_text, "is_padded": ragged_text}
    columns = []
    if cache["text_cache"] == "ids":
        tokens = (cache["tokenizer"]["model_max_length"],)  # embeddings may be more or fewer
        for name in ("input_ids", "input_ids_2"):
            if name == "input_ids" or "text_encoder_2" in cache:
                columns.append(Column(name, "int32", tokens, **padding, **captions))
    else:
        shape = tuple(cache["prompt_embeds_shape"])
        columns.append(Column("prompt_embeds", "float16", shape, **padding, **captions))
        if "pooled_prompt_embeds_shape" in cache:
            shape = tuple(cache["pooled_prompt_embeds_shape"])
            columns.append(Column("pooled_prompt_embeds", "float16", shape, **captions))
    if "captions" in features:  # tokens of each, -1 of one that is missing
        columns.append(Column("prompt_lengths", "int32", (num_captions,), is_in_batch=False))
    if "sdxl" in features:
        columns += [Column(name, "int32", (2,)) for name in ("original_size", "crop_top_left")]

    shape = tuple(cache["latents_shape"])
    ragged = "ragged latents" in features
    has_mirrored = cache["transform"]["random_flip"]
    mirrored = "latents_flipped" if has_mirrored else None
    columns.append(Column("latents", "float16", shape, is_ragged=ragged, mirrored=mirrored))
    if has_mirrored:
        columns.append(
            Column("latents_flipped", "float16", shape, is_ragged=ragged, is_in_batch=False)
        )
    if "masks" in features:
        columns.append(Column("mask", "uint8", shape[1:], is_ragged=ragged, is_map=True))
    if ragged:  # height and width of the latents
        columns.append(Column("size", "int32", (2,), is_in_batch=False))
    return columns + [column for column in EXTRA_COLUMNS if name_feature(column) in features]


def name_feature(column: Column) -> str:
    """What cache.json calls a column of `EXTRA_COLUMNS`."""
    return f"column {column.name} {column.dtype} {list(column.shape)}"


def list_features() -> set[str]:
    """What a cache may hold beyond the plain one of Stable Diffusion; one with more is refused."""
    features = {"ragged latents", "masks", "captions", BY_COLUMNS}
    features |= {name_feature(column) for column in EXTRA_COLUMNS}
    return features.union(*(family.features for family in FAMILIES.values()))


def count_captions(cache: dict) -> int:
    """How many captions each row of a cache has a place for."""
    if "captions" not in cache.get("features", []):
        return 1
    return len(cache["transform"]["caption_weights"])


def group_by_checksum(columns: Collection[Column]) -> dict[str, list[str]]:
    """{column of checksums: the columns that it covers}."""
    groups: dict[str, list[str]] = {"checksum": []}
    for column in columns:
        groups.setdefault(column.checksum, []).append(column.name)
    return groups


def count_bytes(cache: dict, tokens: float | None = None) -> tuple[int, int]:
    """(bytes of the numbers in a row, bytes of its captions among them).

    tokens: of a caption, on average, where padding is left out. With several sizes, the largest.
    """
    sizes = {column: column.count_bytes(tokens) for column in list_columns(cache)}
    of_captions = [
        size
        for column, size in sizes.items()
        if column.is_of_caption or column.name == "prompt_lengths"
    ]
    return sum(sizes.values()), sum(of_captions)


def compare_captions(cache: dict, tokens: float | None) -> dict[str, int]:
    """{a choice of --text_cache: bytes of a caption}, whatever this cache holds."""
    ids = {**cache, "text_cache": "ids"}
    embeddings = {**cache, "text_cache": "embeddings"}
    sizes = {"ids": count_bytes(ids, tokens)[1], "embeddings": count_bytes(embeddings, tokens)[1]}
    if tokens is not None:
        plain = [name for name in cache.get("features", []) if name != "ragged embeddings"]
        padded = count_bytes({**embeddings, "features": plain})[1]
        sizes["embeddings with padding"] = padded
    return sizes


def describe_size(
    num_rows: int | None, num_shards: int, cache: dict, tokens: float | None, compare: bool
) -> str:
    """A sentence on how big a cache will be. num_rows: None of a stream.

    compare: also what captions would take with each --text_cache.
    """
    features = cache.get("features", [])
    # no size has more pixels than the square
    about = "up to " if "ragged latents" in features else ""
    if "ragged embeddings" in features:
        about = "about "
        tokens = tokens or cache["prompt_embeds_shape"][0]
    row_bytes, text_bytes = count_bytes(cache, tokens)
    show = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
    each = f"{about}{show(row_bytes)} ({show(text_bytes)} of it the caption's) and the text"
    if num_rows is None:
        sentence = f"A stream, of which each row is {each}"
    else:
        total = f"{about}{show(num_rows * row_bytes)} in {num_shards:,} shards"
        sentence = f"{num_rows:,} rows of {each}: {total}"
    if compare:
        choices = compare_captions(cache, tokens).items()
        sizes = [f"{show((num_rows or 1) * size)} as {kind}" for kind, size in choices]
        sentence += f"; captions take {', '.join(sizes)}"
    return sentence


class Ragged:
    """The rows of an Arrow column of lists of any length, as views of its numbers."""

    def __init__(self, column: pa.ListArray) -> None:
        self.offsets = column.offsets.to_numpy()
        self.numbers = column.values.to_numpy()

    def __getitem__(self, row: int) -> np.ndarray:
        row %= len(self.offsets) - 1  # it may be counted from the end
        return self.numbers[self.offsets[row] : self.offsets[row + 1]]


def view_rows(column: pa.Array) -> Ragged | np.ndarray:
    """An Arrow column of lists as something that gives a row's numbers without a copy."""
    if pa.types.is_list(column.type):
        return Ragged(column)
    return column.flatten().to_numpy().reshape(len(column), -1)


def checksum_row(row: dict[str, Any]) -> int:
    """xxh3 of a row's numbers, {column: its numbers}, in the order of the names."""
    digest = xxhash.xxh3_64()
    for name in sorted(row):
        digest.update(row[name])
    return digest.intdigest()
