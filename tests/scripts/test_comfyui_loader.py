"""Which models' LoRAs ComfyUI reads, by its own loader: the answers in comfyui.tsv."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import diffusers
import pytest
import torch
from conftest import ROOT

from diffusion_training.families.lora_layers import LAYER_SETS
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.training.lora.lora import add_lora, save_lora
from diffusion_training.training.showing.readers import COMFYUI as ANSWERS

COMFYUI = "https://github.com/Comfy-Org/ComfyUI"
COMMIT = "783545f689a0af730065994b46b382ae24844c99"  # 2026-08-22
# {name in comfyui.tsv: (transformer, its options where a published model has others)}
MODELS = {
    "AuraFlow": ("AuraFlow", {}),
    "Chroma": ("Chroma", {}),
    "ERNIE-Image": (
        "ErnieImage",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_layers": 36,
            "ffn_hidden_size": 12288,
        },
    ),
    "FLUX.1": ("Flux", {"guidance_embeds": True}),
    "FLUX.2": ("Flux2", {}),
    "Krea 2": ("Krea2", {}),
    "LongCat-Image": ("LongCatImage", {}),
    "Qwen-Image": ("QwenImage", {}),
    "Stable Diffusion 3.5": (
        "SD3",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
    ),
    "Z-Image": ("ZImage", {}),
    "Lumina 2": ("Lumina2", {"cap_feat_dim": 2304}),
    "Anima": ("Cosmos", {"num_attention_heads": 16, "extra_pos_embed_type": None}),
    "Wan": ("Wan", {}),
    "HunyuanVideo": ("HunyuanVideo", {}),
    "LTX-Video": ("LTXVideo", {}),
}
RENAMED = ("Wan", "LTX-Video")  # by the code in lora.md
UNKNOWN = {"Sana": "Sana", "Qwen-Image 2.1": "QwenImage21"}  # it has no such class
# ComfyUI's configs of those that it knows only by its own names
CONFIGS = {
    "Krea 2": {
        "image_model": "krea2",
        "features": 6144,
        "channels": 16,
        "patch": 2,
        "layers": 28,
        "heads": 48,
        "kvheads": 12,
        "txtlayers": 12,
        "txtdim": 2560,
    },
    "FLUX.2": {
        "image_model": "flux2",
        "in_channels": 128,
        "out_channels": 128,
        "patch_size": 1,
        "hidden_size": 6144,
        "num_heads": 48,
        "depth": 8,
        "depth_single_blocks": 48,
        "context_in_dim": 15360,
        "vec_in_dim": None,
        "txt_ids_dims": [3],
        "axes_dim": [32, 32, 32, 32],
        "theta": 2000,
        "mlp_ratio": 3.0,
        "mlp_silu_act": True,
        "global_modulation": True,
        "qkv_bias": False,
        "ops_bias": False,
        "guidance_embed": True,
    },
    "Chroma": {
        "image_model": "chroma",
        "in_channels": 64,
        "out_channels": 64,
        "patch_size": 2,
        "hidden_size": 3072,
        "num_heads": 24,
        "depth": 19,
        "depth_single_blocks": 38,
        "context_in_dim": 4096,
        "vec_in_dim": None,
        "txt_ids_dims": [],
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "in_dim": 64,
        "out_dim": 3072,
        "hidden_dim": 5120,
        "n_layers": 5,
    },
    "Lumina 2": {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": 16,
        "dim": 2304,
        "cap_feat_dim": 2304,
        "n_layers": 26,
        "n_heads": 24,
        "n_kv_heads": 8,
        "axes_dims": [32, 32, 32],
        "axes_lens": [300, 512, 512],
        "qk_norm": True,
        "ffn_dim_multiplier": 4.0,
    },
    "Anima": {
        "image_model": "anima",
        "max_img_h": 240,
        "max_img_w": 240,
        "max_frames": 128,
        "in_channels": 16,
        "out_channels": 16,
        "patch_spatial": 2,
        "patch_temporal": 1,
        "model_channels": 2048,
        "num_blocks": 28,
        "num_heads": 16,
        "concat_padding_mask": True,
        "crossattn_emb_channels": 1024,
        "pos_emb_cls": "rope3d",
        "use_adaln_lora": True,
        "adaln_lora_dim": 256,
    },
    "Wan": {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 5120,
        "in_dim": 16,
        "out_dim": 16,
        "num_heads": 40,
        "num_layers": 40,
        "ffn_dim": 13824,
        "freq_dim": 256,
        "patch_size": (1, 2, 2),
    },
    "HunyuanVideo": {
        "image_model": "hunyuan_video",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 20,
        "depth_single_blocks": 40,
        "axes_dim": [16, 56, 56],
        "theta": 256,
        "qkv_bias": True,
        "guidance_embed": True,
        "byt5": False,
        "meanflow": False,
        "meanflow_sum": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
    },
    "LTX-Video": {
        "image_model": "ltxv",
        "num_layers": 28,
        "attention_head_dim": 64,
        "cross_attention_dim": 2048,
    },
}


def fetch_comfyui(folder):
    """Its code at `COMMIT`: the folder $COMFYUI, or fetched. Skips the test without network."""
    if own := os.environ.get("COMFYUI"):
        return Path(own)

    def git(*words):
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, timeout=300)

    folder.mkdir()
    git("init")
    done = git("fetch", "--depth=1", "--filter=blob:none", COMFYUI, COMMIT)
    if done.returncode:
        pytest.skip(f"{COMFYUI} can't be fetched: {done.stderr.decode().strip()}")
    git("sparse-checkout", "set", "--no-cone", "/comfy/**/*.py")
    assert git("checkout", "FETCH_HEAD").returncode == 0
    return folder


def rename_as_the_page(folder, into):
    """Another LoRA, of the names that the code of the page gives the one in a folder."""
    page = (ROOT / "docs/lora.md").read_text()
    code = page.partition("# for_comfyui.py\n")[2].partition("```")[0]
    shutil.copytree(folder, into)
    with contextlib.chdir(into):
        exec(code, {})
        Path("for-comfyui.safetensors").rename("pytorch_lora_weights.safetensors")


def name_class(name):
    """The transformer's class in diffusers."""
    kind, _ = MODELS[name]
    names = (f"{kind}Transformer{n}DModel" for n in (2, 3))
    return next(each for each in names if hasattr(diffusers, each))


