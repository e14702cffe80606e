"""python -m diffusion_training lora: the merged pipeline predicts what the LoRA's program does."""

import filecmp
import os
import shutil

import pytest
import torch
from conftest import adapt_unet, make_models
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

from diffusion_training.families.known import load_family
from diffusion_training.training.lora.lora import save_lora
from diffusion_training.training.lora.lora_tools import main, parse_args

FILE, KOHYA = "pytorch_lora_weights.safetensors", "pytorch_lora_weights_kohya.safetensors"
FORMS = {
    "lora": {"layers": "all", "lora_alpha": 1},
    "dora": {"use_dora": True},
    "lokr": {"layers": "all", "rank": 2, "lora_type": "lokr", "lokr_factor": 2},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("base"))


def open_unet(folder):
    return UNet2DConditionModel.from_pretrained(folder, subfolder="unet").eval()


def predict(unet):
    torch.manual_seed(1)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 8, 32)).sample


def run(action, file, base, *flags):
    words = [action, file, f"--pretrained_model_name_or_path={base}", *flags]
    main(parse_args([*map(str, words)]))


@pytest.mark.parametrize("form", [
    "lora", *(pytest.param(form, marks=pytest.mark.ci) for form in ("dora", "lokr")),
])  # fmt: skip
def test_a_merged_pipeline_predicts_what_the_trained_model_does(
    tmp_path, base, form, monkeypatch, capsys
):
    """From both files of a LoRA; without rounding to float16."""
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)
    trained = adapt_unet(open_unet(base), **FORMS[form])
    save_lora({"unet": trained}, tmp_path, load_family("sd").describe_for_sd_scripts(trained))
    expected, without = predict(trained), predict(open_unet(base))
    effect = (expected - without).abs().max()
    for name in (FILE, KOHYA):
        run("merge", tmp_path / name, base, f"--output_dir={tmp_path / name[:-12]}")
        found = predict(open_unet(tmp_path / name[:-12]))
        assert effect > 0.01 and (found - expected).abs().max() < 1e-5 * effect
    assert "at strength 1. Rounding to torch.float32 changed the LoRA by 0 of" in (
        capsys.readouterr().out
    )
    merged = tmp_path / KOHYA[:-12]
    compared = filecmp.dircmp(base, merged)
    assert compared.left_only == compared.right_only == compared.diff_files == []
    run("merge", tmp_path / FILE, base, f"--output_dir={merged}", "--strength=0.5")
    weights, before, after = (open_unet(each).state_dict() for each in (
        merged, base, tmp_path / FILE[:-12]
    ))  # fmt: skip
    for name, weight in weights.items():
        assert torch.allclose(weight, (before[name] + after[name]) / 2, atol=1e-6)


