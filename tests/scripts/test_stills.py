"""Models for videos that are trained on stills, in all ways that images are."""

import json

import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned, make_masked, make_moments, metrics
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.functional import pil_to_tensor

from diffusion_training.training.lora import quantization

precompute, train = Script("precompute_latents"), Script("train_flow")
LORA = "pytorch_lora_weights.safetensors"
VIDEOS = ("wan", "wan_5b", "hunyuan_video", "ltx")
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("without_figures"),
    pytest.mark.parametrize("name", VIDEOS),
]


@pytest.fixture
def base(tmp_path, name):
    tiny_pipelines.MAKE[name](tmp_path / "base")
    return [f"--pretrained_model_name_or_path={tmp_path / 'base'}"]


def test_stills_train_in_all_ways_that_images_do(tmp_path, monkeypatch, base, name):
    """In buckets, with masks and flips, from a cache that is being made, as LoKr, over int8."""
    monkeypatch.setattr(quantization, "BLOCK", 8)  # so that layers of tiny models are quantized
    make_masked(tmp_path / "images", 8)
    side = 2 * tiny_pipelines.SIDES.get(name, 16)
    data = [f"--train_data_dir={tmp_path / 'images'}", f"--resolution={side}"]
    data += [f"--bucket_step={side // 2}", "--random_flip", "--center_crop"]
    data.append("--dataloader_num_workers=0")
    precompute(*base, *data, f"--output_dir={tmp_path / 'cache'}")
    cut = ["--center_crop", f"--output_dir={tmp_path / 'squares'}", "--dataloader_num_workers=0"]
    precompute(*base, *data[:2], *cut)
    squares = [*base, f"--latents_dir={tmp_path / 'squares'}"]
    cache = [*base, f"--latents_dir={tmp_path / 'cache'}", "--random_flip"]
    few = ["--train_batch_size=2", "--max_train_steps=2", "--logging_steps=1", "--report_to=none"]
    samples = ["--validation_prompts", "a digit two", "--num_inference_steps=2"]
    measure = ["--validation_metrics=kid", "--num_metric_images=2"]
    measure += [f"--metric_image_model={make_moments(tmp_path / 'moments.pt')}"]
    losses = {}
    for kind, flags in {
        "lora": [*cache, "--rank=2", "--holdout=2", *samples, *measure],
        "follow": [*squares, "--follow", "--rank=2", "--holdout=2"],
        "images": [*base, *data, "--rank=2", "--holdout=2", "--no-cache_latents"],
        "made": [*base, *data, "--rank=2", "--holdout=2", "--cache_latents"],
        "int8": [*cache, "--rank=2", "--base_precision=int8", "--blocks_to_swap=all"],
        "lokr": [*cache, "--lora_type=lokr", "--rank=2", "--lokr_factor=2"],
        "whole": [*cache, *samples],
    }.items():
        train(*flags, *few, f"--output_dir={tmp_path}/out-{kind}")
        losses[kind] = [row["loss"] for row in metrics(f"{tmp_path}/out-{kind}") if "loss" in row]
        assert len(losses[kind]) == 2
    for kind in ("images", "made"):
        assert losses[kind] == pytest.approx(losses["lora"], rel=5e-3)
    assert any("kid" in row for row in metrics(tmp_path / "out-lora"))
    assert any("held_out_loss" in row for row in metrics(tmp_path / "out-lora"))
    for kind in ("lora", "whole"):
        (grid, *_) = (tmp_path / f"out-{kind}" / "samples").glob("*.png")
        assert Image.open(grid).size[1] >= side
    assert any(value.any() for value in load_file(tmp_path / "out-lokr" / LORA).values())
    # the card draws a picture
    code = (tmp_path / "out-lora/README.md").read_text()
    assert ".frames[0][0]" in code and 'output_type="pil"' in code
    kind = json.loads((tmp_path / "base/scheduler/scheduler_config.json").read_text())
    saved = DiffusionPipeline.from_pretrained(tmp_path / "out-whole").scheduler
    assert type(saved).__name__ == kind["_class_name"]


