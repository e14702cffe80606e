"""Stable Diffusion XL: its differences from Stable Diffusion, in both scripts.

A tiny pipeline is really loaded.
"""

import json
import re
import shlex
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    make_captioned,
    make_models,
    make_sdxl,
    metrics,
    patch,
)
from diffusers import DiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image

import precompute_latents
import train_text_to_image as script
from diffusion_training import shapes
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_images, encode_prompts, load_encoders
from diffusion_training.data.rows import load_rows
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.data.transforms import transform_row
from diffusion_training.draws import step_seed
from diffusion_training.families.opening import open_base
from diffusion_training.latents.batch_inputs import make_time_ids
from diffusion_training.latents.reader import load_cache
from diffusion_training.latents.settings import fingerprint_cache
from diffusion_training.latents.source import open_data
from diffusion_training.launch import accelerator_options, make_launch

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")


@pytest.fixture
def sdxl(tmp_path):
    """A tiny SDXL pipeline. Its second tokenizer pads with "!", like the published one."""
    folder = make_sdxl(tmp_path)
    change(folder / "tokenizer_2/tokenizer_config.json", pad_token="!")
    return folder


@pytest.fixture
def flags(tmp_path, sdxl):
    """Six steps on six images; later flags override these."""
    make_captioned(tmp_path / "images", 6)
    return train.flags(
        tmp_path / "out",
        f"--pretrained_model_name_or_path={sdxl}",
        "--num_validation_images=1",
        "--guidance_scale=3",
    )


