"""Copies at an address: they are complete, and not deleted too early. Errors are explained."""

import contextlib
import functools
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import xxhash
from conftest import patch, wait_until
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training import remote
from diffusion_training.files import checksum_files
from diffusion_training.training.keeping.checkpoints import find_checkpoints
from diffusion_training.training.keeping.copies import (
    OWNER,
    Address,
    Copies,
    TakenOverError,
    find_unfinished,
    find_whole,
    name_checkpoint,
)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    patch(monkeypatch, "RETRY", 0.05)
    patch(monkeypatch, "WAITS", (0.01,))


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out/samples").mkdir(parents=True)
    (tmp_path / "out/run.args").write_text("--seed 1")
    (tmp_path / "out/metrics.jsonl").write_text("{}\n")
    return tmp_path / "out"


@pytest.fixture
def make(out):
    """make(limit) -> `Copies` of `out`, closed at the end."""
    MemoryFileSystem.store.clear()
    made = []

    def make(limit=None, folder=out):
        copies = Copies("memory://bucket/run", folder, limit)
        made.append(copies)
        copies.open()
        return copies

    yield make
    for copies in made:
        copies.close()


def save(out, step, best=None):
    """Save a checkpoint, samples of the same step, and perhaps best/."""
    folder = out / f"checkpoint-{step}"
    (folder / "unet").mkdir(parents=True)
    (folder / "unet/weights").write_text(f"weights of step {step}")
    (folder / "optimizer.bin").write_text(f"moments of step {step}")
    state = {"step": step, "checksums": checksum_files(folder)}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    if best is not None:
        shutil.rmtree(out / "best-before", ignore_errors=True)
        if (out / "best").exists():
            (out / "best").rename(out / "best-before")
        (out / "best").mkdir()
        (out / "best/weights").write_text(f"best weights of step {best}")
        text = json.dumps({"step": best, "held_out_loss": 1 / best})
        (out / "best/held_out.json").write_text(text)
    (out / "samples").mkdir(exist_ok=True)
    (out / f"samples/step-{step:07d}.png").write_text(f"samples of step {step}")
    return folder


def read(name):
    """Return the content of a file at the address."""
    return MemoryFileSystem().cat_file(f"memory://bucket/run/{name}")


def list_steps(kind="checkpoint"):
    """Return the steps of the whole copies at the address."""
    return [*find_whole(Address("memory://bucket/run").list(), kind)]


def check():
    """Return the steps of the checkpoints at the address. Their bytes must be as written."""
    steps = list_steps()
    for step in steps:
        state = json.loads(read(f"checkpoint-{step}/trainer_state.json"))
        for name, checksum in state["checksums"].items():
            content = read(f"checkpoint-{step}/{name}")
            assert xxhash.xxh3_128(content).hexdigest() == checksum
    for step in list_steps("best"):
        assert read(f"best-{step}/weights") == f"best weights of step {step}".encode()
    return steps


def finish(copies):
    """Wait until all is copied."""
    copies.finish(20)
    assert copies.is_copied


class Hold:
    """Stops the copying thread at its next file, or makes it fail there."""

    def __init__(self, monkeypatch, name, failure=None):
        self.reached, self.free = threading.Event(), threading.Event()
        send = Address.send

        def hold(store, source, target):
            if target.startswith(name) and not self.free.is_set():
                self.reached.set()
                if failure:
                    raise failure
                self.free.wait(20)
            send(store, source, target)

        monkeypatch.setattr(Address, "send", hold)


def test_a_damaged_record_of_the_best_weights_leaves_the_checkpoints_their_copies(
    out, make, capsys
):
    copies = make()
    save(out, 1, best=1)
    (out / "best/held_out.json").write_text("{}")
    copies.begin(-1)
    finish(copies)
    assert check() == [1] and list_steps("best") == [] and not capsys.readouterr().err


