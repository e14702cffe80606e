"""Files: each is complete or absent after a kill at any time, and no foreign file is touched."""

import argparse
import errno
import os
import resource
import shutil
import signal

import pytest
import torch
from safetensors.torch import save_file

from diffusion_training.files import (
    check_output_dir,
    checksum_files,
    clean,
    delete,
    digest_file,
    find_differences,
    lock_folder,
    read_shard_names,
    saving,
    write_file,
)


class Killed(BaseException):
    """Not caught by `except Exception`, so nothing is cleaned up."""


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def save(folder, text):
    with saving(folder, "the model") as unfinished:
        (unfinished / "unet").mkdir()
        (unfinished / "unet/config.json").write_text(text)
        (unfinished / "unet/weights").write_text(text)
        (unfinished / "index.json").write_text(text)


def fill(folder):
    folder.mkdir()
    save(folder, "old")
    (folder / "mine.txt").write_text("mine")


def test_saving_replaces_only_files_of_the_same_name(tmp_path):
    fill(tmp_path / "out")
    (tmp_path / "out/unet/left.bin").write_text("old")
    save(tmp_path / "out", "new")
    names = ["index.json", "unet/config.json", "unet/weights"]
    assert tree(tmp_path / "out") == {**dict.fromkeys(names, "new"), "mine.txt": "mine"}
    assert not list((tmp_path / "out").rglob(".tmp*"))


