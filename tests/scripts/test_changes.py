"""The changes of docs/changing.md: applied and trained with, on one and two processes."""

import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    finish,
    make_captioned,
    make_images,
    make_models,
    metrics,
    reset,
    start,
    weights,
)
from diffusers import DDPMScheduler, UNet2DModel
from PIL import Image
from safetensors.torch import load_file

import train_text_to_image
from diffusion_training.training.costs import count_flops, count_memory

pytestmark = pytest.mark.usefixtures("without_figures")
CHANGES = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/changing.md").read_text(), re.S)
NAMES = ["huber", "labels", "second", "masked", "module", "loss_model"]


def apply(change, folder):
    """Apply a change to a copy of its script.

    Returns (the copy as a module, the lines that the change adds).
    """
    name, hunks = change.removeprefix("--- ").split("\n", 1)
    source = (ROOT / name).read_text()
    for hunk in re.split(r"^@@.*\n", hunks, flags=re.M)[1:]:
        # old lines, then added ones
        for part in re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)+", hunk, flags=re.M):
            old = "".join(line[1:] + "\n" for line in part.splitlines() if line[0] in " -")
            new = "".join(line[1:] + "\n" for line in part.splitlines() if line[0] in " +")
            assert source.count(old) == 1, f"the change no longer fits {name}:\n{old}"
            source = source.replace(old, new)
    path = folder / f"changed_{name}"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, [line for line in hunks.splitlines() if line[0] in "+-"]


def save_config(folder, **options):
    UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"), **options,
    ).save_config(folder)  # fmt: skip


