"""Attack the scripts at every moment and with whatever people have, and judge what is left.

There are two verdicts: the same bits as if nothing had happened, or one sentence and nothing lost. Each attack is one
function for its quick part and, behind the marker `long`, a larger number of the same cases. What a run does is told
as events (see `watch`), and an attack comes at the n-th event of a kind: so a failure names what repeats it.
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
from pathlib import Path

import datasets
import matplotlib.figure  # noqa: F401  # for the forks, which would each import it
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from conftest import (
    MODELS,
    checkpoints,
    finish,
    kill,
    make_captioned,
    make_images,
    make_models,
    make_unet_config,
    metrics,
    start,
    weights,
)  # fmt: skip
from diffusers import DDPMScheduler
from PIL import Image
from test_shared_blocks import parser_of

NAMES = ["precompute_latents", "train_unconditional", "train_text_to_image"]


def cases(quick, many):
    """How many cases: the test's quick part, and its long one."""
    return pytest.mark.parametrize("count", [quick, pytest.param(many, marks=pytest.mark.long)])


# ------------------------------------------------------------------- a run, what happens to it, and the verdict


def watch(script, out, happen):
    """From here on call `happen(event)` before what this process's main thread does.

    Events are the functions of the script, of sampling and of saving, and whatever changes files below `out`.
    """
    home, main, busy = os.getpid(), threading.get_ident(), []

    def tell(event):
        if os.getpid() == home and threading.get_ident() == main and not busy:
            busy.append(event)
            try:
                happen(event)
            finally:
                busy.clear()

    def plain(path):
        return re.sub(r"\.tmp-[0-9a-f]{12}-", ".tmp-", path.removeprefix(str(out)))

    def audit(name, args):
        if name == "open" and isinstance(args[2], int) and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if name in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            path, below = str(args[0]), name in ("os.remove", "os.rmdir", "os.mkdir") and args[-1] != -1
            if below or path.startswith(f"{out}/") or path == str(out):  # or in a folder that is being deleted
                tell(f"{name.removeprefix('os.')} {plain(path)}")

    def tell_of(owner, name):
        function = getattr(owner, name)

        @functools.wraps(function)
        def told(*args, **options):
            tell(function.__name__)
            return function(*args, **options)

        setattr(owner, name, told)

    for owner in [script, *(kind for kind in vars(script).values() if isinstance(kind, type))]:
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and function.__module__ == script.__name__ and name.isidentifier():
                tell_of(owner, name)
    for owner, name in [(os, "fsync"), (torch, "save"), (safetensors.torch, "save_file"), (DDPMScheduler, "step")]:
        tell_of(owner, name)
    sys.addaudithook(audit)


def is_of_files(event):
    return " " in event or event in ("fsync", "save", "save_file")


