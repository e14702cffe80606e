"""The files of a latent cache: complete or absent, recognized, and safe after a kill.

No model is needed: the numbers are random.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from conftest import CHILDREN, read_files
from diffusers.configuration_utils import FrozenDict
from filelock import FileLock

import precompute_latents
from diffusion_training import __version__
from diffusion_training.data.rows import ImageRows
from diffusion_training.families.base import Encoders
from diffusion_training.families.known import load_family
from diffusion_training.latents import cache as module
from diffusion_training.latents.cache_size import describe_size
from diffusion_training.latents.columns import FORMAT_VERSION, checksum_row
from diffusion_training.latents.passes import LatentRows
from diffusion_training.latents.plan import plan_caches
from diffusion_training.latents.settings import find_gap, name_shard

LATENTS, PROMPT = [2, 8, 8], [5, 6]  # shapes
NUM_ROWS, ROWS_PER_SHARD = 7, 3
SKIPPED = {4: "cannot identify image file"}


def make_args(output_dir, *argv):
    flags = [
        f"--train_data_dir={CHILDREN}",
        "--pretrained_model_name_or_path=sd",
        f"--rows_per_shard={ROWS_PER_SHARD}",
    ]
    flags += ["--resolution=512", "--random_flip"]
    return precompute_latents.parse_args([*flags, f"--output_dir={output_dir}", *map(str, argv)])


def make_settings(text_cache="embeddings"):
    """Settings like those of `describe_encoders`, for models that do not exist."""
    return {
        "format_version": FORMAT_VERSION,
        "vae": {
            "class": "AutoencoderKL",
            "sha256": "a" * 64,
            "scaling_factor": 0.2,
            "shift_factor": 0.0,
        },
        "text_encoder": {"class": "CLIPTextModel", "sha256": "b" * 64},
        "tokenizer": {"sha256": "c" * 64, "model_max_length": PROMPT[0]},
        "tokenizer_rules": {"libraries": "tokenizers 1", "tokenizer": "d" * 64},
        "latents": "moments",
        "latents_shape": list(LATENTS),
        "prompt_embeds_shape": list(PROMPT),
        "text_cache": text_cache,
        "dtype": "float32",
    }


def write_shard(path, encoded, numbers=range(NUM_ROWS)):
    with module.writing_shard(path, numbers) as (record, add):
        for item in encoded:
            add(item)
    return record


def encode_rows(first, end, seed=0, text_cache="embeddings", skipped=SKIPPED):
    """Yield rows like `encode_all`, two per batch, with random numbers."""
    for start in range(first, end, 2):
        rows = range(start, min(start + 2, end))
        good = [row for row in rows if row not in skipped]
        columns = {
            "latents": np.prod(LATENTS),
            "latents_flipped": np.prod(LATENTS),
            "prompt_embeds": np.prod(PROMPT),
        }
        drawn = {
            name: [
                np.random.default_rng([seed, row, *name.encode()]).normal(size=n).astype(np.float16)
                for row in good
            ]
            for name, n in columns.items()
        }
        if text_cache == "ids":
            drawn["input_ids"] = [
                numbers[: PROMPT[0]].view(np.int16).astype(np.int32)
                for numbers in drawn.pop("prompt_embeds")
            ]
        kinds = {name: pa.int32() if name == "input_ids" else pa.float16() for name in drawn}
        sizes = {name: PROMPT[0] if name == "input_ids" else int(columns[name]) for name in drawn}
        arrays = {
            name: pa.FixedSizeListArray.from_arrays(
                pa.array(np.concatenate(numbers) if numbers else [], kinds[name]), sizes[name]
            )
            for name, numbers in drawn.items()
        }
        arrays["text"] = pa.array([f"caption {row}" for row in good], pa.string())
        arrays["key"] = pa.array([f"{row}.png" for row in good], pa.string())
        checksums = [
            checksum_row({name: drawn[name][i] for name in drawn}) for i in range(len(good))
        ]
        arrays["checksum"] = pa.array(checksums, pa.uint64())
        bad = [
            {"row": row, "key": f"{row}.png", "reason": skipped[row]}
            for row in rows
            if row in skipped
        ]
        counts = {"encoded_again": 0, "captions_cut": 1}
        yield LatentRows(0, rows, pa.RecordBatch.from_pydict(arrays), bad, counts)


ACCELERATOR = argparse.Namespace(is_main_process=True, wait_for_everyone=lambda: None, print=print)
EMPTY = {"prompt_embeds": np.zeros(PROMPT, np.float16)}
ROWS = type(
    "Rows",
    (),
    {"_fingerprint": "f" * 16, "column_names": ["image"], "__len__": lambda self: NUM_ROWS},
)()


# a side of a latent is 64 pixels
VAE = argparse.Namespace(
    device=torch.device("cpu"),
    config=FrozenDict(
        in_channels=3, latent_channels=1, block_out_channels=[8] * 7, scaling_factor=0.2
    ),
)


def plan(args, family="sd", **described):
    """Plan a cache as the scripts do."""
    encoders = Encoders(load_family(family), VAE, None, None)
    images = ImageRows(ROWS, "image", args.mask_column)
    found = {"mixed_precision": "no", "compile": None}
    described = make_settings(args.text_cache) | described
    (planned,) = plan_caches(args, images, encoders, described, found)
    return planned


def open_cache(args):
    """Plan and open a cache as the scripts do.

    Returns (names of its shards, its lock, cache.json, records).
    """
    planned = plan(args)
    return planned.list_shards(), *module.open_cache(ACCELERATOR, planned, EMPTY)


def make_cache(folder, *argv, seed=0):
    """Make a cache of six rows in three shards, one row skipped. Existing parts are kept."""
    args = make_args(folder, *argv)
    shards, lock, _, records = open_cache(args)
    for i, name in enumerate(shards):
        if name not in records:
            rows = range(i * ROWS_PER_SHARD, min(NUM_ROWS, (i + 1) * ROWS_PER_SHARD))
            encoded = encode_rows(rows[0], rows[-1] + 1, seed, args.text_cache)
            write_shard(folder / name, encoded, rows)
    empty_prompt = np.random.default_rng(seed).normal(size=PROMPT).astype(np.float16)
    try:
        return module.finish_cache(folder, {"prompt_embeds": empty_prompt}, 0.5)
    finally:
        lock.release(force=True)
        (folder / ".lock").unlink()


def refused(match, args):
    with pytest.raises(SystemExit, match=match):
        open_cache(args)


# ------------------------------------------------------------------- shards and their records


def test_a_shard_holds_good_rows_and_its_record_lists_the_skipped_ones(tmp_path):
    (tmp_path / "unfinished").mkdir()
    record = write_shard(tmp_path / "data.arrow", encode_rows(0, 7))
    rows = pa.ipc.open_stream((tmp_path / "data.arrow").read_bytes()).read_all()
    assert rows["key"].to_pylist() == [f"{row}.png" for row in (0, 1, 2, 3, 5, 6)]
    assert rows == pa.Table.from_batches([encoded.rows for encoded in encode_rows(0, 7)])
    assert record == json.loads((tmp_path / "unfinished/data.arrow.json").read_text())
    assert record.pop("sha256") == module.digest_file(tmp_path / "data.arrow")
    assert record.pop("checksums") == xxhash.xxh3_128_hexdigest(
        rows["checksum"].combine_chunks().to_numpy()
    )
    skipped = [{"row": 4, "key": "4.png", "reason": SKIPPED[4]}]
    assert record == {"rows": 6, "encoded_again": 0, "captions_cut": 4, "skipped": skipped}
    assert set(read_files(tmp_path)) == {"data.arrow", "unfinished/data.arrow.json"}


def test_a_shard_without_good_rows_can_be_opened(tmp_path):
    (tmp_path / "unfinished").mkdir()
    bad = dict.fromkeys(range(3), "broken")
    record = write_shard(tmp_path / "data.arrow", encode_rows(0, 3, skipped=bad), range(3))
    assert record["rows"] == 0
    read = pa.ipc.open_stream((tmp_path / "data.arrow").read_bytes())
    assert "latents" in read.schema.names and list(read) == []


def test_small_batches_are_written_as_few_large_ones(tmp_path, monkeypatch):
    """A trainer opens every record batch, and a writer holds only one of them in memory."""
    monkeypatch.setattr(module, "BATCH_BYTES", 256 * 16)
    arrays = {"numbers": pa.array(range(640)), "checksum": pa.array(range(640), pa.uint64())}
    rows, counts = pa.RecordBatch.from_pydict(arrays), {"encoded_again": 0, "captions_cut": 0}
    (tmp_path / "unfinished").mkdir()
    encoded = []
    for start in range(0, 640, 16):
        batch = rows.slice(start, 0 if start == 32 else 16)
        encoded.append(LatentRows(0, range(start, start + 16), batch, [], counts))
    record = write_shard(tmp_path / "shard.arrow", encoded, range(640))
    written = list(pa.ipc.open_stream(tmp_path / "shard.arrow"))
    assert [len(batch) for batch in written] == [256, 256, 112]
    assert pa.Table.from_batches(written) == pa.Table.from_batches(
        [rows.slice(0, 32), rows.slice(48)]
    )
    checksums = b"".join(batch["checksum"].to_numpy().tobytes() for batch in written)
    assert (record["rows"], record["checksums"]) == (624, xxhash.xxh3_128_hexdigest(checksums))


@pytest.mark.parametrize(
    "where", ["new_stream", "write_batches", "fsync", "write_file", "encoding"]
)
def test_a_shard_whose_write_fails_leaves_no_partial_file(tmp_path, monkeypatch, where):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "data.arrow").write_bytes(b"before")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    def broken():
        yield from encode_rows(0, 2)
        raise RuntimeError("CUDA error: too hot")

    owner = {"new_stream": module.pa.ipc, "fsync": module.os}.get(where, module)
    if where == "encoding":
        with pytest.raises(RuntimeError, match="too hot"):
            write_shard(tmp_path / "data.arrow", broken())
    else:
        monkeypatch.setattr(owner, where, full)
        with pytest.raises(
            SystemExit,
            match=r"data.arrow could not be written \(.*No space left.*run the same command",
        ):
            write_shard(tmp_path / "data.arrow", encode_rows(0, 7))
        monkeypatch.undo()
    found = read_files(tmp_path)
    if where == "write_file":  # a shard without a record is made again
        pa.ipc.open_stream(found.pop("data.arrow")).read_all()
    assert found in ({}, {"data.arrow": b"before"})


def name_rows():
    return [f"{row}.png" for row in range(NUM_ROWS)]


def test_describe_damage_finds_every_change_of_a_shard(tmp_path):
    (tmp_path / "unfinished").mkdir()
    path = tmp_path / "data.arrow"
    record = write_shard(path, encode_rows(0, 7))
    records = {path.name: record | module.count_skipped(record["skipped"])}
    whole = path.read_bytes()
    assert module.describe_damage(path, records, name_rows) is None
    # a shard without a record counts as missing
    assert module.describe_damage(tmp_path / "another.arrow", records, name_rows) is None
    for bit in np.random.default_rng(0).integers(8 * len(whole), size=200).tolist():
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert module.describe_damage(path, records, name_rows) == "is damaged"
    for changed in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(changed)
        assert module.describe_damage(path, records, name_rows) == "is damaged"
    path.unlink()
    assert module.describe_damage(path, records, name_rows) == "is gone"
    path.write_bytes(whole)
    records[path.name] |= module.count_skipped([{"reason": "not read: [Errno 5] I/O error"}])
    assert module.describe_damage(path, records, name_rows) == "lacks rows that could not be read"


@pytest.mark.parametrize("rows", [
    [2, 3, 4, 5, 6, 7, 8],
    [0, 1, 4, 5, 6],
    [0, 1, 2, 3, 2, 3, 6],
    [1, 0, 2, 3, 4, 5, 6],
    [0, 1, 2, 3],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 1, 2, 3, 4, 5, 6, 7, 8],
])  # fmt: skip
def test_a_shard_takes_only_its_own_rows_each_once_and_in_order(tmp_path, rows):
    (tmp_path / "unfinished").mkdir()
    batches = {batch.numbers[0]: batch for batch in encode_rows(0, 10)}
    encoded = []
    for first in range(0, len(rows), 2):
        numbers = rows[first : first + 2]
        encoded.append(batches[numbers[0] // 2 * 2]._replace(numbers=numbers))
    said = "data.arrow was not written, because other rows came to it than 0 to 6, .*resume"
    with pytest.raises(SystemExit, match=said):
        write_shard(tmp_path / "data.arrow", encoded)
    assert read_files(tmp_path) == {}


def test_only_the_last_shard_of_a_stream_may_end_before_its_rows(tmp_path):
    (tmp_path / "unfinished").mkdir()
    with module.writing_shard(tmp_path / "data.arrow", range(7), may_end=True) as (record, add):
        for encoded in encode_rows(0, 4):
            add(encoded)
    assert record["rows"] == 4
    with pytest.raises(SystemExit, match="other rows came"):
        with module.writing_shard(tmp_path / "data.arrow", range(7), may_end=True) as (_, add):
            for encoded in encode_rows(2, 4):
                add(encoded)


NAMES = ["a.png", "b.png", "b.png", "c.png", "a.png"]  # the data may list an image twice


@pytest.mark.parametrize("keys, skipped, said", [
    (NAMES, 0, None),
    (["b.png", "b.png", "a.png"], 2, None),
    (["a.png", "b.png", "c.png"], 2, None),
    (["x.png", "b.png", "c.png", "a.png"], 1, "holds rows of another shard, such as x.png"),
    (["a.png", "a.png", "b.png"], 2, "holds rows of another shard, such as b.png"),
    (["c.png", "b.png"], 3, "holds rows of another shard, such as b.png"),
    (NAMES[:4], 0, "has 4 rows in place of 5"),
    ([*NAMES, "d.png"], 0, "has 6 rows in place of 5"),
])  # fmt: skip
def test_find_foreign_compares_keys_with_the_names_in_the_data(tmp_path, keys, skipped, said):
    path = tmp_path / "data.arrow"
    table = pa.table({"key": keys})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    record = {"rows": len(keys), "skipped": skipped}
    assert module.find_foreign(path, record, NAMES) == said


@pytest.mark.parametrize("key, name, is_equal", [
    ("/home/a/hub/x/photo.png", "/mnt/hub/y/photo.png", True),  # a cache of the hub that has moved
    ("/home/a/hub/x/photo.png", "/mnt/hub/y/other.png", False),
    ("zip://a/photo.png::/home/a/x.zip", "zip://a/photo.png::/mnt/x.zip", True),
    ("a/photo.png", "b/photo.png", False),
    ("zip://photo.png::a.zip", "zip://photo.png::b.zip", False),
    ("s3://a/photo.png", "s3://b/photo.png", False),
    ("row 1", "row 2", False),
    ("new\nline.png", "new?line.png", True),  # as an older version has written it
])  # fmt: skip
def test_names_of_rows_are_compared_without_folders_that_can_move(key, name, is_equal):
    assert (module.shorten_name(key) == module.shorten_name(name)) == is_equal


def test_a_cache_of_ray_with_anothers_rows_is_found_and_made_again(tmp_path):
    """The first version for Ray could write the rows of one shard into another one."""
    folder = tmp_path / "out"
    bad = dict.fromkeys((0, 4), "broken")
    args = make_args(folder)
    planned = plan(args)
    shards, lock, *_ = open_cache(args)
    lock.release(force=True)

    def name_rows(numbers):
        return [f"{row}.png" for row in numbers]

    def make(name, rows, own):
        encoded = [*encode_rows(rows.start, rows.stop, skipped=bad)]
        numbers = iter(own)
        fitting = [each._replace(numbers=[*itertools.islice(numbers, len(each.numbers))])
                   for each in encoded]  # fmt: skip
        write_shard(folder / name, fitting, own)

    (first, second, last), (own, other, rest) = shards, shards.values()
    assert module.describe_rows(planned, name_rows).endswith(": all 0 shards hold their own rows")
    make(first, other, own)
    make(second, other, other)
    make(last, rest, rest)
    cache = module.finish_cache(folder, EMPTY, 0.5)
    assert cache["skipped"] == 2  # row 4 twice
    said = module.describe_rows(planned, name_rows)
    assert "1 of 3 shards must be made again" in said and f": {first}; the first has 2 rows" in said
    _, records = module.read_cache(folder)
    found = {
        name: module.describe_damage(folder / name, records, functools.partial(name_rows, rows))
        for name, rows in shards.items()
    }
    assert found == {first: "has 2 rows in place of 3", second: None, last: None}
    _, lock, *_ = open_cache(args)
    make(first, own, own)
    lock.release(force=True)
    module.finish_cache(folder, EMPTY, 0.5)
    assert module.describe_rows(planned, name_rows).endswith(": all 3 shards hold their own rows")
    listed = (folder / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in listed] == [0, 4]


@pytest.mark.parametrize("lost", [0, 2])
def test_a_cache_that_lacks_a_shard_is_not_finished(tmp_path, lost):
    shards, lock, *_ = open_cache(make_args(tmp_path))
    for number, (name, rows) in enumerate(shards.items()):
        if number != lost:
            write_shard(tmp_path / name, encode_rows(rows.start, rows.stop), rows)
    place = len([*shards.values()][lost])
    with pytest.raises(SystemExit, match=rf"{[*shards][lost]} has 0 rows in place of {place}: "):
        module.finish_cache(tmp_path, EMPTY, 0.5)
    assert not (tmp_path / "state.json").exists()
    lock.release(force=True)


@pytest.mark.parametrize("rows, change, said", [
    (7, {}, None),
    (None, {}, None),
    (7, {"name": ["a", "b"], "rows": [3, 3]}, "it has 2 shards in place of 3"),
    (7, {"name": ["a", "b", "b"]}, "it has 2 shards in place of 3"),
    (7, {"rows": [3, 2, 2]}, "c has 2 rows in place of 1"),
    (7, {"rows": [3, 1, 1]}, "its shards hold 5 rows, and 1 were skipped, of 7"),
    (None, {"rows": [4, 1, 1]}, "a has 4 rows in place of 3"),
])  # fmt: skip
def test_find_gap_counts_the_rows_of_a_finished_cache(rows, change, said):
    shards = {"name": ["a", "b", "c"], "rows": [3, 2, 1]} | change
    cache = {"source": {"rows": rows}, "rows_per_shard": 3, "skipped": 1, "shards": shards}
    assert find_gap(cache) == said


def test_checksum_row_covers_every_bit_and_ignores_column_order():
    row = {"prompt_embeds": np.arange(6, dtype=np.float16), "latents": np.ones(4, np.float16)}
    seen = {checksum_row(row)}
    assert checksum_row(dict(reversed(row.items()))) in seen
    for name, bit in [
        (name, bit) for name, numbers in row.items() for bit in range(16 * len(numbers))
    ]:
        changed = row[name].copy()
        changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(checksum_row({**row, name: changed}))
    assert len(seen) == 1 + 16 * 10


def test_more_rows_skipped_than_max_skipped_end_the_run():
    last = {"row": 5, "key": "5.png", "reason": "broken 5"}
    module.check_skipped(5, last, 100, 0.05)
    module.check_skipped(0, None, 100, 0)
    with pytest.raises(
        SystemExit, match=r"6 of 100 .*_skipped 0.05 allows, such as 5.png \(broken 5"
    ) as stop:
        module.check_skipped(6, last, 100, 0.05)
    with pytest.raises(SystemExit, match="6 of 100 .*_skipped 0.05 allows; to resume"):
        module.check_skipped(6, None, 100, 0.05)
    assert stop.value.alone  # the process that made the last shard prints it


# ------------------------------------------------------------------- planning and opening a cache


def test_a_planned_cache_lists_its_shards_and_its_size(tmp_path):
    planned = plan(make_args(tmp_path))
    shards = planned.list_shards()
    names = [f"data-{i:05d}-of-00003.arrow" for i in range(3)]
    assert shards == dict(zip(names, (range(3), range(3, 6), range(6, 7)), strict=True))
    assert [name_shard(i, planned.settings) for i in range(3)] == names
    # latents of 128 numbers twice, embeddings of 30, two bytes each
    size = "7 rows of 572B (60.0B for the caption) and the text: 4.00kB in 3 shards"
    assert describe_size(planned.settings, {}, compare=False) == size
    choices = "; captions take 140B as ids, 420B as embeddings"
    assert describe_size(planned.settings, {}, compare=True) == size + choices
    planned = plan(make_args(tmp_path, "--text_cache=ids", "--no-random_flip"))
    assert "7 rows of 276B (20.0B for" in describe_size(planned.settings, {}, compare=False)


def test_several_resolutions_plan_the_same_caches_as_separate_runs(tmp_path):
    args = make_args(tmp_path / "out", "--resolution", 512, 256)
    encoders, images = (
        Encoders(load_family("sd"), VAE, None, None),
        ImageRows(ROWS, "image", "where"),
    )
    found = {"mixed_precision": "bf16", "compile": None}
    settings = make_settings() | {"latents": "sample"}
    caches = plan_caches(args, images, encoders, settings, found)
    for side, planned in zip((512, 256), caches, strict=True):
        folder = str(tmp_path / f"out/{side}")
        alone = make_args(folder, f"--resolution={side}")
        (expected,) = plan_caches(alone, images, encoders, settings, found)
        assert planned == expected and planned.output_dir == folder
        assert planned.settings["latents_shape"] == [1, side // 64, side // 64]
        said = {"resolution": side, "output_dir": folder, "latents": "sample", **found}
        said |= {"mask_column": "where", "caption_weights": None}
        assert planned.flags == vars(alone) | said
    (tmp_path / "out").mkdir()
    (tmp_path / "out/cache.json").write_text("{}")
    with pytest.raises(SystemExit, match="is a cache itself: several --resolution need another"):
        plan_caches(args, images, encoders, settings, found)
    with pytest.raises(SystemExit, match="--resolution 100 is not a multiple of 64"):
        plan(make_args(tmp_path, "--resolution=100"))


def leaves(tree, path=()):
    for key, value in tree.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]


def test_a_cache_with_any_other_setting_is_refused(tmp_path):
    """If one setting of a cache differs, the script stops with an error that names it."""
    make_cache(tmp_path / "out")
    before, planned = read_files(tmp_path / "out"), plan(make_args(tmp_path / "out"))
    settings = planned.settings
    # rules that other versions of the libraries wrote are not compared
    paths = [path for path in leaves(settings) if path != ("tokenizer_rules", "libraries")]
    assert len(paths) == 30 and ("transform", "image_interpolation_mode") in paths
    for path in paths:
        changed = json.loads(json.dumps(settings))
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        old, parent[path[-1]] = parent[path[-1]], "another"
        with pytest.raises(SystemExit) as stop:
            module.open_cache(ACCELERATOR, dataclasses.replace(planned, settings=changed), EMPTY)
        said = (
            f"{tmp_path / 'out'} holds another cache ({'.'.join(path)} {old} -> another): "
            "choose another --output_dir"
        )
        assert str(stop.value) == said
    assert read_files(tmp_path / "out") == {**before, ".lock": b""}


def test_a_cache_made_with_other_flags_is_refused(tmp_path):
    make_cache(tmp_path / "out")
    for argv, name in {
        "--resolution=64": (
            r"latents_shape \[2, 8, 8\] -> \[2, 1, 1\], transform.resolution 512 -> 64"
        ),
        "--center_crop": "transform.center_crop False -> True",
        "--no-random_flip": "transform.random_flip True -> False",
        "--seed=3": "transform.seed 0 -> 3",
        "--min_size=9": "transform.min_size 0 -> 9",
        "--skip_empty_captions": "transform.skip_empty_captions False -> True",
        "--image_interpolation_mode=bilinear": (
            "transform.image_interpolation_mode bicubic -> bilinear"
        ),
        "--rows_per_shard=4": "rows_per_shard 3 -> 4",
    }.items():
        flag = argv.partition("=")[0].replace("--no-", "--")
        refused(
            rf"holds another cache \({flag} .* -> .*; {name}\)", make_args(tmp_path / "out", argv)
        )


def test_equal_flags_of_a_twins_cache_are_not_listed_as_differences(tmp_path):
    """minimal/precompute_latents.py records only the flags that it has, and as text."""
    make_cache(tmp_path / "out")
    path = tmp_path / "out/cache.json"
    (tmp_path / "out/state.json").unlink()
    cache = json.loads(path.read_text())
    kept = ("resolution", "batch_size", "seed", "train_data_dir", "random_flip")
    recorded = {name: str(cache["made_with"][name]) for name in kept if name in cache["made_with"]}
    assert len(recorded) > 3
    path.write_text(json.dumps(cache | {"made_with": recorded}))
    refused(
        r"holds another cache \(--seed 0 -> 3; transform.seed 0 -> 3\): choose another",
        make_args(tmp_path / "out", "--seed=3"),
    )


def test_shard_records_are_stored_as_columns_and_read_back(tmp_path):
    cache = make_cache(tmp_path / "out")
    whole = read_files(tmp_path / "out")
    read, records = module.read_cache(tmp_path / "out")
    assert read == cache and [*records] == cache["shards"]["name"]
    for name, column in cache["shards"].items():
        assert name == "name" or column == [record[name] for record in records.values()]
    assert {name: record["skipped"] for name, record in records.items()} == {
        "data-00000-of-00003.arrow": 0,
        "data-00001-of-00003.arrow": 1,
        "data-00002-of-00003.arrow": 0,
    }
    make_cache(tmp_path / "out")  # with nothing missing
    assert read_files(tmp_path / "out") == whole


def test_flags_that_change_no_number_may_differ_when_a_cache_resumes(tmp_path, capsys):
    cache = make_cache(tmp_path / "out")
    assert cache["version"] == __version__
    whole = read_files(tmp_path / "out")
    argv = [
        "--max_skipped=0.5",
        "--batch_size=5",
        "--dataloader_num_workers=1",
        f"--cache_dir={tmp_path}",
    ]
    _, lock, _, records = open_cache(make_args(tmp_path / "out", *argv))
    lock.release(force=True)
    assert [*records] == cache["shards"]["name"] and capsys.readouterr().out == ""
    now = read_files(tmp_path / "out")
    assert (
        "--batch_size=5" in now["run.args"].decode()
        and "max_skipped" not in now["run.args"].decode()
    )
    assert now | {"run.args": b""} == whole | {"run.args": b"", ".lock": b""}
    # begun by a version without the new entries, and with another JPEG decoder
    make_cache(tmp_path / "old")
    begun = {
        name: value
        for name, value in cache.items()
        if name in {**make_settings(), "transform": 0, "features": 0, "source": 0}
    }
    begun |= {"rows_per_shard": ROWS_PER_SHARD, "decoder": "pillow 1.0", "made_with": {}}
    (tmp_path / "old/cache.json").write_text(json.dumps(begun))
    (tmp_path / "old/state.json").unlink()
    _, lock, _, _ = open_cache(make_args(tmp_path / "old"))
    lock.release(force=True)
    assert "was begun with pillow 1.0; this run decodes JPEGs with" in capsys.readouterr().out
    assert make_cache(tmp_path / "old")["shards"] == cache["shards"]


def test_open_cache_writes_only_to_the_local_copy(tmp_path):
    (tmp_path / "copy").mkdir()
    planned = plan(make_args(tmp_path / "out"))
    lock, _, _ = module.open_cache(ACCELERATOR, planned, EMPTY, tmp_path / "copy")
    lock.release(force=True)
    assert {".lock", "cache.json", "empty_prompt.npy", "run.args"} == {
        *read_files(tmp_path / "copy")
    } and not (tmp_path / "out").exists()


def test_a_cache_lists_the_features_that_its_reader_needs(tmp_path):
    pooled = {"pooled_prompt_embeds_shape": [7], "text_encoder_2": {}}
    sizes = ["--bucket_step=64", "--mask_column=where"]
    several = ["--caption_weights", 1, 2]
    for family, more, flags, features in (
        ("sd", {}, [], []),
        ("sdxl", pooled, [], ["sdxl"]),
        ("sdxl", pooled, sizes, ["sdxl", "ragged latents", "masks"]),
        ("prx", {"model_family": "prx"}, [], ["ragged embeddings"]),
        ("prx", {"model_family": "prx"}, several, ["ragged embeddings", "captions"]),
    ):
        settings = plan(make_args(tmp_path, *flags), family, **more).settings
        assert settings["features"] == features


def test_run_args_of_a_cache_hold_its_flags(tmp_path):
    make_cache(tmp_path / "out", "--caption_column=a b", "--seed=5")
    again = precompute_latents.parse_args([f"@{tmp_path / 'out/run.args'}"])
    made = make_args(tmp_path / "out", "--caption_column=a b", "--seed=5")
    changed = {name for name in vars(made) if getattr(made, name) != getattr(again, name)}
    assert changed == {"output_dir", "latents", "mixed_precision"}  # found by the script
    assert (again.latents, again.mixed_precision) == ("moments", "no")
    assert (
        (tmp_path / "out/run.args")
        .read_text()
        .startswith("# python precompute_latents.py @run.args\n")
    )


def test_output_folders_with_other_files_are_refused_and_unchanged(tmp_path):
    (tmp_path / "file").write_text("")
    refused("can't be written to", make_args(tmp_path / "file/out"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model_index.json").write_text("{}")
    refused(
        "holds model_index.json and no latent cache: choose another folder",
        make_args(tmp_path / "other"),
    )
    assert set(read_files(tmp_path / "other")) <= {"model_index.json", ".lock"}
    (tmp_path / "data").mkdir()
    args = make_args(tmp_path / "data/out", f"--train_data_dir={tmp_path / 'data'}")
    refused("lies in --train_data_dir", args)
    assert not (tmp_path / "data/out").exists()


def test_a_cache_locked_by_another_process_is_refused(tmp_path):
    make_cache(tmp_path / "out")
    (tmp_path / "out/.tmp-of-another-run").touch()
    with FileLock(tmp_path / "out/.lock"):
        refused(
            f"another process is writing to {tmp_path / 'out'}: end it", make_args(tmp_path / "out")
        )
    assert (tmp_path / "out/.tmp-of-another-run").exists()


def test_files_half_written_at_a_kill_are_deleted_and_made_again(tmp_path):
    make_cache(tmp_path / "whole")
    args = make_args(tmp_path / "out")
    shards, lock, cache, records = open_cache(args)
    assert not records and cache["made_with"]["rows_per_shard"] == ROWS_PER_SHARD
    lock.release(force=True)
    shards = [*shards]
    for i in (0, 1):
        rows = range(3 * i, 3 * i + 3)
        write_shard(tmp_path / "out" / shards[i], encode_rows(rows.start, rows.stop), rows)
    unfinished = tmp_path / "out/unfinished"
    # as after a power cut without fsync
    (unfinished / f"{shards[1]}.json").write_text('{"rows": 3, "sha')
    (unfinished / f".tmp-{shards[2]}.json").write_text("")
    # as a program that synchronizes folders names a conflicting copy
    shutil.copy(unfinished / f"{shards[0]}.json", unfinished / f"{shards[0]} 2.json")
    (tmp_path / f"out/.tmp-{shards[2]}").write_bytes(b"half")
    (tmp_path / "out/.tmp-folder").mkdir()
    _, lock, _, records = open_cache(args)
    lock.release(force=True)
    assert set(records) == {shards[0]} and not list((tmp_path / "out").rglob(".tmp-*"))
    make_cache(tmp_path / "out")
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_a_cache_killed_while_it_writes_its_first_files_can_be_resumed(tmp_path, monkeypatch):
    for least in range(3):
        written, write_file = [], module.write_file

        def killed(path, text, least=least, written=written, write_file=write_file):
            if len(written) == least:
                raise KeyboardInterrupt
            written.append(write_file(path, text))

        with (
            monkeypatch.context() as first,
            pytest.raises(KeyboardInterrupt) if least < 2 else contextlib.nullcontext(),
        ):
            first.setattr(module, "write_file", killed)
            open_cache(make_args(tmp_path / str(least)))
        make_cache(tmp_path / str(least))
        assert (tmp_path / str(least) / "run.args").exists()


@pytest.mark.parametrize("file, change, said", [
    ("cache.json", lambda text: text.replace('"rows": 6', '"rows": 7'),
     "cache.json has changed since it was written"),
    ("cache.json", lambda text: text[:100], "JSONDecodeError"),
    ("cache.json", lambda text: "[]", "AttributeError|TypeError|ValueError"),
    ("state.json", lambda text: "{}", "KeyError: '_fingerprint'"),
    ("skipped.jsonl", lambda text: text[:-5], "JSONDecodeError"),
])  # fmt: skip
def test_a_finished_cache_with_changed_metadata_is_refused(tmp_path, file, change, said):
    make_cache(tmp_path / "out")
    path = tmp_path / "out" / file
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    before = read_files(tmp_path / "out")
    refused(
        rf"{tmp_path / 'out'} is damaged \(.*({said}).*delete it, or choose another",
        make_args(tmp_path / "out"),
    )
    assert read_files(tmp_path / "out") == {**before, ".lock": b""}
    path.write_text(text)
    make_cache(tmp_path / "out")


# ------------------------------------------------------------------- finishing a cache


def test_datasets_opens_a_finished_cache_with_the_same_bits(tmp_path):
    cache = make_cache(tmp_path / "out")
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    expected = pa.Table.from_batches(
        [encoded.rows for i in (0, 3, 6) for encoded in encode_rows(i, min(i + 3, 7))]
    )
    assert rows.data.table.combine_chunks() == expected.combine_chunks()
    assert json.loads((tmp_path / "out/state.json").read_text())[
        "_fingerprint"
    ] == module.fingerprint_cache(cache)
    assert {name: cache[name] for name in ("rows", "skipped", "encoded_again", "captions_cut")} == {
        "rows": 6, "skipped": 1, "encoded_again": 0, "captions_cut": 5,
    }  # fmt: skip
    assert [
        json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    ] == [{"row": 4, "key": "4.png", "reason": SKIPPED[4]}]
    assert np.load(tmp_path / "out/empty_prompt.npy").dtype == np.float16
    assert not (tmp_path / "out/unfinished").exists() and not list((tmp_path / "out").glob(".*"))


def test_skipped_rows_are_listed_in_order_and_too_many_stop_finish_cache(tmp_path):
    args = make_args(tmp_path)
    shards, lock, _, _ = open_cache(args)
    lock.release(force=True)
    for i, name in reversed([*enumerate(shards)]):
        skipped = {row: f"broken {row}" for row in (5, 1, 0)}
        rows = range(3 * i, min(3 * i + 3, NUM_ROWS))
        encoded = encode_rows(rows.start, rows.stop, skipped=skipped)
        write_shard(tmp_path / name, encoded, rows)
    with pytest.raises(
        SystemExit, match=r"3 of 7 rows could not be used, .* such as 5.png \(broken 5\)"
    ):
        module.finish_cache(tmp_path, EMPTY, 0.4)
    assert not (tmp_path / "state.json").exists() and (tmp_path / "unfinished").exists()
    assert module.finish_cache(tmp_path, EMPTY, 0.5)["skipped"] == 3
    listed = [
        json.loads(line)["row"] for line in (tmp_path / "skipped.jsonl").read_text().splitlines()
    ]
    assert listed == [0, 1, 5] and len(datasets.load_from_disk(str(tmp_path))) == 4


def test_a_cache_without_a_single_row_is_an_error_with_any_max_skipped(tmp_path):
    args = make_args(tmp_path)
    shards, lock, *_ = open_cache(args)
    for i, name in enumerate(shards):
        rows = range(i * ROWS_PER_SHARD, min(NUM_ROWS, (i + 1) * ROWS_PER_SHARD))
        skipped = [{"row": row, "key": f"{row}.png", "reason": "broken"} for row in rows]
        encoded, *_ = encode_rows(rows.start, rows.stop)
        encoded = encoded._replace(numbers=rows, rows=encoded.rows[:0], skipped=skipped)
        write_shard(tmp_path / name, [encoded], rows)
    said = f"none of the {NUM_ROWS} rows could be used, such as 6.png .broken.: delete .*, and look"
    with pytest.raises(SystemExit, match=said):
        module.finish_cache(tmp_path, {}, 1.0)
    assert not (tmp_path / "state.json").exists()
    lock.release(force=True)


def test_a_kill_in_finish_cache_loses_nothing_and_state_json_is_last(tmp_path, monkeypatch):
    """Without state.json a cache can't be opened."""
    make_cache(tmp_path / "whole")
    whole = read_files(tmp_path / "whole")
    finish_cache, replace, rmtree = module.finish_cache, Path.replace, shutil.rmtree
    for least in range(7):
        out, moments = tmp_path / f"out{least}", itertools.count()

        def step(work, *args, least=least, moments=moments):
            if next(moments) == least:
                raise KeyboardInterrupt
            return work(*args)

        def finish(*args, step=step):
            with monkeypatch.context() as killed:
                killed.setattr(Path, "replace", lambda path, target: step(replace, path, target))
                killed.setattr(module.shutil, "rmtree", lambda path: step(rmtree, path))
                return finish_cache(*args)

        with monkeypatch.context() as first:
            first.setattr(module, "finish_cache", finish)
            with pytest.raises(KeyboardInterrupt) if least < 6 else contextlib.nullcontext():
                make_cache(out)
        if least < 5:
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(out))
        assert (out / "state.json").exists() == (least >= 5)
        make_cache(out)
        assert read_files(out) == whole


@pytest.mark.parametrize("change", [
    "[]", "1", {"skipped": None}, {"skipped": [[]]}, {"skipped": [{"row": 1}]}, {"rows": "3"},
    {"sha256": None},
])  # fmt: skip
def test_shards_with_an_invalid_record_count_as_missing(tmp_path, change):
    whole = {
        "rows": 3,
        "sha256": "a",
        "checksums": "b",
        "encoded_again": 0,
        "captions_cut": 0,
        "skipped": [],
    }
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "cache.json").write_text("{}")
    record = tmp_path / "unfinished/data-00000-of-00001.arrow.json"
    record.write_text(json.dumps(whole))
    counted = whole | {"skipped": 0, "not_read": False}
    assert module.read_cache(tmp_path)[1] == {"data-00000-of-00001.arrow": counted}
    record.write_text(change if isinstance(change, str) else json.dumps(whole | change))
    assert module.read_cache(tmp_path)[1] == {}
