"""Attack the scripts at any moment and with odd input, and check the result.

There are two good results: the same bits as an undisturbed run, or one error sentence and no loss.
The long part (`pytest -m long tests/attacks`) runs more of the same cases for every script. The
scripts share most of their code, so the quick part tries each attack on one or two of them. A run
is recorded as events (see `watch`). An attack happens before the n-th event of a name, so a failure
message shows how to repeat it.
"""

import collections
import contextlib
import errno
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import datasets
import matplotlib.figure  # otherwise each fork would import it
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from conftest import (
    MODELS,
    find_parser,
    finish,
    kill,
    make_captioned,
    make_images,
    make_masked,
    make_models,
    make_prx,
    make_sdxl,
    make_unet_config,
    metrics,
    start,
    upload,
)  # fmt: skip
from diffusers import DDPMScheduler
from PIL import Image

from diffusion_training.files import delete
from diffusion_training.training import saver
from diffusion_training.training.showing import report

NAMES = ["precompute_latents", "train_unconditional", "train_text_to_image"]
OTHERS = ["train_unconditional --cache_images", "train_text_to_image --train_data_dir"]
# a LoRA for SDXL, from images of several sizes with masks
ADAPTED = "train_text_to_image --rank"
SIZES = "precompute_latents --bucket_step"  # its cache
SIDES = "precompute_latents --resolution"  # several, one cache each
FLOW = "train_flow"
STREAMS = ["precompute_latents --streaming", "train_text_to_image --streaming"]
BEST = "train_text_to_image --rank --save_best"  # and --holdout, which it needs
REMOTE = "train_text_to_image --latents_dir=s3"  # a cache in a bucket, with room for two shards
NEWER = [FLOW, BEST, *STREAMS, REMOTE]
LONG = pytest.mark.long
# fields of a record that depend on the machine
MACHINE_FIELDS = ("images_per_second", "data_wait", "memory_gb", "host_gb", "tflops", "seconds")


def cases(many, quick, slow=None, names=NAMES):
    """Parametrize a test by the number of cases of each target.

    `quick` runs in plain pytest, `slow` in CI, and `many` of each of `names` in the long tests.
    """
    marked = [(quick, ()), (slow or {}, pytest.mark.ci), (dict.fromkeys(names, many), LONG)]
    return pytest.mark.parametrize(
        "name, count",
        [pytest.param(*case, marks=marks) for counts, marks in marked for case in counts.items()],
    )


# ------------------------------------------------------------------- runs and their results


def watch(script, out, happen):
    """Call `happen(event)` before each event of this process, in any thread.

    Events are the functions of the script and of the package, those that save and sample, and all
    changes to files below `out`. A function is reported once per call, whichever modules have
    imported it.
    """
    home, own, watched = os.getpid(), threading.local(), {}

    def report_event(event):
        if os.getpid() == home and not getattr(own, "busy", False):
            own.busy = True
            try:
                happen(re.sub(r"\.tmp-[0-9a-f]{12}-", ".tmp-", event))
            finally:
                own.busy = False

    def audit(name, args):
        if (
            name == "open"
            and isinstance(args[2], int)
            and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            # args[-1]: descriptor of the folder that is being deleted, or -1
            in_folder = name not in ("open", "os.rename") and args[-1] != -1
            if in_folder or f"{args[0]}/".startswith(f"{out}/"):
                report_event(f"{name.removeprefix('os.')} {str(args[0]).removeprefix(str(out))}")

    def report_calls(owner, name, function):
        @functools.wraps(function)
        def reported(*args, **options):
            report_event(function.__qualname__)
            return function(*args, **options)

        setattr(owner, name, watched.setdefault(function, reported))

    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("diffusion_training.")
    ]
    modules = {script.__name__: script, **{module.__name__: module for module in modules}}
    kinds = (
        kind
        for module in modules.values()
        for kind in vars(module).values()
        if isinstance(kind, type)
    )
    for owner in [*modules.values(), *dict.fromkeys(kinds)]:
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and function.__module__ in modules:
                report_calls(owner, name, function)
    for owner, name in [
        (os, "fsync"),
        (torch, "save"),
        (safetensors.torch, "save_file"),
        (DDPMScheduler, "step"),
    ]:
        report_calls(owner, name, getattr(owner, name))
    sys.addaudithook(audit)


def at(event, nth, act):
    """A `happen` that does `act()` at the nth event of a name."""
    counter = itertools.count()
    return lambda name: act() if name == event and next(counter) == nth else None


