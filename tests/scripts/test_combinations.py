"""SDXL, LoRA, several image sizes, masks, tokens, bfloat16, 8-bit AdamW: together and in pairs."""

import functools
import itertools
import json

import datasets
import numpy as np
import pytest
import torch
from conftest import Script, make_masked, make_models, make_sdxl, metrics
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file
from test_train_lora import FILE, contents

from diffusion_training.draws import step_seed

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")
KOHYA = "pytorch_lora_weights_kohya.safetensors"
# All features together. EMA needs no flag.
ALL = ["--rank=4", "--lora_alpha=8", "--mixed_precision=bf16", "--optimizer=adamw8bit",
       "--gradient_checkpointing", "--random_flip", "--caption_dropout=0.3",
       "--gradient_accumulation_steps=2", "--train_batch_size=2"]  # fmt: skip


def make_cache(folder, name, *more):
    """A cache of images of four sizes, a third of them with a mask."""
    precompute(*precompute.flags(
        folder / name, f"--train_data_dir={folder / 'data'}",
        f"--pretrained_model_name_or_path={folder / 'sdxl'}", f"--cache_dir={folder / 'datasets'}",
        "--rows_per_shard=5", "--batch_size=3", *more,
    ))  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_sdxl(folder)
    make_masked(folder / "data")
    make_cache(
        folder, "cache", "--bucket_step=4", "--random_flip", "--text_cache=ids", "--center_crop"
    )
    return folder


@pytest.fixture(autouse=True)
def eight_bits_for_small_tensors(monkeypatch):
    """Use 8 bits for small tensors too: bitsandbytes keeps 32 bits below 4,096 numbers."""
    import bitsandbytes

    few = functools.partial(bitsandbytes.optim.AdamW8bit, min_8bit_size=16)
    monkeypatch.setattr(bitsandbytes.optim, "AdamW8bit", few)


@pytest.fixture
def flags(tmp_path, inputs):
    """Steps of four images out of twelve; later flags override these."""
    return train.flags(
        tmp_path / "out", f"--pretrained_model_name_or_path={inputs / 'sdxl'}",
        "--max_train_steps=4", "--learning_rate=1e-2", "--lr_warmup_steps=0",
        "--num_validation_images=1", "--guidance_scale=3",
    )  # fmt: skip


@pytest.fixture
def cache(inputs):
    return [f"--latents_dir={inputs / 'cache'}"]


@pytest.fixture
def images(inputs):
    return [
        f"--train_data_dir={inputs / 'data'}", f"--cache_dir={inputs / 'datasets'}",
        "--resolution=16", "--bucket_step=4", "--center_crop", "--dataloader_num_workers=0",
    ]  # fmt: skip


def test_dry_run_row_size_matches_the_cache(inputs, capfd):
    """Latents of 8 x 8, plain and mirrored, tokens of two encoders, sizes, and a mask.

    Checksum, key and text are added to these.
    """
    flags = ["--bucket_step=4", "--random_flip", "--text_cache=ids", "--dry_run"]
    for more, mask, wanted in ((flags, 64, 8 + 16), (flags[1:], 64, 16)):
        make_cache(inputs, "none", *more)
        each = 2 * 2 * 8 * 64 + 2 * 4 * 8 + wanted + mask
        said = f"12 rows of {'up to ' * (wanted > 16)}{each / 1e3:.2f}kB (64.0B for the caption)"
        assert said in capfd.readouterr().out
    rows = datasets.load_from_disk(str(inputs / "cache"))
    square = rows.with_format("arrow")[0]
    names = [name for name in square.column_names if name not in ("text", "key", "checksum")]
    assert (
        sum(square[name].combine_chunks().flatten().nbytes for name in names)
        == 2 * 2 * 8 * 64 + 64 + 24 + 64
    )


@pytest.mark.parametrize("num_processes, source, more", [
    (1, "cache", []),
    pytest.param(2, "cache", ["--lora_dropout=0.1"], marks=pytest.mark.long),
    pytest.param(1, "images", ["--use_dora"], marks=pytest.mark.long),
])  # fmt: skip
def test_all_features_together_resume_bit_identically(
    tmp_path, request, flags, num_processes, source, more
):
    flags = [
        *flags, *request.getfixturevalue(source), *ALL, *more, "--holdout=2",
        "--checkpointing_steps=1", "--validation_prompts=a digit", "--validation_epochs=1",
    ]  # fmt: skip
    # the same folder name, because the files contain it
    whole, rest = tmp_path / "whole/lora", tmp_path / "rest/lora"
    again = f"--resume_from_checkpoint={whole / 'checkpoint-2'}"
    for argv in ([f"--output_dir={whole}"], [f"--output_dir={rest}", again]):
        train.fork(*flags, *argv, num_processes=num_processes)
    one, other = contents(whole), contents(rest)
    early = ("checkpoint-1/", "checkpoint-2/", "samples/step-0000000.png")
    # Accelerate copies the optimizer's state, so bitsandbytes' shared table is saved repeatedly
    if num_processes > 1:
        early += ("checkpoint-3/optimizer.bin", "checkpoint-4/optimizer.bin")
    assert FILE in other and any(name.endswith(".png") for name in other)
    assert {name for name in one if one[name] != other.get(name)} == {
        name for name in one if name.startswith(early)
    }
    assert "uint8" in str(
        torch.load(whole / "checkpoint-3/optimizer.bin", weights_only=True)["state"]
    )
    records = [[r for r in metrics(folder) if r["step"] > 2] for folder in (whole, rest)]
    assert len(records[1]) >= 3
    for record, same in zip(*records, strict=True):
        assert record == same or all(
            record[key] == same[key] for key in record.keys() & {"loss", "held_out_loss"}
        )