def test_a_file_never_replaces_a_folder(tmp_path):
    (tmp_path / "out/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "out/metrics.jsonl/mine.txt").write_text("mine")
    said = "the records could not be saved .*Is a directory"
    with pytest.raises(SystemExit, match=said), saving(tmp_path / "out", "the records") as new:
        (new / "metrics.jsonl").write_text("new")
    assert tree(tmp_path / "out") == {"metrics.jsonl/mine.txt": "mine"}


def test_a_kill_at_any_file_change_leaves_complete_files(tmp_path, monkeypatch):
    """The next start restores half-moved files, and the next save succeeds."""
    changes, limit = 0, 0

    def counted(function):
        def change(*args, **options):
            nonlocal changes
            changes += 1
            if changes == limit:
                raise Killed
            return function(*args, **options)

        return change

    functions = {
        name: getattr(os, name)
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
    }
    seen = set()
    for limit in range(1, 100):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        fill(tmp_path / "out")
        with monkeypatch.context() as watched:
            changes = 0
            for name, function in functions.items():
                watched.setattr(os, name, counted(function))
            try:
                save(tmp_path / "out", "new")
            except Killed:
                pass
            else:
                break
        clean(tmp_path / "out")
        found = tree(tmp_path / "out")
        assert sorted(found) == ["index.json", "mine.txt", "unet/config.json", "unet/weights"], (
            limit
        )
        assert found["unet/config.json"] == found["unet/weights"] and found["mine.txt"] == "mine"
        seen.add((found["unet/weights"], found["index.json"]))
        save(tmp_path / "out", "next")
        assert (
            set(tree(tmp_path / "out").values()) == {"next", "mine"}
            and len(tree(tmp_path / "out")) == 4
        )
    assert limit > 10 and {("old", "old"), ("new", "new")} < seen
    assert tree(tmp_path / "out") == {**dict.fromkeys(found, "new"), "mine.txt": "mine"}


def test_clean_restores_files_half_moved_at_a_kill(tmp_path):
    for name in (".tmp-old-metrics.jsonl", ".tmp-old-run.args"):
        (tmp_path / name).write_text("old")
    (tmp_path / "run.args").write_text("new")
    (tmp_path / ".tmp-saving").mkdir()
    clean(tmp_path)
    assert (
        tree(tmp_path) == {"metrics.jsonl": "old", "run.args": "new"}
        and len(list(tmp_path.iterdir())) == 2
    )


def test_saving_succeeds_despite_a_half_written_folder(tmp_path):
    fill(tmp_path / "out")
    (tmp_path / "out/.tmp-saving/unet").mkdir(parents=True)
    (tmp_path / "out/.tmp-saving/half.png").write_text("half")
    save(tmp_path / "out", "new")
    assert len(tree(tmp_path / "out")) == 4 and not list((tmp_path / "out").glob("*half*"))


def test_a_failed_save_ends_in_one_sentence_and_changes_no_file(tmp_path, monkeypatch):
    fill(tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(
        SystemExit,
        match=r"^the model could not be saved \(a bug\); files saved before are untouched",
    ):
        with saving(tmp_path / "out", "the model") as unfinished:
            (unfinished / "unet").mkdir()
            raise RuntimeError("a bug")
    assert tree(tmp_path / "out") == before and not list((tmp_path / "out").glob(".tmp*"))
    usage = argparse.Namespace(free=2**19)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SystemExit, match=r"could not be saved \(the disk is full\)") as stop:
        with saving(tmp_path / "out", "the model"):
            # torch.save's error for a full disk
            raise RuntimeError("[enforce fail at inline_container.cc:603]")
    assert stop.value.alone and tree(tmp_path / "out") == before
    monkeypatch.undo()
    for place in (tmp_path / "out/.tmp-saving/best/unet", tmp_path / f"out/.tmp-{'0' * 12}-unet"):
        with pytest.raises(SystemExit) as stop, saving(tmp_path / "out", "the model"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(place))
        assert ".tmp" not in str(stop.value) and "unet')" in str(stop.value)
    # the pipeline in best/
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop, saving(out, "best") as outer:
        with saving(outer, f"the pipeline in {outer / 'best'}"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert str(stop.value).startswith(f"the pipeline in {out}/best could not be saved")
    assert tree(out) == before
    # the folder was moved away
    with pytest.raises(SystemExit, match=r"could not be saved \(\[Errno 2\]"):
        save(tmp_path / "elsewhere", "new")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_error_while_saving_leaves_the_old_files_complete(tmp_path, monkeypatch, number):
    fill(tmp_path / "out")

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    for name in ("fsync", "mkdir", "replace"):
        with monkeypatch.context() as broken, pytest.raises(SystemExit, match=os.strerror(number)):
            broken.setattr(os, name, refuse)
            save(tmp_path / "out", "new")
        clean(tmp_path / "out")
        assert (
            set(tree(tmp_path / "out").values()) == {"old", "mine"}
            and len(tree(tmp_path / "out")) == 4
        )


@pytest.mark.parametrize("save", [
    lambda path: torch.save(torch.zeros(100_000), path),
    lambda path: torch.save(torch.zeros(100_000), path, _use_new_zipfile_serialization=False),
    lambda path: save_file({"a": torch.zeros(100_000)}, path),
    lambda path: path.write_bytes(bytes(400_000)),
])  # fmt: skip
def test_a_limit_of_file_sizes_is_named_in_plain_words(tmp_path, save):
    """torch says "basic_ios::clear: iostream error"."""
    (tmp_path / "weights").write_text("before")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIG_IGN
    handler = signal.signal(signal.SIGXFSZ, ignored)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with (
            pytest.raises(SystemExit, match="could not be saved .*(ulimit -f|File too large)"),
            saving(tmp_path, "the weights") as unfinished,
        ):
            save(unfinished / "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert tree(tmp_path) == {"weights": "before"}


def test_saving_replaces_links_and_keeps_their_targets(tmp_path):
    """For example, a folder was moved to a larger disk and linked back."""
    fill(tmp_path / "out")
    for name in ("unet", "index.json"):
        (tmp_path / "out" / name).rename(tmp_path / name)
        (tmp_path / "out" / name).symlink_to(tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/photo.png").touch()
    (tmp_path / "out/.tmp-link").symlink_to(tmp_path / "data")
    save(tmp_path / "out", "new")
    clean(tmp_path / "out")
    assert (
        not (tmp_path / "out/unet").is_symlink() and tree(tmp_path / "out")["unet/weights"] == "new"
    )
    assert (tmp_path / "unet/weights").read_text() == (tmp_path / "index.json").read_text() == "old"
    assert (tmp_path / "data/photo.png").exists() and not list((tmp_path / "out").glob(".tmp*"))
    delete(tmp_path / "out/nothing")


def test_a_kill_while_a_folder_is_deleted_leaves_no_half_of_it(tmp_path, monkeypatch):
    folder = tmp_path / "best"
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        fill(folder)

        def stop(path):
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt

        killed.setattr("shutil.rmtree", stop)
        delete(folder)
    assert not folder.exists() and len([*tmp_path.iterdir()]) == 1
    fill(folder)
    delete(folder)  # what the kill has left is in its way
    assert not [*tmp_path.iterdir()]


def test_checksum_files_covers_all_files_except_trainer_state(tmp_path):
    fill(tmp_path / "out")
    (tmp_path / "out/trainer_state.json").write_text("{}")
    before = checksum_files(tmp_path / "out")
    assert sorted(before) == ["index.json", "mine.txt", "unet/config.json", "unet/weights"]
    (tmp_path / "out/unet/weights").write_text("olD")
    (tmp_path / "out/trainer_state.json").write_text("{1}")
    after = checksum_files(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["unet/weights"]


def test_write_file_replaces_a_file_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.args"
    write_file(path, "größer")
    assert path.read_bytes() == "größer".encode()
    digest = digest_file(path)
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        write_file(path, b"new")
    assert digest_file(path) == digest and digest_file(tmp_path / "gone") is None
    # a kill leaves the temporary file
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]) == 1
    for error in (OSError(28, "No space left on device"), MemoryError()):
        monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            write_file(path, b"new")
        # the temporary file is removed: a run may continue without this file
        assert len(os.listdir(tmp_path)) == 2


def check(output_dir, **flags):
    check_output_dir({"output_dir": str(output_dir), **flags})


def test_an_output_dir_inside_an_input_folder_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for flag in (
        "train_data_dir",
        "dataset_name",
        "pretrained_model_name_or_path",
        "vae_name_or_path",
    ):
        for inside in ("data", "data/out", "link/out", "x/../data"):
            with pytest.raises(SystemExit, match=f"lies in --{flag} .*: choose another folder"):
                check(tmp_path / inside, **{flag: str(tmp_path / "data")})
    with pytest.raises(SystemExit, match="lies in --latents_dir"):
        check(tmp_path / "data", latents_dir=[str(tmp_path / "other"), str(tmp_path / "data")])
    check(
        tmp_path / "data2",
        train_data_dir=str(tmp_path / "data"),
        dataset_name="beans",
        resume_from="x",
    )
    for address in ("s3://bucket/x", "a\0b"):
        with pytest.raises(SystemExit, match="is not a path on a disk"):
            check(address)


@pytest.mark.parametrize("flags", [{}, {"logging_dir": "\udce4"}, {"prompts": ["a", "\udce4"]}])
def test_flags_that_are_not_valid_text_are_refused(tmp_path, flags):
    with pytest.raises(SystemExit, match="can't be read as text: rename it, or write it in UTF-8"):
        check(tmp_path / ("out" if flags else "out\udce4"), **flags)


def test_find_differences_names_each_setting_with_both_values():
    before = {
        "vae": {"scaling_factor": 0.18215, "class": "AutoencoderKL"},
        "latents": "moments",
        "gone": 1,
    }
    now = {
        "vae": {"scaling_factor": 0.13025, "class": "AutoencoderKL"},
        "latents": "moments",
        "new": {"a": 1},
    }
    assert find_differences(before, before) == []
    expected = ["vae.scaling_factor 0.18215 -> 0.13025", "gone 1 -> None", "new None -> {'a': 1}"]
    assert find_differences(before, now) == expected


def test_files_are_synced_to_disk_before_they_are_renamed(tmp_path, monkeypatch):
    """Otherwise a power cut leaves empty files."""
    calls, fsync, replace = [], os.fsync, os.replace

    def watch(name, function):
        return lambda *args, **options: (calls.append(name), function(*args, **options))[1]

    fill(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", watch("fsync", fsync))
    monkeypatch.setattr(os, "replace", watch("replace", replace))
    save(tmp_path / "out", "new")
    assert calls[:3] == ["fsync"] * 3 and "replace" in calls
    calls.clear()
    write_file(tmp_path / "small", "text")
    assert calls == ["fsync", "replace"]


def test_a_hub_name_is_not_taken_for_an_input_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check("beans/out", dataset_name="beans")
    (tmp_path / "beans").mkdir()
    with pytest.raises(SystemExit, match="lies in --dataset_name beans"):
        check("beans/out", dataset_name="beans")


def test_lock_folder_creates_parents_and_ignores_hidden_files(tmp_path):
    folder = tmp_path / "a/b"
    lock_folder(folder, folder, lambda names: False, "run of this script").release()
    (folder / ".DS_Store").touch()
    lock_folder(folder, folder, lambda names: False, "run of this script").release()
    (folder / "photo.png").touch()
    with pytest.raises(
        SystemExit, match="holds photo.png and no run of this script: choose another folder"
    ):
        lock_folder(folder, folder, lambda names: False, "run of this script")


def test_saving_leaves_the_end_of_a_loader_process_to_its_own_sentence(tmp_path):
    """torch raises it in the main thread at any moment, so also while a checkpoint is written."""
    with pytest.raises(RuntimeError, match="DataLoader worker"), saving(tmp_path, "it"):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    clean(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_index_of_weights_is_named(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(
        '{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}'
    )
    assert read_shard_names(path) == {"1.safetensors", "2.safetensors"}
    for content in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map"'):
        path.write_text(content)
        with pytest.raises(ValueError, match="^model.safetensors.index.json is damaged: it lists"):
            read_shard_names(path)