def write_lora(folder, name, which):
    """A LoRA as the trainer writes it; the model's own weights are not made."""
    with torch.device("meta"):
        model = getattr(diffusers, name_class(name))(**MODELS[name][1])
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    layers = Recorded.choose_layers(object.__new__(Recorded), model, which)
    flags = {"lora_type": "lora", "lora_layers": which, "rank": 1, "lora_alpha": None}
    flags |= {"use_dora": False, "lora_dropout": 0.0}
    add_lora(model, layers, "", torch.bfloat16, Namespace(**flags))
    for key, module in model.named_modules():
        if key.rpartition(".")[0].endswith(("lora_A", "lora_B")):
            torch.nn.init.ones_(module.to_empty(device="cpu").weight)
    folder.mkdir(parents=True)
    save_lora({"transformer": model}, folder, None)
    about = {"shapes": shapes, "config": CONFIGS.get(name)}
    (folder / "model.json").write_text(json.dumps(about))


@pytest.mark.long
def test_comfyui_finds_the_layers_of_the_models_in_comfyui_tsv(tmp_path):
    (*_, version), *rows = (line.split("\t") for line in ANSWERS.read_text().splitlines())
    (commit,) = re.findall(r"commit (\w+)", version)
    assert COMMIT.startswith(commit)
    expected = {(kind, name): answer for kind, name, answer in rows}
    comfyui = fetch_comfyui(tmp_path / "comfyui")
    for name, which in itertools.product(MODELS, LAYER_SETS):
        folder = tmp_path / "loras" / f"{name} {which}"
        write_lora(folder, name, which)
        if name in RENAMED:
            rename_as_the_page(folder, folder.with_name(f"{folder.name} renamed"))
    program = [sys.executable, ROOT / "tests/comfyui_loader.py", comfyui, tmp_path / "loras"]
    run = subprocess.run(program, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    for name in MODELS:
        left_out = any(results[f"{name} {which}"][1] for which in LAYER_SETS)
        assert expected.pop((name_class(name), name)) == ("skips" if left_out else "reads")
    assert not any(misfits for _, _, misfits in results.values())
    for name, which in itertools.product(RENAMED, LAYER_SETS):
        assert not results[f"{name} {which} renamed"][1]
    # the names in a U-Net's file are held by tests/package/test_lora_files.py
    rest = {name: answer for (_, name), answer in expected.items() if "SDXL" not in name}
    assert {name for name, answer in rest.items() if answer == "skips"} <= {*UNKNOWN}
    assert "reads" not in rest.values()
    models = (comfyui / "comfy/model_base.py").read_text()
    for name, kind in UNKNOWN.items():
        assert f"class {kind}(" not in models, f"ComfyUI has {name} now: add it to MODELS"
