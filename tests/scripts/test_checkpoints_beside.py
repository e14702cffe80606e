"""Files are written beside the training: true copies, whole or absent, and no error is lost."""

import argparse
import itertools
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    Script,
    checkpoints,
    finish,
    has_ended,
    kill,
    list_unconditional_flags,
    make_captioned,
    make_models,
    metrics,
    patch,
    start,
    wait_until,
)
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion_training.files import checksum_files
from diffusion_training.host_memory import HostMemory, measure_free
from diffusion_training.stopping import StopSignal
from diffusion_training.training.keeping import checkpoints as checkpoints_module
from diffusion_training.training.keeping.checkpoint_copy import (
    CheckpointCopy,
    count_copy,
    make_checkpoint_copy,
)
from diffusion_training.training.saver import Saver
from diffusion_training.training.step.costs import count_trained

pytestmark = pytest.mark.usefixtures("without_figures")
UNCONDITIONAL, TEXT = Script("train_unconditional"), Script("train_text_to_image")
STEPS = ("--max_train_steps=6", "--checkpointing_steps=2")


@pytest.fixture
def flags(tmp_path):
    return list_unconditional_flags(tmp_path, 8, "--save_model_epochs=100", *STEPS)


@pytest.fixture
def lora_flags(tmp_path):
    """A DoRA, whose file for other programs depends on the weights of its base."""
    make_captioned(tmp_path / "captioned", 8)
    return TEXT.flags(
        tmp_path / "out",
        f"--pretrained_model_name_or_path={make_models(tmp_path)}",
        f"--train_data_dir={tmp_path / 'captioned'}",
        "--resolution=16",
        "--dataloader_num_workers=0",
        "--rank=2",
        "--use_dora",
        *STEPS,
    )


@pytest.mark.parametrize("train", [UNCONDITIONAL, TEXT], ids=["unet", "dora"])
def test_checkpoints_hold_the_values_of_their_step(
    tmp_path, flags, lora_flags, monkeypatch, capsys, train
):
    """The weights change while a checkpoint is written; it has the bytes of one that waited.

    The older checkpoint is deleted when the newer one has its name, and a third waits for it.
    """
    flags = [*(flags if train is UNCONDITIONAL else lora_flags), "--checkpoints_total_limit=2"]
    whole = tmp_path / "whole/out"  # the header of a LoRA has the name of the folder

    def refuse(*args):
        raise RuntimeError("no more memory can be pinned")

    with monkeypatch.context() as waiting:
        if train is UNCONDITIONAL:
            patch(waiting, "measure_free", lambda: 1000)
        else:
            waiting.setattr(
                "diffusion_training.training.keeping.checkpoint_copy.HostMemory", refuse
            )
        train(*flags, f"--output_dir={whole}")
    said = "The training waits while a checkpoint is written: there is no memory for a copy of"
    reason = "0 GB are free" if train is UNCONDITIONAL else "no more memory can be pinned"
    assert re.search(rf"{said} .* GB \({reason}\)\n", capsys.readouterr().out)
    out, begun, present = tmp_path / "out", [], []
    save_weights, train_step = checkpoints_module.save_weights, train.module.train_step

    def save_late(model, folder):
        """Write when two more steps have begun, or none is left."""
        step = int(folder.parent.name.removeprefix("checkpoint-"))
        wait_until(lambda: len(begun) >= min(step + 2, 6))
        present.append((step, checkpoints(out)))
        save_weights(model, folder)

    def count(*args):
        begun.append(0)
        return train_step(*args)

    patch(monkeypatch, "save_weights", save_late)
    monkeypatch.setattr(train.module, "train_step", count)
    train(*flags)
    assert said not in capsys.readouterr().out
    unfinished = ".tmp-saving-checkpoint"
    assert [names for step, names in present[::2]] == [
        {unfinished},
        {unfinished, "checkpoint-2"},
        {unfinished, "checkpoint-2", "checkpoint-4"},
    ]
    assert checkpoints(out) == {"checkpoint-4", "checkpoint-6"} == checkpoints(whole)
    for name in checkpoints(out):
        files = checksum_files(out / name)
        assert files == checksum_files(whole / name) and len(files) > 4


