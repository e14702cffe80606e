"""LoRA files of other programs: every key is used, or an error names it.

Files for other programs contain only keys that those programs read.
"""

import argparse
import contextlib
import copy
import itertools
import json
from types import SimpleNamespace

import diffusers
import peft
import pytest
import torch
from conftest import adapt_unet, make_models, make_sdxl
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.loaders import lora_pipeline
from diffusers.training_utils import _collate_lora_metadata
from other_programs import apply_as_comfy, comfy_names, list_applied, list_layers, sd_scripts_names
from safetensors.torch import load_file, save_file
from test_lora import list_products

from diffusion_training.families.base import Family
from diffusion_training.families.known import load_family
from diffusion_training.families.original_layout import rename_unet
from diffusion_training.training.lora.lora import (
    convert_to_kohya,
    list_adapter,
    list_further_layers,
    list_lora_b,
    load_adapter,
    load_network_weights,
    save_adapter,
    save_lora,
)
from diffusion_training.training.lora.lora_files import read_lora_file, read_plain_lora
from diffusion_training.training.lora.training_adapter import read_training_adapter
from diffusion_training.training.step.denoiser import adapt_denoiser

FAMILY = load_family("sd")
FILE, KOHYA = "pytorch_lora_weights.safetensors", "pytorch_lora_weights_kohya.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("base"))


def open_unet(base):
    return UNet2DConditionModel.from_pretrained(base, subfolder="unet").eval()


def predict(unet):
    torch.manual_seed(1)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 8, 32)).sample


def load(unet, path):
    load_network_weights(unet, path, "unet", FAMILY.convert_lora)
    return unet


def refused(unet, path):
    with pytest.raises(SystemExit) as stop:
        load(unet, path)
    return str(stop.value)


# ------------------------------------------------------------------- files for other programs


@pytest.fixture(scope="module")
def known():
    """The U-Net of Stable Diffusion 1.5, on the meta device."""
    with torch.device("meta"):
        return UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)


@pytest.mark.parametrize("which, plain, layers", [("attention", 0, 128), ("all", 122, 250)])
def test_comfyui_and_sd_scripts_apply_all_layers_of_the_kohya_file_only(
    known, which, plain, layers
):
    """So users notice if they load the wrong file."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(known.config)
        adapter = list_adapter(adapt_unet(unet, which))
        kohya = convert_to_kohya(adapter, unet, "lora_unet_")
    assert len(adapter) == 2 * layers and len(kohya) == 3 * layers
    applied, left_out = list_applied([f"unet.{name}" for name in adapter], comfy_names(known))
    assert (len(applied), len(left_out)) == (plain, 2 * (layers - plain))
    for names in (comfy_names(known), sd_scripts_names(known)):
        applied, left_out = list_applied(kohya, names)
        assert len(applied) == layers and not left_out


@pytest.mark.parametrize("flags", [
    {}, {"lora_alpha": 1}, {"use_dora": True}, {"use_dora": True, "layers": "all", "lora_alpha": 9},
])  # fmt: skip
def test_comfyui_computes_the_trained_model(tmp_path, base, flags, monkeypatch):
    """Without rounding to float16. ComfyUI divides magnitudes by the norm of the base."""
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)
    trained = adapt_unet(open_unet(base), **flags)
    save_lora({"unet": trained}, tmp_path, {})
    expected, without = predict(trained), predict(open_unet(base))
    found = predict(apply_as_comfy(open_unet(base), load_file(tmp_path / KOHYA)))
    assert (found - expected).abs().max() < 4e-5 * (expected - without).abs().max()


@pytest.mark.parametrize("alpha", [1, 1e-3])
def test_lora_files_with_a_small_alpha_stay_exact_in_float16(tmp_path, base, alpha):
    trained = adapt_unet(open_unet(base), lora_alpha=alpha)
    with torch.no_grad():
        for weight in list_lora_b({"unet": trained}):
            weight.mul_(1e-4)  # as after a few steps at a low rate
    save_lora({"unet": trained}, tmp_path, {})
    for name in (FILE, KOHYA):
        read = load(adapt_unet(open_unet(base), seed=1, lora_alpha=alpha), tmp_path / name)
        for one, other in zip(list_products(trained), list_products(read), strict=True):
            assert (one - other).norm() < 1e-3 * one.norm()


# ------------------------------------------------------------------- files of other programs


def save_peft(unet, folder, settings):
    """A file as `PeftModel.save_pretrained` writes it. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "adapter_model.safetensors"
    weights = {f"base_model.model.{name}": x for name, x in list_adapter(unet).items()}
    save_file(weights, path)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return path