def test_rounding_to_the_precision_of_the_base_is_named(tmp_path, base, capsys):
    half = tmp_path / "half"
    shutil.copytree(base, half)
    open_unet(base).bfloat16().save_pretrained(half / "unet")
    unet = adapt_unet(open_unet(half), lora_alpha=1)
    save_lora({"unet": unet}, tmp_path, None)
    run("merge", tmp_path / FILE, half, f"--output_dir={tmp_path / 'out'}")
    share = float(capsys.readouterr().out.split("LoRA by ")[1].split(" ")[0])
    assert 1e-4 < share < 0.1
    saved = load_file(tmp_path / "out/unet/diffusion_pytorch_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}


def test_info_names_layers_ranks_and_header_and_refuses_other_files(tmp_path, base, capsys):
    unet = adapt_unet(open_unet(base), lora_alpha=8)
    save_lora({"unet": unet}, tmp_path, load_family("sd").describe_for_sd_scripts(unet))
    run("info", tmp_path / KOHYA, base)
    said = capsys.readouterr().out
    assert "32 layers of the UNet2DConditionModel, of lora_A.weight and lora_B.weight; " in said
    assert "rank 4 to 4; alpha / rank 1 to 1; 0 weights" in said
    assert "ss_network_dim: 4\n" in said
    weights = load_file(tmp_path / FILE)
    save_file({f"{name}x": weight for name, weight in weights.items()}, tmp_path / "x.safetensors")
    for name, out, said in (
        ("x.safetensors", tmp_path / "out", "x.safetensors can't be used"),
        (KOHYA, base, "is the base: choose another folder"),
    ):
        with pytest.raises(SystemExit):
            run("merge", tmp_path / name, base, f"--output_dir={out}")
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for words in (["info", "a"], ["merge", "a", "--pretrained_model_name_or_path=b"]):
        with pytest.raises(SystemExit, match="2"):
            parse_args(words)
    assert "give a folder for the merged pipeline: --output_dir" in capsys.readouterr().err


def test_a_damaged_file_is_neither_merged_nor_waited_for(tmp_path, base, capsys):
    """As `info` and `merge` read it: a pipe, and tensors that do not fit the model."""
    lora, dora = tmp_path / "lora", tmp_path / "dora"
    for folder, flags in ((lora, {"lora_alpha": 8}), (dora, {"use_dora": True})):
        folder.mkdir()
        unet = adapt_unet(open_unet(base), **flags)
        save_lora({"unet": unet}, folder, load_family("sd").describe_for_sd_scripts(unet))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / FILE)
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"  # 32 to 16
    weights, scaled = load_file(lora / KOHYA), load_file(dora / KOHYA)
    up, down = weights[f"{layer}.lora_up.weight"], weights[f"{layer}.lora_down.weight"]
    assert len(up) != down.shape[1]
    square = f"{layer.removesuffix('to_k')}to_q.dora_scale"
    cases = {
        "alpha": weights | {f"{layer}.alpha": torch.tensor(torch.inf)},
        "width": weights | {f"{layer}.lora_up.weight": up[:-1].clone()},
        "turned": weights | {
            f"{layer}.lora_up.weight": down.mT.contiguous(),
            f"{layer}.lora_down.weight": up.mT.contiguous(),
        },
        "scale": scaled | {f"{layer}.dora_scale": torch.ones(3)},
        "inputs": scaled | {square: scaled[square].reshape(1, -1)},
        "range": weights | {
            f"{layer}.lora_up.weight": torch.full(up.shape, 1e38),
            f"{layer}.lora_down.weight": torch.full(down.shape, 1e38),
        },
    }  # fmt: skip
    said = {
        "alpha": "attn2.to_k is NaN or infinity", "width": "attn2.to_k has another width",
        "turned": "attn2.to_k has another width", "range": "would be beyond the range of torch.",
        "scale": "to_k.dora_scale does not have one number for each output",
        "inputs": "to_q.dora_scale does not have one number for each output",
    }  # fmt: skip
    for name, case in cases.items():
        save_file(case, tmp_path / f"{name}.safetensors")
    out = tmp_path / "new" / "out"
    files = {tmp_path / "pipe" / FILE: "it is not a file", tmp_path / "pipe": "it is not a file"}
    files |= {tmp_path / f"{name}.safetensors": sentence for name, sentence in said.items()}
    for file, sentence in files.items():
        with pytest.raises(SystemExit):
            run("merge", file, base, f"--output_dir={out}")
        error = capsys.readouterr().err
        assert f"{file} can't be " in error and sentence in error
    assert not out.parent.exists()


def test_the_folder_of_a_run_and_a_lora_without_effect_are_merged(tmp_path, base, capsys):
    save_lora({"unet": adapt_unet(open_unet(base))}, tmp_path, None)
    run("merge", tmp_path, base, f"--output_dir={tmp_path / 'out'}", "--strength=0")
    assert "at strength 0. Rounding to torch.float32 changed the LoRA by 0 of" in (
        capsys.readouterr().out
    )
    merged, before = open_unet(tmp_path / "out").state_dict(), open_unet(base).state_dict()
    assert all(torch.equal(before[name], weight) for name, weight in merged.items())
