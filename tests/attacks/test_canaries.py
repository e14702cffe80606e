"""Library behaviour that the scripts rely on: an upgrade that changes it fails here first."""

import inspect

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, TorchDynamoPlugin
from conftest import make_images, reset
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from PIL import Image

# ------------------------------------------------------------------- accelerate


def test_accelerate_divides_gradients_by_the_launchers_accumulation_steps(monkeypatch):
    """The scripts set it to 1 and divide the loss themselves."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator, weight = Accelerator(), torch.ones(1, requires_grad=True)
    assert accelerator.gradient_accumulation_steps == 4
    accelerator.backward(weight.sum())
    assert weight.grad.item() == 0.25
    accelerator.gradient_accumulation_steps, weight.grad = 1, None
    accelerator.backward(weight.sum())
    assert weight.grad.item() == 1
    reset()


def test_accelerate_updates_at_every_step_and_reports_skipped_steps(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator, model = Accelerator(), torch.nn.Linear(1, 1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    # one process: no DDP wrapper, and no scaler except in fp16
    assert prepared is model and accelerator.scaler is None
    before = model.weight.item()
    accelerator.backward(prepared(torch.ones(1, 1)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    assert isinstance(norm, torch.Tensor) and model.weight.item() == before - 1
    assert accelerator.optimizer_step_was_skipped is False
    evaluated = torch.nn.Linear(1, 1)
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    reset()


def test_accelerate_names_its_distributed_types_as_before():
    """MULTI_* is DDP on any device. The scripts refuse the other types."""
    ddp = {kind.value for kind in DistributedType if kind.value.startswith(("NO", "MULTI_"))}
    assert {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU"} <= ddp
    assert {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"} == {
        kind.value for kind in DistributedType
    } - ddp


def test_accelerate_reads_dynamo_settings_from_the_environment(monkeypatch):
    for name, value in {"BACKEND": "EAGER", "MODE": "max-autotune", "USE_DYNAMIC": "True"}.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    plugin = TorchDynamoPlugin()
    assert (plugin.backend.value, plugin.mode, plugin.fullgraph, plugin.dynamic) == (
        "EAGER",
        "max-autotune",
        False,
        True,
    )
    assert plugin.use_regional_compilation is False


# ------------------------------------------------------------------- diffusers


@pytest.mark.parametrize(
    "kind, scheduler", [(DDPMPipeline, DDPMScheduler), (DDIMPipeline, DDIMScheduler)]
)
def test_pipelines_draw_the_same_images_as_an_explicit_sampling_loop(kind, scheduler):
    unet = UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    ).eval()  # fmt: skip
    pipeline = kind(unet, DDPMScheduler())
    assert isinstance(pipeline.scheduler, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    images = torch.stack([torch.randn((3, 8, 8), generator=generator) for generator in generators])
    pipeline.scheduler.set_timesteps(3)
    with torch.no_grad():
        for timestep in pipeline.scheduler.timesteps:
            images = pipeline.scheduler.step(
                unet(images, timestep).sample, timestep, images, generator=generators
            ).prev_sample
    drawn = pipeline(
        2,
        [torch.Generator().manual_seed(i) for i in range(2)],
        num_inference_steps=3,
        output_type="np",
    ).images
    np.testing.assert_array_equal((images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy(), drawn)


def test_last_epoch_starts_an_lr_scheduler_at_any_step():
    """With `last_epoch=k` and initial_lr in the group, the next update has the rate of step k."""

    def rates(start, count):
        optimizer = torch.optim.SGD(
            [{"params": [torch.ones(1, requires_grad=True)], "initial_lr": 1.0}], lr=1.0
        )
        schedule, found = (
            get_scheduler(
                "cosine", optimizer, num_warmup_steps=3, num_training_steps=11, last_epoch=start
            ),
            [],
        )
        for _ in range(count):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    whole = rates(0, 10)
    assert rates(4, 6) == whole[4:] and whole[0] == pytest.approx(1 / 3) and whole[2] == 1


def test_only_the_conditional_unet_lists_repeated_blocks():
    assert UNet2DConditionModel._repeated_blocks and not UNet2DModel._repeated_blocks


def test_set_timesteps_does_not_change_add_noise():
    """Training and its samples share one scheduler."""
    scheduler, images = DDPMScheduler(), torch.ones(1, 1, 2, 2)
    before = scheduler.add_noise(images, images, torch.tensor([500]))
    config = dict(scheduler.config)
    scheduler.set_timesteps(7)
    assert torch.equal(scheduler.add_noise(images, images, torch.tensor([500])), before)
    assert dict(scheduler.config) == config


# ------------------------------------------------------------------- datasets, torch, Pillow


def test_datasets_returns_undecoded_images_as_bytes_and_path(tmp_path):
    folder = make_images(tmp_path / "images", 2)
    rows = datasets.load_dataset(folder, split="train").cast_column(
        "image", datasets.Image(decode=False)
    )
    assert rows[0]["image"].keys() == {"bytes", "path"} and rows[[0, 1]]["image"][1][
        "path"
    ].endswith("1.png")
    png = (tmp_path / "images/0.png").read_bytes()
    for column, expected in (
        ([png], {"bytes": png, "path": None}),
        (["a.png"], {"bytes": None, "path": "a.png"}),
    ):
        rows = datasets.Dataset.from_dict({"image": column}).cast_column(
            "image", datasets.Image(decode=False)
        )
        assert rows[0]["image"] == expected


def test_datasets_fingerprint_changes_with_the_files(tmp_path):
    folder = make_images(tmp_path / "images", 2)
    first = datasets.load_dataset(folder, split="train")._fingerprint
    assert datasets.load_dataset(folder, split="train")._fingerprint == first
    make_images(tmp_path / "images", 3)
    assert datasets.load_dataset(folder, split="train")._fingerprint != first


def test_dataloader_without_batch_size_passes_whole_keys_to_the_dataset():
    class Keys(torch.utils.data.Dataset):
        def __getitem__(self, keys):
            return {
                "keys": repr(keys),
                "pixel_values": torch.zeros(2, 3),
                "skipped": [("name", "reason")],
            }

    (batch,) = torch.utils.data.DataLoader(
        Keys(), batch_size=None, sampler=[[(0, 1, 0.5), (0, 2, 0.5)]]
    )
    assert batch["keys"] == "[(0, 1, 0.5), (0, 2, 0.5)]" and batch["pixel_values"].shape == (2, 3)
    assert dict(batch["skipped"]) == {"name": "reason"}


def test_pillow_can_be_limited_to_named_formats():
    assert "formats" in inspect.signature(Image.open).parameters
    Image.init()
    assert {"BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"} <= Image.OPEN.keys()
