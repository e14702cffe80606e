"""Parts of shards: cut where batches are, named by what they hold, tried so often and no more."""

import json

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from test_cache import contents, encode_rows, make_args, make_cache, open_cache

from diffusion_training.errors import fail
from diffusion_training.latents import parts as module
from diffusion_training.latents.passes import write_each


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """An empty folder with one for what is unfinished."""
    if request.param == "disk":
        (tmp_path / "folder/unfinished").mkdir(parents=True)
        return str(tmp_path / "folder")
    MemoryFileSystem.store.clear()
    return "memory://bucket/folder"


def write_part(path, items):
    write_each(module.writing_part, {0: path}, ((0, *item) for item in items))


def objects(url):
    fs, root = module.fsspec.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}


def test_parts_are_cut_where_batches_are_and_named_by_what_they_hold():
    args = make_args("out", "--batch_size=16")  # 512 px
    parts = module.plan_parts(1024, 2048, args)
    assert parts[0] == (1024, 1104) and parts[-1][1] == 2048  # 5 batches of 16 are 63 MB
    assert [first for first, _ in parts] == list(range(1024, 2048, 80))
    assert module.plan_parts(0, 7, args) == [(0, 7)]
    assert module.plan_parts(0, 100, args, 256**2 + 512**2)[0] == (0, 64)  # of both
    args.resolution = 16384  # of which a batch is more than a part
    assert module.plan_parts(0, 40, args) == [(0, 16), (16, 32), (32, 40)]
    names = [module.name_part(*part, args) for part in parts]
    args.batch_size = 8  # whose batches begin elsewhere
    assert len({*names, *(module.name_part(*part, args) for part in parts)}) == 2 * len(parts)


def test_what_is_missing_is_what_no_record_and_no_part_holds():
    args = make_args("out", "--batch_size=16", "--rows_per_shard=100")
    shards, there = [f"data-{i}" for i in range(3)], [module.name_part(100, 180, args)]
    missing, left, todo = module.find_missing(shards, {"data-0": {}}, 250, there, args)
    assert missing == {"data-1": [(100, 180), (180, 200)], "data-2": [(200, 250)]}
    assert left == {"data-1": 1, "data-2": 1} and todo == [(180, 200), (200, 250)]
    assert module.find_missing(shards, dict.fromkeys(shards), 250, there, args) == ({}, {}, [])
    _, left, todo = module.find_missing(shards, {}, 250, [], args)
    assert left == {"data-0": 2, "data-1": 2, "data-2": 1} and len(todo) == 5


def test_a_part_holds_what_encode_all_yields(folder):
    rows = pa.RecordBatch.from_pydict({"x": pa.array([1.0, 2.0], pa.float16()), "text": ["a\0", "\U0001f600"]})
    skipped = [{"row": 3, "key": "3.png", "reason": "broken"}]
    items = [(1, rows, [], {"encoded_again": 0}), (3, rows.slice(0, 0), skipped, {"encoded_again": 2})]
    path = f"{folder}/x.part"
    write_part(path, iter(items))
    assert list(module.read_parts([path], 3)) == items and list(objects(folder)) == ["x.part"]
    with pytest.raises(ValueError, match="1 rows too few"):
        list(module.read_parts([path], 4))


def test_a_damaged_part_is_named_and_deleted_to_be_made_again(folder):
    path = f"{folder}/x.part"
    write_part(path, encode_rows(0, 4))
    fs, file = module.fsspec.url_to_fs(path)
    whole = fs.cat_file(file)
    for changed in (b"\1" * 16 + whole[16:], whole[:100], whole.replace(b'"first"', b'"fIrst"', 1), b"", None):
        fs.pipe_file(file, changed) if changed is not None else None
        with pytest.raises(ValueError, match="x.part is damaged or gone; the same command makes it again"):
            list(module.read_parts([path], 4))
        assert objects(folder) == {}


def test_a_part_is_written_whole_or_not_at_all(folder):
    def broken():
        yield from encode_rows(0, 2)
        raise RuntimeError("CUDA error: too hot")

    with pytest.raises(RuntimeError):
        write_part(f"{folder}/x.part", broken())
    assert objects(folder) == {}


