"""The recipes for published models run on tiny pipelines: only paths, sizes and steps change."""

import shlex
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    Script,
    make_captioned,
    make_images,
    make_klein,
    make_models,
    make_qwen_image,
    make_sdxl,
    make_z_image,
    metrics,
    open_pipeline,
)
from test_docs import blocks, commands, find_script

from diffusion_training.latents.reader import load_cache

SCRIPTS = {
    f"{name}.py": Script(name)
    for name in ("precompute_latents", "train_flow", "train_text_to_image")
}
SHORT = ["--max_train_steps=1", "--lr_warmup_steps=0", "--num_inference_steps=2"]
SHORT += ["--num_validation_images=1", "--report_to=none"]


def make_sd(folder):
    open_pipeline(make_models(folder / "parts")).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


KLEIN = "black-forest-labs/FLUX.2-klein-base-4B"
MAKE = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": make_sd,
    "stabilityai/stable-diffusion-xl-base-1.0": make_sdxl,
    "Tongyi-MAI/Z-Image": make_z_image,
    KLEIN: make_klein,
    "Qwen/Qwen-Image": make_qwen_image,
}
LORA = {"stable-diffusion-v1-5": "sd15", "stable-diffusion-xl-base-1.0": "sdxl"}
LORA |= {"Z-Image": "z_image", "FLUX.2-klein-base-4B": "klein_4b", "Qwen-Image": "qwen_image"}


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "page, model, expected",
    [
        ("README.md", None, ["sd"]),
        ("docs/training.md", None, ["sdxl"]),
        ("docs/models.md", None, ["ZImagePipeline", "ZImagePipeline LoRA"]),
        # the page says that these take the same commands
        pytest.param(
            "docs/models.md",
            KLEIN,
            ["Flux2KleinPipeline", "Flux2KleinPipeline LoRA"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "docs/models.md",
            "Qwen/Qwen-Image",
            ["QwenImagePipeline", "QwenImagePipeline LoRA"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_recipe_of_a_page_trains(tmp_path, monkeypatch, capsys, page, model, expected):
    monkeypatch.chdir(tmp_path)
    make_captioned(tmp_path / "images", 3)
    make_images(tmp_path / "photographs", 3)
    folders = {"path/to/images": "images", "path/to/photographs": "photographs"}
    trained = []
    suggestions = {}  # {cache: the flags of the command that its maker printed}
    for need, language, text in blocks(page):
        if model:
            text = text.replace("Tongyi-MAI/Z-Image", model)
            text = text.replace("z_image_lora", f"{LORA[Path(model).name]}_lora")
        hub = [name for name in MAKE if name in text.split()]  # no turbo
        if need != "hub" or language != "bash" or not hub:
            continue
        for name in {*hub} - folders.keys():
            copy = tmp_path / name  # has the name of the base
            copy.parent.mkdir(exist_ok=True)
            folders[name] = str(MAKE[name](tmp_path / copy.name).rename(copy))
        for words in commands(text):
            script, flags = find_script(words)
            flags = [folders.get(flag, flag) for flag in flags]
            if flags[0].startswith("@recipes/"):
                flags += [f"--pretrained_model_name_or_path={folders[hub[0]]}", "--resolution=16"]
                flags.append("--rank=2")
            if script == "precompute_latents.py":
                flags += ["--resolution=16", "--dataloader_num_workers=0"]
                flags += ["--bucket_step=4"] * ("--bucket_step" in flags)
            else:
                flags += [*SHORT, *["--rank=2"] * ("--rank" in flags)]
            SCRIPTS[script](*flags)
            args = SCRIPTS[script].module.parse_args(flags)
            if script == "precompute_latents.py":
                said, other = capsys.readouterr().out.rsplit("Next: ", 1)[1].splitlines()[:2]
                assert "The recipe trains a LoRA." in other
                trainer, suggested = find_script(shlex.split(said))
                recipe = f"recipes/{LORA[Path(args.pretrained_model_name_or_path).name]}_lora.args"
                assert suggested[0] == f"@{recipe}"
                suggested[0] = f"@{ROOT / recipe}"
                suggested = SCRIPTS[trainer].module.parse_args(suggested)
                assert suggested.latents_dir == [args.output_dir]
                base = suggested.pretrained_model_name_or_path
                assert base == args.pretrained_model_name_or_path
                suggestions[args.output_dir] = suggested
                continue
            same = ("latents_dir", "mixed_precision", "random_flip", "model_family")
            for name in same:
                suggested = suggestions[args.latents_dir[0]]
                assert getattr(args, name, None) == getattr(suggested, name, None), name
            name = "pytorch_lora_weights.safetensors" if args.rank else "model_index.json"
            assert (tmp_path / args.output_dir / name).is_file()
            assert metrics(args.output_dir)[-1]["step"] == 1
            assert len(list((tmp_path / args.output_dir / "samples").iterdir())) == 2
            family = load_cache(args.latents_dir[0]).settings["model_family"]
            trained.append(family + " LoRA" * bool(args.rank))
    assert sorted(trained) == expected
