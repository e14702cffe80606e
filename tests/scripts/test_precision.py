"""--mixed_precision bf16: what computes in bfloat16, and what must be float32.

tests/scripts/test_waits.py looks at the products of whole steps, on an imitated GPU.
"""

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import ROOT, Script, make_captioned, make_models, make_prx, make_unet_config, reset
from diffusers import PRXTransformer2DModel, UNet2DConditionModel, UNet2DModel
from safetensors import safe_open
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_text_to_image
from diffusion_training.families.known import load_family
from diffusion_training.models import freeze_on_device

NAMES = ("train_unconditional", "train_text_to_image", "train_flow")
SCRIPTS = {name: Script(name) for name in NAMES}  # imported before `without_figures`


class Types(TorchDispatchMode):
    """Notes the types of the floats that operators return, as {operator: types}."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.add(operator.__name__.partition(".")[0], result)
        return result

    def add(self, name, values):
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.found.setdefault(name, set()).add(str(value.dtype).removeprefix("torch."))


def predict_digits(unet):
    return unet(torch.randn(2, 1, 8, 8), torch.zeros(2)).sample


def predict_by_name(unet):
    prompts = {"prompt_embeds": torch.randn(2, 7, unet.config.cross_attention_dim)}
    images, times = torch.randn(2, 4, 8, 8), torch.zeros(2)
    return train_text_to_image.predict_noise({"unet": unet}, images, times, prompts)


def predict_velocity(transformer):
    prompts = {
        "prompt_embeds": torch.randn(2, 7, transformer.config.context_in_dim),
        "prompt_mask": torch.ones(2, 7, dtype=torch.bool),
    }
    images = torch.randn(2, transformer.config.in_channels, 8, 8)
    return load_family("prx").predict(transformer, images, torch.zeros(2), prompts)


def write_prx(folder):
    return make_prx(folder / "prx")


# In a forward pass on CUDA; other operators follow the types of their inputs. Products of matrices
# and convolutions are bfloat16. Autocast keeps norms in float32.
PRODUCTS = {"addmm": {"bfloat16"}, "mm": {"bfloat16"}}
CONVOLUTIONS = {"convolution": {"bfloat16"}, "native_group_norm": {"float32"}}
NORMS = {"native_layer_norm": {"float32"}}
WATCHED = PRODUCTS | CONVOLUTIONS | NORMS
FORWARD = {
    "unconditional": (
        UNet2DModel,
        lambda folder: ROOT / "demo/digits_unet.json",
        predict_digits,
        PRODUCTS | CONVOLUTIONS,
    ),
    "text to image": (
        UNet2DConditionModel,
        lambda folder: ROOT / "demo/digits_text_to_image_unet.json",
        predict_by_name,
        PRODUCTS | CONVOLUTIONS | NORMS,
    ),
    "flow": (PRXTransformer2DModel, write_prx, predict_velocity, PRODUCTS | NORMS),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_pass_on_cuda_multiplies_in_bfloat16_and_normalizes_in_float32(tmp_path, name):
    """Tensors have types and shapes only, and torch takes its paths for CUDA."""
    kind, find_config, predict, expected = FORWARD[name]
    config = kind.load_config(find_config(tmp_path))
    with (
        # otherwise autocast finds no GPU and does nothing
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *args, **options: True),
        FakeTensorMode(),
        torch.device("cuda"),
    ):
        model = kind.from_config(config)
        with torch.autocast("cuda", torch.bfloat16), Types() as types:
            predict(model)
    assert {name: types.found[name] for name in WATCHED if name in types.found} == expected


def watch(monkeypatch, module):
    """Note the types of values in a trainer's steps, as {name: types}."""
    types = Types()

    def note(name, function):
        def call(*args, **options):
            result = function(*args, **options)
            types.add(name, result)
            return result

        return call

    def compute_loss(*values, compute_loss=module.compute_loss):
        *first, objective, models, prepared, weight = values

        def predict(models, *inputs):
            types.add("inputs of the model", inputs)
            return note("predictions", objective.predict)(models, *inputs)

        types.add("prepared", tuple(prepared))
        types.add("weight", weight)
        spied = replace(objective, predict=predict)
        with (
            patch.object(torch, "randn", note("noise", torch.randn)),
            patch.object(F, "mse_loss", note("errors", F.mse_loss)),
        ):
            loss = compute_loss(*first, spied, models, prepared, weight)
        types.add("loss", loss)
        return loss

    def note_step(optimizer, args, kwargs):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        types.add("weights", weights)
        types.add("gradients", [weight.grad for weight in weights])

    monkeypatch.setattr(module, "compute_loss", compute_loss)
    monkeypatch.setattr(module, "train_step", note("sums", module.train_step))
    return types.found, register_optimizer_step_pre_hook(note_step)


