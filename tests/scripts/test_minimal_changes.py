"""patches/twin_*.diff: five changes of a twin. Each trains, resumes, and runs on two processes."""

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import accelerate
import datasets
import pytest
import torch
from conftest import MODELS, ROOT, finish, start
from diffusers import UNet2DConditionModel
from test_minimal import (
    PATHS,
    TEXT,
    UNCONDITIONAL,
    data_flags,
    make_pictures,
    make_unets,
    run_twin,
    train,
)

pytestmark = pytest.mark.usefixtures("without_figures")
CACHE = "precompute_latents"
CHANGES = {
    "timesteps": TEXT,
    "channel": TEXT,
    "projection": TEXT,
    "groups": TEXT,
    "data": UNCONDITIONAL,
}
PROMPTS = ["--validation_prompts", "a digit", "--num_validation_images=1",
           "--num_inference_steps=2", "--guidance_scale=2"]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Pictures, models of 10,000 weights, and caches: the twin's, and one with a map of brightness.

    The latter has its U-Net with a further channel.
    """
    folder = tmp_path_factory.mktemp("inputs")
    make_pictures(folder / "images")
    make_unets(folder)
    config = UNet2DConditionModel.load_config(folder / "unet")
    UNet2DConditionModel.from_config(config, in_channels=5).save_config(folder / "channel-unet")
    flags = [f"--train_data_dir={folder / 'images'}", "--resolution=16"]
    flags.append(f"--pretrained_model_name_or_path={MODELS}")
    texts = {"cache-sd": None, "cache-channel": change("channel")[CACHE]}
    with pytest.MonkeyPatch.context() as m:
        m.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets-cache"))
        for name, text in texts.items():
            train(run_twin, CACHE, folder / name, flags, text=text)
    return folder


def change(name):
    """{a twin: its changed text}, by `git apply`."""
    texts = {twin: path.read_text() for twin, path in PATHS.items()}
    patch = (ROOT / f"patches/twin_{name}.diff").read_text()
    return {twin: apply(patch, f"minimal/{twin}.py", text) for twin, text in texts.items()}


def apply(patch, path, text):
    if f"b/{path}" not in patch:
        return text
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path
        file.parent.mkdir()
        file.write_text(text)
        command = ["git", "apply", f"--include={path}"]
        done = subprocess.run(command, input=patch, cwd=folder, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return file.read_text()


def list_flags(name, inputs, steps):
    flags = [*data_flags(CHANGES[name], inputs), f"--max_train_steps={steps}"]
    flags += ["--train_batch_size=3", "--gradient_accumulation_steps=2", "--report_to=none"]
    flags += ["--learning_rate=1e-3", "--checkpointing_steps=2", "--logging_steps=2"]
    if name == "channel":
        flags += [f"--latents_dir={inputs / 'cache-channel'}"]
        flags += [f"--unet_config_name_or_path={inputs / 'channel-unet'}", *PROMPTS]
    return flags


def read_state(folder, step):
    (path,) = (folder / f"checkpoint-{step}").iterdir()
    return torch.load(path, weights_only=True)


def list_tensors(state):
    """{name: tensor} of all that is trained, with averages and moments."""
    moments = {
        f"{number} {name}": value
        for number, of in state["optimizer"]["state"].items()
        for name, value in of.items()
    }
    averages = {f"ema {name}": value for name, value in state["ema"].items()}
    return state["trained"] | averages | moments


@pytest.mark.parametrize(
    "name",
    ["projection", *(pytest.param(name, marks=pytest.mark.ci) for name in CHANGES
                     if name != "projection")],
)  # fmt: skip
def test_changed_twin_trains_and_resumes_to_the_same_bits_on_two_processes(tmp_path, inputs, name):
    """It is another run than the unchanged one, and its loss is finite."""
    twin = CHANGES[name]
    text = change(name)[twin]
    runs = {"whole": [4], "parts": [2, 4]}
    for run, ends in runs.items():
        for end in ends:
            train(run_twin, twin, tmp_path / run, list_flags(name, inputs, end), 2, text=text)
    assert "Resuming from" in (tmp_path / "parts.log").read_text()
    states = [read_state(tmp_path / run, 4) for run in runs]
    whole, parts = map(list_tensors, states)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert all(value.isfinite().all() for value in whole.values())
    rates = [group["initial_lr"] for group in states[1]["optimizer"]["param_groups"]]
    assert rates == ([1e-3, 1e-4] if name == "groups" else [1e-3])
    new = {key for key in whole if key.startswith("projection.")}
    assert bool(new) == (name == "projection")
    first = read_state(tmp_path / "whole", 2)["trained"]
    assert all((first[key] != whole[key]).any() for key in new)
    if name == "channel":
        assert len(list((tmp_path / "whole/samples").iterdir())) == 3
        return
    train(run_twin, twin, tmp_path / "plain", list_flags(name, inputs, 4), 2)
    plain = list_tensors(read_state(tmp_path / "plain", 4))
    assert any((plain[key] != whole[key]).any() for key in plain if key.startswith("unet."))


def fail_twin(folder, twin, flags, text=None):
    """What a twin prints that ends with status 1."""
    log = folder.with_suffix(".log")
    argv = [*flags, f"--output_dir={folder}"]
    assert finish(start(lambda: run_twin(twin, *argv, text=text), log=log)) == [1], log.read_text()
    return log.read_text()


def test_twin_notices_further_channels_and_modules_before_its_first_step(tmp_path, inputs):
    """Nothing is trained, or lost from a checkpoint, that the samples or the checkpoint lack."""
    flags = list_flags("channel", inputs, 2)
    said = fail_twin(tmp_path / "a", TEXT, flags)
    assert "the U-Net takes 5 channels, but gets 4: give it the others where the model" in said
    assert "Traceback" not in said
    changed = change("channel")[TEXT]
    text = re.sub(r"    hook = .*?\n    \)\n", "", changed, flags=re.S)
    text = text.replace("    hook.remove()\n", "")
    assert len(text) < len(changed) - 150
    said = fail_twin(tmp_path / "b", TEXT, flags, text)  # its samples lack the channel
    assert "in draw_samples" in said and "step 2" not in said
    assert not list(tmp_path.glob("*/checkpoint-*"))
    flags = list_flags("projection", inputs, 2)
    train(run_twin, TEXT, tmp_path / "c", flags)
    said = fail_twin(tmp_path / "c", TEXT, flags, change("projection")[TEXT])
    assert "is of another U-Net or objective: choose another --output_dir" in said


@pytest.mark.parametrize("name", [TEXT, pytest.param(UNCONDITIONAL, marks=pytest.mark.ci)])
def test_twin_loads_the_next_step_while_it_computes_one(tmp_path, inputs, name):
    """In each step it finds the images of the next one on their way, in a thread."""
    text = PATHS[name].read_text()
    waits = (
        "begun = time.time()\n    while images_seen not in loaded: assert time.time() < begun + 9"
    )
    changes = {
        "def load_step(images_seen):\n": "import threading, time\nloaded = set()\n\n"
        "def load_step(images_seen):\n    loaded.add(images_seen)\n"
        "    assert threading.current_thread() is not threading.main_thread()\n",
        "    optimizer.step()\n": f"    {waits}\n    optimizer.step()\n",
    }
    for right, changed in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, changed)
    flags = [*data_flags(name, inputs), "--max_train_steps=3", "--train_batch_size=3"]
    train(run_twin, name, tmp_path / "run", [*flags, "--report_to=none"], text=text)
    assert read_state(tmp_path / "run", 3)["images_seen"] == 9


@pytest.mark.ci
def test_twin_runs_in_a_notebook_on_two_processes(tmp_path, inputs):
    """debug_launcher is notebook_launcher without a GPU. Nothing is raised at the end."""
    flags = list_flags("data", inputs, 2)
    train(run_twin, UNCONDITIONAL, tmp_path / "plain", flags, 2)
    sys.argv = ["notebook", *flags, f"--output_dir={tmp_path / 'notebook'}"]

    def launch():
        accelerate.debug_launcher(
            lambda: runpy.run_path(str(PATHS[UNCONDITIONAL]), run_name="__main__"), num_processes=2
        )

    assert finish(start(launch, log=tmp_path / "log")) == [0], (tmp_path / "log").read_text()
    plain, other = (list_tensors(read_state(tmp_path / name, 2)) for name in ("plain", "notebook"))
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_page_has_the_number_of_lines_of_each_change():
    page = (ROOT / "docs/changing.md").read_text()
    for name in CHANGES:
        lines = (ROOT / f"patches/twin_{name}.diff").read_text().splitlines()
        added, removed = (
            sum(line[0] == sign and not line.startswith(3 * sign) for line in lines)
            for sign in "+-"
        )
        assert f"[{name}](../patches/twin_{name}.diff)" in page
        (row,) = [line for line in page.splitlines() if f"twin_{name}.diff" in line]
        assert f"| {added} / {removed} |" in row