def test_all_features_together_train_alike_from_cache_and_images(tmp_path, flags, cache, images):
    found = []
    for name, source in (("cache", cache), ("images", images)):
        train(*flags, *source, *ALL, "--holdout=2", f"--output_dir={tmp_path / name}")
        found.append(metrics(tmp_path / name))
    for name in ("loss", "grad_norm", "held_out_loss"):
        one, other = ([record[name] for record in records if name in record] for records in found)
        assert len(one) >= 1 and one == pytest.approx(other, rel=2e-2), name


@pytest.mark.parametrize("more", [[], pytest.param(["--use_dora"], marks=pytest.mark.long)])
def test_sdxl_lora_file_redraws_the_samples_in_the_pipeline(
    tmp_path, flags, cache, inputs, more, monkeypatch
):
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)  # no rounding
    files = [FILE] if more else [FILE, KOHYA]  # diffusers reads these
    train(*flags, *cache, *ALL, *more, "--validation_prompts=a digit one", "--mixed_precision=no")
    out = tmp_path / "out"
    assert {path.name for path in out.glob("*.safetensors")} == {FILE, KOHYA}
    grid = np.array(Image.open(out / "samples/step-0000004.png").convert("RGB")).astype(int)
    differences = []
    for adapter in (None, *files):
        pipeline = StableDiffusionXLPipeline.from_pretrained(inputs / "sdxl")
        if adapter:
            pipeline.load_lora_weights(out, weight_name=adapter)
        generator = torch.Generator().manual_seed(step_seed("sample", 0, 0))
        image = pipeline("a digit one", height=16, width=16, generator=generator, guidance_scale=3,
                         num_inference_steps=2).images[0]  # fmt: skip
        image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
        differences.append(np.abs(grid[:64, -68:-4] - image).max())
    assert differences[0] > 20 and max(differences[1:]) <= 1
    card = (out / "README.md").read_text()
    assert 'from_pretrained("sdxl", ' in card and 'load_lora_weights("out")' in card
    # the names that ComfyUI uses for SDXL; sd-scripts converts them to its own
    if KOHYA in files:
        weights = load_file(out / KOHYA)
        layers = {name.split(".")[0] for name in weights}
        plain = {name.rsplit(".lora_", 1)[0] for name in load_file(out / FILE)}
        assert layers == {
            f"lora_unet_{name.removeprefix('unet.').replace('.', '_')}" for name in plain
        }
        kinds = {name.split(".", 1)[1] for name in weights}
        assert kinds == {"lora_down.weight", "lora_up.weight", "alpha"}
        assert {value.item() for name, value in weights.items() if name.endswith("alpha")} == {4}


@pytest.mark.long
def test_find_lr_and_auto_batch_size_work_with_all_features(tmp_path, flags, cache, images):
    train(*flags, *cache, *ALL, "--find_lr", "--find_lr_steps=10")
    assert 0 < json.loads((tmp_path / "out/find_lr.json").read_text())["suggestion"] < 1
    auto = [
        "--train_batch_size=auto",
        "--gradient_accumulation_steps=1",
        "--total_batch_size=3",
        "--max_train_steps=1",
    ]
    train(*flags, *images, *ALL, *auto, f"--output_dir={tmp_path / 'auto'}")
    settings = json.loads((tmp_path / "auto/checkpoint-1/trainer_state.json").read_text())[
        "settings"
    ]
    assert settings["train_batch_size"] == 3


# ------------------------------------------------------------------- pairs

