"""train_text_to_image.py with --rank: bit-exact resume, and a LoRA file that works.

Only the adapter is trained and written.
"""

import collections
import json
import os
import re
import shlex
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from conftest import (
    MODELS,
    ROOT,
    Script,
    checkpoints,
    hash_as_before,
    launch,
    list_sd_flags,
    metrics,
    open_pipeline,
    replace,
)
from diffusers import StableDiffusionPipeline
from other_programs import comfy_names, list_applied
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

import train_text_to_image as script
from diffusion_training.draws import step_seed
from diffusion_training.families.opening import open_base
from diffusion_training.models import hash_weights
from diffusion_training.training.lora.lora_flags import read_settings
from diffusion_training.training.showing import hub
from diffusion_training.training.showing.report import name_run
from diffusion_training.training.step import denoiser

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")
FILE = "pytorch_lora_weights.safetensors"
KOHYA = "pytorch_lora_weights_kohya.safetensors"
LOKR = ["--lora_type=lokr", "--lokr_factor=2", "--lora_layers=all"]
PRIOR = ["--preserve_prior", "--class_prompt", "a digit zero"]
UMASK = os.umask(0o022)
os.umask(UMASK)


@pytest.fixture(scope="module")
def inputs(sd_inputs):
    return sd_inputs(7, "--random_flip")  # some steps are short


@pytest.fixture
def flags(tmp_path, inputs):
    """A run of 4 steps; later flags override these."""
    return list_sd_flags(
        inputs,
        tmp_path / "out",
        *"--rank=2 --train_batch_size=2 --learning_rate=1e-2 --lr_warmup_steps=1".split(),
        *"--lr_scheduler=cosine --checkpointing_steps=2 --num_validation_images=1".split(),
    )


def contents(folder):
    """The files that must be the same in two runs: {file: bytes}."""
    kinds = (".safetensors", ".bin", ".png", "config.json")
    paths = (
        path for path in folder.rglob("*") if path.name.endswith(kinds) and path.name != "loss.png"
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.ci
@pytest.mark.parametrize("num_processes, more", [
    (2, ["--use_dora", "--lora_dropout=0.1", "--gradient_checkpointing"]),
    (1, ["--lora_layers=all", "--optimizer=adamw8bit"]),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (1, ["--mixed_precision=bf16", "--lora_dropout=0.1", "--lora_layers=all"]),
        (1, ["--use_dora", "--mixed_precision=bf16", "--no-use_ema", "--optimizer=adafactor"]),
        (2, [*LOKR, "--mixed_precision=bf16", *PRIOR]),
        (1, ["--optimizer=muon"]),
        (1, ["--optimizer=torch.optim.NAdam", "--optimizer_args", "momentum_decay=0.01"]),
        (2, [*LOKR, "--optimizer=prodigy", "--learning_rate=1"]),
    )),
])  # fmt: skip
def test_resumed_lora_run_is_bit_identical(tmp_path, flags, num_processes, more):
    flags = [
        *flags,
        *more,
        "--num_train_epochs=2",
        "--validation_prompts=a",
        "--validation_epochs=1",
        "--holdout=2",
    ]
    # the same folder name, because the files contain it
    whole, rest = tmp_path / "whole/lora", tmp_path / "rest/lora"
    again = f"--resume_from_checkpoint={whole / 'checkpoint-2'}"
    for argv in ([f"--output_dir={whole}"], [f"--output_dir={rest}", again]):
        train.fork(*flags, *argv, num_processes=num_processes)
    one, other = contents(whole), contents(rest)
    assert {
        FILE,
        KOHYA,
        f"checkpoint-4/{FILE}",
        f"checkpoint-4/{KOHYA}",
    } <= other.keys() and "checkpoint-4/unet/adapter_model.safetensors" in other
    assert {name for name in one if one[name] != other.get(name)} == {
        n for n in one if n.startswith(("checkpoint-2/", "samples/step-0000000.png"))
    }
    for record, same in zip(*(metrics(folder)[-3:] for folder in (whole, rest)), strict=True):
        assert record == same or all(
            record[key] == same[key] for key in ("step", "loss", "grad_norm")
        )


