"""Signs in the loss of real short runs: each one with the fault, none without a fault."""

import shlex

import pytest
from conftest import ROOT, Script, make_unet_config

from diffusion_training.training.signs import read_metrics

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


@pytest.mark.parametrize("argv, kind, words", [
    ("--learning_rate=3e-3", None, ""),
    ("--learning_rate=0 --max_train_steps=32", "zero", "the learning rate is 0"),
    ("--learning_rate=3e-3 --lr_scheduler=piecewise_constant --lr_step_rules=1:62,30:74,1"
     " --lr_warmup_steps=0", "high", "the loss rose from 0."),
    ("--learning_rate=1", "nothing", "the loss is still 1"),
    ("--learning_rate=1e-4", "nothing", "try --find_lr, or more steps"),
])  # fmt: skip
def test_a_run_with_a_fault_has_its_sign_and_no_other(tmp_path, argv, kind, words):
    signs = train_digits(tmp_path, argv)
    assert [*signs] == ([kind] if kind else []), signs
    assert all(words in text and len(text) < 160 for text in signs.values())


@pytest.mark.long
def test_ten_good_runs_have_no_sign_in_their_loss(tmp_path):
    """Of all objectives and trainers, at rates a factor of ten apart, also with a LoRA."""
    argv = " --max_train_steps=400 --logging_steps=10"
    runs = [
        "--learning_rate=1e-2 --seed=1",
        "--learning_rate=1e-3 --seed=2 --train_batch_size=64",
        "--learning_rate=3e-3 --seed=3 --lr_scheduler=constant",
        "--learning_rate=3e-3 --prediction_type=v_prediction --snr_gamma=5"
        " --ddpm_beta_schedule=squaredcos_cap_v2",
        "--learning_rate=3e-3 --prediction_type=sample",
        "--learning_rate=3e-3 --prediction_type=epsilon --snr_gamma=5 --noise_offset=0.1",
    ]
    for i, flags in enumerate(runs):
        assert train_digits(tmp_path, argv + " " + flags, f"out-{i}") == {}, flags
    demo = ROOT / "demo"
    for family, script, model in (
        (
            "sd",
            "train_text_to_image",
            f"--unet_config_name_or_path={demo}/digits_text_to_image_unet",
        ),
        ("prx", "train_flow", f"--transformer_config_name_or_path={demo}/digits_flow_transformer"),
    ):
        Script("precompute_latents")(
            f"--output_dir={tmp_path / family}", f"--model_family={family}"
        )
        flags = f"--latents_dir={tmp_path / family} --pretrained_model_name_or_path={demo}/models"
        flags += f" {model}.json {SHORT} {argv} --train_batch_size=64 --lr_scheduler=cosine"
        for seed in (1, 2):
            folder = tmp_path / f"{family}-{seed}"
            signs = find_signs(
                Script(script), folder, f"{flags} --learning_rate=2e-3 --seed={seed}"
            )
            assert signs == {}, folder
