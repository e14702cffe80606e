"""The files of a latent cache: opening, writing, checking and finishing them."""

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from accelerate import Accelerator
from filelock import BaseFileLock

from diffusion_training import __version__
from diffusion_training.arguments import format_args
from diffusion_training.data.images import describe_decoder, name_image
from diffusion_training.errors.printing import hide_secrets
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import (
    NARROW,
    check_output_dir,
    delete,
    digest_file,
    find_differences,
    fits,
    lock_folder,
    name_unfinished,
    parse_json,
    write_file,
    write_out,
)
from diffusion_training.latents.columns import name_empty_files
from diffusion_training.latents.passes import LatentRows
from diffusion_training.latents.plan import PlannedCache
from diffusion_training.latents.settings import (
    FINISHED,
    RECORD,
    SETTINGS,
    check_form,
    compare_settings,
    count_places,
    count_skipped,
    fingerprint_cache,
    name_shard,
)
from diffusion_training.remote import read_bytes

# Size of a record batch. A trainer opens all batches; the script that writes them holds one.
BATCH_BYTES = 2**26
# Flags that change nothing in a cache, so cache.json and run.args do not contain them.
UNRECORDED_FLAGS = ("output_dir", "cache_dir", "dataloader_num_workers", "dry_run", "max_skipped")


def read_cache(output_dir: Path) -> tuple[dict, dict[str, dict]]:
    """Read cache.json, and the records of all complete shards, which it may not list yet.

    Returns (dict, {file name: {"rows", "sha256", "checksums": checksum of the rows' checksums,
    "encoded_again", "captions_cut", "skipped": number of rows, "not_read": whether some of these
    could not be read}}). `list_skipped` has the rows themselves, which may be too many to hold.
    Raises ValueError if cache.json has been changed.
    """
    cache = json.loads(read_bytes(f"{output_dir}/cache.json"))
    state = output_dir / "state.json"
    if state.exists() and json.loads(state.read_text())["_fingerprint"] != fingerprint_cache(cache):
        raise ValueError("cache.json has changed since it was written")
    shards = cache.get("shards", {})
    records = {}
    for record in zip(*shards.values(), strict=True):
        values = dict(zip(shards, record, strict=True))
        records[values.pop("name")] = {**values, **count_skipped([])}
    if records:  # a finished cache has all skipped rows in one file
        for shard, entries in read_finished_skips(output_dir, cache):
            records[shard] |= count_skipped([*entries])
    # not those that other programs have copied, such as `data-00000.arrow 2.json`
    for path in output_dir.glob("unfinished/data-*.arrow.json"):
        # a shard whose record can't be read counts as missing
        if record := read_shard_record(path):
            records[path.stem] = {**record, **count_skipped(record["skipped"])}
    return cache, records


def read_shard_record(path: Path) -> dict[str, Any] | None:
    """Read the record of a shard; None if it is not there, or not whole."""
    with contextlib.suppress(ValueError, FileNotFoundError):
        record = parse_json(read_bytes(str(path)))
        if fits(record, RECORD):
            return record
    return None


