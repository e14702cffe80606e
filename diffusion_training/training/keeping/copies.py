"""Copies of a run at --checkpoints_to, made in the background, and fetched to resume the run.

At the address are `checkpoint-N` as in --output_dir, `best-N` (best/ as of step N), `samples/`,
`posthoc_ema/` with its snapshots, the COPIED_FILES, and OWNER. Checkpoints and best weights have a
marker, a file that is written last and deleted first: a folder without it is an unfinished copy.
"""

import contextlib
import json
import math
import re
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path

import fsspec
from accelerate import Accelerator
from accelerate.utils import gather_object
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from diffusion_training.errors.faults import explain
from diffusion_training.errors.sentences import CHANGED, explained, fail, name_command
from diffusion_training.files import checksum_file, delete, saving
from diffusion_training.remote import naming_silence, persist, writing
from diffusion_training.training.keeping.best import read_best
from diffusion_training.training.keeping.checkpoints import (
    find_checkpoints,
    find_samples,
    prune_checkpoints,
)
from diffusion_training.training.keeping.posthoc import FOLDER as SNAPSHOTS
from diffusion_training.training.keeping.posthoc import find_snapshots

OWNER = "checkpoints_to.owner"  # at the address: key and name of the run that writes there
COPIED_FILES = ("run.args", "metrics.jsonl", "report.html")
MARKER_NAMES = {
    "checkpoint": "/trainer_state.json",
    "best": "/held_out.json",
}  # of the names of markers
RETRY = 60.0  # seconds until a failed copy is tried again
FETCHED = ".tmp-fetched"  # folder in --output_dir of machines that do not share it


def find_whole(names: Iterable[str], kind: str) -> dict[int, str]:
    """{step: name of its marker} of the complete copies of a kind, oldest first."""
    pattern = rf"{kind}-(\d+){re.escape(MARKER_NAMES[kind])}"
    matches = [match for name in names if (match := re.fullmatch(pattern, name))]
    return dict(sorted((int(match[1]), match[0]) for match in matches))


def find_late(names: Iterable[str], reached: int) -> set[str]:
    """The samples, and the files of snapshots, of steps after `reached`."""
    pattern = rf"samples/step-(\d+)\.png|{SNAPSHOTS}/step-(\d+)/.+"
    matches = [match for name in names if (match := re.fullmatch(pattern, name))]
    return {match[0] for match in matches if int(match[1] or match[2]) > reached}


def find_unfinished(names: set[str]) -> set[str]:
    """The folders that have no marker, and unfinished files."""
    folders = [match for name in names if (match := re.match(r"(checkpoint|best)-\d+(?=/)", name))]
    unfinished = {match[0] for match in folders if match[0] + MARKER_NAMES[match[1]] not in names}
    return unfinished | {name for name in names if Path(name).name.startswith(".tmp-")}


def find_steps(output_dir: Path) -> dict[int, Path]:
    """{step: path} of the complete checkpoints on this disk, oldest first."""
    return {int(path.name.split("-")[-1]): path for path in find_checkpoints(output_dir)}