def contents(folder):
    """{file: its bytes}, without logs, locks, and the speed of the machine."""
    paths = {
        str(path.relative_to(folder)): path
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
    found = {
        n: path.read_bytes()
        for n, path in paths.items()
        if not re.match(r"logs/|image_cache/|report\.html|.*\.lock$", n)
    }
    if "metrics.jsonl" in found:
        records = [json.loads(line) for line in found["metrics.jsonl"].splitlines()]
        found["metrics.jsonl"] = [  # signs in samples: only if the run also trained
            {k: v for k, v in record.items() if not k.endswith(MACHINE_FIELDS)}
            for record in records
            if record.keys() != {"step", "signs"}
        ]
    if "report.json" in found:
        found["report.json"] = json.loads(found["report.json"])
        for name in ("time", "memory in use"):
            del found["report.json"]["facts"][name]
    return found


class Target:
    """A script with a command that takes a second, in its own folder."""

    def __init__(self, name, folder):
        self.name, self.folder, self.out, self.log = (
            name.split()[0],
            folder,
            folder / "out",
            folder / "log",
        )
        self.script, self.wholes = importlib.import_module(self.name), {}
        folder.mkdir()
        several = name in (ADAPTED, SIZES, BEST)
        make_masked(folder / "images", 7) if several else make_captioned(folder / "images", 7)
        models = (
            make_sdxl(folder)
            if several
            else MODELS
            if self.name == "precompute_latents"
            else make_models(folder)
        )
        data = f"""--train_data_dir={folder}/images --cache_dir={folder}/datasets --resolution=16
            --dataloader_num_workers=1"""
        cache = (
            f"--pretrained_model_name_or_path={models} --random_flip --rows_per_shard=2 "
            f"""--batch_size=1
            --latents=sample {"--bucket_step=4" * several} """
            f"{'--resolution 8 16' * (name == SIDES)}"
        )
        training = (
            f"--output_dir={self.out} --train_batch_size=2 --num_train_epochs=2 "
            f"""--learning_rate=1e-3
            --lr_scheduler=cosine --lr_warmup_steps=2 --random_flip --logging_steps=1
            {"--optimizer=muon" if name == FLOW else "--noise_offset=0.1"}
            --report_to=none --validation_steps=2 --checkpointing_steps=3 """
            f"""--checkpoints_total_limit=2
            --resume_from_checkpoint=latest"""
        )
        if self.name == "precompute_latents":
            argv = f"{data} {cache} --output_dir={self.out} {'--streaming' * (name in STREAMS)}"
        elif self.name == "train_unconditional":
            argv = (
                f"{data} {training} --model_config_name_or_path={make_unet_config(folder)} "
                f"""--eval_batch_size=2
                --ddpm_num_inference_steps=2 --save_model_epochs=1 """
                f"{'--cache_images' * (name in OTHERS)}"
            )
        else:
            if name == FLOW:
                training += f" --transformer_config_name_or_path={make_prx(folder / 'prx')}"
                cache += " --model_family=prx"
            argv = f"""{training} --pretrained_model_name_or_path={models} --num_inference_steps=2
                --num_validation_images=1 --validation_prompts=one"""
            if name in (ADAPTED, BEST):
                argv += " --rank=2 --lora_dropout=0.1 --use_dora --optimizer=adafactor"
            argv += " --holdout=0.4 --save_best" * (name == BEST)
            argv += f" --shards_dir={folder}/shards --shards_size=20KB" * (name == REMOTE)
            argv += (
                f" {data}"
                if name in [*OTHERS, *STREAMS]
                else " --latents_dir=s3://attacks/cache"
                if name == REMOTE
                else f" --latents_dir={folder}/cache"
            )
            argv += " --streaming --max_train_steps=8 --shuffle_buffer=3" * (name in STREAMS)
            made = importlib.import_module("precompute_latents")
            making = f"{data} {cache} --output_dir={folder}/cache".split()
            assert finish(start(lambda: made.main(made.parse_args(making)), log=self.log)) == [0], (
                self.log.read_text()
            )
            if name == REMOTE:
                upload(folder / "cache", os.environ["AWS_ENDPOINT_URL"], "attacks")
        self.argv = argv.split()

    def __str__(self):
        return f"{self.name}.py {' '.join(self.argv)}"

    def start(
        self, *argv, happen=None, num_processes=1, victim=None, flags=None, before=lambda: None
    ):
        """Start a run. `happen` gets the events of all processes, or only those of `victim`."""
        self.log.unlink(missing_ok=True)

        def run():
            # The report's curves take most of so short a run, so they are skipped; they are not
            # compared (loss.png is). Their events are still reported.
            save, draw = matplotlib.figure.Figure.savefig, report.draw_curves
            matplotlib.figure.Figure.savefig = lambda *to, **how: (
                how.get("format") == "svg" or save(*to, **how)
            )
            report.draw_curves = functools.wraps(draw)(
                lambda *of, **log: "loss" in of[1] and draw(*of, **log)
            )
            before()
            if happen and victim in (None, int(os.environ.get("RANK", "0"))):
                watch(self.script, self.out, happen)
            self.script.main(self.script.parse_args([*(flags or self.argv), *map(str, argv)]))

        return start(run, num_processes, self.log)

    def run(self, *argv, timeout=100, together=False, **options):
        """Run until all processes end, or with `together` until the victim ends.

        Returns (exit statuses, output).
        """
        pids = self.start(*argv, **options)
        try:
            return finish(
                [pids[options["victim"]]] if together else pids, timeout
            ), self.log.read_text()
        finally:
            kill(pids)  # and the loader's processes

    def whole(self, num_processes=1):
        """Return the files of an undisturbed run, and its moments.

        A moment is (event, number of earlier ones of its name, process).
        """
        if num_processes not in self.wholes:
            notes = [
                self.folder / f"events-{num_processes}-{rank}" for rank in range(num_processes)
            ]

            def note(event):
                with notes[int(os.environ.get("RANK", "0"))].open("a") as file:
                    file.write(f"{event}\n")

            kept = self.out.rename(self.folder / "kept") if self.out.exists() else None
            codes, said = self.run(happen=note, num_processes=num_processes)
            assert set(codes) == {0}, said
            moments, seen = [], collections.Counter()
            for rank, path in enumerate(notes):
                for event in path.read_text().splitlines():
                    moments.append((event, seen[event, rank], rank))
                    seen[event, rank] += 1
            self.wholes[num_processes] = contents(self.out), moments
            shutil.rmtree(self.out)
            if kept:
                kept.rename(self.out)
        return self.wholes[num_processes]

    def moments(self, count, num_processes=1, of_files=False, after=None, until=None):
        """Choose `count` moments of an undisturbed run, of as many kinds as possible, in order.

        The choice goes by each moment's name, because the order of the threads' events varies.
        """
        kinds, moments = collections.defaultdict(list), self.whole(num_processes)[1]
        first = {moment: i for i, moment in reversed(list(enumerate(moments)))}
        chosen = [
            moment
            for i, moment in enumerate(moments)
            if (not after or first.get((after, 0, moment[2]), i) < i)
            and first.get((until, 0, moment[2]), i) >= first[moment]
            and (not of_files or " " in moment[0] or moment[0] in ("fsync", "save", "save_file"))
            and not (of_files and "report." in moment[0])  # a run continues without its report
        ]
        for moment in sorted(chosen, key=lambda each: zlib.crc32(f"{count} {each}".encode())):
            kinds[moment[0]].append(moment)
        spread = [
            moment for row in itertools.zip_longest(*kinds.values()) for moment in row if moment
        ]
        return sorted((spread * count)[:count], key=first.get)

    def judge_same(self, codes, said, reproduction, num_processes=1, left_out="nothing"):
        """Check that the run ended well, with the bits of an undisturbed one.

        Files whose names match `left_out` may differ.
        """
        whole, found = self.whole(num_processes)[0], contents(self.out)
        assert set(codes) == {0} and "Traceback" not in said, f"{reproduction}\n{said}"
        others = [
            n
            for n in {**whole, **found}
            if whole.get(n) != found.get(n) and not re.match(left_out, n)
        ]
        assert not others, f"{reproduction}\n{others} are not those of an undisturbed run\n{said}"

    def judge_sentence(self, codes, said, reproduction, statuses=(1, 2)):
        """Check that the run ended with one sentence and the status of an error."""
        sentences = re.findall(rf"^{self.name}\.py: .*", said, re.M)
        fine = (
            set(codes) <= {*statuses}
            and "Traceback" not in said
            and 1 <= len(sentences) <= len(codes)
        )
        assert fine and len(sentences[0]) < 600, f"{reproduction}\n{codes}\n{said}"
        return sentences[0]

    def judge_either(self, codes, said, reproduction, **options):
        """Check for the same bits or one sentence; returns which it was."""
        if set(codes) == {0}:
            self.judge_same(codes, said, reproduction, **options)
        else:
            self.judge_sentence(codes, said, reproduction)
        return "the same bits" if set(codes) == {0} else "one sentence"

    def judge_sound(self, codes, said, reproduction):
        """Check that the run ended with finite weights and losses, or a sentence; returns which."""
        if codes != [0]:
            return self.judge_sentence(codes, said, reproduction) and "one sentence"
        assert "Traceback" not in said and "Done" in said, f"{reproduction}\n{said}"
        if self.name != NAMES[0]:
            whole = self.out.glob("[tu]*/diffusion_pytorch_model.safetensors")
            path = next(whole, self.out / "pytorch_lora_weights.safetensors")
            numbers = [
                torch.tensor([record.get("loss", 0.0) for record in metrics(self.out)]),
                *safetensors.torch.load_file(path).values(),
            ]
            assert all(number.isfinite().all() for number in numbers), (
                f"{reproduction}\nnot finite\n{said}"
            )
        return "a sound run"


class Verdicts(collections.Counter):
    """Counts how the cases ended, and keeps failures, so that one does not hide the others."""

    def __init__(self):
        super().__init__()
        self.failures = []

    @contextlib.contextmanager
    def case(self, target):
        """Run one case. If it fails, the next one gets a new folder."""
        try:
            yield
        except (AssertionError, TimeoutError) as error:
            text = str(error)
            self.failures.append(
                text if len(text) < 3000 else f"{text[:1000]}\n...\n{text[-2000:]}"
            )
            print(self.failures[-1])
            shutil.rmtree(target.out, ignore_errors=True)

    def show(self, name):
        print(f"{name}: {dict(self)}, {len(self.failures)} failed")
        assert not self.failures, f"{len(self.failures)} failed:\n\n" + "\n\n".join(
            self.failures[:20]
        )


@pytest.fixture(scope="module")
def targets(tmp_path_factory, storage):
    """targets(name): the target, made at its first use."""
    folder = tmp_path_factory.mktemp("targets")
    return functools.cache(lambda name: Target(name, folder / re.sub(r"[^a-z_]+", "-", name)))


# ------------------------------------------------------------------- attacks on a run


def attack(
    target, moments, act, judge, num_processes=1, together=False, left_out="nothing", argv=()
):
    """Run repeatedly in the same folder, each time with `act` before one of the moments.

    After every four attacks one run is left undisturbed. `judge(codes, said, victim, reproduction)`
    returns whether the attack happened, and fails if the run ended badly.
    """
    assert moments
    verdicts, so_far = Verdicts(), []
    shutil.rmtree(target.out, ignore_errors=True)
    for number, (event, nth, victim) in enumerate(moments, 1):
        so_far = [*so_far, (event, nth)] if target.out.exists() else [(event, nth)]
        reproduction = (
            f"{target}\n{act.__name__} in process {victim} of {num_processes}, before {so_far}"
        )
        options = {"num_processes": num_processes, "happen": at(event, nth, act), "victim": victim}
        with verdicts.case(target):
            codes, said = target.run(*argv, together=together, **options)
            verdicts["attacked"] += judge(codes, said, victim, reproduction)
            if set(codes) != {0} and (number % 4 == 0 or number == len(moments)):
                codes, said = target.run(num_processes=num_processes)
            if set(codes) == {0}:
                target.judge_same(codes, said, reproduction, num_processes, left_out)
                verdicts["the same bits in the end"] += 1
                shutil.rmtree(target.out)
    verdicts.show(f"{target.name}, {len(moments)} times {act.__name__} with {num_processes}")
    assert verdicts["attacked"] >= len(moments) / 2


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@cases(
    100,
    {NAMES[0]: 4},
    {NAMES[1]: 4},
    [*NAMES, *OTHERS, ADAPTED, SIZES, SIDES, FLOW, *STREAMS, BEST, REMOTE],
)
def test_runs_killed_at_any_event_resume_to_the_same_bits(targets, name, count):
    target = targets(name)
    attack(target, target.moments(count), die, lambda codes, *_: codes == [-signal.SIGKILL])


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, *OTHERS, ADAPTED, FLOW, *STREAMS])
def test_runs_killed_at_random_times_resume_to_the_same_bits(targets, name):
    """The kills also come between events, for example in the middle of a write."""
    target, rng, verdicts, begin = targets(name), random.Random(0), Verdicts(), time.time()
    target.run()
    duration = time.time() - begin
    for _ in range(12):
        shutil.rmtree(target.out)
        moments = [rng.uniform(0, duration) for _ in range(4)]
        for moment in moments:
            pids = target.start()
            time.sleep(moment)
            kill(pids)
        with verdicts.case(target):
            target.judge_same(*target.run(), f"{target}\nkilled after {moments} seconds")
            verdicts["the same bits after four kills"] += 1
    verdicts.show(name)