def at(event, nth, act):
    """For `happen`: do `act()` at the nth event of a name."""
    counter = itertools.count()
    return lambda name: act() if name == event and next(counter) == nth else None


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def contents(folder):
    """{file: its bytes}, without logs, locks and the times in metrics.jsonl."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith(("logs/", "image_cache/")) and path.suffix != ".lock":
            found[name] = path.read_bytes()
    if "metrics.jsonl" in found:
        records = [json.loads(line) for line in found["metrics.jsonl"].splitlines()]
        times = ("images_per_second", "data_wait")
        found["metrics.jsonl"] = [{k: v for k, v in record.items() if k not in times} for record in records]
    return found


class Target:
    """A script with a command of its own that takes a second, in a folder of its own."""

    def __init__(self, name, folder):
        self.name, self.script, self.folder, self.out = name, importlib.import_module(name), folder, folder / "out"
        self.wholes, self.log, self.runs = {}, folder / "log", 0
        folder.mkdir()
        make_captioned(folder / "images", 7)
        data = [f"--train_data_dir={folder}/images", f"--cache_dir={folder}/datasets", "--resolution=16"]
        data.append("--dataloader_num_workers=1")
        cache = [f"--pretrained_model_name_or_path={MODELS}", "--random_flip", "--rows_per_shard=2", "--batch_size=1",
                 "--latents=sample"]  # fmt: skip
        training = """--train_batch_size=2 --num_train_epochs=2 --learning_rate=1e-3 --lr_scheduler=cosine
            --random_flip --lr_warmup_steps=2 --logging_steps=1 --report_to=none --checkpointing_steps=3
            --checkpoints_total_limit=2 --validation_steps=2 --noise_offset=0.1 --resume_from_checkpoint=latest"""
        training = training.split()
        if name == "precompute_latents":
            self.argv = [*data, *cache]
        elif name == "train_unconditional":
            self.argv = [*data, f"--model_config_name_or_path={make_unet_config(folder)}", *training]
            self.argv += ["--ddpm_num_inference_steps=2", "--eval_batch_size=2", "--save_model_epochs=1"]
        else:
            made = importlib.import_module("precompute_latents")
            argv = [*data, *cache, f"--output_dir={folder}/cache"]
            assert finish(start(lambda: made.main(made.parse_args(argv)), log=self.log)) == [0], self.log.read_text()
            self.argv = [f"--pretrained_model_name_or_path={make_models(folder)}", f"--latents_dir={folder}/cache"]
            self.argv += [
                *training,
                "--num_inference_steps=2",
                "--num_validation_images=1",
                "--validation_prompts=one",
            ]
        self.argv.append(f"--output_dir={self.out}")

    def __str__(self):
        return f"{self.name}.py {' '.join(self.argv)}"

    def start(self, *argv, happen=None, num_processes=1, victim=None, flags=None, before=None):
        """Begin a run; `happen` is told what the processes do, or the `victim` alone."""
        self.log.unlink(missing_ok=True)
        self.runs += 1

        def run():
            if before:
                before()
            if happen and victim in (None, int(os.environ.get("RANK", "0"))):
                watch(self.script, self.out, happen)
            self.script.main(self.script.parse_args([*(flags or self.argv), *map(str, argv)]))

        return start(run, num_processes, self.log)

    def run(self, *argv, timeout=60, together=False, **options):
        """A run to its end (`together`: that of the victim). Returns (exit statuses, what was printed)."""
        pids = self.start(*argv, **options)
        try:
            if together:
                return finish([pids[options["victim"]]], timeout), self.log.read_text()
            return finish(pids, timeout), self.log.read_text()
        finally:
            kill(pids)  # and the loader's processes

    def whole(self, num_processes=1):
        """What an undisturbed run leaves, and its moments: (event, how often it came before, in which process)."""
        if num_processes not in self.wholes:
            moments, notes = [], self.folder / f"events-{num_processes}-"

            def note(event):
                with open(f"{notes}{os.environ.get('RANK', '0')}", "a") as file:
                    file.write(f"{event}\n")

            kept = self.out.rename(self.folder / "kept") if self.out.exists() else None
            codes, said = self.run(happen=note, num_processes=num_processes)
            assert set(codes) == {0}, said
            for rank in range(num_processes):
                seen = collections.Counter()
                for event in Path(f"{notes}{rank}").read_text().splitlines():
                    moments.append((event, seen[event], rank))
                    seen[event] += 1
            self.wholes[num_processes] = contents(self.out), moments
            shutil.rmtree(self.out)
            if kept:
                kept.rename(self.out)
        return self.wholes[num_processes]

    def moments(self, count, num_processes=1, of_files=False, after=None):
        """`count` moments of an undisturbed run in their order, of as many kinds as there are."""
        kinds, rng, moments = collections.defaultdict(list), random.Random(count), self.whole(num_processes)[1]
        chosen = [moment for i, moment in enumerate(moments) if not after or (after, 0, moment[2]) in moments[:i]]
        chosen = [moment for moment in chosen if is_of_files(moment[0]) or not of_files]
        for moment in rng.sample(chosen, len(chosen)):
            kinds[moment[0]].append(moment)
        spread = [moment for row in itertools.zip_longest(*kinds.values()) for moment in row if moment]
        return sorted((spread * count)[:count], key=moments.index)

    def judge_same(self, codes, said, reproduction, num_processes=1, stopped=False):
        """The run ended well, with the bits of an undisturbed one (if `stopped`, it has other checkpoints besides)."""
        whole, found = self.whole(num_processes)[0], contents(self.out)
        assert set(codes) == {0}, f"{reproduction}\n{said}"
        last = max((int(name.split("-")[1]) for name in checkpoints(self.out)), default=0)
        others = [name for name in {**whole, **found} if whole.get(name) != found.get(name)]
        others = [name for name in others if not stopped or not re.match(rf"checkpoint-(?!{last}/)", name)]
        assert not others, f"{reproduction}\n{others} are not those of an undisturbed run\n{said}"

    def judge_sentence(self, codes, said, reproduction):
        """The run has ended with one sentence and the status of an error."""
        assert set(codes) <= {1, 2}, f"{reproduction}\n{codes}\n{said}"
        assert "Traceback" not in said, f"{reproduction}\n{said}"
        sentences = re.findall(rf"^(?:{self.name}|\S*pytest\S*|__main__)\.py: .*", said, re.M)
        assert 1 <= len(sentences) <= len(codes), f"{reproduction}\n{said}"
        assert len(sentences[0]) < 500, f"{reproduction}\n{said}"
        return sentences[0]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Each script's target, made when it is first asked for."""
    made, folder = {}, tmp_path_factory.mktemp("targets")

    def target(name):
        if name not in made:
            made[name] = Target(name, folder / name)
        return made[name]

    return target


