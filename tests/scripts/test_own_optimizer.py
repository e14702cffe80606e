"""An optimizer of one's own in a trainer: `make_optimizer` in `main` is replaced by another."""

import shutil

import pytest
import torch
from conftest import Script, assert_same_weights, metrics

from diffusion_training.models import list_parameters

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_unconditional")


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675): the sign of a mean of gradients."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.setdefault("exp_avg", torch.zeros_like(weight))
                weight.add_((0.9 * mean + 0.1 * weight.grad).sign(), alpha=-group["lr"])
                mean.lerp_(weight.grad, 0.01)


def test_an_optimizer_of_ones_own_is_scheduled_and_resumed_to_the_same_bits(tmp_path, monkeypatch):
    make = lambda models, args: Lion(list_parameters(models), args.learning_rate)
    monkeypatch.setattr(train.module, "make_optimizer", make)
    flags = ["--train_batch_size=16", "--max_train_steps=4", "--checkpointing_steps=2"]
    flags += ["--lr_scheduler=linear", "--lr_warmup_steps=0", "--ddpm_num_inference_steps=1"]
    flags += ["--max_train_samples=64", "--eval_batch_size=1", "--logging_steps=1"]
    flags += ["--save_images_epochs=9", "--report_to=none"]
    for name in ("once", "twice"):
        train(*flags, f"--output_dir={tmp_path / name}")
    rates = [record["lr"] for record in metrics(tmp_path / "once") if "lr" in record]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 4
    again = tmp_path / "twice"
    shutil.rmtree(again / "checkpoint-4")
    train(*flags, f"--output_dir={again}", "--resume_from_checkpoint=latest")
    assert_same_weights(tmp_path / "once/checkpoint-4/unet", again / "checkpoint-4/unet")