@cases(25, {}, {NAMES[1]: 1})
def test_two_process_runs_resume_after_one_or_both_are_killed(targets, name, count):
    """If one process is killed after they connected, the other one ends itself with a sentence."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        if codes[victim] == -signal.SIGKILL:
            said = re.sub(rf"\[rank{victim}\]:.*\n", "", said)  # from its loader, which outlives it
            if codes[1 - victim] == 0:  # the victim was killed while it printed its last words
                target.judge_same([0], said, reproduction, 2)
            else:
                target.judge_sentence([codes[1 - victim]], said, reproduction, [75])
        return codes[victim] == -signal.SIGKILL

    attack(
        target,
        target.moments(count, 2),
        die,
        lambda codes, *_: codes == [-signal.SIGKILL],
        2,
        together=True,
    )
    attack(target, target.moments(count, 2, after="threads_are_default"), die, judge, 2)


@cases(50, {}, {NAMES[1]: 2}, [*NAMES, *OTHERS, *NEWER])
def test_runs_stopped_by_a_signal_at_any_event_save_and_resume(targets, name, count):
    """SIGTERM and SIGINT give a sentence, the right status and a checkpoint, and lose no step."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        assert set(codes) <= {0, 130, 143} and "Traceback" not in said, (
            f"{reproduction}\n{codes}\n{said}"
        )
        assert (codes == [0]) != ("Stopped by" in said), f"{reproduction}\n{codes}\n{said}"
        return codes != [0]

    def stop():
        os.kill(os.getpid(), signal.SIGTERM if os.getpid() % 2 else signal.SIGINT)

    attack(
        target,
        target.moments(count, after="make_launch"),
        stop,
        judge,
        left_out="checkpoint-(?!8/)",
    )


