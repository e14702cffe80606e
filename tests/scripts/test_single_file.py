"""A base in one published file trains to the same bits as its folder, or is refused."""

import json
import os
import shutil

import diffusers
import numpy as np
import pytest
import torch
import transformers
from conftest import Script, make_captioned, make_models, make_sdxl, open_pipeline
from original_layout import save_original
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion_training.families.known import load_family
from diffusion_training.families.opening import open_base

precompute = Script("precompute_latents")
train_text_to_image = Script("train_text_to_image")
pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{family: (folder, file)}, and images."""
    folder = tmp_path_factory.mktemp("bases")
    make_models(folder)
    open_pipeline(folder / "sd").save_pretrained(folder / "sd")  # with its model_index.json
    (folder / "xl").mkdir()
    make_sdxl(folder / "xl")
    made = {
        "sd": (folder / "sd", folder / "sd.safetensors"),
        "xl": (folder / "xl/sdxl", folder / "xl.safetensors"),
    }
    for family, (source, path) in made.items():
        save_original(source, path, sdxl=family == "xl")
    make_captioned(folder / "images", 5)
    return made | {"images": folder / "images"}


def describe_data(bases, tmp_path):
    data = [f"--train_data_dir={bases['images']}", f"--cache_dir={tmp_path / 'kept'}"]
    return [*data, "--resolution=16", "--dataloader_num_workers=0"]


def list_flags(bases, tmp_path, base, out, *more):
    """Flags of two steps, on the images if `more` names no cache."""
    cached = any("latents_dir" in flag for flag in more)
    return train_text_to_image.flags(
        tmp_path / out,
        f"--pretrained_model_name_or_path={base}",
        *([] if cached else describe_data(bases, tmp_path)),
        *"--train_batch_size=2 --max_train_steps=2 --validation_prompts=a".split(),
        *"--num_validation_images=1 --learning_rate=1e-2 --lr_warmup_steps=0".split(),
        *more,
    )


def train(*given):
    train_text_to_image(*list_flags(*given))


def contents(folder):
    paths = (
        path
        for path in folder.rglob("*")
        if path.suffix in (".safetensors", ".png") and path.name != "loss.png"
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("family", [pytest.param("sd", marks=pytest.mark.long), "xl"])
def test_a_single_file_base_trains_and_caches_to_the_bits_of_its_folder(bases, tmp_path, family):
    folder, path = bases[family]
    config = f"--single_file_config={folder}"
    train(bases, tmp_path, folder, "folder")
    train(bases, tmp_path, path, "file", config)
    one, other = contents(tmp_path / "folder"), contents(tmp_path / "file")
    assert one == other and "unet/diffusion_pytorch_model.safetensors" in one and len(one) >= 6
    (unpacked,) = (tmp_path / "kept/single_files").glob("*/")
    assert unpacked.name.startswith(f"{path.stem}-")
    for base, out, more in ((folder, "one", []), (path, "other", [config])):
        base = f"--pretrained_model_name_or_path={base}"
        precompute(*precompute.flags(tmp_path / out, base, *more, *describe_data(bases, tmp_path)))
    caches = [json.loads((tmp_path / name / "cache.json").read_text()) for name in ("one", "other")]
    assert all(cache.pop("made_with") for cache in caches) and caches[0] == caches[1]
    one, other = (next((tmp_path / name).glob("*.arrow")).read_bytes() for name in ("one", "other"))
    assert one == other
    # The cache made with the folder, used with the single file
    train(bases, tmp_path, path, "cached", config, f"--latents_dir={tmp_path / 'one'}")
    assert [*(tmp_path / "kept/single_files").glob("*/")] == [unpacked]  # it was unpacked once
    if family == "sd":  # a changed file replaces the previous one
        os.utime(path, (1, 1))
        train(bases, tmp_path, path, "touched", config)
        (other,) = (tmp_path / "kept/single_files").glob("*/")
        assert other != unpacked


def test_two_processes_unpack_the_single_file_once_and_a_lora_names_it(bases, tmp_path):
    folder, path = bases["sd"]
    flags = [f"--single_file_config={folder}", "--rank=2"]
    flags = list_flags(bases, tmp_path, path, "out", *flags)
    train_text_to_image.fork(*flags, num_processes=2)
    card = (tmp_path / "out/README.md").read_text()
    assert 'pipeline = StableDiffusionPipeline.from_single_file("sd.safetensors", ' in card
    assert "from diffusers import StableDiffusionPipeline\n" in card
    with safe_open(tmp_path / "out/pytorch_lora_weights_kohya.safetensors", "pt") as file:
        header = file.metadata()
    assert header["ss_sd_model_name"] == "sd.safetensors"
    tags = {"a digit one": 2, "a digit zero": 2, "a digit two": 1}
    assert json.loads(header["ss_tag_frequency"]) == {"images": tags}


def test_float16_weights_of_a_single_file_are_read_exactly(bases, tmp_path):
    folder, _ = bases["sd"]
    save_original(folder, tmp_path / "half.safetensors", dtype=torch.float16)
    train(
        bases,
        tmp_path,
        tmp_path / "half.safetensors",
        "out",
        f"--single_file_config={folder}",
        "--learning_rate=0",
    )
    trained = load_file(tmp_path / "out/unet/diffusion_pytorch_model.safetensors")
    for name, value in (
        diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
        .state_dict()
        .items()
    ):
        assert torch.equal(trained[name], value.half().float())


def copy_weights(path, target, keep):
    save_file({name: value for name, value in load_file(path).items() if keep(name)}, target)
    return target


def refused(bases, tmp_path, base, *more):
    error = train_text_to_image.refused(*list_flags(bases, tmp_path, base, "out", *more))
    assert not list(tmp_path.glob("out/*.json*"))
    assert not [path for path in (tmp_path / "kept").glob("single_files/*") if path.name != ".lock"]
    return error


def test_unsuitable_single_files_are_refused(bases, tmp_path):
    folder, path = bases["sd"]
    config, broken = f"--single_file_config={folder}", tmp_path / "broken.safetensors"
    (tmp_path / "base.ckpt").write_bytes(b"a pickle")
    (tmp_path / "base.gguf").write_bytes(b"GGUF")
    for name in ("base.ckpt", "base.gguf"):
        said = refused(bases, tmp_path, tmp_path / name)
        assert "because a .ckpt can run any program, and GGUF is read as --tra" in said
    assert "--variant fp16 does nothing for a single file" in refused(
        bases, tmp_path, path, config, "--variant=fp16"
    )
    assert "is for a base in one file, and" in refused(bases, tmp_path, folder, config)
    broken.write_bytes(b"no safetensors")
    assert "broken.safetensors can't be read (" in refused(bases, tmp_path, broken, config)
    save_file({"double_blocks.0.img_attn.norm": torch.from_numpy(np.ones(3))}, broken)
    assert "is not Stable Diffusion 1, 2 or XL in its published layout" in refused(
        bases, tmp_path, broken, config
    )
    copy_weights(path, broken, lambda name: "cond_stage_model" not in name)
    assert "is not Stable Diffusion 1, 2 or XL in its published layout" in refused(
        bases, tmp_path, broken, config
    )
    assert "can't be unpacked; if its configs are missing, give" in refused(
        bases, tmp_path, path, f"--single_file_config={tmp_path}"
    )


@pytest.mark.parametrize(
    "part, why",
    [
        ("model.diffusion_model.out.2", "meta tensor"),
        ("first_stage_model.quant_conv", "meta tensor"),
        (
            "cond_stage_model.transformer.text_model.final_layer_norm",
            "the CLIPTextModel has no final_layer_norm.weight",
        ),
    ],
)
def test_single_files_with_missing_weights_are_refused(bases, tmp_path, part, why):
    folder, path = bases["sd"]
    copy_weights(path, tmp_path / "part.safetensors", lambda name: not name.startswith(part))
    said = refused(bases, tmp_path, tmp_path / "part.safetensors", f"--single_file_config={folder}")
    assert (
        "part.safetensors can't be unpacked; if its configs are missing, give" in said
        and why in said
    )


# ------------------------------------------------------------------- a base that predicts v


@pytest.mark.parametrize("keys, header, expected", [
    ([], {}, ("epsilon", None)),
    ([], {"modelspec.prediction_type": "epsilon"}, ("epsilon", None)),
    (["v_pred"], {}, ("v_prediction", None)),
    ([], {"modelspec.prediction_type": "v"}, ("v_prediction", None)),
    (["v_pred", "ztsnr"], {}, ("v_prediction", True)),
])  # fmt: skip
def test_a_single_files_prediction_type_is_used_for_training(
    bases, tmp_path, keys, header, expected
):
    folder, path = bases["sd"]
    base = tmp_path / "base.safetensors"
    save_file(load_file(path) | {key: torch.tensor([]) for key in keys}, base, header)
    config = tmp_path / "config"
    shutil.copytree(folder, config, ignore=shutil.ignore_patterns("*.safetensors"))
    scheduler = json.loads((config / "scheduler/scheduler_config.json").read_text())
    scheduler |= {"prediction_type": "epsilon"}
    (config / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    argv = [f"--pretrained_model_name_or_path={base}", f"--single_file_config={config}"]
    args = train_text_to_image.module.parse_args([*argv, *describe_data(bases, tmp_path)])
    for trained in train_text_to_image.module.make_schedulers(open_base(args), args):
        assert trained.config.prediction_type == expected[0]
        assert (trained.config.get("rescale_betas_zero_snr") or None) == expected[1]
        assert not expected[1] or trained.config.timestep_spacing == "trailing"


# ------------------------------------------------------------------- a fine-tune in one file


def read_modules(pipeline):
    """{part.weight: tensor} of a pipeline."""
    parts = {"unet": pipeline.unet, "vae": pipeline.vae, "text": pipeline.text_encoder}
    if hasattr(pipeline, "text_encoder_2"):
        parts["text_2"] = pipeline.text_encoder_2
    return {f"{n}.{key}": x for n, part in parts.items() for key, x in part.state_dict().items()}


@pytest.mark.parametrize("family", ["sd", "xl"])
def test_output_single_file_holds_the_weights_of_the_pipeline(bases, tmp_path, family, capsys):
    folder, _ = bases[family]
    train(bases, tmp_path, folder, "out", "--output_single_file")
    out = tmp_path / "out"
    path = out / "single_file.safetensors"
    kind = getattr(diffusers, load_family("sdxl" if family == "xl" else "sd").pipeline)
    pipeline = kind.from_pretrained(out)
    one = read_modules(pipeline)
    other = read_modules(kind.from_single_file(path, config=str(folder)))
    assert one.keys() == other.keys() and len(one) > 100
    assert all(torch.equal(value, other[name]) for name, value in one.items())

    # ComfyUI's and A1111's names for this trained U-Net and all other weights
    save_original(out, tmp_path / "expected.safetensors", sdxl=family == "xl")
    expected = load_file(tmp_path / "expected.safetensors")
    written = load_file(path)
    assert "v_pred" in written and written.keys() - expected.keys() <= {"v_pred", "ztsnr"}
    assert all(torch.equal(value, written[name]) for name, value in expected.items())
    before = load_file(folder / "unet/diffusion_pytorch_model.safetensors")
    assert not torch.equal(one["unet.conv_in.weight"], before["conv_in.weight"])
    with safe_open(path, "pt") as file:
        header = file.metadata()
    with path.open("rb") as file:  # sorted, so that equal files have equal bytes
        length = int.from_bytes(file.read(8), "little")
        assert [*json.loads(file.read(length))["__metadata__"]] == sorted(header)
    name = {"sd": "stable-diffusion-v1", "xl": "stable-diffusion-xl-v1-base"}[family]
    assert header["modelspec.architecture"] == name and header["modelspec.title"] == "out"
    assert header["modelspec.prediction_type"] == "v" and str(tmp_path) not in str(header)
    readers = "single_file.safetensors is for ComfyUI and A1111, the folder for diffusers."
    assert f"report.html are in {out}. {readers}\n" in capsys.readouterr().out
    assert readers in (out / "README.md").read_text().replace("`", "")


def test_merge_writes_the_sd2_text_encoder_in_open_clips_layout(bases, tmp_path):
    """OpenCLIP has query, key and value in one matrix. The width tells it from version 1."""
    folder, _ = bases["sd"]
    shutil.copytree(folder, tmp_path / "sd2")
    config = transformers.CLIPTextConfig.from_pretrained(folder / "text_encoder")
    config.update({"hidden_size": 1024, "num_attention_heads": 16, "hidden_act": "gelu"})
    transformers.CLIPTextModel(config).save_pretrained(tmp_path / "sd2/text_encoder")
    unet = diffusers.UNet2DConditionModel.load_config(folder / "unet")
    unet = diffusers.UNet2DConditionModel.from_config({**unet, "cross_attention_dim": 1024})
    unet.save_pretrained(tmp_path / "sd2/unet")
    pipeline = open_pipeline(tmp_path / "sd2")
    weights = load_family("sd").merge(pipeline)
    start = "cond_stage_model.model.transformer.resblocks.0.attn"
    assert weights[f"{start}.in_proj_weight"].shape == (3 * 1024, 1024)
    assert load_family("sd").name_architecture(unet, True) == "stable-diffusion-v2-768-v"
    save_file(weights, tmp_path / "sd2.safetensors")
    read = diffusers.StableDiffusionPipeline.from_single_file(
        tmp_path / "sd2.safetensors", config=str(tmp_path / "sd2")
    )
    one, other = read_modules(pipeline), read_modules(read)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
