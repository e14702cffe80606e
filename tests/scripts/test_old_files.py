"""Files of an older version (tests/old/make.py): caches open, checkpoints resume, LoRAs load."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import ROOT, metrics, reset
from diffusers import DiffusionPipeline
from old import make
from safetensors.torch import load_file

import precompute_latents
import train_flow
import train_text_to_image
import train_unconditional

pytestmark = pytest.mark.usefixtures("without_figures")
SCRIPTS = {
    script.__name__: script
    for script in (precompute_latents, train_flow, train_text_to_image, train_unconditional)
}
LORA = "pytorch_lora_weights.safetensors"
EXPECTED = json.loads((ROOT / "tests/old/expected.json").read_text())
SAME_MACHINE = make.describe_machine() == EXPECTED["machine"]


@pytest.fixture(autouse=True)
def old(tmp_path, monkeypatch):
    """Work in a copy of tests/old: the flags in the old files name relative paths."""
    shutil.copytree(ROOT / "tests/old", tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")


def run(script, *flags):
    reset()
    SCRIPTS[script].main(SCRIPTS[script].parse_args([str(flag) for flag in flags]))
    reset()


def fails(script, *flags):
    with pytest.raises(SystemExit) as stop:
        run(script, *flags)
    return stop.value.code == 1


# ------------------------------------------------------------------- caches


def one_epoch(kind):
    """The command of a trainer that reads all rows of a cache once."""
    script, base = "train_text_to_image", "sd"
    model = "--unet_config_name_or_path=models/unet_condition.json"
    if kind == "sdxl":
        base, model = "sdxl", "--unet_config_name_or_path=models/unet_sdxl.json"
    if kind == "prx":
        script, model = "train_flow", "--transformer_config_name_or_path=models/prx.json"
    return [
        script,
        model,
        f"--pretrained_model_name_or_path=models/{base}",
        f"--latents_dir=caches/{kind}",
        "--train_batch_size=4",
        "--num_train_epochs=1",
        "--lr_warmup_steps=0",
        "--report_to=none",
    ]


@pytest.mark.parametrize("kind", make.CACHES)
def test_all_rows_of_an_old_cache_are_read_and_a_changed_one_is_noticed(kind, capfd):
    rows = datasets.load_from_disk(f"caches/{kind}")
    assert rows["key"] == [f"{i}.png" for i in range(8)]
    texts = [text[0] if kind == "captions" else text for text in rows["text"]]
    assert texts == make.CAPTIONS and rows.features["latents"].feature.dtype == "float16"
    assert all(np.isfinite(row).all() and len(row) for row in rows["latents"])
    run(*one_epoch(kind), "--output_dir=whole")
    (loss,) = [record["loss"] for record in metrics("whole") if "loss" in record]
    assert 0.1 < loss < 10

    path = Path(rows.cache_files[-1]["filename"])
    content, row = path.read_bytes(), np.array(rows[7]["latents"], np.float16).tobytes()
    assert content.count(row) == 1
    at = content.index(row) + 5
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert fails(*one_epoch(kind), "--output_dir=damaged")
    assert path.name in capfd.readouterr().err


@pytest.mark.parametrize("kind", make.CACHES)
def test_an_old_cache_that_is_whole_is_left_as_it_is(kind):
    """The same command again finds nothing to do.

    The script also checks that the data are the same, by the paths and times of the files, which
    differ in a copy. So the old cache first gets the fingerprint that a new cache has.
    """
    folder, new = Path("caches", kind), Path("new")
    again = f"@{folder / 'run.args'}", "--dataloader_num_workers=0"
    run("precompute_latents", *again, f"--output_dir={new}")
    cache, made = (json.loads((path / "cache.json").read_text()) for path in (folder, new))
    state = json.loads((folder / "state.json").read_text())
    cache["source"] = made["source"]
    state["_fingerprint"] = hashlib.sha256(json.dumps(cache).encode()).hexdigest()[:16]
    for name, content in (("cache.json", cache), ("state.json", state)):
        (folder / name).write_text(json.dumps(content, indent=1))
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    before = {path.name: path.read_bytes() for path in folder.glob("*.arrow")}
    run("precompute_latents", *again, f"--output_dir={folder}")
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.arrow")}
    assert len(before) == 2 and not any((folder / name).stat().st_mtime for name in before)
    assert cache["shards"] == json.loads((folder / "cache.json").read_text())["shards"]

    # The new cache has the same settings and, on the same machine, the same rows.
    about_the_run = {"version", "decoder", "made_with", "shards"}
    about_the_run |= {"empty_prompt_sha256", "empty_pooled_sha256"}
    for key in cache.keys() - about_the_run:
        assert made.get(key) == cache[key], key
    assert not SAME_MACHINE or before == {
        path.name: path.read_bytes() for path in new.glob("*.arrow")
    }


# ------------------------------------------------------------------- checkpoints and LoRAs


def resume(name, *flags):
    """Resume a run at its checkpoint-2, in the folder `out`."""
    if not Path("out").exists():
        shutil.copytree(f"runs/{name}/checkpoint-2", "out/checkpoint-2")
        shutil.copy(f"runs/{name}/metrics.jsonl", "out")
    script, *given = make.RUNS[name]
    workers = [flag for flag in given if "workers" in flag]  # run.args leaves this flag out
    again = ["--output_dir=out", "--resume_from_checkpoint=latest"]
    run(script, f"@runs/{name}/run.args", *workers, *again, *flags)


@pytest.mark.parametrize("name", make.RUNS)
def test_an_old_checkpoint_resumes_to_the_same_bits(name):
    resume(name)
    before = metrics(f"runs/{name}")
    assert before and metrics("out")[: len(before)] == before  # it resumed
    for path in Path("runs", name).glob("checkpoint-2/**/*.*"):
        assert path.read_bytes() == Path("out", path.relative_to(f"runs/{name}")).read_bytes()
    expected = load_file(f"runs/{name}/expected.safetensors")
    found = make.read_tensors("out/checkpoint-4")
    assert found.keys() == expected.keys() and len(found) >= 3
    for part, tensor in expected.items():
        assert_near(found[part], tensor, part)
    old = make.read_tensors("out/checkpoint-2")
    assert all(not torch.equal(old[part], tensor) for part, tensor in found.items())

    records = [record for record in metrics("out") if record.get("step", 0) > 2]
    for record in EXPECTED["losses"][name]:
        at = {other["step"]: other for other in records if record.keys() <= other.keys()}
        same = at[record["step"]]
        for key, value in record.items():
            assert same[key] == (value if SAME_MACHINE else pytest.approx(value, rel=1e-4)), key
    if name == "lora":
        written, old = (load_file(f"{folder}/{LORA}") for folder in ("out", "runs/lora"))
        assert written.keys() == old.keys()
        for key, tensor in old.items():
            assert_near(written[key], tensor, LORA)
    state = json.loads(Path("out/checkpoint-4/trainer_state.json").read_text())
    assert state["settings"]["held_out"] == EXPECTED["held_out"][name]


def assert_near(found, expected, name):
    """Equal on the same machine, nearly equal elsewhere. pytorch_lora_weights is float16."""
    if SAME_MACHINE:
        assert torch.equal(found, expected), name
    else:
        rtol = 1e-3 if name == LORA else 0
        torch.testing.assert_close(
            found, expected, atol=1e-5, rtol=rtol, msg=lambda text: f"{name}: {text}"
        )


def test_an_old_run_that_held_images_out_goes_on_with_no_others():
    with pytest.raises(SystemExit) as stop:
        resume("holdout", "--seed=1")  # another seed would hold out other images
    assert stop.value.code == 1
    resume("holdout")
    assert Path("out/checkpoint-4").is_dir()


@pytest.mark.parametrize("name", make.RUNS)
def test_an_old_checkpoint_that_is_damaged_is_refused(name, capfd):
    path = sorted(Path("runs", name, "checkpoint-2").glob("[tu]*/*.safetensors"))[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit) as stop:
        resume(name)
    assert stop.value.code == 1 and path.name in capfd.readouterr().err


@pytest.mark.parametrize("folder", ["runs/lora", "runs/lora/checkpoint-2"])
def test_an_old_lora_loads_with_diffusers(folder):
    pipeline = DiffusionPipeline.from_pretrained("models/sd")
    pipeline.set_progress_bar_config(disable=True)

    def draw():
        generator = torch.Generator().manual_seed(0)
        return pipeline(
            "a", 8, 8, num_inference_steps=2, generator=generator, output_type="np"
        ).images

    before = draw()
    pipeline.load_lora_weights(folder)
    loaded = {name: x for name, x in pipeline.unet.state_dict().items() if ".lora_" in name}
    stored = {name: x for name, x in load_file(f"{folder}/{LORA}").items() if ".lora" in name}
    sums = (
        sorted(x.float().abs().sum().item() for x in tensors.values())
        for tensors in (loaded, stored)
    )
    assert len(loaded) == len(stored) == 16 and next(sums) == pytest.approx(next(sums), rel=1e-6)
    assert np.abs(draw() - before).max() > 1e-4
