"""Models: loaded completely or not at all, averaged as in diffusers, saved bit for bit."""

import argparse
import contextlib
import copy
import re
import types

import diffusers
import pytest
import torch
import torch.nn.functional as F
from conftest import PRX, ROOT, make_unet_config
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel
from fake_device import DEVICE, NAME, GpuModule, forked
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter

from diffusion_training import models
from diffusion_training.blocks import list_compiled
from diffusion_training.families.known import load_family
from diffusion_training.models import (
    AveragedWeights,
    choose_layout,
    compile_model,
    list_parameters,
    load_weights,
    put_on_device,
    update_ema,
)
from diffusion_training.training.keeping.checkpoints import read_weights, save_weights
from diffusion_training.training.lora.block_swap import pin
from diffusion_training.training.step.denoiser import check_denoiser


def test_update_ema_equals_diffusers_ema():
    """For all trained models. The first step copies the weights."""
    torch.manual_seed(0)
    models = {"unet": torch.nn.Linear(5, 5), "projection": torch.nn.Linear(2, 3)}
    averaged = {"unet": torch.nn.Linear(5, 5), "projection": torch.nn.Linear(2, 3)}
    args = argparse.Namespace(ema_power=0.6, ema_inv_gamma=2, ema_max_decay=0.7)
    reference = EMAModel(
        list_parameters(models), decay=0.7, use_ema_warmup=True, inv_gamma=2, power=0.6
    )
    for step in range(1, 20):
        with torch.no_grad():
            for parameter in list_parameters(models):
                parameter.add_(torch.randn_like(parameter))
        update_ema(AveragedWeights.of(averaged, models), step, args)
        reference.step(list_parameters(models))
        for mine, theirs in zip(list_parameters(averaged), reference.shadow_params, strict=True):
            torch.testing.assert_close(mine.detach(), theirs)
        same = [
            torch.equal(*pair)
            for pair in zip(list_parameters(averaged), list_parameters(models), strict=True)
        ]
        assert all(same) if step == 1 else not any(same)


def test_missing_weights_are_refused_not_drawn_at_random(tmp_path):
    unet = UNet2DModel.from_config(UNet2DModel.load_config(make_unet_config(tmp_path)))
    unet.save_pretrained(tmp_path / "unet")
    assert load_weights(UNet2DModel, str(tmp_path), subfolder="unet")
    path = tmp_path / "unet/diffusion_pytorch_model.safetensors"
    whole = load_file(path)
    save_file({name: value for name, value in whole.items() if name != "conv_in.bias"}, path)
    with pytest.raises(ValueError, match="1 missing keys, such as conv_in.bias"):
        load_weights(UNet2DModel, tmp_path / "unet")
    save_file({**whole, "conv_in.bias": torch.zeros(3)}, path)
    with pytest.raises(Exception, match="conv_in.bias"):
        load_weights(UNet2DModel, tmp_path / "unet")


def test_the_precision_has_the_name_that_the_installed_diffusers_asks_for(monkeypatch):
    """The old one is an error in the tests, as a deprecation."""
    asked = []

    class Kind:
        @staticmethod
        def from_pretrained(source, **options):
            asked.append(options)
            return torch.nn.Linear(1, 1), {"missing_keys": [], "mismatched_keys": []}

    for name in ("dtype", "torch_dtype"):
        monkeypatch.setattr(models, "DTYPE", name)
        load_weights(Kind, "x", torch_dtype=torch.bfloat16)
        assert asked.pop() == {"output_loading_info": True, name: torch.bfloat16}
    load_weights(Kind, "x")
    assert asked.pop() == {"output_loading_info": True}


def test_muon_finds_the_blocks_of_diffusers_transformers():
    """Also those inside of a U-Net, but not its other layers."""
    weight = torch.zeros(2, 2)
    found = "blocks.0.fc1 layers.29.attention.to_q transformer_blocks.3.attn.to_k.lora_A.default"
    found += " single_transformer_blocks.1.proj_out down_blocks.0.attentions.0.transformer_blocks.0"
    for name in found.split():
        assert models.is_block_matrix(f"{name}.weight", weight), name
        assert not models.is_block_matrix(f"{name}.weight", weight[0]), name
    for name in ("down_blocks.0.resnets.0.time_emb_proj", "noise_refiner.0.attention.to_q", "proj"):
        assert not models.is_block_matrix(f"{name}.weight", weight), name


