"""Copies of a run at --checkpoints_to, made in the background, and fetched to resume the run.

At the address are `checkpoint-N` as in --output_dir, `best-N` (best/ as of step N), `samples/` and
the files in RECORDS. Each folder has a marker, a file that is written last and deleted first: a
folder without it is an unfinished copy.
"""

import contextlib
import json
import re
import shutil
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import fsspec
from accelerate import Accelerator
from accelerate.utils import gather_object
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from diffusion_training.errors import CHANGED, explain, explained, fail
from diffusion_training.files import checksum_file, delete, saving, write_file
from diffusion_training.remote import persist, writing
from diffusion_training.training.checkpoints import find_checkpoints, prune_checkpoints

OWNER = "checkpoints_to.owner"  # at the address: the run that writes there
RECORDS = ("run.args", "metrics.jsonl", "report.html")
MARKERS = {"checkpoint": "trainer_state.json", "best": "held_out.json"}
RETRY = 60.0  # seconds until a failed copy is tried again
FETCHED = ".tmp-fetched"  # folder in --output_dir of machines that do not share it


def find_whole(names: Iterable[str], kind: str) -> list[int]:
    """The steps of the complete copies of a kind, "checkpoint" or "best", oldest first."""
    pattern = re.compile(rf"{kind}-(\d+)/{MARKERS[kind]}")
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))


def find_unfinished(names: Iterable[str]) -> set[str]:
    """The folders of copies that have no marker."""
    names = list(names)
    folders = {name.split("/")[0] for name in names if re.match(r"(checkpoint|best)-\d+/", name)}
    return folders - {f"{kind}-{step}" for kind in MARKERS for step in find_whole(names, kind)}


def step_of(name: str) -> int:
    """The step in the name of a checkpoint, or of samples."""
    return int(Path(name).stem.split("-")[-1])


class Store:
    """A folder at an fsspec address or on a disk. Each file appears complete or not at all.

    A new Store makes new connections and reads the credentials again, since these may expire.
    """

    def __init__(self, url: str) -> None:
        self.fs, root = fsspec.url_to_fs(url, skip_instance_cache=True)
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def list(self) -> set[str]:
        """Return the names of all files, also of those in subfolders."""
        self.fs.invalidate_cache()
        names = {path[len(self.root) + 1 :] for path in self.fs.find(self.root)}
        return names - {""}  # some stores have an empty file for the folder itself

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
            write_file(Path(self.path(name)), content)
        else:
            self.fs.pipe_file(self.path(name), content)

    def send(self, source: Path, name: str) -> None:
        """Copy a file of this disk into the store."""
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
            with writing(self.path(name)) as unfinished:
                shutil.copyfile(source, unfinished)
        else:
            self.fs.put_file(str(source), self.path(name))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def delete_folder(self, name: str) -> None:
        """Delete a folder and its content, if it exists."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)


class TakenOverError(Exception):
    """Another run has begun to write to the store."""


class Owner:
    """The run that writes to a store: the last one that took it. Other runs then stop copying.

    For example, a machine that seemed dead may still copy when its successor has begun.
    """

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex.encode()

    def take(self, store: Store) -> None:
        store.write(OWNER, self.key)

    def check(self, store: Store) -> None:
        """Raise TakenOverError if another run has taken the store.

        If the file was deleted, for example with the whole folder or by a bucket's rule for old
        objects, take the store again. What was being copied may be gone too, so this is an error.
        """
        key = store.read(OWNER)
        if key is None:
            self.take(store)
            raise FileNotFoundError(f"{OWNER} was deleted there")
        if key != self.key:
            raise TakenOverError


def try_store(url: str, flag: str) -> None:
    """Stop with an error if a store does not exist, or can't be read or written to."""
    with explained(f"{flag} {url} can't be written to"):
        store = Store(url)
        name = f".tmp-{uuid.uuid4().hex[:12]}"
        store.write(name, b"")
        store.list()
        store.delete(name)


