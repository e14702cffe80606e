"""benchmarks/speedrun.py: which runs it does, what it measures, and that it continues."""

import json
import sys

import pytest
import tiny_pipelines
import torch
from conftest import ROOT, make_images, make_moments, reset

sys.path.insert(0, str(ROOT / "benchmarks"))

import speedrun

DUCKS = speedrun.TASKS["ducks"]
REFERENCE = "attention 0.002"


def make_run(name, seed, loss, curve=None, **more):
    run = {"setting": name, "folder": f"{name}-{seed}", "seed": seed, "held_out_loss": loss}
    run |= {"held_out_losses": curve or {"0": 1.0, "240": loss}, "step_seconds": 0.5}
    run |= {"weights": 1000, "subject": 1.0, "copy": 0.0, "prior": 2.0, "commit": "a"}
    return run | more


def test_the_plan_refines_the_best_settings_of_the_grid_and_skips_what_is_done():
    losses = {"attention 0.0047": 0.3, "attention_mlp 0.00085": 0.2, "all 0.0047": 0.1}
    results, order = [], []
    for setting, seed in speedrun.plan(DUCKS, results, 2):
        order.append((setting.name, seed))
        results.append(make_run(setting.name, seed, losses.get(setting.name, 0.5)))
    grid = [f"{layers} {rate:g}" for rate in speedrun.RATES for layers in DUCKS.layers]
    assert order[:15] == [(name, 0) for name in grid] and grid[0] == REFERENCE
    assert {name for name, _ in order[15:19]} == {REFERENCE, *losses}
    changes = [item for item in order[19:] if ", " in item[0]]
    assert changes == order[19 : 19 + len(changes)]
    assert changes[0] == ("all 0.0047, 60 steps", 0)
    assert all(name.startswith("all 0.0047, ") for name, _ in changes)
    assert len(set(order)) == len(order) == 2 * (15 + len(changes) // 2)
    (setting,) = {name: each for each, _ in speedrun.plan(DUCKS, results, 2)
                  if (name := each.name) == "all 0.0047, 60 steps"}.values()  # fmt: skip
    assert setting.flags == {
        "lora_layers": "all", "rank": 3, "learning_rate": 0.0047, "max_train_steps": 60
    }  # fmt: skip


def test_settings_that_are_named_run_in_their_order(monkeypatch, tmp_path):
    names = ["all 0.002, rank 8", REFERENCE]
    monkeypatch.setitem(
        speedrun.TASKS, "ducks",
        speedrun.replace(DUCKS, prepare=lambda folder: (None, []), make_judge=lambda *all: None),
    )  # fmt: skip
    monkeypatch.setattr(
        speedrun, "run_setting", lambda task, setting, seed, *more: make_run(setting.name, seed, 1)
    )
    argv = ["--seeds=2", f"--output_dir={tmp_path}", "--only", *names]
    speedrun.main(argv)
    lines = (tmp_path / "ducks/results.jsonl").read_text().splitlines()
    done = [(run["setting"], run["seed"]) for run in map(json.loads, lines)]
    assert done == [(name, seed) for seed in range(2) for name in names]
    with pytest.raises(SystemExit, match="there is no setting 'rank 8'; all: attention 0.002, "):
        speedrun.main([*argv, "rank 8"])


def test_the_table_compares_runs_of_the_same_seed():
    results = [make_run(REFERENCE, seed, loss) for seed, loss in enumerate((0.1, 0.2, 0.3))]
    curves = {0: {"0": 1, "40": 0.09, "80": 0.05}, 1: {"0": 1, "40": 0.3, "80": 0.1}}
    results += [make_run("fast", seed, 0.05 + 0.05 * seed, curves[seed]) for seed in curves]
    results.append(make_run("slow", 0, 0.5, {"0": 1, "80": 0.5}))
    fast, reference, slow = speedrun.make_table(DUCKS, results)
    assert fast[:2] == ["fast", "2"] and reference[0] == f"{REFERENCE} (reference)"
    assert fast[3] == "0.0750 ± 0.3177"  # 12.71 standard errors
    assert fast[4] == "0.50 ± 0.00"  # though the losses differ by a factor of two
    assert fast[5] == "40, 80" and fast[6] == "30"  # (40 + 80) / 2 steps of half a second
    assert reference[4:6] == ["1.00 ± 0.00", "240, 240, 240"]
    assert slow[3] == "0.5000" and slow[4:7] == ["5.00", "never", ""]


def test_the_page_has_the_tables_of_the_runs_that_are_kept(monkeypatch, tmp_path):
    page = speedrun.PAGE.read_text()
    assert speedrun.fill_tables(page) == page and REFERENCE in page
    monkeypatch.setattr(speedrun, "RUNS", tmp_path / "kept")
    monkeypatch.setattr(speedrun, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(speedrun, "TABLES", {"ducks": ["ducks"], "few": ["ducks-3"]})
    speedrun.RUNS.mkdir()
    few = [make_run(REFERENCE, seed, 0.2 + seed / 5) for seed in range(3)]  # one without a pair
    masked = {"held_out_loss": 0.4, "subject": 0.5, "copy": 0.0, "prior": 1.0}
    few += [make_run(f"{REFERENCE}, T-LoRA", seed, 0.8, masked=masked) for seed in range(2)]
    ducks = [make_run(REFERENCE, 0, 0.1234567, machine="mine")]
    for name, runs in (("ducks", ducks), ("ducks-3", few)):
        log = tmp_path / "out" / name / "results.jsonl"
        log.parent.mkdir(parents=True)
        log.write_text("".join(json.dumps(run) + "\n" for run in runs))
    marks = "".join(
        f"<!-- speedrun {mark} -->\nold\n<!-- end -->\n" for mark in ("few", "ducks", "ratios")
    )
    speedrun.PAGE.write_text(marks)
    speedrun.main(["--page", f"--output_dir={tmp_path / 'out'}"])
    (kept,) = speedrun.read_runs(speedrun.RUNS / "ducks.jsonl")
    assert kept["held_out_loss"] == 0.12346 and "machine" not in kept
    written = speedrun.PAGE.read_text()
    few, ducks, ratios = (part.splitlines() for part in written.split("<!-- end -->\n")[:3])
    assert few[3].startswith(f"| from 3: {REFERENCE} (reference) | 3 | 1,000 | 0.4000 ± 0.4969 |")
    assert ducks[3].startswith(f"| {REFERENCE} (reference) | 1 | 1,000 | 0.1235 | 1.00 |")
    assert len(ducks) == 4 and "old" not in written
    # 0.8 / 0.2 and 0.8 / 0.4, with 12.71 standard errors
    assert ratios[3:] == [
        "| as other programs load it | 2 | 3.00 ± 12.71 | 1.00 ± 0.00 | 1.00 ± 0.00 |",
        "| with its mask | 2 | 1.50 ± 6.36 | 0.50 ± 0.00 | 0.50 ± 0.00 |",
    ]
    # a second folder adds to them, and the last of two equal runs counts
    log = tmp_path / "again/ducks/results.jsonl"
    log.parent.mkdir(parents=True)
    runs = [make_run("fast", 0, 0.2), make_run("fast", 0, 0.1)]
    log.write_text("".join(json.dumps(run) + "\n" for run in runs))
    speedrun.main(["--page", f"--output_dir={tmp_path / 'again'}"])
    kept = speedrun.read_runs(speedrun.RUNS / "ducks.jsonl")
    losses = [(run["setting"], run["held_out_loss"]) for run in kept]
    assert losses == [(REFERENCE, 0.12346), ("fast", 0.1)]
    assert "| fast | 1 | 1,000 | 0.1000 | 0.81 |" in speedrun.PAGE.read_text()


@pytest.mark.long
@pytest.mark.parametrize("task", speedrun.TASKS)
def test_settings_are_trained_measured_and_kept(tmp_path, monkeypatch, capsys, task):
    """Runs of both trainers with few steps, then the same command again."""
    monkeypatch.setattr(speedrun, "BASE_STEPS", 4)
    monkeypatch.setattr(speedrun, "MEASURED", 4)
    argv = [f"--task={task}", "--steps=8", "--seeds=1", f"--output_dir={tmp_path}"]
    argv += ["--only", REFERENCE, "attention_mlp 0.002"]
    try:
        speedrun.main(argv)
    finally:
        reset()
    log = tmp_path / task / "results.jsonl"
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    assert [run["setting"] for run in runs] == [REFERENCE, "attention_mlp 0.002"]
    for run in runs:
        assert [*run["held_out_losses"]] == ["0", "4", "8"] and run["step_seconds"] > 0
        assert 0 <= run["subject"] <= 1 and 0 <= run["copy"] <= 1 and run["prior"] > 0
        assert (tmp_path / task / "runs" / run["folder"] / "samples.png").exists()
    attention, mlp = (run["weights"] for run in runs)
    assert attention != mlp and 0.8 < attention / mlp < 1.25  # about as many
    page = (tmp_path / task / "report.html").read_text()
    assert all(f"runs/{run['folder']}/samples.png" in page for run in runs)
    said = capsys.readouterr().out
    assert f"| {REFERENCE} (reference) | 1 |" in said
    # a second start does only what is missing
    log.write_text(log.read_text().splitlines()[0] + "\n")
    monkeypatch.setattr(
        speedrun, "run_setting", lambda task, setting, seed, *more: make_run(setting.name, seed, 1)
    )
    try:
        speedrun.main(argv)
    finally:
        reset()
    names = [json.loads(line)["setting"] for line in log.read_text().splitlines()]
    assert names == [REFERENCE, "attention_mlp 0.002"]


def test_held_out_rows_are_those_of_the_trainer(tmp_path):
    """`choose_held_out` repeats what `hold_out` does."""
    from types import SimpleNamespace

    import datasets

    from diffusion_training.training.held_out import hold_out

    names = [f"{i}.png" for i in range(30)]
    datasets.Dataset.from_dict({"key": names}).save_to_disk(str(tmp_path))
    accelerator = SimpleNamespace(print=lambda *words: None)

    class Rows:
        def __len__(self):
            return len(names)

        def names(self):
            return iter(names)

    for seed in range(3):
        _, held_out = hold_out(accelerator, Rows(), speedrun.HELD_OUT, seed)
        assert speedrun.choose_held_out(tmp_path, seed) == sorted(held_out)


def test_distances_are_those_of_pixels():
    images = torch.randint(256, (3, 3, 4, 4), dtype=torch.uint8)
    found = speedrun.measure_errors(images, images[:2])
    assert found.shape == (3, 2) and found[1, 1] == 0 < found[2, 1]
    expected = (images[2].float() - images[1].float()).square().sum().sqrt()
    assert found[2, 1] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.long
def test_t_lora_is_measured_with_its_mask_and_without(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "MEASURED", 8)
    argv = ["--steps=8", "--seeds=1", "--few=3", f"--output_dir={tmp_path}"]
    try:
        speedrun.main([*argv, "--only", "attention 0.011, T-LoRA"])
    finally:
        reset()
    (run,) = [json.loads(line) for line in (tmp_path / "ducks-3/results.jsonl").open()]
    # the start of all ranks, and their end, is another model than that of the mask
    assert run["held_out_losses"]["0"] > max(run["held_out_loss"], run["masked"]["held_out_loss"])
    assert run["held_out_loss"] != run["masked"]["held_out_loss"] == run["held_out_losses"]["8"]
    assert run["prior"] != run["masked"]["prior"]
    said = capsys.readouterr().out
    assert "Held out: 27 of 30 images" in said and "| attention 0.011, T-LoRA, masked | 1 |" in said


@pytest.mark.long
def test_sets_of_layers_of_a_published_model_have_equally_many_weights():
    from memory import count_adapter

    _, task = speedrun.describe_published("sdxl", "a dog")
    assert task.script == "train_text_to_image" and task.layers["attention_mlp"][1] == 16
    sizes = {
        name: rank * count_adapter("SDXL", which) for name, (which, rank) in task.layers.items()
    }
    assert [*sizes] == ["attention", "attention_mlp", "all"]
    assert max(sizes.values()) < 1.1 * min(sizes.values())
    names = [setting.name for setting in speedrun.list_grid(task)]
    assert names[:2] == ["attention 0.0001", "attention_mlp 0.0001"] and "all 1.8e-05" in names
    with pytest.raises(SystemExit, match="--base sdxxl has no recipe"):
        speedrun.describe_published("sdxxl", "a dog")


@pytest.mark.long
def test_a_published_model_is_trained_by_its_recipe_and_measured(tmp_path, capsys):
    make_images(tmp_path / "pictures", 14)
    tiny_pipelines.MAKE["z_image"](tmp_path / "z-image")
    make_moments(tmp_path / "moments.pt")
    argv = ["--base=z_image", f"--pictures={tmp_path / 'pictures'}", "--seeds=1", "--steps=8"]
    argv += [f"--output_dir={tmp_path}", "--only", "attention_mlp 0.0001"]
    argv += [f"--pretrained_model_name_or_path={tmp_path / 'z-image'}", "--resolution=32"]
    argv += ["--mixed_precision=no", "--num_inference_steps=2", "--validation_steps=4"]
    argv += [
        "--bucket_step=16",
        "--base_precision=no",
        f"--metric_image_model={tmp_path / 'moments.pt'}",
    ]
    speedrun.main(argv)
    (run,) = [json.loads(line) for line in (tmp_path / "z_image/results.jsonl").open()]
    assert [*run["held_out_losses"]] == ["0", "4", "8"] and run["steps"] == 8
    assert run["prior"] > 0 and run["step_seconds"] > 0 and -1 <= run["subject"] <= 1
    assert "| attention_mlp 0.0001 | 1 |" in capsys.readouterr().out
