"""What stands in the rows of a latent cache."""

import math

import numpy as np
import pyarrow as pa
import xxhash

FEATURES = {"sdxl", "ragged latents", "masks"}  # beyond Stable Diffusion's; a cache that says of more is refused
EMPTY = {"prompt_embeds": "empty_prompt", "pooled_prompt_embeds": "empty_pooled"}  # files of a caption left out
RAGGED = ("latents", "latents_flipped", "mask")  # columns that are of any length where there are several sizes


def count_rows(args):
    """How many rows of the source are a batch of `encode`: of several sizes more, so that there are some of each."""
    return args.batch_size * (4 if args.bucket_step else 1)


def make_column(numbers, good, ragged):
    """An Arrow column of lists: the `good` ones, given by their places, of each row's numbers."""
    length, found = len(numbers[0]), [numbers[i] for i in good]
    values = pa.array(np.concatenate(found or [numbers[0][:0]]))
    if ragged:
        return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, found)]), pa.int32()), values)
    return pa.FixedSizeListArray.from_arrays(values, length)


def describe_columns(cache):
    """The columns of numbers in a cache, and their Arrow types."""
    features = cache.get("features", [])
    sdxl, ragged = "sdxl" in features, "ragged latents" in features
    kinds = {name: pa.list_(pa.float16(), math.prod(cache[f"{name}_shape"])) for name in [*EMPTY][: 1 + sdxl]}
    if cache["text_cache"] == "ids":
        tokens = pa.list_(pa.int32(), cache["prompt_embeds_shape"][0])
        kinds = dict.fromkeys(["input_ids", "input_ids_2"][: 1 + sdxl], tokens)
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


def count_bytes(cache):
    """(bytes of the numbers in a row, those of the caption's among them), where sizes differ of a square."""
    numbers = {"latents": math.prod(cache["latents_shape"]), "mask": math.prod(cache["latents_shape"][1:])}
    found = {
        name: (numbers[name.removesuffix("_flipped")] if pa.types.is_list(kind) else kind.list_size)
        * kind.value_type.bit_width // 8
        for name, kind in describe_columns(cache).items()
    }  # fmt: skip
    return sum(found.values()), sum(size for name, size in found.items() if "prompt" in name or "ids" in name)


class Ragged:
    """The rows of an Arrow column of lists of any length, as views of its numbers."""

    def __init__(self, column):
        self.offsets, self.numbers = column.offsets.to_numpy(), column.values.to_numpy()

    def __getitem__(self, row):
        row %= len(self.offsets) - 1  # it may be counted from the end
        return self.numbers[self.offsets[row] : self.offsets[row + 1]]


def view_rows(column):
    """An Arrow column of lists as what gives the numbers of a row by its number, without a copy."""
    if pa.types.is_list(column.type):
        return Ragged(column)
    return column.flatten().to_numpy().reshape(len(column), -1)


def checksum_row(row):
    """xxh3 of the numbers in a row of a cache: {column: float16 [numbers per row]}, in the order of the names."""
    digest = xxhash.xxh3_64()
    for name in sorted(row):
        digest.update(row[name])
    return digest.intdigest()