FLAGS = {
    "model": {"sd": [], "sdxl": []},
    "trains": {
        "whole": [], "lora": ["--rank=2"],
        "dora": ["--rank=2", "--use_dora"],
    },
    "source": {
        "images": [], "ids": [], "embeddings": [], "mixed": ["--latents_weights", "1", "0.5"],
    },
    "shape": {"square": [], "buckets": []},
    "mask": {"plain": [], "masks": []},
    "precision": {"no": [], "bf16": ["--mixed_precision=bf16"]},
    "optimizer": {name: [f"--optimizer={name}"] for name in ("adamw", "adamw8bit", "adafactor")},
    "memory": {"fast": [], "checkpointed": ["--gradient_checkpointing"]},
    "objective": {
        "epsilon": [],
        "min-snr": ["--snr_gamma=5", "--noise_offset=0.1", "--input_perturbation=0.1"],
        "zero-snr": ["--prediction_type=v_prediction", "--rescale_betas_zero_snr"],
    },
    "average": {"ema": [], "no-ema": ["--no-use_ema"]},
    "batch": {
        "2": ["--train_batch_size=2"], "auto": ["--train_batch_size=auto", "--total_batch_size=4"],
        "accumulated": ["--train_batch_size=1", "--gradient_accumulation_steps=3"],
    },
    "looks": {
        "blind": [],
        "looks": ["--holdout=2", "--validation_prompts=a digit", "--validation_steps=1"],
    },
}  # fmt: skip
TABLE = """
    sd dora mixed buckets plain bf16 adamw fast zero-snr no-ema 2 looks
    sdxl lora ids square masks bf16 adafactor checkpointed epsilon ema auto blind
    sdxl whole embeddings buckets masks no adamw8bit fast min-snr ema accumulated looks
    sd lora images square plain no adamw8bit checkpointed min-snr no-ema accumulated blind
    sd whole ids buckets plain no adafactor fast epsilon no-ema auto looks
    sdxl whole mixed square masks no adamw checkpointed zero-snr ema 2 blind
    sd dora embeddings square masks bf16 adafactor checkpointed epsilon no-ema accumulated looks
    sdxl dora images buckets plain bf16 adamw fast min-snr ema auto blind
    sd lora images square masks no adafactor fast zero-snr ema 2 looks
    sdxl lora embeddings buckets plain bf16 adamw8bit checkpointed zero-snr no-ema auto blind
    sdxl dora ids square masks no adamw8bit fast min-snr no-ema 2 blind
    sdxl lora ids square plain no adamw fast zero-snr no-ema accumulated looks
    sdxl whole images square masks bf16 adamw8bit checkpointed epsilon no-ema 2 blind
    sdxl lora mixed square plain bf16 adafactor fast min-snr ema accumulated blind
    sdxl dora mixed buckets masks bf16 adamw8bit fast epsilon no-ema auto blind
    sdxl whole embeddings buckets plain no adamw checkpointed epsilon no-ema 2 looks
"""
RUNS = [dict(zip(FLAGS, line.split(), strict=True)) for line in TABLE.strip().splitlines()]


def test_feature_table_contains_every_pair():
    for (one, ones), (other, others) in itertools.combinations(FLAGS.items(), 2):
        assert {(run[one], run[other]) for run in RUNS} == {*itertools.product(ones, others)}, (
            one,
            other,
        )


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The flags of a run's data. A cache is made at its first use."""
    folder = tmp_path_factory.mktemp("pairs")
    for make in (make_models, make_sdxl):
        (folder / make.__name__).mkdir()
        make(folder / make.__name__)
    make_masked(folder / "plain", 6, masks=False)
    make_masked(folder / "masks", 6)

    def find(run):
        model = folder / ("make_models/sd" if run["model"] == "sd" else "make_sdxl/sdxl")
        source = [f"--train_data_dir={folder / run['mask']}", "--resolution=16", "--random_flip"]
        source += [f"--cache_dir={folder / 'datasets'}", "--dataloader_num_workers=0"]
        source += ["--bucket_step=4"] * (run["shape"] == "buckets")
        found = [f"--pretrained_model_name_or_path={model}"]
        if run["source"] == "images":
            return found + source
        paths = []
        for kind in ("embeddings", "ids") if run["source"] == "mixed" else [run["source"]]:
            kind, more = (
                ("embeddings", ["--seed=1"])
                if run["source"] == "mixed" and kind == "ids"
                else (kind, [])
            )
            path = folder / "-".join([run["model"], run["mask"], run["shape"], kind, *more])
            if not path.exists():
                argv = [*found, *source, f"--text_cache={kind}", f"--output_dir={path}", *more]
                precompute(*argv)
            paths.append(str(path))
        return [*found, "--random_flip", "--latents_dir", *paths]

    return find


# The first four rows have each value of each column, and all rows have each pair of two values
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=[pytest.mark.long] * (number >= 6), id="-".join(run.values()))
        for number, run in enumerate(RUNS)
    ],
)
def test_each_row_of_the_feature_table_trains(tmp_path, run, caches):
    out = tmp_path / "out"
    flags = itertools.chain.from_iterable(FLAGS[name][kind] for name, kind in run.items())
    train(
        *train.flags(
            out,
            *caches(run),
            *flags,
            *"--max_train_steps=2 --learning_rate=1e-2 --lr_warmup_steps=0".split(),
            *"--num_inference_steps=1 --num_validation_images=1".split(),
        )
    )
    records = metrics(out)
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert all(
        np.isfinite(value)
        for record in records
        for value in record.values()
        if isinstance(value, float)
    )
    assert any("held_out_loss" in record for record in records) == (run["looks"] == "looks")
    if run["trains"] == "whole":
        DiffusionPipeline.from_pretrained(out)
    else:
        assert all(
            value.any() for name, value in load_file(out / FILE).items() if ".lora_B." in name
        )