class Copies:
    """Copies complete checkpoints, samples and records of a run in a thread.

    A failed copy is tried again later. The training never waits, except in `finish`.

    limit: how many checkpoints are kept, None for all. timeout: seconds to wait in `finish`.
    """

    def __init__(self, url: str, output_dir: Path, limit: int | None, timeout: float) -> None:
        self.url = url
        self.output_dir = output_dir
        self.limit = limit
        self.timeout = timeout
        self.owner = Owner()
        self.is_taken = False
        self.there: set[str] = set()  # the files at the address; never changed in place
        self.sent: dict[str, tuple[int, int]] = {}  # (time, size) of each record when it was sent
        self.held: Path | None = None  # the checkpoint that is being copied
        self.holding = threading.Lock()  # while `held` is chosen, and while checkpoints are deleted
        self.changed = threading.Condition()
        self.asked = 0  # how often `wake` was called
        self.done = 0  # the value of `asked` up to which all is copied
        self.is_over = False
        self.failure = ""
        self.pause = RETRY

    def open(self) -> None:
        """List the address. Stops with an error if it holds no run, or can't be written to."""
        try_store(self.url, "--checkpoints_to")
        with explained(f"--checkpoints_to {self.url} can't be read"):
            self.there = Store(self.url).list()
        if self.there and not self.there & {"run.args", OWNER}:
            fail(
                f"--checkpoints_to {self.url} holds {min(self.there)} and no run of this script: "
                "choose another address"
            )

    def take(self, store: Store) -> None:
        """Take the address over, and delete unfinished files of killed runs."""
        if self.is_taken:
            return
        self.owner.take(store)
        for name in store.list():
            if Path(name).name.startswith(".tmp-"):
                store.delete(name)
        self.is_taken = True

    def fetch(self, given: str | None) -> None:
        """Fetch the checkpoint that --resume_from_checkpoint means, if it is only at the address.

        The records, samples and best weights up to its step are fetched before it.
        """
        steps = find_whole(self.there, "checkpoint")
        if not steps:
            return
        newest = steps[-1]
        if given is None:
            fail(
                f"--checkpoints_to {self.url} holds checkpoint-{newest} of an earlier run: resume "
                "it with --resume_from_checkpoint latest, or choose another address"
            )
        step = newest if given == "latest" else self.find_step(given)
        if step < newest:
            fail(
                f"checkpoint-{newest} at {self.url} is newer than {given}, or of another run: "
                "delete the newer ones, or choose another --checkpoints_to"
            )
        here = [step_of(path.name) for path in find_checkpoints(self.output_dir)]
        if step in steps and step > max(here, default=-1):
            print(f"Fetching checkpoint-{step} from {self.url}")
            fetch_samples(self.url, self.there, step, self.output_dir)
            fetch_records(self.url, self.there, step, self.output_dir)
            fetch_checkpoint(self.url, step, self.output_dir)

    def find_step(self, given: str) -> int:
        """The step of a checkpoint of this run, by its name or path; -1 for one of another run."""
        path = Path(self.output_dir, given)
        if not path.is_dir() and f"{Path(given)}/{MARKERS['checkpoint']}" not in self.there:
            path = Path(given)
        is_own = path.resolve().parent == self.output_dir.resolve()
        return step_of(path.name) if is_own and re.fullmatch(r"checkpoint-\d+", path.name) else -1

    def begin(self, reached: int) -> None:
        """Start copying. reached: the step from which the run was resumed; -1 for a new run."""
        CHANGED.callback(self.close)
        threading.Thread(target=self.work, args=(reached,), daemon=True).start()
        self.wake()

    def wake(self) -> None:
        """Make the thread look for new files."""
        with self.changed:
            self.asked += 1
            self.changed.notify_all()

    def prune(self, saved: Path) -> None:
        """Delete the oldest checkpoints of --output_dir, except the one that is being copied."""
        with self.holding:
            prune_checkpoints(saved, self.limit, self.held)

    def finish(self) -> None:
        """Wait for the last copies, and print what was not copied."""
        self.pause = min(RETRY, 5.0)
        self.wake()
        with self.changed:
            if not self.changed.wait_for(self.is_settled, min(1, self.timeout)):
                print(f"Copying to {self.url}, for at most {self.timeout:g} s", flush=True)
                self.changed.wait_for(self.is_settled, self.timeout)
            is_done = self.done == self.asked
        if not is_done:
            missing = ", ".join(self.list_missing()) or "the last records"
            print(
                f"Not copied to {self.url}: {missing}. The same command copies it, if "
                f"{self.output_dir} still exists",
                file=sys.stderr,
                flush=True,
            )

    def is_settled(self) -> bool:
        return self.done == self.asked or self.is_over

    def list_missing(self) -> list[str]:
        """The checkpoints and samples that are not at the address, but should be."""
        steps = find_whole(self.there, "checkpoint")
        names = [path.name for path in self.choose(steps)]
        return names + [f"samples/{path.name}" for path in self.list_samples()]

    def close(self) -> None:
        """Stop copying."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def work(self, reached: int) -> None:
        """Copy until the run is over, in the thread."""
        is_begun = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.asked > self.done or self.is_over)
                asked = self.asked
            if self.is_over:
                return
            try:
                store = Store(self.url)
                if not is_begun:
                    self.take(store)
                    self.delete_newer(store, reached)
                    is_begun = True
                while self.copy_newest(store):
                    pass
            except TakenOverError:
                self.give_up()
                return
            except Exception as error:
                self.warn(explain(error))
                with self.changed:
                    if self.asked == asked:
                        self.changed.wait(self.pause)
                continue
            with self.changed:
                self.failure = ""
                self.done = asked
                self.changed.notify_all()

    def give_up(self) -> None:
        if not self.is_over:
            text = f"Another run writes to {self.url} now, so this run copies nothing more there"
            tqdm.write(text, file=sys.stderr)
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def warn(self, failure: str) -> None:
        if failure != self.failure and not self.is_over:
            text = f"Copying to {self.url} failed ({failure}); the run tries again later"
            tqdm.write(text, file=sys.stderr)
        self.failure = failure

    def delete_newer(self, store: Store, reached: int) -> None:
        """Delete best weights and samples after the step `reached`, which the run makes anew."""
        names = store.list()
        self.owner.check(store)
        for step in find_whole(names, "best"):
            if step > reached:
                self.delete_copy(store, "best", step)
        for name in names:
            if re.fullmatch(r"samples/step-\d+\.png", name) and step_of(name) > reached:
                store.delete(name)

    def delete_copy(self, store: Store, kind: str, step: int) -> None:
        self.owner.check(store)
        store.delete(f"{kind}-{step}/{MARKERS[kind]}")
        store.delete_folder(f"{kind}-{step}")

    def list_samples(self) -> list[Path]:
        """The samples that are not at the address."""
        paths = sorted((self.output_dir / "samples").glob("step-*.png"))
        return [path for path in paths if f"samples/{path.name}" not in self.there]

    def choose(self, steps: list[int]) -> list[Path]:
        """The checkpoints to copy, newest first. steps: those at the address."""
        here = {step_of(path.name): path for path in find_checkpoints(self.output_dir)}
        wanted = sorted({*here, *steps}, reverse=True)[: self.limit]
        return [here[step] for step in wanted if step not in steps]

    def refresh(self, store: Store) -> None:
        """List the address, and delete unfinished copies: they take the room of complete ones.

        They are left by a copy that failed, or by a killed run.
        """
        self.there = store.list()
        self.owner.check(store)
        for folder in find_unfinished(self.there):
            store.delete_folder(folder)

    def copy_newest(self, store: Store) -> bool:
        """Copy new files. Returns whether a checkpoint was copied: then there may be another.

        A checkpoint is chosen before records and best weights are copied, and copied after them,
        so that a run resumed from it finds those that it had. Samples, too, are copied after them:
        a resumed run that finds the samples of a step does not measure its held-out loss again.
        """
        self.refresh(store)
        steps = find_whole(self.there, "checkpoint")
        samples = self.list_samples()
        with self.holding:
            chosen = self.choose(steps)
            self.held = chosen[0] if chosen else None
        try:
            self.copy_records(store)
            self.copy_best(store)
            for path in samples:
                store.send(path, f"samples/{path.name}")
                self.there = self.there | {f"samples/{path.name}"}
            if self.held:
                content = (self.held / MARKERS["checkpoint"]).read_bytes()
                self.copy_folder(store, self.held, self.held.name, MARKERS["checkpoint"], content)
        finally:
            self.held = None
        self.delete_old(store)
        return bool(chosen)

    def copy_records(self, store: Store) -> None:
        for name in RECORDS:
            path = self.output_dir / name
            if path.exists():
                status = path.stat()
                version = status.st_mtime_ns, status.st_size
                if name not in self.there or self.sent.get(name) != version:
                    store.send(path, name)
                    self.sent[name] = version

    def copy_best(self, store: Store) -> None:
        """Copy best/ and best-before/, if a checkpoint is as new as they are."""
        checkpoints = find_checkpoints(self.output_dir)
        newest = step_of(checkpoints[-1].name) if checkpoints else -1
        for folder in (self.output_dir / "best-before", self.output_dir / "best"):
            try:
                content = (folder / MARKERS["best"]).read_bytes()
            except FileNotFoundError:
                continue
            step = json.loads(content)["step"]
            if step <= newest and f"best-{step}/{MARKERS['best']}" not in self.there:
                self.copy_folder(store, folder, f"best-{step}", MARKERS["best"], content)

    def copy_folder(
        self, store: Store, folder: Path, name: str, marker: str, content: bytes
    ) -> None:
        """Copy a folder, but not if it is replaced meanwhile: completely or not at all.

        content: the marker's bytes before the copy, which differ for each version of the folder.
        """
        try:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path != folder / marker:
                    store.send(path, f"{name}/{path.relative_to(folder).as_posix()}")
            is_same = (folder / marker).read_bytes() == content
        except FileNotFoundError:
            if folder.exists():  # a fault of the store
                raise
            is_same = False
        self.owner.check(store)
        if is_same:
            store.write(f"{name}/{marker}", content)
            self.there = self.there | {f"{name}/{marker}"}
        else:
            store.delete_folder(name)

    def delete_old(self, store: Store) -> None:
        """Delete checkpoints beyond the limit, and best weights that no resumed run needs."""
        steps = find_whole(self.there, "checkpoint")
        for step in steps[: -self.limit] if self.limit else []:
            self.delete_copy(store, "checkpoint", step)
        newest = max(steps, default=-1)
        known = [step for step in find_whole(self.there, "best") if step <= newest]
        for step in known[:-1]:
            self.delete_copy(store, "best", step)


def fetch_file(url: str, target: Path, checksum: str | None = None) -> None:
    """Fetch a file, with retries for a minute. checksum: the one that it must have."""

    def copy(fs: AbstractFileSystem, location: str) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(location, str(target))
        if checksum and checksum_file(target) != checksum:
            raise ValueError("it has changed since it was written")

    persist(url, copy, ("FileNotFoundError",))


def fetch_samples(url: str, names: set[str], step: int, output_dir: Path) -> None:
    """Fetch missing samples up to a step."""
    folder = output_dir / "samples"
    wanted = []
    for name in sorted(names):
        is_wanted = re.fullmatch(r"samples/step-\d+\.png", name) and step_of(name) <= step
        if is_wanted and not (output_dir / name).exists():
            wanted.append(Path(name).name)
    if wanted:
        folder.mkdir(exist_ok=True)
        with saving(folder, "samples") as unfinished:
            targets = [str(unfinished / name) for name in wanted]
            persist(
                f"{url}/samples",
                lambda fs, root: fs.get([f"{root}/{name}" for name in wanted], targets),
            )


def fetch_records(url: str, names: set[str], step: int, output_dir: Path) -> None:
    """Fetch metrics.jsonl, and best/ as of a step."""
    with saving(output_dir, "records") as unfinished:
        if "metrics.jsonl" in names:
            fetch_file(f"{url}/metrics.jsonl", unfinished / "metrics.jsonl")
        known = [best for best in find_whole(names, "best") if best <= step]
        for name in sorted(names):
            folder, _, file = name.partition("/")
            if known and folder == f"best-{known[-1]}":
                fetch_file(f"{url}/{name}", unfinished / "best" / file)


def fetch_checkpoint(url: str, step: int, folder: Path) -> None:
    """Fetch checkpoint-N, completely or not at all, and compare it with its checksums."""
    name = f"checkpoint-{step}"
    with saving(folder, name) as unfinished:
        state = unfinished / name / MARKERS["checkpoint"]
        fetch_file(f"{url}/{name}/{state.name}", state)
        with explained(f"{url}/{name} is damaged: delete it, and resume from another"):
            checksums = json.loads(state.read_text())["checksums"]
            for file, checksum in checksums.items():
                if file != state.name:
                    fetch_file(f"{url}/{name}/{file}", unfinished / name / file, checksum)


def find_name(given: str | None, url: str) -> str | None:
    """The name of the checkpoint if `given` is its path at the address; else `given`."""
    folder, _, name = (given or "").rstrip("/").rpartition("/")
    is_there = folder and Path(folder).resolve() == Path(url).resolve()  # addresses, too
    return name if is_there else given


def open_copies(args: Namespace, given: str | None, output_dir: Path) -> Copies:
    """Open --checkpoints_to, and fetch the checkpoint `given` if it is only there.

    Call it on the first process.
    """
    url = args.checkpoints_to
    limit = args.checkpoints_total_limit
    copies = Copies(url, output_dir, limit, args.checkpoints_to_timeout)
    copies.open()
    copies.fetch(given)
    return copies


def share_checkpoint(
    accelerator: Accelerator, copies: Copies | None, url: str, output_dir: Path
) -> Path:
    """Return the folder that holds the newest checkpoint of the first process.

    This is --output_dir. On a machine that does not share it, it is a folder in the machine's own
    --output_dir, to which its first process fetches the checkpoint. Call it on all processes.

    copies: those of the first process.
    """
    newest = find_checkpoints(output_dir)[-1:]
    (name, *_) = gather_object([newest[0].name if newest else None])
    is_missing = bool(name) and not (output_dir / name / MARKERS["checkpoint"]).exists()
    if not any(gather_object([is_missing])):
        return output_dir
    if copies and f"{name}/{MARKERS['checkpoint']}" not in copies.there:
        with explained(f"{name} could not be copied to {url}, where other machines need it"):
            store = Store(url)
            copies.take(store)
            copies.copy_newest(store)
    accelerator.wait_for_everyone()
    folder = output_dir / FETCHED
    if is_missing and accelerator.is_local_main_process:
        delete(folder)
        folder.mkdir(parents=True)
        names = Store(url).list()
        fetch_records(url, names & {"metrics.jsonl"}, step_of(name), folder)
        fetch_checkpoint(url, step_of(name), folder)
    accelerator.wait_for_everyone()
    return folder if is_missing else output_dir