def read_types(checkpoint):
    """The types of (the weights in each folder, the moments)."""
    weights = []
    for path in checkpoint.glob("*/*.safetensors"):
        with safe_open(path, "pt") as file:
            weights += {file.get_slice(name).get_dtype() for name in file.keys()}
    types = Types()
    types.add("moments", torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"])
    return weights, types.found["moments"]


def list_runs(folder):
    """{name: (trainer, flags)}"""
    make_captioned(folder / "images", 2)
    data = [f"--train_data_dir={folder / 'images'}", "--resolution=16"]
    data += ["--dataloader_num_workers=0", "--max_train_steps=2", "--train_batch_size=2"]
    data += ["--mixed_precision=bf16", "--checkpointing_steps=1"]
    base = [*data, f"--pretrained_model_name_or_path={make_models(folder)}"]
    unet = make_unet_config(folder)
    prx = make_prx(folder / "prx")
    text = [*base, "--snr_gamma=5", "--noise_offset=0.1"]
    return {
        "unconditional": (
            "train_unconditional",
            [*data, f"--model_config_name_or_path={unet}", "--use_ema"],
        ),
        "text to image": ("train_text_to_image", [*text, "--use_ema"]),
        "LoRA": ("train_text_to_image", [*text, "--rank=2", "--use_ema"]),
        "flow": (
            "train_flow",
            [*base, f"--transformer_config_name_or_path={prx}", "--use_ema", "--model_family=prx"],
        ),
    }


IN_STEP = {
    "prepared", "noise", "inputs of the model", "predictions", "errors", "weight", "loss", "sums",
    "weights", "gradients",
}  # fmt: skip


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", ["unconditional", "text to image", "LoRA", "flow"])
def test_all_values_of_a_step_except_activations_are_float32(tmp_path, monkeypatch, name):
    trainer, flags = list_runs(tmp_path)[name]
    train = SCRIPTS[trainer]
    types, hook = watch(monkeypatch, train.module)
    try:
        train(*train.flags(tmp_path / "run", *flags))
    finally:
        hook.remove()
    assert types == {name: {"float32"} for name in IN_STEP}
    weights, moments = read_types(tmp_path / "run/checkpoint-2")
    assert weights == ["F32", "F32"]  # the trained ones, and their averages
    assert moments == {"float32"}


def test_frozen_network_of_a_loss_computes_in_the_launchs_precision():
    reset()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    frozen = freeze_on_device({"features": network}, accelerator)
    inner = []
    network[0].register_forward_hook(lambda layer, inputs, output: inner.append(output.dtype))
    images = torch.randn(3, 4, requires_grad=True)
    features = frozen["features"](images)
    features.sum().backward()
    assert inner == [torch.bfloat16] and features.dtype == torch.float32
    assert images.grad.dtype == torch.float32
    assert not any(weight.requires_grad for weight in network.parameters())
    # the copy whose operations are counted has weights of its own
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied[1].weight.zero_(), copied[1].bias.zero_()
    assert not copied(images).any() and network(images).any()
    reset()