# ------------------------------------------------------------------- what happens to a run


class Failures(list):
    """What went wrong in some cases, so that one does not hide the others."""

    @contextlib.contextmanager
    def noted(self, target):
        """A case, which if it fails leaves a new folder to the next one."""
        try:
            yield
        except (AssertionError, TimeoutError) as error:
            self.append(str(error))
            shutil.rmtree(target.out, ignore_errors=True)

    def show(self, cases):
        """Fail if any case did."""
        assert not self, f"{len(self)} of {cases} cases:\n\n" + "\n\n".join(text[:1500] for text in self[:9])


def attack(target, moments, act, judge, num_processes=1, stopped=False, together=False):
    """Runs in the same folder in which `act` happens at one moment each; after four of them one is left alone.

    `judge(codes, said, victim, reproduction)` tells whether the attack came, and fails if the run ended badly.
    """
    came, failed = 0, Failures()
    shutil.rmtree(target.out, ignore_errors=True)
    for number, (event, nth, victim) in enumerate(moments, 1):
        reproduction = f"{target}\n{act.__name__} in process {victim} of {num_processes}, before {moments[:number]}"
        options = {"num_processes": num_processes, "happen": at(event, nth, act), "victim": victim}
        with failed.noted(target):
            codes, said = target.run(together=together, **options)
            came += judge(codes, said, victim, reproduction)
            if set(codes) != {0} and (number % 4 == 0 or number == len(moments)):
                codes, said = target.run(num_processes=num_processes)
            if set(codes) == {0}:
                target.judge_same(codes, said, reproduction, num_processes, stopped)
                shutil.rmtree(target.out)
    print(f"{target.name}, {act.__name__} with {num_processes}: {came} of {len(moments)} attacks came")
    failed.show(len(moments))
    assert came >= len(moments) / 2


@pytest.mark.parametrize("name", NAMES)
@cases(6, 100)
def test_killed_at_any_event_the_same_command_ends_with_the_same_bits(targets, name, count):
    target = targets(name)
    attack(target, target.moments(count), die, lambda codes, *_: codes == [-signal.SIGKILL])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_any_time_the_same_command_ends_with_the_same_bits(targets, name):
    """Also in the middle of what is no event, such as a write."""
    target, rng = targets(name), random.Random(0)
    begin = time.time()
    target.run()
    duration = time.time() - begin
    for _ in range(12):
        shutil.rmtree(target.out)
        moments = [rng.uniform(0, duration) for _ in range(4)]
        for moment in moments:
            pids = target.start()
            time.sleep(moment)
            kill(pids)
        target.judge_same(*target.run(), f"{target}\nkilled after {moments} seconds")


