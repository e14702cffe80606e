"""The held-out loss: which images it is of, that they are not trained on, and that its figure is always the same."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_same_weights, checkpoints, finish, make_captioned, make_images, metrics, reset, start
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from PIL import Image

import precompute_latents
import train_text_to_image
import train_unconditional as script


@pytest.fixture
def flags(tmp_path, unet_config):
    """6 steps on 12 images, 4 of which are held out."""
    make_images(tmp_path / "images", 12)
    return [
        f"--train_data_dir={tmp_path / 'images'}", f"--model_config_name_or_path={unet_config}", "--resolution=16",
        f"--output_dir={tmp_path / 'out'}", "--train_batch_size=2", "--max_train_steps=6", "--learning_rate=1e-3",
        "--ddpm_num_inference_steps=2", "--eval_batch_size=1", "--lr_warmup_steps=2", "--logging_steps=1",
        "--report_to=none", "--dataloader_num_workers=0", "--holdout=4", "--validation_steps=2", "--random_flip",
    ]  # fmt: skip


def train(*argv, script=script):
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


def held_out(folder):
    return [record for record in metrics(folder) if "held_out_loss" in record]


def split(folder, *argv):
    """Names of the rows to train on, and of those that are held out."""
    reset()
    args = script.parse_args([f"--train_data_dir={folder}", *argv])
    rows, column = script.load_rows(args)
    dataset = script.ImageDataset(rows, column, 3, args)
    train_rows, held = script.hold_out(script.Accelerator(cpu=True), dataset, args)
    names = dataset.names()
    assert sorted([*train_rows, *held]) == list(range(len(rows)))
    return {names[row] for row in train_rows}, {names[row] for row in held}


def test_new_images_move_no_other(tmp_path, capsys):
    folder = make_images(tmp_path / "images", 60)
    trained, held = split(folder, "--holdout=0.2")
    assert 4 <= len(held) <= 22 and "0.png" in trained | held
    assert f"Held out: {len(held)} of 60 images" in capsys.readouterr().out
    for i in range(0, 60, 7):
        os.remove(tmp_path / f"images/{i}.png")
        Image.new("RGB", (20, 20)).save(tmp_path / f"images/a new {i}.png")
    left = {path.name for path in (tmp_path / "images").iterdir()}
    now_trained, now_held = split(folder, "--holdout=0.2")
    assert now_trained & trained == trained & left and now_held & held == held & left
    assert split(folder, "--holdout=0.2", "--seed=1")[1] != now_held
    # A number: the lowest hashes, so that with more images at most the last of them change.
    assert (
        len(split(folder, "--holdout=7")[1]) == 7 and split(folder, "--holdout=7")[1] < split(folder, "--holdout=9")[1]
    )
    drawn = split(folder, "--holdout=0.2", "--max_train_samples=30")  # in another order
    assert drawn[1] == now_held & (drawn[0] | drawn[1]) != set()


@pytest.mark.parametrize("share", ["1e-9", "12"])
def test_all_or_nothing_is_refused(flags, share, capfd):
    with pytest.raises(SystemExit):
        train(*flags, f"--holdout={share}")
    assert "of 12 images aside: choose another share or number" in capfd.readouterr().err


def test_streams_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        script.parse_args([*flags, "--streaming"])
    assert stop.value.code == 2 and "of a stream none can be set aside" in capsys.readouterr().err


def test_what_is_held_out_is_not_trained_on(tmp_path, flags, monkeypatch):
    seen, compute_loss = [], script.compute_loss

    def recording(unet, noise_scheduler, images, *rest):
        seen.extend(((images.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().int().tolist())
        return compute_loss(unet, noise_scheduler, images, *rest)

    monkeypatch.setattr(script, "compute_loss", recording)
    train(*flags, "--max_train_steps=8")
    names, _ = split(tmp_path / "images", "--holdout=4")
    assert sorted(seen) == sorted(2 * [int(name.split(".")[0]) for name in names]) and len(names) == 8


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_figure_is_the_error_of_epsilon_of_plain_images(tmp_path, flags, prediction_type):
    """Computed once more, from the weights and the documented keys; whatever is trained, and however weighted."""
    train(*flags, f"--prediction_type={prediction_type}", "--snr_gamma=5", "--noise_offset=0.1", "--max_train_steps=4")
    at2, at4 = held_out(tmp_path / "out")
    assert (at2["step"], at4["step"]) == (2, 4) and at2["held_out_loss"] != at4["held_out_loss"]
    reset()
    args = script.parse_args([*flags, "--center_crop", "--no-random_flip"])
    rows, column = script.load_rows(args)
    dataset = script.ImageDataset(rows, column, 3, args)
    _, held = script.hold_out(script.Accelerator(cpu=True), dataset, args)
    alphas = DDPMScheduler().alphas_cumprod.double()
    for part, key in (("unet", "held_out_loss"), ("unet_ema", "held_out_loss_ema")):
        unet, losses = UNet2DModel.from_pretrained(tmp_path / "out/checkpoint-4" / part).eval(), []
        for row, row_hash in held.items():
            image = dataset[[(0, row, 1.0)]]["pixel_values"] / 127.5 - 1
            for i in range(9):
                generator = torch.Generator().manual_seed(script.step_seed(row_hash, i))
                noise, a = torch.randn(image.shape, generator=generator), alphas[100 * (i + 1)]
                noisy = (a.sqrt() * image + (1 - a).sqrt() * noise).float()
                with torch.no_grad():
                    predicted = unet(noisy, 100 * (i + 1)).sample
                if prediction_type == "sample":
                    predicted = (noisy - a.sqrt() * predicted) / (1 - a).sqrt()
                if prediction_type == "v_prediction":
                    predicted = a.sqrt() * predicted + (1 - a).sqrt() * noisy
                losses.append(((predicted - noise) ** 2).mean().item())
        losses = np.array(losses).reshape(-1, 9).mean(0)
        assert at4[key] == pytest.approx(losses.mean(), rel=1e-4)
    assert [at4[f"held_out_loss_t0.{i}"] for i in range(1, 10)] == pytest.approx(losses.tolist(), rel=1e-4)  # of EMA


def test_a_perfect_prediction_of_any_type_is_the_noise():
    images, noise, timesteps = torch.randn(9, 3, 4, 4), torch.randn(9, 3, 4, 4), torch.arange(100, 1000, 100)
    for prediction_type in ("epsilon", "sample", "v_prediction"):
        scheduler = DDPMScheduler(prediction_type=prediction_type)
        noisy = scheduler.add_noise(images, noise, timesteps)
        perfect = {"epsilon": noise, "sample": images}.get(prediction_type)
        perfect = scheduler.get_velocity(images, noise, timesteps) if perfect is None else perfect
        assert torch.allclose(script.to_epsilon(perfect, noisy, scheduler, timesteps), noise, atol=1e-4)


def test_it_does_not_depend_on_batch_size_and_processes_and_changes_no_training(tmp_path, flags):
    """The weights stay as they are drawn, so that all runs measure the same model."""
    still = [*flags, "--learning_rate=0", "--max_train_steps=2"]
    train(*still)
    (one,) = held_out(tmp_path / "out")
    train(*still, "--train_batch_size=5", f"--output_dir={tmp_path / 'batch'}")
    assert held_out(tmp_path / "batch") == [one]
    pids = start(lambda: train(*still, f"--output_dir={tmp_path / 'two'}"), 2, tmp_path / "log")
    assert finish(pids) == [0, 0], (tmp_path / "log").read_text()
    (two,) = held_out(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-6)
    train(*flags, f"--output_dir={tmp_path / 'often'}", "--validation_steps=1")
    train(*flags, f"--output_dir={tmp_path / 'once'}", "--validation_steps=6")
    assert len(held_out(tmp_path / "often")) == 6 and len(held_out(tmp_path / "once")) == 1
    assert_same_weights(tmp_path / "often/checkpoint-6/unet", tmp_path / "once/checkpoint-6/unet")
    assert held_out(tmp_path / "often")[-1] == held_out(tmp_path / "once")[-1]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_a_kill_kept_from_a_checkpoint_comes_when_it_is_resumed(tmp_path, flags, monkeypatch, num_processes):
    flags = [*flags, "--checkpointing_steps=2", "--resume_from_checkpoint=latest"]
    assert set(finish(start(lambda: train(*flags, f"--output_dir={tmp_path / 'whole'}"), num_processes))) == {0}
    log_held_out_loss = script.log_held_out_loss
    with monkeypatch.context() as killed:
        killed.setattr(
            script, "log_held_out_loss", lambda *args: args[-1] == 4 and os._exit(9) or log_held_out_loss(*args)
        )
        assert 9 in finish(start(lambda: train(*flags), num_processes))
    assert checkpoints(tmp_path / "out") == {"checkpoint-2", "checkpoint-4"}
    assert [record["step"] for record in held_out(tmp_path / "out")] == [2]
    pids = start(lambda: train(*flags), num_processes, tmp_path / "log")
    assert set(finish(pids)) == {0}, (tmp_path / "log").read_text()
    assert held_out(tmp_path / "out") == held_out(tmp_path / "whole")
    assert [record["step"] for record in held_out(tmp_path / "out")] == [2, 4, 6]
    assert_same_weights(tmp_path / "out/unet", tmp_path / "whole/unet")
    train(*flags)  # there is nothing left to do, and nothing comes twice
    assert [record["step"] for record in held_out(tmp_path / "out")] == [2, 4, 6]


def test_a_signal_does_not_wait_for_it(tmp_path, flags, monkeypatch):
    """What is broken off leaves no record, and comes when the run is resumed."""
    train(*flags, f"--output_dir={tmp_path / 'whole'}")
    step_seed, signals = script.step_seed, []

    def sending(*key):
        if len(key) == 2 and key[0] > 2**32 and not signals:  # the first noise of the held-out loss
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        return step_seed(*key)

    with monkeypatch.context() as signalled:
        signalled.setattr(script, "step_seed", sending)
        assert finish(start(lambda: train(*flags))) == [143]
    assert held_out(tmp_path / "out") == []
    train(*flags, "--resume_from_checkpoint=latest")
    assert held_out(tmp_path / "out") == held_out(tmp_path / "whole")


def test_a_checkpoint_that_has_seen_the_images_is_refused(tmp_path, flags, capfd):
    train(*flags, "--holdout=0", "--max_train_steps=2")
    path = tmp_path / "out/checkpoint-2/trainer_state.json"
    state = json.loads(path.read_text())
    del state["settings"]["holdout"], state["checksums"]  # of a version that knew none
    path.write_text(json.dumps(state))
    with pytest.raises(SystemExit):
        train(*flags, "--resume_from_checkpoint=latest")
    assert "checkpoint-2 was trained on images that would be held out" in capfd.readouterr().err
    train(*flags, "--holdout=0", "--max_train_steps=4", "--resume_from_checkpoint=latest")
    assert held_out(tmp_path / "out") == [] and "checkpoint-4" in checkpoints(tmp_path / "out")
    other = [*flags, f"--output_dir={tmp_path / 'other'}"]
    train(*other, "--max_train_steps=2")
    with pytest.raises(SystemExit):
        train(*other, "--seed=1", "--resume_from_checkpoint=latest")
    capfd.readouterr()
    train(*other, "--holdout=0", "--resume_from_checkpoint=latest")
    assert ", holdout 4.0 -> 0.0" in capfd.readouterr().out


def test_a_broken_image_is_named_and_left_out_and_all_broken_end_the_run(tmp_path, flags, capfd):
    _, held = split(tmp_path / "images", "--holdout=4")
    train(*flags, "--learning_rate=0", "--max_train_steps=2")
    for i, name in enumerate(sorted(held)):
        (tmp_path / "images" / name).write_bytes(b"no image")
        if i == 0:
            train(*flags, "--learning_rate=0", "--max_train_steps=3", f"--output_dir={tmp_path / 'less'}")
            assert f"{name} (" in capfd.readouterr().err
    whole, less = held_out(tmp_path / "out")[0], held_out(tmp_path / "less")[0]
    assert less["held_out_loss"] == pytest.approx(whole["held_out_loss"], rel=0.5) and less != whole
    with pytest.raises(SystemExit):
        train(*flags, f"--output_dir={tmp_path / 'none'}")
    assert "none of the 4 images that --holdout sets aside could be decoded" in capfd.readouterr().err


def test_bar_card_and_curve_tell_of_it(tmp_path, flags, capfd):
    train(*flags)
    assert "held out" in capfd.readouterr().err
    last = held_out(tmp_path / "out")[-1]
    card = (tmp_path / "out/README.md").read_text()
    for name in ("held_out_loss", "held_out_loss_ema", "held_out_loss_t0.1", "held_out_loss_t0.9"):
        assert f"| {name} | {last[name]:.4g} |" in card
    assert script.plot_loss(tmp_path / "out") == metrics(tmp_path / "out")[-2]["loss"]  # of training, the last but one


def test_cache_and_images_hold_out_the_same_and_measure_alike(tmp_path):
    """Captions of which one is drawn, flips and dropped captions among them."""
    captions = [[f"a digit {word}" for word in "zero one two".split()[: 1 + i % 3]] for i in range(12)]
    make_captioned(tmp_path / "images", 12, captions)
    torch.manual_seed(0)
    UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=32,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).save_config(tmp_path / "unet")  # fmt: skip
    shared = [f"--pretrained_model_name_or_path={ROOT / 'demo/models'}", "--random_flip"]
    images = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--dataloader_num_workers=0"]
    train(*shared, *images, "--center_crop", "--rows_per_shard=5", f"--output_dir={tmp_path / 'cache'}",
          script=precompute_latents)  # fmt: skip
    flags = [
        *shared, f"--unet_config_name_or_path={tmp_path / 'unet'}", "--holdout=0.4", "--max_train_steps=2",
        "--caption_dropout=0.5", "--train_batch_size=3", "--report_to=none", "--validation_steps=1",
        "--lr_scheduler=constant_with_warmup", "--lr_warmup_steps=100", "--learning_rate=0",
    ]  # fmt: skip
    train(*flags, *images, f"--output_dir={tmp_path / 'a'}", script=train_text_to_image)
    train(*flags, f"--latents_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'b'}", script=train_text_to_image)
    a, b = held_out(tmp_path / "a"), held_out(tmp_path / "b")
    assert len(a) == len(b) == 2 and a[1] == pytest.approx(b[1], rel=1e-3)
    assert {**a[0], "step": 2} == a[1]  # the weights did not move, and nothing else makes a difference
