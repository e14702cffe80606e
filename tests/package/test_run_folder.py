"""The output folder of a run: only an empty one or that of a run is used; files are complete."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import finish, start, wait_until
from filelock import FileLock
from PIL import Image

import train_unconditional
from diffusion_training.launch import Launch
from diffusion_training.training.run_folder import begin_run, open_run
from diffusion_training.training.showing import hub
from diffusion_training.training.showing.grid import draw_grid
from diffusion_training.training.showing.pipelines import save_pipeline
from diffusion_training.training.showing.samples import samples_path, save_samples


@pytest.fixture
def args(tmp_path):
    (tmp_path / "images").mkdir()
    argv = [
        f"--train_data_dir={tmp_path}/images",
        f"--output_dir={tmp_path}/out",
        "--mixed_precision=no",
    ]
    return lambda *more: train_unconditional.parse_args([*argv, *map(str, more)])


def open_folder(args):
    launch = Launch(Accelerator(cpu=True), 1, "no", None, 1)
    return open_run(launch, "somewhere/train_unconditional.py", args)


def use_folder(args):
    """Open the folder and release it. Returns the checkpoint to resume from."""
    run = open_folder(args)
    begin_run(run, Path(args.output_dir))
    run.lock.release(force=True)
    return run.checkpoint


def test_a_run_writes_run_args_and_removes_old_samples_and_best(tmp_path, args):
    flags = [
        "--random_flip",
        "--no-use_ema",
        "--tracker_project_name=it's a # test",
        "--learning_rate=0.30000000000000004",
    ]
    assert use_folder(args(*flags)) is None
    path = tmp_path / "out/run.args"
    assert path.read_text().startswith("# python train_unconditional.py @run.args\n")
    assert vars(train_unconditional.parse_args([f"@{path}"])) == vars(args(*flags))
    (tmp_path / "out/samples").mkdir()
    for name in ("best/held_out.json", "samples/step-0000001.png"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text('{"step": 1, "held_out_loss": 0.5}')
    open_folder(args("--learning_rate=1")).lock.release(force=True)  # fails before begin_run
    assert vars(train_unconditional.parse_args([f"@{path}"])) == vars(args(*flags))
    assert (tmp_path / "out/best").exists() and list((tmp_path / "out/samples").iterdir())
    use_folder(args())
    assert not (tmp_path / "out/best").exists() and not list((tmp_path / "out/samples").iterdir())
    (tmp_path / "out/samples/step-0000001 (good).png").touch()  # the user's
    use_folder(args())
    assert len(list((tmp_path / "out/samples").iterdir())) == 1


def test_output_dirs_with_foreign_files_are_refused_and_unchanged(tmp_path, args):
    """An output folder must be empty, or hold a run."""
    others = ("find_lr.json", "run.args", "image_cache/notes.txt")  # names alone prove nothing
    for name in (
        "README.md",
        "unet/notes.txt",
        "photo.jpg",
        "metrics.jsonl",
        "cache.json",
        *others,
    ):
        folder = tmp_path / name.split(".")[0].split("/")[0]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        if name == "cache.json":
            (folder / "run.args").write_text("mine")
        with pytest.raises(SystemExit, match="and no run of this script: choose another folder"):
            use_folder(args(f"--output_dir={folder}"))
        assert {
            path.read_text()
            for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"
        } == {"mine"}
    for inside in ("images", "images/out"):  # the output would become training data
        with pytest.raises(SystemExit, match="lies in --train_data_dir"):
            use_folder(args(f"--output_dir={tmp_path / inside}"))
    with pytest.raises(SystemExit, match="is not a path on a disk"):
        use_folder(args("--output_dir=s3://bucket/x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="can't be written to"):
        use_folder(args(f"--output_dir={tmp_path / 'file'}"))
    for content in ("5", "[" * 10**5):
        (tmp_path / "find_lr/find_lr.json").write_text(content)
        with pytest.raises(SystemExit, match="holds find_lr.json and no run of this script"):
            use_folder(args(f"--output_dir={tmp_path / 'find_lr'}"))
    # every run leaves at least one of these
    contents = {
        "find_lr.json": '{"smoothed": []}',
        "run.args": "# accelerate launch train.py @run.args\n--seed=\udcff",
    }
    for name, content in contents.items():
        own = tmp_path / f"own-{name}"
        own.mkdir()
        (own / name).write_text(content, errors="surrogateescape")
        (own / "README.md").touch()
        assert use_folder(args(f"--output_dir={own}")) is None
    kept = tmp_path / "copied/checkpoint-3"
    kept.mkdir(parents=True)
    (kept / "trainer_state.json").touch()
    # the error is not that the folder belongs to another run
    with pytest.raises(SystemExit, match="checkpoint-3 is damaged"):
        use_folder(args(f"--output_dir={tmp_path / 'copied'}", "--resume_from_checkpoint=latest"))


@pytest.mark.parametrize("name", ["samples", "posthoc_ema"])
def test_a_file_in_the_place_of_a_folder_of_the_run_is_refused_at_its_start(tmp_path, args, name):
    use_folder(args())
    path = tmp_path / "out" / name
    for make in (path.touch, lambda: path.symlink_to("nowhere")):
        make()
        with pytest.raises(SystemExit, match=f"out/{name} is not a folder, and the run needs one"):
            use_folder(args("--resume_from_checkpoint=latest"))
        path.unlink()
    path.symlink_to(tmp_path / "images")  # on another disk, for example
    use_folder(args("--resume_from_checkpoint=latest"))


def test_two_runs_can_not_use_one_output_dir(tmp_path, args):
    def hold():
        held = open_folder(args())
        (tmp_path / "held").write_text(str(held))
        time.sleep(60)

    (pid,) = start(hold)
    wait_until((tmp_path / "held").exists)
    with pytest.raises(
        SystemExit, match="another process is .*/out: end it, or choose another --output_dir"
    ):
        use_folder(args("--resume_from_checkpoint=latest"))
    os.kill(pid, signal.SIGKILL)
    assert finish([pid]) == [-signal.SIGKILL]
    use_folder(args("--resume_from_checkpoint=latest"))
    with FileLock(tmp_path / "out/.lock", timeout=0):
        pass


def test_a_failed_run_in_the_same_process_leaves_no_lock(tmp_path, args):
    # a traceback would keep a reference to the lock
    run = open_folder(args())
    assert run.lock.is_locked and use_folder(args()) is None
    with FileLock(tmp_path / "out/.lock", timeout=0):
        pass


def test_temporary_files_of_a_killed_run_are_removed(tmp_path, args):
    use_folder(args())
    (tmp_path / "out/.tmp-saving").mkdir()
    (tmp_path / "out/.tmp-old-metrics.jsonl").write_text("old")
    use_folder(args())
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "metrics.jsonl", "run.args"]


def test_push_to_hub_creates_the_repository_before_training(tmp_path, args, monkeypatch):
    made, info = [], argparse.Namespace(private=True)

    def create_repo(name, **options):
        made.append((name, options["private"]))
        return argparse.Namespace(repo_id=f"me/{name}")

    monkeypatch.setattr(hub, "create_repo", create_repo)
    monkeypatch.setattr(hub, "repo_info", lambda name: info)
    run = open_folder(args("--push_to_hub", "--hub_private_repo"))
    run.lock.release(force=True)
    use_folder(args("--push_to_hub", "--hub_model_id=it"))
    assert made == [("out", True), ("it", None)] and run.hub_model_id == "me/out"
    info.private = False
    with pytest.raises(
        SystemExit, match="--hub_private_repo: me/public exists and is public: make it private, or"
    ):
        use_folder(args("--push_to_hub", "--hub_private_repo", "--hub_model_id=public"))

    def no_login(*args, **options):
        raise ValueError("401 Unauthorized")

    monkeypatch.setattr(hub, "create_repo", no_login)
    with pytest.raises(
        SystemExit,
        match=r"--push_to_hub can't use out: run `hf auth login`, or remove the flag \(401",
    ):
        use_folder(args("--push_to_hub"))


class Pipeline:
    """The methods that `save_pipeline` needs."""

    def __init__(self, weight):
        self.unet = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.unet.weight, weight)

    def save_pretrained(self, folder):
        (folder / "unet").mkdir()
        config = {"_name_or_path": str(folder), "weight": self.unet.weight.item()}
        (folder / "unet/config.json").write_text(json.dumps(config))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """EMA weights may not be finite although the loss is."""
    save_pipeline(Pipeline(0.5), tmp_path)
    for weight in (float("nan"), float("inf")):
        with pytest.raises(
            SystemExit, match="the weights are not finite, so they are not saved"
        ) as stop:
            save_pipeline(Pipeline(weight), tmp_path)
        assert stop.value.alone and json.loads((tmp_path / "unet/config.json").read_text()) == {
            "weight": 0.5
        }
    # the folder it was moved to is gone
    assert [path.name for path in tmp_path.iterdir()] == ["unet"]


def test_samples_are_complete_or_absent_and_passed_to_trackers(tmp_path, monkeypatch):
    shown, picture = [], Image.new("RGB", (8, 4))

    def log_images(images, step, **layout):
        shown.append((images["samples"].shape, step, layout))

    tracker = argparse.Namespace(name="tensorboard", log_images=log_images)
    accelerator = argparse.Namespace(trackers=[tracker, argparse.Namespace(name="other")])
    (tmp_path / "samples/.tmp-saving").mkdir(parents=True)
    (tmp_path / "samples/.tmp-saving/half.png").touch()
    save_samples(accelerator, picture, tmp_path, 12)
    assert samples_path(tmp_path, 12) == tmp_path / "samples/step-0000012.png"
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-0000012.png"]
    assert shown == [((1, 4, 8, 3), 12, {"dataformats": "NHWC"})]

    def half(self, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(SystemExit, match="step-0000013.png could not be saved"):
        save_samples(accelerator, picture, tmp_path, 13)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-0000012.png"]


def test_draw_grid_has_a_heading_above_the_columns_of_each_base():
    images = np.full((2, 3, 64, 64, 3), 7, np.uint8)
    plain = np.array(draw_grid(images, ["a", "b"]))
    grid = np.array(draw_grid(images, ["a", "b"], [("base, 28 steps", 2), ("turbo " * 9, 1)]))
    top = len(grid) - len(plain)
    assert top > 30 and grid.shape[1] == plain.shape[1] + 16
    left = plain.shape[1] - 3 * 68  # behind the prompts
    assert (grid[top:, : left + 2 * 68] == plain[:, : left + 2 * 68]).all()
    assert (grid[top:, left + 2 * 68 + 16 :] == plain[:, left + 2 * 68 :]).all()
    heads = grid[:top]
    assert (heads[:, :left] == 255).all() and (heads[:, left + 2 * 68 :] != 255).any()
    assert (heads[:, left : left + 2 * 68] != 255).any()


def test_draw_grid_labels_each_row_with_its_prompt_of_any_length():
    begin, images = time.process_time(), np.zeros((2, 3, 8, 8, 1), np.uint8)
    images[1, 2] = 255
    grid = np.array(draw_grid(images, ["w " * 500_000, "a"]))
    label = grid.shape[1] - 3 * 68
    assert len(grid) == 2 * 68 and 200 < label < 600 and time.process_time() - begin < 5
    assert (grid[68:132, label + 136 : -4] == 255).all() and (grid[:64, label:][:, :64] == 0).all()
    large = np.zeros((1, 2, 512, 512, 3), np.uint8)  # labels must be readable after shrinking
    label = np.array(draw_grid(large, ["a"]))[:, : -2 * 516]
    assert 20 < (label.min(axis=(1, 2)) < 99).sum() < 51
    wide = np.array(draw_grid(np.zeros((1, 1, 80, 80, 3), np.uint8), ["a"]))
    assert (wide[:80, -84:-4] == 0).all()  # small images are not enlarged further