def test_new_files_are_copied_up_to_the_checkpoints_limit(out, make, capsys):
    copies = make(limit=2)
    save(out, 1, best=1)
    copies.begin(-1)
    wait_until(lambda: list_steps() == [1], 20)
    for step, best in ((2, 2), (3, None), (4, 4)):
        save(out, step, best)
        copies.prune(out / f"checkpoint-{step}")
        copies.news.set()
    finish(copies)
    assert check() == [3, 4]
    names = Address(copies.url).list()
    assert list_steps("best") == [4]  # the previous one is no longer needed
    assert {f"samples/step-000000{step}.png" for step in range(1, 5)} < names
    (out / "metrics.jsonl").write_text("{}\n{}\n")
    copies = make(limit=2)
    copies.begin(4)
    finish(copies)
    assert read("metrics.jsonl") == b"{}\n{}\n" and read("run.args") == b"--seed 1"
    assert not find_unfinished(names) and not capsys.readouterr().err
    save(out, 5)  # beyond the limit, nothing is copied
    chosen = []
    for there in ((), (5,), (6,)):
        copies.there = {f"checkpoint-{step}/trainer_state.json" for step in there}
        chosen.append([path.name[-1] for path in copies.find_new() if path.is_dir()])
    assert chosen == [["5", "4"], ["4"], ["5"]]


def test_prune_keeps_the_checkpoint_being_copied_and_the_newest_is_next(out, make, monkeypatch):
    held = Hold(monkeypatch, "checkpoint-1/")
    copies = make(limit=1)
    save(out, 1)
    copies.begin(-1)
    held.reached.wait(20)
    for step in (2, 3):
        save(out, step)
        copies.prune(out / f"checkpoint-{step}")
        copies.news.set()
        assert [path.name for path in find_checkpoints(out)] == [
            "checkpoint-1",
            f"checkpoint-{step}",
        ]
    held.free.set()
    finish(copies)
    assert check() == [3]
    copies.prune(out / "checkpoint-3")
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-3"]


def test_best_weights_replaced_during_their_copy_are_not_copied(out, make, monkeypatch):
    held = Hold(monkeypatch, "best-1/")
    write, written = Address.write, []
    record = lambda store, name, content: written.append(name) or write(store, name, content)
    monkeypatch.setattr(Address, "write", record)
    copies = make()
    save(out, 1, best=1)
    copies.begin(-1)
    held.reached.wait(20)
    shutil.rmtree(out / "best")
    save(out, 2, best=2)
    shutil.rmtree(out / "best-before", ignore_errors=True)
    held.free.set()
    finish(copies)
    names = Address(copies.url).list()
    assert check() == [1, 2] and list_steps("best") == [2] and not find_unfinished(names)
    assert "best-1/held_out.json" not in written  # a mixture of both


def test_a_checkpoint_deleted_before_its_copy_is_not_copied(out, make, monkeypatch, capsys):
    held = Hold(monkeypatch, "metrics.jsonl")
    copies = make()
    shutil.rmtree(save(out, 1).parent / "samples")
    (out / "samples").mkdir()
    (out / "samples/step-0000000.png").symlink_to("missing")
    copies.begin(-1)
    held.reached.wait(20)
    shutil.rmtree(out / "checkpoint-1")
    held.free.set()
    finish(copies)
    assert Address(copies.url).list() == {OWNER, "run.args", "metrics.jsonl"}
    assert not capsys.readouterr().err


def test_a_failed_copy_is_retried_and_the_older_checkpoint_is_kept(out, make, monkeypatch, capsys):
    copies = make(limit=1)
    save(out, 1)
    copies.begin(-1)
    finish(copies)
    held = Hold(monkeypatch, "checkpoint-2/unet", FileNotFoundError("the store is\nbroken"))
    save(out, 2)
    copies = make(limit=1)
    copies.begin(1)
    held.reached.wait(20)
    assert check() == [1]
    copies.finish(0.2)
    error = capsys.readouterr().err
    assert error.count("failed (the store is broken); the run tries again later") == 1
    assert (
        f"Not copied to memory://bucket/run: checkpoint-2. If {out} still exists, the same" in error
    )
    held.free.set()
    finish(copies)
    assert check() == [2]
    held = Hold(monkeypatch, "checkpoint-3/", FileNotFoundError("the store is\nbroken"))
    save(out, 3)
    copies = make(limit=1)
    copies.begin(2)
    wait_until(lambda: "failed (the store is broken)" in capsys.readouterr().err, 5)