@cases(25, {}, {NAMES[1]: 1}, [*NAMES[:2], *OTHERS])
def test_a_killed_data_loader_process_ends_the_run_with_one_error(targets, name, count):
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        return codes != [0] and bool(target.judge_sentence(codes, said, reproduction))

    def kill_loader():
        for process in multiprocessing.active_children():
            process.kill()

    if name == NAMES[0]:  # the loader may have read all of the data after the first batch
        return attack(
            target, target.moments(count, after="mark_time", until="encode"), kill_loader, judge
        )
    # more epochs change the schedule, and so the final weights
    moments = target.moments(count, after="load_batches")
    attack(target, moments, kill_loader, judge, left_out=".*", argv=["--num_train_epochs=8"])


@cases(100, {NAMES[0]: 4}, {}, [*NAMES, *OTHERS, *NEWER])
def test_disk_errors_at_any_file_change_end_with_one_sentence(targets, name, count):
    """No space, over quota, device error, no permission."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        return codes != [0] and bool(target.judge_sentence(codes, said, reproduction))

    def raise_disk_error():
        number = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES][os.getpid() % 4]
        raise OSError(number, os.strerror(number))

    # a run goes on without its report
    moments = target.moments(count, of_files=True)
    attack(target, moments, raise_disk_error, judge, left_out="report.json")


@cases(100, {NAMES[0]: 4}, {}, [*NAMES, *OTHERS, *NEWER])
def test_lack_of_memory_threads_or_file_descriptors_skips_no_row(targets, name, count):
    """The errors come before any call or file change. A rerun ends with the same bits."""
    target, left_out = targets(name), r"report\.(html|json)|.*\.(args|png)"

    def judge(codes, said, victim, reproduction):
        return bool(target.judge_either(codes, said, reproduction, left_out=left_out))

    def raise_shortage():
        number = [errno.EMFILE, errno.ENFILE, errno.ENOMEM][os.getpid() % 3]
        errors = [
            MemoryError(),
            RuntimeError("can't start new thread"),
            OSError(number, os.strerror(number)),
        ]
        raise errors[os.getpid() // 3 % 3]

    attack(target, target.moments(count, after="main"), raise_shortage, judge, left_out=left_out)


@cases(12, {}, {NAMES[1]: 512}, [*NAMES, FLOW, BEST])
def test_a_full_disk_at_any_write_ends_with_one_sentence(targets, name, count):
    """On a disk that grows by `count` KiB after each failure, reruns end with the same bits."""
    target, verdicts = targets(name), Verdicts()
    target.whole()
    shutil.rmtree(target.out, ignore_errors=True)
    target.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", target.out]
    if os.getuid() or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("only root can mount a disk")
    try:
        for size in itertools.count(4, count):
            subprocess.run(["mount", "-o", f"remount,size={size}k", target.out], check=True)
            reproduction = f"{target}\non a disk that grew to {size} KiB, {count} each time"
            with verdicts.case(target):
                codes, said = target.run()
                verdicts[target.judge_either(codes, said, reproduction)] += 1
            if codes == [0]:
                break
        verdicts.show(f"{name}, a disk of 4 to {size} KiB")
    finally:
        subprocess.run(["umount", "-l", target.out], check=True)


# ------------------------------------------------------------------- damaged files


def damage(path, how, other):
    """Damage a file in one of six ways; "swap" exchanges it with the file `other`."""
    data = path.read_bytes()
    if how in ("gone", "folder"):
        path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif how != "gone":
        flipped = bytearray(data or b"\0")
        flipped[random.Random(len(data)).randrange(len(flipped))] ^= 1
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flip": flipped}[how])


@cases(10**9, {}, {NAMES[0]: 2, NAMES[1]: 2}, [*NAMES, "its cache", ADAPTED, FLOW, BEST])
def test_damaged_files_are_repaired_or_refused(targets, name, count):
    """Damage each file in six ways, mostly large files first.

    Cut or empty it, delete it, replace it with the next file or a folder, or flip a bit.
    """
    rng, target, verdicts = (
        random.Random(0),
        targets(NAMES[2] if name == "its cache" else name),
        Verdicts(),
    )
    steps = [event for event, *_ in target.whole()[1]].count("train_step")
    shutil.rmtree(target.out, ignore_errors=True)
    if name == NAMES[0]:
        target.run()
    else:  # with checkpoints, which are written at once, and one step left to do
        write_at_once = lambda: setattr(saver, "make_checkpoint_copy", lambda *args: None)
        codes, _ = target.run(happen=at("train_step", steps - 1, die), before=write_at_once)
        assert codes == [-signal.SIGKILL]
    folder, good = (
        target.folder / ("cache" if name == "its cache" else "out"),
        target.folder / "good",
    )
    for place in (target.out, folder):
        shutil.copytree(place, good / place.name, dirs_exist_ok=True)
    sizes = {
        file: (folder / file).stat().st_size + 1
        for file in contents(folder)
        if not file.endswith(".png")
    }
    names = sorted(sizes)
    trials = [
        (file, how) for file in names for how in ("cut", "empty", "flip", "swap", "gone", "folder")
    ]
    trials.sort(key=lambda trial: math.log(rng.random()) / sizes[trial[0]], reverse=True)
    for file, how in trials[:count]:
        for place in (target.out, folder):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(good / place.name, place)
        other = names[(names.index(file) + 1) % len(names)]
        damage(folder / file, how, folder / other)
        # a resumed run does not repeat earlier records, and a report lists what a cache skipped
        damaged = [file, other] if how == "swap" else [file]
        # no run reads the LoRA files that a checkpoint has for other programs
        left_out = "checkpoint-3/|checkpoint-6/pytorch_lora_weights"
        if "metrics.jsonl" in damaged:
            left_out += "|metrics.jsonl|loss.png|README.md"
        if {"skipped.jsonl", "report.json"} & {*damaged}:
            left_out += "|report.json"
        with verdicts.case(target):
            codes, said = target.run()
            reproduction = f"{target}\n{how} {folder / file} (the next is {other})"
            verdicts[target.judge_either(codes, said, reproduction, left_out=left_out)] += 1
            if codes == [0]:
                continue
            # the run has lost nothing: with the file as it was, the same command ends well
            for each in damaged:
                delete(folder / each)
                (folder / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(good / folder.name / each, folder / each)
            codes, again = target.run()
            target.judge_same(codes, said + again, reproduction, left_out="checkpoint-3/")
    for place in (target.out, folder):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good / folder.name, folder)
    shutil.rmtree(good)
    verdicts.show(name)


# ------------------------------------------------------------------- odd input


FORMATS = {
    "PNG": "1 L LA P RGB RGBA I;16",
    "JPEG": "L RGB CMYK",
    "WEBP": "RGB RGBA",
    "GIF": "L P",
    "BMP": "1 L P RGB",
    "TIFF": "1 L LA P RGB RGBA CMYK YCbCr LAB I;16",
    "PPM": "1 L RGB",
    "TGA": "L RGB RGBA",
    "JPEG2000": "L RGB RGBA",
}


def make_file(rng):
    """Return the bytes of an image file, perhaps broken, and whether the scripts must use it."""
    format = rng.choice(list(FORMATS))
    mode = rng.choice(FORMATS[format].split())
    size = rng.choice(
        [(1, 1), (1, 40), (90, 2), (rng.randint(2, 60), rng.randint(2, 60)), (500, 9)]
    )
    picture = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
    if mode in ("LA", "LAB", "I;16"):  # Pillow does not convert to these
        picture = Image.new(mode, size, {"LA": (9, 100), "LAB": (50, 9, 200), "I;16": 60000}[mode])
    options, buffer, exif = {}, io.BytesIO(), Image.Exif()
    if format in ("JPEG", "PNG", "WEBP", "TIFF") and rng.random() < 0.5:
        exif[0x0112] = rng.randint(0, 10)  # 0, 9 and 10 are not valid
        options["exif"] = exif.tobytes()
    if format == "JPEG":
        options |= {"progressive": rng.random() < 0.5, "quality": rng.choice([1, 50, 100])}
    (picture if picture.mode == mode else picture.convert(mode)).save(buffer, format, **options)
    data = buffer.getvalue()
    fault = rng.choice(["none"] * 12 + ["cut", "flips", "head", "tail", "zeros", "other", "gone"])
    other = [
        b"",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage",
        b"<svg/>",
        b"GIF89a",
        b"\xff\xd8\xff",
    ]
    flipped, cut = bytearray(data), rng.randrange(len(data))
    for _ in range(5):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return {
        "none": data,
        "cut": data[:cut],
        "flips": bytes(flipped),
        "head": rng.randbytes(9) + data[9:],
        "gone": None,
        "tail": data + rng.randbytes(50),
        "zeros": data[:cut] + bytes(len(data) - cut),
        "other": rng.choice(other),
    }[fault], fault in ("none", "tail")


def make_caption(rng):
    """Return a caption as data sets have them: empty, long, odd characters, or None."""
    pieces = [
        "a red bicycle",
        "ein Füchslein",
        "红色自行车",
        "عربي",
        "\U0001f469\u200d\U0001f467",
        "\u202eabc",
        "Z\u0335\u0327a",
        "\0",
        "\x1b[31m",
        "\n\t\r",
        "<|endoftext|>",
        "'",
        '"',
        "{",
        "%s",
        "\\u0000",
        "\ufeff",
        "\uffff",
        "1e999",
    ]
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice([None, "", " ", "\0", "a"])
    if kind == 2:
        return rng.choice(pieces) * rng.choice([100, 20000])
    if kind == 3:
        return "".join(
            chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
            for _ in range(30)
        )
    return " ".join(rng.choices(pieces, k=rng.randint(1, 9)))


@pytest.mark.parametrize(
    "count", [pytest.param(80, marks=pytest.mark.ci), pytest.param(1000, marks=pytest.mark.long)]
)
def test_odd_images_and_captions_are_used_or_listed_as_skipped(targets, tmp_path, count):
    rng = random.Random(count)
    files, captions = (
        [make_file(rng) for _ in range(count)],
        [make_caption(rng) for _ in range(count)],
    )
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    image = pa.array(
        [{"bytes": data, "path": None} if data is not None else None for data, _ in files], image
    )
    (tmp_path / "data").mkdir()
    table = pa.table({"image": image, "text": pa.array(captions, pa.string())})
    pq.write_table(table, tmp_path / "data/train.parquet")
    data = [
        f"--train_data_dir={tmp_path}/data",
        "--image_column=image",
        f"--output_dir={tmp_path}/out",
    ]
    codes, said = targets(NAMES[0]).run(
        *data, "--max_skipped=1", "--rows_per_shard=100", "--batch_size=8"
    )
    assert codes == [0] and "Traceback" not in said, said
    listed = {
        entry["row"]: entry["reason"]
        for entry in map(json.loads, (tmp_path / "out/skipped.jsonl").open())
    }
    used, rows = (
        [i for i in range(count) if i not in listed],
        datasets.load_from_disk(str(tmp_path / "out")),
    )
    texts = [captions[i].removeprefix("\ufeff").strip() for i in used]
    assert rows["text"] == texts and rows["key"] == [f"row {i}" for i in used]
    wrong = {i: listed[i] for i in listed if files[i][1] and captions[i] is not None}
    assert not wrong and all(listed.values()), wrong
    assert {i for i in range(count) if captions[i] is None or files[i][0] is None} <= set(listed)
    print(
        f"{count} rows: {len(used)} used, "
        f"{len(listed)} listed with {len(set(listed.values()))} reasons"
    )
    prompts = [text for text in captions if text and "\0" not in text][:5]
    for name in NAMES[1:]:
        shutil.rmtree(tmp_path / "out")
        target = targets(name)
        flags = [flag for flag in target.argv if "--latents_dir" not in flag]
        more = [] if name == NAMES[1] else ["--resolution=16", "--validation_prompts", *prompts]
        more += [
            "--max_train_steps=2",
            f"--train_batch_size={-(-count // 2)}",
            "--validation_steps=9",
        ]
        codes, said = target.run(*data, *more, flags=flags, timeout=900)
        assert codes == [0] and "Traceback" not in said, said
        record = [record for record in metrics(tmp_path / "out") if "loss" in record][-1]
        bad = [
            row
            for row, reason in listed.items()
            if name == NAMES[2] or "caption" not in reason or not files[row][1]
        ]
        assert (
            math.isfinite(record["loss"])
            and record["skipped_images"] == said.count("Skipped row") >= len(bad) - 9
        )
        assert record["skipped_images"] <= len(listed)


@pytest.mark.long
def test_caption_columns_of_any_type_are_used_or_refused(targets, tmp_path):
    """Rows are used or listed, or one sentence names the type of the column."""
    make_images(tmp_path / "images", 6)
    images = [
        {"bytes": (tmp_path / f"images/{i}.png").read_bytes(), "path": None} for i in range(6)
    ]
    texts = {
        "numbers": pa.array(range(6)),
        "lists": pa.array([["a", "b"], [], None, ["c"], [""], [None]]),
        "bytes": pa.array([b"a"] * 6),
        "codes": pa.array(["a", "b"] * 3).dictionary_encode(),
        "large": pa.array(["a", None] * 3, pa.large_string()),
        "nothing": pa.nulls(6),
    }
    for kind, column in texts.items():
        (tmp_path / kind).mkdir()
        pq.write_table(
            pa.table({"image": pa.array(images), "text": column}), tmp_path / kind / "a.parquet"
        )
    lines = [
        json.dumps({"file_name": f"{i}.png", "text": text})
        for i, text in enumerate(["\ud800", "a"] * 3)
    ]
    Path(make_images(tmp_path / "surrogates", 6), "metadata.jsonl").write_text("\n".join(lines))
    target, verdicts = targets(NAMES[0]), Verdicts()
    for kind in [*texts, "surrogates"]:
        out = tmp_path / f"out-{kind}"
        with verdicts.case(target):
            codes, said = target.run(
                f"--train_data_dir={tmp_path / kind}", f"--output_dir={out}", "--max_skipped=1"
            )
            if codes != [0]:
                verdicts["one sentence"] += bool(target.judge_sentence(codes, said, kind))
                continue
            used, listed = (
                json.loads((out / "cache.json").read_text())["rows"],
                (out / "skipped.jsonl").open(),
            )
            assert "Traceback" not in said and used + len(list(listed)) == 6, f"{kind}\n{said}"
            verdicts["used or listed"] += 1
    verdicts.show("kinds of columns")


@cases(10**9, {}, {}, [*NAMES, FLOW])
def test_numeric_flags_at_their_limits_are_refused_or_work(targets, name, count, capsys):
    """Run one step with each flag at its limits, if the parser accepts the value.

    Values are 0, -1, nan, inf, 1e30, 10**30 and the flag's bounds.
    """
    target, taken, verdicts = targets(name), set(), Verdicts()
    only_work = {
        "resolution",
        "eval_batch_size",
        "num_validation_images",
        "dataloader_num_workers",
        "max_train_steps",
    }
    for action in find_parser(target.script.parse_args)._actions:
        low, high, kind = getattr(action.type, "bounds", (0, 0, None))
        for value in (
            ["0", "-1", "nan", "inf", "-inf", "1e30", str(10**30), kind(low), kind(high)]
            if kind
            else []
        ):
            flag = f"--{action.dest}={value}"
            try:
                target.script.parse_args([*target.argv, flag])
                taken |= {flag} if action.dest not in only_work or value != high else set()
                verdicts["taken"] += 1
            except SystemExit as end:
                assert end.code == 2 and len(capsys.readouterr().err.splitlines()[-1]) < 300, flag
                verdicts["refused"] += 1
    for flag in random.Random(0).sample(sorted(taken), min(count, len(taken))):
        shutil.rmtree(target.out, ignore_errors=True)
        with verdicts.case(target):
            codes, said = target.run(
                *["--max_train_steps=1"][: name != NAMES[0]], flag, before=limit_memory
            )
            verdicts[target.judge_sound(codes, said, f"{target} {flag}")] += 1
    shutil.rmtree(target.out, ignore_errors=True)
    verdicts.show(name)


def limit_memory():
    """Allow four GiB more than now, because a large value could end other programs."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + 2**32
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_memory_and_ignore_warnings():
    """Ignore libraries' warnings of an unusual setting, which pytest would turn into errors."""
    warnings.simplefilter("ignore", FutureWarning)
    limit_memory()


