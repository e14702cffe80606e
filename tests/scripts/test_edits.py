"""Training on pairs of images: references in a cache, edits of several pipelines."""

import io
import json
import re

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_pipelines
import torch
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    make_klein,
    make_models,
    make_z_image,
    metrics,
)
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps

from diffusion_training.training.showing.captioned_samples import keep_before

precompute, train = Script("precompute_latents"), Script("train_flow")
SIDE = 64  # pixels; FLUX.2 klein takes no smaller references
STEPS = 800  # of the demo
MAKE = tiny_pipelines.EDIT | {"klein": make_klein}


def make_pairs(folder, count=4, size=(SIDE, SIDE), reference=(SIDE, SIDE)):
    """Random colours, and beside each image its inverse as a reference. Sizes: (width, height)."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).resize(size, Image.NEAREST).save(folder / f"{i}.png")
        inverse = Image.fromarray(255 - pixels).resize(reference, Image.NEAREST)
        inverse.save(folder / f"{i}.control.png")
        (folder / f"{i}.txt").write_text("one" if i % 2 else "a digit two")
    return folder


class Pairs:
    """A tiny pipeline, pairs of images, and a cache of them."""

    def __init__(self, folder, name):
        self.folder = folder
        self.images = make_pairs(folder / "pairs")
        self.cache = folder / "cache"
        self.base = f"--pretrained_model_name_or_path={MAKE[name](folder / 'base')}"
        self.data = [f"--train_data_dir={self.images}", f"--resolution={SIDE}"]
        self.limit = ["--max_sequence_length=64"] * (name == "klein")  # to which it pads captions
        self.data += ["--dataloader_num_workers=0", *self.limit]

    def precompute(self, *flags):
        precompute(self.base, *self.data, f"--output_dir={self.cache}", *flags)
        return json.loads((self.cache / "cache.json").read_text())

    def flags(self, output, *more):
        return [
            self.base,
            f"--latents_dir={self.cache}",
            f"--output_dir={self.folder / output}",
            "--train_batch_size=2",
            "--max_train_steps=3",
            "--caption_dropout=0",
            "--num_inference_steps=2",
            "--report_to=none",
            *self.limit,
            *more,
        ]

    def samples(self):
        reference = str(self.images / "0.control.png")
        return ["--validation_prompts", "one", "--validation_images", reference]


each = pytest.mark.parametrize(
    "name",
    [name if name == "klein" else pytest.param(name, marks=pytest.mark.long) for name in MAKE],
)


@each
@pytest.mark.usefixtures("without_figures")
def test_an_edit_lora_trains_draws_and_is_read_by_the_pipeline(tmp_path, name, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    pairs = Pairs(tmp_path, name)
    settings = pairs.precompute()
    assert settings["references"]["count"] == 1 and settings["rows"] == 4
    more = ["--rank=2", "--learning_rate=0.1", "--holdout=1", "--num_validation_images=1"]
    train(*pairs.flags("lora", *more, *pairs.samples()))
    assert [record for record in metrics(tmp_path / "lora") if "held_out_loss" in record]
    grid = Image.open(tmp_path / "lora/samples/step-0000003.png")
    assert grid.width > 3 * SIDE  # reference, before, after
    card = (tmp_path / "lora/README.md").read_text()
    assert re.search(r"image=load_image\(.*  # your image$", card, re.MULTILINE)
    assert "image-to-image" in card
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "base")
    pipeline.load_lora_weights(tmp_path / "lora")
    reference = Image.open(pairs.images / "0.control.png")
    size = {"height": SIDE, "width": SIDE} | ({"max_area": SIDE**2} if name == "kontext" else {})
    (drawn,) = pipeline(prompt="one", image=reference, num_inference_steps=2, **size).images
    assert drawn.size == (SIDE, SIDE)


# Qwen-Image-Edit's text encoder sees a reference of 1024 px, and has most tokens for a wide one
@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.usefixtures("without_figures")
def test_large_pairs_train_at_the_size_that_the_pipeline_gives_them(tmp_path, name):
    """Nothing is made small here but weights."""
    pairs = Pairs(tmp_path, name)
    tiny_pipelines.give_true_downscale(tmp_path / "base")
    for path, size in (("0.png", (1024, 1024)), ("1.png", (2000, 500))):
        for each in (path, path.replace(".", ".control.")):
            Image.open(pairs.images / each).resize(size).save(pairs.images / each)
    for extra in [*pairs.images.glob("2*"), *pairs.images.glob("3*")]:
        extra.unlink()
    # these two give a reference the size of what is drawn, the others 1024 px
    follows = name in ("klein", "flux2")
    pairs.data[1] = f"--resolution={128 if follows else SIDE}"
    settings = pairs.precompute("--bucket_step=64", "--batch_size=1")
    assert settings["rows"] == 2
    assert settings["references"]["side"] == (128 if follows else 1024)
    more = ["--rank=2", "--max_train_steps=1", "--train_batch_size=1", "--num_validation_images=1"]
    train(*pairs.flags("lora", *more, *pairs.samples()))
    assert list((tmp_path / "lora/samples").glob("step-*.png"))


def test_samples_from_before_training_are_shown_only_for_the_same_prompts(tmp_path):
    images = [np.full((4, 4, 3), value, np.uint8) for value in (1, 2)]
    assert keep_before(images, ["a", "b"], tmp_path, step=0) == []
    for shown in (images, images[:1]):
        before = keep_before([image + 9 for image in shown], ["a", "b"][: len(shown)], tmp_path, 3)
        assert np.array_equal(before, shown)
    assert keep_before(images, ["b", "a"], tmp_path, step=3) == []


def test_references_of_a_model_that_does_not_edit_end_in_a_sentence(tmp_path):
    """They would be dropped, and instructions be trained as captions."""
    images = make_pairs(tmp_path / "pairs")
    base = f"--pretrained_model_name_or_path={make_z_image(tmp_path / 'base')}"
    flags = [base, f"--train_data_dir={images}", "--resolution=16"]
    reason = "the images have references, which a ZImagePipeline can't be trained on: move photo"
    assert reason in precompute.refused(*flags, f"--output_dir={tmp_path / 'cache'}")
    assert reason in train.refused(*flags, f"--output_dir={tmp_path / 'out'}", "--report_to=none")
    before = ["--conditioning_data_dir", str(tmp_path)]
    said = precompute.refused(*flags, *before, f"--output_dir={tmp_path / 'cache'}")
    assert "leave out the flag that gives them" in said


@pytest.mark.parametrize("more, reason", [
    ([], "the images have references, which a StableDiffusionPipeline can't be trained on"),
    # a process of its own says why
    pytest.param(
        ["--cache_latents"], "precompute_latents.py could not encode the images",
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_a_trainer_without_flags_for_references_refuses_them(tmp_path, more, reason):
    flags = [f"--pretrained_model_name_or_path={make_models(tmp_path)}", "--resolution=16"]
    flags += [f"--train_data_dir={make_pairs(tmp_path / 'pairs')}", f"--cache_dir={tmp_path}"]
    said = Script("train_text_to_image").refused(*flags, f"--output_dir={tmp_path / 'out'}", *more)
    assert reason in said and not (tmp_path / "out/unet").exists()


@pytest.mark.long
def test_edits_may_share_one_instruction(tmp_path, monkeypatch, capsys):
    """Equal captions are suspicious only without references."""
    tiny_pipelines.make_small(monkeypatch)
    pairs = Pairs(tmp_path, "klein")
    for path in pairs.images.glob("*.txt"):
        path.write_text("invert it")
    pairs.precompute()
    assert "All captions that were checked" not in capsys.readouterr().out
    for path in pairs.images.glob("*.control.png"):
        path.unlink()
    precompute(pairs.base, *pairs.data, f"--output_dir={tmp_path / 'other'}")
    assert "All captions that were checked are 'invert it'" in capsys.readouterr().out


@pytest.mark.long
@each
@pytest.mark.usefixtures("without_figures")
def test_a_killed_run_of_edits_resumes_to_the_same_bits(tmp_path, name, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    pairs = Pairs(tmp_path, name)
    pairs.precompute()
    more = ["--checkpointing_steps=1", *pairs.samples()]
    train.fork(*pairs.flags("whole", *more), num_processes=2)
    more += ["--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(tmp_path / "killed", *pairs.flags("killed", *more), num_processes=2)
    train.fork(*pairs.flags("killed", *more), num_processes=2)
    assert_same_weights(tmp_path / "whole/transformer", tmp_path / "killed/transformer")


EDITS = {"invert it": ImageOps.invert, "rotate it": lambda image: image.rotate(90)}


def make_digit_pairs(folder, rows):
    """Handwritten digits, each with its inverse and turned by 90 degrees, as pairs."""
    folder.mkdir()
    digits = pq.read_table(ROOT / "demo/digits/train.parquet")["image"].to_pylist()
    for row in rows:
        digit = Image.open(io.BytesIO(digits[row]["bytes"])).convert("RGB")
        digit = digit.resize((SIDE, SIDE), Image.BICUBIC)
        for word, edit in EDITS.items():
            name = f"{row}-{word.split()[0]}"
            edit(digit).save(folder / f"{name}.png")
            digit.save(folder / f"{name}.control.png")
            (folder / f"{name}.txt").write_text(word)
    return folder


def make_digit_pipeline(folder):
    """A FLUX.2 klein pipeline of 16 x 16 pixels per token, whose latents have unit variance."""
    pipeline = DiffusionPipeline.from_pretrained(make_klein(folder))
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
    )
    with torch.no_grad():  # a random VAE's latents would be mostly noise
        vae.quant_conv.weight[4:] = 0
        vae.quant_conv.bias[4:] = -20
    digits = pq.read_table(ROOT / "demo/digits/train.parquet")["image"].to_pylist()[300:332]
    pixels = [Image.open(io.BytesIO(each["bytes"])).convert("RGB") for each in digits]
    pixels += [ImageOps.invert(each) for each in pixels]
    pixels = [each.resize((SIDE, SIDE), Image.BICUBIC) for each in pixels]
    with torch.no_grad():
        latents = vae.encode(pipeline.image_processor.preprocess(pixels)).latent_dist.mode()
    latents = torch.nn.functional.pixel_unshuffle(latents, 2)
    vae.bn.running_mean.copy_(latents.mean(dim=(0, 2, 3)))
    vae.bn.running_var.copy_(latents.var(dim=(0, 2, 3)))
    pipeline.register_modules(vae=vae)
    pipeline.save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_digits_are_inverted_or_turned_as_the_caption_says(tmp_path):
    """A model from random weights learns both edits, scored by the nearest of three results."""
    pairs = Pairs(tmp_path, "klein")
    make_digit_pipeline(tmp_path / "base")
    pairs.images = make_digit_pairs(tmp_path / "digits", range(100))
    pairs.data[0] = f"--train_data_dir={pairs.images}"
    pairs.precompute()
    more = ["--train_batch_size=16", f"--max_train_steps={STEPS}", "--learning_rate=2e-3"]
    more += ["--lr_scheduler=cosine", "--lr_warmup_steps=50", "--shift=1"]
    train(*pairs.flags("out", *more))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    vae, mean = pipeline.vae, pipeline.vae.bn.running_mean.view(1, -1, 1, 1)
    std = (pipeline.vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps).sqrt()

    def scale(latents):
        return (torch.nn.functional.pixel_unshuffle(latents, 2) - mean) / std

    @torch.no_grad()
    def encode(image):
        pixels = pipeline.image_processor.preprocess(image)
        return scale(vae.encode(pixels).latent_dist.mode())

    right = []
    test = make_digit_pairs(tmp_path / "test", range(200, 210))
    for path in sorted(test.glob("*.control.png")):
        reference = Image.open(path)
        expected = [encode(each(reference)) for each in (*EDITS.values(), lambda image: image)]
        word = path.with_name(path.name.replace(".control.png", ".txt")).read_text()
        drawn = pipeline(
            prompt=word,
            image=reference,
            height=SIDE,
            width=SIDE,
            num_inference_steps=20,
            guidance_scale=1,
            max_sequence_length=64,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).images
        drawn = scale(drawn)
        errors = [(drawn - each).square().mean().item() for each in expected]
        right.append(min(range(3), key=errors.__getitem__) == [*EDITS].index(word))
    assert sum(right) >= 18, right  # of 20; 7 by chance
