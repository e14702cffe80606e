"""Edits are called as the pipelines' own code calls them, to the bit."""

import json
import math

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import make_klein
from PIL import Image
from test_recorded import draw_noise, in_order, predict_as_pipeline

import precompute_latents
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_prompts, load_encoders
from diffusion_training.data.references import resize_reference
from diffusion_training.errors.sentences import Refused
from diffusion_training.families.opening import open_base
from diffusion_training.families.recorded.family import name_plain_pipeline
from diffusion_training.families.recorded.reference_latents import make_blanks
from diffusion_training.families.recording import record_family

MAKE = tiny_pipelines.EDIT | {"klein": make_klein}
LIMIT = 64  # tokens to which klein pads captions


def open_edit(folder, count):
    """(pipeline, its encoders), with so many references."""
    flags = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
    flags += [f"--max_sequence_length={LIMIT}"] * ("klein" in folder.name)
    if count:
        flags += ["--conditioning_image_column", *map(str, range(count))]
    base = open_base(
        precompute_latents.parse_args(flags), num_references=count, record=record_family
    )
    assert base.num_references == count
    encoders = load_encoders(base, torch.float32)
    return getattr(diffusers, base.family.pipeline).from_pretrained(folder), encoders


def draw_images(sizes):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8)) for size in sizes]


def encode(encoders, caption, images):
    tokens = tokenize(encoders.tokenizers, [caption])
    if encoders.family.reads_references:
        tokens["references"] = [images]
    prompts = dict(encode_prompts(encoders, tokens))
    with torch.no_grad():
        latents = encoders.family.encode_references(encoders.vae, [images])
    for number, (image, found) in enumerate(zip(images, latents, strict=True)):
        prompts[f"reference_{number}"] = found
        prompts[f"reference_{number}_size"] = torch.empty(1, 0, image.height, image.width)
    return prompts


def list_cases():
    """(pipeline, number of references); one of each mechanism runs in CI."""
    single = ("kontext", "qwen_edit")  # they take one reference
    for name in MAKE:
        for count in (1, 2) if name not in single else (1,):
            is_quick = (name, count) in {("kontext", 1), ("klein", 2)}
            yield pytest.param(name, count, marks=() if is_quick else pytest.mark.long)


@pytest.mark.parametrize("name, count", [*list_cases()])
@torch.no_grad()
def test_an_edit_has_the_bits_of_the_pipeline(tmp_path, name, count, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    monkeypatch.setattr("test_recorded.SIDE", 64)
    pipeline, encoders = open_edit(MAKE[name](tmp_path / name), count)
    family = encoders.family
    images = draw_images([(64, 64), (64, 96)][:count])
    noise, time = draw_noise(encoders, 1), torch.tensor([0.5])
    inputs = {"image": images} | family.size_args(64, 64)
    inputs |= {"max_sequence_length": LIMIT} if name == "klein" else {}
    alone = []
    for caption in ("a digit two", "the number three, drawn by hand"):
        prompts = encode(encoders, caption, images)
        ours = family.predict(pipeline.transformer, noise, time, prompts)
        theirs = predict_as_pipeline(
            pipeline, family, noise, caption, 0.5, monkeypatch, **inputs
        )  # fmt: skip
        theirs = in_order(family, noise, theirs).float()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        alone.append((prompts, ours))

    # two rows of a batch, each with its references, are as each alone
    (one, first), (two, _) = alone
    two["reference_0"] = -two["reference_0"]
    second = family.predict(pipeline.transformer, noise, time, two)
    assert (second - alone[1][1]).abs().max() > 1e-3
    both = {key: torch.cat([one[key], two[key]]) for key in one}
    together = family.predict(
        pipeline.transformer, noise.repeat(2, 1, 1, 1), time.repeat(2), both
    )  # fmt: skip
    torch.testing.assert_close(together, torch.cat([first, second]), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
@torch.no_grad()
def test_an_edit_of_a_true_size_has_the_bits_of_the_pipeline(tmp_path, name, monkeypatch):
    """One reference is given to the pipeline as an image, as its users give it."""
    monkeypatch.setattr("test_recorded.SIDE", 256)
    folder = tiny_pipelines.give_true_downscale(MAKE[name](tmp_path / name))
    pipeline, encoders = open_edit(folder, 1)
    family = encoders.family
    side = family.choose_reference_side(1024, 1)
    assert side == 1024
    images, caption, noise = draw_images([(side, side)]), "a digit two", draw_noise(encoders, 1)
    prompts = encode(encoders, caption, images)
    ours = family.predict(pipeline.transformer, noise, torch.tensor([0.5]), prompts)
    inputs = {"image": images[0]} | family.size_args(256, 256)
    inputs |= {"max_sequence_length": LIMIT} if name == "klein" else {}
    theirs = predict_as_pipeline(pipeline, family, noise, caption, 0.5, monkeypatch, **inputs)
    theirs = in_order(family, noise, theirs).float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("qwen_edit_plus", "klein") else pytest.param(n, marks=pytest.mark.long)
        for n in MAKE
    ],
)
def test_a_reference_of_another_size_gets_the_pipelines_own(tmp_path, name, capsys):
    """Up to a pixel in its ratio. Only sizes are computed here, no weights."""
    folder = tiny_pipelines.give_true_downscale(MAKE[name](tmp_path / name))
    _, encoders = open_edit(folder, 1)
    family = encoders.family
    side = family.choose_reference_side(1024, 1)
    # 4:5 lies between two ratios of Kontext, and its rounding to 16 pixels decides
    portrait = (1500, 1080) if name == "kontext" else (1350, 1080)
    for height, width in ((3000, 4000), portrait, (480, 640), (600, 3600)):
        stored = torch.zeros(3, height, width, dtype=torch.uint8)
        (pixels,) = family.trace_references(make_blanks([(height, width)])).pixels
        given = resize_reference(stored, side, "bicubic").shape[1:]
        assert given == (480, 640) or given[0] * given[1] > 1e6
        (size,) = family.measure_references(make_blanks([given]))
        assert size == (*pixels.shape[-2:],)
        stretch = abs(math.log(size[0] / size[1] * width / height))
        assert stretch < 0.02 or name == "kontext"  # which has sizes of its own
        # so a call is recorded with a reference of this size
        assert family.measure_references(make_blanks([size])) == [size]
    assert "A reference of the ratio 2508:418 is longer than 4:1" in capsys.readouterr().out