@pytest.mark.parametrize(
    "step, last, is_made",
    [(0, 3, True), (0, 2, False), (3, 5, True), (3, 4, False), (4, 7, True), (4, 6, False)],
)
def test_a_run_has_a_copy_if_a_checkpoint_comes_before_its_last_step(step, last, is_made):
    """Also if it is resumed at a step."""
    launch = argparse.Namespace(is_main=True, device=torch.device("cpu"))
    args = argparse.Namespace(find_lr=False, checkpointing_steps=2, optimizer="adamw")
    args.max_train_steps = last
    models = {"unet": torch.nn.Linear(2, 2)}
    assert (make_checkpoint_copy(launch, models, models, step, args) is not None) == is_made


def test_a_full_disk_ends_all_processes_in_the_same_step(tmp_path, flags):
    """The thread meets the error in step 8; the checkpoint before and the records stay."""
    train = UNCONDITIONAL
    save, take_step, agree = torch.save, train.module.train_step, StopSignal.agree

    def run():
        taken = []

        def agree_after_the_error(stop_signal):
            if stop_signal.writer.writing and len(taken) == 8:
                wait_until(stop_signal.writer.writing["checkpoint"].done)
            agree(stop_signal)

        number = itertools.count()

        def fill(*args):
            if next(number) >= 2:  # each checkpoint has two such files
                wait_until((tmp_path / "begun-8").exists)
                raise OSError(28, "No space left on device")
            save(*args)

        def note(*args):
            step = args[5].number + 1
            if os.environ["RANK"] == "1":
                Path(tmp_path, f"begun-{step}").touch()
            sums = take_step(*args)
            taken.append(step)
            return sums

        torch.save, train.module.train_step = fill, note
        StopSignal.agree = agree_after_the_error
        train(*flags, "--max_train_steps=20", "--checkpointing_steps=3")

    codes = finish(start(run, 2, tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert codes == [1, 75] and "Traceback" not in said, said
    sentence = r"checkpoint-6 could not be saved \(.*No space left on device\); files saved before"
    assert len(re.findall(rf"^train_unconditional.py: .*{sentence}", said, re.M)) == 1, said
    assert "another process has ended: see its message" in said
    assert (tmp_path / "begun-8").exists() and not (tmp_path / "begun-9").exists()
    assert metrics(tmp_path / "out")[-1]["step"] == 7
    assert checkpoints(tmp_path / "out") == {"checkpoint-3"}


def test_samples_that_cannot_be_saved_end_all_processes_and_come_again(tmp_path, flags):
    """The checkpoint that is begun after them is not written, since a resumed run needs them."""
    flags = [*flags, "--validation_steps=2", "--eval_batch_size=2"]
    train, begin, out = UNCONDITIONAL, Saver.begin_checkpoint, tmp_path / "out"
    train.fork(*flags, f"--output_dir={tmp_path / 'whole'}", num_processes=2)

    def run():
        def note(saver):
            begin(saver)
            if saver.launch.is_main:
                Path(tmp_path, f"begun-{saver.progress.global_step}").touch()

        def fill(*args, **options):
            wait_until((tmp_path / "begun-4").exists)
            raise OSError(28, "No space left on device")

        Saver.begin_checkpoint, Image.Image.save = note, fill
        train(*flags)

    codes = finish(start(run, 2, tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert codes == [1, 75] and "Traceback" not in said, said
    sentence = r"step-0000002.png could not be saved \(.*No space left on device\)"
    assert len(re.findall(rf"^train_unconditional.py: .*{sentence}", said, re.M)) == 1, said
    assert checkpoints(out) == {"checkpoint-2"} and not list((out / "samples").iterdir())
    train.fork(*flags, "--resume_from_checkpoint=latest", num_processes=2)
    names = [path.name for path in (tmp_path / "whole/samples").iterdir()]
    assert sorted(names) == [f"step-000000{step}.png" for step in (2, 4, 6)]
    for name in names:
        assert (out / "samples" / name).read_bytes() == (
            tmp_path / "whole/samples" / name
        ).read_bytes()
    assert "step 6</figcaption>" in (out / "report.html").read_text()


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_that_takes_no_step_after_a_later_one_gets_samples_in_time(
    flags, monkeypatch, name
):
    """tensorboard's file takes them in any order, so the training does not wait for them."""
    logged, drawn = [], []

    class Tracker:
        def __init__(self):
            self.name = name

        def log(self, values, step):
            logged.append(step)
            if name == "tensorboard" and step == 3:
                drawn.append(step)

        def log_images(self, images, step, **layout):
            wait_until(lambda: drawn or step != 2 or name == "wandb")
            time.sleep(0.1)
            logged.append(step)

        def finish(self):
            pass

    add = lambda accelerator, *rest: accelerator.trackers.append(Tracker())
    patch(monkeypatch, "init_trackers", add)
    UNCONDITIONAL(*flags, "--validation_steps=2", "--holdout=0")
    assert sorted(logged) == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert (logged == sorted(logged)) == (name == "wandb")


def test_a_run_that_fails_finishes_its_checkpoint(tmp_path, flags, monkeypatch):
    save_weights = checkpoints_module.save_weights
    take_step = UNCONDITIONAL.module.train_step
    failed = []

    def save_late(*args):
        wait_until(lambda: failed)
        save_weights(*args)

    def fail_in_step_3(*args):
        if args[5].number == 2:
            failed.append(0)
            raise OSError(5, "the data can't be read")
        return take_step(*args)

    patch(monkeypatch, "save_weights", save_late)
    monkeypatch.setattr(UNCONDITIONAL.module, "train_step", fail_in_step_3)
    assert "the data can't be read" in UNCONDITIONAL.refused(*flags)
    assert checkpoints(tmp_path / "out") == {"checkpoint-2"}


def kill_while_writing(folder, moment, train, flags, num_processes):
    """Kill a run while it writes a checkpoint; returns whether it still did.

    The newest whole checkpoint is never older than before.

    moment: the number of the file before which the thread waits for the kill; or the seconds until
    the kill, in which the thread writes slowly.
    """
    before = find_newest(folder)
    reached, save, numbers = folder.with_name("reached"), torch.save, itertools.count()

    def save_late(*args):
        if isinstance(moment, int) and next(numbers) == moment:
            reached.touch()
            signal.pause()
        time.sleep(0.1)
        save(*args)

    def run():
        torch.save = save_late
        train(*flags)

    pids = start(run, num_processes)
    unfinished = folder / ".tmp-saving-checkpoint"
    begun = reached if isinstance(moment, int) else unfinished
    wait_until(lambda: begun.exists() or has_ended(pids[0]))
    time.sleep(0 if isinstance(moment, int) else moment)
    kill(pids)
    reached.unlink(missing_ok=True)
    assert find_newest(folder) >= before
    return unfinished.exists()


def find_newest(folder):
    return max((int(path.name[11:]) for path in folder.glob("checkpoint-*")), default=0)


NUM_KILLS = int(os.environ.get("KILLS", 100))  # processes that a test marked `long` kills
KILLS = {  # {name: (processes, further flags)}
    "1 process": (1, []),
    "2 processes": (2, []),
    "shard": (2, ["--shard"]),
    "copies": (1, ["copies"]),
}


@pytest.mark.parametrize(
    "name, count",
    [
        ("copies", 3),
        *(
            pytest.param(name, NUM_KILLS // KILLS[name][0], marks=pytest.mark.long)
            for name in KILLS
        ),
    ],
)
def test_runs_killed_while_they_write_a_checkpoint_end_with_the_same_bits(
    tmp_path, flags, lora_flags, name, count
):
    num_processes, more = KILLS[name]
    train, part = UNCONDITIONAL, "unet"
    if name == "shard":
        train = TEXT
        flags = [flag for flag in lora_flags if flag not in ("--rank=2", "--use_dora")]
        # the loss counts every image once, and rounding may differ between runs otherwise
    flags = [*flags, "--max_train_steps=12", "--checkpoints_total_limit=1", "--use_ema"]
    flags += [flag for flag in more if flag.startswith("--")]
    resuming = [*flags, "--resume_from_checkpoint=latest"]
    whole, out, copies = (tmp_path / each for each in ("whole", "out", "copies"))
    train.fork(*flags, f"--output_dir={whole}", num_processes=num_processes)
    resuming += [f"--checkpoints_to={copies}"] if name == "copies" else []
    rng = np.random.default_rng(0)
    met = 0
    for number in range(1, count + 1):
        moment = 3 - number if count == 3 else rng.uniform(0, 0.4)
        met += kill_while_writing(out, moment, train, resuming, num_processes)
        if name == "copies" and number % 2:  # the machine is lost with its disk
            shutil.rmtree(out)
        if number % 3 == 0:
            train.fork(*resuming, num_processes=num_processes)
            assert checkpoints(out) == {"checkpoint-12"}
            files = checksum_files(out / "checkpoint-12")
            assert files == checksum_files(whole / "checkpoint-12")
            assert not list(out.glob(".tmp-*"))
            if name == "copies":
                assert checksum_files(copies / "checkpoint-12") == files
                shutil.rmtree(copies)
            shutil.rmtree(out)
    assert met >= (3 if count == 3 else count / 2)
    assert (whole / part).is_dir()


# ------------------------------------------------------------------- memory


def test_the_memory_of_a_copy_is_that_of_weights_and_moments():
    model = torch.nn.Linear(3, 2)
    saved = {"unet": model, "unet_ema": model}
    _, moments = count_trained({"unet": model}, "adamw")
    assert count_copy(saved, moments) == 4 * (2 * 8 + 2 * 8)


def test_tensors_cut_from_host_memory_keep_their_layout_and_never_overlap():
    memory = HostMemory(3_000, torch.device("cpu"))
    likes = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.0),
        torch.randn(4, 6).t(),
        torch.ones(0, 3),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(400_000),  # more than there is
        torch.randn(5, 5).half(),
    ]
    begin = memory.place
    copies = [memory.cut(like).copy_(like) for like in likes]
    for like, copy in zip(likes, copies, strict=True):
        assert torch.equal(like, copy) and like.stride() == copy.stride()
        assert copy.untyped_storage().nbytes() == like.nbytes
    memory.place = begin
    again = memory.cut(likes[0])
    assert again.data_ptr() == copies[0].data_ptr()


def test_a_later_copy_takes_no_new_memory_and_has_what_the_optimizer_adds():
    model, cpu = torch.nn.Linear(3, 2), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    memory = HostMemory(10_000, cpu)
    copy = CheckpointCopy({"model": model}, memory, cpu)

    def assert_copied():
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        copy.take(optimizer)
        ((_, copied),) = copy.models()
        for name, weight in model.state_dict().items():
            assert torch.equal(copied.state_dict()[name], weight)
        for number, state in optimizer.state_dict()["state"].items():
            own = copy.moments()["state"][number]
            assert own.keys() == state.keys()
            assert all(torch.equal(own[name], value) for name, value in state.items())
            assert not any(own[name] is value for name, value in state.items())

    assert_copied()
    place = memory.place
    assert_copied()
    assert memory.place == place
    optimizer.state[model.weight]["slow"] = torch.ones(7)
    assert_copied()


class Pair(torch.nn.Module):
    """A module with a `save_pretrained` of its own, which reads another module."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def save_pretrained(self, folder):
        torch.save(self.inner.state_dict(), folder / "inner.pt")


def test_a_copy_of_any_kind_of_model_is_saved_with_the_weights_of_its_step(tmp_path):
    """A trained text encoder is one of transformers' models, whose saving reads more of it."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = CLIPTextConfig(vocab_size=9, num_attention_heads=2, **sizes)
    saved = {"text_encoder": CLIPTextModel(config), "pair": Pair()}
    cpu = torch.device("cpu")
    copy = CheckpointCopy(saved, HostMemory(count_copy(saved, 0), cpu), cpu)
    weights = [weight for model in saved.values() for weight in model.parameters()]
    copy.take(torch.optim.SGD(weights))
    before = [weight.clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.add_(1)  # the training goes on
    for _, model in copy.models():
        model.save_pretrained(tmp_path)
    kept = [*CLIPTextModel.from_pretrained(tmp_path).parameters()]
    kept += torch.load(tmp_path / "inner.pt").values()
    assert all(map(torch.equal, kept, before)) and len(kept) == len(before)


def test_free_memory_respects_the_limits_of_containers(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_training.host_memory.CGROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").mkdir()
    free = measure_free()
    assert free > 10**6
    for name, content in {
        "memory.max": "9000",
        "memory.current": "5000",
        "memory.stat": "anon 4000\ninactive_file 700\nactive_file 300",
    }.items():
        (tmp_path / "cgroup" / name).write_text(f"{content}\n")
    assert measure_free() == 4700
    (tmp_path / "cgroup/memory.max").write_text("max\n")
    assert measure_free() > 10**6