@pytest.mark.parametrize("name", NAMES)
@cases(1, 25)
def test_two_processes_killed_or_one_of_them(targets, name, count):
    """One: once they have met, the other ends by itself, with a sentence."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        if codes[victim] == -signal.SIGKILL:
            target.judge_sentence([codes[1 - victim]], said, reproduction)
        return codes[victim] == -signal.SIGKILL

    attack(target, target.moments(count, 2), die, lambda codes, *_: codes == [-signal.SIGKILL], 2, together=True)
    attack(target, target.moments(count, 2, after="threads_are_default"), die, judge, 2)


@pytest.mark.parametrize("name", NAMES)
@cases(4, 50)
def test_stopped_at_any_event_it_goes_on(targets, name, count):
    """SIGTERM and SIGINT: a sentence, the right status, and nothing lost."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        assert set(codes) <= {0, 130, 143} and "Traceback" not in said, f"{reproduction}\n{codes}\n{said}"
        assert (codes == [0]) != ("Stopped by" in said), f"{reproduction}\n{codes}\n{said}"
        return codes != [0]

    def stop():
        os.kill(os.getpid(), signal.SIGTERM if os.getpid() % 2 else signal.SIGINT)

    attack(target, target.moments(count, after="make_accelerator"), stop, judge, stopped=True)


@pytest.mark.parametrize("name", NAMES[:2])
@cases(2, 25)
def test_a_killed_loader_process_at_any_event(targets, name, count):
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        return codes != [0] and bool(target.judge_sentence(codes, said, reproduction))

    def kill_loader():
        for process in multiprocessing.active_children():
            process.kill()

    attack(target, target.moments(count, after="load_batches"), kill_loader, judge)


@pytest.mark.parametrize("name", NAMES)
@cases(4, 100)
def test_an_error_of_the_disk_at_any_change_of_a_file_is_one_sentence(targets, name, count):
    """No space, over quota, a broken device, no right to: where files are opened, renamed, synced or removed."""
    target = targets(name)

    def judge(codes, said, victim, reproduction):
        return codes != [0] and bool(target.judge_sentence(codes, said, reproduction))

    def refuse():
        number = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES][os.getpid() % 4]
        raise OSError(number, os.strerror(number))

    attack(target, target.moments(count, of_files=True), refuse, judge)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [128, pytest.param(4, marks=pytest.mark.long)])
def test_a_full_disk_at_any_write_is_one_sentence(targets, name, step):
    """On a disk that grows by `step` KiB after each failure, the same command ends with the same bits."""
    target = targets(name)
    target.whole()
    shutil.rmtree(target.out, ignore_errors=True)
    target.out.mkdir()
    size, mount = 8, ["mount", "-t", "tmpfs", "-o", f"size={step}k", "tmpfs", target.out]
    if os.getuid() or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("only root can mount a disk")
    try:
        for size in itertools.count(step, step):
            subprocess.run(["mount", "-o", f"remount,size={size}k", target.out], check=True)
            codes, said = target.run()
            if codes == [0]:
                break
            target.judge_sentence(codes, said, f"{target}\non a disk of {size} KiB, {step} more each time")
        target.judge_same(codes, said, f"{target}\non a disk that grew to {size} KiB, {step} each time")
        print(f"{name}: done with {size} KiB")
    finally:
        subprocess.run(["umount", "-l", target.out], check=True)


# ------------------------------------------------------------------- what happens to files


