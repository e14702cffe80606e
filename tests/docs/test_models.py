"""The recipes of docs/models.md run on tiny pipelines: only paths, sizes and steps are changed."""

import pytest
from conftest import make_captioned, make_klein, make_qwen_image, make_z_image, metrics, reset
from test_docs import blocks, commands, find_script

import precompute_latents
import train_flow

HUB = {
    "Tongyi-MAI/Z-Image": make_z_image,
    "black-forest-labs/FLUX.2-klein-base-4B": make_klein,
    "Qwen/Qwen-Image": make_qwen_image,
}
SIZES = {
    "precompute_latents.py": ["--resolution=16", "--bucket_step=4", "--dataloader_num_workers=0"],
    "train_flow.py": ["--max_train_steps=1", "--num_inference_steps=1", "--report_to=none"],
}


@pytest.mark.usefixtures("without_figures")
def test_every_recipe_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_captioned(tmp_path / "images", 3)
    folders = {name: str(make(tmp_path / name)) for name, make in HUB.items()}
    folders["path/to/images"] = str(tmp_path / "images")
    trained = []
    for _, language, text in blocks("docs/models.md"):
        for words in commands(text) if language == "bash" else []:
            script, flags = find_script(words)
            flags = [folders.get(flag, flag) for flag in flags] + SIZES[script]
            module = {"precompute_latents.py": precompute_latents, "train_flow.py": train_flow}
            reset()
            args = module[script].parse_args(flags)
            module[script].main(args)
            reset()
            if script == "train_flow.py":
                trained.append(args.model_family)
                assert metrics(args.output_dir)[-1]["step"] == 1
                name = "pytorch_lora_weights.safetensors" if args.rank else "model_index.json"
                assert (tmp_path / args.output_dir / name).is_file()
                assert (tmp_path / args.output_dir / "samples").is_dir()
    assert sorted(trained) == sorted(2 * ["z-image", "flux2-klein", "qwen-image"])
