"""Models for videos that are trained on stills, in all ways that images are."""

import json

import pytest
import tiny_pipelines
from conftest import Script, make_masked, make_moments, metrics
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

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