def wrap(base, **settings):
    """A PeftModel with other settings than ours, and random B, as after training."""
    settings = {"r": 4, "lora_alpha": 2, "target_modules": ["to_q", "to_v"]} | settings
    model = peft.get_peft_model(open_unet(base), peft.LoraConfig(**settings))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                weight.add_(0.3 * torch.rand_like(weight))
    return model.eval()


@pytest.mark.parametrize("settings", [
    {}, {"use_rslora": True}, {"alpha_pattern": {"to_q": 7}}, {"use_dora": True},
    {"rank_pattern": {"attn2.to_q": 2}, "alpha_pattern": {"attn1.to_v": 3}, "use_rslora": True},
])  # fmt: skip
@pytest.mark.parametrize("form", ["peft", "with the adapter's name", "diffusers"])
def test_lora_files_of_peft_load_with_the_same_effect(tmp_path, base, settings, form):
    model = wrap(base, **settings)
    path = tmp_path / "adapter_model.safetensors"
    model.save_pretrained(tmp_path)
    if form == "with the adapter's name":
        named = {name: x.detach() for name, x in model.named_parameters() if "lora_" in name}
        assert any(name.endswith("to_q.lora_A.default.weight") for name in named)
        save_file(named, path)
    elif form == "diffusers":
        path = tmp_path / FILE
        about = _collate_lora_metadata({"unet": model.get_base_model()})
        StableDiffusionPipeline.save_lora_weights(
            tmp_path, unet_lora_layers=list_adapter(model.get_base_model()), **about
        )
    flags = {"use_dora": settings.get("use_dora", False)}
    read = adapt_unet(open_unet(base), ["to_q", "to_v"], seed=2, lora_alpha=3, **flags)
    assert (predict(read) - predict(model)).abs().max() > 1e-3
    load(read, path)
    torch.testing.assert_close(predict(read), predict(model), rtol=1e-5, atol=1e-5)


