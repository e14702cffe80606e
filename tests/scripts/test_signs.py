"""Signs in the loss of real short runs: each one with the fault, none without a fault."""

import random
import shlex

import pytest
from conftest import ROOT, Script, make_unet_config

from diffusion_training.training.step.signs import judge_end, read_metrics

pytestmark = pytest.mark.usefixtures("without_figures")
OF_THE_LOSS = {"zero", "high", "nothing"}
SHORT = """--train_batch_size=16 --max_train_steps=120 --logging_steps=2 --lr_warmup_steps=10
    --no-use_ema --report_to=none --checkpointing_steps=1000000"""


def find_signs(train, folder, argv):
    """Run a trainer; returns the signs in its loss, {kind: sentence}."""
    train(f"--output_dir={folder}", *shlex.split(argv))
    signs = {}
    for record in read_metrics(folder):
        signs |= record.get("signs", {})
    return {kind: text for kind, text in signs.items() if kind in OF_THE_LOSS}


def train_digits(tmp_path, argv, name="out"):
    (tmp_path / name).mkdir()
    config = make_unet_config(tmp_path / name)
    data = f"--train_data_dir={ROOT}/demo/digits --resolution=8 --dataloader_num_workers=0"
    data += f" --model_config_name_or_path={config} --ddpm_num_inference_steps=1"
    data += " --eval_batch_size=1 --save_images_epochs=1000 --save_model_epochs=1000"
    return find_signs(
        Script("train_unconditional"), tmp_path / name / "out", f"{data} {SHORT} {argv}"
    )


def make_losses(slope, scale=1.0, count=160):
    """Losses that fall by `slope` a record, in the noise of random timesteps."""
    noise = random.Random(0)
    return [scale * (1 - slope * number + noise.gauss(0, 0.02)) for number in range(count)]


@pytest.mark.parametrize("losses, falls", [
    (make_losses(0.0), False),  # learned what it can
    (make_losses(-0.003), False),  # rises
    (make_losses(0.0005), True),  # the rate is too low: the quarters differ by a record's noise
    (make_losses(0.003), True),  # the run is too short
    (make_losses(0.006, count=32), True),
    (make_losses(0.006, count=31), False),  # too few records
    ([*make_losses(0.01, count=80), *make_losses(0.0, 0.2, count=80)], False),  # fell before
])  # fmt: skip
def test_a_loss_that_falls_beyond_its_noise_at_the_end_is_named(losses, falls):
    records = [{"loss": loss, "lr": 1e-4} for loss in losses] + [{"held_out_loss": 1.0}]
    said = judge_end(records)
    assert bool(said) == falls, said
    for record in records[:10]:
        record["lr"] = 1e-5  # a warm-up, after which the rate is constant
    assert judge_end(records) == said
    records[-2]["lr"] = 5e-5  # a rate that decays makes the loss fall
    assert not judge_end(records)


def test_the_sentence_about_a_falling_loss_says_what_to_do():
    said = judge_end([{"loss": 1 - 0.003 * number, "lr": 1e-4} for number in range(160)])
    assert "The loss was still falling, from 0.702 to 0.581 in the second half of the run" in said
    assert "train longer, or try a higher --learning_rate" in said


@pytest.mark.parametrize("argv, kind, words", [
    ("--learning_rate=3e-3", None, ""),
    ("--learning_rate=0 --max_train_steps=32", "zero", "the learning rate is 0"),
    pytest.param(
        "--learning_rate=3e-3 --lr_scheduler=piecewise_constant --lr_step_rules=1:62,30:74,1"
        " --lr_warmup_steps=0", "high", "the loss rose from 0.", marks=pytest.mark.long
    ),
    pytest.param(
        "--learning_rate=1", "nothing", "the loss is still 1", marks=pytest.mark.long
    ),
    pytest.param(
        "--learning_rate=1e-4", "nothing", "try --find_lr, or more steps", marks=pytest.mark.long
    ),
])  # fmt: skip
def test_a_run_with_a_fault_has_its_sign_and_no_other(tmp_path, argv, kind, words):
    signs = train_digits(tmp_path, argv)
    assert [*signs] == ([kind] if kind else []), signs
    assert all(words in text and len(text) < 160 for text in signs.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["epsilon", "v_prediction", "captions", "flow", "lora"])
def test_signs_of_forty_runs_point_the_right_way(tmp_path, name):
    """Eight runs of a trainer, from a rate that learns nothing to one that breaks the model.

    The held-out losses of the eight say what is true: "high" if a lower rate is better, "nothing"
    if another rate is much better. A run at a rate near the best one has no sign.
    """
    train, argv = make_trainer(name, tmp_path)
    signs, losses = {}, {}
    for rate in (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1.0):
        folder = tmp_path / f"{rate}"
        flags = f"{SHORT} {argv} --max_train_steps=400 --holdout=64 --learning_rate={rate}"
        try:
            signs[rate] = find_signs(train, folder, flags)
        except SystemExit:  # the script's own error, because the loss is not finite
            assert rate == 1
            continue
        records = read_metrics(folder)
        losses[rate] = [r["held_out_loss"] for r in records if "held_out_loss" in r][-1]
        print(name, rate, f"{losses[rate]:.3f}", signs[rate])
    best = min(losses.values())
    for rate, kinds in signs.items():
        lower = [loss for other, loss in losses.items() if other < rate]
        if "high" in kinds:
            assert min(lower, default=0) < losses[rate], rate
        if "nothing" in kinds:
            assert best < 0.9 * losses[rate], rate
        if losses[rate] < 1.1 * best:
            assert not kinds, rate
    assert name == "lora" or any(signs.values())


def make_trainer(name, folder):
    """(a trainer, its flags): of the digits, or of a LoRA of the nine."""
    demo = ROOT / "demo"
    if name in ("epsilon", "v_prediction"):
        flags = f"""--train_data_dir={demo}/digits --resolution=8 --dataloader_num_workers=0
            --model_config_name_or_path={make_unet_config(folder)} --ddpm_num_inference_steps=1
            --eval_batch_size=1 --save_images_epochs=1000 --save_model_epochs=1000
            --prediction_type={name} {"--noise_offset=0.1" * (name == "epsilon")}"""
        return Script("train_unconditional"), flags
    samples = "--num_validation_images=1 --num_inference_steps=1"
    if name == "lora":
        base = f"--pretrained_model_name_or_path={demo}/zero_to_eight"
        data = f"--train_data_dir={demo}/nines --resolution=8 --dataloader_num_workers=0"
        return Script("train_text_to_image"), f"{base} {data} {samples} --rank=4"
    family = "prx" if name == "flow" else "sd"
    base = f"--pretrained_model_name_or_path={demo}/models"
    data = [f"--train_data_dir={demo}/digits", "--resolution=8", "--dataloader_num_workers=0"]
    precompute = Script("precompute_latents")
    precompute(base, *data, f"--model_family={family}", f"--output_dir={folder}/cache")
    models = f"{base} --latents_dir={folder}/cache"
    if name == "flow":
        config = f"--transformer_config_name_or_path={demo}/digits_flow_transformer.json"
        return Script("train_flow"), f"{models} {samples} {config} --train_batch_size=64"
    config = f"--unet_config_name_or_path={demo}/digits_text_to_image_unet.json --snr_gamma=5"
    return Script("train_text_to_image"), f"{models} {samples} {config}"