def test_a_lora_of_attention_is_resumed_under_the_new_default(tmp_path, flags, capfd):
    """With the same bits, if rank, alpha and layers are those of the checkpoint alone."""
    older = [*flags, "--lora_layers=attention", "--lora_alpha=3"]  # attention was the default
    train(*older)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "out/checkpoint-2", again / "checkpoint-2")
    config = json.loads((again / "checkpoint-2/unet/adapter_config.json").read_text())
    assert config["target_modules"] == ["to_k", "to_out.0", "to_q", "to_v"]  # as they were written
    flags = [flag for flag in flags if flag != "--rank=2"] + [f"--output_dir={again}"]
    flags.append("--resume_from_checkpoint=latest")
    capfd.readouterr()
    train(*flags)
    said = capfd.readouterr().out
    assert "keeps what it was begun with (attention), not --lora_layers attention_mlp" in said
    assert "The LoRA keeps its --lora_alpha 3" in said
    assert (again / FILE).read_bytes() == (tmp_path / "out" / FILE).read_bytes()
    # what is given and differs is refused
    more = [*flags, "--max_train_steps=5"]
    assert "target_modules" in train.refused(*more, "--lora_layers=attention_mlp")
    assert "lora_alpha 3.0 -> 4" in train.refused(*more, "--lora_alpha=4")
    without = [*more, "--rank=no"]
    assert "is a LoRA, but without --rank the whole" in train.refused(*without)


def test_damaged_settings_of_a_checkpoint_end_in_a_sentence(tmp_path, flags):
    """With --rank, and without, where parse_args looks for the rank of the checkpoint."""
    train(*flags, "--max_train_steps=2")
    files = [*tmp_path.glob("out/checkpoint-2/*/adapter_config.json")]
    whole = json.loads(files[0].read_text())
    changes = {"peft_type": None, "r": "2", "target_modules": {"to_q": 1}, "lora_alpha": [2]}
    contents = [b"\xff\x00", b"", b"[1]", b"{}", b"[" * 10**5]
    contents += [json.dumps(whole | {key: value}).encode() for key, value in changes.items()]
    contents.append(json.dumps(whole | {"r": 0}).encode())
    for key in changes:
        contents.append(json.dumps({k: v for k, v in whole.items() if k != key}).encode())
    more = [*flags, "--max_train_steps=3", "--resume_from_checkpoint=latest"]
    without = [flag for flag in more if flag != "--rank=2"]
    for content in contents:
        for file in files:
            file.write_bytes(content)
        assert train.module.parse_args(without).rank is None
        with pytest.raises(ValueError):
            read_settings(files[0].parent)
        if content in contents[::6]:  # each one takes half a second
            said = train.refused(*more)
            assert "out/checkpoint-2 is damaged; resume from another or choose a new" in said
    for file in files:
        file.unlink()
        os.mkfifo(file)
    assert train.module.parse_args(without).rank is None
    assert "adapter_config.json has changed since it was written" in train.refused(*more)
    assert not (tmp_path / "out/checkpoint-3").exists()


def test_network_weights_continues_training_a_lora_file(tmp_path, flags):
    train(*flags)
    again = [*flags, f"--network_weights={tmp_path / 'out'}", f"--output_dir={tmp_path / 'again'}"]
    train(*again, "--learning_rate=0", "--lora_alpha=8")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "out" / FILE).read_bytes()
    again[-1] = f"--output_dir={tmp_path / 'more'}"
    train(*again)
    one, other = (load_file(tmp_path / name / FILE) for name in ("out", "more"))
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert "its rank is 2" in train.refused(
        *again, "--rank=4", f"--output_dir={tmp_path / 'other'}"
    )


def test_network_weights_loads_a_dora_with_its_magnitudes(tmp_path, flags):
    flags = [*flags, "--use_dora", "--max_train_steps=1"]
    train(*flags)
    for name in (FILE, KOHYA):
        again = [*flags, f"--network_weights={tmp_path / 'out' / name}", "--learning_rate=0"]
        train(*again, f"--output_dir={tmp_path / name}")
        one, other = (load_file(tmp_path / folder / FILE) for folder in ("out", name))
        assert one.keys() == other.keys() and len(one) % 3 == 0
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], rtol=4e-3, atol=1e-6)