def test_adapter_checkpoints_open_in_peft_and_load_with_either_prefix(tmp_path, base):
    trained = adapt_unet(open_unet(base), "all", lora_alpha=3, use_dora=True)
    save_adapter(trained, tmp_path / "unet")
    opened = peft.PeftModel.from_pretrained(open_unet(base), tmp_path / "unet").eval()
    torch.testing.assert_close(predict(opened), predict(trained))
    path = tmp_path / "unet/adapter_model.safetensors"
    for strip in (False, True):  # also without PEFT's prefix
        if strip:
            weights = load_file(path).items()
            save_file({name.removeprefix("base_model.model."): x for name, x in weights}, path)
        read = load(adapt_unet(open_unet(base), "all", seed=1, use_dora=True), path)
        torch.testing.assert_close(predict(read), predict(trained), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_plain_lora_can_continue_as_dora_but_not_the_reverse(tmp_path, base):
    trained = adapt_unet(open_unet(base))
    path = save_peft(trained, tmp_path / "lora", {"r": 4, "lora_alpha": 4})
    read = load(adapt_unet(open_unet(base), seed=1, use_dora=True), path)
    torch.testing.assert_close(predict(read), predict(trained), rtol=1e-5, atol=1e-5)
    dora = adapt_unet(open_unet(base), use_dora=True)
    save_lora({"unet": dora}, tmp_path, {})
    other = save_peft(dora, tmp_path / "dora", {"r": 4, "lora_alpha": 4})
    for path in (other, tmp_path / FILE, tmp_path / KOHYA):
        assert "it is a DoRA: add --use_dora" in refused(adapt_unet(open_unet(base)), path)


def test_kohya_files_with_conv_dim_load_into_all_layers(tmp_path, base):
    """It has layers that `all` does not have, and a lower rank at 3x3 convolutions."""
    unet = open_unet(base)
    inside = set(sd_scripts_names(unet).values())
    torch.manual_seed(0)
    weights, deltas = {}, {}
    for number, (name, published) in enumerate(list_layers(unet).items()):
        if name not in inside:
            continue
        weight = unet.get_submodule(name).weight
        rank = 2 if weight[0, 0].numel() == 9 else 4
        down = torch.randn(rank, *weight.shape[1:])
        up = torch.randn(len(weight), rank, *[1] * (weight.dim() - 2))
        # sd-scripts name the layers of SDXL as they were published
        spelled = (name if number % 2 else published).replace(".", "_")
        weights[f"lora_unet_{spelled}.lora_down.weight"] = down
        weights[f"lora_unet_{spelled}.lora_up.weight"] = up
        weights[f"lora_unet_{spelled}.alpha"] = torch.tensor(1.0)
        deltas[name] = (up.flatten(1) @ down.flatten(1)).view_as(weight) / rank
    weights["lora_te_text_model_encoder_layers_0_mlp_fc1.alpha"] = torch.tensor(1.0)
    path = tmp_path / FILE
    save_file(weights, path)
    layers = FAMILY.choose_layers(unet, "all")
    file = read_lora_file(tmp_path, unet, "unet", FAMILY.convert_lora)  # by its folder
    further = list_further_layers(layers, file.layers)
    assert {name.split(".")[-1] for name in further} == {"time_emb_proj", "conv"}
    read = load(adapt_unet(unet, [*layers, *further], lora_alpha=8), path)
    merged = open_unet(base)
    with torch.no_grad():
        for name, delta in deltas.items():
            merged.get_submodule(name).weight += delta
    torch.testing.assert_close(predict(read), predict(merged), rtol=1e-4, atol=1e-4)


def test_sdxl_kohya_files_have_names_that_comfyui_knows(tmp_path):
    folder = make_sdxl(tmp_path)
    unet = adapt_unet(open_unet(folder), "all")
    save_lora({"unet": unet}, tmp_path, {})
    plain = open_unet(folder)
    for names in (comfy_names(plain), sd_scripts_names(plain)):
        applied, left_out = list_applied(load_file(tmp_path / KOHYA), names)
        assert len(applied) == len(list_lora_b({"unet": unet})) and not left_out


# ------------------------------------------------------------------- refused files

LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
KOHYA_LAYER = f"lora_unet_{LAYER.replace('.', '_')}"


@pytest.fixture(scope="module")
def unet(base):
    return adapt_unet(open_unet(base))


@pytest.fixture(scope="module")
def saved(unet, tmp_path_factory):
    """A folder with the two files of a LoRA."""
    folder = tmp_path_factory.mktemp("saved")
    save_lora({"unet": unet}, folder, {})
    return folder


@pytest.mark.parametrize("kohya, key", [
    (True, "bundle_emb.sks.string_to_param.*"),
    (True, "emb_params"),
    (True, f"{KOHYA_LAYER}.lora_mid.weight"),
    (True, f"{KOHYA_LAYER}.hada_w1_a"),
    (True, "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"),
    (False, "bundle_emb.sks.clip_l"),
    (False, f"unet.{LAYER}.lora_B.bias"),
    (False, "transformer.blocks.0.to_q.lora_A.weight"),
])  # fmt: skip
def test_lora_files_with_unused_keys_are_refused_by_name(tmp_path, unet, saved, kohya, key):
    path = tmp_path / (KOHYA if kohya else FILE)
    save_file({**load_file(saved / path.name), key: torch.zeros(4)}, path)
    said = refused(unet, path)
    assert f"can't be used (it holds {key.removeprefix('unet.')}, which is not used" in said


def test_lora_files_with_nan_are_refused(tmp_path, unet, saved):
    weights = load_file(saved / FILE)
    weights[f"unet.{LAYER}.lora_B.weight"][0] = float("nan")
    save_file(weights, tmp_path / FILE)
    said = refused(unet, tmp_path / FILE)
    assert f"(1 weights with NaN or infinity, such as {LAYER}.lora_B.weight)" in said


@pytest.mark.parametrize("settings, said", [
    ({"lora_bias": True}, "its setting lora_bias is True, which is not used here"),
    ({"bias": "all"}, "its setting bias is 'all'"),
    ({"modules_to_save": ["conv_in"]}, "its setting modules_to_save is ['conv_in']"),
    ({"init_lora_weights": "pissa"}, "its setting init_lora_weights is 'pissa'"),
    ({"peft_type": "LOHA"}, "its setting peft_type is 'LOHA'"),
    ({"something_new": 3}, "its setting something_new is 3"),
    (None, "adapter_config.json, which has its alpha, is not beside it"),
])  # fmt: skip
def test_peft_settings_that_are_not_used_are_refused_by_name(tmp_path, unet, settings, said):
    path = save_peft(unet, tmp_path, {"r": 4, "lora_alpha": 4} | (settings or {}))
    if settings is None:
        (tmp_path / "adapter_config.json").unlink()
    assert f"can't be used ({said}" in refused(unet, path)


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "orthogonal"])
def test_peft_initializations_that_keep_the_base_are_accepted(tmp_path, unet, value):
    settings = {"r": 4, "lora_alpha": 4, "init_lora_weights": value}
    load(unet, save_peft(unet, tmp_path, settings))