def test_a_shard_of_parts_is_the_shard_of_one_process(folder, tmp_path):
    """The same bytes, wherever the parts were cut and the folder lies."""
    (tmp_path / "one/unfinished").mkdir(parents=True)
    record = module.write_shard(tmp_path / "one/data.arrow", encode_rows(0, 7))
    paths = []
    for first, end in ((0, 2), (2, 6), (6, 7)):
        paths.append(f"{folder}/unfinished/rows-{first}-{end}.part")
        write_part(paths[-1], encode_rows(first, end))
    assert module.write_shard_to(f"{folder}/data.arrow", module.read_parts(paths, 7)) == record
    made = {name: data for name, data in objects(folder).items() if not name.endswith(".part")}
    assert made == contents(tmp_path / "one")


def test_what_fails_is_tried_four_times_and_its_reason_kept():
    calls = []

    def work(error=None):
        calls.append(error)
        if error is not None and len(calls) <= module.TRIES:
            raise error
        return "done"

    result, reason = module.attempt(lambda: work(RuntimeError("too\nhot")))
    assert result is None and len(calls) == 4 and reason.startswith("RuntimeError: too hot (on ")
    assert module.attempt(lambda: work(RuntimeError())) == ("done", None) and len(calls) == 5
    result, reason = module.attempt(lambda: fail("the disk is full"))
    assert result is None and reason.startswith("the disk is full (on ")
    with pytest.raises(KeyboardInterrupt):
        module.attempt(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_what_is_there_is_looked_up_and_not_gone_through():
    class Name(str):
        compared = 0

        def __eq__(self, other):
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    args = make_args("out", "--batch_size=16", "--rows_per_shard=100")
    there = [Name(f"{i}.part") for i in range(1000)]
    module.find_missing([f"data-{i}" for i in range(10)], {}, 1000, there, args)
    assert Name.compared < 100


# ------------------------------------------------------------------- a cache at an address


def test_a_cache_at_an_address_is_begun_once_fetched_and_sent_in_order(tmp_path, monkeypatch):
    MemoryFileSystem.store.clear()
    url = "memory://bucket/cache"
    (tmp_path / "copy").mkdir()
    assert not module.fetch_cache(url, tmp_path / "copy")  # there is none
    open_cache(make_args(tmp_path / "copy"))[1].release(force=True)
    module.begin_cache(tmp_path / "copy", url)
    assert set(objects(url)) == {"cache.json", "run.args"}
    begun = objects(url)
    (tmp_path / "copy/cache.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"{url} can't be written to, or another run has just begun there"):
        module.begin_cache(tmp_path / "copy", url)
    assert objects(url) == begun

    # What another machine has made since: shards and parts stay where they are
    fs, root = module.fsspec.url_to_fs(url)
    make_cache(tmp_path / "whole")
    shard = (tmp_path / "whole/data-00000-of-00003.arrow").read_bytes()
    names = ["data-0.arrow", "unfinished/rows-3-5-by-2.part"]
    for name in names:
        fs.pipe_file(f"{root}/{name}", shard)
    fs.pipe_file(f"{root}/unfinished/data-0.arrow.json", b"{}")
    (tmp_path / "again").mkdir()
    assert module.fetch_cache(url, tmp_path / "again")
    assert set(contents(tmp_path / "again")) == {"cache.json", "run.args", "unfinished/data-0.arrow.json"}

    sent, upload = [], module.upload
    monkeypatch.setattr(module, "upload", lambda source, path: sent.append(path) or upload(source, path))
    module.upload_finished(tmp_path / "whole", url)
    assert sent[-1] == f"{url}/state.json" and len(sent) == 6
    small = {name: data for name, data in contents(tmp_path / "whole").items() if not name.endswith(".arrow")}
    assert objects(url) == {**small, "data-0.arrow": shard}  # and nothing unfinished

    fs.pipe_file("bucket/other/thesis.txt", b"mine")
    with pytest.raises(SystemExit, match="memory://bucket/other holds thesis.txt and no latent cache"):
        module.fetch_cache("memory://bucket/other", tmp_path / "again")
    with pytest.raises(SystemExit, match="--output_dir nowhere://x can't be read"):
        module.fetch_cache("nowhere://x", tmp_path / "again")
    assert json.loads(objects(url)["cache.json"])["rows"] == 6