def test_files_of_a_failed_copy_are_deleted_before_the_next_copy(out, make, monkeypatch, capsys):
    copies = make(limit=1)
    held = Hold(monkeypatch, "checkpoint-1/unet", OSError("the disk is full"))
    save(out, 1)
    copies.begin(-1)
    held.reached.wait(20)
    assert "checkpoint-1/optimizer.bin" in Address(copies.url).list()
    save(out, 2)
    finish(copies)
    assert {name.split("/")[0] for name in Address(copies.url).list() if "-" in name} == {
        "checkpoint-2",
        "samples",
    }


def test_files_that_others_delete_at_the_address_are_copied_again(out, make, capsys):
    copies = make()
    save(out, 1, best=1)
    copies.begin(-1)
    wait_until(lambda: list_steps() == [1], 20)
    Address(copies.url).delete("")
    save(out, 2)
    finish(copies)
    names = Address(copies.url).list()
    assert check() == [1, 2] and list_steps("best") == [1] and OWNER in names
    assert {"run.args", "metrics.jsonl", "samples/step-0000001.png"} < names
    assert f"failed ({OWNER} was deleted there); the run tries again" in capsys.readouterr().err


def test_copies_are_complete_after_a_kill_before_any_change(out, make, monkeypatch):
    """Two checkpoints are at the address; with a limit of one, a third replaces them."""
    changes = {name: getattr(Address, name) for name in ("send", "delete")}
    begun = make()
    begun.take(-1)
    save(out, 1, best=1), save(out, 2, best=2)
    while begun.copy_newest():
        pass
    before = dict(MemoryFileSystem.store)
    save(out, 3, best=3)
    found = []
    for number in range(100):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(before)
        copies = make(limit=1)
        left = iter(range(number))

        def change(store, *args, name, left=left):
            if OWNER not in args and next(left, None) is None:
                raise LookupError("killed")
            changes[name](store, *args)

        with monkeypatch.context() as m, contextlib.suppress(LookupError):
            for name in changes:
                m.setattr(Address, name, functools.partialmethod(change, name=name))
            copies.take(2)
            copies.copy_newest()
            found.append("end")
        steps, best = check(), list_steps("best")
        assert best[-1] == 3 or 2 in best
        found.append(steps)
        after = make()
        after.take(99)
        after.tidy()
        assert check() == steps and not find_unfinished(after.address.list())
        if "end" in found:
            break
    assert found[0] == [1, 2] and [2, 3] in found and found[-2:] == ["end", [3]]
    assert len(found) > 15


def test_fetch_brings_checkpoint_records_samples_and_best_weights(
    out, make, tmp_path, monkeypatch, capsys
):
    copies = make()
    save(out, 1, best=1), save(out, 2)
    copies.begin(-1)
    wait_until(lambda: list_steps() == [1, 2], 20)
    held = Hold(monkeypatch, "checkpoint-3/", OSError("killed"))
    with copies.holding:  # so that no copy is chosen when half of it is there
        save(out, 3, best=3)
    copies.news.set()
    held.reached.wait(20)
    copies.close()
    assert list_steps("best") == [1, 3]
    Address(copies.url).write("samples/.tmp-1-step-0000001.png", b"unfinished")
    new = tmp_path / "new/out"
    new.mkdir(parents=True)
    make(folder=new).fetch("latest")
    assert checksum_files(new / "checkpoint-2") == checksum_files(out / "checkpoint-2")
    assert (new / "best/weights").read_text() == "best weights of step 1"
    assert (new / "metrics.jsonl").read_text() == "{}\n"
    assert sorted(path.name for path in (new / "samples").iterdir()) == [
        "step-0000001.png",
        "step-0000002.png",
    ]
    assert not (new / "checkpoint-1").exists()
    assert "Fetching checkpoint-2 from memory://bucket/run" in capsys.readouterr().out
    assert "samples/step-0000003.png" in Address(copies.url).list()
    resumed = make(folder=new)
    resumed.begin(2)
    finish(resumed)
    names = resumed.there  # what came after checkpoint-2 is gone, because it is made again
    assert list_steps("best") == [1] and not find_unfinished(names)
    assert "samples/step-0000002.png" in names and "samples/step-0000003.png" not in names
    held.free.set()
    save(new, 3, best=3)
    resumed = make(folder=new)
    resumed.begin(3)
    finish(resumed)
    names = Address(copies.url).list()
    assert list_steps("best") == [3] and check() == [1, 2, 3]
    assert "samples/step-0000003.png" in names


