"""Models for videos that are trained on stills: in all ways that images are, and what they learn."""

import json

import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned, make_masked, make_moments, metrics
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from diffusion_training.families.recorded.pipeline_run import ONE_FRAME
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
    data += [f"--bucket_step={side // 2}", "--random_flip", "--dataloader_num_workers=0"]
    precompute(*base, *data, f"--output_dir={tmp_path / 'cache'}")
    cache = [*base, f"--latents_dir={tmp_path / 'cache'}"]
    few = ["--train_batch_size=2", "--max_train_steps=2", "--logging_steps=1", "--report_to=none"]
    samples = ["--validation_prompts", "a digit two", "--num_inference_steps=2", "--seed=1"]
    measure = ["--validation_metrics=kid", "--num_metric_images=2"]
    measure += [f"--metric_image_model={make_moments(tmp_path / 'moments.pt')}"]
    losses = {}
    for kind, flags in {
        "lora": [*cache, "--rank=2", "--holdout=2", *samples, *measure],
        "follow": [*cache, "--follow", "--rank=2", "--holdout=2"],
        "images": [*base, *data, "--rank=2", "--holdout=2", "--no-cache_latents"],
        "made": [*base, *data, "--rank=2", "--holdout=2", "--cache_latents"],
        "int8": [*cache, "--rank=2", "--base_precision=int8", "--blocks_to_swap=all"],
        "lokr": [*cache, "--lora_type=lokr", "--rank=2", "--lokr_factor=2"],
        "whole": [*cache, *samples],
    }.items():
        train(*flags, *few, f"--output_dir={tmp_path / kind}")
        losses[kind] = [row["loss"] for row in metrics(tmp_path / kind) if "loss" in row]
        assert len(losses[kind]) == 2
    assert losses["follow"] == losses["lora"]
    for kind in ("images", "made"):
        assert losses[kind] == pytest.approx(losses["lora"], rel=5e-3)
    assert any("kid" in row for row in metrics(tmp_path / "lora"))
    assert any("held_out_loss" in row for row in metrics(tmp_path / "lora"))
    for kind in ("lora", "whole"):
        (grid, *_) = (tmp_path / kind / "samples").glob("*.png")
        assert Image.open(grid).size[1] >= side
    assert any(value.any() for value in load_file(tmp_path / "lokr" / LORA).values())
    # the card draws a picture
    code = (tmp_path / "lora/README.md").read_text()
    assert ".frames[0][0]" in code and 'output_type="pil"' in code
    kind = json.loads((tmp_path / "base/scheduler/scheduler_config.json").read_text())
    saved = DiffusionPipeline.from_pretrained(tmp_path / "whole").scheduler
    assert type(saved).__name__ == kind["_class_name"]


def test_two_stills_with_two_captions_are_told_apart(tmp_path, base, name):
    captions = ["a digit zero", "seven red ducks"]
    make_captioned(tmp_path / "images", 2, captions)
    side = 2 * tiny_pipelines.SIDES.get(name, 16)
    data = [f"--train_data_dir={tmp_path / 'images'}", f"--resolution={side}", "--center_crop"]
    precompute(*base, *data, "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'cache'}")
    flags = ["--max_train_steps=300", "--learning_rate=1e-2", "--train_batch_size=2", "--no-use_ema"]
    flags += [f"--latents_dir={tmp_path / 'cache'}", "--caption_dropout=0", "--report_to=none"]
    train(*base, *flags, f"--output_dir={tmp_path / 'out'}")
    losses = [row["loss"] for row in metrics(tmp_path / "out") if "loss" in row]
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    pipeline.set_progress_bar_config(disable=True)
    stills = [load_pixels(tmp_path / f"images/{number}.png", side) for number in range(2)]
    encoded = [pipeline.vae.encode(each.unsqueeze(2)).latent_dist.mean for each in stills]
    targets = [pipeline.vae.decode(each, *times(pipeline)).sample for each in encoded]
    options = {"height": side, "width": side, "num_inference_steps": 12, "guidance_scale": 1.0}
    options |= {next(iter(ONE_FRAME)): 1, "output_type": "pt"}
    for number, caption in enumerate(captions):
        generator = torch.Generator().manual_seed(0)
        drawn = pipeline(prompt=caption, generator=generator, **options).frames[:, 0] * 2 - 1
        far = [(drawn - each[:, :, 0].clamp(-1, 1)).square().mean() for each in targets]
        print(name, caption, far, losses[0], losses[-1])
        assert far[number] < far[1 - number] / 2


def times(pipeline):
    """What LTX's VAE takes beside latents."""
    return [torch.zeros(1)] if pipeline.vae.config.get("timestep_conditioning") else []


def load_pixels(path, side):
    from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

    image = center_crop(resize(Image.open(path).convert("RGB"), side), side)
    return pil_to_tensor(image)[None] / 127.5 - 1
