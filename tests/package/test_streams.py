"""Streamed rows for a cache: each comes once, with any processes and any existing shards."""

import json
import random

import datasets
import pytest

import precompute_latents
import train_text_to_image
from diffusion_training.data.streams import StreamedRows
from diffusion_training.latents.settings import name_shard


def make_stream(tmp_path, count, files=3):
    """A stream of numbers from parquet files, in groups of two."""
    tmp_path.mkdir()
    cuts = sorted(random.Random(count).sample(range(1, count), files - 1)) if count > files else []
    for i, (first, end) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
        rows = datasets.Dataset.from_dict({"number": list(range(first, end))})
        rows.to_parquet(tmp_path / f"{i}.parquet", batch_size=2)
    (tmp_path / "unfinished").mkdir()
    options = {
        "data_files": [str(path) for path in sorted(tmp_path.glob("*.parquet"))],
        "split": "train",
    }
    return lambda: datasets.load_dataset("parquet", streaming=True, **options)


def name(shard):
    return name_shard(shard, {"rows_per_shard": 1, "source": {"rows": None}})


def work(opened, missing, many, rank, num_processes, folder, records, stop_after=10**9):
    """Take keys as precompute_latents.py does, for at most `stop_after` batches.

    Adds {shard: its rows} to records.
    """
    shards, per_shard = {}, opened.per_shard
    for i, keys in enumerate(opened.keys(missing, many, rank, num_processes)):
        if i == stop_after:
            return
        (shard,) = {row // per_shard for _, row, _, _ in keys}
        assert keys[0][1] % per_shard % many == 0 and len(keys) <= many
        assert {(epoch, weight) for epoch, _, weight, _ in keys} == {(0, None)}
        assert [item["number"] for *_, item in keys] == [row for _, row, _, _ in keys]
        # as with groupby, a shard is finished when the next one begins
        for other in [other for other in shards if other != shard]:
            records[name(other)] = shards.pop(other)
            opened.save_position(other, rank)
        shards.setdefault(shard, []).extend(row for _, row, _, _ in keys)
    for shard, rows in shards.items():
        records[name(shard)] = rows
        opened.save_position(shard, rank)


@pytest.mark.parametrize("seed", range(12))
def test_every_streamed_row_is_cached_once_despite_kills_and_damage(tmp_path, seed):
    rng = random.Random(seed)
    count, per_shard, many = rng.randint(1, 30), rng.randint(1, 7), rng.randint(1, 7)
    stream, records = make_stream(tmp_path / "data", count), {}
    expected = [
        list(range(first, min(first + per_shard, count))) for first in range(0, count, per_shard)
    ]
    for attempt in range(40):
        num_processes = rng.randint(1, 3)
        for rank in range(num_processes):
            opened = StreamedRows(
                stream(), tmp_path / "data", {"rows_per_shard": per_shard}, records
            )
            assert opened.ended == (tmp_path / "data/unfinished/rows.json").exists()
            if records and rng.random() < 0.1:
                records.pop(rng.choice(sorted(records)))  # damaged
            missing = {}
            for shard in range(rank, -(-opened.count // per_shard), num_processes):
                if name(shard) not in records:
                    missing[shard * per_shard] = min(opened.count, (shard + 1) * per_shard)
            kills = rng.randint(0, 3) if attempt < 30 else 10**9
            work(opened, missing, many, rank, num_processes, tmp_path / "data", records, kills)
        if opened.ended and len(records) == len(expected):
            break
    assert opened.ended and opened.count == count
    assert [records[each] for each in sorted(records)] == expected


def test_a_resumed_stream_skips_rows_that_are_done(tmp_path, monkeypatch):
    stream, records = make_stream(tmp_path / "data", 30, files=5), {}
    describe = lambda: StreamedRows(stream(), tmp_path / "data", {"rows_per_shard": 2}, records)
    work(describe(), {}, 2, 0, 1, tmp_path, records, stop_after=13)
    assert len(records) == 12
    place = json.loads((tmp_path / "data/unfinished/place-0.json").read_text())
    assert place["row"] == 24
    opened = describe()
    passed = []
    monkeypatch.setattr(opened, "rows", Watched(opened.rows, passed))
    work(opened, {}, 2, 0, 1, tmp_path, records)
    assert passed == list(range(24, 30)) and len(records) == 15
    (tmp_path / "data/unfinished/place-0.json").write_text("{")  # unreadable: counts as missing
    records.pop("data-00014.arrow")
    passed.clear()
    opened = describe()
    monkeypatch.setattr(opened, "rows", Watched(opened.rows, passed))
    work(opened, {28: 30}, 2, 0, 1, tmp_path, records)
    assert passed == list(range(30)) and len(records) == 15
    passed.clear()
    work(opened, {6: 8}, 2, 0, 1, tmp_path, records)  # repairs no more than necessary
    assert passed == list(range(8))


def test_processes_take_shards_of_a_stream_in_turns(tmp_path):
    stream = make_stream(tmp_path / "data", 30)
    for rank in range(3):
        opened = StreamedRows(stream(), tmp_path / "data", {"rows_per_shard": 4}, {})
        opened.count, opened.ended = 0, False  # as if all began at once
        made = [row for keys in opened.keys({}, 3, rank, 3) for _, row, _, _ in keys]
        assert made == [row for row in range(30) if row // 4 % 3 == rank]


class Watched:
    """A stream that notes which rows are read."""

    def __init__(self, rows, passed):
        self.rows, self.passed = rows, passed
        self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

    def __iter__(self):
        for item in self.rows:
            self.passed.append(item["number"])
            yield item


def test_a_stream_with_another_number_of_rows_is_refused(tmp_path):
    stream = make_stream(tmp_path / "data", 9)
    describe = lambda cache=None: StreamedRows(
        stream(), tmp_path / "data", {"rows_per_shard": 2, **(cache or {})}, {}
    )
    opened = describe()
    (tmp_path / "data/unfinished/rows.json").write_text("8")
    with pytest.raises(
        SystemExit, match="the stream has 9 rows, and had 8 before: its data has changed"
    ):
        list(opened.keys({}, 2, 0, 1))
    opened = describe({"rows": 11, "skipped": 1})
    assert opened.ended and opened.count == 12
    with pytest.raises(
        SystemExit, match="the stream has 9 rows, and had 12 before: its data has changed"
    ):
        list(opened.keys({10: 12}, 2, 0, 1))
    (tmp_path / "data/unfinished/rows.json").unlink()
    opened = StreamedRows(stream().take(0), tmp_path / "data", {"rows_per_shard": 2}, {})
    with pytest.raises(SystemExit, match="the stream holds no images"):
        list(opened.keys({}, 2, 0, 1))
    opened = StreamedRows(stream().take(1), tmp_path / "data", {"rows_per_shard": 2}, {})
    assert [len(keys) for keys in opened.keys({}, 2, 0, 1)] == [1]  # one is enough


def test_a_failed_stream_says_how_to_resume_in_one_sentence(tmp_path):
    stream = make_stream(tmp_path / "data", 9)
    (tmp_path / "data/1.parquet").write_bytes(b"x")
    opened = StreamedRows(stream(), tmp_path / "data", {"rows_per_shard": 2}, {})
    with pytest.raises(
        SystemExit, match="reading the stream failed .*; run the same command to resume"
    ) as stop:
        list(opened.keys({}, 2, 0, 1))
    assert stop.value.alone


def test_save_position_returns_the_known_number_of_rows(tmp_path):
    stream = make_stream(tmp_path / "data", 9)
    opened = StreamedRows(stream(), tmp_path / "data", {"rows_per_shard": 2}, {})
    assert opened.save_position(0, 0) == 10_000 and opened.save_position(9999, 0) == 20_000
    opened = StreamedRows(
        stream(), tmp_path / "data", {"rows_per_shard": 2, "rows": 8, "skipped": 1}, {}
    )
    assert opened.save_position(0, 0) == 9


def test_a_stream_that_ends_at_the_resume_position_is_counted(tmp_path):
    stream, records = make_stream(tmp_path / "data", 8), {}
    describe = lambda: StreamedRows(stream(), tmp_path / "data", {"rows_per_shard": 2}, records)
    opened = describe()
    # killed after the last shard
    for shard, keys in zip(range(4), opened.keys({}, 2, 0, 1), strict=False):
        records[name(shard)] = [row for _, row, _, _ in keys]
        opened.save_position(shard, 0)
    assert not (tmp_path / "data/unfinished/rows.json").exists() and len(records) == 4
    assert list(describe().keys({}, 2, 0, 1)) == [] and describe().count == 8 and describe().ended


def test_streaming_caches_have_no_shuffle_buffer_and_one_resolution(capsys):
    own = ["--streaming", "--train_data_dir=.", "--pretrained_model_name_or_path=sd"]
    assert train_text_to_image.parse_args([*own, "--max_train_steps=1"]).shuffle_buffer == 1000
    assert "shuffle_buffer" not in precompute_latents.parse_args(own)  # a cache keeps the order
    with pytest.raises(SystemExit):
        precompute_latents.parse_args([*own, "--resolution", "16", "32"])
    assert (
        "--streaming makes only one cache at a time: give one --resolution, or data on a disk"
        in capsys.readouterr().err
    )
