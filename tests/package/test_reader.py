"""Latent caches as the trainer reads them: the right rows, and every changed bit is noticed."""

import hashlib
import json
import os
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from conftest import MODELS, hash_as_before, patch, replace
from test_cache import LATENTS, NUM_ROWS, make_args, make_cache

from diffusion_training.data.encoders import describe_latents, describe_models, load_encoders
from diffusion_training.data.folders import name_shared_folder
from diffusion_training.families.known import load_family
from diffusion_training.families.opening import open_base
from diffusion_training.latents import reader as module
from diffusion_training.latents import shards
from diffusion_training.latents.cache import read_shard_record
from diffusion_training.latents.source import (
    check_family,
    load_matching_encoders,
    sample_cached_captions,
)
from diffusion_training.models import hash_weights

KEYS = [4, 0, 5, 2, 2, 1]  # rows in no order, one of them twice


@pytest.fixture
def cache(tmp_path):
    make_cache(tmp_path / "cache")
    return tmp_path / "cache"


def open_caches(*folders, seed=0, random_flip=True):
    return module.CachedLatents(
        {folder: module.load_cache(folder) for folder in folders}, seed, random_flip
    )


def read_rows(folder):
    """All rows of a cache as the trainer reads them, plain and mirrored."""
    data = open_caches(folder)
    return [data[[(epoch, row, 1.0) for epoch in range(8)]] for row in range(len(data))]


def refused(folder, *said):
    with pytest.raises(SystemExit) as stop:
        module.load_cache(folder)
    assert all(part in str(stop.value) for part in said), stop.value


def write_rows(path, batches, schema):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def rewrite(cache, change):
    """Change cache.json, and make the fingerprint in state.json fit."""
    content = json.loads((cache / "cache.json").read_text())
    change(content)
    (cache / "cache.json").write_text(json.dumps(content, indent=1))
    state = json.loads((cache / "state.json").read_text())
    state["_fingerprint"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    (cache / "state.json").write_text(json.dumps(state))


# ------------------------------------------------------------------- reading rows


@pytest.mark.parametrize("text", ["prompt_embeds", "input_ids"])
def test_caches_are_read_correctly_across_shards_and_folders(tmp_path, text):
    flags = ["--text_cache=ids"] if text == "input_ids" else []
    for seed, name in enumerate(("cache", "other")):
        make_cache(tmp_path / name, *flags, seed=seed)
    data = open_caches(tmp_path / "cache", tmp_path / "other")
    rows = [
        datasets.load_from_disk(str(tmp_path / name)).with_format("arrow")
        for name in ("cache", "other")
    ]
    expected = pa.concat_tables([table[:] for table in rows])
    assert len(data) == len(expected) == 12 and list(data.names()) == expected["key"].to_pylist()
    columns = {
        name: np.stack(expected[name].to_pylist()) for name in ("latents", "latents_flipped", text)
    }
    keys = [(epoch, row, 0.5) for epoch in range(8) for row in (10, 0, 5, 3, 4, 6)]
    batch, flipped = data[keys], 0
    assert batch["latents_shape"] == LATENTS
    assert set(batch) == {
        "latents",
        text,
        "latents_shape",
        "flipped",
        "weight",
        "skipped",
    } and batch["weight"].tolist() == [0.5] * len(keys)
    assert batch["latents"].dtype == torch.float16 and batch["skipped"] == []
    for i, (epoch, row, _) in enumerate(keys):
        mirrored = module.draw_choices(0, epoch, row)[2] < 0.5
        assert batch["flipped"][i].item() == mirrored
        assert np.array_equal(
            batch["latents"][i], columns["latents_flipped" if mirrored else "latents"][row]
        )
        assert np.array_equal(batch[text][i], columns[text][row])
        flipped += mirrored
    assert 12 < flipped < 36  # the same row is mirrored in some epochs
    plain = open_caches(tmp_path / "cache", tmp_path / "other", random_flip=False)[keys][
        "latents"
    ].numpy()
    assert np.array_equal(plain, columns["latents"][[row for _, row, _ in keys]])


def test_a_batch_in_any_order_equals_its_single_rows(cache):
    keys, data = [(1, row, row / 10) for row in KEYS], open_caches(cache)
    batch, alone = data[keys], [data[[key]] for key in keys]
    for name in ("latents", "prompt_embeds", "weight"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone]))