def test_lora_state_is_float32_and_checkpoints_omit_base_weights(tmp_path, flags):
    train(*flags, "--mixed_precision=bf16")
    checkpoint = tmp_path / "out/checkpoint-4"
    moments = torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"]
    adapter = load_file(checkpoint / "unet/adapter_model.safetensors")
    assert len(moments) == len(adapter) > 10
    assert {value.dtype for state in moments.values() for value in state.values()} == {
        torch.float32
    }
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    assert all(value.any() for name, value in adapter.items() if "lora_B" in name)
    assert checkpoint.joinpath(FILE).read_bytes() == (tmp_path / "out" / FILE).read_bytes()
    assert {value.dtype for value in load_file(checkpoint / FILE).values()} == {torch.float16}
    assert all("lora_" in name for name in [*adapter, *load_file(checkpoint / FILE)])
    config = json.loads((checkpoint / "unet_ema/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (2, 2, False)


def test_lora_resumes_in_any_precision_but_only_on_its_own_base(tmp_path, flags, inputs, capfd):
    train(*flags, "--max_train_steps=2", "--mixed_precision=bf16")
    again = [*flags, "--resume_from_checkpoint=latest"]
    capfd.readouterr()
    train(*again, "--mixed_precision=no", "--max_train_steps=3", "--lora_dropout=0.5")
    assert ", mixed_precision bf16 -> no" in capfd.readouterr().out
    assert "checkpoint-3/unet is of another LoRA (r 2 -> 4)" in train.refused(*again, "--rank=4")
    whole = [arg for arg in again if arg != "--rank=2"]
    assert "was trained with --optimizer adamw, not adafactor: keep" in train.refused(
        *again, "--optimizer=adafactor"
    )
    shutil.copytree(inputs / "sd", tmp_path / "sd")
    path = tmp_path / "sd/unet/diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = train.refused(*again, f"--pretrained_model_name_or_path={tmp_path / 'sd'}")
    assert "is of another LoRA (another base): keep base and flags as they were" in error
    train(*whole[:-1], "--max_train_steps=2", f"--output_dir={tmp_path / 'full'}")
    error = train.refused(*again, f"--output_dir={tmp_path / 'full'}")
    assert "checkpoint-2/unet is a whole model, but --rank trains a LoRA: keep" in error


def test_equal_bases_of_other_precision_and_checkpoints_of_older_versions_resume(
    tmp_path, flags, inputs, monkeypatch
):
    file = "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(inputs / "sd" / file)
    for name in ("bf16", "float32"):
        shutil.copytree(inputs / "sd", tmp_path / name)
        weights = {key: weight.bfloat16() for key, weight in weights.items()}
        if name == "float32":  # the same values in twice the bytes
            weights = {key: weight.float() for key, weight in weights.items()}
        save_file(weights, tmp_path / name / file, metadata={"format": "pt"})
    half, equal, other = (
        f"--pretrained_model_name_or_path={folder}"
        for folder in (tmp_path / "bf16", tmp_path / "float32", inputs / "sd")
    )
    unet = open_pipeline(tmp_path / "bf16").unet
    new, old = hash_weights(unet), hash_as_before(unet)

    def read_hashes(step):
        files = tmp_path.glob(f"out/checkpoint-{step}/*/adapter_config.json")
        return [json.loads(path.read_text())["base_sha256"] for path in files]

    with monkeypatch.context() as before:
        before.setattr(denoiser, "hash_weights", hash_as_before)
        train(*flags, half, "--max_train_steps=1")
    assert read_hashes(1) == [old] * 2  # also of the average
    again = [*flags, "--resume_from_checkpoint=latest", "--checkpointing_steps=1"]
    assert "is of another LoRA (another base): keep" in train.refused(*again, other)
    train(*again, equal, "--max_train_steps=2")
    assert read_hashes(2) == [f"{new} {old}"] * 2
    train(*again, half, "--max_train_steps=3")
    assert read_hashes(3) == [new] * 2  # the older hash is not computed any more
    train(*again, equal, "--max_train_steps=4")
    assert "is of another LoRA (another base): keep" in train.refused(*again, other)


@pytest.mark.long
def test_max_grad_norm_clips_lora_gradients(tmp_path, flags):
    """diffusers' script never clips, because its iterator of parameters is used up."""
    size = {}
    for norm in (1.0, 1e-12):  # so small that Adam's epsilon is larger
        train(*flags, f"--max_grad_norm={norm}", f"--output_dir={tmp_path / str(norm)}")
        weights = load_file(tmp_path / f"{norm}/checkpoint-4/unet/adapter_model.safetensors")
        size[norm] = sum(value.abs().sum() for name, value in weights.items() if "lora_B" in name)
        assert metrics(tmp_path / str(norm))[-1]["clipped"] == (norm < 1)
    assert 0 < size[1e-12] < 1e-2 * size[1.0]


def test_sampling_and_held_out_losses_do_not_change_the_lora(tmp_path, flags):
    """Also without EMA, where the trained weights themselves draw the samples."""
    flags = [*flags, "--mixed_precision=bf16", "--no-use_ema", "--no-validate_first"]
    measured = ["--validation_prompts=a", "--validation_steps=1", "--holdout=1"]
    train(*flags, *measured, f"--output_dir={tmp_path / 'looked'}")
    train(*flags, "--holdout=1", f"--output_dir={tmp_path / 'not'}", "--validation_epochs=9")
    assert (tmp_path / "looked" / FILE).read_bytes() == (tmp_path / "not" / FILE).read_bytes()
    records = [record for record in metrics(tmp_path / "looked") if "held_out_loss" in record]
    assert len(records) == 3 and len({record["held_out_loss"] for record in records}) == 3


@pytest.mark.parametrize("kohya", [True, pytest.param(False, marks=pytest.mark.long)])
def test_lora_output_is_complete_and_redraws_the_last_samples(
    tmp_path, flags, inputs, kohya, monkeypatch, capfd
):
    calls = {}
    monkeypatch.setattr(
        hub, "create_repo", lambda name, **more: SimpleNamespace(repo_id=f"me/{name}")
    )
    monkeypatch.setattr(hub, "get_paths_info", lambda *args, **options: [])
    monkeypatch.setattr(hub, "upload_folder", lambda **options: calls.update(options))
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)  # no rounding
    open_pipeline(inputs / "sd").save_pretrained(tmp_path / "sd")
    monkeypatch.chdir(tmp_path)
    train(
        *flags,
        f"--pretrained_model_name_or_path={tmp_path / 'sd'}",
        "--validation_prompt",
        "a digit one",
        "--guidance_scale=3",
        "--push_to_hub",
        "--lora_alpha=4",
        *["--no-output_kohya_format"] * (not kohya),
    )
    out, files = tmp_path / "out", {FILE, *[KOHYA] * kohya}
    assert {path.name for path in out.glob("*.safetensors")} == files
    assert {path.name for path in (out / "checkpoint-2").glob("*.safetensors")} == files
    assert not (out / "model_index.json").exists() and not (out / "unet").exists()
    assert {path.name for path in (out / "checkpoint-4").glob("*.safetensors")} == files
    assert (out / "checkpoint-4" / max(files)).read_bytes() == (out / max(files)).read_bytes()
    readers = f"{FILE} is for diffusers; other programs need --output_kohya_format."
    if kohya:
        readers = f"{FILE} is for diffusers, {KOHYA} for ComfyUI, A1111 and sd-scripts."
    said = capfd.readouterr().out
    assert said.strip().endswith(f"copy {out / KOHYA} to models/loras/out.safetensors") == kohya
    assert re.search(r"\nTrains: LoRA of rank 2: [\d,]+ of [\d,]+ weights\n", said)
    done, following = said.strip().splitlines()[-2:]
    assert re.fullmatch(r"Done in \d+ s: LoRA, samples/ and report.html are in (.*)", done)[1] == (
        f"{out}. {readers}"
    )
    assert following.startswith(f"Next: open {out}/report.html in a browser")
    # safetensors makes files readable only for their owner
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.*")} == {0o666 & ~UMASK}
    for page in ("README.md", "report.html"):
        assert readers in (out / page).read_text().replace("`", "")
    assert "pytorch_lora_weights*" in calls["allow_patterns"]
    card = (out / "README.md").read_text()
    assert "A LoRA of rank 2 for the U-Net of `sd`" in card and card.count("rank | 2 |") == 1
    assert card.index("| rank | 2 |") < card.index("<details>") < card.index("| adam_beta1 | 0.9 |")
    assert str(tmp_path) not in card and str(inputs) not in card
    assert '# Put the path or the id of this base in place of "sd"' in card
    grid = np.array(Image.open(out / "samples/step-0000004.png").convert("RGB")).astype(int)
    differences = []
    for adapter in (None, max(files)):
        pipeline = open_pipeline(inputs / "sd")
        if adapter:
            pipeline.load_lora_weights(out, weight_name=adapter)
        pipeline.unet.register_to_config(sample_size=8)
        generator = torch.Generator().manual_seed(step_seed("sample", 0, 0))
        image = pipeline(
            "a digit one", generator=generator, guidance_scale=3, num_inference_steps=2
        ).images[0]
        image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
        differences.append(np.abs(grid[:64, -68:-4] - image).max())
    assert differences[0] > 20 and differences[1] <= 1
    if kohya:
        run_copied_code(out, monkeypatch)


def run_copied_code(out, monkeypatch):
    """Run the code and the commands of the report and the card in the folder that they name."""
    page = (out / "report.html").read_text()
    usage, command, again = map(unescape, re.findall(r"<pre>(.*?)</pre>", page, re.S))
    exec(usage, {})
    assert Image.open("image.png").size == (256, 256)  # enlarged
    args = script.parse_args([f"@{out / 'run.args'}"])
    for words, others in (
        (
            shlex.split(command.replace("\\\n", "")),
            {"mixed_precision": None},
        ),  # run.args contains the launch's settings
        (shlex.split(again), {"output_dir": f"{out}-again", "push_to_hub": False}),
    ):
        assert words[0] == "python" and os.path.samefile(words[1], script.__file__)
        assert vars(script.parse_args(words[2:])) == vars(args) | others
    train(*words[2:])
    assert (out.parent / "out-again" / FILE).read_bytes() == (out / FILE).read_bytes()
    # the name of the card, as if it were on the hub
    Path("me").mkdir()
    Path("me/out").symlink_to(out)
    os.remove("image.png")
    exec(re.search(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)[1], {})
    assert Image.open("image.png").size == (256, 256)  # enlarged


@pytest.mark.usefixtures("without_figures")
def test_lokr_trained_from_images_resumes_and_is_drawn_by_the_code_of_its_card(
    tmp_path, flags, inputs, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)  # no rounding
    images = [flag for flag in flags if not flag.startswith("--latents_dir")]
    images += [f"--train_data_dir={inputs / 'images'}", "--resolution=16", "--holdout=2"]
    images += ["--gradient_checkpointing", "--validation_prompts", "a digit one"]
    train(*images, *LOKR, "--guidance_scale=3")
    assert re.search(r"\nTrains: LoKr of rank 2: [\d,]+ of ", capfd.readouterr().out)
    assert "held_out_loss_ema" in metrics(tmp_path / "out")[-1]
    card = (tmp_path / "out/README.md").read_text()
    assert "A LoKr of rank 2 for the U-Net of `sd`" in card
    assert f"`{FILE}` is for diffusers, `{KOHYA}` for ComfyUI." in card
    (line,) = [line for line in card.splitlines() if line.startswith("pipeline.unet.load")]
    again = ["--resume_from_checkpoint=out/checkpoint-2", "--output_dir=rest"]
    train(*images, *LOKR, *again)
    assert (tmp_path / "rest" / FILE).read_bytes() == (tmp_path / "out" / FILE).read_bytes()
    adapters = list(Path("rest").glob("checkpoint-*/unet*/adapter_model.safetensors"))
    assert len(adapters) == 2
    for path in adapters:
        assert path.read_bytes() == ("out" / path.relative_to("rest")).read_bytes()
    pytest.importorskip("diffusers", "0.42")
    pipeline = open_pipeline(inputs / "sd")
    pipeline.unet.register_to_config(sample_size=8)
    path = max((tmp_path / "out/samples").iterdir())
    grid = np.array(Image.open(path).convert("RGB")).astype(int)
    differences = []
    for code in ("", line):
        exec(code, {"pipeline": pipeline})
        generator = torch.Generator().manual_seed(step_seed("sample", 0, 0))
        (image,) = pipeline(
            "a digit one", generator=generator, guidance_scale=3, num_inference_steps=2
        ).images
        image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
        differences.append(np.abs(grid[:64, -68:-4] - image).max())
    assert differences[0] > 20 and differences[1] <= 1


@pytest.mark.parametrize(
    "more, name",
    [
        (["--lora_layers=all", "--output_name=dog.safetensors"], "dog"),
        pytest.param(["--use_dora"], "", marks=pytest.mark.long),
    ],
)
def test_kohya_file_applies_fully_in_comfyui_and_has_metadata(
    tmp_path, flags, inputs, more, name, capfd
):
    train(*flags, *more)
    unet = open_pipeline(inputs / "sd").unet
    plain = {name.rsplit(".lora_", 1)[0] for name in load_file(tmp_path / "out" / FILE)}
    named = [KOHYA, f"checkpoint-2/{KOHYA}", f"checkpoint-4/{KOHYA}"]
    if name:
        steps = [f"checkpoint-{step}/dog-step0000000{step}.safetensors" for step in (2, 4)]
        named = ["dog.safetensors", *steps]
    written = {str(path.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/**/*.s*ors")}
    others = {f"{folder}{FILE}" for folder in ("", "checkpoint-2/", "checkpoint-4/")}
    assert {path for path in written if "/unet" not in path} == {*named, *others}
    for path in named:
        applied, left_out = list_applied(load_file(tmp_path / "out" / path), comfy_names(unet))
        assert {f"unet.{name}" for name in applied} == plain and not left_out
    *_, done, following = capfd.readouterr().out.strip().splitlines()
    assert f"{FILE} is for diffusers, {named[0]} for ComfyUI" in done
    assert following.endswith(
        f". ComfyUI reads this LoRA: copy {tmp_path}/out/{named[0]} "
        f"to models/loras/{name or 'out'}.safetensors"
    )
    with safe_open(tmp_path / "out" / named[0], "pt") as file:
        header = file.metadata()
    assert header["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert header["modelspec.title"] == header["ss_output_name"] == (name or "out")
    assert header["modelspec.resolution"] == "16x16" and header["ss_resolution"] == "(16, 16)"
    assert header["modelspec.prediction_type"] == "v" and header["ss_clip_skip"] == "None"
    assert header["ss_sd_model_name"] == "sd" and header["ss_base_model_version"] == "sd_v1"
    tags = {"a digit zero": 3, "a digit one": 2, "a digit two": 2}
    assert json.loads(header["ss_tag_frequency"]) == {"cache": tags}
    assert json.loads(header["ss_dataset_dirs"])["cache"]["img_count"] == 7
    assert str(tmp_path) not in str(header) and str(inputs) not in str(header)


def test_lora_card_sets_an_objective_other_than_the_bases(tmp_path, flags):
    args = script.parse_args([*flags, "--prediction_type=v_prediction", "--rescale_betas_zero_snr"])
    family = open_base(args).family
    about = name_run(1, args, local=True)
    usage = script.describe_model(family, about, replace(args, resolution=16)).usage
    scheduler = SimpleNamespace(config={"num_train_timesteps": 1000, "prediction_type": "epsilon"})
    pipeline = SimpleNamespace(scheduler=scheduler)
    line = next(line for line in usage.splitlines() if line.startswith("pipeline.scheduler"))
    names = {"pipeline": pipeline}
    exec(usage.splitlines()[1] + "\n" + line, names)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert (
        pipeline.scheduler.config.timestep_spacing == "trailing"
        and pipeline.scheduler.alphas_cumprod[-1] == 0
    )


def test_gradient_checkpointing_does_not_change_the_lora(tmp_path, flags):
    """Also in the first layers, whose input needs no gradient."""
    found = []
    for more in ([], ["--gradient_checkpointing"]):
        train(*flags, *more, f"--output_dir={tmp_path / str(len(found))}", "--max_train_steps=2")
        found.append(
            load_file(tmp_path / f"{len(found)}/checkpoint-2/unet/adapter_model.safetensors")
        )
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6)
        assert value.any(), name


@pytest.mark.long
def test_find_lr_and_auto_batch_size_work_with_a_lora(tmp_path, flags):
    for optimizer in ("adamw", "adamw8bit", "adafactor"):
        train(*flags, "--find_lr", "--find_lr_steps=10", f"--optimizer={optimizer}")
        assert json.loads((tmp_path / "out/find_lr.json").read_text())["suggestion"] > 0
    auto = ["--train_batch_size=auto", "--max_train_steps=1", "--gradient_checkpointing"]
    train(*flags, *auto, "--optimizer=adamw8bit")
    args = json.loads((tmp_path / "out/checkpoint-1/trainer_state.json").read_text())["settings"]
    assert args["train_batch_size"] == 7


@pytest.mark.long
def test_lora_training_works_with_compile(tmp_path, flags):
    """A compiled run trains the same weights as one that is not compiled."""
    for name, more in [("eager", []), ("compiled", ["--compile=eager"])]:
        train(
            *flags,
            *more,
            "--mixed_precision=bf16",
            "--max_train_steps=2",
            f"--output_dir={tmp_path / name}",
        )
    one, other = (load_file(tmp_path / name / FILE) for name in ("eager", "compiled"))
    assert one.keys() == other.keys() and all(other[name].any() for name in other)


def test_lora_without_a_gradient_gives_a_warning(flags, capfd, monkeypatch):
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss: None)
    train(*flags, "--max_train_steps=101", "--logging_steps=50", "--checkpointing_steps=200")
    said = "Worth a look: the LoRA still changes nothing: is a gradient cut off?"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (
            ["--rank=4", "--unet_config_name_or_path=x"],
            "--rank needs a pretrained U-Net: leave --unet",
        ),
        (["--rank=0"], "0 is not between 1 and 4096"),
        (["--rank=4", "--lokr_factor=4"], "--lokr_factor does nothing without --lora_type lokr"),
        (["--lora_type=lokr"], "--lora_type does nothing without --rank"),
        (
            ["--rank=4", "--lora_type=lokr", "--use_dora"],
            "--use_dora can't be combined with --lora",
        ),
        (
            ["--rank=4", "--lora_type=lokr", "--lora_dropout=0.1"],
            "--lora_dropout can't be combined",
        ),
        (["--use_dora"], "--use_dora does nothing without --rank"),
        (["--lora_alpha=8"], "--lora_alpha does nothing without --rank"),
        (["--rank=4", "--lora_type=lokr", "--use_rslora"], "--use_rslora can't be combined with"),
        (["--optimizer=prodigy", "--learning_rate=3e-4"], "give --learning_rate 1"),
        (["--optimizer=prodigy", "--scale_lr"], "prodigy can't be combined with --scale_lr"),
        (["--rank=4", "--output_single_file"], "--output_single_file writes a pipeline, not"),
    ],
)
def test_bad_lora_flags_end_in_one_line(argv, sentence):
    argv = ["--pretrained_model_name_or_path=sd", "--latents_dir=a", *argv]
    assert sentence in train.refused(*argv, status=2).splitlines()[-1]