def test_a_reference_that_the_pipeline_refuses_is_named_with_its_size(tmp_path, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    _, encoders = open_edit(MAKE["klein"](tmp_path / "klein"), 1)
    said = "can't take references of 128 x 32 pixels: Image too small: "
    with pytest.raises(Refused, match=said):
        encoders.family.encode_references(encoders.vae, [make_blanks([(32, 128)])])


MIXING = diffusers.FluxImg2ImgPipeline.__module__


class OtherPipeline(diffusers.FluxKontextPipeline):
    """It needs references, has another name for them, and raises errors of its own."""

    def __call__(self, prompt=None, height=None, width=None, num_inference_steps=2,
                 guidance_scale=1.0, output_type="pil", image=None, images=None):  # fmt: skip
        if image is not None or images is None:
            raise ZeroDivisionError("it wants images, and nothing else")
        return super().__call__(
            images, prompt, height=height, width=width, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, output_type=output_type, max_area=height * width,
        )  # fmt: skip


@pytest.fixture
def other(tmp_path, monkeypatch):
    """The folder of a pipeline of this class."""
    tiny_pipelines.make_small(monkeypatch)
    monkeypatch.setattr(diffusers, "OtherPipeline", OtherPipeline, raising=False)
    MAKE["kontext"](tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "OtherPipeline"}))
    return tmp_path


@torch.no_grad()
def test_references_are_given_by_the_name_that_the_pipeline_has(other):
    _, encoders = open_edit(other, 1)
    family = encoders.family
    found = {"count": 1, "are_needed": True, "are_read": False, "name": "images"}
    assert family.findings["references"] == found
    assert family.image_argument == "images" and "named references" in family.features
    again = family.restore_findings({"recorded": json.loads(json.dumps(family.findings))})
    assert again.image_argument == "images" and again.needs_references
    images, noise, time = draw_images([(64, 64)]), torch.randn(1, 4, 8, 8), torch.tensor([0.5])
    prompts = encode(encoders, "a digit", images)
    model = diffusers.FluxTransformer2DModel.from_pretrained(other, subfolder="transformer")
    one = family.predict(model, noise, time, prompts)
    prompts["reference_0"] = -prompts["reference_0"]
    assert (family.predict(model, noise, time, prompts) - one).abs().max() > 1e-3


@pytest.mark.parametrize(
    "name, plain",
    [
        ("FluxImg2Img", "Flux"),
        ("FluxKontextInpaint", "FluxKontext"),
        ("StableDiffusion3PAG", "StableDiffusion3"),
        ("QwenImageControlNetInpaint", "QwenImage"),
    ],
)
def test_a_pipeline_of_another_task_names_the_one_to_train(other, name, plain):
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": f"{name}Pipeline"}))
    said = f"a {name}Pipeline draws for a task of its own with the weights of a "
    with pytest.raises(Refused, match=f"{said}{plain}Pipeline: train"):
        open_edit(other, 0)


def test_weights_of_a_control_model_are_for_no_other_pipeline():
    assert name_plain_pipeline("FluxControlImg2ImgPipeline") is None
    assert name_plain_pipeline("FluxPipeline") is None


def test_a_pipeline_that_needs_references_says_so_or_why_they_fail(other, monkeypatch):
    with pytest.raises(Refused, match="a OtherPipeline edits images: give those that edits start"):
        open_edit(other, 0)
    index = json.loads((other / "model_index.json").read_text())
    # it starts from the image and noise, as no edit does
    kind = type("MixingPipeline", (diffusers.FluxImg2ImgPipeline,), {"__module__": MIXING})
    monkeypatch.setattr(diffusers, "MixingPipeline", kind, raising=False)
    index["_class_name"] = "MixingPipeline"
    (other / "model_index.json").write_text(json.dumps(index))
    for count in (0, 1):
        with pytest.raises(Refused) as stop:
            open_edit(other, count)
        said = str(stop.value)
        assert "without an image, its code raises an error" in said
        assert "with image=, its denoiser does not get references beside the noise" in said


@pytest.mark.parametrize("name", ["kontext", pytest.param("qwen_edit", marks=pytest.mark.long)])
def test_more_references_than_a_pipeline_takes_are_refused_by_name(tmp_path, name, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    with pytest.raises(Refused, match="Pipeline can't be trained here: it .* 2 ref|only one"):
        open_edit(MAKE[name](tmp_path), 2)