def test_snapshots_are_copied_before_their_checkpoint_and_fetched_with_it(
    out, make, tmp_path, monkeypatch, capsys
):
    def take_snapshot(step):
        path = out / f"posthoc_ema/step-{step:07d}/unet-0.05.safetensors"
        path.parent.mkdir(parents=True)
        path.write_text(f"average of step {step}")

    copies = make()
    (out / "posthoc_ema").mkdir()
    (out / "posthoc_ema/held_out.json").write_text("{}")  # measured again by a resumed run
    take_snapshot(1), take_snapshot(2), take_snapshot(3), save(out, 2)
    held = Hold(monkeypatch, "posthoc_ema/step-0000002", OSError("no network"))
    copies.begin(-1)
    held.reached.wait(20)
    copies.close()
    copies.thread.join(20)
    assert list_steps() == []
    held.free.set()
    copies = make()
    copies.begin(2)
    finish(copies)
    new = tmp_path / "new/out"
    new.mkdir(parents=True)
    make(folder=new).fetch("latest")
    found = {path.relative_to(new).as_posix() for path in new.glob("posthoc_ema/**/*")}
    steps = ("posthoc_ema/step-0000001", "posthoc_ema/step-0000002")
    assert found == {*steps, *(f"{step}/unet-0.05.safetensors" for step in steps)}
    assert (new / steps[1] / "unet-0.05.safetensors").read_text() == "average of step 2"
    late = "posthoc_ema/step-0000003/unet-0.05.safetensors"
    assert late in Address(copies.url).list()
    resumed = make(folder=new)
    resumed.begin(2)  # the run makes what came after checkpoint-2 anew
    finish(resumed)
    assert late not in Address(copies.url).list()


def test_fetch_chooses_the_newest_checkpoint_or_stops_with_an_error(
    out, make, tmp_path, monkeypatch
):
    copies = make()
    save(out, 1), save(out, 2)
    copies.begin(-1)
    finish(copies)

    def fetch(given, *here):
        folder = tmp_path / "fetched/out"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for step in here:
            save(folder, step)
        copies = make(folder=folder)
        try:
            copies.fetch(given)
        finally:
            copies.close()
        return [path.name for path in find_checkpoints(folder)]

    one, two, three = (f"checkpoint-{step}" for step in (1, 2, 3))
    assert fetch("latest") == [two]
    assert fetch("latest", 1) == [one, two]
    assert fetch("latest", 3) == [three]
    assert fetch(two) == fetch(f"{two}/") == fetch(str(tmp_path / "fetched/out" / two)) == [two]
    assert fetch(three, 3) == [three]
    for given, here in ((one, []), (one, [1]), (str(out / two), []), ("elsewhere", [])):
        with pytest.raises(SystemExit, match=f"checkpoint-2 at .* is newer than {given}, or of an"):
            fetch(given, *here)
    for here in ([], [2]):
        with pytest.raises(SystemExit, match="holds checkpoint-2 of an earlier run: resume it wi"):
            fetch(None, *here)
    Address(copies.url).write("checkpoint-2/unet/weights", b"other weights")
    with pytest.raises(
        SystemExit, match="checkpoint-2 is damaged: .*unet/weights has changed since"
    ):
        fetch("latest")
    Address(copies.url).delete("checkpoint-2/unet/weights")
    with pytest.raises(SystemExit, match="checkpoint-2 is damaged: delete it, .*no such file"):
        fetch("latest")
    Address(copies.url).write("checkpoint-2/trainer_state.json", b"{")
    with pytest.raises(SystemExit, match="run/checkpoint-2 is damaged: delete it, and resume from"):
        fetch("latest")


