"""Write files completely or not at all, clean up after a kill, and compute checksums."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from filelock import BaseFileLock, FileLock, Timeout

from diffusion_training.arguments import list_values
from diffusion_training.errors.faults import explain, is_loaders_end, name_finally
from diffusion_training.errors.sentences import Refused, explained, fail, status_of

NARROW = "narrow:"  # the kind of a hash of weights, with which the hash begins
NOT_WRITTEN = ("iostream error", "inline_container.cc")  # all that torch says of a failed write


@contextlib.contextmanager
def saving(folder: str | Path, what: str | Path, name: str = ".tmp-saving") -> Iterator[Path]:
    """Yield an empty folder, and move the files that the block writes there into `folder`.

    Each item appears complete or not at all. If anything fails, the program ends with an error
    about `what`, and the previous items stay.

    name: of the empty folder. A thread that saves beside others needs its own.
    """
    folder = Path(folder)
    unfinished = folder / name
    try:
        delete(unfinished)  # left by a run that was killed
        unfinished.mkdir()
        yield unfinished
        mode = unfinished.stat().st_mode & 0o666  # safetensors ignores the umask
        for path in unfinished.rglob("*"):
            if path.is_file():
                path.chmod(mode)
                write_out(path)
        for item in unfinished.iterdir():  # one by one: other items in `folder` stay
            path = folder / item.name
            old = folder / f".tmp-old-{item.name}"
            # A folder can't be replaced atomically: after a kill here, `clean` puts it back. A
            # file never replaces one: that fails in the next line.
            if path.is_dir() and item.is_dir():
                path.rename(old)
            item.replace(path)
            delete(old)  # last, so that one of the two is always complete
        unfinished.rmdir()
    except Refused:  # in a block of this kind inside the block
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    except Exception as error:
        if is_loaders_end(error):  # not the block's failure; the next start deletes the rest
            raise
        # torch.save does not report a full disk
        full = folder.is_dir() and shutil.disk_usage(folder).free < 2**20
        reason = "the disk is full" if full else explain(error)
        if not full and any(words in reason for words in NOT_WRITTEN):
            reason = "the system lets it write no more: see `ulimit -f` and your quota"
        shutil.rmtree(unfinished, ignore_errors=True)
        sentence = (
            f"{name_finally(str(what))} could not be saved ({reason}); "
            "files saved before are untouched"
        )
        raise Refused(sentence, True, status_of(error)) from None


def write_out(path: Path) -> None:
    """Flush a file to disk before it is renamed, or a power cut could leave it empty."""
    with open(path, "r+b") as file:  # Windows flushes only files that are open for writing
        os.fsync(file.fileno())


def clean(output_dir: Path) -> None:
    """After a kill in `saving`, put half-moved items back and delete half-written ones."""
    for old in output_dir.glob(".tmp-old-*"):
        path = output_dir / old.name.removeprefix(".tmp-old-")
        if not path.exists():
            old.rename(path)
    for leftover in output_dir.glob(".tmp-*"):
        delete(leftover)


def lock_folder(
    folder: Path, name: str | Path, is_own: Callable[[set[str]], object], what: str
) -> BaseFileLock:
    """Create a folder, or accept one that is empty or ours, and lock it against other processes.

    `name` is the value of --output_dir, for messages. `is_own` gets the names of the folder's files
    and returns whether it holds a `what` of ours, such as "latent cache". Returns the lock.
    """
    # a run that failed in a notebook may still hold it
    lock = FileLock(folder / ".lock", is_singleton=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if names and not is_own(names):
            fail(f"--output_dir {name} holds {min(names)} and no {what}: choose another folder")
        lock.acquire(timeout=0)
    except Timeout:
        fail(f"another process is writing to {name}: end it, or choose another --output_dir")
    except OSError as error:
        fail(f"--output_dir {name} can't be written to ({error})")
    return lock


def delete_if_empty(folder: Path) -> None:
    """Delete the folder of a failed run if it holds only locks and the flags."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {".lock", ".lock-ray", "run.args"}:
            delete(folder)


def delete(path: Path) -> None:
    """Delete a file, a folder or a link, if it exists; the target of a link is never touched.

    A folder is renamed first, so that a half-deleted one, after a kill, is never taken for whole.
    """
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(".tmp-"):
            delete(path.with_name(f".tmp-{path.name}"))
            path = path.rename(path.with_name(f".tmp-{path.name}"))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checksum_files(folder: Path) -> dict[str, str]:
    """{file: xxh3_128} of all files in a folder except trainer_state.json, which stores them."""
    return {
        path.relative_to(folder).as_posix(): checksum_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "trainer_state.json"
    }