@pytest.mark.long
def test_accelerate_launch_trains_a_lora_on_two_processes(tmp_path, flags, inputs):
    env = {"ACCELERATE_USE_CPU": "true"}
    config = ["--multi_gpu", "--num_processes", 2, "--main_process_port", 0]
    run = launch(*config, "train_text_to_image.py", *flags, "--mixed_precision=bf16", env=env)
    assert run.returncode == 0, run.stderr
    assert "Processes: 2 on cpu" in run.stdout
    pipeline = open_pipeline(inputs / "sd")
    pipeline.load_lora_weights(tmp_path / "out")
    assert pipeline.get_active_adapters() == ["default_0"]


# ------------------------------------------------------------------- the demo


def test_rank_without_other_flags_selects_the_lora_demo(tmp_path, capsys):
    args = script.parse_args(
        ["--rank", "16", "--max_train_steps", "3", "--output_dir", str(tmp_path)]
    )
    printed = capsys.readouterr().out.partition("full command:\n")[2].splitlines()[0]
    assert args.rank == 16 and args.max_train_steps == 3
    assert [Path(args.train_data_dir).name, args.latents_dir] == ["ducks", None]
    assert args.preserve_prior
    assert vars(script.parse_args(shlex.split(printed)[2:])) == vars(args)
    # `no` takes back what a recipe gives
    flags = ["--latents_dir=x", "--base_precision=int8", "--blocks_to_swap=all"]
    flags += ["--base_precision=no", "--blocks_to_swap=no"]
    args = script.parse_args(["--pretrained_model_name_or_path=x", *flags])
    assert (args.base_precision, args.blocks_to_swap) == (None, None)
    whole = script.parse_args([])
    assert whole.rank is None and whole.latents_dir == ["latents-animals"]