def read_finished_skips(
    output_dir: Path, cache: dict[str, Any]
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yield (shard, its skipped rows) of a cache that was finished, for shards that have some."""

    def read_row(line: str) -> int:
        return json.loads(line)["row"]

    with (output_dir / "skipped.jsonl").open() as file:
        rows = np.fromiter(map(read_row, file), int)
        file.seek(0)
        # The first version for Ray could list a row in the shard that had it by mistake, too.
        is_in_order = (np.diff(rows) > 0).all()
        yield from itertools.groupby(
            map(json.loads, file if is_in_order else sorted({*file}, key=read_row)),
            lambda entry: name_shard(entry["row"] // cache["rows_per_shard"], cache),
        )


def list_skipped(
    output_dir: Path, cache: dict[str, Any], names: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows that could not be used, {"row", "key", "reason"}, in order.

    names: of all shards, in order.
    """
    finished = read_finished_skips(output_dir, cache) if "shards" in cache else iter(())
    nothing: tuple[str | None, Any] = (None, ())
    of_finished, entries = next(finished, nothing)
    for name in names:
        kept = [*entries] if of_finished == name else []
        if of_finished == name:
            of_finished, entries = next(finished, nothing)
        # a record is newer
        record = read_shard_record(output_dir / "unfinished" / f"{name}.json")
        yield from sorted(record["skipped"] if record else kept, key=lambda entry: entry["row"])


def find_begun(folders: Iterable[Path]) -> int | None:
    """Return the --batch_size that the first existing cache was begun with, None without any.

    One without a complete shard does not count: perhaps its batches did not fit.
    """
    for folder in folders:
        # a damaged cache is reported later
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            cache, records = read_cache(folder)
            if records:
                return int(cache["made_with"]["batch_size"])
    return None


def write_batches(writer: Any, batches: list[pa.RecordBatch], checksums: xxhash.xxh3_128) -> None:
    """Write record batches as one, or nothing if they have no rows.

    Programs that read batch by batch may fail on an empty one.
    """
    if not batches:
        return
    for batch in pa.Table.from_batches(batches).combine_chunks().to_batches():
        writer.write_batch(batch)
        checksums.update(batch["checksum"].to_numpy())


@contextlib.contextmanager
def writing_shard(
    path: Path, numbers: range, may_end: bool = False
) -> Iterator[tuple[dict[str, Any], Callable[..., None]]]:
    """Yield a shard's record, and a function that adds a batch of rows to the shard.

    At the end the shard and its record are written. If anything fails, neither is: also if the rows
    are not those of the shard, each once and in order.

    numbers: of the shard's rows in the source. may_end: the last ones may be missing, because the
    shard may be the last one of a stream.
    """
    unfinished = name_unfinished(path)
    record: dict[str, Any] = {"rows": 0, "encoded_again": 0, "captions_cut": 0, "skipped": []}
    # a checksum of the rows' checksums, with which a trainer verifies the shard
    checksums = xxhash.xxh3_128()
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(unfinished.open("wb"))
            writer = None
            held: list[pa.RecordBatch] = []
            came: list[int] = []

            def add(encoded: LatentRows) -> None:
                nonlocal writer
                came.extend(encoded.numbers)
                rows = encoded.rows
                writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                held.append(rows)
                added = {"rows": len(rows), "skipped": encoded.skipped, **encoded.counts}
                for name, more in added.items():
                    record[name] += more
                if sum(batch.nbytes for batch in held) >= BATCH_BYTES:
                    write_batches(writer, held, checksums)
                    held.clear()

            yield record, add
            if came != [*(numbers[: len(came)] if may_end else numbers)]:
                fail(
                    f"{path} was not written, because other rows came to it than {numbers[0]} to "
                    f"{numbers[-1]}, or in another order: this is an error of the program, please "
                    "report it; run the same command to resume",
                    alone=True,
                )
            write_batches(writer, held, checksums)
        write_out(unfinished)
        record["sha256"] = digest_file(unfinished)
        record["checksums"] = checksums.hexdigest()
        unfinished.replace(path)
        record_path = path.parent / "unfinished" / f"{path.name}.json"
        write_file(record_path, json.dumps(record), lasting=False)
    except OSError as error:
        fail(f"{path} could not be written ({error}); run the same command to resume", alone=True)
    finally:
        unfinished.unlink(missing_ok=True)


def describe_damage(
    path: Path, records: dict[str, dict], name_rows: Callable[[], list[str]] | None
) -> str | None:
    """Why a shard must be made again; None if it is intact or has no record yet.

    name_rows: see `find_foreign`; None for a stream, whose rows can't be looked up.
    """
    if path.name not in records:
        return None
    record = records[path.name]
    if record["not_read"]:
        return "lacks rows that could not be read"
    digest = digest_file(path)
    if digest != record["sha256"]:
        return "is damaged" if digest else "is gone"
    return find_foreign(path, record, name_rows()) if name_rows else None


def find_foreign(path: Path, record: dict[str, Any], names: list[str]) -> str | None:
    """Whether a shard holds other rows than its own, as a clause; None if it does not.

    The shard's keys must be the names of its rows in the data, except for skipped ones, in order.
    names: those of all its rows.
    """
    if record["rows"] + record["skipped"] != len(names):
        return f"has {record['rows'] + record['skipped']} rows in place of {len(names)}"
    with pa.memory_map(str(path)) as file:
        keys = [key for batch in pa.ipc.open_stream(file) for key in batch["key"].to_pylist()]
    left = map(shorten_name, names)
    for key in keys:
        if shorten_name(key) not in left:  # this takes the names up to the key's
            return f"holds rows of another shard, such as {key}"
    return None


def shorten_name(name: str) -> str:
    """The part of a row's name by which rows are compared.

    Without the folder if the path is absolute: that of a data set from the hub may have moved.
    """
    name = name_image(0, {"path": name})  # older versions have printed names in other ways
    return name.split("::")[0].rsplit("/", 1)[-1] if re.search("^/|::/", name) else name


def describe_rows(planned: PlannedCache, name_rows: Callable[[range], list[str]]) -> str | None:
    """For --dry_run: whether the shards of an existing cache hold their own rows, as a sentence.

    None if there is no cache, or if its rows can't be looked up: at an address, or from a stream.
    """
    folder, shards = Path(planned.output_dir), planned.list_shards()
    if not shards or not (folder / "cache.json").is_file():
        return None
    with explained(f"{folder} is damaged"):
        cache, records = read_cache(folder)
        if differences := compare_settings(cache, planned.settings):
            return f"{folder} holds another cache ({', '.join(differences)})"
    wrong = {}
    for name in records.keys() & shards.keys():
        own = name_rows(shards[name])
        try:
            reason = find_foreign(folder / name, records[name], own)
        except Exception:
            reason = "can't be read"
        if reason:
            wrong[name] = reason
    if not wrong:
        return f"{folder}: all {len(records)} shards hold their own rows"
    names = sorted(wrong)
    return (
        f"{folder}: {len(wrong)} of {len(records)} shards must be made again, which this command "
        f"does without --dry_run: {', '.join(names)}; the first {wrong[names[0]]}"
    )


def check_skipped(
    skipped: int, last: dict[str, Any] | None, num_rows: int, max_skipped: float
) -> None:
    """End the program if more rows were skipped than --max_skipped allows.

    skipped: their number. last: one of them, if one is at hand.
    """
    if skipped > max_skipped * num_rows:
        example = f", such as {last['key']} ({last['reason']})" if last else ""
        fail(
            f"{skipped} of {num_rows} rows could not be used, more than --max_skipped "
            f"{max_skipped:g} allows{example}; to resume, run the same command with a larger "
            "--max_skipped",
            alone=True,
        )


class OpenCache(NamedTuple):
    """A cache that is being made."""

    lock: BaseFileLock | None  # None on all but the first process
    cache: dict[str, Any]  # cache.json
    records: dict[str, dict[str, Any]]  # {file name: record} of the complete shards


def list_flags(planned: PlannedCache) -> dict[str, Any]:
    """The flags that a cache records."""
    return {
        flag: hide_secrets(value)
        for flag, value in planned.flags.items()
        if value is not None and flag not in UNRECORDED_FLAGS
    }


def write_empty_prompt(
    output_dir: Path, cache: dict[str, Any], empty_prompt: dict[str, np.ndarray]
) -> dict[str, str | None]:
    """Write the embeddings of a dropped caption. Returns their checksums, for cache.json."""
    checksums = {}
    files = name_empty_files(cache)
    for name, embeds in empty_prompt.items():
        path = output_dir / f"{files[name]}.npy"
        np.save(output_dir / f".tmp-{path.name}", embeds)
        (output_dir / f".tmp-{path.name}").replace(path)
        checksums[f"{files[name]}_sha256"] = digest_file(path)
    return checksums


def open_cache(
    accelerator: Accelerator,
    planned: PlannedCache,
    empty_prompt: dict[str, np.ndarray],
    folder: Path | None = None,
) -> OpenCache:
    """Lock --output_dir, and open the cache in it or start a new one.

    A trainer can then begin with --follow.

    `folder` is the local copy of the cache if --output_dir is elsewhere.
    """
    name = planned.output_dir
    if folder is None:
        check_output_dir(planned.flags)
    output_dir = Path(folder or name)
    settings = planned.settings
    decoder = describe_decoder()
    lock = None
    if accelerator.is_main_process:
        lock = lock_folder(output_dir, name, lambda names: "cache.json" in names, "latent cache")
        with explained(f"--output_dir {name} can't be written to"):
            if not (output_dir / "cache.json").exists():
                made_with = list_flags(planned)
                about = {"decoder": decoder, "made_with": made_with, "version": __version__}
                text = json.dumps({**settings, **about}, indent=1)
                # the hashes of older versions are for caches that these have begun
                text = re.sub(rf"({NARROW}\w+) \w+", r"\1", text)
                write_file(output_dir / "cache.json", text)
            (output_dir / "unfinished").mkdir(exist_ok=True)
            for leftover in output_dir.rglob(".tmp-*"):  # left by a run that was killed
                delete(leftover)
            files = name_empty_files(settings)
            if not all((output_dir / f"{files[name]}.npy").exists() for name in empty_prompt):
                write_empty_prompt(output_dir, settings, empty_prompt)
    accelerator.wait_for_everyone()
    try:
        cache, records = read_cache(output_dir)
        check_form(cache, SETTINGS | (FINISHED if "shards" in cache else {}))
        differences = compare_settings(cache, settings)
    except Exception as error:
        fail(
            f"{name} is damaged ({type(error).__name__}: {error}): "
            "delete it, or choose another --output_dir"
        )
    if differences:
        # the twin in minimal/ records fewer flags, and all as text
        before = {name: str(value) for name, value in cache["made_with"].items()}
        now = {name: str(value) for name, value in list_flags(planned).items() if name in before}
        flags = find_differences(before, now, "--")
        reason = "; ".join(", ".join(names) for names in (flags, differences) if names)
        fail(f"{name} holds another cache ({reason}): choose another --output_dir")
    about = {"made_with": list_flags(planned)}
    is_new = cache["made_with"] != about["made_with"]
    if is_new and not records and folder is None and accelerator.is_main_process:
        # nothing was made with the flags before
        write_file(output_dir / "cache.json", json.dumps(cache | about, indent=1))
    path = output_dir / "run.args"
    command = format_args(planned.flags, "python precompute_latents.py", UNRECORDED_FLAGS)
    content = os.fsencode(hide_secrets(command))
    if accelerator.is_main_process and not (path.is_file() and path.read_bytes() == content):
        write_file(path, content)
    # not an error: JPEG decoders differ only by a grey level or two
    if cache["decoder"] != decoder:
        accelerator.print(
            f"{name} was begun with {cache['decoder']}; this run decodes JPEGs with {decoder}"
        )
    return OpenCache(lock, cache, records)


def finish_cache(output_dir: Path, empty_prompt: dict[str, np.ndarray], max_skipped: float) -> dict:
    """When all shards are complete, write the files that make them a data set.

    state.json comes last, because the cache does not open without it. Returns the new cache.json.
    """
    cache, records = read_cache(output_dir)
    counts = {name: record["rows"] + record["skipped"] for name, record in records.items()}
    total = cache["source"]["rows"]
    if total is None:  # a stream
        total = sum(counts.values())
    places = count_places(total, cache["rows_per_shard"]).tolist()
    names = [name_shard(number, cache) for number in range(len(places))]
    for name, place in zip(names, places, strict=True):
        if counts.get(name, 0) != place:
            fail(
                f"{output_dir}/{name} has {counts.get(name, 0)} rows in place of {place}: delete "
                "it, and run the same command to make it again"
            )
    records = {name: records[name] for name in names}
    unfinished = name_unfinished(output_dir / "skipped.jsonl")
    skipped, last = 0, None
    with unfinished.open("w") as file:
        for last in list_skipped(output_dir, cache, names):
            file.write(json.dumps(last) + "\n")
            skipped += 1
    write_out(unfinished)
    unfinished.replace(output_dir / "skipped.jsonl")
    num_rows = sum(record["rows"] for record in records.values())
    check_skipped(skipped, last, skipped + num_rows, max_skipped)
    if not num_rows and last:
        fail(
            f"none of the {skipped} rows could be used, such as {last['key']} "
            f"({last['reason']}): delete {output_dir}, and look at the data"
        )
    cache |= write_empty_prompt(output_dir, cache, empty_prompt)
    for name in ("rows", "encoded_again", "captions_cut"):
        cache[name] = sum(record[name] for record in records.values())
    cache["skipped"] = skipped
    # by columns, which are read twice as fast: a million shards in two seconds
    cache["shards"] = {"name": names} | {
        column: [records[name][column] for name in names]
        for column in RECORD
        if column != "skipped"
    }
    del records  # they take a kilobyte a shard, and so does what follows
    state = {  # `datasets` requires these keys
        "_format_columns": None,
        "_format_type": None,
        "_split": None,
        "_format_kwargs": {},
        "_output_all_columns": False,
        "_fingerprint": fingerprint_cache(cache),
        "_data_files": [{"filename": name} for name in names],
    }
    encoder = json.JSONEncoder(indent=1)
    write_file(output_dir / "cache.json", encoder.iterencode(cache))
    write_file(output_dir / "dataset_info.json", "{}")
    write_file(output_dir / "state.json", encoder.iterencode(state))
    shutil.rmtree(output_dir / "unfinished")
    return cache