def prepare(tmp_path, name):
    """Data and model of a change; returns the flags of its training."""
    common = [
        f"--output_dir={tmp_path / 'out'}", "--train_batch_size=2", "--max_train_steps=4",
        "--logging_steps=1", "--report_to=none", "--dataloader_num_workers=0", "--center_crop",
        "--holdout=2", "--lr_warmup_steps=0", "--checkpointing_steps=2", "--resolution=16",
        "--lr_scheduler=constant",
    ]  # fmt: skip
    if name in ("module", "loss_model"):
        make_captioned(tmp_path / "images", 8)
        models = make_models(tmp_path)
        return [
            *common,
            f"--pretrained_model_name_or_path={models}",
            f"--train_data_dir={tmp_path / 'images'}",
            "--no-validate_first",
        ]
    make_images(tmp_path / "images", 8)
    for i in range(8):
        if name == "labels":  # a folder a class
            (tmp_path / f"images/{i % 3}").mkdir(exist_ok=True)
            (tmp_path / f"images/{i}.png").rename(tmp_path / f"images/{i % 3}/{i}.png")
        if name in ("second", "masked"):
            (tmp_path / "others").mkdir(exist_ok=True)
            pixels = np.full((20, 24), 250 - i, np.uint8)
            pixels[:, 12:] *= name == "second"  # the right half does not count
            Image.fromarray(pixels).save(tmp_path / f"images/other{i}.png")
    if name in ("second", "masked"):
        column = {"second": "depth", "masked": "mask"}[name]
        lines = [
            json.dumps({"image_file_name": f"{i}.png", f"{column}_file_name": f"other{i}.png"})
            for i in range(8)
        ]
        (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    options = {
        "labels": {"num_class_embeds": 10},
        "second": {"in_channels": 4, "out_channels": 4},
    }.get(name, {})
    save_config(tmp_path / "unet", **options)
    common += [
        f"--model_config_name_or_path={tmp_path / 'unet'}",
        f"--train_data_dir={tmp_path / 'images'}",
    ]
    return [*common, "--ddpm_num_inference_steps=2", "--eval_batch_size=12"]


@pytest.fixture(params=NAMES)
def changed(request, tmp_path):
    """(the name of a change, the changed script as a module, the flags of its training)."""
    script, _ = apply(CHANGES[NAMES.index(request.param)], tmp_path)
    return request.param, script, prepare(tmp_path, request.param)


def train(script, *argv):
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


def test_there_are_six_changes_of_less_than_ten_lines(tmp_path):
    changes = [apply(change, tmp_path)[1] for change in CHANGES]
    assert len(changes) == len(NAMES) == 6 and max(map(len, changes)) < 10
    assert max(len(line) for lines in changes for line in lines) <= 101  # with the + before it


@pytest.mark.ci
def test_a_change_trains_with_held_out_images_resumes_and_finds_a_rate(tmp_path, changed):
    """The same bits whether it was stopped half-way or not."""
    name, script, flags = changed
    train(script, *flags)
    records = metrics(tmp_path / "out")
    assert sum("held_out_loss_ema" in record for record in records) == 1
    assert all(np.isfinite(record.get("loss", 0)) for record in records)
    again = [*flags, f"--output_dir={tmp_path / 'again'}"]
    train(script, *again, "--max_train_steps=2")
    train(script, *again, "--resume_from_checkpoint=latest")
    folders = {path.parent for path in (tmp_path / "out/checkpoint-4").rglob("*.safetensors")}
    assert {path.name for path in folders} == {"unet", "unet_ema"} | (
        {"log_variance", "log_variance_ema"} if name == "module" else set()
    )
    for folder in folders:
        (one,), (other,) = (
            folder.glob("*.safetensors"),
            (tmp_path / "again/checkpoint-4" / folder.name).glob("*.saf*"),
        )
        one, other = load_file(one), load_file(other)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    train(script, *flags, "--find_lr", "--find_lr_steps=10", f"--output_dir={tmp_path / 'rate'}")
    assert len(json.loads((tmp_path / "rate/find_lr.json").read_text())["rates"]) > 1


def test_a_change_trains_on_two_processes(tmp_path, changed):
    _, script, flags = changed
    log = tmp_path / "log"
    assert finish(start(lambda: train(script, *flags), 2, log)) == [0, 0], log.read_text()
    assert sum("held_out_loss" in record for record in metrics(tmp_path / "out")) == 1


def test_a_huber_loss_is_trained_on(tmp_path):
    script, _ = apply(CHANGES[0], tmp_path)
    flags, losses = prepare(tmp_path, "huber"), []
    for kind in ("l2", "huber"):
        train(script, *flags, f"--loss_type={kind}", f"--output_dir={tmp_path / kind}")
        losses.append(metrics(tmp_path / kind)[0]["loss"])
    assert losses[1] < 0.6 * losses[0]  # half the square, or less beyond 1


def test_class_labels_of_a_column_reach_the_unet(tmp_path, monkeypatch):
    script, _ = apply(CHANGES[1], tmp_path)
    flags = [flag for flag in prepare(tmp_path, "labels") if "holdout" not in flag]
    seen, forward = [], UNet2DModel.forward

    def spy(self, sample, timestep, class_labels=None, **rest):
        if not sample.is_meta:  # the trial at the start, without numbers
            levels = ((sample.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().tolist()
            seen.append((self.training, levels, class_labels.tolist()))
        return forward(self, sample, timestep, class_labels, **rest)

    monkeypatch.setattr(UNet2DModel, "forward", spy)
    # The U-Net sees the images themselves, so that each can be told from its label.
    monkeypatch.setattr(DDPMScheduler, "add_noise", lambda self, images, noise, timesteps: images)
    train(script, *flags)
    trained = [
        pair
        for training, levels, labels in seen
        if training
        for pair in zip(levels, labels, strict=True)
    ]
    assert sorted(set(trained)) == [(i, i % 3) for i in range(8)]
    drawn = [labels for training, _, labels in seen if not training]
    assert drawn and drawn[0] == [i % 10 for i in range(12)]


def test_a_second_image_column_is_trained_on_as_further_channels(tmp_path):
    script, _ = apply(CHANGES[2], tmp_path)
    flags = [flag for flag in prepare(tmp_path, "second") if "holdout" not in flag]
    batches, prepare_batch = [], script.prepare_batch
    script.prepare_batch = lambda batch: (
        batches.append(batch["pixel_values"]) or prepare_batch(batch)
    )
    train(script, *flags)
    depths = sorted({int(image[3, 0, 0]) for batch in batches for image in batch})
    assert batches[0].shape == (2, 4, 16, 16) and depths == [*range(243, 251)]
    assert np.asarray(Image.open(tmp_path / "out/samples/step-0000004.png")).ndim == 3


def test_a_masked_loss_counts_where_the_mask_is_white(tmp_path):
    """Errors in the masked half do not count: a constant there leaves the other half's loss."""
    script, _ = apply(CHANGES[3], tmp_path)
    noise_scheduler, mask = DDPMScheduler(), torch.zeros(2, 1, 8, 8)
    mask[..., :4] = 1
    args = script.parse_args(prepare(tmp_path, "masked"))

    batch = torch.cat([torch.full((2, 3, 8, 8), 127), 255 * mask.byte()], dim=1)
    prepared = script.prepare_batch({"pixel_values": batch})
    assert prepared.images.shape == (2, 3, 8, 8) and torch.equal(prepared.loss_inputs["mask"], mask)
    losses = []
    for error in (0.0, 100.0):

        def predict(models, noisy_images, timesteps, condition):
            torch.manual_seed(0)
            prediction = torch.randn(noisy_images.shape)  # what compute_loss draws first
            prediction[..., 4:] += error
            return prediction

        torch.manual_seed(0)
        weight = torch.ones(2) / 2
        loss = script.compute_loss(args, noise_scheduler, predict, {}, {}, prepared, weight)
        losses.append(loss.item())
    assert losses == [0.0, 0.0]


def test_a_further_module_is_trained_and_averaged(tmp_path):
    script, _ = apply(CHANGES[4], tmp_path)
    train(script, *prepare(tmp_path, "module"))
    first, last = (
        load_file(tmp_path / f"out/checkpoint-{i}/log_variance/model.safetensors") for i in (2, 4)
    )
    average = load_file(tmp_path / "out/checkpoint-4/log_variance_ema/model.safetensors")
    assert not torch.equal(first["weight"], last["weight"]) and not torch.equal(
        average["weight"], last["weight"]
    )
    assert weights(tmp_path / "out/unet")  # and the pipeline opens as before


def test_a_model_of_the_loss_is_counted_and_not_trained(tmp_path, monkeypatch):
    """The test above shows that no checkpoint has it."""
    seen = {}

    def spy_on_loss(copies, loss, prepared):
        seen["operations"] = count_flops(copies, loss, prepared)
        return seen["operations"]

    def spy_on_memory(models, averaged, frozen, num_processes, optimizer):
        seen["memory"] = count_memory(models, averaged, frozen, num_processes, optimizer)
        seen["frozen"] = [module for module in frozen if isinstance(module, torch.nn.Conv2d)]
        seen["before"] = [weight.clone() for x in seen["frozen"] for weight in x.parameters()]
        return seen["memory"]

    monkeypatch.setattr("diffusion_training.training.costs.count_flops", spy_on_loss)
    monkeypatch.setattr("diffusion_training.training.costs.count_memory", spy_on_memory)
    script, _ = apply(CHANGES[5], tmp_path)
    flags = prepare(tmp_path, "loss_model")
    found = []
    for name, module in {"plain": train_text_to_image, "changed": script}.items():
        train(module, *flags, f"--output_dir={tmp_path / name}")
        found.append({**seen, "loss": metrics(tmp_path / name)[0]["loss"]})
    plain, changed = found
    (network,) = changed["frozen"]
    assert changed["memory"]["encoders"] - plain["memory"]["encoders"] == 4 * (4 * 8 * 9 + 8)
    # two of 6 x 6 latents forward, and one of them backward to what was predicted
    assert changed["operations"] - plain["operations"] == 3 * 2 * (4 * 9) * 8 * 6**2
    assert changed["loss"] > plain["loss"]
    assert not any(weight.requires_grad for weight in network.parameters())
    assert all(map(torch.equal, changed["before"], network.parameters()))
