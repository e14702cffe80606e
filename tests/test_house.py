"""The house around the scripts: requirements name what is imported, and the README's changes do what they say."""

import ast
import importlib.util
import json
import re
import shlex
import sys

import numpy as np
import pytest
from conftest import ROOT, make_images, metrics, reset
from copy_shared import SCRIPTS
from diffusers import DDPMScheduler, UNet2DModel
from PIL import Image

import train_unconditional

CHANGES = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_requirements_name_what_the_scripts_import():
    named = set(re.findall(r"^([a-z_]+)", (ROOT / "requirements.txt").read_text(), re.M))
    for script in SCRIPTS:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / script).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        imported = {"pillow" if name == "PIL" else name for name in imported - set(sys.stdlib_module_names)}
        assert imported <= named, imported - named
        assert "torch" in imported and "ray" not in imported
    assert {"wandb", "tensorboard"} <= named


def apply(change, folder):
    """Apply a change of the README to a copy of its script; returns the copy as a module, and the lines it changes."""
    lines = change.splitlines()
    name = lines[0].removeprefix("--- ")
    source = (ROOT / name).read_text()
    for hunk in re.split(r"^@@.*\n", "\n".join(lines[1:]) + "\n", flags=re.M)[1:]:
        old = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " -")
        new = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " +")
        assert source.count(old) == 1, f"the README's change no longer fits {name}:\n{old}"
        source = source.replace(old, new)
    (folder / f"changed_{name}").write_text(source)
    spec = importlib.util.spec_from_file_location(f"changed_{name.removesuffix('.py')}", folder / f"changed_{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, [line for line in lines[1:] if line[0] in "+-"]


@pytest.fixture
def flags(tmp_path):
    make_images(tmp_path / "images", 6)
    return [
        f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", f"--output_dir={tmp_path / 'out'}",
        "--train_batch_size=2", "--num_epochs=2", "--ddpm_num_inference_steps=2", "--eval_batch_size=12",
        "--logging_steps=1", "--report_to=none", "--dataloader_num_workers=0", "--center_crop",
        f"--model_config_name_or_path={tmp_path / 'unet'}",
    ]  # fmt: skip


def save_config(folder, **options):
    UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), **options,
    ).save_config(folder)  # fmt: skip


def test_the_readme_shows_three_changes_of_less_than_ten_lines(tmp_path):
    assert len(CHANGES) == 3
    for change in CHANGES:
        assert 2 <= len(apply(change, tmp_path)[1]) < 10


def test_the_readmes_recipes_run(tmp_path, monkeypatch):
    recipes = (ROOT / "README.md").read_text().split("## Recipes")[1].split("```bash\n")[1].split("```")[0]
    commands = [shlex.split(line)[3:] for line in recipes.replace("\\\n", " ").splitlines() if line[0] != "#"]
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    monkeypatch.chdir(tmp_path)
    short = "--ddpm_num_inference_steps=1 --eval_batch_size=1 --report_to=none".split()
    for steps, command in zip((2, 2, 2, 3, 2), commands, strict=True):
        reset()
        fast = [f"--max_train_steps={steps}"] + ["--find_lr_steps=10"] * ("--find_lr" in command)
        train_unconditional.main(train_unconditional.parse_args([*command, *short, *fast]))
    assert json.loads((tmp_path / "find-lr/find_lr.json").read_text()).keys() >= {"suggestion", "rates", "losses"}
    rates = [metrics(tmp_path / name)[-1]["lr"] for name in ("large-batch", "fine-tuned")]
    assert len(metrics(tmp_path / "scratch")) == 2 and all(rates)


def test_a_huber_loss_is_trained_on(tmp_path, flags):
    script, _ = apply(CHANGES[0], tmp_path)
    save_config(tmp_path / "unet")
    losses = []
    for kind in ("l2", "huber"):
        script.main(script.parse_args([*flags, f"--loss_type={kind}", f"--output_dir={tmp_path / kind}"]))
        losses.append(metrics(tmp_path / kind)[0]["loss"])
    assert losses[1] < 0.6 * losses[0]  # half the square, or less beyond 1


def test_class_labels_of_a_column_reach_the_unet(tmp_path, flags, monkeypatch):
    script, _ = apply(CHANGES[1], tmp_path)
    for i in range(6):  # a folder a class
        (tmp_path / f"classes/{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/{i}.png").rename(tmp_path / f"classes/{i % 3}/{i}.png")
    save_config(tmp_path / "unet", num_class_embeds=10)
    seen, forward = [], UNet2DModel.forward

    def spy(self, sample, timestep, class_labels=None, **rest):
        if sample.is_meta:  # the trial at the start, without numbers
            return forward(self, sample, timestep, class_labels, **rest)
        levels = ((sample.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().tolist()
        seen.append((self.training, levels, class_labels.tolist()))
        return forward(self, sample, timestep, class_labels, **rest)

    monkeypatch.setattr(UNet2DModel, "forward", spy)
    # The U-Net sees the images themselves, so that each can be told from its label.
    monkeypatch.setattr(DDPMScheduler, "add_noise", lambda self, images, noise, timesteps: images)
    script.main(script.parse_args([*flags, f"--train_data_dir={tmp_path / 'classes'}"]))
    trained = [pair for training, levels, labels in seen if training for pair in zip(levels, labels, strict=True)]
    assert sorted(set(trained)) == [(i, i % 3) for i in range(6)]
    drawn = [labels for training, _, labels in seen if not training]
    assert drawn and drawn[0] == [i % 10 for i in range(12)]


def test_a_second_image_column_is_trained_on_as_further_channels(tmp_path, flags):
    script, _ = apply(CHANGES[2], tmp_path)
    for i in range(6):
        Image.fromarray(np.full((20, 24), 250 - i, np.uint8)).save(tmp_path / f"images/mask{i}.png")
    lines = [json.dumps({"image_file_name": f"{i}.png", "mask_file_name": f"mask{i}.png"}) for i in range(6)]
    (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    save_config(tmp_path / "unet", in_channels=4, out_channels=4)
    batches, prepare_batch = [], script.prepare_batch
    script.prepare_batch = lambda batch, *rest: batches.append(batch["pixel_values"]) or prepare_batch(batch, *rest)
    script.main(script.parse_args(flags))
    masks = sorted({int(image[3, 0, 0]) for batch in batches for image in batch})
    assert batches[0].shape == (2, 4, 16, 16) and masks == [245, 246, 247, 248, 249, 250]
    assert len(metrics(tmp_path / "out")) == 6
    assert np.asarray(Image.open(tmp_path / "out/samples/step-0000006.png")).ndim == 3