def change(path, **values):
    """Set entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def make_cache(tmp_path, *argv, name="cache", sdxl="sdxl"):
    precompute(
        *precompute.flags(
            tmp_path / name,
            f"--train_data_dir={tmp_path / 'images'}",
            f"--pretrained_model_name_or_path={tmp_path / sdxl}",
            "--rows_per_shard=4",
            "--batch_size=3",
            *argv,
        )
    )
    return f"--latents_dir={tmp_path / name}"


@pytest.fixture
def given(monkeypatch):
    """[(latents, condition)] that the U-Net gets in every micro-batch."""
    seen, compute_loss = [], script.compute_loss

    def record(args, noise_scheduler, objective, models, prepared, weight):
        seen.append((prepared.clean, prepared.condition))
        return compute_loss(args, noise_scheduler, objective, models, prepared, weight)

    monkeypatch.setattr(script, "compute_loss", record)
    return seen


# ------------------------------------------------------------------- what the U-Net is given


def test_sdxl_embeddings_equal_the_pipelines(sdxl, flags, images):
    captions = ["a digit one", "", "two " * 50, "the number three, drawn by hand"]
    encoders = load_encoders(open_base(script.parse_args(images)), torch.float32)
    ids = tokenize(encoders.tokenizers, captions)
    assert ids["input_ids"].shape == ids["input_ids_2"].shape and not torch.equal(*ids.values())
    with torch.no_grad():
        ours = encode_prompts(encoders, ids)
        pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl)
        for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):
            tokenizer.model_max_length = encoders.tokenizers[0].model_max_length
        embeds, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
    assert embeds.shape == (4, 8, 48) and pooled.shape == (4, 24)
    assert torch.equal(ours["prompt_embeds"], embeds) and torch.equal(
        ours["pooled_prompt_embeds"], pooled
    )


SIZES = [(40, 16), (16, 40), (80, 32), (32, 80), (16, 16), (120, 48), (44, 16), (24, 64)]


def make_ramps(folder):
    """Images with red = 2 x and green = 2 y. One is stored rotated, with an EXIF rotation."""
    folder.mkdir()
    lines = []
    for i, (width, height) in enumerate(SIZES):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[..., 0], pixels[..., 1] = 2 * np.arange(width), 2 * np.arange(height)[:, None]
        image, exif = Image.fromarray(pixels), Image.Exif()
        if i == 7:
            image, exif[0x0112] = image.transpose(Image.ROTATE_90), 6
        image.save(folder / f"{i}.png", exif=exif)
        lines.append(json.dumps({"file_name": f"{i}.png", "text": f"a digit {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("source", ["images", "cache"])
def test_sdxl_crop_conditioning_matches_the_pixels(
    tmp_path, images, flags, source, given, monkeypatch
):
    """Mirrored crops too, which diffusers' own script gets wrong.

    The first pixel of each crop shows its position in the image.
    """
    shutil.rmtree(tmp_path / "images")
    make_ramps(tmp_path / "images")
    change(tmp_path / "sdxl/vae/config.json", scaling_factor=1.0)

    def copy_pixels(encoders, pixel_values):  # means are every other pixel, deviations 0
        means = pixel_values[:, :, ::2, ::2].float()
        return torch.cat([means, torch.zeros(len(means), 5, *means.shape[2:])], dim=1)

    patch(monkeypatch, "encode_images", copy_pixels)
    if source == "cache":
        images = [*flags, make_cache(tmp_path, "--random_flip")]
        args = precompute_latents.parse_args([f"@{tmp_path / 'cache/run.args'}"])
        found = load_rows(args, others=["text"])
        transform = make_transform(args, found.column, None, None, 3, args.resolution)
        shards = load_cache(tmp_path / "cache").shards
        cached = pa.Table.from_batches(shards)
        for i, (width, height) in enumerate(SIZES):
            item = transform_row(i, 0, found.rows[i], transform)
            assert cached["original_size"][i].as_py() == [*item["original_size"]] == [height, width]
            assert cached["crop_top_left"][i].as_py() == [*item["crop_top_left"]]
    train(*images, "--random_flip", "--num_train_epochs=3")
    seen = set()
    for latents, condition in given:
        height, width, top, left, *target = condition["time_ids"][0].tolist()
        assert target == [16, 16] and (width, height) in SIZES
        # The colors are those of the first row
        scale, (red, green) = min(width, height) / 16, latents[0, :2, 0].tolist()
        mirrored = red[0] > red[1]
        x = width / scale - 1 - left if mirrored else left  # `left` is in the mirrored image
        # Rounding the corner can move it by half a pixel
        for found, place in ((red[0], x), (green[0], top)):
            assert found == pytest.approx(
                2 * (scale * (place + 0.5) - 0.5), abs=0.01 if scale == 1 else 1.5 * scale
            )
        seen.add((width, height, top, left, mirrored))
    assert len(given) == 3 * len(SIZES) and {mirrored for *_, mirrored in seen} == {True, False}
    assert len(seen) > (18 if source == "images" else 9)


def test_sdxl_time_ids_have_the_pipelines_order_in_float32(tmp_path, sdxl, images, monkeypatch):
    """bfloat16 would round 1365 to 1368."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl)
    theirs = pipeline._get_add_time_ids((1365, 2049), (0, 341), (1024, 512), torch.float32, 24)
    ours = make_time_ids(
        torch.tensor([[1365, 2049]]), torch.tensor([[0, 341]]), (1024, 512), torch.tensor([False])
    )
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    assert ours.tolist() == [[1365, 2049, 0, 341, 1024, 512]]
    told, make_unet = [], script.make_unet

    def hook_unet(*args):
        unet = make_unet(*args)
        unet.add_time_proj.register_forward_hook(
            lambda module, given, found: told.append((given[0], found))
        )
        return unet

    monkeypatch.setattr(script, "make_unet", hook_unet)
    patch(monkeypatch, "make_time_ids", lambda *args: ours)
    train(*images, "--mixed_precision=bf16", "--max_train_steps=1", "--no-use_ema")
    sizes, sinusoids = told[-1]
    assert torch.equal(sizes, ours.flatten()) and sizes.dtype == sinusoids.dtype == torch.float32


