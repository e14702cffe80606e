"""docs/training.md: the figures of U-Nets, steps and epochs match the files and the arithmetic."""

import json
import math
import re
from argparse import Namespace

import datasets
import numpy as np
import pytest
import torch
from conftest import MODELS, ROOT, Script, make_captioned, make_sdxl
from diffusers import AutoencoderKL, UNet2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion_training.blocks import checkpoint_gradients
from diffusion_training.training import state
from diffusion_training.training.progress import Progress

train = Script("train_unconditional")
precompute = Script("precompute_latents")
TEXT = (ROOT / "docs/training.md").read_text()
U_NETS = re.findall(r"^\| \[unet_(\d+)\.json\].*?\| ([\d,]+) \| ([\d.]+) \| (\d+) \|$", TEXT, re.M)
STEPS = re.findall(
    r"^\| ([\d,]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.M
)


def integer(text):
    return int(text.replace(",", ""))


def make_unet(side, *flags):
    flags = [f"--train_data_dir={ROOT / 'demo'}", f"--resolution={side}", *flags]
    return train.module.make_unet(train.module.parse_args(flags))


def test_all_unet_configs_are_in_the_table():
    assert {f"unet_{side}.json" for side, *_ in U_NETS} == {
        path.name for path in ROOT.glob("configs/unet_*.json")
    }
    assert len(U_NETS) == 4 and len(STEPS) == 4


@pytest.mark.parametrize("side, weights, in_step, _", U_NETS)
def test_unet_configs_have_the_documented_resolution_and_weights(side, weights, in_step, _):
    with torch.device("meta"), torch.no_grad():
        unet = make_unet(side, f"--model_config_name_or_path={ROOT / f'configs/unet_{side}.json'}")
        shape = (1, 3, int(side), int(side))
        assert unet(torch.zeros(shape), torch.zeros(1)).sample.shape == shape
    count = sum(parameter.numel() for parameter in unet.parameters())
    assert count == integer(weights) and not list(unet.buffers())
    assert f"{20 * count / 1e9:.2f}" == in_step
    config = json.loads((ROOT / f"configs/unet_{side}.json").read_text())
    assert config["sample_size"] == int(side) and config["dropout"] == (
        0.1 if int(side) < 128 else 0.0
    )
    kinds = config["down_block_types"]
    assert [int(side) >> level for level, kind in enumerate(kinds) if kind.startswith("Attn")] == [
        16
    ]


def test_documented_batches_are_those_that_fit():
    """A tenth of a GPU, whose GB are 2**30 bytes, stays free."""
    cards = [8, 12, 16, 24, 48, 80]
    rows = re.findall(r"^\| unet_(\d+)\.json \| (\d+) \| (.*) \|$", TEXT, re.M)
    assert len(rows) == len(U_NETS)
    for (name, side, cells), (_, weights, _, image) in zip(rows, U_NETS, strict=True):
        assert name == side
        for card, batch in zip(cards, cells.split(" | "), strict=True):
            room = 0.9 * card * 2**30 - 20 * integer(weights)
            assert int(batch) == pytest.approx(room / int(image) / 1e6, rel=0.02, abs=1)


def test_documented_batches_of_larger_images_follow_from_the_pixels():
    said = r"unet_256 takes (\d+) images of 256 px on (\d+) GB, and (\d+) of 512 px on (\d+) GB"
    images, one, larger, other = map(int, re.search(said, " ".join(TEXT.split())).groups())
    _, weights, _, image = U_NETS[-1]
    for batch, card, factor in ((images, one, 1), (larger, other, 4)):
        room = 0.9 * card * 2**30 - 20 * integer(weights)
        assert batch == int(room / (factor * int(image) * 1e6))


def test_the_default_unet_equals_unet_256_json():
    with torch.device("meta"):
        one, other = (
            make_unet(256),
            make_unet(256, f"--model_config_name_or_path={ROOT / 'configs/unet_256.json'}"),
        )
    shapes = [
        {name: value.shape for name, value in unet.state_dict().items()} for unet in (one, other)
    ]
    assert shapes[0] == shapes[1]