def test_find_name_accepts_the_path_of_a_checkpoint_at_the_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, url in (
        ("s3://bucket/run/checkpoint-2", "s3://bucket/run"),
        (f"{tmp_path}/run/checkpoint-2/", "run"),
        ("./run/checkpoint-2", f"{tmp_path}/run/"),
    ):
        assert name_checkpoint(given, url) == "checkpoint-2"
    for given in ("latest", "checkpoint-2", "other/checkpoint-2", "s3://run/checkpoint-2"):
        assert name_checkpoint(given, "run") == name_checkpoint(given, "s3://bucket/run") == given


def test_copies_leave_the_files_of_other_programs_and_runs_alone(out, make, monkeypatch, capsys):
    store = Address("memory://bucket/run")
    for name in ("checkpoint-7/model.bin", "thesis.txt"):
        store.write(name, b"mine")
        with pytest.raises(SystemExit, match=f"holds {name} and no run of this script"):
            make()
        assert store.list() == {name}
        store.delete(name)
    copies = make()
    save(out, 1)
    copies.begin(-1)
    wait_until(lambda: list_steps() == [1], 20)
    other = make()
    held = Hold(monkeypatch, "checkpoint-2/")
    save(out, 2)
    copies.news.set()
    held.reached.wait(20)
    other.take(1)
    held.free.set()
    copies.finish(20)
    assert not copies.thread.is_alive()  # it did not wait for what nobody copies
    names = store.list()
    with pytest.raises(TakenOverError):
        copies.tidy()
    assert store.list() == names
    assert check() == [1] and read(OWNER) == other.key
    error = capsys.readouterr().err
    assert "Another run writes to memory://bucket/run now, so this run copies nothing" in error


# ------------------------------------------------------------------- an address, or a folder


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    MemoryFileSystem.store.clear()
    return str(tmp_path / "a/store") if request.param == "disk" else "memory://bucket/store"


def test_store_writes_sends_lists_and_deletes_files(url, tmp_path, monkeypatch):
    store = Address(f"{url}/")
    assert store.list() == set()
    (tmp_path / "source").write_bytes(b"1" * 10**5)
    store.send(tmp_path / "source", "folder/deep/a")
    store.write("folder/b", b"2")
    store.write("b", b"3")
    store.write("b", b"4")
    assert store.list() == {"folder/deep/a", "folder/b", "b"}
    read = lambda name: store.fs.cat_file(f"{store.root}/{name}")
    assert read("folder/deep/a") == b"1" * 10**5 and read("b") == b"4"
    store.delete("folder")
    store.delete("folder")
    store.delete("b")
    store.delete("b")
    assert store.list() == set()
    if "memory" not in url:  # a kill leaves a temporary name, which readers ignore
        half = lambda source, target: Path(target).write_bytes(b"1") and os._exit(9)
        monkeypatch.setattr("shutil.copyfile", half)
        pid = os.fork()
        if pid == 0:
            store.send(tmp_path / "source", "folder/a")
        assert os.waitpid(pid, 0)[1] >> 8 == 9
        assert "folder/a" not in store.list()


def test_the_run_that_took_an_address_last_owns_it(url, tmp_path):
    assert Address(url).fs is not Address(url).fs  # which reads the credentials again
    first, second = Copies(url, tmp_path / "out", None), Copies(url, tmp_path / "out", None)
    for copies in (first, second):
        copies.open()
        copies.take(-1)
        copies.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_an_unusable_address_stops_with_one_error_sentence(tmp_path):
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file/folder", "nowhere://bucket/run"):
        with pytest.raises(SystemExit, match=f"--checkpoints_to {bad} can't be written to"):
            Copies(str(bad), tmp_path / "out", None).open()


def test_a_store_that_does_not_answer_is_named(url, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SILENCE", 0.05)
    said = f"Waiting for {url}, which has not answered for 0.05 s"
    write, heard = Address.write, []

    def write_late(*args):
        wait_until(lambda: heard.append(capsys.readouterr().err) or said in heard[-1], 10)
        write(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Address, "write", write_late)
        Copies(url, tmp_path / "out", None).open()
    Copies(url, tmp_path / "out", None).open()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # it answered at once
