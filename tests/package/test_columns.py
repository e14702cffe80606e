"""Columns of a latent cache: names, types, and rows of any length."""

import argparse
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from diffusion_training.data.transform_settings import make_transform
from diffusion_training.families.known import load_family
from diffusion_training.latents import columns as module
from diffusion_training.latents.plan import MODEL_FLAGS, PlannedCache

HALF = pa.float16()
CACHE = {
    "features": [], "text_encoder": {},
    "prompt_embeds_shape": [5, 6], "tokenizer": {"model_max_length": 5}, "latents_shape": [4, 3, 2],
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
def test_list_columns_follows_from_the_cache_settings(change, kinds):
    cache = {**CACHE, **change}
    if "sdxl" in cache["features"]:
        cache |= {"text_encoder_2": {}, "pooled_prompt_embeds_shape": [7]}
    columns = module.list_columns(cache)
    assert {column.name: column.arrow_type for column in columns} == kinds
    assert len(columns) == len(kinds)
    # columns without their own name in a batch, and the columns of mirrored images
    assert {column.name for column in columns if not column.is_in_batch} == kinds.keys() & {
        "latents_flipped",
        "size",
    }
    mirrored = {column.name: column.mirrored for column in columns if column.mirrored}
    assert mirrored == ({"latents": "latents_flipped"} if "latents_flipped" in kinds else {})


@pytest.mark.parametrize("ragged", [False, True])
def test_view_rows_finds_fixed_and_ragged_rows(ragged):
    """Also in a part of a record batch."""
    numbers = [np.full(2 + i if ragged else 3, i, np.float16) for i in range(5)]
    kind = module.Column("it", "float16", (3,), is_ragged=ragged)
    column = kind.make_array([numbers[row] for row in (0, 2, 3, 4)])
    assert column.type == (pa.list_(HALF) if ragged else pa.list_(HALF, 3))
    for part, rows in ((column, [0, 2, 3, 4]), (column[1:3], [2, 3])):
        views = module.view_rows(part)
        for place, row in enumerate(rows):
            assert np.array_equal(views[place], numbers[row])
    assert kind.make_array(numbers[:1]).to_pylist() == [numbers[0].tolist()]
    nothing = kind.make_array([])
    assert len(nothing) == 0 and nothing.type == column.type == kind.arrow_type


def test_buckets_read_four_times_as_many_rows_per_batch():
    for step, count in (None, 3), (64, 12):
        flags = {"dataset_name": None, "train_data_dir": ".", "bucket_step": step}
        transform = make_transform(argparse.Namespace(**flags), "image", None, None, 3, 512)
        planned = PlannedCache(
            "latents-animals",
            load_family("sd"),
            transform,
            None,
            "ids",
            3,
            9,
            {},
            {"batch_size": 3},
        )
        assert planned.rows_per_batch == count
        larger = planned.with_batch_size(5)
        assert larger.rows_per_batch == count // 3 * 5 and larger.flags == {"batch_size": 5}
        # the demo's cache
        assert planned.suggest_training() == "python train_text_to_image.py"


def test_the_suggested_training_has_the_flags_that_the_cache_needs(monkeypatch):
    flags = dict.fromkeys(MODEL_FLAGS) | {"pretrained_model_name_or_path": "base"}
    flags |= {"model_family": "prx", "random_flip": False, "mixed_precision": "no"}
    flags |= {"max_sequence_length": 64}
    family = load_family("prx")
    planned = PlannedCache("cache", family, None, None, "embeddings", 3, 9, {}, flags)
    expected = "python train_flow.py --latents_dir cache"
    expected += " --pretrained_model_name_or_path base --model_family prx --max_sequence_length 64"
    assert planned.suggest_training() == expected
    monkeypatch.setattr(type(family), "suggests_lora", True)
    planned = replace(planned, transform=argparse.Namespace(reference_columns=[], resolution=512))
    lora = " --rank 16 --train_batch_size 1 --fit auto"
    assert planned.suggest_training() == expected + lora
    flags |= {"pretrained_model_name_or_path": None, "vae_name_or_path": "vae"}
    assert "--transformer_config_name_or_path configs/prx_163m.json" in planned.suggest_training()