def test_demos_of_drawings_have_one_token_for_each_word_and_hide_two_colors():
    base = ROOT / "demo/drawings"
    tokenizer = CLIPTokenizer.from_pretrained(base / "tokenizer")
    rows = pq.read_table(ROOT / "demo/ducks/train.parquet").to_pylist()
    assert all(row["image"]["bytes"] for row in rows)
    texts = [row["text"] for row in rows]
    args = script.parse_args(["--rank=16"])
    animals = pq.read_table(ROOT / "demo/animals/train.parquet")["text"].to_pylist()
    shown = script.parse_args([]).validation_prompts
    for text in [*texts, *args.class_prompt, *args.validation_prompts, *animals, *shown]:
        ids = tokenizer(text).input_ids
        assert len(ids) == 2 + len(text.split()) <= tokenizer.model_max_length, text
    assert len(set(texts)) == 30 and all("duck" in text for text in texts)
    assert not any(f"{color} duck" in text for color in ("purple", "green") for text in texts)
    assert not any("duck" in text for text in args.class_prompt)
    assert len(set(animals)) == 240
    in_captions, in_prompts = ({tuple(text.split()[1:3]) for text in x} for x in (animals, shown))
    assert len(in_prompts) == 8 and not in_captions & in_prompts  # such as ("blue", "dog")
    assert sum(path.stat().st_size for path in (ROOT / "demo").rglob("*")) < 17e6