def damage(path, how, other):
    """Do to a file what disks and people do; `other` is another file."""
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
        flipped[len(flipped) * 2 // 3] ^= 1
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flip": flipped}[how])


@pytest.mark.parametrize("name", [*NAMES, "its cache"])
@cases(8, 10**9)
def test_damaged_files_are_mended_or_refused(targets, name, count):
    """Each file cut, emptied, with a flipped bit, exchanged with the next, deleted, and as a folder."""
    target = targets(NAMES[2] if name == "its cache" else name)
    target.whole()
    shutil.rmtree(target.out, ignore_errors=True)
    if name == NAMES[0]:
        target.run()
    else:  # with two checkpoints, and something left to do
        assert target.run(happen=at("train_step", 7, die))[0] == [-signal.SIGKILL]
    folder, good = target.folder / "cache" if name == "its cache" else target.out, target.folder / "good"
    shutil.rmtree(good, ignore_errors=True)
    shutil.copytree(folder, good)
    half = None if folder == target.out else shutil.copytree(target.out, target.folder / "half", dirs_exist_ok=True)
    names = sorted(name for name in contents(folder) if not name.endswith((".png", ".lock")))
    trials = [(name, how) for name in names for how in ("cut", "empty", "flip", "swap", "gone", "folder")]
    verdicts, failed = collections.Counter(), Failures()
    for file, how in random.Random(0).sample(trials, min(count, len(trials))):
        for kept, place in ((good, folder), (half, target.out)):
            if kept:
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(kept, place)
        other = names[(names.index(file) + 1) % len(names)]
        damage(folder / file, how, folder / other)
        before = (
            contents(target.out) if (target.out / "metrics.jsonl").is_file() and "metrics" not in file + other else {}
        )
        reproduction = f"{target}\n{how} {folder / file} ({other})"
        with failed.noted(target):
            codes, said = target.run()
            if codes == [0]:  # what tells of the past is not made again, and an older checkpoint is not looked at
                past = (
                    r"metrics.jsonl|loss.png|README.md|checkpoint-3/.*"
                    if "metrics" in file + other
                    else r"checkpoint-3/.*"
                )
                whole, found = target.whole()[0], contents(target.out)
                others = [n for n in {**whole, **found} if whole.get(n) != found.get(n) and not re.match(past, n)]
                assert not others, f"{reproduction}\n{others} are not those of an undisturbed run\n{said}"
            else:
                target.judge_sentence(codes, said, reproduction)
                lost = [
                    n for n, content in before.items() if contents(target.out).get(n) != content and n != "run.args"
                ]
                assert not lost, f"{reproduction}\n{lost} were changed"
            verdicts["the same bits" if codes == [0] else "a sentence"] += 1
    shutil.rmtree(folder)
    shutil.copytree(good, folder)
    print(f"{name}: {dict(verdicts)}")
    failed.show(len(trials))


# ------------------------------------------------------------------- what people bring


FORMATS = {
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["L", "P"],
    "BMP": ["1", "L", "P", "RGB"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16"],
    "PPM": ["1", "L", "RGB"],
    "TGA": ["L", "RGB", "RGBA"],
    "JPEG2000": ["L", "RGB", "RGBA"],
}


def make_file(rng):
    """The bytes of an image, or of something like one; and whether it has to be used."""
    format = rng.choice(list(FORMATS))
    mode = rng.choice(FORMATS[format])
    size = rng.choice([(1, 1), (1, 40), (90, 2), (rng.randint(2, 60), rng.randint(2, 60)), (500, 9)])
    pixels = Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))
    picture = Image.new("I;16", size, rng.randint(0, 65535)) if mode == "I;16" else pixels
    if mode in ("LA", "LAB", "YCbCr"):
        picture = pixels.convert({"LA": "L"}.get(mode, mode) if mode != "LAB" else "RGB")
        picture = Image.merge("LA", [picture, picture]) if mode == "LA" else picture
        picture = Image.new("LAB", size, (50, 9, 200)) if mode == "LAB" else picture
    elif mode != "I;16":
        picture = pixels.convert(mode)
    options, buffer = {}, io.BytesIO()
    if format in ("JPEG", "PNG", "WEBP", "TIFF") and rng.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = rng.randint(0, 10)  # 0, 9 and 10 are no orientation
        options["exif"] = exif.tobytes()
    if format == "JPEG":
        options |= {"progressive": rng.random() < 0.5, "quality": rng.choice([1, 50, 100])}
    picture.save(buffer, format, **options)
    data, fault = (
        buffer.getvalue(),
        rng.choice(["none"] * 12 + ["cut", "flips", "head", "tail", "zeros", "other", "gone"]),
    )
    other = [
        b"",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage",
        b"<svg/>",
        b"GIF89a",
        b"\xff\xd8\xff",
        None,
    ]
    flipped = bytearray(data)
    for _ in range(5):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    cut = rng.randrange(len(data))
    data = {
        "none": data, "cut": data[:cut], "flips": bytes(flipped), "head": rng.randbytes(9) + data[9:],
        "tail": data + rng.randbytes(50), "zeros": data[:cut] + bytes(len(data) - cut), "other": rng.choice(other),
        "gone": None,
    }[fault]  # fmt: skip
    return data, fault in ("none", "tail")