def test_weights_of_any_module_are_saved_and_read(tmp_path):
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_weights(one, tmp_path / "projection")
    read_weights(other, tmp_path / "projection")
    assert torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)
    with pytest.raises(RuntimeError):
        read_weights(torch.nn.Linear(3, 3), tmp_path / "projection")


def test_an_unknown_compiler_backend_ends_in_one_sentence():
    with pytest.raises(SystemExit, match=r"^torch.compile with nosuch is not possible \("):
        compile_model(torch.nn.Linear(1, 1), "nosuch")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_transformers_blocks_are_compiled_one_for_all(rank):
    """With a LoRA, too. The first block differs, because its input needs no gradient."""
    torch.manual_seed(0)
    # so deep that blocks are nearly all of it
    kind, config = diffusers.PRXTransformer2DModel, PRX | {"depth": 20}
    plain = kind(**config)
    if rank:
        plain.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=["img_qkv_proj"]), plain)
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    counter = CompileCounter()
    compile_model(compiled, counter)
    assert list_compiled(plain) == [*plain.blocks]
    assert [*compiled.state_dict()] == [*plain.state_dict()]
    for model in (plain, compiled):
        torch.manual_seed(1)
        image = torch.randn(2, config["in_channels"], 4, 4)
        prompt = torch.randn(2, 3, config["context_in_dim"])
        model(image, torch.ones(2), prompt).sample.square().mean().backward()
    assert 1 <= counter.frame_count <= 3
    gradients = ([w.grad for w in list_parameters({"": model})] for model in (plain, compiled))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_unet_is_compiled_whole(tmp_path):
    """Its ResNets and norms are in no repeated block."""
    config = UNet2DModel.load_config(make_unet_config(tmp_path))
    with torch.device("meta"):
        unets = [UNet2DModel.from_config(config), diffusers.UNet2DConditionModel()]
    for model in (*unets, torch.nn.Linear(1, 1)):
        assert list_compiled(model) == []


@pytest.mark.parametrize("side, fits", [(16, True), (8, False)])
def test_a_map_counts_as_channels_only_if_it_has_the_latents_size(side, fits):
    """A ControlNet's image has another size: it is no input of the U-Net."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        cross_attention_dim=4,
    )
    data = types.SimpleNamespace(
        family=load_family("sd"),
        empty_prompt={"prompt_embeds": torch.zeros(3, 4)},
        latents=types.SimpleNamespace(channels=4, shape=[4, 8, 8], downscale=2),
        resolution=16,
        bucket_step=None,
        classes=(),
        references=(),
    )

    def predict(models, noisy, timesteps, condition):
        embeds = condition["prompt_embeds"]
        return models["unet"](noisy, timesteps, encoder_hidden_states=embeds).sample

    further = {"control": torch.zeros(1, 3, side, side)}
    refused = pytest.raises(SystemExit, match="takes 4 channels")
    with contextlib.nullcontext() if fits else refused:
        check_denoiser({"unet": unet}, predict, "U-Net", "here", data, further)


def run_layout_lines(path, device):
    """Run the lines of a twin that choose the layout, which take the imitated GPU for CUDA."""
    lines = re.search(r"^trial = .*?^layout = .*?$", path.read_text(), re.M | re.S)
    names = {"torch": torch, "F": F, "device": device}
    exec(lines[0].replace('"cuda"', f'"{NAME}"'), names)
    return names["layout"]


@forked
def test_models_get_the_layout_that_the_devices_group_norms_keep():
    """U-Net, VAE, swapped blocks and twins alike. Only the layout changes, never a weight."""
    device, cpu = torch.device(DEVICE), torch.device("cpu")
    last = torch.channels_last
    for GpuModule.norms_keep_layout in (True, False):
        for place in (device, cpu):
            is_last = GpuModule.norms_keep_layout and place == device
            layout = last if is_last else torch.preserve_format
            assert choose_layout(place) == layout
            for name in ("train_flow", "train_text_to_image", "train_unconditional"):
                path = ROOT / f"minimal/{name}.py"
                assert run_layout_lines(path, place) == layout, path
            weight = torch.randn(8, 4, 3, 3)
            model = torch.nn.Conv2d(4, 8, 3)
            model.weight.data = weight.clone()
            swapped = torch.nn.Parameter(weight.clone())
            moved = put_on_device(model, place).weight
            pin([swapped], place)
            for each in (moved, swapped):
                assert each.is_contiguous(memory_format=last) == is_last
                assert torch.equal(each.cpu(), weight)
        video = put_on_device(torch.nn.Conv3d(4, 8, 3), device)
        assert video.weight.is_contiguous()