# the other cases take long
@pytest.mark.parametrize("side, checkpointing", [("32", False), ("32", True), ("64", True)])
def test_documented_activations_per_image_are_correct(side, checkpointing):
    (row,) = (row for row in U_NETS if row[0] == side)
    unet = UNet2DModel.from_config(UNet2DModel.load_config(ROOT / f"configs/unet_{side}.json"))
    if checkpointing:
        plan = {"checkpoint_blocks": None, "keep_attention": False}
        checkpoint_gradients({"unet": unet}, Namespace(gradient_checkpointing=True, **plan))
    weights, kept = {parameter.untyped_storage().data_ptr() for parameter in unet.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = unet(torch.zeros(1, 3, int(side), int(side)), torch.zeros(1)).sample
    share = 1 / 4 if checkpointing else 1
    assert out.requires_grad and sum(kept.values()) / 1e6 == pytest.approx(
        share * int(row[3]), rel=0.15
    )


def test_the_trainer_holds_five_numbers_per_weight_in_a_step(tmp_path, monkeypatch):
    """Four remain between steps, after the gradients are freed."""
    counts, step, update_ema = [], torch.optim.AdamW.step, state.update_ema

    def stepping(self, *args, **options):
        step(self, *args, **options)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        moments = [
            moment
            for weight in weights
            for name, moment in self.state[weight].items()
            if name != "step"
        ]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        counts.append(
            [sum(tensor.numel() for tensor in tensors) for tensors in (weights, moments, grads)]
        )

    def averaging(averages, *args):
        update_ema(averages, *args)
        assert all(weight.grad is None for weight in averages.weights)
        counts[-1].append(sum(weight.numel() for weight in averages.means))

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    monkeypatch.setattr(state, "update_ema", averaging)
    flags = ["--max_train_steps=2", "--report_to=none", "--eval_batch_size=1"]
    train(*flags, f"--output_dir={tmp_path / 'out'}", "--ddpm_num_inference_steps=1")
    assert len(counts) == 2
    for weights, moments, grads, averaged in counts:
        assert (moments, grads, averaged) == (2 * weights, weights, weights)


@pytest.mark.parametrize("images, side, steps, epochs, one, other", STEPS)
def test_documented_steps_equal_epochs_times_steps_per_epoch(
    images, side, steps, epochs, one, other
):
    images, steps, epochs = map(integer, (images, steps, epochs))
    (row,) = re.findall(rf"^\| unet_{side} \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.M)
    for hours, of_500000 in zip((one, other), row, strict=True):
        assert float(hours) == pytest.approx(float(of_500000) * steps / 500_000, abs=0.051)
    of_one = math.ceil(images / 64)
    assert epochs == round(steps / of_one)
    start = {"global_step": 0, "data_step": 0, "images_seen": 0}
    assert Progress(start, images, 64, 1).last_step(epochs) == epochs * of_one
    assert Progress(start, 1797, 64, 1).last_step(1) == 29


def test_documented_cache_sizes_are_correct():
    """Stable Diffusion 2 has 8 numbers for 8 x 8 pixels, and 77 tokens of 1,024 numbers.

    A number takes 2 bytes, a token id 4.
    """
    page, cluster = ((ROOT / f"docs/{name}.md").read_text() for name in ("latent-cache", "cluster"))
    table = re.findall(r"^\| `(\w+)`[^|]*\| (\d+) KiB \| (\d+) KiB \| (\d+) TB ", page, re.M)
    expected = []
    for kind, caption in (("embeddings", 77 * 1024 * 2), ("ids", 77 * 4)):
        rows = [2 * 4 * (side // 8) ** 2 * 2 + caption for side in (256, 512)]
        expected.append((kind, *(str(row // 1024) for row in rows), f"{2e9 * rows[0] / 1e12:.0f}"))
    assert table == expected
    said = (
        f"{expected[0][3]} TB of cache in {math.ceil(2e9 / 2048):,} shards of 2,048 rows, "
        f"{expected[1][3]} TB"
    )
    assert f"2e9 images at 256 px are {said}" in cluster


def test_documented_sdxl_cache_sizes_equal_a_dry_run(tmp_path, capsys):
    """With models that have the published widths, but few layers."""
    folder = make_sdxl(tmp_path)
    widths = {
        "text_encoder": {"hidden_size": 768},
        "text_encoder_2": {"hidden_size": 1280, "projection_dim": 1280},
    }
    for suffix, kind in (("", CLIPTextModel), ("_2", CLIPTextModelWithProjection)):
        config = CLIPTextConfig.from_pretrained(folder / f"text_encoder{suffix}")
        config.update(
            {
                **widths[f"text_encoder{suffix}"],
                "num_hidden_layers": 1,
                "max_position_embeddings": 77,
            }
        )
        kind(config).save_pretrained(folder / f"text_encoder{suffix}")
        tokenizer = CLIPTokenizer.from_pretrained(
            folder / f"tokenizer{suffix}", model_max_length=77
        )
        tokenizer.save_pretrained(folder / f"tokenizer{suffix}")
    vae = {**AutoencoderKL.load_config(folder / "vae"), "block_out_channels": [8, 8, 8, 8]}
    vae |= {
        f"{name}_block_types": [f"{kind}coderBlock2D"] * 4
        for name, kind in (("down", "DownEn"), ("up", "UpDe"))
    }
    AutoencoderKL.from_config(vae).save_pretrained(folder / "vae")
    make_captioned(tmp_path / "images", 2)
    table = []
    for kind in ("embeddings", "ids"):
        rows = []
        for side in (512, 1024):
            precompute(
                f"--pretrained_model_name_or_path={folder}",
                f"--train_data_dir={tmp_path / 'images'}",
                f"--resolution={side}",
                f"--text_cache={kind}",
                f"--output_dir={tmp_path / 'cache'}",
                "--dry_run",
            )
            rows.append(float(re.search(r"rows of ([\d.]+)kB", capsys.readouterr().out)[1]))
        table.append((kind, *(f"{row * 1000 / 1024:.0f}" for row in rows), f"{rows[1]:.0f}"))
    page = (ROOT / "docs/latent-cache.md").read_text()
    assert (
        re.findall(r"^\| `(\w+)`[^|]*\| (\d+) KiB \| (\d+) KiB \| (\d+) GB ", page, re.M) == table
    )


def test_the_demo_vae_has_the_documented_psnr():
    # shuffled as in demo/make_models.py
    rows = datasets.load_dataset(str(ROOT / "demo/digits"), split="train").shuffle(seed=0)
    images = np.stack([np.array(image.convert("RGB")) for image in rows["image"]])[1400:]
    images, vae = (
        torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1,
        AutoencoderKL.from_pretrained(MODELS / "vae"),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        restored = vae.decode(vae.encode(images).latent_dist.sample()).sample.clamp(-1, 1)
    found = -10 * ((restored - images).square().mean() / 4).log10().item()
    (said,) = re.findall(
        r"VAE in the demo of `train_flow.py` restores digits that it has not seen with ([\d.]+) dB PSNR",
        " ".join(TEXT.split()),
    )
    assert found == pytest.approx(float(said), abs=0.15)