@cases(150, {NAMES[2]: 3}, {}, [*NAMES, FLOW])
def test_changed_values_in_model_configs_are_refused_or_work(targets, name, count):
    """Replace values in the models' JSON files with null, 0, -1, "x", [], true, a large number."""
    target, verdicts = targets(name), Verdicts()
    folder, copied = (
        target.folder / {NAMES[1]: "tiny-unet", NAMES[2]: "sd", FLOW: "prx"}.get(name, "none"),
        target.folder / "odd",
    )
    folder = folder if folder.exists() else MODELS
    trials = [
        (path.relative_to(folder), key, value)
        for path in sorted(folder.rglob("*config.json"))
        for key, old in json.loads(path.read_text()).items()
        for value in (None, 0, -1, "x", [], True, 1000)
        if not key.startswith("_name") and (value != old or type(value) is not type(old))
    ]
    for file, key, value in random.Random(1).sample(trials, min(count, len(trials))):
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder, copied)
        (copied / file).write_text(
            json.dumps({**json.loads((copied / file).read_text()), key: value})
        )
        flags = [
            flag.replace(str(folder), str(copied))
            for flag in target.argv
            if "--latents_dir" not in flag
        ]
        flags += [f"--train_data_dir={target.folder}/images", "--resolution=16"] + [
            "--max_train_steps=1"
        ][: name != NAMES[0]]
        shutil.rmtree(target.out, ignore_errors=True)
        with verdicts.case(target):
            codes, said = target.run(flags=flags, before=limit_memory_and_ignore_warnings)
            verdicts[
                target.judge_sound(codes, said, f"{target}\n{file}: {key} = {json.dumps(value)}")
            ] += 1
    shutil.rmtree(target.out, ignore_errors=True)
    verdicts.show(f"{name}, {len(trials)} settings")