def test_nines_and_their_base_come_from_the_demos_digits():
    digits, nines = (
        datasets.load_dataset(str(ROOT / "demo" / name), split="train").cast_column(
            "image", datasets.Image(False)
        )
        for name in ("digits", "nines")
    )
    assert all(row in digits.to_list() for row in nines.to_list())
    counts = collections.Counter(nines["text"])
    of_nine = collections.Counter(digits["text"])["a handwritten digit nine"]
    assert (
        counts.pop("a handwritten digit nine") == of_nine
        and set(counts.values()) == {10}
        and len(counts) == 9
    )
    for name in ("vae", "text_encoder"):
        (path,) = (ROOT / "demo/zero_to_eight" / name).glob("*.safetensors")
        one, other = load_file(path), load_file(MODELS / name / path.name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.long
def test_lora_demo_loss_falls_in_30_steps(tmp_path):
    quick = [
        "--max_train_steps=30",
        "--lr_warmup_steps=1",
        "--num_validation_images=1",
        "--num_inference_steps=1",
    ]
    quick += [
        f"--output_dir={tmp_path / 'out'}",
        f"--cache_dir={tmp_path / 'cache'}",
        "--report_to=none",
    ]
    train("--rank=16", *quick, "--logging_steps=5", "--snr_gamma=5")
    losses = [record["loss"] for record in metrics(tmp_path / "out")]
    assert losses[-1] < 0.9 * losses[0], losses
    assert {FILE, "README.md", "report.html", "samples"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    pipeline = StableDiffusionPipeline.from_pretrained(ROOT / "demo/drawings")
    pipeline.load_lora_weights(tmp_path / "out")
    assert pipeline("a yellow duck", num_inference_steps=1).images[0].size == (64, 64)


def draw(pipeline, prompts):
    """Samples of the demo of drawings, [N, 64, 64, 3] in [0, 1], the same noise for each prompt."""
    pipeline.set_progress_bar_config(disable=True)
    options = {"guidance_scale": 1.5, "num_inference_steps": 20, "output_type": "np"}
    return np.concatenate(
        [pipeline(each, generator=torch.manual_seed(0), **options).images for each in prompts]
    )


@pytest.mark.long
def test_whole_demo_learns_animals_also_in_colors_that_no_picture_shows(tmp_path):
    """The whole second demo, some minutes."""
    cache, out = f"--latents_dir={tmp_path / 'latents'}", f"--output_dir={tmp_path / 'out'}"
    for argv in (
        ["precompute_latents.py", f"--output_dir={tmp_path / 'latents'}"],
        ["train_text_to_image.py", *shlex.split(script.DEMO), cache, out, "--report_to=none"],
    ):
        run = launch(*argv)
        assert run.returncode == 0, run.stderr
    animals = datasets.load_dataset(str(ROOT / "demo/animals"), split="train")
    animals = {row["text"]: row["image"] for row in animals}
    shown = ["a red dog on pink", "a blue goat", "an orange dolphin on green"]
    real = np.stack([np.array(animals[each]) / 255 for each in shown])
    unseen = "a blue dog on pink"
    assert unseen not in animals
    wrong, right = (
        draw(StableDiffusionPipeline.from_pretrained(folder), [*shown, unseen])
        for folder in (ROOT / "demo/drawings", tmp_path / "out")
    )
    before, after = (np.abs(drawn[:3] - real).mean() for drawn in (wrong, right))
    red, _, blue = right[3][right[3].max(axis=-1) - right[3].min(axis=-1) > 0.4].mean(axis=0)
    print(before, after, red, blue)
    assert after < 0.4 * before and blue > red + 0.3


@pytest.mark.long
def test_lora_demo_learns_ducks_and_keeps_other_drawings(tmp_path):
    """The whole demo, some minutes."""
    argv = [
        "--rank=16",
        f"--output_dir={tmp_path / 'out'}",
        f"--cache_dir={tmp_path / 'cache'}",
        "--report_to=none",
    ]
    run = launch("train_text_to_image.py", *argv)
    assert run.returncode == 0, run.stderr
    ducks = datasets.load_dataset(str(ROOT / "demo/ducks"), split="train")
    ducks = {row["text"]: row["image"] for row in ducks}
    prompts = ["a yellow duck on blue", "a red duck", "a pink duck on green"]
    real = np.stack([np.array(ducks[each]) / 255 for each in prompts])
    others = ["a red car on yellow", "a green apple", "a blue gift on pink"]
    pipeline = StableDiffusionPipeline.from_pretrained(ROOT / "demo/drawings")
    before = draw(pipeline, [*prompts, *others])
    pipeline.load_lora_weights(tmp_path / "out")
    after = draw(pipeline, [*prompts, *others])
    wrong, right = (np.abs(drawn[:3] - real).mean() for drawn in (before, after))
    changed = np.abs(after[3:] - before[3:]).mean()
    print(wrong, right, changed)
    assert right < 0.4 * wrong and changed < 0.5 * right


@pytest.mark.long
def test_diffusers_lora_commands_save_the_same_checkpoints(tmp_path, inputs):
    """The command lines of diffusers' test of its LoRA script, with local paths, and --rank."""
    shared = f"""
        --pretrained_model_name_or_path {inputs / "sd"}
        --dataset_name {inputs / "images"}
        --output_dir {tmp_path / "out"}
        --resolution 64
        --center_crop
        --random_flip
        --train_batch_size 1
        --gradient_accumulation_steps 1
        --learning_rate 5.0e-04
        --scale_lr
        --lr_scheduler constant
        --lr_warmup_steps 0
        --checkpointing_steps=2
        --seed=0
        --num_validation_images=0
        --rank=4
        """.split()
    train(*shared, "--max_train_steps=4")
    assert checkpoints(tmp_path / "out") == {"checkpoint-2", "checkpoint-4"}
    more = ["--resume_from_checkpoint=checkpoint-4", "--checkpoints_total_limit=2"]
    train(*shared, "--max_train_steps=8", *more)
    assert checkpoints(tmp_path / "out") == {"checkpoint-6", "checkpoint-8"}
    assert all("lora" in name for name in load_file(tmp_path / "out" / FILE))
    pipeline = open_pipeline(inputs / "sd")
    pipeline.load_lora_weights(tmp_path / "out")
    assert pipeline("a prompt", num_inference_steps=1).images
