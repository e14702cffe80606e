"""Images of several sizes, and masks: from a cache and images, killed and resumed, SD and SDXL."""

import itertools
import json
import os

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    SHAPES,
    Script,
    assert_same_weights,
    checkpoints,
    launch,
    make_masked,
    make_models,
    make_sdxl,
    metrics,
    patch,
    reset,
)
from PIL import Image

import precompute_latents
import train_text_to_image as script
from diffusion_training.data.encoders import encode_images
from diffusion_training.families.opening import open_base
from diffusion_training.latents.reader import CachedLatents, load_cache

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")


@pytest.fixture
def data(tmp_path):
    return make_masked(tmp_path / "data")


def transform_flags(tmp_path, *flags):
    return [
        f"--train_data_dir={tmp_path / 'data'}", "--resolution=16", "--bucket_step=4",
        "--random_flip", "--dataloader_num_workers=0", *flags,
    ]  # fmt: skip


def cache_flags(tmp_path, models, *flags, name="cache"):
    models = f"--pretrained_model_name_or_path={models}"
    return precompute.flags(
        tmp_path / name, *transform_flags(tmp_path), models, "--rows_per_shard=5", *flags
    )


def make_cache(tmp_path, models, *flags, name="cache"):
    precompute(*cache_flags(tmp_path, models, *flags, name=name))
    return tmp_path / name


def train_flags(tmp_path, models, out="out", *flags):
    return train.flags(
        tmp_path / out, f"--pretrained_model_name_or_path={models}", "--train_batch_size=2",
        "--num_train_epochs=2", "--lr_warmup_steps=0", *flags,
    )  # fmt: skip


@pytest.mark.parametrize("make", [pytest.param(make_models, marks=pytest.mark.long), make_sdxl])
def test_cache_with_buckets_and_masks_trains_like_its_images(tmp_path, data, make):
    models = make(tmp_path)
    cache = make_cache(tmp_path, models, "--center_crop")
    holds = ["--holdout=2", "--random_flip"]
    train(*train_flags(tmp_path, models, "one"), f"--latents_dir={cache}", *holds)
    train(
        *train_flags(tmp_path, models, "two"), *transform_flags(tmp_path, "--center_crop"), *holds
    )
    one, other = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("loss", "grad_norm", "held_out_loss"):
        values = [
            [record[name] for record in records if name in record] for records in (one, other)
        ]
        assert len(values[0]) >= 1 and values[0] == pytest.approx(values[1], rel=1e-3), name


