"""LoKr: trained factors, and files that ComfyUI, diffusers and PEFT apply as the trained model."""

import argparse
import copy
import json

import peft
import pytest
import torch
from conftest import adapt_unet, make_models
from diffusers import UNet2DConditionModel
from other_programs import apply_lokr_as_comfy, comfy_names
from peft.tuners.lokr import layer as peft_layers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion_training.families.known import load_family
from diffusion_training.models import freeze_unreached
from diffusion_training.training.lora.lora import (
    add_lora,
    list_adapter,
    load_adapter,
    load_network_weights,
    save_adapter,
    save_lora,
)

FAMILY = load_family("sd")
FILE, KOHYA = "pytorch_lora_weights.safetensors", "pytorch_lora_weights_kohya.safetensors"
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("base"))


def open_unet(base):
    return UNet2DConditionModel.from_pretrained(base, subfolder="unet").eval()


def adapt(base, layers="attention", seed=0, **flags):
    """A U-Net with a LoKr. With factor 2, some w2 are products, and some are whole."""
    flags = {"rank": 2, "lora_type": "lokr", "lokr_factor": 2} | flags
    return adapt_unet(open_unet(base), layers, seed, **flags)


def predict(unet):
    torch.manual_seed(1)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 8, 32)).sample


def assert_same(found, trained, base, rtol=1e-5):
    """That a U-Net predicts what the trained one predicts, which is not what its base predicts."""
    expected = predict(trained)
    effect = (expected - predict(open_unet(base))).abs().max()
    assert effect > 0.05 and (predict(found) - expected).abs().max() < rtol * effect


def load(unet, path):
    load_network_weights(unet, path, "unet", FAMILY.convert_lora)
    return unet


FORMS = [{"layers": "all", "lora_alpha": 1}, {"layers": "all", "lokr_factor": 8, "rank": 4096}]


@pytest.mark.parametrize("flags", FORMS)
def test_lokr_files_give_the_trained_model_at_strength_1(tmp_path, base, flags, monkeypatch):
    """In ComfyUI and, by the line of the card, in diffusers; without rounding to float16."""
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)
    trained = adapt(base, **flags)
    save_lora({"unet": trained}, tmp_path, {})
    file = load_file(tmp_path / KOHYA)
    applied = open_unet(base)
    assert apply_lokr_as_comfy(applied, file, comfy_names(applied)) == file.keys()
    assert_same(applied, trained, base)
    assert f"lora_unet_{LAYER.replace('.', '_')}.lokr_w1" in file
    has_products = any(key.endswith("lokr_w2_a") for key in file)
    assert has_products == (flags.get("rank") != 4096)
    with safe_open(tmp_path / KOHYA, "pt") as opened:
        assert opened.metadata()["ss_network_module"] == "lycoris.kohya"
    for name in (FILE, KOHYA):
        assert_same(
            load(adapt(base, seed=1, **flags | {"lora_alpha": 7}), tmp_path / name), trained, base
        )
    pytest.importorskip("diffusers", "0.42")
    unet = open_unet(base)
    unet.load_lora_adapter(tmp_path, prefix="unet", weight_name=FILE)
    assert_same(unet, trained, base)


def test_lokr_files_are_float16_and_exact_with_a_small_alpha(tmp_path, base):
    trained = adapt(base, lora_alpha=1e-3)
    with torch.no_grad():
        for weight in trained.parameters():
            if weight.requires_grad:
                weight.mul_(2)
    save_lora({"unet": trained}, tmp_path, {})
    for name in (FILE, KOHYA):
        weights = load_file(tmp_path / name)
        kinds = {value.dtype for key, value in weights.items() if not key.endswith("alpha")}
        assert kinds == {torch.float16}
        read = load(adapt(base, seed=1, lora_alpha=1e-3), tmp_path / name)
        for one, other in zip(list_products(trained), list_products(read), strict=True):
            assert (one - other).norm() < 1e-3 * one.norm()


def list_products(unet):
    """The change of each layer's weights, by PEFT."""
    layers = [layer for layer in unet.modules() if isinstance(layer, peft_layers.LoKrLayer)]
    return [layer.get_delta_weight("default") for layer in layers]


@pytest.mark.parametrize("flags", FORMS)
def test_lokr_computes_what_peft_computes_without_its_random_numbers(base, flags):
    unet = adapt(base, **flags)
    original = copy.deepcopy(unet)
    for layer in original.modules():
        if isinstance(layer, peft_layers.LoKrLayer):
            layer.__class__ = type(layer).__mro__[2]
    assert type(original.get_submodule(LAYER)) is peft_layers.Linear
    assert_same(unet, original, base)
    before = torch.get_rng_state()
    layer = unet.get_submodule(LAYER).train()
    layer(torch.zeros(1, layer.base_layer.in_features))
    assert torch.equal(torch.get_rng_state(), before)
    unet(torch.ones(1, 4, 8, 8), 5, torch.ones(1, 8, 32)).sample.sum().backward()
    trained = {name for name, weight in unet.named_parameters() if weight.grad is not None}
    assert trained == {name for name, _ in unet.named_parameters() if ".lokr_" in name} != set()