@pytest.mark.parametrize("zeros", [False, pytest.param(None, marks=pytest.mark.long)])
def test_sdxl_caption_dropout_uses_the_pipelines_empty_prompt(
    tmp_path, flags, images, zeros, given
):
    """Zeros, or the encoded "" if model_index.json asks for it; the sizes are kept.

    Tested with images and with both kinds of cache.
    """
    if zeros is False:
        change(tmp_path / "sdxl/model_index.json", force_zeros_for_empty_prompt=False)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "sdxl")
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):
        tokenizer.model_max_length = 8
    _, embeds, _, pooled = pipeline.encode_prompt("a digit", do_classifier_free_guidance=True)
    assert embeds.any() == (zeros is False)
    for kind in ("images", "ids", "embeddings")[: 3 if zeros is False else 2]:
        argv = (
            images
            if kind == "images"
            else [*flags, make_cache(tmp_path, f"--text_cache={kind}", name=kind)]
        )
        train(
            *argv,
            "--caption_dropout=1",
            "--max_train_steps=1",
            f"--output_dir={tmp_path / 'out' / kind}",
        )
        condition = given[-1][1]
        # A cache stores embeddings in float16
        tolerance = {"rtol": 0, "atol": 0 if kind == "images" or zeros is not False else 2e-3}
        torch.testing.assert_close(condition["prompt_embeds"], embeds, **tolerance)
        torch.testing.assert_close(condition["pooled_prompt_embeds"], pooled, **tolerance)
        assert condition["time_ids"][0, :2].tolist() == [20, 24]
    index = json.loads((tmp_path / "out/images/model_index.json").read_text())
    assert index["force_zeros_for_empty_prompt"] == (zeros is not False)


# ------------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    "flip, crop",
    [(["--random_flip"], ["--center_crop"]), pytest.param([], [], marks=pytest.mark.long)],
)
def test_sdxl_cache_trains_like_its_images(tmp_path, images, flags, flip, crop, given):
    """Caches of embeddings and of token ids. A cache has the random crops of epoch 0."""
    epochs, of, told = f"--num_train_epochs={2 if crop else 1}", {}, {}
    kinds = ("embeddings", "ids") if crop else ("embeddings",)
    for kind in ("images", *kinds):
        argv = [*images, *crop]
        if kind != "images":
            argv = [*flags, make_cache(tmp_path, *flip, *crop, f"--text_cache={kind}", name=kind)]
        train(*argv, *flip, epochs, f"--output_dir={tmp_path / f'of-{kind}'}")
        of[kind] = metrics(tmp_path / f"of-{kind}")
        told[kind] = torch.cat([condition["time_ids"] for _, condition in given])
        given.clear()
    assert len(of["images"]) == (12 if crop else 6)
    for kind in kinds:
        for name, rel in (("loss", 2e-3), ("grad_norm", 1e-2)):
            assert [one[name] for one in of[kind]] == pytest.approx(
                [one[name] for one in of["images"]], rel=rel
            )
        assert torch.equal(told[kind], told["images"])


