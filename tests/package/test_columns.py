"""Columns of a latent cache: their names and types, and that rows of any length are found."""

import argparse

import numpy as np
import pyarrow as pa
import pytest

from diffusion_training.latents import columns as module

HALF = pa.float16()
CACHE = {
    "prompt_embeds_shape": [5, 6], "pooled_prompt_embeds_shape": [7], "latents_shape": [4, 3, 2],
    "text_cache": "embeddings", "transform": {"random_flip": True},
}  # fmt: skip
PLAIN = {
    "prompt_embeds": pa.list_(HALF, 30),
    "latents": pa.list_(HALF, 24),
    "latents_flipped": pa.list_(HALF, 24),
}


@pytest.mark.parametrize("change, kinds", [
    ({}, PLAIN),
    ({"transform": {"random_flip": False}},
     {"prompt_embeds": pa.list_(HALF, 30), "latents": pa.list_(HALF, 24)}),
    ({"features": ["masks"]}, {**PLAIN, "mask": pa.list_(pa.uint8(), 6)}),
    ({"features": ["sdxl"]}, {**PLAIN, "pooled_prompt_embeds": pa.list_(HALF, 7),
                              "original_size": pa.list_(pa.int32(), 2),
                              "crop_top_left": pa.list_(pa.int32(), 2)}),
    ({"features": ["ragged latents", "masks"], "text_cache": "ids"},
     {"input_ids": pa.list_(pa.int32(), 5), "latents": pa.list_(HALF),
      "latents_flipped": pa.list_(HALF), "mask": pa.list_(pa.uint8()),
      "size": pa.list_(pa.int32(), 2)}),
    ({"features": ["sdxl"], "text_cache": "ids", "transform": {"random_flip": False}},
     {"input_ids": pa.list_(pa.int32(), 5), "input_ids_2": pa.list_(pa.int32(), 5),
      "latents": pa.list_(HALF, 24), "original_size": pa.list_(pa.int32(), 2),
      "crop_top_left": pa.list_(pa.int32(), 2)}),
])  # fmt: skip
def test_a_cache_says_which_columns_it_has(change, kinds):
    assert module.describe_columns({**CACHE, **change}) == kinds


@pytest.mark.parametrize("ragged", [False, True])
def test_good_rows_are_found_again(ragged):
    """Also in a part of a record batch, and counted from the end, as the reader counts."""
    numbers = [np.full(2 + i if ragged else 3, i, np.float16) for i in range(5)]
    column = module.make_column(numbers, [0, 2, 3, 4], ragged)
    assert column.type == (pa.list_(HALF) if ragged else pa.list_(HALF, 3))
    for part, rows in ((column, [0, 2, 3, 4]), (column[1:3], [2, 3])):
        views = module.view_rows(part)
        for place, row in enumerate(rows):
            assert np.array_equal(views[place], numbers[row])
            assert np.array_equal(views[place - len(rows)], numbers[row])
    assert module.make_column(numbers[:1], [0], ragged).to_pylist() == [numbers[0].tolist()]
    nothing = module.make_column(numbers[:1], [], ragged)
    assert len(nothing) == 0 and nothing.type == module.make_column(numbers[:1], [0], ragged).type


def test_of_several_sizes_more_rows_are_read_at_a_time():
    assert module.count_rows(argparse.Namespace(batch_size=3, bucket_step=None)) == 3
    assert module.count_rows(argparse.Namespace(batch_size=3, bucket_step=64)) == 12