# ------------------------------------------------------------------- long runs


@pytest.mark.long
@pytest.mark.parametrize("count", [300, 20000])
def test_memory_open_files_and_step_time_do_not_grow_with_steps(targets, count):
    """They are measured in ten parts of a run."""
    target, path, step = targets(NAMES[1]), targets(NAMES[1]).folder / "growth", itertools.count()

    def note(event):
        if event == "train_step" and next(step) % (count // 10) == 0:
            memory = int(Path("/proc/self/statm").read_text().split()[1]) / 256
            with path.open("a") as file:
                file.write(f"{memory} {len(os.listdir('/proc/self/fd'))} {time.process_time()}\n")

    shutil.rmtree(target.out, ignore_errors=True)
    path.unlink(missing_ok=True)
    more = [
        f"--max_train_steps={count}",
        "--validation_steps=1000000",
        "--save_model_epochs=1000000",
    ]
    codes, said = target.run(
        *more,
        f"--checkpointing_steps={count // 5}",
        "--logging_steps=10",
        happen=note,
        timeout=9000,
    )
    assert codes == [0], said
    memory, files, times = zip(
        *[map(float, line.split()) for line in path.read_text().splitlines()], strict=True
    )
    steps = [10000 * (after - before) / count for before, after in itertools.pairwise(times)]
    print(
        f"{count} steps: {memory[2]:.0f} to {memory[-1]:.0f} MiB, "
        f"{files[2]:.0f} to {files[-1]:.0f} open files, "
        f"{steps[2]:.1f} to {steps[-1]:.1f} ms of a core a step"
    )
    assert (
        max(memory[-3:]) < memory[2] + 20
        and files[-1] <= files[2] + 1
        and min(steps[-3:]) < 1.5 * min(steps[:3])
    )