def make_caption(rng):
    """What stands in columns of captions; None too."""
    pieces = [
        "a red bicycle",
        "ein Füchslein",
        "红色自行车",
        "عربي",
        "👩‍👩‍👧",
        "\u202eabc",
        "Z̵̧͝a",
        "\0",
        "\x1b[31m",
        "\n\t\r",
        " ",
        "<|endoftext|>",
    ]
    pieces += ["'", '"', "{", "%s", "\\u0000", "\ufeff", "\uffff", "1e999", "<script>", "\U0010ffff"]
    kind = rng.randrange(8)
    if kind < 2:
        return [None, "", " ", "\0", "a"][rng.randrange(5)]
    if kind == 2:
        return rng.choice(pieces) * rng.choice([100, 20000])
    if kind == 3:
        return "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(30))
    return " ".join(rng.choices(pieces, k=rng.randint(1, 9)))


@cases(120, 1000)
def test_every_row_of_odd_images_and_captions_is_used_or_listed(targets, tmp_path, count):
    rng = random.Random(count)
    files, captions = [make_file(rng) for _ in range(count)], [make_caption(rng) for _ in range(count)]
    image = pa.array(
        [{"bytes": data, "path": None} for data, _ in files], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    (tmp_path / "data").mkdir()
    pq.write_table(
        pa.table({"image": image, "text": pa.array(captions, pa.string())}), tmp_path / "data/train.parquet"
    )
    data = [f"--train_data_dir={tmp_path}/data", "--image_column=image", f"--output_dir={tmp_path}/out"]
    good = {i for i, (_, good) in enumerate(files) if good}

    codes, said = targets(NAMES[0]).run(*data, "--max_skipped=1", "--rows_per_shard=100", "--batch_size=8")
    assert codes == [0] and "Traceback" not in said and "Skipped" not in said, said
    listed = {entry["row"]: entry["reason"] for entry in map(json.loads, (tmp_path / "out/skipped.jsonl").open())}
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(rows) + len(listed) == count and all(listed.values())
    assert set(listed) == {i for i, text in enumerate(captions) if text is None} | (set(listed) - good), {
        i: listed[i] for i in set(listed) & good
    }
    used = [i for i in range(count) if i not in listed]
    assert rows["text"] == [captions[i] for i in used] and rows["key"] == [f"row {i}" for i in used]
    print(f"{count} rows: {len(used)} used, {len(listed)} listed with {len(set(listed.values()))} reasons")

    # The trainers, on the same rows; the unconditional one needs no captions.
    without_image = sum(1 for row in listed if captions[row] is not None or row not in good)
    argv = [
        "--max_train_steps=2",
        f"--train_batch_size={-(-count // 2)}",
        "--validation_steps=9",
        "--num_train_epochs=1",
    ]
    for name, most in ((NAMES[1], without_image), (NAMES[2], len(listed))):
        target = targets(name)
        shutil.rmtree(tmp_path / "out")
        flags = [flag for flag in target.argv if "--latents_dir" not in flag]
        prompts = [
            "--resolution=16",
            "--validation_prompts",
            *[t for t in captions if t and "\0" not in t and len(t) < 500][:5],
        ]
        codes, said = target.run(*data, *argv, *(prompts if name == NAMES[2] else []), flags=flags)
        assert codes == [0] and "Traceback" not in said, said
        record = metrics(tmp_path / "out")[-1]
        assert math.isfinite(record["loss"]) and said.count("Skipped row") == record["skipped_images"]
        assert record["skipped_images"] == most, (name, most, record)


@pytest.mark.parametrize("column", ["numbers", "lists", "bytes", "codes", "large", "surrogates", "nothing"])
def test_every_kind_of_column_of_captions(targets, tmp_path, column):
    """Rows are used, or listed; or one sentence says what the column is."""
    make_images(tmp_path / "images", 6)
    pngs = [{"bytes": (tmp_path / f"images/{i}.png").read_bytes(), "path": None} for i in range(6)]
    texts = {
        "numbers": pa.array(range(6)), "lists": pa.array([["a", "b"], [], None, ["c"], [""], [None]]),
        "bytes": pa.array([b"a"] * 6), "codes": pa.array(["a", "b"] * 3).dictionary_encode(),
        "large": pa.array(["a", None] * 3, pa.large_string()), "nothing": pa.nulls(6),
    }  # fmt: skip
    if column == "surrogates":
        lines = [json.dumps({"file_name": f"{i}.png", "text": text}) for i, text in enumerate(["\ud800", "a"] * 3)]
        (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    else:
        shutil.rmtree(tmp_path / "images")
        (tmp_path / "images").mkdir()
        pq.write_table(pa.table({"image": pa.array(pngs), "text": texts[column]}), tmp_path / "images/a.parquet")
    target = targets(NAMES[0])
    codes, said = target.run(f"--train_data_dir={tmp_path}/images", f"--output_dir={tmp_path}/out", "--max_skipped=1")
    if codes != [0]:
        print(column, target.judge_sentence(codes, said, column))
        return
    listed = (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    assert "Traceback" not in said and len(listed) + json.loads((tmp_path / "out/cache.json").read_text())["rows"] == 6
    print(column, listed[:1])


# ------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", NAMES)
@cases(8, 10**9)
def test_every_number_at_its_limits_is_refused_or_runs_well(targets, name, count, capsys):
    """One step with each flag at 0, -1, nan, inf, 1e30, 10**30 and at its bounds, where the parser takes it."""
    target, taken = targets(name), []
    work = {"resolution", "eval_batch_size", "num_validation_images", "dataloader_num_workers", "max_train_steps"}
    for action in parser_of(f"{name}.py")._actions:
        if action.type is None:
            continue
        low, high, kind = action.type.bounds
        for value in ["0", "-1", "nan", "inf", "-inf", "1e30", str(10**30), kind(low), kind(high)]:
            flag = f"--{action.dest}={value}"
            try:
                target.script.parse_args([*target.argv, flag])
                if action.dest not in work or value != high:  # just more work
                    taken.append(flag)
            except SystemExit as end:
                assert end.code == 2 and len(capsys.readouterr().err.splitlines()[-1]) < 300, flag
    taken = sorted(set(taken))
    verdicts, failed = collections.Counter(), Failures()
    for flag in random.Random(0).sample(taken, min(count, len(taken))):
        shutil.rmtree(target.out, ignore_errors=True)
        limits = () if name == NAMES[0] else ["--max_train_steps=1"]
        with failed.noted(target):
            codes, said = target.run(*limits, flag)
            if codes != [0]:
                target.judge_sentence(codes, said, f"{target} {flag}")
            else:
                assert "Traceback" not in said and "Done" in said, f"{target} {flag}\n{said}"
            if codes == [0] and name != NAMES[0]:
                assert all(math.isfinite(record["loss"]) for record in metrics(target.out)), f"{target} {flag}\n{said}"
                assert all(tensor.isfinite().all() for tensor in weights(target.out / "unet").values()), flag
            verdicts["a sound run" if codes == [0] else "a sentence"] += 1
    shutil.rmtree(target.out, ignore_errors=True)
    print(f"{name}: of {len(taken)} values that the parser takes: {dict(verdicts)}")
    failed.show(len(taken))


# ------------------------------------------------------------------- a long time


@cases(300, 20000)
def test_nothing_grows_with_the_steps(targets, count):
    """Memory, open files and the time of a step, in ten parts of a run."""
    target, path, step = targets(NAMES[1]), targets(NAMES[1]).folder / "growth", itertools.count()
    path.unlink(missing_ok=True)

    def note(event):
        if event == "train_step" and next(step) % (count // 10) == 0:
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            with path.open("a") as file:
                file.write(f"{rss} {len(os.listdir('/proc/self/fd'))} {time.process_time()}\n")

    shutil.rmtree(target.out, ignore_errors=True)
    more = [f"--max_train_steps={count}", "--validation_steps=1000000", "--save_model_epochs=1000000"]
    more += [f"--checkpointing_steps={count // 5}", "--logging_steps=10"]
    codes, said = target.run(*more, happen=note, timeout=3600)
    assert codes == [0], said
    sizes, files, times = zip(*[map(float, line.split()) for line in path.read_text().splitlines()], strict=True)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    print(f"{count} steps: {sizes[2] / 2**20:.0f} to {sizes[-1] / 2**20:.0f} MiB, {files[2]:.0f} to {files[-1]:.0f}")
    print(f"open files, {10000 * seconds[2] / count:.1f} to {10000 * seconds[-1] / count:.1f} ms of a core a step")
    assert max(sizes[-3:]) < sizes[2] + 20 * 2**20 and files[-1] <= files[2] + 1
    assert min(seconds[-3:]) < 1.5 * min(seconds[:3])


@pytest.mark.parametrize("name", NAMES)
@cases(6, 10**9)
def test_every_setting_of_a_models_files_is_refused_or_runs_well(targets, name, count):
    """Each value of each JSON file of the models, as null, 0, -1, "x", [], true and a large number."""
    target, failed, verdicts = targets(name), Failures(), collections.Counter()
    folder = {NAMES[0]: MODELS, NAMES[1]: target.folder / "tiny-unet", NAMES[2]: target.folder / "sd"}[name]
    copied = target.folder / "fuzzed"
    trials = [
        (path.relative_to(folder), key, value)
        for path in sorted(folder.rglob("*config.json"))
        for key, old in json.loads(path.read_text()).items()
        for value in (None, 0, -1, "x", [], True, 1000)
        if not key.startswith("_name") and value != old
    ]

    def bounded():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**32, size + 2**32))

    for file, key, value in random.Random(1).sample(trials, min(count, len(trials))):
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder, copied)
        (copied / file).write_text(json.dumps({**json.loads((copied / file).read_text()), key: value}))
        flags = [flag.replace(str(folder), str(copied)) for flag in target.argv]
        limits = [] if name == NAMES[0] else ["--max_train_steps=1"]
        reproduction = f"{target}\n{file}: {key} = {json.dumps(value)}"
        with failed.noted(target):
            shutil.rmtree(target.out, ignore_errors=True)
            codes, said = target.run(*limits, flags=flags, before=bounded)
            if codes != [0]:
                target.judge_sentence(codes, said, reproduction)
            else:
                assert "Traceback" not in said and "Done" in said, f"{reproduction}\n{said}"
                assert name == NAMES[0] or all(math.isfinite(record["loss"]) for record in metrics(target.out))
            verdicts["a sound run" if codes == [0] else "a sentence"] += 1
    print(f"{name}: {dict(verdicts)}")
    failed.show(len(trials))