def read_marker(path: Path) -> bytes:
    """The content of a marker on this disk; empty if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes() if path.is_file() else b""  # a pipe might never end
    return b""


class Address:
    """A folder at an fsspec address or on a disk. Each file appears complete or not at all.

    A new Address makes new connections and reads the credentials again, since these may expire.
    """

    def __init__(self, url: str) -> None:
        self.fs, root = fsspec.url_to_fs(url, skip_instance_cache=True)
        self.root = root.rstrip("/")

    def list(self) -> set[str]:
        """Return the names of all files, also of those in subfolders."""
        self.fs.invalidate_cache()
        names = {path[len(self.root) + 1 :] for path in self.fs.find(self.root)}
        return names - {""}  # some stores have an empty file for the folder itself

    def send(self, source: Path, name: str) -> None:
        """Copy a file of this disk into the store."""
        path = f"{self.root}/{name}"
        if isinstance(self.fs, LocalFileSystem):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with writing(path) as unfinished:
                shutil.copyfile(source, unfinished)
        else:
            self.fs.put_file(str(source), path)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return self.fs.cat_file(f"{self.root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "file")
            source.write_bytes(content)
            self.send(source, name)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder and its content, if it exists."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{name}", recursive=True)


class TakenOverError(Exception):
    """Another run has begun to write to the address."""


class Copies:
    """Copies complete checkpoints, samples, snapshots and records of a run in a thread.

    A failed copy is tried again later. The training never waits, except in `finish`.

    An address belongs to runs of one name, the last part of --output_dir. The last one that took it
    writes there. Others then stop copying, for example a machine that seemed dead but still copies
    when its successor has begun.

    limit: how many checkpoints are kept, None for all.
    """

    def __init__(self, url: str, output_dir: Path, limit: int | None) -> None:
        self.url = url
        self.output_dir = output_dir
        self.limit = limit
        self.name = output_dir.resolve().name
        self.key = f"{uuid.uuid4().hex} {self.name}".encode()
        self.there: set[str] = set()  # the files at the address; never changed in place
        self.held: Path | None = None  # the checkpoint that is being copied
        self.holding = threading.Lock()  # while `held` is chosen, and while checkpoints are deleted
        self.news = threading.Event()  # there may be new files
        self.is_ending = False  # the next copies are the last
        self.is_copied = False  # the last copies are made
        self.is_closed = False  # the thread must stop
        self.warning = ""  # the last one, until a copy succeeds

    def open(self) -> None:
        """List the address. Stops with an error if it holds no run, or can't be written to."""
        with (
            explained(f"--checkpoints_to {self.url} can't be written to"),
            naming_silence(self.url),
        ):
            self.address = Address(self.url)
            self.address.write(".tmp-trial", b"")
            names = self.address.list()
            self.there = names - find_unfinished(names)
            self.address.delete(".tmp-trial")
            owner = self.address.read(OWNER) if OWNER in self.there else b""
        if self.there and not self.there & {"run.args", OWNER}:
            fail(
                f"--checkpoints_to {self.url} holds {min(self.there)} and no run of this script: "
                "choose another address"
            )
        _, _, name = owner.decode("utf-8", "replace").partition(" ")
        if name not in ("", self.name):
            fail(
                f"--checkpoints_to {self.url} holds the run {name}, and this one is {self.name}: "
                "choose another address, or that name for --output_dir"
            )

    def fetch(self, given: str | None) -> None:
        """Fetch the checkpoint that --resume_from_checkpoint means, if it is only at the address.

        Stops with an error if this is not the newest one of the run.
        """
        there = find_whole(self.there, "checkpoint")
        if not there:
            return
        newest = max(there)
        if given is None:
            fail(
                f"--checkpoints_to {self.url} holds checkpoint-{newest} of an earlier run: resume "
                "it with --resume_from_checkpoint latest, or choose another address"
            )
        here = find_steps(self.output_dir)
        steps = {f"checkpoint-{step}": step for step in (*here, *there)} | {"latest": newest}
        step = steps.get(name_checkpoint(str(Path(given)), self.output_dir), -1)
        if step < newest:
            fail(
                f"checkpoint-{newest} at {self.url} is newer than {given}, or of another run: "
                "delete the newer ones, or choose another --checkpoints_to"
            )
        if step > max(here, default=-1):
            print(f"Fetching checkpoint-{step} from {self.url}")
            fetch_checkpoint(self.url, self.there, step, self.output_dir)

    def begin(self, reached: int) -> None:
        """Start copying. reached: the step from which the run was resumed; -1 for a new run."""
        CHANGED.callback(self.close)
        self.thread = threading.Thread(target=self.work, args=(reached,), daemon=True)
        self.thread.start()
        self.news.set()

    def prune(self, saved: Path) -> None:
        """Delete the oldest checkpoints of --output_dir, except the one that is being copied."""
        with self.holding:
            prune_checkpoints(saved, self.limit, self.held)

    def finish(self, timeout: float) -> None:
        """Wait for the last copies, at most `timeout` seconds, and print what was not copied."""
        self.is_ending = True
        self.news.set()
        self.thread.join(min(1, timeout))
        if self.thread.is_alive():
            print(f"Copying to {self.url}, for at most {timeout:g} s", flush=True)
            self.thread.join(timeout)
        if not self.is_copied:
            names = [self.name_file(path) for path in self.find_new()]
            print(
                f"Not copied to {self.url}: {', '.join(names) or 'the last records'}. If "
                f"{self.output_dir} still exists, {name_command()} copies it",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Stop copying."""
        self.is_closed = True
        self.news.set()

    def work(self, reached: int) -> None:
        """Copy until the run is over, in the thread."""
        is_begun = False
        while not self.is_copied:
            self.news.wait()
            self.news.clear()
            is_last = self.is_ending
            if self.is_closed:
                return
            try:
                self.address = Address(self.url)
                if not is_begun:
                    self.take(reached)
                    is_begun = True
                while self.copy_newest():
                    pass
                self.warning = ""
                self.is_copied = is_last
            except TakenOverError:
                self.warn(
                    f"Another run writes to {self.url} now, so this run copies nothing more there"
                )
                return
            except Exception as error:
                self.warn(
                    f"Copying to {self.url} failed ({explain(error)}); the run tries again later"
                )
                self.news.wait(RETRY / 12 if self.is_ending else RETRY)
                self.news.set()

    def warn(self, warning: str) -> None:
        """Print a warning, but the same one only once."""
        if warning != self.warning and not self.is_closed:
            tqdm.write(warning, file=sys.stderr)
        self.warning = warning

    def take(self, reached: int) -> None:
        """Take the address over.

        Best weights, samples and snapshots after the step `reached` are deleted: the run makes them
        anew.
        """
        self.address.write(OWNER, self.key)
        names = self.address.list()
        best = find_whole(names, "best")
        late = {name for step, name in best.items() if step > reached}
        for name in sorted(late | find_late(names, reached)):
            self.address.delete(name)

    def check(self) -> None:
        """Raise TakenOverError if another run has taken the address.

        If the file was deleted, for example with the whole folder or by a bucket's rule for old
        objects, take the address again. What was being copied may be gone too, so this is an error.
        """
        try:
            key = self.address.read(OWNER)
        except FileNotFoundError:
            self.address.write(OWNER, self.key)
            raise FileNotFoundError(f"{OWNER} was deleted there") from None
        if key != self.key:
            raise TakenOverError

    def find_new(self) -> list[Path]:
        """What is not at the address, but should be: checkpoints, newest first, and single files.

        These are samples, and snapshots of --posthoc_ema.
        """
        here = find_steps(self.output_dir)
        there = find_whole(self.there, "checkpoint")
        wanted = sorted({*here, *there}, reverse=True)[: self.limit]
        files = [*find_samples(self.output_dir), *find_snapshots(self.output_dir)]
        return [
            *(here[step] for step in wanted if step not in there),
            *(path for path in files if self.name_file(path) not in self.there),
        ]

    def name_file(self, path: Path) -> str:
        """The name of a file at the address."""
        return path.relative_to(self.output_dir).as_posix()

    def tidy(self) -> None:
        """List the address, and delete copies that nobody needs: they take the room of others.

        These are checkpoints beyond the limit, best weights that no resumed run needs, and
        unfinished copies. They are left by a copy that failed, or by a killed run.
        """
        names = self.address.list()
        self.check()
        steps, best = find_whole(names, "checkpoint"), find_whole(names, "best")
        known = [step for step in best if step <= max(steps, default=-1)]
        old = [*steps.values()][: -(self.limit or 0)]  # without a limit, none
        old += [best[step] for step in known[:-1]]
        self.there = names - {*old}
        for name in (*old, *find_unfinished(self.there)):
            self.address.delete(name)

    def copy_newest(self) -> bool:
        """Copy new files, but only one checkpoint. Returns whether there is another to copy.

        A checkpoint is chosen before records and best weights are copied, and copied after them,
        so that a run resumed from it finds those that it had, and the snapshots. Samples, too, are
        copied after records: a resumed run that finds the samples of a step does not measure its
        held-out loss again.
        """
        self.tidy()
        with self.holding:
            new = self.find_new()
            self.held = next(filter(Path.is_dir, new), None)
        try:
            for path in map(self.output_dir.joinpath, COPIED_FILES):
                if path.is_file():
                    self.address.send(path, path.name)
            self.copy_best()
            for path in filter(Path.is_file, new):
                self.address.send(path, self.name_file(path))
                self.there = self.there | {self.name_file(path)}
            if self.held:
                marker = self.held / "trainer_state.json"
                self.copy_folder(marker, read_marker(marker), self.held.name)
        finally:
            self.held = None
        self.tidy()
        return any(map(Path.is_dir, self.find_new()))

    def copy_best(self) -> None:
        """Copy best/ and best-before/, if a checkpoint is as new as they are."""
        newest = max(find_steps(self.output_dir), default=-1)
        for name in ("best-before", "best"):
            marker = self.output_dir / name / "held_out.json"
            if content := read_marker(marker):
                step = read_best(marker.parent).get("step", math.inf)  # inf: it is damaged
                if step <= newest and step not in find_whole(self.there, "best"):
                    self.copy_folder(marker, content, f"best-{step}")

    def copy_folder(self, marker: Path, content: bytes, name: str) -> None:
        """Copy a marker's folder; without the marker if it is replaced or deleted meanwhile.

        content: the marker's bytes before the copy, which differ for each version of the folder.
        """
        folder = marker.parent
        try:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path != marker:
                    self.address.send(path, f"{name}/{path.relative_to(folder).as_posix()}")
        except FileNotFoundError:
            if read_marker(marker) == content:  # a fault of the store
                raise
        self.check()
        if content and read_marker(marker) == content:
            self.address.write(f"{name}/{marker.name}", content)


def fetch_files(url: str, files: dict[str, Path]) -> None:
    """Fetch files, with retries for a minute. files: {name at the address: path here}."""

    def fetch(fs: AbstractFileSystem, root: str) -> None:
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        fs.get([f"{root}/{name}" for name in files], [*map(str, files.values())])

    persist(url, fetch, ("FileNotFoundError",))


def fetch_checkpoint(url: str, names: Iterable[str], step: int, output_dir: Path) -> None:
    """Fetch checkpoint-N, and before it records, samples, snapshots, best weights up to its step.

    The checkpoint is fetched completely or not at all, and compared with its checksums.

    names: those of the files at the address.
    """
    best = max((other for other in find_whole(names, "best") if other <= step), default=-1)
    wanted = ("metrics.jsonl", "samples/step-", f"{SNAPSHOTS}/step-", f"best-{best}/")
    late = find_late(names, step)
    with saving(output_dir, "records") as unfinished:
        if (here := output_dir / "samples").exists():  # they may hold files of the user
            shutil.copytree(here, unfinished / "samples", ignore_dangling_symlinks=True)
        files = {
            name: unfinished / name.replace(f"best-{best}/", "best/", 1)
            for name in names
            if name.startswith(wanted) and name not in late
        }
        fetch_files(url, files)
    folder = f"checkpoint-{step}"
    with (
        saving(output_dir, folder) as unfinished,
        explained(f"{url}/{folder} is damaged: delete it, and resume from another"),
    ):
        state = unfinished / folder / "trainer_state.json"
        fetch_files(url, {f"{folder}/{state.name}": state})
        for name, checksum in json.loads(state.read_text())["checksums"].items():
            path = unfinished / folder / name
            if path != state:
                fetch_files(url, {f"{folder}/{name}": path})
                if checksum_file(path) != checksum:
                    raise ValueError(f"{name} has changed since it was written")


def name_checkpoint(given: str, folder: str | Path) -> str:
    """The name of the checkpoint if `given` is its path in a folder or at an address."""
    is_there = Path(given).parent.resolve() == Path(folder).resolve()  # addresses, too
    return Path(given).name if is_there else given


def share_checkpoint(
    accelerator: Accelerator, copies: Copies | None, url: str, output_dir: Path
) -> Path:
    """Return the folder that holds the newest checkpoint of the first process.

    This is --output_dir. On a machine that does not share it, it is a folder in the machine's own
    --output_dir, to which its first process fetches the checkpoint. Call it on all processes.

    copies: those of the first process.
    """
    (step, *_) = gather_object([max(find_steps(output_dir), default=-1)])
    is_missing = step >= 0 and step not in find_steps(output_dir)
    if not any(gather_object([is_missing])):
        return output_dir
    if copies and step not in find_whole(copies.there, "checkpoint"):
        with explained(
            f"checkpoint-{step} could not be copied to {url}, where other machines need it"
        ):
            copies.take(step)
            copies.copy_newest()
    accelerator.wait_for_everyone()
    folder = output_dir / FETCHED
    if is_missing and accelerator.is_local_main_process:
        delete(folder)
        folder.mkdir(parents=True)
        fetch_checkpoint(url, {"metrics.jsonl"} & Address(url).list(), step, folder)
    accelerator.wait_for_everyone()
    return folder if is_missing else output_dir
