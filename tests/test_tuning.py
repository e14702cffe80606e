"""What helps to choose a learning rate and a batch size."""

import argparse
import json
import math

import pytest
import torch
from conftest import assert_same_weights, finish, make_images, metrics, reset, start
from PIL import Image

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


def tree(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "find_lr" not in path.name]
    return {path: path.read_bytes() for path in files}


def test_a_range_test_leaves_all_as_it_was(tmp_path, flags):
    """Before a run, on two processes, and in the middle of it: what is trained then is the same."""
    test = ["--find_lr", "--find_lr_steps=12", "--gradient_accumulation_steps=2", "--train_batch_size=3"]
    assert finish(start(lambda: train(*flags, *test), 2, tmp_path / "log")) == [0, 0], (tmp_path / "log").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock", "find_lr.json", "find_lr.png"}
    train(*flags)
    before = tree(tmp_path / "out")
    train(*flags, *test, "--resume_from_checkpoint=latest", "--max_train_steps=3", "--push_to_hub")
    assert tree(tmp_path / "out") == before
    train(*flags, "--max_train_steps=3", "--resume_from_checkpoint=latest")
    train(*flags, "--max_train_steps=3", f"--output_dir={tmp_path / 'other'}")
    assert_same_weights(tmp_path / "out/unet", tmp_path / "other/unet")


def test_a_range_test_trains_at_rates_that_grow(tmp_path, flags, monkeypatch, capsys):
    """They are those of the optimizer, its losses those of real steps, and the trained weights end up elsewhere."""
    seen, train_step = [], script.train_step

    def recording(accelerator, unet, optimizer, *rest):
        norm = sum(weight.detach().double().square().sum() for weight in unet.parameters()).item()
        sums = train_step(accelerator, unet, optimizer, *rest)
        seen.append((optimizer.param_groups[0]["lr"], (sums[0] / sums[1]).item(), norm))
        return sums

    monkeypatch.setattr(script, "train_step", recording)
    train(*flags, "--find_lr", "--find_lr_steps=10", "--find_lr_max=1e-2", "--train_batch_size=5")
    found = json.loads((tmp_path / "out/find_lr.json").read_text())
    rates, losses, norms = map(list, zip(*seen, strict=True))
    assert found["rates"] == rates == pytest.approx([10 ** (-7 + 5 * i / 9) for i in range(10)])
    assert found["losses"] == pytest.approx(losses) and found["smoothed"][0] == pytest.approx(losses[0])
    assert norms[-1] != norms[0] and len(set(norms)) == 10
    assert f"--learning_rate {found['suggestion']:.2g}: {found['reason']}" in capsys.readouterr().out
    assert Image.open(tmp_path / "out/find_lr.png").size[0] > 300


def test_a_range_test_suggests_a_tenth_of_the_best_and_stops_when_it_diverges(tmp_path, flags, monkeypatch):
    def bowl(accelerator, unet, optimizer, *rest):
        rate = optimizer.param_groups[0]["lr"]
        return torch.tensor([8 * (1 + (math.log10(rate) + 3) ** 2), 8, 0])

    monkeypatch.setattr(script, "train_step", bowl)
    train(*flags, "--find_lr", "--find_lr_steps=700")
    found = json.loads((tmp_path / "out/find_lr.json").read_text())
    assert found["suggestion"] == pytest.approx(1e-4, rel=0.3)
    assert 0.054 < found["rates"][-1] < 0.1 and found["smoothed"][-1] > 4 * min(found["smoothed"])


def test_a_range_test_that_is_not_finite_is_one_sentence(tmp_path, flags, monkeypatch, capfd):
    monkeypatch.setattr(script, "train_step", lambda *args: torch.tensor([math.nan, 1, 0]))
    with pytest.raises(SystemExit):
        train(*flags, "--find_lr")
    assert "not finite from the start" in capfd.readouterr().err and not (tmp_path / "out/find_lr.json").exists()
    with pytest.raises(SystemExit):
        script.parse_args([*flags, "--find_lr", "--find_lr_min=1", "--find_lr_max=0.1"])
    assert "--find_lr_min 1.0 is not below --find_lr_max 0.1" in capfd.readouterr().err
