"""What helps to choose a learning rate and a batch size."""

import argparse

import pytest
from conftest import make_images, metrics, reset

import train_unconditional as script


@pytest.fixture
def flags(tmp_path, unet_config):
    make_images(tmp_path / "images", 12)
    return [
        f"--train_data_dir={tmp_path / 'images'}", f"--model_config_name_or_path={unet_config}", "--resolution=16",
        f"--output_dir={tmp_path / 'out'}", "--train_batch_size=2", "--max_train_steps=2", "--learning_rate=1e-4",
        "--ddpm_num_inference_steps=2", "--eval_batch_size=1", "--lr_warmup_steps=0", "--lr_scheduler=constant",
        "--logging_steps=1", "--report_to=none", "--dataloader_num_workers=0",
    ]  # fmt: skip


def train(*argv):
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


# ------------------------------------------------------------------- the learning rate and the batch size


@pytest.mark.parametrize("argv, images, factor", [
    (["--scale_lr"], 8, 8), (["--scale_lr", "linear", "--base_batch_size=64"], 256, 4), (["--scale_lr=sqrt"], 64, 8),
    (["--scale_lr=sqrt", "--base_batch_size=64"], 256, 2), (["--scale_lr=auto"], 512, 512), ([], 512, 1),
    (["--scale_lr=auto", "--base_batch_size=64"], 2048, 16), (["--scale_lr", "--no-scale_lr"], 512, 1),
    (["--scale_lr=auto", "--base_batch_size=2048"], 512, 0.5),
])  # fmt: skip
def test_learning_rates_are_scaled_by_rule(flags, argv, images, factor):
    args = script.parse_args([*flags, *argv])
    script.scale_learning_rate(argparse.Namespace(print=lambda line: None), images, args)
    assert args.learning_rate == pytest.approx(1e-4 * factor)


def test_the_scaled_rate_is_printed_and_trained_with(tmp_path, flags, capsys):
    argv = ["--scale_lr", "--gradient_accumulation_steps=4"]
    train(*flags, *argv)
    assert "Learning rate (linear, 8 images a step): 1e-4 x 8 = 8e-4\n" in capsys.readouterr().out
    assert {record["lr"] for record in metrics(tmp_path / "out")} == {8e-4}
    # The file of this command says what was given, so that it is not multiplied twice.
    again = script.parse_args([f"@{tmp_path / 'out/run.args'}"])
    assert (again.learning_rate, again.scale_lr, again.base_batch_size) == (1e-4, "linear", 1)
    (tmp_path / "old.args").write_text("--no-scale_lr")
    assert not script.parse_args([*flags, *argv, f"@{tmp_path / 'old.args'}"]).scale_lr  # as it was written before


def test_a_base_without_a_rule_has_no_effect(flags, capsys):
    script.parse_args([*flags, "--base_batch_size=64"])
    assert "--base_batch_size 64 has no effect" in capsys.readouterr().err
