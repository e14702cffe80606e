"""The columns of a latent cache: one list describes them, and all code uses this list.

To cache another feature, add an entry to `EXTRA_COLUMNS`, and to `encode` in precompute_latents.py
a line that computes it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from diffusion_training.data.captions import choose_length
from diffusion_training.families.names import FACTS, NAMED_REFERENCES

FORMAT_VERSION = 4  # of cache.json
# Files of the embeddings that replace a dropped caption
EMPTY = {"prompt_embeds": "empty_prompt", "pooled_prompt_embeds": "empty_pooled"}
# {type of a tensor: type of its column}, float16 if it is not here
STORED = {"bool": "uint8", "uint8": "uint8", "int32": "int32", "int64": "int32"}


@dataclass(frozen=True)
class Column:
    """A column of numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of a value, or of the largest one if they differ in size
    is_ragged: bool = False  # do values differ in size?
    is_padded: bool = False  # are they filled up to `shape` in a batch, with a mask?
    is_of_caption: bool = False  # does it hold a value for each caption of an image?
    num_values: int = 1  # per row: one, or one per caption
    mirrored: str | None = None  # the column for the mirrored image
    is_map: bool = False  # does mirroring an image reverse the last axis of these values?
    is_in_batch: bool = True  # is it part of a trainer's batch?
    is_optional: bool = False  # does a trainer read it only on request?

    @property
    def arrow_type(self) -> pa.DataType:
        numbers = [] if self.is_ragged else [self.num_values * math.prod(self.shape)]
        return pa.list_(pa.from_numpy_dtype(np.dtype(self.dtype)), *numbers)

    def make_array(self, rows: Sequence[np.ndarray]) -> pa.Array:
        """Numbers of some rows -> Arrow array."""
        values = np.concatenate([np.zeros(0, self.dtype), *rows])
        if not self.is_ragged:
            return pa.FixedSizeListArray.from_arrays(pa.array(values), self.arrow_type.list_size)
        offsets = np.cumsum([0, *map(len, rows)])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))

    def count_bytes(self, tokens: float | None) -> int:
        """The most bytes in a row. tokens: in an average caption, used if padding is not stored."""
        shape: Sequence[float] = self.shape
        if self.is_padded and tokens is not None:
            shape = [tokens, *self.shape[1:]]
        return int(self.num_values * math.prod(shape) * np.dtype(self.dtype).itemsize)

    def choose_caption_part(
        self, numbers: np.ndarray, lengths: np.ndarray, number: int
    ) -> np.ndarray:
        """Cut one caption's numbers out of a row's. lengths: tokens of each caption, or -1."""
        if not self.is_ragged:
            return numbers.reshape(len(lengths), -1)[number]
        ends = np.maximum(lengths, 0).cumsum()
        width = len(numbers) // ends[-1]
        return numbers[(ends[number] - lengths[number]) * width : ends[number] * width]

    def pad(
        self, rows: Sequence[np.ndarray], least_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of numbers -> (array [N, numbers] padded with zeros, mask bool [N, tokens]).

        least_tokens: pad to this many or, if a row has more, to these; see `choose_length`.
            None: to the most tokens that a row may have.
        """
        tokens = self.shape[0]
        width = math.prod(self.shape[1:])
        lengths = np.array([[len(numbers) // width] for numbers in rows])
        if least_tokens is not None:
            tokens = choose_length(max(least_tokens, lengths.max()), tokens)
        padded = np.zeros((len(rows), tokens * width), rows[0].dtype)
        for full, numbers in zip(padded, rows, strict=True):
            full[: len(numbers)] = numbers
        return padded, np.arange(tokens) < lengths

    @property
    def checksum(self) -> str:
        """The column with its checksum. An optional column has its own, as few trainers read it."""
        return f"{self.name}_checksum" if self.is_optional else "checksum"


# Your own features, such as Column("dino", "float16", (256, 384), is_optional=True). Without its
# entry here, a cache that has the feature can't be opened.
EXTRA_COLUMNS: tuple[Column, ...] = ()


def list_further_parts(cache: dict) -> list[dict[str, Any]]:
    """What a cache of a recorded pipeline holds of a caption, besides prompt_embeds."""
    parts = cache.get("recorded", {}).get("parts", [])
    return [part for part in parts if part["column"] not in EMPTY]


def name_empty_files(cache: dict) -> dict[str, str]:
    """{column of captions: the file, without its ending, for a dropped caption}."""
    further = {part["column"]: f"empty_{part['column']}" for part in list_further_parts(cache)}
    return {name: file for name, file in EMPTY.items() if f"{name}_shape" in cache} | further


def list_columns(cache: dict) -> list[Column]:
    """The columns of numbers in a cache; cache: the content of cache.json."""
    features = cache["features"]
    num_captions = len(cache["transform"]["caption_weights"]) if "captions" in features else 1
    captions: dict[str, Any] = {"is_of_caption": True, "num_values": num_captions}
    # padding is not stored
    ragged_text = "ragged embeddings" in features or "ragged ids" in features
    padding: dict[str, Any] = {"is_ragged": ragged_text, "is_padded": ragged_text}
    if cache["text_cache"] == "ids":
        tokens = (cache["tokenizer"]["model_max_length"],)  # the number of embeddings may differ
        further = [suffix for suffix in ("_2", "_3") if f"text_encoder{suffix}" in cache]
        names = [f"input_ids{suffix}" for suffix in ("", *further)]
        columns = [Column(name, "int32", tokens, **padding, **captions) for name in names]
    else:
        shape = tuple(cache["prompt_embeds_shape"])
        columns = [Column("prompt_embeds", "float16", shape, **padding, **captions)]
        if "pooled_prompt_embeds_shape" in cache:
            shape = tuple(cache["pooled_prompt_embeds_shape"])
            columns.append(Column("pooled_prompt_embeds", "float16", shape, **captions))
        columns += [
            Column(
                part["column"],
                STORED.get(part["dtype"], "float16"),
                tuple(part["shape"]),
                is_ragged=part["is_ragged"],
                is_padded=part["is_ragged"],
                **captions,
            )
            for part in list_further_parts(cache)
        ]
    if "captions" in features:  # tokens of each caption, -1 if it is missing
        columns.append(Column("prompt_lengths", "int32", (num_captions,), is_in_batch=False))
    if "sdxl" in features:
        columns += [Column(name, "int32", (2,)) for name in ("original_size", "crop_top_left")]

    shape = tuple(cache["latents_shape"])
    ragged = "ragged latents" in features
    mirrored = "latents_flipped" if cache["transform"]["random_flip"] else None
    columns.append(Column("latents", "float16", shape, is_ragged=ragged, mirrored=mirrored))
    if mirrored:
        columns.append(Column(mirrored, "float16", shape, is_ragged=ragged, is_in_batch=False))
    if "masks" in features:
        columns.append(Column("mask", "uint8", shape[1:], is_ragged=ragged, is_map=True))
    if ragged:  # height and width of the latents
        columns.append(Column("size", "int32", (2,), is_in_batch=False))
    columns += list_latents_of_references(cache)
    return columns + [column for column in EXTRA_COLUMNS if name_feature(column) in features]


def list_latents_of_references(cache: dict) -> list[Column]:
    """The latents of references, and the sizes of each: of its latents, and in pixels.

    A reference that a row lacks has no numbers, and sizes of 0.
    """
    if "references" not in cache["features"]:
        return []
    about = cache["references"]
    flipped = "{}_flipped" if cache["transform"]["random_flip"] else None
    columns = []
    for number in range(about["count"]):
        name = f"reference_{number}"
        shape = tuple(about["shape"])
        mirrored = flipped and flipped.format(name)
        columns.append(Column(name, "float16", shape, is_ragged=True, mirrored=mirrored))
        if mirrored:
            columns.append(Column(mirrored, "float16", shape, is_ragged=True, is_in_batch=False))
    sizes = Column("reference_sizes", "int32", (about["count"], 4), is_in_batch=False)
    return [*columns, sizes]


def name_feature(column: Column) -> str:
    """The name in cache.json of a column of `EXTRA_COLUMNS`."""
    return f"column {column.name} {column.dtype} {list(column.shape)}"


def list_features() -> set[str]:
    """The features that this version can read, beyond a plain cache of Stable Diffusion."""
    features = {"ragged latents", "masks", "captions", "classes", "references", NAMED_REFERENCES}
    features |= {"recorded text", "ragged ids"}
    features |= {name_feature(column) for column in EXTRA_COLUMNS}
    return features.union(*(facts.features for facts in FACTS.values()))


def group_by_checksum(columns: Collection[Column]) -> dict[str, list[str]]:
    """{column of checksums: the columns that it covers}."""
    groups: dict[str, list[str]] = {"checksum": []}
    for column in columns:
        groups.setdefault(column.checksum, []).append(column.name)
    return groups


class Ragged:
    """The rows of an Arrow column of lists of different lengths, as views of its numbers."""

    def __init__(self, column: pa.ListArray) -> None:
        self.offsets = column.offsets.to_numpy()
        self.numbers = column.values.to_numpy()

    def __getitem__(self, row: int) -> np.ndarray:
        return self.numbers[self.offsets[row] : self.offsets[row + 1]]


def view_rows(column: pa.Array) -> Ragged | np.ndarray:
    """Index an Arrow column of lists by row, without copying the numbers."""
    if pa.types.is_list(column.type):
        return Ragged(column)
    return column.flatten().to_numpy().reshape(len(column), -1)


def checksum_row(row: dict[str, Any]) -> int:
    """xxh3 of a row, {column: its numbers}, in the order of the names."""
    digest = xxhash.xxh3_64()
    for name in sorted(row):
        digest.update(row[name])
    return digest.intdigest()