def test_the_seed_decides_which_rows_are_mirrored(cache):
    keys = [(epoch, row, 1.0) for epoch in range(8) for row in range(6)]
    one, again, other = (open_caches(cache, seed=seed)[keys]["latents"] for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_caches_with_and_without_mirrored_latents_can_be_combined(tmp_path, cache):
    make_cache(tmp_path / "plain", "--no-random_flip", seed=1)
    data = open_caches(tmp_path / "plain", cache, random_flip=False)
    batch = data[[(0, row, 1.0) for row in range(6, 12)]]
    expected = datasets.load_from_disk(str(cache)).with_format("numpy")["latents"][:]
    assert np.array_equal(batch["latents"], expected) and not batch["flipped"].any()


def test_repeated_rows_in_an_epoch_are_mirrored_independently(tmp_path, cache):
    make_cache(tmp_path / "other", seed=1)
    data = open_caches(cache, tmp_path / "other")
    again = data[[(0, 7 + len(data) * k, 1.0) for k in range(8)]]
    assert (
        len(again["latents"].unique(dim=0)) == 2 and len(again["prompt_embeds"].unique(dim=0)) == 1
    )
    assert torch.equal(again["prompt_embeds"][7], data[[(0, 7, 1.0)]]["prompt_embeds"][0])


def test_digests_of_cached_rows_depend_only_on_their_content(tmp_path, cache):
    make_cache(tmp_path / "other", seed=1)
    one, other, both = (
        open_caches(cache),
        open_caches(tmp_path / "other"),
        open_caches(tmp_path / "other", cache),
    )
    digests = [data.digest(row) for data in (other, one) for row in range(6)]
    assert [both.digest(row) for row in range(12)] == digests
    for row, of_latents in enumerate(digests):
        batch = both[[(0, row, 1.0)]]
        found = xxhash.xxh3_128_hexdigest(batch["latents"].numpy().tobytes())
        assert (found == of_latents) is not batch["flipped"].item()


def test_empty_record_batches_in_a_shard_are_skipped(cache):
    expected = read_rows(cache)
    path = cache / "data-00000-of-00003.arrow"
    table = pa.ipc.open_stream(path.read_bytes()).read_all().combine_chunks()
    (batch,) = table.to_batches()
    write_rows(path, [batch[:0], batch[:1], batch[1:1], batch[1:], batch[:0]], table.schema)
    for one, other in zip(read_rows(cache), expected, strict=True):
        assert torch.equal(one["latents"], other["latents"])


def test_fingerprints_of_caches_depend_on_their_content(tmp_path, cache):
    make_cache(tmp_path / "equal")
    make_cache(tmp_path / "other", seed=1)
    one, equal, other = (
        open_caches(tmp_path / name).fingerprint for name in ("cache", "equal", "other")
    )
    assert one == equal != other
    assert (
        len(
            {
                open_caches(*(tmp_path / x for x in xs)).fingerprint
                for xs in (["cache"], ["cache", "other"])
            }
        )
        == 2
    )


# ------------------------------------------------------------------- the rows of an epoch


def count_rows(epochs, weights, holdout=(), seed=0):
    """Return (count of each row in each epoch: [epochs, rows], the drawn numbers).

    The rows are 6 of one cache and 5 of another.
    """
    members = {
        "folders": ["a", "b"],
        "cache_ends": np.array([6, 11]),
        "groups": [[0], [1]],
        "__len__": lambda self: 11,
        "seed": seed,
    }
    dataset, rows = (
        type("Dataset", (), members)(),
        np.array([row for row in range(11) if row not in holdout]),
    )
    numbers = [module.choose_rows(rows, dataset, weights, epoch) for epoch in range(epochs)]
    assert len({len(of_epoch) for of_epoch in numbers}) == 1
    return np.stack([np.bincount(of_epoch % 11, minlength=11) for of_epoch in numbers]), numbers


def test_latents_weights_set_how_often_an_epoch_uses_each_cache():
    counts, numbers = count_rows(3, [1, 3])
    assert (counts[:, :6] == 1).all() and (counts[:, 6:] == 3).all()
    # each repeat has its own number, so it is mirrored on its own
    assert len(set(numbers[0])) == len(numbers[0]) == 21
    assert (np.diff(numbers[0]) > 0).all()
    held = {"weights": [0.5, 1.4], "holdout": (0, 1)}
    counts, _ = count_rows(10, **held)
    assert (counts[:, :2] == 0).all()  # the held-out rows
    assert (counts[:, 2:6].sum(axis=1) == 2).all() and (counts[:, 6:].sum(axis=1) == 7).all()
    assert (counts[:, 2:6] <= 1).all() and set(counts[:, 6:].flat) == {1, 2}
    assert len(np.unique(counts, axis=0)) > 3  # epochs differ, but all rows are equally frequent
    assert (counts[:, 2:6].sum(axis=0) == 5).all() and (counts[:, 6:].sum(axis=0) == 14).all()
    # 16.2 and 4.5 of 20.7 rows: epochs round up or down in turns
    counts, _ = count_rows(10, [2.7, 0.9])
    assert {*counts.sum(axis=1)} == {21} and counts[:, :6].sum() == pytest.approx(
        210 * 16.2 / 20.7, abs=1
    )
    assert np.ptp(counts.sum(axis=0)[:6]) <= 1
    counts, _ = count_rows(10, **held)
    assert np.array_equal(counts, count_rows(10, **held)[0])
    assert not np.array_equal(counts, count_rows(10, **held, seed=1)[0])
    for weights in ([1, 1], [], None):  # weights of 1 change nothing
        assert all(np.array_equal(of_epoch, range(11)) for of_epoch in count_rows(3, weights)[1])
    with pytest.raises(
        SystemExit, match="--latents_weights takes 0.05 of the 5 rows of b: choose a larger weight"
    ):
        count_rows(1, [1, 0.01])


def test_apportion_rounds_by_the_largest_remainder():
    assert module.apportion([1.2, 5.8, 3.0], 1) == [1, 6, 3]
    assert module.apportion([1.2, 5.8, 3.0], 3) == [4, 17, 9]


# ------------------------------------------------------------------- refused caches


def test_missing_unfinished_or_damaged_caches_are_refused(tmp_path, cache):
    refused(
        tmp_path / "nowhere",
        "nowhere/cache.json is missing: make the cache with precompute_latents.py",
    )
    (tmp_path / "photo.png").touch()  # somebody's file is not to be deleted
    refused(tmp_path / "photo.png", "photo.png/cache.json is missing: make the cache with")
    for name in ("cache.json", "state.json"):  # precompute_latents.py can't read these either
        path, data = cache / name, (cache / name).read_bytes()
        path.write_bytes(data[:-4])
        refused(cache, "is damaged", "delete it, and make the cache again")
        path.write_bytes(data)
    for name in ("data-00001-of-00003.arrow", "empty_prompt.npy"):
        path, data = cache / name, (cache / name).read_bytes()
        path.unlink()
        refused(cache, f"{name} is missing")
        path.write_bytes(data[:-400])
        refused(cache, "is damaged", "to repair it, run the command that made the cache")
        path.write_bytes(data)
    shard = cache / "data-00001-of-00003.arrow"
    shard.write_bytes((cache / "data-00000-of-00003.arrow").read_bytes())
    refused(cache, f"{shard} is damaged (3 rows instead of 2)")
    shard.write_bytes(data)
    (cache / "state.json").unlink()
    refused(cache, f"{cache} is not finished: to finish it, run the command that made it")


def test_a_damaged_cache_of_cache_latents_is_to_be_deleted(tmp_path, cache):
    """Nobody has run a command that could repair it."""
    shared = name_shared_folder("latents", tmp_path) / "0123"
    shutil.copytree(cache, shared)
    said = f"delete {shared}, and the next run with --cache_latents makes it again"
    for name in ("data-00001-of-00003.arrow", "cache.json"):
        data = (shared / name).read_bytes()
        (shared / name).unlink()
        refused(shared, f"{name} is missing: {said}")
        (shared / name).write_bytes(data[:-400])
        refused(shared, "is damaged", said)
        (shared / name).write_bytes(data)


def test_a_caption_that_is_no_text_is_damage(cache):
    shard = cache / "data-00000-of-00003.arrow"
    (text,) = {*datasets.load_from_disk(cache)["text"][:1]}
    shard.write_bytes(shard.read_bytes().replace(text.encode(), b"\xb6" + text.encode()[1:], 1))
    with pytest.raises(SystemExit, match=f"{cache} is damaged: to repair it, run the command"):
        sample_cached_captions(module.load_cache(cache).shards)


def test_a_cache_of_another_family_is_refused_before_its_settings_are_read():
    """A recorded pipeline would take its findings from them."""
    with pytest.raises(SystemExit, match=r"a does not fit these models .*model_family sd -> prx"):
        check_family("a", {"model_family": "sd"}, load_family("prx"))


def test_too_many_memory_maps_are_not_reported_as_damage(cache, monkeypatch):
    paths, memory_map = [], pa.memory_map

    def refuse(path):  # as pyarrow does beyond vm.max_map_count
        paths.append(path)
        if len(paths) == 2:
            raise OSError("Memory mapping file failed: Cannot allocate memory")
        return memory_map(path)

    monkeypatch.setattr(pa, "memory_map", refuse)
    with pytest.raises(SystemExit) as stop:
        module.load_cache(cache)
    assert (
        paths[1] in str(stop.value)
        and "vm.max_map_count" in str(stop.value)
        and "damaged" not in str(stop.value)
    )


# numpy 2.5 warns where a flipped bit turns a number into a duration
@pytest.mark.filterwarnings("ignore:The 'generic' unit")
@pytest.mark.parametrize("text_cache", ["embeddings", "ids"])
def test_every_changed_bit_of_a_cache_is_detected_in_training(tmp_path, text_cache):
    cache, rng, caught = tmp_path / "cache", np.random.default_rng(0), 0
    make_cache(cache, f"--text_cache={text_cache}")
    expected = read_rows(cache)
    text = "input_ids" if text_cache == "ids" else "prompt_embeds"
    whole = {
        path: path.read_bytes()
        for path in cache.iterdir()
        if path.is_file() and path.name != "run.args"
    }
    for path, content in [item for item in whole.items() if item[1]]:
        for _ in range(10 if path.suffix != ".arrow" else 40):
            changed = bytearray(content)
            changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
            path.write_bytes(changed)
            try:
                rows = read_rows(cache)
            except (SystemExit, OSError) as error:
                assert "damaged" in str(error) or "missing" in str(error), error
                caught += 1
            else:  # not read: captions, keys, padding, the layout of the other files
                assert path.name != "cache.json"
                for one, other in zip(rows, expected, strict=True):
                    assert torch.equal(one["latents"], other["latents"]) and torch.equal(
                        one[text], other[text]
                    )
            path.write_bytes(content)
    assert caught > 40
    # Each bit of the numbers themselves, of one row
    path = cache / "data-00001-of-00003.arrow"
    for column in ("latents", "latents_flipped", text):
        numbers = list(module.load_cache(cache).shards)[1][column][0].values.to_numpy().tobytes()
        place = whole[path].index(numbers)
        for bit in range(0, 8 * len(numbers), 11):
            changed = bytearray(whole[path])
            changed[place + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(OSError, match=f"{path} is damaged: to repair it, run the command"):
                open_caches(cache)[[(0, 3, 1.0)]]


def test_a_row_is_checked_only_at_its_first_read(cache, monkeypatch):
    checked, checksum_row = [], shards.checksum_row
    monkeypatch.setattr(
        shards, "checksum_row", lambda row: checked.append(sorted(row)) or checksum_row(row)
    )
    data = open_caches(cache, random_flip=False)
    assert not checked  # a cache of any size opens at once
    for _ in range(3):
        data[[(0, row, 1.0) for row in KEYS]]
    assert checked == [["latents", "latents_flipped", "prompt_embeds"]] * 5


def change_shards(cache, change):
    """Change the table of shards in cache.json, {column: a value for each shard}."""
    rewrite(cache, lambda content: change(content["shards"]))


def drop_last(shards):
    for column in shards.values():
        column.pop()


def repeat_first(shards):
    for column in shards.values():
        column[1] = column[0]


@pytest.mark.parametrize("change, said", [
    (drop_last, "it has 2 shards in place of 3"),
    (repeat_first, "it has 2 shards in place of 3"),
    (lambda shards: shards["rows"].__setitem__(0, 2), "5 rows, and 1 were skipped, of 7"),
    (lambda shards: shards["rows"].__setitem__(0, 4), "arrow has 4 rows in place of 3"),
])  # fmt: skip
def test_a_cache_that_lacks_rows_is_refused_without_reading_them(cache, monkeypatch, change, said):
    monkeypatch.setattr(module, "FEW_SHARDS", 0)
    change_shards(cache, change)
    refused(cache, "is damaged (", f"{said}): to repair it, run the command that made the cache")


def write_twice(cache, rows):
    """Write these rows of the first shard into the second one too, as the first Ray script could.

    rows: indices of both shards.
    """
    one, two = (pa.ipc.open_stream((cache / name).read_bytes()).read_all()
                for name in (f"data-0000{i}-of-00003.arrow" for i in range(2)))  # fmt: skip
    mixed = [(one if i in rows else two).slice(i, 1) for i in range(len(two))]
    table = pa.concat_tables(mixed).combine_chunks()
    write_rows(cache / "data-00001-of-00003.arrow", table.to_batches(), table.schema)
    checksums = xxhash.xxh3_128_hexdigest(table["checksum"].combine_chunks().to_numpy())
    change_shards(cache, lambda shards: shards["checksums"].__setitem__(1, checksums))


def test_rows_that_two_shards_have_are_named_at_the_start(tmp_path, cache, capsys):
    shutil.copytree(cache, tmp_path / "right")
    module.load_cache(cache)
    assert capsys.readouterr().out == ""
    write_twice(cache, {0, 1})
    module.load_cache(cache)
    (said,) = capsys.readouterr().out.splitlines()
    assert f"{cache}: 2 rows are in two shards (data-00000-of-00003.arrow and data-00001-" in said
    assert "such as 0.png: unless the data lists them twice, the cache is wrong; to repair" in said
    # rows that may be there twice: repeats of sd-scripts, rows that were chosen, two sources
    folder_repeats = {"folder_repeats": True}
    rewrite(cache, lambda content: content["made_with"].update(folder_repeats))
    module.load_cache(cache)
    rewrite(cache, lambda content: content["made_with"].pop("folder_repeats"))
    source = {"fingerprint": f"{module.FILTERED}0", "rows": 7}
    rewrite(cache, lambda content: content.update(source=source))
    module.load_cache(cache)
    module.load_cache(tmp_path / "right")
    assert capsys.readouterr().out == ""


def test_exchanged_shards_and_wrong_layouts_are_refused(tmp_path, cache):
    make_cache(tmp_path / "other", seed=1)
    one, two = cache / "data-00000-of-00003.arrow", cache / "data-00001-of-00003.arrow"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes((tmp_path / "other" / one.name).read_bytes())  # from another cache
    refused(cache, f"{one} is damaged (it has changed since it was written)")
    one.write_bytes(first)
    table = pa.ipc.open_stream(second).read_all()
    for column, values in {
        "latents": [[1] * 128] * 2,  # integers
        "prompt_embeds": [[1.0] * 29, [1.0] * 31],  # ragged
        "latents_flipped": None,
    }.items():
        changed = table.drop_columns([column])
        if values:
            changed = table.set_column(
                table.schema.get_field_index(column), column, pa.array(values)
            )
        write_rows(two, changed.to_batches(), changed.schema)
        refused(cache, f"{two} is damaged", column)
    holes = table["latents"].combine_chunks().flatten().to_pylist()
    holes = pa.FixedSizeListArray.from_arrays(pa.array([None, *holes[1:]], pa.float16()), 128)
    write_rows(two, table.set_column(0, "latents", holes).to_batches(), table.schema)
    refused(cache, f"{two} is damaged (latents does not have 128 numbers in each row)")
    two.write_bytes(second)
    # a name that points outside the folder
    shutil.copytree(cache, tmp_path / "equal")
    names = [f"../equal/{one.name}", two.name, "data-00002-of-00003.arrow"]
    rewrite(cache, lambda content: content["shards"].update(name=names))
    refused(cache, f"{cache} is damaged (it names shards outside the folder)")


def test_a_cache_whose_settings_do_not_fit_its_columns_is_refused(cache):
    for change, said in {
        "latents_shape": ([2, 3, 5], "latents does not have 30 numbers in each row"),
        "prompt_embeds_shape": ([5, 7], "prompt_embeds does not have 35 numbers in each row"),
        "text_cache": ("ids", "input_ids"),
        "shards": (dict.fromkeys(("name", "rows", "sha256", "checksums"), []), "it holds no rows"),
        "empty_prompt_sha256": ("0" * 64, "empty_prompt.npy has changed since it was written"),
    }.items():
        old = json.loads((cache / "cache.json").read_text())[change]
        rewrite(cache, lambda content, change=change, new=said[0]: content.update({change: new}))
        refused(cache, "is damaged", said[1])
        rewrite(cache, lambda content, change=change, old=old: content.update({change: old}))
    assert len(open_caches(cache)) == NUM_ROWS - 1


def test_a_shard_that_is_a_pipe_is_refused(cache):
    shard = next(cache.glob("data-*"))
    shard.unlink()
    os.mkfifo(shard)
    refused(cache, f"{shard} is damaged (it is not a file)")


@pytest.mark.parametrize("path, values", [
    ("rows", ["6", None, [], True, {}]), ("captions_cut", [None, "0"]), ("skipped", ["1", []]),
    ("shards", [None, [], "x"]), ("shards.name", ["x", None, [1], {}]),
    ("shards.rows", ["x", ["1"], [[]]]), ("shards.sha256", [3]), ("shards.checksums", [[None]]),
    ("tokenizer_rules", [None, True, [], {}]), ("tokenizer_rules.libraries", [None, 3]),
    ("text_encoder", ["x", None, []]), ("vae", ["x", None]), ("tokenizer", [[], {}]),
    ("tokenizer.model_max_length", ["77", None]), ("text_cache", [None, []]), ("latents", [3]),
    ("latents_shape", ["x", None, ["8"]]), ("features", ["masks", None, [1], {}]),
    ("transform", [None, "x", []]), ("transform.resolution", ["16", [16], None, True]),
    ("transform.caption_weights", [-1, "x", ["x"]]), ("transform.random_flip", [None, "x"]),
    ("transform.bucket_step", ["x", True]), ("source", [None, []]), ("source.rows", ["7", []]),
    ("rows_per_shard", ["3", None]),
])  # fmt: skip
def test_a_forged_cache_json_is_refused_in_one_sentence(cache, path, values):
    *outer, name = path.split(".")
    for value in [*values, "gone"]:

        def forge(content, value=value):
            for key in outer:
                content = content[key]
            content.pop(name)
            if value != "gone":
                content[name] = value

        before = (cache / "cache.json").read_text()
        rewrite(cache, forge)
        said = f"cache.json has no valid {path.split('.')[0]}"
        refused(cache, f"{cache} is damaged ({said}", "make the cache again")
        if path != "shards" or value != "gone":  # else it counts as begun
            with pytest.raises(SystemExit, match=f"{cache} is damaged .*: delete it, or choose"):
                make_cache(cache)
        rewrite(cache, lambda content, before=before: content.update(json.loads(before)))


def test_a_pipe_or_too_deep_a_file_in_place_of_cache_json_is_refused(cache):
    (cache / "cache.json").write_text("[" * 100_000)
    refused(cache, f"{cache} is damaged (")
    (cache / "cache.json").unlink()
    os.mkfifo(cache / "cache.json")
    refused(cache, f"{cache} is damaged (", "cache.json is not a file)")
    with pytest.raises(SystemExit, match="cache.json is not a file"):
        make_cache(cache)


def test_a_record_that_is_a_pipe_or_too_deep_counts_as_missing(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("[" * 100_000)
    assert read_shard_record(path) is None
    path.unlink()
    os.mkfifo(path)
    assert read_shard_record(path) is None


def test_a_further_column_that_a_checksum_covers_is_named(cache):
    """As one adds it in minimal/precompute_latents.py."""
    shard = next(cache.glob("data-*.arrow"))
    batches = [*pa.ipc.open_stream(pa.memory_map(str(shard)))]
    further = []
    for batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns["score"] = pa.array(np.arange(len(batch), dtype=np.float32))
        columns["checksum"] = pa.array(np.arange(len(batch), dtype=np.uint64))
        further.append(pa.RecordBatch.from_pydict(columns))
    digest = xxhash.xxh3_128()
    for batch in further:
        digest.update(batch["checksum"].to_numpy())
    write_rows(shard, further, further[0].schema)
    number = sorted(cache.glob("data-*.arrow")).index(shard)
    rewrite(
        cache,
        lambda content: content["shards"]["checksums"].__setitem__(number, digest.hexdigest()),
    )
    rows = open_caches(cache)
    first = int(rows.starts[number])
    with pytest.raises(OSError, match="further column score, which the checksum of a row must not"):
        rows[[(0, first, 1.0)]]


def test_names_of_unknown_features_are_printable(cache):
    rewrite(cache, lambda content: content["features"].append("\x1b[31mred"))
    refused(cache, "?[31mred", "which this version can't read")


def test_a_cache_of_another_format_version_is_refused(cache):
    for version in (2, 3, 5):
        rewrite(cache, lambda content, version=version: content.update(format_version=version))
        refused(
            cache, f"{cache} has format {version}, but this version reads 4: make the cache again"
        )


# ------------------------------------------------------------------- caches that fit the models


def read_args(*argv):
    """The flags of a trainer that are compared with caches."""
    args = make_args("out", f"--pretrained_model_name_or_path={MODELS}", "--no-random_flip", *argv)
    resolution = args.resolution if argv else None
    return replace(args, resolution=resolution, shuffle_caption=False)


def load():
    return load_encoders(open_base(read_args()), torch.float32)


def describe(encoders, **more):
    """The compared settings of a cache of these models."""
    content = describe_models(encoders)
    content |= {
        "latents": "moments",
        "latents_shape": [8, 8, 8],
        "prompt_embeds_shape": [8, 32],
        "text_cache": "embeddings",
        "captions_cut": 0,
        "rows": 10,
    }
    content["features"] = []
    content["transform"] = {"resolution": 16, "random_flip": False, "caption_weights": None}
    return module.Cache({**content, **more}, {}, None)


def test_a_cache_of_other_models_or_settings_is_refused(capsys, monkeypatch):
    def check(*found, argv=()):
        args = read_args(*argv)
        load_matching_encoders(dict(zip("ab", found, strict=False)), open_base(args), None, args)

    models = load()
    good = describe(models)
    assert describe_latents(load_family("sd"), models.vae, 16, "moments").shape == (8, 8, 8)
    assert describe_latents(load_family("sd"), models.vae, 32, "sample").shape == (4, 16, 16)
    check(good, good)
    with monkeypatch.context() as before:
        patch(before, "hash_weights", hash_as_before)
        older = describe(models)
    assert older.settings["vae"]["sha256"] not in good.settings["vae"]["sha256"]
    check(good, older)
    check(older, good)
    assert capsys.readouterr().out == ""
    check(describe(models, captions_cut=3))
    assert (
        capsys.readouterr().out
        == "a: 3 of 10 captions have more than 8 tokens, and the rest is cut off\n"
    )

    for change, said in {
        "scaling_factor": "vae.scaling_factor 0.18215 -> 0.9446",
        "weight": "vae.sha256 ",
        "text": "text_encoder.sha256 ",
        "tokens": "tokenizer.sha256 ",
    }.items():
        encoders = load()
        with torch.no_grad():
            if change == "scaling_factor":
                encoders.vae.register_to_config(scaling_factor=0.18215)
            elif change == "weight":
                encoders.vae.encoder.conv_in.bias[0] += 1e-3
            elif change == "text":
                encoders.text_encoders[0].final_layer_norm.bias[0] += 1e-3
            else:
                encoders.tokenizers[0].add_tokens(["<another>"])
        for hash_function in (hash_weights, hash_as_before):
            with monkeypatch.context() as before:
                patch(before, "hash_weights", hash_function)
                cache = describe(encoders)
            with pytest.raises(SystemExit) as stop:
                check(cache)
            assert str(stop.value).startswith(
                f"a does not fit these models or the first cache ({said}"
            ), stop.value
            # a new token is in the vocabulary and has rules of its own
            assert str(stop.value).count(" -> ") == 1 + (change == "tokens")
    for second, said in {
        "model_family": ("sdxl", "model_family sdxl -> sd"),
        "latents": ("sample", "latents sample -> moments"),
        "latents_shape": ([8, 8, 4], "latents_shape [8, 8, 4] -> [8, 8, 8]"),
        "text_cache": ("ids", "text_cache ids -> embeddings"),
        "prompt_embeds_shape": ([8, 48], "prompt_embeds_shape [8, 48] -> [8, 32]"),
    }.items():
        with pytest.raises(SystemExit) as stop:
            check(good, describe(models, **{second: said[0]}))
        assert str(stop.value).startswith(
            f"b does not fit these models or the first cache ({said[1]})"
        )
    with pytest.raises(
        SystemExit, match="--random_flip needs a cache made with --random_flip, unlike a"
    ):
        check(good, argv=["--random_flip", "--resolution=16"])
    with pytest.raises(
        SystemExit, match="--resolution 32 differs from the 16 px of a: leave it out"
    ):
        check(good, argv=["--resolution=32"])
    check(good, argv=["--resolution=16"])
