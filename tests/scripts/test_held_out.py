"""The held-out loss: its images are not trained on, it is reproducible, and survives kills."""

import os
import shutil
import signal

import datasets
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    list_unconditional_flags,
    make_captioned,
    make_tiny_unet,
    metrics,
    patch,
    start,
    wait_until,
)

import train_unconditional as script
from diffusion_training.data.rows import load_rows
from diffusion_training.draws import step_seed
from diffusion_training.training.held_out import hold_out, log_held_out_loss

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_unconditional"), Script("precompute_latents")
train_text_to_image = Script("train_text_to_image")


@pytest.fixture
def flags(tmp_path):
    """6 steps on 12 images, 4 of which are held out."""
    return list_unconditional_flags(
        tmp_path,
        12,
        *"--train_batch_size=2 --max_train_steps=6 --holdout=4 --validation_steps=2".split(),
        "--random_flip",
    )


def held_out(folder):
    return [record for record in metrics(folder) if "held_out_loss" in record]


def test_held_out_images_are_not_trained_on(tmp_path, flags, monkeypatch):
    seen, compute_loss = [], script.compute_loss

    def record(*given):
        images = given[-2].clean
        seen.extend(((images.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().int().tolist())
        return compute_loss(*given)

    monkeypatch.setattr(script, "compute_loss", record)
    train(*flags, "--max_train_steps=8", "--validation_steps=8")
    args = script.parse_args(flags)
    dataset = script.ImageDataset(load_rows(args), 3, 0, args)
    rows, held = hold_out(Accelerator(cpu=True), dataset, args.holdout, args.seed)
    names = dataset.names()
    # Rows are identified by their file names
    assert {names[row] for row in held} == {"0.png", "1.png", "5.png", "10.png"}
    assert (
        sorted(seen) == sorted(2 * [int(names[row].split(".")[0]) for row in rows])
        and len(rows) == 8
    )


def test_held_out_loss_is_independent_of_batch_size_and_process_count(tmp_path, flags):
    """A learning rate of 0 lets all runs measure the same model.

    Measuring more often does not change the training.
    """
    still = [*flags, "--learning_rate=0", "--max_train_steps=2"]
    train(*still)
    (one,) = held_out(tmp_path / "out")
    train(
        *still,
        "--train_batch_size=5",
        "--snr_gamma=5",
        "--noise_offset=0.1",
        f"--output_dir={tmp_path / 'batch'}",
    )
    assert held_out(tmp_path / "batch") == [one]
    train.fork(*still, f"--output_dir={tmp_path / 'two'}", num_processes=2)
    (two,) = held_out(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-6)
    flags = [*flags, "--max_train_steps=3"]
    train(*flags, f"--output_dir={tmp_path / 'often'}", "--validation_steps=1")
    train(*flags, f"--output_dir={tmp_path / 'once'}", "--validation_steps=3")
    assert len(held_out(tmp_path / "often")) == 3 and len(held_out(tmp_path / "once")) == 1
    assert_same_weights(tmp_path / "often/checkpoint-3/unet", tmp_path / "once/checkpoint-3/unet")
    assert held_out(tmp_path / "often")[-1] == held_out(tmp_path / "once")[-1]


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_resuming_measures_the_held_out_loss_that_a_kill_prevented(
    tmp_path, flags, monkeypatch, num_processes
):
    flags = [*flags, "--checkpointing_steps=2", "--resume_from_checkpoint=latest"]
    train.fork(*flags, f"--output_dir={tmp_path / 'whole'}", num_processes=num_processes)

    def die_at_step_4(*args):
        if args[-1] == 4:
            wait_until((tmp_path / "out/checkpoint-4").exists)
            os._exit(9)
        log_held_out_loss(*args)

    with monkeypatch.context() as at_four:
        patch(at_four, "log_held_out_loss", die_at_step_4)
        assert 9 in finish(start(lambda: train(*flags), num_processes))
    assert checkpoints(tmp_path / "out") == {"checkpoint-2", "checkpoint-4"}
    assert [record["step"] for record in held_out(tmp_path / "out")] == [2]
    train.fork(*flags, num_processes=num_processes)
    assert held_out(tmp_path / "out") == held_out(tmp_path / "whole")
    assert [record["step"] for record in held_out(tmp_path / "out")] == [2, 4, 6]
    assert_same_weights(tmp_path / "out/unet", tmp_path / "whole/unet")
    if num_processes == 1:
        train(*flags)  # the run is done, and nothing is recorded twice
        assert [record["step"] for record in held_out(tmp_path / "out")] == [2, 4, 6]


def test_signal_interrupts_the_held_out_loss(tmp_path, flags, monkeypatch):
    """An interrupted measurement leaves no record, and is repeated when the run is resumed."""
    flags, signals = [*flags, "--max_train_steps=4"], []
    train(*flags, f"--output_dir={tmp_path / 'whole'}")

    def send_once(*key):
        if key[0] == "held out" and not signals:  # the first noise of the held-out loss
            signals.append(os.kill(os.getpid(), signal.SIGTERM))
        return step_seed(*key)

    with monkeypatch.context() as signalled:
        patch(signalled, "step_seed", send_once)
        train.fork(*flags, status=143)
    assert held_out(tmp_path / "out") == []
    train(*flags, "--resume_from_checkpoint=latest")
    assert (
        held_out(tmp_path / "out") == held_out(tmp_path / "whole")
        and len(held_out(tmp_path / "out")) == 2
    )


def test_progress_bar_and_card_show_the_held_out_loss(tmp_path, flags, capfd):
    train(*flags, "--max_train_steps=4")
    assert ", held out " in capfd.readouterr().out
    last = held_out(tmp_path / "out")[-1]
    card = (tmp_path / "out/README.md").read_text()
    for name in ("held_out_loss", "held_out_loss_ema", "held_out_loss_t0.1", "held_out_loss_t0.9"):
        assert f"| {name} | {last[name]:.4g} |" in card
    error = train.refused(*flags, "--holdout=3", "--resume_from_checkpoint=latest")
    assert "checkpoint-4 held out other images, so it may have been trained" in error


def test_cache_and_images_give_the_same_held_out_loss(tmp_path):
    """Also with several captions per image and flips; captions are dropped only in training."""
    captions = [
        [f"a digit {word}" for word in "zero one two".split()[: 1 + i % 3]] for i in range(12)
    ]
    make_captioned(tmp_path / "images", 12, captions)
    torch.manual_seed(0)
    make_tiny_unet().save_config(tmp_path / "unet")
    shared = [f"--pretrained_model_name_or_path={ROOT / 'demo/models'}", "--random_flip"]
    images = [
        f"--train_data_dir={tmp_path / 'images'}",
        "--resolution=16",
        "--dataloader_num_workers=0",
    ]
    precompute(
        *shared,
        *images,
        "--center_crop",
        "--rows_per_shard=5",
        f"--output_dir={tmp_path / 'cache'}",
    )
    flags = [
        *shared,
        f"--unet_config_name_or_path={tmp_path / 'unet'}",
        "--holdout=0.4",
        "--max_train_steps=2",
        "--train_batch_size=3",
        "--report_to=none",
        "--validation_steps=1",
        "--lr_scheduler=constant_with_warmup",
        "--lr_warmup_steps=100",
        "--learning_rate=0",
    ]
    for name, source, dropout in (
        ("a", images, 0.9),
        ("b", [f"--latents_dir={tmp_path / 'cache'}"], 0),
    ):
        argv = [*flags, *source, f"--caption_dropout={dropout}"]
        train_text_to_image(*argv, f"--output_dir={tmp_path / name}")
    a, b = held_out(tmp_path / "a"), held_out(tmp_path / "b")
    assert len(a) == len(b) == 2 and a[1] == pytest.approx(b[1], rel=1e-3)
    # The weights did not change, and the loss depends on nothing else
    assert {**a[0], "step": 2} == a[1]


@pytest.mark.parametrize("way", ["deleted", "more", "order", "parent", "sample"])
def test_renamed_or_renumbered_rows_never_hold_out_trained_images(tmp_path, flags, way):
    """The checkpoint recognizes held-out images by their content."""
    flags += ["--max_train_steps=2", "--resume_from_checkpoint=latest", "--validation_steps=99"]
    files = sorted((tmp_path / "images").iterdir())
    table = tmp_path / "table/train.parquet"

    def write(paths):
        table.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_dict({"image": [path.read_bytes() for path in paths]}).to_parquet(
            table
        )

    write(files)
    if way in ("order", "sample"):
        flags += [f"--train_data_dir={table.parent}", "--image_column=image"]
    train(*flags, *["--max_train_samples=9"] * (way == "sample"))
    if way == "deleted":
        (tmp_path / "images/5.png").unlink()
    elif way == "more":
        shutil.copytree(tmp_path / "images", tmp_path / "images/a")
    elif way == "order":
        write(files[::-1])
    elif way == "parent":
        (tmp_path / "data").mkdir()
        (tmp_path / "images").rename(tmp_path / "data/images")
        flags += [f"--train_data_dir={tmp_path / 'data'}"]
    error = train.refused(*flags, "--max_train_steps=3")
    assert "checkpoint-2 held out other images, so it may have been" in error
    train(*flags, "--max_train_steps=3", "--holdout=0")


def test_moved_or_cached_images_are_held_out_the_same_way(tmp_path, flags):
    flags += ["--max_train_steps=2", "--resume_from_checkpoint=latest", "--validation_steps=99"]
    train(*flags)
    (tmp_path / "images").rename(tmp_path / "moved")
    flags += [f"--train_data_dir={tmp_path / 'moved'}"]
    train(*flags, "--max_train_steps=3")
    train(*flags, "--cache_images", "--max_train_steps=4")