def test_two_stills_with_two_captions_are_told_apart(tmp_path, base, name):
    """A wider denoiser learns both by heart. It is compared in latents.

    A VAE with random weights gives all images nearly the same latents, so its last layer is scaled
    to give these two unit variance, and no noise.
    """
    side = 2 * tiny_pipelines.SIDES.get(name, 16)
    captions = ["a digit zero", "seven red ducks"]
    make_captioned(tmp_path / "images", 2, captions)
    for number in range(2):
        still = Image.new("RGB", (side, side), (230, 230, 20))
        still.paste((10, 10, 160), (number * side // 2, 0, (number + 1) * side // 2, side))
        still.save(tmp_path / f"images/{number}.png")
    stills = torch.stack([pil_to_tensor(still) for still in map(Image.open, files(tmp_path))])
    stills = stills.unsqueeze(2) / 127.5 - 1
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "base")
    scale_latents(pipeline.vae, stills)
    config = dict(pipeline.transformer.config)
    wide = {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128}
    wide |= {"rope_axes_dim": [4, 6, 6], "cross_attention_dim": 64}
    wide = {key: value for key, value in wide.items() if key in config}
    torch.manual_seed(0)
    pipeline.transformer = type(pipeline.transformer).from_config(config | wide)
    pipeline.save_pretrained(tmp_path / "base")
    data = [f"--train_data_dir={tmp_path / 'images'}", f"--resolution={side}"]
    precompute(*base, *data, "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'cache'}")
    flags = [f"--latents_dir={tmp_path / 'cache'}", "--train_batch_size=2", "--no-use_ema"]
    flags += ["--max_train_steps=500", "--learning_rate=3e-3", "--lr_scheduler=cosine"]
    flags += ["--gradient_accumulation_steps=1", "--caption_dropout=0", "--report_to=none"]
    train(*base, *flags, "--lr_warmup_steps=50", f"--output_dir={tmp_path / 'out'}")

    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    targets = normalize(pipeline.vae, pipeline.vae.encode(stills).latent_dist.mode())
    options = {"height": side, "width": side, "num_frames": 1, "guidance_scale": 1.0}
    for number, caption in enumerate(captions):
        generator = torch.Generator().manual_seed(0)
        options |= {"generator": generator, "num_inference_steps": 25, "output_type": "latent"}
        drawn = pipeline(prompt=caption, **options).frames
        if drawn.ndim == 3:  # LTX's tokens
            drawn = drawn.transpose(1, 2).unflatten(2, targets.shape[2:])
        right, wrong = ((drawn - targets[i]).square().mean() for i in (number, 1 - number))
        assert right < wrong / 5, (name, caption, right, wrong)


def files(folder):
    return [folder / f"images/{number}.png" for number in range(2)]


@torch.no_grad()
def scale_latents(vae, stills):
    last = vae.quant_conv if hasattr(vae, "quant_conv") else vae.encoder.conv_out.conv
    mean = vae.encode(stills).latent_dist.mean
    channels = mean.shape[1]
    scale = 1 / mean.std((0, 2, 3, 4))
    last.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
    last.bias[:channels] = scale * (last.bias[:channels] - mean.mean((0, 2, 3, 4)))
    last.weight[channels:] = 0
    last.bias[channels:] = -30  # the logarithm of the variance


def normalize(vae, latents):
    """As the denoiser gets them."""
    mean, std = (vae.config.get(f"latents_{name}") for name in ("mean", "std"))
    if mean is None:
        return latents * vae.config.scaling_factor
    numbers = (torch.tensor(each[: latents.shape[1]]).view(-1, 1, 1, 1) for each in (mean, std))
    return (latents - next(numbers)) / next(numbers)
