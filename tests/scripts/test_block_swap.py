"""--blocks_to_swap: the same LoRA, bit for bit, with at most two blocks on the device."""

import argparse
import json
import weakref

import pytest
import tiny_pipelines
import torch
from conftest import (
    Script,
    make_captioned,
    make_klein,
    make_models,
    make_qwen_image,
    make_sdxl,
    make_z_image,
    metrics,
    wait_until,
)
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from safetensors.torch import load_file

from diffusion_training.models import copy_trained, put_on_device, start_average
from diffusion_training.training import block_swap, denoiser, quantization
from diffusion_training.training.block_swap import BlockSwap, list_swappable
from diffusion_training.training.costs import count_memory
from diffusion_training.training.lora import add_lora, list_lora_b

pytestmark = [
    pytest.mark.usefixtures("without_figures"),
    # of NumPy, at a tensor that ERNIE-Image's pipeline gives its scheduler
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
precompute = Script("precompute_latents")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
FILE = "pytorch_lora_weights.safetensors"
CPU = torch.device("cpu")
OWN = {
    "sd": make_models,
    "sdxl": make_sdxl,
    "z-image": make_z_image,
    "flux2-klein": make_klein,
    "qwen-image": make_qwen_image,
}
MAKE = OWN | tiny_pipelines.MAKE | tiny_pipelines.BLOCKS
SIDES = {"qwen_image_2_1": 64, "lumina2": 32, "lumina": 32, "sana": 32}
KINDS = {"float32": [], "bf16": ["--mixed_precision=bf16"]}
KINDS["int8"] = ["--mixed_precision=bf16", "--base_precision=int8"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """make(name) -> (the trainer, its flags for a base and its cache)."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            base = [f"--pretrained_model_name_or_path={MAKE[name](folder / 'base')}"]
            base += [f"--model_family={name}"] * (name in ("z-image", "flux2-klein", "qwen-image"))
            make_captioned(folder / "images", 7)
            data = [f"--train_data_dir={folder / 'images'}", f"--resolution={SIDES.get(name, 16)}"]
            data += ["--center_crop", "--dataloader_num_workers=0"]
            precompute(*base, *data, f"--output_dir={folder / 'cache'}")
            trainer = TEXT if name in ("sd", "sdxl") else FLOW
            made[name] = trainer, [*base, f"--latents_dir={folder / 'cache'}"]
        return made[name]

    return make


def list_flags(trainer, base, *more):
    flags = trainer.flags("none", *base, "--rank=2", "--train_batch_size=2", "--learning_rate=0.01")
    flags += ["--max_train_steps=6", "--checkpointing_steps=3", "--num_validation_images=1"]
    return [*flags, "--caption_dropout=0.3", *more]


@pytest.fixture(autouse=True)
def aligned(monkeypatch):
    """Weights begin at multiples of 64 bytes, as on a GPU, and as copies do.

    A CPU rounds some products by where their numbers begin, and a loaded file may lie anywhere.
    """

    def load(*args, load_base=denoiser.load_base, **options):
        model, base_hash = load_base(*args, **options)
        for weight in model.parameters():
            weight.data = weight.data.clone()
        return model, base_hash

    monkeypatch.setattr(denoiser, "load_base", load)


@pytest.fixture
def most(monkeypatch):
    """The numbers of blocks whose copies are alive whenever one more is copied."""
    alive, found = [], []
    copy = BlockSwap.copy

    def watch(self, number):
        copies = copy(self, number)
        alive.append([weakref.ref(each) for each in copies.values()])
        alive[:] = [refs for refs in alive if any(ref() is not None for ref in refs)]
        found.append(len(alive))
        assert len(alive) <= 2, f"{len(alive)} blocks are on the device"
        return copies

    monkeypatch.setattr(BlockSwap, "copy", watch)
    return found


def list_cases():
    quick = {("flux", "int8", 1), ("sd", "float32", 2), ("z-image", "bf16", 1)}
    for name in MAKE:
        for kind in KINDS:
            for processes in (1, 2):
                case = name, kind, processes
                yield pytest.param(*case, marks=[] if case in quick else pytest.mark.long)


@pytest.mark.parametrize("name, kind, num_processes", [*list_cases()])
def test_a_killed_run_with_swapped_blocks_ends_with_the_same_lora(
    tmp_path, monkeypatch, bases, most, name, kind, num_processes
):
    monkeypatch.setattr(quantization, "BLOCK", 8)  # so that layers of tiny models are quantized
    trainer, base = bases(name)
    flags = list_flags(trainer, base, *KINDS[kind], "--lora_layers=all", "--lora_dropout=0.1")
    trainer.fork(*flags, f"--output_dir={tmp_path / 'plain'}", num_processes=num_processes)
    flags += ["--blocks_to_swap=all", "--resume_from_checkpoint=latest"]
    said = trainer.kill_after_checkpoint(tmp_path / "swapped", *flags, num_processes=num_processes)
    assert "Block swap: all of" in said
    trainer.fork(*flags, f"--output_dir={tmp_path / 'swapped'}", num_processes=num_processes)
    for path in (FILE, "checkpoint-6/optimizer.bin"):
        one, other = (tmp_path / folder / path for folder in ("plain", "swapped"))
        assert one.read_bytes() == other.read_bytes(), path
    assert any(value.any() for key, value in load_file(tmp_path / "plain" / FILE).items())