def test_lokr_starts_at_the_base_and_only_its_factors_are_trained_in_float32(base):
    unet = adapt(base, "all", learned=False)
    assert torch.equal(predict(unet), predict(open_unet(base)))
    for name, weight in unet.named_parameters():
        assert weight.requires_grad == (".lokr_" in name) and weight.dtype == torch.float32
    factors = {name: x for name, x in unet.named_parameters() if ".lokr_" in name}
    zero = {name.split(".")[-2] for name, factor in factors.items() if not factor.any()}
    assert zero == {"lokr_w2", "lokr_w2_b"}
    freeze_unreached(unet, [f"{LAYER}.weight"])
    frozen = {name for name, factor in factors.items() if not factor.requires_grad}
    assert frozen == {f"{LAYER}.lokr_w1.default", f"{LAYER}.lokr_w2.default"}


def test_a_checkpoint_of_a_lokr_opens_in_peft_and_resumes_only_with_its_flags(tmp_path, base):
    trained = adapt(base, "all", lora_alpha=3)
    save_adapter(trained.to(memory_format=torch.channels_last), tmp_path / "unet")
    opened = peft.PeftModel.from_pretrained(open_unet(base), tmp_path / "unet").eval()
    assert_same(opened, trained, base)
    read = adapt(base, "all", seed=1, lora_alpha=3)
    load_adapter(read, tmp_path / "unet")
    one, other = list_adapter(trained), list_adapter(read)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    for flags, said in [
        ({"lokr_factor": 4}, "decompose_factor 2 -> 4"), ({"lora_alpha": 2}, "alpha 3 -> 2"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit, match=rf"unet is of another LoRA \({said}\)"):
            load_adapter(adapt(base, "all", **{"lora_alpha": 3} | flags), tmp_path / "unet")
    with pytest.raises(SystemExit, match="unet was trained with --lora_type lokr: keep base"):
        load_adapter(adapt(base, "all", lora_type="lora"), tmp_path / "unet")


def test_lokr_files_that_do_not_fit_are_refused(tmp_path, base):
    save_lora({"unet": adapt(base)}, tmp_path, {})
    (tmp_path / "lora").mkdir()
    save_lora({"unet": adapt(base, lora_type="lora")}, tmp_path / "lora", None)
    other = adapt(base, lora_type="lora")
    for unet, path, said in [
        (other, tmp_path, "it is a LoKr: add --lora_type lokr"),
        (adapt(base), tmp_path / "lora", "it is a LoRA: leave out --lora_type"),
        (adapt(base, lokr_factor=4), tmp_path, "has factors of other sizes: pass its"),
        (adapt(base, "all"), tmp_path, "it has no adapter at"),
    ]:  # fmt: skip
        with pytest.raises(SystemExit, match=f"does not fit; pass the --rank .*{said}"):
            load(unet, path)
    weights = load_file(tmp_path / FILE)
    weights.pop(f"unet.{LAYER}.lokr_w1")
    save_file(weights, tmp_path / "part.safetensors")
    with pytest.raises(SystemExit, match=f"its layer {LAYER} has only lokr_w2"):
        load(adapt(base), tmp_path / "part.safetensors")


def test_layers_that_can_not_have_a_lokr_are_refused(base):
    args = {"rank": 2, "lora_type": "lokr", "lokr_factor": 2, "lora_alpha": None}
    grouped = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1, groups=2))
    unet = open_unet(base)
    unet.add_module("grouped", grouped)
    flags = argparse.Namespace(**args, lora_layers="grouped.0")
    with pytest.raises(SystemExit, match="a LoKr of grouped.0 is not supported"):
        add_lora(unet, ["grouped.0"], "base", torch.float32, flags)
    flags.lora_layers = "norm1"
    with pytest.raises(SystemExit, match="--lora_layers norm1: can't add adapters"):
        add_lora(open_unet(base), ["norm1"], "base", torch.float32, flags)


def test_lokr_header_has_the_settings_of_its_weights(tmp_path, base):
    save_lora({"unet": adapt(base, lora_alpha=5)}, tmp_path, None)
    with safe_open(tmp_path / FILE, "pt") as opened:
        about = json.loads(opened.metadata()["lora_adapter_metadata"])
    layers = about.pop("unet.target_modules")
    assert about == {"unet.r": 2, "unet.alpha": 2, "unet.decompose_factor": 2} and "to_q" in layers