def checksum_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_output_dir(flags: dict[str, Any]) -> None:
    """End the program if --output_dir is not on a disk, or is in a folder that the run reads.

    Also end it if a flag's value can't be read as text.
    """
    output_dir = flags["output_dir"]
    if "://" in output_dir or "\0" in output_dir:
        fail(
            f"--output_dir {output_dir!r} is not a path on a disk: write to a local folder, "
            "and copy the result"
        )
    with explained(f"--output_dir {output_dir} can't be written to"):
        written = Path(output_dir).resolve()  # fails for a link that leads to itself
    for name, value in flags.items():
        values = [x for x in list_values(value) if isinstance(x, str)]
        if any("\ud800" <= character <= "\udfff" for character in "".join(values)):
            fail(f"--{name} {value!a} can't be read as text: rename it, or write it in UTF-8")
        is_read = name.endswith(("latents_dir", "train_data_dir", "dataset_name", "name_or_path"))
        for source in filter(os.path.isdir, values if is_read else ()):
            if written.is_relative_to(Path(source).resolve()):
                fail(f"--output_dir {output_dir} lies in --{name} {source}: choose another folder")


def write_file(path: Path, text: str | bytes | Iterator[str], lasting: bool = True) -> None:
    """Write a small file (text as UTF-8, or bytes) completely or not at all.

    text: also its pieces, for one that is large. `lasting`: the file must also survive a power cut.
    """
    unfinished = name_unfinished(path)
    try:
        if isinstance(text, str | bytes):
            unfinished.write_bytes(text.encode() if isinstance(text, str) else text)
        else:
            with unfinished.open("w", encoding="utf-8", newline="") as file:
                file.writelines(text)
        if lasting:
            write_out(unfinished)
        unfinished.replace(path)
    except Exception:  # MemoryError too: the run may continue without this file
        unfinished.unlink(missing_ok=True)
        raise


def name_unfinished(path: Path) -> Path:
    """A temporary name for a file until it is complete.

    It is new each time, because an earlier run that seems dead may still be writing.
    """
    return path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name}")


def sort_header(path: Path) -> None:
    """Sort the metadata of a safetensors file in place.

    The library writes it in a different order each time, and equal files should have equal bytes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        # as the library formats it, so the length stays the same
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def hash_values(values: Any) -> str:
    """A fingerprint of values that can be written as JSON: 16 digits of their SHA-256."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def digest_file(path: Path) -> str | None:
    """SHA-256 of a file, None if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, with a ValueError also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def fits(value: Any, form: Any) -> bool:
    """Whether a value from a JSON file has the types that `form` describes.

    form: a type, None, [the form of each item], {key: the form of its value}, or a tuple of forms
    of which it has one.
    """
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if form in (None, bool):
        return value is None if form is None else isinstance(value, bool)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            key in value and fits(value[key], form[key]) for key in form
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    return isinstance(value, form) and not isinstance(value, bool)


def read_shard_names(index: str | Path) -> set[str]:
    """The files in an index of sharded weights. Raises ValueError if it has another form."""
    try:
        content = json.loads(Path(index).read_text())
    except ValueError:
        content = {}
    if not fits(content, {"weight_map": dict}) or not fits(
        [*content["weight_map"].values()], [str]
    ):
        raise ValueError(f"{Path(index).name} is damaged: it lists no files of weights")
    return set(content["weight_map"].values())


def is_old_hash(digest: Any) -> bool:
    """Whether an older version wrote a hash of weights, which then does not name its kind."""
    return bool(digest) and not str(digest).startswith(NARROW)


def find_differences(before: dict, now: dict, prefix: str = "") -> list[str]:
    """List the differences of two nested dicts, as ["vae.scaling_factor 0.18215 -> 0.13025"].

    Hashes of weights are equal if any two of their words are, see `hash_weights`.
    """
    differences = []
    for key in before | now:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += find_differences(old, new, f"{prefix}{key}.")
        elif key.endswith("sha256") and {*str(old).split()} & {*str(new).split()}:
            continue
        elif old != new:
            differences.append(f"{prefix}{key} {old} -> {new}")
    return differences