def test_bucket_no_upscale_keeps_small_images_small(tmp_path, data):
    """At 32 px none of (20, 24), (40, 20), (18, 50) and (30, 30) reaches its bucket."""
    models, small = (
        make_models(tmp_path),
        ["--center_crop", "--resolution=32", "--bucket_no_upscale"],
    )
    cache = make_cache(tmp_path, models, *small)
    sizes = [[20, 24], [40, 20], [16, 40], [28, 28]]
    rows, said = datasets.load_from_disk(str(cache)), json.loads((cache / "cache.json").read_text())
    assert [[2 * side for side in size] for size in rows["size"][:4]] == sizes
    assert said["transform"]["bucket_no_upscale"] is True
    more = ["--max_train_steps=3", "--random_flip"]
    train(*train_flags(tmp_path, models, "one"), f"--latents_dir={cache}", *more)
    train(*train_flags(tmp_path, models, "two"), *transform_flags(tmp_path, *small), *more)
    losses = [[record["loss"] for record in metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 3
    squares = transform_flags(tmp_path, *small)
    squares.remove("--bucket_step=4")
    said = train.refused(*train_flags(tmp_path, models, "three"), *squares, status=2)
    assert "--bucket_no_upscale does nothing without --bucket_step: give both" in said


def test_bucketed_cache_stores_sizes_and_masks_that_flip_with_images(tmp_path, data, monkeypatch):
    models = make_models(tmp_path)
    cache = make_cache(tmp_path, models, "--center_crop")
    rows = datasets.load_from_disk(str(cache))
    described = json.loads((cache / "cache.json").read_text())
    assert described["features"] == ["ragged latents", "masks"]
    assert described["latents_shape"] == [8, 8, 8] and described["transform"]["bucket_step"] == 4
    assert rows["key"][:] == [f"{i:02}.png" for i in range(12)]
    sizes = {(20, 24): [8, 8], (40, 20): [10, 6], (18, 50): [6, 10], (30, 30): [8, 8]}
    for i, row in enumerate(rows):
        height, width = row["size"]
        assert row["size"] == sizes[SHAPES[i % 4]]
        assert len(row["latents"]) == len(row["latents_flipped"]) == 8 * height * width
        mask = np.array(row["mask"]).reshape(height, width)
        assert (mask == 255).all() == (i % 3 > 0)
    # A white half of the image is a white half of the latents, and the other half if mirrored
    half = np.zeros((30, 30), np.uint8)
    half[:, :15] = 255
    Image.fromarray(half).save(data / "03.mask.png")
    again = make_cache(tmp_path, models, "--center_crop", name="again")
    mask = np.array(datasets.load_from_disk(str(again))["mask"][3]).reshape(8, 8)
    assert mask[:, :3].min() > 250 and mask[:, 5:].max() < 5
    sources = {
        "latents": [f"--latents_dir={again}", "--random_flip"],
        "pixel_values": transform_flags(tmp_path, "--center_crop"),
    }
    for name, source in sources.items():
        found = load([*train_flags(tmp_path, models), *source])
        for epoch in range(4):
            batch = found.dataset[[(epoch, 3, 1.0)]]
            mask = script.prepare_batch(found, 0.0, batch).loss_inputs["mask"]
            white = mask[..., 5:] if batch["flipped"] else mask[..., :3]
            assert mask.shape == (1, 1, 8, 8) and white.min() > 0.98 and mask.mean() < 0.52
            # the batch's mask is mirrored like the image
            given = batch["mask"].view(mask.shape) if name == "latents" else batch["mask"]
            side = given.shape[-1] * 3 // 8
            white = given[..., -side:] if batch["flipped"] else given[..., :side]
            assert name in batch and white.min() > 250 and given.float().mean() < 135


def load(flags):
    reset()
    args = script.parse_args(flags)
    launch = script.make_launch(Accelerator(**script.accelerator_options(args)), args)
    return script.open_data(launch, open_base(args), None, {}, args)


def test_masked_pixels_add_nothing_to_the_loss(tmp_path, data):
    """A black mask over the right half: the loss does not depend on the pixels there."""
    models, losses = make_models(tmp_path), []
    for name in os.listdir(data):
        if name.endswith(".png"):
            with Image.open(data / name) as image:
                mask = np.zeros((image.height, image.width), np.uint8)
            mask[:, : image.width // 2] = 255
            Image.fromarray(mask).save(data / f"{name.split('.')[0]}.mask.png")
    unet = script.make_unet
    for masked in (True, False):
        flags = [
            *train_flags(tmp_path, models, f"out-{masked}"),
            *transform_flags(tmp_path, "--max_train_steps=1"),
        ]
        if not masked:
            for path in data.glob("*.mask.png"):
                path.unlink()
        train(*flags)
        losses.append(metrics(tmp_path / f"out-{masked}")[0]["loss"])
    # the mean is taken over all pixels, masked ones too
    assert script.make_unet is unet and 0.3 < losses[0] / losses[1] < 0.7


@pytest.mark.ci
@pytest.mark.parametrize("num_processes, source", [
    (1, "cache"),
    pytest.param(1, "images", marks=pytest.mark.long),
    pytest.param(2, "cache", marks=pytest.mark.long),
    pytest.param(2, "images", marks=pytest.mark.long),
])  # fmt: skip
def test_bucketed_run_stopped_and_resumed_is_bit_identical(tmp_path, data, source, num_processes):
    models = make_models(tmp_path)
    if source == "cache":
        given = [f"--latents_dir={make_cache(tmp_path, models)}", "--random_flip"]
    else:
        given = transform_flags(tmp_path)
    flags = [*train_flags(tmp_path, models), *given, "--checkpointing_steps=1", "--holdout=1"]

    for more in (
        f"--output_dir={tmp_path / 'whole'}",
        "--max_train_steps=3",
        "--resume_from_checkpoint=latest",
    ):
        train.fork(*flags, more, num_processes=num_processes)
    last = max(checkpoints(tmp_path / "whole"), key=lambda name: int(name[11:]))
    for name in ("unet", "unet_ema"):
        assert_same_weights(tmp_path / "whole" / last / name, tmp_path / "out" / last / name)
    losses = [
        [r["loss"] for r in metrics(tmp_path / name) if "loss" in r] for name in ("whole", "out")
    ]
    assert losses[0] == losses[1]


def test_resuming_with_another_batch_size_sees_each_bucketed_image_once(
    tmp_path, data, monkeypatch
):
    models, seen = make_models(tmp_path), []
    cache = make_cache(tmp_path, models)
    load = CachedLatents.__getitem__
    real = script.train_step

    def add_keys(dataset, keys):
        shapes = {tuple(dataset.sizes[row]) for _, row, _ in keys}
        assert len(shapes) == 1
        batch = load(dataset, keys)
        return {**batch, "keys": keys}

    def record_step(*args):
        *before, batches, step, seed, max_grad_norm, look = args
        taken = [next(batches) for _ in range(step.micro_batches)]
        seen.extend(key for batch in taken for key in batch["keys"] if key[2])
        return real(*before, iter(taken), step, seed, max_grad_norm, look)

    monkeypatch.setattr(CachedLatents, "__getitem__", add_keys)
    monkeypatch.setattr(script, "train_step", record_step)
    flags = [*train_flags(tmp_path, models), f"--latents_dir={cache}", "--checkpointing_steps=1"]
    train(*flags, "--max_train_steps=2")
    train(*flags, "--resume_from_checkpoint=latest", "--train_batch_size=3", "--max_train_steps=4")
    train(
        *flags,
        "--resume_from_checkpoint=latest",
        "--gradient_accumulation_steps=2",
        "--num_train_epochs=1",
    )
    assert sorted(row for _, row, _ in seen) == list(range(12)) and {
        epoch for epoch, _, _ in seen
    } == {0}


@pytest.mark.long
def test_auto_batch_size_find_lr_compile_and_samples_work_with_buckets(tmp_path, data):
    models = make_models(tmp_path)
    cache = make_cache(tmp_path, models, "--text_cache=ids")
    tried = []
    real = script.train_step
    given = [*train_flags(tmp_path, models), f"--latents_dir={cache}"]

    def record_step(*args):
        batches = list(args[4]) if not hasattr(args[4], "gi_frame") else args[4]
        # batches of the search for a batch size, which have the most pixels
        if isinstance(batches, list):
            tried.append(batches[0]["latents_shape"][1:])
            batches = iter(batches)
        return real(*args[:4], batches, *args[5:])

    with pytest.MonkeyPatch.context() as m:
        m.setattr(script, "train_step", record_step)
        train(*given, "--train_batch_size=auto", "--max_train_steps=1")
    assert tried and all(size == [8, 8] for size in tried)
    train(*given, "--find_lr", "--find_lr_steps=10", f"--output_dir={tmp_path / 'lr'}")
    assert (tmp_path / "lr/find_lr.json").exists()
    train(*given, "--compile=eager", "--max_train_steps=4", f"--output_dir={tmp_path / 'compiled'}")
    samples = ["--validation_prompts", "a digit", "--num_inference_steps=2"]
    train(*given, *samples, "--max_train_steps=4", f"--output_dir={tmp_path / 'plain'}")
    losses = [[r["loss"] for r in metrics(tmp_path / name)] for name in ("plain", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_mask_files_are_not_rows_and_bad_masks_are_named(tmp_path, data, capfd):
    models = make_models(tmp_path)
    Image.new("L", (7, 7)).save(data / "00.mask.png")
    (data / "03.mask.png").write_bytes(b"no image")
    cache = make_cache(tmp_path, models, "--max_skipped=0.5")
    rows = datasets.load_from_disk(str(cache))
    skipped = [json.loads(line) for line in (cache / "skipped.jsonl").read_text().splitlines()]
    assert [row["key"] for row in skipped] == ["00.png", "03.png"] and len(rows) == 10
    assert skipped[0]["reason"] == "its mask has 7 x 7 pixels, the image 24 x 20"
    assert skipped[1]["reason"] == "its mask can't be used: cannot identify image file"
    assert "files are not used" not in capfd.readouterr().out  # captions and masks are used
    # The same command finds a complete cache; a changed mask needs another cache
    before = (cache / "state.json").stat().st_mtime_ns
    make_cache(tmp_path, models, "--max_skipped=0.5")
    args = ["@" + str(cache / "run.args"), "--max_skipped=0.5", "--dataloader_num_workers=0"]
    precompute(*args, f"--output_dir={cache}")
    assert (cache / "state.json").stat().st_mtime_ns >= before
    os.utime(data / "06.mask.png", (1, 1))
    assert "source.fingerprint" in precompute.refused(
        *cache_flags(tmp_path, models, "--max_skipped=0.5")
    )


def test_masks_are_found_beside_images_listed_in_metadata(tmp_path, data):
    """`datasets` skips files that metadata do not name, such as the masks."""
    names = [f"{i:02}.png" for i in range(12)]
    (data / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": name, "text": "a"}) for name in names)
    )
    for path in data.glob("*.txt"):  # captions in two places are an error
        path.unlink()
    cache = make_cache(tmp_path, make_models(tmp_path), "--center_crop")
    rows = datasets.load_from_disk(str(cache))
    assert (
        rows["key"][:] == names
        and [len(set(mask)) > 1 for mask in rows["mask"][:]] == [True, False, False] * 4
    )


def test_mask_column_supplies_the_masks(tmp_path):
    make_masked(tmp_path / "data", masks=False)
    mask = Image.new("L", (24, 20), "black")
    image = Image.new("RGB", (24, 20), "red")
    rows = {"image": [image] * 3, "text": ["a digit"] * 3, "where": [mask, None, mask]}
    kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "where": datasets.Image()}
    (tmp_path / "rows").mkdir()
    datasets.Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(
        str(tmp_path / "rows/train.parquet")
    )
    models = make_models(tmp_path)
    cache = make_cache(
        tmp_path, models, f"--train_data_dir={tmp_path / 'rows'}", "--mask_column=where"
    )
    found = datasets.load_from_disk(str(cache))["mask"][:]
    assert [set(mask) for mask in found] == [{0}, {255}, {0}]


@pytest.mark.parametrize("flags, said", [
    (["--bucket_step=3"],
     "--bucket_step 3 must divide --resolution 16 and be a multiple of 2"),
    (["--bucket_step=6"], "--bucket_step 6 must divide"),
    (["--mask_column=nothing"],
     "has no column 'nothing', only image, text: choose with --mask_column"),
])  # fmt: skip
def test_bad_bucket_step_or_mask_column_is_refused(tmp_path, data, flags, said):
    assert said in precompute.refused(*cache_flags(tmp_path, make_models(tmp_path), *flags))
    assert not (tmp_path / "cache").exists()


def test_caches_with_different_buckets_are_refused(tmp_path, data):
    models = make_models(tmp_path)
    make_cache(tmp_path, models)
    assert "transform.bucket_step 4 -> 8" in precompute.refused(
        *cache_flags(tmp_path, models, "--bucket_step=8")
    )
    both = ["--use_aspect_ratio_buckets", "--latents_dir", str(tmp_path / "cache")]
    assert "--use_aspect_ratio_buckets does nothing with --latents_dir" in train.refused(
        *train_flags(tmp_path, models), *both, status=2
    )
    args = precompute_latents.parse_args([
        "--train_data_dir=.", "--use_aspect_ratio_buckets", "--vae_name_or_path=a",
        "--text_encoder_name_or_path=b",
    ])  # fmt: skip
    assert args.bucket_step == 64


def test_masks_of_caches_with_and_without_masks_flips_and_of_two_sizes(tmp_path, data):
    """An image has its own mask, mirrored with it, or a white one in a cache without masks."""
    models = f"--pretrained_model_name_or_path={make_models(tmp_path)}"
    make_masked(tmp_path / "without", masks=False)
    kinds = {
        "masked": ["data", "--resolution=8"],
        "both": ["data", "--resolution=16", "--random_flip"],
        "mirrored": ["without", "--resolution=8", "--random_flip"],
    }
    folders = [str(tmp_path / kind) for kind in kinds]
    for folder, (source, *own) in zip(folders, kinds.values(), strict=True):
        own = [*own, f"--train_data_dir={tmp_path / source}", "--dataloader_num_workers=0"]
        precompute(*precompute.flags(folder, *own, models, "--center_crop"))
    for order in itertools.permutations(folders):
        mixed = CachedLatents({folder: load_cache(folder) for folder in order}, 0, True)
        for number, folder in enumerate(order):
            rows = datasets.load_from_disk(folder).with_format("numpy")
            flips = []
            for epoch in range(4):
                batch = mixed[[(epoch, 12 * number + 3, 1.0)]]
                size = batch["latents_shape"][1:]
                expected = np.full(size, 255, np.uint8)
                if "mask" in rows.column_names:
                    expected = rows[3]["mask"].reshape(size)
                    assert len(np.unique(expected)) > 3
                flips += batch["flipped"].tolist()
                found = batch["mask"].numpy().reshape(size)
                assert np.array_equal(found, expected[:, ::-1] if flips[-1] else expected)
            assert any(flips) == (not folder.endswith("masked"))


def test_bucketed_cache_bytes_are_the_same_on_one_and_two_processes(tmp_path, data):
    models = make_models(tmp_path)
    one = make_cache(tmp_path, models)
    precompute.fork(*cache_flags(tmp_path, models, name="two"), num_processes=2)
    for path in one.glob("data-*"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    sizes = []

    def encode(encoders, pixel_values, real=encode_images):
        sizes.append(tuple(pixel_values.shape))
        return real(encoders, pixel_values)

    with pytest.MonkeyPatch.context() as m:
        patch(m, "encode_images", encode)
        make_cache(tmp_path, models, name="three")
    assert {size[2:] for size in sizes} >= {(16, 16), (20, 12), (12, 20)} and max(
        size[0] for size in sizes
    ) == 2


@pytest.mark.long
def test_accelerate_launch_trains_buckets_on_two_processes(tmp_path, data):
    models = make_models(tmp_path)
    cache = make_cache(tmp_path, models)
    env = {"ACCELERATE_USE_CPU": "true"}
    options = [
        "--multi_gpu",
        "--num_processes=2",
        "--main_process_port=0",
        "train_text_to_image.py",
    ]
    done = launch(*options, *train_flags(tmp_path, models), f"--latents_dir={cache}", env=env)
    assert done.returncode == 0, done.stderr
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in metrics(tmp_path / "out"))