def test_rename_unet_gives_the_published_names_of_layers():
    """An upsampler comes after a block's attention, if it has any."""
    names = ["up_blocks.0.attentions.0.norm", "up_blocks.0.upsamplers.0.conv"]
    found = rename_unet([*names, "up_blocks.1.upsamplers.0.conv"], 2)
    assert found == {
        names[0]: "output_blocks.0.1.norm",
        names[1]: "output_blocks.2.2.conv",
        "up_blocks.1.upsamplers.0.conv": "output_blocks.5.1.conv",
    }


def test_dora_scales_per_input_are_refused_and_text_encoders_skipped(tmp_path, base, capsys):
    save_lora({"unet": adapt_unet(open_unet(base), use_dora=True)}, tmp_path, {})
    path = tmp_path / KOHYA
    weights = load_file(path)
    save_file({**weights, "lora_te_text_model_x.lora_down.weight": torch.zeros(4)}, path)
    load(adapt_unet(open_unet(base), use_dora=True), path)
    assert "1 weights for text encoders are skipped" in capsys.readouterr().out
    key = f"{KOHYA_LAYER}.dora_scale"
    save_file({**weights, key: weights[key].view(1, -1).contiguous()}, path)
    said = refused(adapt_unet(open_unet(base), use_dora=True), path)
    assert f"{LAYER} has a dora_scale for each input" in said


@pytest.mark.parametrize("rank_a, rank_b, said", [
    (4, 2, f"the rank of its {LAYER}.lora_A.weight is 4, and that of lora_B.weight 2"),
    (0, 0, f"the rank of its {LAYER}.lora_A.weight is 0, and that of lora_B.weight 0"),
    (None, 4, f"its {LAYER}.lora_A.weight or lora_B.weight is no matrix"),
])  # fmt: skip
def test_lora_files_whose_factors_do_not_fit_together_are_refused(
    tmp_path, unet, base, rank_a, rank_b, said
):
    path = tmp_path / "lora.safetensors"
    a = torch.ones(32) if rank_a is None else torch.ones(rank_a, 32)
    weights = {
        f"unet.{LAYER}.lora_A.weight": a,
        f"unet.{LAYER}.lora_B.weight": torch.ones(32, rank_b),
    }
    save_file(weights, path)
    assert f"can't be used ({said})" in refused(unet, path)
    with pytest.raises(ValueError) as stop:
        read_plain_lora(str(path), open_unet(base), FAMILY)
    assert str(stop.value) == said


# ------------------------------------------------------------------- FLUX.1, by diffusers' reader


class Flux(Family):
    pipeline = "FluxPipeline"


