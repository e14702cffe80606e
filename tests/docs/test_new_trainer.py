"""The trainer of docs/new-trainer.md works, with all features of the package."""

import importlib.util
import json
import os
import signal
import sys
import types

import pytest
import torch
from conftest import ROOT, Script, assert_same_weights, checkpoints, finish, launch, metrics, start
from diffusers import UNet2DModel
from PIL import Image

from diffusion_training.batches import Prepared

pytestmark = pytest.mark.usefixtures("without_figures")
CODE = (ROOT / "examples/train_rectified_flow.py").read_text()


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The example."""
    path = tmp_path / "train_rectified_flow.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return Script(path.stem)


@pytest.fixture
def flags(tmp_path):
    return [
        f"--train_data_dir={ROOT / 'demo/digits'}",
        f"--output_dir={tmp_path / 'out'}",
        "--report_to=none",
        "--max_train_samples=40",
        "--train_batch_size=8",
        "--num_train_epochs=2",
        "--logging_steps=1",
        "--lr_warmup_steps=2",
        "--num_inference_steps=2",
        "--resume_from_checkpoint=latest",
    ]


def test_new_trainer_is_short():
    assert len(CODE.splitlines()) < 300 and max(map(len, CODE.splitlines())) <= 100


@pytest.mark.long
def test_new_trainer_learns_and_writes_its_outputs(train, flags, tmp_path):
    more = ["--max_train_samples=400", "--num_train_epochs=4", "--train_batch_size=32"]
    train(*flags, *more, "--validation_epochs=2")
    losses = [record["loss"] for record in metrics(tmp_path / "out")]
    assert len(losses) == 4 * 13 and sum(losses[-10:]) < 0.8 * sum(losses[:10])
    unet = UNet2DModel.from_pretrained(tmp_path / "out/unet")
    with torch.no_grad():
        assert unet(torch.zeros(1, 1, 8, 8), 500, class_labels=torch.tensor([3])).sample.shape == (
            1,
            1,
            8,
            8,
        )
    samples = sorted((tmp_path / "out/samples").glob("*.png"))
    assert [path.name for path in samples] == [f"step-{step:07}.png" for step in (26, 52)]
    assert Image.open(samples[1]).height > 10 * 8 and (tmp_path / "out/report.html").exists()
    assert "rectified-flow" in (tmp_path / "out/README.md").read_text()


def test_new_trainers_flow_leads_from_noise_to_the_image(train):
    """A model that knows the image predicts it at any time, and draws it with any step count."""
    image = torch.rand(1, 1, 8, 8) * 2 - 1

    class Knows(torch.nn.Module):
        def forward(self, x, timestep, class_labels):
            t = (timestep / 1000).view(-1, 1, 1, 1)
            return torch.nn.Module(), (x - image) / t

    class Unet(Knows):
        def forward(self, *given, **labels):
            return type("Output", (), {"sample": super().forward(*given, **labels)[1]})

    images, labels = image.expand(6, -1, -1, -1), {"class_labels": torch.zeros(6, dtype=torch.long)}
    prepared = Prepared(images, labels, {})
    script = train.module
    loss = script.compute_loss(
        types.SimpleNamespace(predict=script.predict_velocity),
        {"unet": Unet()},
        prepared,
        torch.full((6,), 1 / 6),
    )
    assert loss < 1e-6
    args = script.parse_args(["--train_data_dir=.", "--num_inference_steps=3"])
    drawn = (
        torch.tensor(script.draw_samples(Unet(), torch.device("cpu"), args))
        .float()
        .permute(0, 1, 4, 2, 3)
        / 127.5
        - 1
    )
    assert (drawn - image).abs().max() < 0.01


def test_new_trainer_supports_holdout_save_best_compile_and_find_lr(
    train, flags, tmp_path, monkeypatch
):
    compiled = []
    monkeypatch.setattr(
        train.module, "compile_model", lambda model, backend: compiled.append(backend)
    )
    train(*flags, "--holdout=8", "--save_best", "--no-use_ema", "--compile")
    held_out = [record for record in metrics(tmp_path / "out") if "held_out_loss" in record]
    assert len(held_out) == 1 and "held_out_loss_ema" not in held_out[0] and compiled
    assert (tmp_path / "out/best/unet").is_dir()
    assert not list((tmp_path / "out").rglob("unet_ema"))
    train(*flags, f"--output_dir={tmp_path / 'rate'}", "--find_lr", "--find_lr_steps=10")
    assert (tmp_path / "rate/find_lr.json").exists() and not (tmp_path / "rate/unet").exists()
    assert "--train_data_dir or --dataset_name is needed" in train.refused(status=2)


@pytest.mark.ci
def test_new_trainer_resumes_after_a_kill_with_the_same_bits(
    train, flags, tmp_path, num_processes=2
):
    flags += ["--gradient_accumulation_steps=2", "--checkpointing_steps=1", "--train_batch_size=4"]

    def run(*more, dies_after=None):
        def work():
            if dies_after:
                take_step = train.module.train_step

                def dying(*given):
                    step = given[5]
                    if step.number == dies_after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return take_step(*given)

                train.module.train_step = dying
            train(*flags, *more)

        pids = start(work, num_processes, log=tmp_path / "log")
        codes = finish(pids)
        assert (set(codes) == {0}) == (dies_after is None), (tmp_path / "log").read_text()

    run(f"--output_dir={tmp_path / 'whole'}")
    run(dies_after=3)
    # checkpoint-3 may be unfinished
    assert "checkpoint-2" in checkpoints(tmp_path / "out") and not (tmp_path / "out/unet").exists()
    run()
    last = max(checkpoints(tmp_path / "whole"), key=lambda name: int(name[11:]))
    for name in ("unet", "unet_ema"):
        assert_same_weights(tmp_path / "whole" / last / name, tmp_path / "out" / last / name)
    states = [
        json.loads((tmp_path / name / last / "trainer_state.json").read_text())
        for name in ("whole", "out")
    ]
    assert states[0]["images_seen"] == states[1]["images_seen"] == 80


@pytest.mark.long
def test_new_trainer_can_be_launched_on_two_processes(train, flags, tmp_path):
    command = [
        "--multi_gpu",
        "--num_processes=2",
        "--main_process_port=0",
        tmp_path / "train_rectified_flow.py",
    ]
    done = launch(*command, *flags, env={"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and ": U-Net, samples/ and report.html" in done.stdout, done.stderr
