"""The memory of a step as a function of a plan, beside the bytes that live in the step itself."""

from dataclasses import replace

import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned, make_models, make_sdxl

from diffusion_training.blocks import checkpoint_gradients, list_checkpointed, list_segments
from diffusion_training.training.step.plans import ALL, MemoryPlan, Meter, record_step

pytestmark = pytest.mark.usefixtures("without_figures")
precompute = Script("precompute_latents")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
U_NETS = {"sd": make_models, "sdxl": make_sdxl}


class Measured(BaseException):
    """Ends a trainer after its first batch."""


found = []  # (plan, estimate, measured)


def measure(accelerator, objective, models, optimizer, batches, *others):
    """In place of a trainer's `train_step`: estimate every kind of plan, and take its step."""
    batch = next(batches)
    (model,) = models.values()
    model.train()
    prepared = objective.prepare(batch)
    compute = lambda: objective.loss(models, prepared, batch["weight"])
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        compute()  # the first call runs the pipeline's own code, with tensors on the CPU
    with Meter(accelerator.device) as meter:
        step = record_step(models, compute, meter)
    assert not list_checkpointed(model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(weight.grad is None for weight in model.parameters())
    count = len(list_segments(model))
    kinds = [MemoryPlan(), ALL, replace(ALL, keeps_attention=True)]
    kinds += [MemoryPlan(count // 2), MemoryPlan(count // 2, True), MemoryPlan(1)]
    for plan in kinds:
        checkpoint_gradients(models, plan.flags())
        # the second micro-batch of a step finds the gradients of the first
        for adds_up in (False, True):
            with Meter(accelerator.device) as meter:
                compute().backward()
            measured = meter.peak + step.gradients * adds_up
            found.append((plan, replace(step, adds_up=adds_up).count(plan), measured))
        for weight in model.parameters():
            weight.grad = None
        for segment in list_checkpointed(model):
            del segment.forward
    raise Measured


def test_tensors_from_before_do_not_count():
    """The weights are a part of what a run holds at all times, and would count twice."""
    layer = torch.nn.Linear(100, 10)
    with Meter(torch.device("cpu")) as meter:
        inputs = torch.ones(1, 100)
        result = layer(inputs)  # the product takes a view of the weight
    assert meter.held == meter.peak == inputs.nbytes + result.nbytes


QUICK = {("z_image", "lora"), ("sd", "bf16")}


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.long)
        for name in ("z_image", "qwen_image", "klein", "sd", "sdxl")
        for kind in ("lora", "bf16", "whole")
    ],
)
def test_the_estimate_is_the_memory_of_a_step(tmp_path, monkeypatch, name, kind):
    make_captioned(tmp_path / "images", 2, ["a digit zero", "one"])
    trainer = TEXT if name in U_NETS else FLOW
    base = (U_NETS | tiny_pipelines.MAKE)[name](tmp_path / "base")
    flags = [f"--pretrained_model_name_or_path={base}"]
    data = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=128"]
    precompute(*flags, *data, f"--output_dir={tmp_path / 'cache'}", "--dataloader_num_workers=0")
    flags += [f"--latents_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'out'}"]
    flags += ["--report_to=none", "--train_batch_size=2", "--max_train_steps=1"]
    flags += ["--rank=2", "--lora_layers=all"] * (kind != "whole")
    flags += ["--mixed_precision=bf16"] * (kind != "lora")
    monkeypatch.setattr(trainer.module, "train_step", measure)
    found.clear()
    with pytest.raises(Measured):
        trainer(*flags)
    assert len(found) == 12
    ratios = [estimate / measured for _, estimate, measured in found]
    assert 0.97 <= min(ratios) and max(ratios) <= 1.08, ratios


def test_a_view_of_a_weight_takes_no_memory():
    weight, inputs = torch.ones(64, 32), torch.ones(2, 32)
    with Meter(weight.device) as meter:
        kept = weight.t()
        result = inputs @ kept
    assert meter.held == meter.peak == result.nbytes