@pytest.fixture(scope="module")
def flux():
    """A tiny FluxPipeline without text encoders."""
    options = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    options |= {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
    options |= {"joint_attention_dim": 8, "pooled_projection_dim": 8}
    parts = dict.fromkeys(["vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    transformer = diffusers.FluxTransformer2DModel(**options)
    return diffusers.FluxPipeline(scheduler, transformer=transformer, **parts)


def make_pair(key, alpha=None, rank=2, width=32, form=("lora_A", "lora_B")):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator) for size in ((rank, width), (width, rank)))
    pair = {f"{key}.{form[0]}.weight": a, f"{key}.{form[1]}.weight": b}
    return pair if alpha is None else pair | {f"{key}.alpha": torch.tensor(alpha)}


FLUX_LAYERS = [f"transformer_blocks.0.attn.to_{letter}" for letter in "qv"]


@pytest.mark.parametrize("alphas", [(8.0, 8.0), (0.0, 3.0), (8.0, None)])
def test_alphas_of_flux_loras_in_diffusers_names_are_used(tmp_path, flux, alphas):
    """diffusers' reader returns them apart from the weights, for FLUX.1 alone."""
    weights = {}
    for layer, alpha in zip(FLUX_LAYERS, alphas, strict=True):
        weights |= make_pair(f"transformer.{layer}", alpha)
    save_file(weights, tmp_path / "lora.safetensors")
    file = read_plain_lora(str(tmp_path / "lora.safetensors"), flux.transformer, Flux())
    assert file.scales == {
        layer: 1.0 if alpha is None else alpha / 2
        for layer, alpha in zip(FLUX_LAYERS, alphas, strict=True)
    }
    if None in alphas:  # diffusers applies the alpha of the one to the other
        return
    flux.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    modules = dict(flux.transformer.named_modules())
    found = {layer: modules[layer].scaling["default_0"] for layer in FLUX_LAYERS}
    flux.unload_lora_weights()
    assert file.scales == found


READERS = sorted(name for name in vars(lora_pipeline) if name.endswith("LoraLoaderMixin"))
ORIGINALS = ("layers.0.attention.out", "double_blocks.0.img_attn.proj", "blocks.0.self_attn.q")


@pytest.mark.parametrize("name", READERS)
def test_no_reader_of_diffusers_drops_an_alpha(tmp_path, monkeypatch, name):
    """It returns alphas, multiplies them into the weights, or leaves them for an error."""
    monkeypatch.setattr(diffusers, "OwnPipeline", getattr(lora_pipeline, name), raising=False)
    monkeypatch.setattr(Flux, "pipeline", "OwnPipeline")
    ends = {}
    for prefix, layer, form in itertools.product(
        ("transformer.", "diffusion_model.", "lora_unet_", ""),
        ("transformer_blocks.0.attn.to_q", *ORIGINALS),
        (("lora_A", "lora_B"), ("lora_down", "lora_up")),
    ):
        key = prefix + (layer.replace(".", "_") if prefix == "lora_unet_" else layer)
        read = []
        for alpha in (3.0, 9.0):
            path = tmp_path / "lora.safetensors"
            save_file(make_pair(key, alpha, form=form), path)
            with contextlib.suppress(ValueError):
                read.append(Flux().convert_lora(path, None)[:2])
        if not read or not read[0][0]:  # or read as the LoRA of another model
            continue
        (weights, alphas), (others, _) = read
        is_left = any(key.endswith(".alpha") for key in weights)
        is_used = any(not torch.equal(weights[key], others[key]) for key in weights)
        ends[key] = alphas or is_left or is_used
    assert len(ends) > 1 and all(ends.values()), ends


def test_flux_loras_that_diffusers_misreads_are_refused(tmp_path, flux):
    def refused(weights):
        path = tmp_path / "lora.safetensors"
        save_file(weights, path)
        with pytest.raises(ValueError) as stop:
            read_plain_lora(str(path), flux.transformer, Flux())
        return str(stop.value)

    own = make_pair(f"transformer.{FLUX_LAYERS[0]}")
    alone = {f"transformer.{FLUX_LAYERS[1]}.alpha": torch.tensor(8.0)}
    assert refused(own | alone) == f"it holds {FLUX_LAYERS[1]}.alpha, which is not used here"
    other = make_pair(f"transformer.{FLUX_LAYERS[0]}", -1.0)
    assert refused(other) == f"its transformer.{FLUX_LAYERS[0]}.alpha is -1.0"
    block = make_pair("transformer.transformer_blocks.0")
    said = "the model has no layer transformer_blocks.0: the file is of another model, or diffusers"
    assert refused(block).startswith(said)
    # diffusers' reader has the width of the published FLUX.1 in it
    fused = make_pair("lora_unet_single_blocks_0_linear1", 1.0, form=("lora_down", "lora_up"))
    assert refused(fused) == "diffusers can't read it: AssertionError"


# ------------------------------------------------------------------- LoRAs that were begun before


class Gated(Flux):
    """A model of two blocks, whose gates were no part of `all` before."""

    def choose_layers(self, model, which):
        ends = {"attention": ["to_q"], "attention_mlp": ["to_q", "gate", "up"]}
        ends = ends | {"all": ends["attention_mlp"]}
        ends = ends.get(which)
        if ends is None:
            return super().choose_layers(model, which)
        return [f"{block}.{end}" for block in range(2) for end in ends]


def adapt_gated(layers, configs=None, **flags):
    """The model with an adapter, as `adapt_denoiser` adds it."""
    block = {"to_q": torch.nn.Linear(8, 8), "gate": torch.nn.Linear(8, 9)}
    block |= {"up": torch.nn.Linear(8, 9)}
    model = torch.nn.ModuleList(torch.nn.ModuleDict(copy.deepcopy(block)) for _ in range(2))
    launch = SimpleNamespace(accelerator=SimpleNamespace(print=print), dtype=torch.float32)
    launch.compile, launch.device = None, torch.device("cpu")
    given = {"rank": 2, "lora_alpha": None, "lora_type": "lora", "use_dora": False}
    given |= {"lora_dropout": 0.0, "network_weights": None, "blocks_to_swap": None}
    given |= {"base_precision": None, "fit": None} | flags
    args = argparse.Namespace(**given, lora_layers=layers)
    adapt_denoiser(model, SimpleNamespace(family=Gated()), "base", configs, launch, args)
    return model


@pytest.mark.parametrize("how", ["resumed", "continued"])
def test_a_lora_begun_without_the_gates_keeps_its_layers(tmp_path, capsys, how):
    begun = [f"{block}.{end}" for block in range(2) for end in ("to_q", "up")]
    before = adapt_gated(",".join(begun))
    save_adapter(before, tmp_path / "transformer")
    more = {"configs": tmp_path}
    if how == "continued":
        save_lora({"transformer": before}, tmp_path, None)
        more = {"network_weights": str(tmp_path)}
    now = adapt_gated("all", **more)
    assert now.adapter["target_modules"] == before.adapter["target_modules"] == begun
    said = "The LoRA keeps what it was begun with (4 layers), not --lora_layers all"
    assert said in capsys.readouterr().out
    if how == "resumed":
        load_adapter(now, tmp_path / "transformer")
    # other layers are asked for by the flag, which is an error later
    assert len(adapt_gated("all").adapter["target_modules"]) == 6
    save_adapter(adapt_gated("attention"), tmp_path / "other/transformer")
    assert len(adapt_gated("all", tmp_path / "other").adapter["target_modules"]) == 6


def test_text_encoders_in_a_lora_are_named_wherever_it_is_used(tmp_path, base, capsys):
    save_lora({"unet": adapt_unet(open_unet(base))}, tmp_path, {})
    text = {"text_encoder.layers.0.lora_A.weight": torch.zeros(2, 2)}
    save_file(load_file(tmp_path / FILE) | text, tmp_path / FILE)
    read_training_adapter(
        str(tmp_path / FILE), UNet2DConditionModel, str(base), FAMILY, subfolder="unet"
    )
    said = "--training_adapter: 1 weights for text encoders are skipped"
    assert said in capsys.readouterr().out
    weights = load_file(tmp_path / FILE)
    weights[f"unet.{LAYER}.lora_B.weight"][0] = float("nan")
    save_file(weights, tmp_path / FILE)
    with pytest.raises(SystemExit, match=f"such as {LAYER}.lora_B.weight"):
        read_training_adapter(
            str(tmp_path / FILE), UNet2DConditionModel, str(base), FAMILY, subfolder="unet"
        )