@pytest.mark.long
def test_sdxl_run_killed_and_resumed_is_bit_identical(tmp_path, flags):
    make_captioned(tmp_path / "images", 7)
    flags = [
        *flags,
        make_cache(tmp_path, "--random_flip"),
        "--num_train_epochs=3",
        "--train_batch_size=2",
        "--random_flip",
        "--caption_dropout=0.3",
        "--checkpointing_steps=2",
        "--checkpoints_total_limit=2",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.fork(*flags, f"--output_dir={whole}", num_processes=2)
    train.kill_after_checkpoint(killed, *flags, num_processes=2)
    resuming = [*flags, f"--output_dir={killed}", "--resume_from_checkpoint=latest"]
    train.fork(*resuming, num_processes=2)
    assert checkpoints(whole) == checkpoints(killed) == {"checkpoint-4", "checkpoint-6"}
    for part in ("checkpoint-6/unet", "checkpoint-6/unet_ema", "unet"):
        assert_same_weights(whole / part, killed / part)
    shown = [
        [(r["step"], r["loss"], r["grad_norm"]) for r in metrics(folder)]
        for folder in (whole, killed)
    ]
    assert shown[0] == shown[1] and len(shown[0]) == 6


# ------------------------------------------------------------------- the output of a run


def test_sdxl_pipeline_redraws_the_samples_and_can_be_trained_further(tmp_path, flags, sdxl):
    argv = [
        *flags,
        make_cache(tmp_path, "--random_flip", "--text_cache=ids"),
        "--random_flip",
        "--holdout=2",
    ]
    train(
        *argv,
        "--validation_prompts",
        "a digit one",
        "--max_train_steps=2",
        "--validation_steps=1",
        "--train_batch_size=auto",
        "--total_batch_size=4",
    )
    out = tmp_path / "out"
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert (
        type(pipeline) is StableDiffusionXLPipeline and pipeline.config.force_zeros_for_empty_prompt
    )
    assert (
        pipeline.text_encoder_2.dtype == pipeline.vae.dtype == pipeline.unet.dtype == torch.float32
    )
    assert pipeline.unet.config.sample_size == 8  # the size that was trained
    generator = torch.Generator().manual_seed(step_seed("sample", 0, 0))
    image = pipeline(
        "a digit one", generator=generator, guidance_scale=3, num_inference_steps=2
    ).images[0]
    grid = np.array(Image.open(out / "samples/step-0000002.png").convert("RGB")).astype(int)
    image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
    assert np.abs(grid[:64, -68:-4] - image).max() <= 1
    assert [path.name for path in sorted((out / "samples").iterdir())] == [
        "step-0000000.png",
        "step-0000001.png",
        "step-0000002.png",
    ]
    records = metrics(out)
    assert sum("held_out_loss_ema" in record for record in records) == 3
    card = (out / "README.md").read_text()
    assert "Stable Diffusion XL pipeline" in card and "stable-diffusion-xl" in card
    train(*flags, f"--pretrained_model_name_or_path={out}", f"--latents_dir={tmp_path / 'cache'}",
          "--max_train_steps=1", f"--output_dir={tmp_path / 'further'}")  # fmt: skip
    train(*argv, "--find_lr", "--find_lr_steps=10", f"--output_dir={tmp_path / 'rate'}")
    assert 0 < json.loads((tmp_path / "rate/find_lr.json").read_text())["suggestion"] < 1


def test_default_resolution_is_1024_for_sdxl_and_512_for_sd(tmp_path, flags, images, capfd):
    """`--dry_run` prints the size of a row at this resolution, and writes nothing."""
    make_models(tmp_path)
    flags = [f"--train_data_dir={tmp_path / 'images'}", f"--output_dir={tmp_path / 'cache'}"]
    flags += ["--dataloader_num_workers=0"]
    for folder, side, caption in (("sdxl", 1024, 2 * (8 * 48 + 24)), ("sd", 512, 2 * 8 * 32)):
        model = f"--pretrained_model_name_or_path={tmp_path / folder}"
        precompute(*flags, model, "--dry_run")
        latents = 2 * 8 * (side // 2) ** 2
        assert (
            f"6 rows of {(latents + caption) / 1e6:.2f}MB ({caption}B for the caption)"
            in capfd.readouterr().out
        )
        args = script.parse_args([*flags, model, "--mixed_precision=no"])
        launch = make_launch(Accelerator(**accelerator_options(args)), args)
        assert open_data(launch, open_base(args), None, {}, args).resolution == side
    precompute(
        *flags,
        f"--pretrained_model_name_or_path={tmp_path / 'sdxl'}",
        "--dry_run",
        "--text_cache=ids",
    )
    assert "(64.0B for the caption)" in capfd.readouterr().out and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("force_upcast", [False, None])
def test_vae_with_force_upcast_stays_in_float32(tmp_path, flags, images, force_upcast, monkeypatch):
    """None stands for a config without the entry, where diffusers' default is True."""
    config = tmp_path / "sdxl/vae/config.json"
    change(config, force_upcast=force_upcast)
    config.write_text(config.read_text().replace('"force_upcast": null, ', ""))
    assert ("force_upcast" in config.read_text()) == (force_upcast is False)
    dtypes = []

    def record_dtype(encoders, pixel_values):
        dtypes.append(encoders.vae.dtype)
        return encode_images(encoders, pixel_values)

    for module in (precompute_latents, train.module):
        monkeypatch.setattr(module, "encode_images", record_dtype)
    make_cache(tmp_path, "--mixed_precision=bf16")
    assert len(dtypes) >= 2
    train(*images, "--mixed_precision=bf16", "--max_train_steps=1", "--no-use_ema")
    assert set(dtypes) == {torch.bfloat16 if force_upcast is False else torch.float32}
    # The precision of the text encoders
    assert json.loads((tmp_path / "cache/cache.json").read_text())["dtype"] == "bfloat16"


# ------------------------------------------------------------------- errors


def test_untrainable_sdxl_pipelines_give_a_one_sentence_error(tmp_path, flags, images):
    index = tmp_path / "sdxl/model_index.json"
    whole = index.read_text()
    argv = precompute.flags(
        tmp_path / "cache",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={tmp_path / 'sdxl'}",
    )

    def both(sentence, *more):
        for run, given in ((precompute, argv), (train, images)):
            assert sentence in run.refused(*given, *more)

    change(
        index,
        _class_name="StableDiffusionXLImg2ImgPipeline",
        text_encoder=[None, None],
        tokenizer=[None, None],
    )
    both("sdxl has only one text encoder: SDXL's refiner can't be trained here")
    index.write_text(whole)
    both(
        "SDXL's text encoders can't be replaced: "
        "leave --text_encoder_name_or_path and --tokenizer_name_or_path out",
        f"--text_encoder_name_or_path={tmp_path / 'sdxl/text_encoder'}",
    )
    nowhere = "--pretrained_model_name_or_path=no/pipeline"
    both(
        "no/pipeline can't be opened as a pipeline (model_index.json of no/pipeline is neither",
        nowhere,
    )
    index.write_text("{")
    both("sdxl can't be opened as a pipeline")
    index.write_text("[]")
    both("sdxl can't be opened as a pipeline (model_index.json lists no parts)")
    index.write_text(whole)
    for entry in ("ab", ["diffusers"]):
        change(index, vae=entry)
        both(f"model_index.json has {entry!r} for vae, not a library and a class")
    index.write_text(whole)
    config = tmp_path / "sdxl/vae/config.json"
    change(config, latents_mean=[0.0] * 4)
    both("its config has latents_mean, by which latents are not scaled here")
    change(config, latents_mean=None)
    shutil.rmtree(tmp_path / "sdxl/text_encoder_2")
    both("sdxl does not hold the text_encoder_2 of a Stable Diffusion XL pipeline")
    assert not (tmp_path / "cache").exists()


def test_unet_of_another_family_gives_a_one_sentence_error(tmp_path, flags, images):
    sd = make_models(tmp_path)
    config = json.loads((tmp_path / "sdxl/unet/config.json").read_text())
    (tmp_path / "xl.json").write_text(json.dumps({**config, "cross_attention_dim": 32}))
    (tmp_path / "other.json").write_text(json.dumps({**config, "addition_embed_type": None}))
    (tmp_path / "narrow.json").write_text(
        json.dumps({**config, "projection_class_embeddings_input_dim": 70})
    )
    (tmp_path / "lcm.json").write_text(json.dumps({**config, "time_cond_proj_dim": 16}))
    for model, unet, sentence in (
        ("sdxl", "lcm", "can't be trained here: its pipeline also gives it timestep_cond, which"),
        ("sd", "xl", "xl.json has addition_embed_type 'text_time' (SDXL: 'text_time', Stable"),
        ("sdxl", "other", "other.json has addition_embed_type None"),
        ("sdxl", "narrow", "narrow.json can't be trained here"),
    ):
        argv = [*images, f"--pretrained_model_name_or_path={tmp_path / model}"]
        assert sentence in train.refused(
            *argv, f"--unet_config_name_or_path={tmp_path / unet}.json"
        )
    shutil.rmtree(tmp_path / "sdxl/unet")
    shutil.copytree(sd / "unet", tmp_path / "sdxl/unet")
    assert "takes 4 channels and embeddings of 32, but the data has 4 and 48" in train.refused(
        *images
    )


def test_a_pipelines_own_unet_is_checked_only_if_the_run_fails(tmp_path, images, monkeypatch):
    """Then the sentence says more than the error of torch in the first step."""
    checked = []

    def note(*args, check_shapes=shapes.check_shapes):
        checked.append(args)
        return check_shapes(*args)

    patch(monkeypatch, "check_shapes", note)
    train(*images, "--max_train_steps=1")
    assert not checked
    folder = tmp_path / "sdxl/unet"
    config = UNet2DConditionModel.load_config(folder)
    narrow = config | {"projection_class_embeddings_input_dim": 70}
    UNet2DConditionModel.from_config(narrow).save_pretrained(folder)
    flags = (*images, "--max_train_steps=1", "--resume_from_checkpoint=latest")
    said = train.refused(*flags, f"--output_dir={tmp_path / 'new'}")
    assert re.search(r"the U-Net of \S*sdxl can't be trained here \(.*70", said)
    assert len(checked) == 1
    # an error that the check does not explain keeps its traceback
    UNet2DConditionModel.from_config(config).save_pretrained(folder)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(script, "compute_loss", lambda *_: 1 / 0)
        train(*flags, f"--output_dir={tmp_path / 'new'}")
    assert len(checked) == 2
    # one that takes more inputs than the data has is refused before the run leaves a file
    UNet2DConditionModel.from_config(config | {"num_class_embeds": 3}).save_pretrained(folder)
    said = train.refused(*images, "--max_train_steps=1", f"--output_dir={tmp_path / 'labels'}")
    assert "class_labels should be provided" in said and not (tmp_path / "labels").exists()
    # one channel would fit any number of them, so that torch would only warn
    UNet2DConditionModel.from_config(config | {"out_channels": 1}).save_pretrained(folder)
    assert "its prediction has the shape [1, " in train.refused(*flags)


def test_sd_and_sdxl_caches_can_not_be_exchanged(tmp_path, flags):
    make_models(tmp_path)
    sdxl, sd = make_cache(tmp_path, name="xl"), make_cache(tmp_path, name="plain", sdxl="sd")
    model = f"--pretrained_model_name_or_path={tmp_path / 'sd'}"
    assert "plain does not fit these models or the first cache" in (
        said := train.refused(*flags, sd)
    )
    assert "(model_family sd -> sdxl)" in said
    assert "xl does not fit these models or the first cache" in (
        said := train.refused(*flags, model, sdxl)
    )
    assert "(model_family sdxl -> sd)" in said
    for first, second, more in (("xl", "plain", []), ("plain", "xl", [model])):
        both = [*flags, *more, "--latents_dir", tmp_path / first, tmp_path / second]
        assert f"{second} does not fit these models or the first cache" in train.refused(*both)
    change(tmp_path / "sdxl/model_index.json", force_zeros_for_empty_prompt=False)
    assert "force_zeros_for_empty_prompt" in train.refused(*flags, sdxl)


def rewrite(folder, **values):
    """Change cache.json together with its fingerprint, as if it had been written like this."""
    change(folder / "cache.json", **values)
    cache = json.loads((folder / "cache.json").read_text())
    change(folder / "state.json", _fingerprint=fingerprint_cache(cache))


def test_cache_lists_its_features_and_unknown_ones_are_refused(tmp_path, flags):
    """A cache lists what goes beyond Stable Diffusion; an unknown entry or format is an error."""
    make_models(tmp_path)
    sdxl, sd = make_cache(tmp_path, name="xl"), make_cache(tmp_path, name="plain", sdxl="sd")
    files = {name: {path.name for path in (tmp_path / name).iterdir()} for name in ("xl", "plain")}
    assert files["xl"] - files["plain"] == {"empty_pooled.npy"} and files["plain"] <= files["xl"]
    xl, plain = (
        json.loads((tmp_path / name / "cache.json").read_text()) for name in ("xl", "plain")
    )
    assert (plain["features"], xl["features"]) == ([], ["sdxl"])
    assert (plain["model_family"], xl["model_family"]) == ("sd", "sdxl")
    assert set(xl) - set(plain) == {
        "text_encoder_2",
        "tokenizer_2",
        "pooled_prompt_embeds_shape",
        "force_zeros_for_empty_prompt",
        "empty_pooled_sha256",
    }
    assert not set(plain) - set(xl)
    rewrite(tmp_path / "plain", keys=1)  # an older version, whose rows can still be used
    train(*flags, f"--pretrained_model_name_or_path={tmp_path / 'sd'}", sd, "--max_train_steps=1")
    other = [*flags, f"--output_dir={tmp_path / 'other'}"]
    rewrite(tmp_path / "xl", features=["sdxl", "odour", "masks2"])
    assert "xl holds masks2, odour, which this version can't read" in train.refused(*other, sdxl)
    rewrite(tmp_path / "xl", format_version=3)
    assert "xl has format 3, but this version reads 4" in train.refused(*other, sdxl)


# ------------------------------------------------------------------- coming from diffusers

# The command of examples/text_to_image/README_sdxl.md, without
# --enable_xformers_memory_efficient_attention, which does not exist here.
COMMAND = """
  --pretrained_model_name_or_path={model}
  --pretrained_vae_model_name_or_path={vae}
  --dataset_name={data}
  --resolution=512 --center_crop --random_flip
  --proportion_empty_prompts=0.2
  --train_batch_size=1
  --gradient_accumulation_steps=4 --gradient_checkpointing
  --max_train_steps=10000 --use_8bit_adam
  --learning_rate=1e-06 --lr_scheduler="constant" --lr_warmup_steps=0
  --mixed_precision="fp16"
  --report_to="wandb"
  --validation_prompt="a cute Sundar Pichai creature" --validation_epochs 5
  --checkpointing_steps=5000
  --output_dir="sdxl-pokemon-model"
  --push_to_hub
"""
# Flags of train_text_to_image_sdxl.py and train_text_to_image_lora_sdxl.py (spring 2026) that are
# not in DIFFUSERS.
BEYOND = {
    "pretrained_vae_model_name_or_path",
    "proportion_empty_prompts",
    "validation_prompt",
    "timestep_bias_strategy",
    "timestep_bias_multiplier",
    "timestep_bias_begin",
    "timestep_bias_end",
    "timestep_bias_portion",
    "debug_loss",
    "enable_npu_flash_attention",
    "train_text_encoder",
}


@pytest.mark.long
def test_diffusers_sdxl_command_is_accepted_with_the_same_meaning(tmp_path, flags, sdxl):
    command = COMMAND.format(model=sdxl, vae=tmp_path / "fixed", data=tmp_path / "images")
    args = script.parse_args(shlex.split(command))
    assert (args.vae_name_or_path, args.caption_dropout) == (str(tmp_path / "fixed"), 0.2)
    assert args.validation_prompts == ["a cute Sundar Pichai creature"] and args.push_to_hub
    assert args.optimizer == "adamw8bit"
    shutil.copytree(sdxl / "vae", tmp_path / "fixed")
    short = [
        "--resolution=16",
        "--max_train_steps=1",
        "--mixed_precision=no",
        "--report_to=none",
        *flags[-2:],
    ]
    train(
        *shlex.split(command.replace("--push_to_hub", "")),
        *short,
        f"--output_dir={tmp_path / 'out'}",
    )
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "out")) is StableDiffusionXLPipeline
    names = sorted(path.name for path in (tmp_path / "out/samples").iterdir())
    assert names == ["step-0000000.png", "step-0000001.png"]
    said = (tmp_path / "out/run.args").read_text()
    assert (
        "--vae_name_or_path" in said
        and "--validation_prompts" in said
        and "--caption_dropout" in said
    )


def test_diffusers_sdxl_flags_are_explained_in_the_docs():
    page = (ROOT / "docs/from-diffusers.md").read_text()
    for name in BEYOND:
        assert f"`--{name}`" in page, name
