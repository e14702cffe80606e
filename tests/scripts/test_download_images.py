"""Downloads from a server with the faults of the web. Some tests start a real Ray.

Single requests, images, tables and shards are tested in tests/package.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, Script, read_files, wait_until
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem
from image_server import BAD, FLAGS, GOOD, SLOW, ImageServer, make_image

ray = pytest.importorskip("ray", reason="needs requirements-ray.txt")
pytest.importorskip("aiohttp", reason="needs requirements-ray.txt")
import psutil  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import download_images as script  # noqa: E402
import precompute_latents  # noqa: E402
from diffusion_training.cluster.connection import list_own_modules  # noqa: E402
from diffusion_training.data.rows import load_rows  # noqa: E402
from diffusion_training.data.transform_settings import make_transform  # noqa: E402
from diffusion_training.data.transforms import transform_row  # noqa: E402

download = Script("download_images")


@pytest.fixture(scope="session")
def ray_folder():
    """Ray's folder: a short path, because it holds sockets, and outside the home folder."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("RAY_TMPDIR", folder)
        m.setenv("RAY_AUTH_MODE", "disabled")
        m.delenv("RAY_ADDRESS", raising=False)
        yield folder


@pytest.fixture(scope="session")
def local_ray(ray_folder, storage):
    """A Ray of two cores, which all tests share; its address."""
    # as the script does
    sent = {"py_modules": list_own_modules(script.download_shard, script.fail)}
    options = {
        "num_cpus": 2,
        "object_store_memory": 80 * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
    }
    with pytest.MonkeyPatch.context() as m:
        # in this folder, workers would import its files instead of the ones sent to them
        m.chdir("/")
        ray.init("local", runtime_env=sent, **options)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def run_items_without_ray(items, args, output_dir, schema, script=script):
    """`run_items` without Ray: one piece of work after the other."""
    for item in items:
        yield script.download_shard(item, args, output_dir, schema)


def find_repeated_without_ray(items, args, folder):
    """`find_repeated` without Ray, in one part."""
    names = {number: item["name"] for number, item in enumerate(items)}
    (digests,) = script.split_digests(folder, names, 1)
    return script.list_repeated(items, script.find_repeats(digests))


@pytest.fixture
def without_ray(monkeypatch):
    monkeypatch.setattr(script, "run_items", run_items_without_ray)
    monkeypatch.setattr(script, "find_repeated", find_repeated_without_ray)


@pytest.fixture
def lazy_ray(monkeypatch):
    """Replaces Ray: a task runs when its result is read.

    Returns the started tasks as (name of the function, first argument).
    """
    started = []

    class Ref:
        def __init__(self, call):
            self.call = functools.cache(call)

    def remote(**options):
        def decorate(function):
            def start(*args):
                started.append((function.__name__, args[0]))
                given = lambda: [arg.call() if isinstance(arg, Ref) else arg for arg in args]
                return Ref(lambda: function(*given()))

            return argparse.Namespace(remote=start)

        return decorate

    for name, value in {
        "remote": remote,
        "put": lambda value: value,
        "get": lambda ref: ref.call(),
        "wait": lambda refs, **options: (refs[:1], refs[1:]),
        "cancel": lambda ref, **options: None,
        "nodes": lambda: [{"Alive": True, "Resources": {"memory": 2**40}}],
        "cluster_resources": lambda: {"CPU": 1},
    }.items():
        monkeypatch.setattr(ray, name, value)
    monkeypatch.setattr(script, "connect", lambda *args, **options: lambda: None)
    return started


@pytest.fixture
def server():
    server = ImageServer()
    yield server
    server.close()


def make_table(path, urls, **columns):
    captions = [f'caption {i}, "quoted"\nand on' for i in range(len(urls))]
    pq.write_table(
        pa.table({"url": urls, "text": captions, "id": range(len(urls)), **columns}),
        path,
        row_group_size=17,
    )
    return str(path)


def good_urls(server, count, kind="image"):
    return [f"{server.url}/{kind}/{i}" for i in range(count)]


def run(table, output, *flags):
    download("--input", table, "--output_dir", output, *FLAGS, *flags)


def refused(table, output, *flags):
    return download.refused("--input", table, "--output_dir", output, *FLAGS, *flags)


def start(table, output, *flags, env=None):
    """Start the script in a separate process."""
    command = [
        sys.executable,
        ROOT / "download_images.py",
        "--input",
        table,
        "--output_dir",
        output,
        *FLAGS,
        *flags,
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
    return subprocess.Popen(list(map(str, command)), env={**os.environ, **(env or {})}, **options)


def wait_for_end(process, code=0, timeout=600):
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return output


def contents(folder):
    """{name: bytes} of all files except the settings and the copy of the table."""
    left_out = re.compile(r"(.*/)?(settings\.json|tables/[^/]*)")
    return {name: data for name, data in read_files(folder).items() if not left_out.fullmatch(name)}


def read_rows(folder):
    return pa.concat_tables(
        pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet"))
    ).to_pylist()


def read_failures(folder):
    return [
        json.loads(line)
        for line in Path(folder, "__download__/failures.jsonl").read_text().splitlines()
    ]


# ------------------------------------------------------------------- downloaded shards


def check_download(server, kinds, folder):
    """Every good image is there once, in order, unchanged. Bad ones are listed with a reason."""
    rows, failures = read_rows(folder), read_failures(folder)
    good = [i for i, kind in enumerate(kinds) if kind in GOOD]
    assert [row["id"] for row in rows] == good
    for row in rows:
        i = row["id"]
        assert (
            row["image"] == {"bytes": make_image(i), "path": None}
            and row["url"] == f"{server.url}/{kinds[i]}/{i}"
        )
        assert row["text"].startswith(f"caption {i},") and (row["width"], row["height"]) == (
            48 + i % 5,
            40,
        )
        assert row["sha256"] == hashlib.sha256(make_image(i)).hexdigest()
    assert [failure["row"] for failure in failures] == [
        i for i, kind in enumerate(kinds) if kind not in GOOD
    ]
    for failure in failures:
        reason, tries = BAD[kinds[failure["row"]]]
        assert failure["reason"].startswith(reason) and failure["tries"] == tries, failure
        assert failure["url"] == f"{server.url}/{kinds[failure['row']]}/{failure['row']}"


def test_good_images_are_saved_once_in_order_and_failures_are_listed(
    local_ray, server, tmp_path, capsys
):
    bad = [kind for kind in BAD if kind not in SLOW]
    kinds = [kind for pair in zip(bad, GOOD * 3, strict=False) for kind in pair] + GOOD
    urls = [f"{server.url}/{kind}/{i}" for i, kind in enumerate(kinds)]
    table = make_table(tmp_path / "urls.parquet", urls)
    run(table, tmp_path / "out", "--keep_columns", "id", "--rows_per_shard", 20)
    check_download(server, kinds, tmp_path / "out")
    for i, kind in enumerate(kinds):
        if kind in GOOD:
            assert server.requests[f"/{kind}/{i}"] == {"busy": 2, "flaky": 3}.get(kind, 1), kind
    printed = capsys.readouterr().out
    assert (
        f"Done: {len([k for k in kinds if k in GOOD])} images" in printed
        and "HTTP 404" not in printed
    )
    assert f"Next: python precompute_latents.py --train_data_dir {tmp_path}" in printed
    assert not list((tmp_path / "out").glob(".tmp-*"))

    # The same command requests nothing again and changes nothing
    before, server.requests = contents(tmp_path / "out"), collections.Counter()
    run(table, tmp_path / "out", "--keep_columns", "id", "--rows_per_shard", 20)
    assert contents(tmp_path / "out") == before and not server.requests


@pytest.mark.ci
def test_download_shard_gives_the_same_bytes_without_ray(local_ray, server, tmp_path, monkeypatch):
    """The tests with `without_ray` rely on this."""
    table = make_table(
        tmp_path / "urls.parquet", [*good_urls(server, 23), f"{server.url}/missing/23"]
    )
    run(table, tmp_path / "ray", "--rows_per_shard", 5)
    monkeypatch.setattr(script, "run_items", run_items_without_ray)
    run(table, tmp_path / "without-ray", "--rows_per_shard", 5)
    assert contents(tmp_path / "ray") == contents(tmp_path / "without-ray")


def test_datasets_and_precompute_latents_open_downloaded_shards(without_ray, server, tmp_path):
    table = make_table(
        tmp_path / "urls.parquet", [*good_urls(server, 7), None, f"{server.url}/missing/8"]
    )
    run(table, tmp_path / "out", "--rows_per_shard", 4)
    for rows in (
        datasets.load_dataset("parquet", data_dir=str(tmp_path / "out"), split="train"),
        datasets.load_dataset(str(tmp_path / "out"), split="train"),
    ):
        assert isinstance(rows.features["image"], datasets.Image) and len(rows) == 7
        assert [row["image"].size for row in rows] == [
            (row["width"], row["height"]) for row in rows
        ]
    args = precompute_latents.parse_args(
        [
            "--train_data_dir",
            str(tmp_path / "out"),
            "--resolution=512",
            "--vae_name_or_path=a",
            "--text_encoder_name_or_path=b",
        ]
    )
    images = load_rows(args, others=["text"])
    transform = make_transform(args, images.column, None, None, 3, args.resolution)
    items = [transform_row(i, 0, images.rows[i], transform) for i in range(7)]
    assert not any(item["skipped"] for item in items) and items[6]["text"].startswith("caption 6,")
    assert [failure["reason"] for failure in read_failures(tmp_path / "out")] == [
        "no URL",
        "HTTP 404",
    ]


def test_a_downloaded_shard_without_images_can_be_loaded(without_ray, server, tmp_path):
    table = make_table(
        tmp_path / "urls.parquet", [*good_urls(server, 3), *good_urls(server, 3, "missing")]
    )
    run(table, tmp_path / "out", "--rows_per_shard", 3)
    assert len(datasets.load_dataset(str(tmp_path / "out"), split="train")) == 3


def test_parquet_csv_jsonl_and_folders_of_tables_give_the_same_shards(
    without_ray, server, tmp_path
):
    urls = [*good_urls(server, 24), f"{server.url}/missing/24"]
    make_table(tmp_path / "a.parquet", urls)
    table = pq.read_table(tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    (tmp_path / "folder/of").mkdir(parents=True)
    for k, rows in enumerate((table.slice(0, 10), table.slice(10))):  # at a border of shards
        pq.write_table(rows, tmp_path / f"folder/of/b{k}.parquet")
    found = []
    for source in ("a.parquet", "a.csv", "a.jsonl", "folder", "folder/of/*.parquet"):
        output = tmp_path / f"out{len(found)}"
        run(tmp_path / source, output, "--rows_per_shard", 10, "--keep_columns", "id")
        found.append(
            {name: data for name, data in contents(output).items() if name.startswith("data-")}
        )
        assert len(found[-1]) == 3
    assert found[0] == found[2]
    text = pa.schema(pq.read_schema(tmp_path / "out1/data-00000-of-00003.parquet")).field("id").type
    assert text == pa.string() and [int(row.pop("id")) for row in read_rows(tmp_path / "out1")] == [
        row.pop("id") for row in read_rows(tmp_path / "out0")
    ]
    # A failure's row number is that of its own table
    assert [read_failures(tmp_path / f"out{k}")[0]["row"] for k in (0, 3, 4)] == [24, 14, 14]
    assert found[3] == found[4] and read_rows(tmp_path / "out3") == read_rows(tmp_path / "out0")


def test_remote_tables_are_copied_while_other_shards_download(lazy_ray, server, tmp_path):
    fs = MemoryFileSystem()
    fs.store.clear()
    make_table(tmp_path / "all.parquet", good_urls(server, 14))
    for i in range(7):
        rows = pq.read_table(tmp_path / "all.parquet").slice(2 * i, 2)
        pq.write_table(rows, file := io.BytesIO())
        fs.pipe_file(f"/tables/{i}.parquet", file.getvalue())
        lines = "".join(json.dumps(row) + "\n" for row in rows.to_pylist())
        fs.pipe_file(f"/lines/{i}.jsonl", lines.encode())
    run(tmp_path / "all.parquet", tmp_path / "disk", "--rows_per_shard", 2)
    found = contents(tmp_path / "disk")
    shards = {name: data for name, data in found.items() if "data-" in name and "/" not in name}
    del lazy_ray[:]

    def run_there(kind, *flags):
        output = tmp_path / f"{kind}{len(flags)}"
        run(f"memory://{kind}", output, "--rows_per_shard", 2, *flags)
        made = contents(output)
        assert {name: made[name] for name in shards} == shards
        names = [name for name, _ in lazy_ray]
        copied = [pq.read_schema(path).names for path in (output / "__download__/tables").iterdir()]
        assert copied == 7 * [["url", "text"]]
        del lazy_ray[:]
        return names

    # The names of shards are known from the footers.
    assert script.AHEAD == 4
    copy, shard = "copy_share", "download_shard"
    assert run_there("tables") == [*4 * [copy], shard, *3 * [copy, shard], *3 * [shard]]
    assert run_there("tables", "--where", "id >= 0") == 7 * [copy] + 7 * [shard]
    assert run_there("lines") == 7 * [copy] + 7 * [shard]

    # A file that disappears before it is read is named.
    def lose(*args, count=script.plan_copies, **options):
        tables = count(*args, **options)
        fs.rm("/tables/0.parquet")
        return tables

    with pytest.MonkeyPatch.context() as m:
        m.setattr(script, "plan_copies", lose)
        said = refused("memory://tables", tmp_path / "gone", "--rows_per_shard", 2)
    assert "memory:///tables/0.parquet can't be used" in said
    assert len(finished_shards(tmp_path / "gone")) == 6
    said = refused("memory://lines", tmp_path / "no", "--url_column", "URL")
    assert "memory:///lines/0.jsonl can't be used (no column 'URL' among 'url', 'text'" in said


def test_limit_takes_the_first_rows_that_match_where(without_ray, server, tmp_path):
    """This holds for several tables, and for columns that the shards do not keep.

    CSV, whose columns are text, gives the same rows.
    """
    urls, widths = good_urls(server, 30), [100 * (i % 3) for i in range(30)]
    make_table(tmp_path / "all.parquet", urls, width_of_original=widths)
    table = pq.read_table(tmp_path / "all.parquet")
    (tmp_path / "tables").mkdir()
    for i, rows in enumerate((table.slice(0, 12), table.slice(12, 9), table.slice(21))):
        pq.write_table(rows, tmp_path / f"tables/{i}.parquet")
    pa.csv.write_csv(table, tmp_path / "all.csv")
    where = ["--where", "width_of_original >= 100 and text != 'x'", "--keep_columns", "id"]
    for source, limit in (
        ("tables", 9),
        ("all.parquet", 9),
        ("all.csv", 9),
        ("all.parquet", 1000),
        ("tables", None),
    ):
        out = tmp_path / f"{source}-{limit}"
        run(
            tmp_path / source,
            out,
            *where,
            *(["--limit", limit] if limit else []),
            "--rows_per_shard",
            4,
        )
        expected = [i for i in range(30) if i % 3][:limit]
        assert [int(row["id"]) for row in read_rows(out)] == expected
        assert [row["url"] for row in read_rows(out)] == [urls[i] for i in expected]
    assert "limit 9 -> None" in refused(
        tmp_path / "tables", tmp_path / "tables-9", *where, "--rows_per_shard=4"
    )
    none = refused(tmp_path / "tables", tmp_path / "none", "--where", "id > 100")
    assert "holds no rows with --where id > 100" in none
    assert "no column 'wide' among 'url'" in refused(
        tmp_path / "tables", tmp_path / "no", "--where", "wide > 1"
    )


# ------------------------------------------------------------------- refusals


GIVEN = ["--input", "x", "--output_dir", "y"]


def test_skip_repeated_keeps_the_first_row_of_each_file(without_ray, server, tmp_path, monkeypatch):
    # rows in shards of 3; the last holds nothing new but image 5
    numbers = [0, 1, 0, 2, 1, 3, 3, 4, 0, 5, 0, 0]
    kinds = ["image", "chunked", "type"]  # the same bytes from other paths
    urls = [f"{server.url}/{kinds[i % 3]}/{number}" for i, number in enumerate(numbers)]
    table, flags = (
        make_table(tmp_path / "urls.parquet", urls),
        ["--rows_per_shard", "3", "--keep_columns", "id", "--skip_repeated"],
    )
    run(table, tmp_path / "out", *flags)
    rows, first = read_rows(tmp_path / "out"), [numbers.index(number) for number in range(6)]
    assert [row["id"] for row in rows] == first and len({row["sha256"] for row in rows}) == 6
    failures = list(
        map(json.loads, (tmp_path / "out/__download__/failures.jsonl").read_text().splitlines())
    )
    assert [failure["row"] for failure in failures] == [
        row for row in range(12) if row not in first
    ]
    assert {failure["reason"] for failure in failures} == {
        "repeated: an earlier row has the same file"
    }
    assert all(failure["url"] == urls[failure["row"]] for failure in failures)
    whole, asked = contents(tmp_path / "out"), server.requests.copy()
    run(table, tmp_path / "out", *flags)
    # no shard is checked again
    assert contents(tmp_path / "out") == whole and server.requests == asked
    # A kill when all shards are there, then at each one that is made again; last, a lost shard.
    work = script.download_shard
    for count in range(3):
        with monkeypatch.context() as m:
            calls = []

            def kill(item, *args, calls=calls, count=count):
                calls.extend([1] if "repeated" in item else [])
                if len(calls) > count:
                    raise KeyboardInterrupt
                return work(item, *args)

            m.setattr(script, "download_shard", kill)
            with pytest.raises(KeyboardInterrupt):
                run(table, tmp_path / str(count), *flags)
        run(table, tmp_path / str(count), *flags)
        assert contents(tmp_path / str(count)) == whole
    (tmp_path / "0/data-00002-of-00004.parquet").unlink()
    run(table, tmp_path / "0", *flags)
    assert contents(tmp_path / "0") == whole
    with pytest.raises(SystemExit, match="1"):
        run(table, tmp_path / "0", *flags[:-1])  # without the flag it is another download


@pytest.mark.parametrize("flags, message", [
    (["--input=a"], "--output_dir and one of --input and --dataset_name are needed"),
    (["--input=a", "--dataset_name=b", "--output_dir=c"],
     "--output_dir and one of --input and --dataset_name are"),
    ([*GIVEN, "--connections", "0"], "--connections: 0 is not between 1 and"),
    ([*GIVEN, "--timeout", "0"], "--timeout: 0 is not between 0.001 and"),
    ([*GIVEN, "--timeout", "nan"], "--timeout: nan is not between 0.001 and"),
    ([*GIVEN, "--max_aspect_ratio", "0.5"], "--max_aspect_ratio: 0.5 is not between 1 and"),
    ([*GIVEN, "--where", "width = 3"], "--where: 'width = 3' is not an expression"),
    ([*GIVEN, "--jpeg_quality", "101"], "--jpeg_quality: 101 is not between 1 and 100"),
    ([*GIVEN, "--keep_columns", "width"], "two columns 'width'"),
    ([*GIVEN, "--keep_columns", "id", "id"], "two columns 'id'"),
    ([*GIVEN, "--num_cpus", "2", "--address", "auto"], "--num_cpus works only if Ray"),
    (["--input", "x", "--output_dir", "/tmp/ray/working_dir_files/y"],
     "Ray deletes /tmp/ray/working_dir_files/y"),
    ([*GIVEN, "--user_agent", "me/1.0\nX: y"], "must be one line of printable characters"),
    ([*GIVEN, "--allow_private_addresses", "10.0.0.1/8"], "--allow_private_addresses"),
])  # fmt: skip
def test_download_images_reports_bad_flags_in_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in download.refused(*flags, status=2).splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_download_images_reports_bad_tables_in_one_line(tmp_path):
    table, out = make_table(tmp_path / "urls.parquet", ["http://127.0.0.1/"] * 3), tmp_path / "out"
    assert "can't be read" in refused(tmp_path / "none.parquet", out)
    assert "no column 'URL' among 'url', 'text', 'id'" in refused(table, out, "--url_column", "URL")
    assert "--caption_column id holds int64" in refused(table, out, "--caption_column", "id")
    make_table(tmp_path / "empty.parquet", pa.array([], pa.string()))
    assert "empty.parquet holds no rows" in refused(tmp_path / "empty.parquet", out)
    assert not list(out.glob("*.parquet"))


def test_a_download_whose_settings_can_not_be_looked_up_is_not_taken_for_none(
    tmp_path, monkeypatch
):
    table = make_table(tmp_path / "urls.parquet", ["http://127.0.0.1/"] * 3)
    settings = "memory://looked-up/__download__/settings.json"
    fs, _ = fsspec.url_to_fs(settings)
    fs.pipe_file(settings, b'{"another": "download"}')
    fs.pipe_file("memory://looked-up/data.parquet", b"")
    info = type(fs).info

    def refuse(self, path, **options):
        if path.endswith("settings.json"):
            raise PermissionError("Forbidden")
        return info(self, path, **options)

    monkeypatch.setattr(type(fs), "info", refuse)
    said = refused(table, "memory://looked-up")
    assert "--output_dir memory://looked-up can't be written to (Forbidden)" in said
    assert fs.cat_file(settings) == b'{"another": "download"}'


def test_download_refuses_folders_with_other_files_and_changed_settings(
    without_ray, server, tmp_path
):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 5)), tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    assert "holds thesis.txt and no download" in refused(table, tmp_path / "full")
    assert "can't be written to" in refused(table, tmp_path / "full/thesis.txt")
    run(table, out)
    before = contents(out)
    assert "resize_to None -> 8" in refused(table, out, "--resize_to", 8)
    assert "rows_per_shard 1000 -> 2" in refused(table, out, "--rows_per_shard", 2)
    make_table(tmp_path / "urls.parquet", good_urls(server, 5, "type"))
    assert re.search(r"input.sha256 \w+ -> \w+\)", refused(table, out))
    assert contents(out) == before
    # Flags that do not change the images may differ
    make_table(tmp_path / "urls.parquet", good_urls(server, 5))
    run(table, out, "--retries", 5, "--connections", 3, "--timeout", 9)
    assert contents(out) == before


@pytest.mark.ci
def test_download_refuses_tasks_that_need_more_memory_than_any_node(local_ray, server, tmp_path):
    table = make_table(tmp_path / "urls.parquet", good_urls(server, 5))
    assert "lower --connections or --max_bytes" in refused(
        table, tmp_path / "out", "--max_bytes", 10**12
    )


@pytest.mark.long
def test_rows_whose_download_worker_dies_four_times_are_reported(
    local_ray, server, tmp_path, monkeypatch
):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"

    def die(item, args, folder, schema, copied, tries=str(tmp_path / "tries")):
        import os

        from download_images import download_shard

        if item["first"] == 3:
            with open(tries, "a") as file:
                file.write("x")
            os._exit(9)
        return download_shard(item, args, folder, schema)

    monkeypatch.setattr(script, "download_shard", die)
    said = refused(table, out, "--rows_per_shard", 3)
    assert (
        f"rows 3 to 5 of file://{table} could not be downloaded: its worker process died 4 times"
    ) in said
    assert (tmp_path / "tries").read_text() == "xxxx" and finished_shards(out) == [0, 2]


def test_download_fails_if_no_image_could_be_downloaded(without_ray, server, tmp_path):
    table, out = (
        make_table(tmp_path / "urls.parquet", good_urls(server, 3, "missing")),
        tmp_path / "out",
    )
    for _ in range(2):
        said = refused(table, out)
        assert "no image could be downloaded from 3 rows: 100.0% failed (HTTP 404 100.0%)" in said
    assert len(read_failures(out)) == 3


def test_download_does_not_need_the_systems_temporary_folder(
    without_ray, server, tmp_path, monkeypatch
):
    table = make_table(tmp_path / "urls.parquet", good_urls(server, 3))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    run(table, tmp_path / "out")
    assert len(read_rows(tmp_path / "out")) == 3


def test_output_dir_may_be_inside_the_input_folder(without_ray, server, tmp_path):
    make_table(tmp_path / "urls.parquet", good_urls(server, 3))
    for _ in range(2):
        run(tmp_path, tmp_path / "out")
    assert len(read_rows(tmp_path / "out")) == 3


def test_very_long_urls_and_invalid_captions_are_listed_as_failures(without_ray, server, tmp_path):
    urls = [
        "data:image/png;base64," + "A" * 250_000,
        *good_urls(server, 3),
        f"http://a/{'x' * 10**6}",
    ]
    captions = pa.Array.from_buffers(
        pa.string(), 5, pa.array([b"a", b"b", b"\xff", b"d", b"e"]).buffers()
    )
    pq.write_table(pa.table({"url": urls, "text": captions}), tmp_path / "urls.parquet")
    run(tmp_path / "urls.parquet", tmp_path / "out", "--retries", 0)
    assert [row["text"] for row in read_rows(tmp_path / "out")] == ["b", "d"]
    assert [failure["row"] for failure in read_failures(tmp_path / "out")] == [0, 2, 4]
    assert max(len(failure["url"]) for failure in read_failures(tmp_path / "out")) == script.MAX_URL
    assert (
        pq.ParquetFile(tmp_path / "out/data-00000-of-00001.parquet").metadata.serialized_size
        < 10_000
    )


def test_download_reports_a_shard_that_could_not_be_written(without_ray, server, tmp_path):
    """A folder with the name of the shard stands in for a full disk."""
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 5)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    name = "data-00001-of-00002.parquet"
    (out / name).unlink()
    (out / name).mkdir()
    (out / name / "x").write_text("")
    (out / "__download__/records/data-00001-of-00002.json").unlink()
    assert f"{name} could not be made" in refused(table, out, "--rows_per_shard", 3)
    shutil.rmtree(out / name)
    run(table, out, "--rows_per_shard", 3)
    assert len(read_rows(out)) == 5


# ------------------------------------------------------------------- resuming and repairing


def test_missing_shards_are_downloaded_again_and_missing_records_rebuilt(
    without_ray, server, tmp_path
):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    before = contents(out)
    (out / "data-00001-of-00003.parquet").unlink()
    (out / "__download__/records/data-00002-of-00003.json").unlink()
    server.requests.clear()
    run(table, out, "--rows_per_shard", 3)
    assert contents(out) == before
    assert sorted(server.requests) == [f"/image/{i}" for i in (3, 4, 5)]


@pytest.mark.parametrize("what", ["shard", "short shard", "record", "settings"])
def test_damaged_download_files_are_repaired_or_reported(without_ray, server, tmp_path, what):
    """Bytes in the middle change, but not the footer of the shard; or a shard lacks its end."""
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    before, record = contents(out), out / "__download__/records/data-00001-of-00003.json"
    path = out / "data-00001-of-00003.parquet"
    path = {"record": record, "settings": out / "__download__/settings.json"}.get(what, path)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        data[:-100] if "short" in what else data[:4] + bytes(middle - 4) + data[middle:]
    )
    said = {
        "short shard": "1 shards, such as data-00001-of-00003.parquet, differ from their records",
        "record": "run the same command again",
        "settings": "holds another download (format_version None -> 2",
    }.get(what)
    if what == "shard":
        record.unlink()
    elif what == "record":
        (out / "__download__/summary.json").unlink()
    if said:
        assert said in refused(table, out, "--rows_per_shard", 3)
    if what != "settings":
        run(table, out, "--rows_per_shard", 3)
        assert contents(out) == before


def test_two_downloads_into_one_folder_are_refused(server, tmp_path):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 3)), tmp_path / "out"
    (out / "__download__").mkdir(parents=True)
    with FileLock(out / ".lock"):
        assert "another process is writing to" in refused(table, out)


def test_retry_failed_requests_only_temporary_failures(without_ray, server, tmp_path):
    """Temporary failures are retried, permanent ones are not. No good row is repeated or lost."""
    urls = good_urls(server, 12)
    urls[1], urls[4], urls[7] = (
        f"{server.url}/flaky/1",
        f"{server.url}/missing/4",
        f"{server.url}/flaky/7",
    )
    table, out = make_table(tmp_path / "urls.parquet", urls), tmp_path / "out"
    flags = ["--rows_per_shard", 4, "--keep_columns", "id", "--retries", 0]
    run(table, out, *flags)
    assert [(f["row"], f["reason"]) for f in read_failures(out)] == [
        (1, "HTTP 503"),
        (4, "HTTP 404"),
        (7, "HTTP 503"),
    ]
    server.requests.clear()
    run(table, out, *flags)
    assert not server.requests
    old = contents(out)
    run(table, out, *flags, "--retry_failed")  # they still fail
    assert server.requests == {"/flaky/1": 1, "/flaky/7": 1}
    assert {k: v for k, v in contents(out).items() if "data-" in k} == {
        k: v for k, v in old.items() if "data-" in k
    }
    server.requests |= {"/flaky/1": 5, "/flaky/7": 5}
    run(table, out, *flags, "--retry_failed")
    assert [row["id"] for row in read_rows(out)] == [i for i in range(12) if i != 4]
    assert [row["image"]["bytes"] for row in read_rows(out)] == [
        make_image(i) for i in range(12) if i != 4
    ]
    assert [(f["row"], f["reason"]) for f in read_failures(out)] == [(4, "HTTP 404")]
    assert server.requests == {"/flaky/1": 6, "/flaky/7": 6}  # no good row was requested again
    # The same shards as without the failures
    server.requests |= {"/flaky/1": 5, "/flaky/7": 5}
    run(table, tmp_path / "fresh", *flags)
    assert contents(out) == contents(tmp_path / "fresh")
    # Killed between the shard and its record, or with another shard's record: the shard itself
    # knows its rows.
    record = out / "__download__/records/data-00000-of-00003.json"
    for data in (None, old[str(record.relative_to(out))]):
        (out / "__download__/summary.json").unlink()
        record.write_bytes(data) if data else record.unlink()
        with contextlib.suppress(SystemExit):
            run(table, out, *flags)
        server.requests.clear()
        run(table, out, *flags, "--retry_failed")
        assert contents(out) == contents(tmp_path / "fresh") and not server.requests


def undisturbed(server, tmp_path, *flags):
    """A table of 120 URLs, some of which fail, and the output of a run without Ray or a kill."""
    urls = [f"{server.url}/{'missing' if i % 20 == 7 else 'image'}/{i}" for i in range(120)]
    table = make_table(tmp_path / "urls.parquet", urls)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(script, "run_items", run_items_without_ray)
        run(table, tmp_path / "undisturbed", *flags)
    assert len(read_rows(tmp_path / "undisturbed")) == 114
    server.requests = collections.Counter()
    return table, contents(tmp_path / "undisturbed")


def finished_shards(folder):
    """Numbers of the finished shards."""
    return sorted(
        int(path.name[5:10]) for path in Path(folder).glob("__download__/records/data-*.json")
    )


def workers(address):
    """The processes of Ray that download."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "".join(process.info["cmdline"] or [""]).startswith("ray::download_shard"):
                if any(
                    address in part for parent in process.parents() for part in parent.cmdline()
                ):
                    found.append(process)
    return found


@pytest.mark.parametrize("number, code", [
    pytest.param(signal.SIGTERM, 143, marks=pytest.mark.ci),
    pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
    # SIGKILL is also tested with object storage
    pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long),
])  # fmt: skip
def test_a_killed_download_resumes_without_repeating_finished_shards(
    local_ray, server, tmp_path, without_ray, number, code
):
    flags, out = ["--rows_per_shard", "10"], tmp_path / "out"
    table, expected = undisturbed(server, tmp_path, *flags)
    # The server holds images back until the processes have reached a known state, so that their
    # speed does not matter.
    server.held = 40
    driver = start(table, out, *flags, "--address", local_ray)
    # with open requests, so that some are lost
    wait_until(lambda: finished_shards(out) == [0, 1, 2, 3] and server.open > 4)
    killed = [worker.kill() for worker in workers(local_ray)]
    server.held = 80
    repeated = lambda: [path for path, count in server.requests.copy().items() if count > 1]
    wait_until(lambda: len(finished_shards(out)) >= 5 and repeated())  # others continue
    again = repeated()
    assert killed and len(again) <= len(killed) * 10  # no more than the shards in work
    driver.send_signal(number)
    printed = wait_for_end(driver, code)
    if number != signal.SIGKILL:
        assert "the same command continues from here" in printed and "Traceback" not in printed, (
            printed
        )
    wait_until(lambda: not workers(local_ray))  # Ray ends the workers of a lost driver
    assert 5 <= len(finished_shards(out)) < 12
    for shard in finished_shards(out):
        name = f"data-{shard:05d}-of-00012.parquet"
        assert (out / name).read_bytes() == expected[name]
    rows = {row for shard in finished_shards(out) for row in range(10 * shard, 10 * shard + 10)}
    before, server.held = server.requests.copy(), math.inf
    run(table, out, *flags)
    assert contents(out) == expected
    asked = {int(path.split("/")[-1]) for path in (server.requests - before)}
    assert not asked & rows


@pytest.mark.long
def test_download_survives_a_lost_ray_node(ray_folder, server, tmp_path):
    """A cluster of two machines, one of which dies."""
    flags = ["--rows_per_shard", "10"]
    table, expected = undisturbed(server, tmp_path, *flags)
    server.delay = 0.2
    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(True, head_node_args={**options, "include_dashboard": False})
    try:
        node = cluster.add_node(**options)
        driver = start(table, tmp_path / "out", *flags, "--address", cluster.address)
        wait_until(lambda: len(finished_shards(tmp_path / "out")) >= 3)
        cluster.remove_node(node, allow_graceful=False)
        assert len(finished_shards(tmp_path / "out")) < 12
        assert "Done: 114 images" in wait_for_end(driver)
        assert contents(tmp_path / "out") == expected
        assert len([path for path, count in server.requests.items() if count > 1]) <= 20
    finally:
        cluster.shutdown()


@pytest.mark.ci
def test_download_reads_from_and_writes_to_s3(local_ray, storage, server, tmp_path, without_ray):
    """Read the table from an S3 server and write the shards there.

    A killed driver leaves only complete objects.
    """
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem()
    fs.mkdir("downloads")
    table = make_table(
        tmp_path / "urls.parquet", [*good_urls(server, 30), f"{server.url}/flaky/30"]
    )
    fs.put_file(table, "downloads/tables/urls.parquet")
    source, out, flags = (
        "s3://downloads/tables/*.parquet",
        "s3://downloads/out",
        ["--rows_per_shard", "5", "--retries", "0"],
    )

    def done():
        fs.invalidate_cache()
        return len(fs.glob("downloads/out/__download__/records/data-*.json"))

    server.held = 10  # two shards
    driver = start(source, out, *flags, "--address", local_ray)
    wait_until(lambda: done() >= 2 and server.open)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not workers(local_ray))
    assert done() == 2
    server.held = math.inf
    run(source, out, *flags)
    fs.invalidate_cache()
    assert len(fs.cat("downloads/out/__download__/failures.jsonl").splitlines()) == 1
    server.requests["/flaky/30"] = 5
    run(source, out, *flags, "--retry_failed")
    fs.invalidate_cache()
    fs.get("downloads/out/", str(tmp_path / "copy/"), recursive=True)
    assert [row["image"]["bytes"] for row in read_rows(tmp_path / "copy")] == [
        make_image(i) for i in range(31)
    ]
    assert read_failures(tmp_path / "copy") == []
    # two shards were being downloaded when it was killed
    assert sum(server.requests[f"/image/{i}"] for i in range(30)) <= 40


# ------------------------------------------------------------------- long runs


@pytest.mark.long
def test_ten_thousand_downloads_survive_failures_and_kills(local_ray, server, tmp_path):
    """A tenth of the rows fails, in every way.

    Memory stays bounded, and killed workers and drivers lose nothing.
    """
    rng = np.random.default_rng(0)
    kinds = [str(rng.choice(list(BAD) if rng.random() < 0.1 else GOOD[:5])) for _ in range(10_000)]
    urls = [f"{server.url}/{kind}/{i}" for i, kind in enumerate(kinds)]
    table = make_table(tmp_path / "urls.parquet", urls)
    flags = [
        "--rows_per_shard",
        "500",
        "--keep_columns",
        "id",
        "--per_host",
        "64",
        "--timeout",
        "2",
        "--idle_timeout",
        "1",
        "--address",
        local_ray,
    ]
    began, most = time.monotonic(), 0
    undisturbed = start(table, tmp_path / "undisturbed", *flags)
    while undisturbed.poll() is None:
        for worker in workers(local_ray):
            with contextlib.suppress(psutil.Error):
                most = max(most, worker.memory_info().rss)
        time.sleep(0.2)
    printed = wait_for_end(undisturbed)
    print(
        f"{time.monotonic() - began:.0f} s, {most / 1e6:.0f} MB in a worker, "
        f"{server.sent / 1e6:.0f} MB without end"
    )
    print(printed.splitlines()[-2])
    check_download(server, kinds, tmp_path / "undisturbed")
    assert most < 600_000_000

    out, drivers = tmp_path / "out", 0
    while len(finished_shards(out)) < 20 if out.exists() else True:
        driver = start(table, out, *flags)
        drivers += 1
        least = len(finished_shards(out)) + 4
        for number in (0, 1):
            wait_until(
                lambda: (
                    driver.poll() is not None
                    or len(finished_shards(out)) >= min(20, least - 2 * number)
                ),
                200,
            )
            for worker in workers(local_ray)[:1]:
                with contextlib.suppress(psutil.Error):
                    worker.kill()
        if driver.poll() is None:
            driver.kill()
        driver.communicate()
        assert drivers < 12
    wait_for_end(start(table, out, *flags))
    print(f"{drivers} drivers and as many workers were killed")
    check_download(server, kinds, out)
    mine, theirs = contents(out), contents(tmp_path / "undisturbed")
    assert {name for name in theirs if mine.get(name) != theirs[name]} <= {
        n for n in theirs if "data-" not in n
    }


# ------------------------------------------------------------------- the demo


def read_blocks(page, word):
    """The Python code on a page that contains a word."""
    text = (ROOT / "docs" / page).read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if word in code]
    return code


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder in which the first commands of docs/cluster.md ran: download, then cache."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setattr(script, "run_items", run_items_without_ray)
        download("--limit", "60")
        flags = ["--train_data_dir=images-digits", "--resolution=8", "--model_family=prx"]
        flags.append(f"--pretrained_model_name_or_path={ROOT / 'demo/models'}")
        flags.append("--output_dir=latents-digits-flow")
        Script("precompute_latents")(*flags, "--dataloader_num_workers=0")
    return folder


def test_the_demo_downloads_digits_from_a_server_on_this_machine(digits, monkeypatch, capsys):
    rows = datasets.load_dataset(str(digits / "images-digits"))["train"]
    images = datasets.load_dataset(str(ROOT / "demo/digits"))["train"].select(range(60))
    for name in ("image", "text"):
        assert rows[name] == images[name]
    assert len(datasets.load_from_disk(str(digits / "latents-digits-flow"))) == 60
    monkeypatch.chdir(digits)
    monkeypatch.setattr(script, "run_items", run_items_without_ray)
    download("--limit", "60")  # the server has the same address again
    printed = capsys.readouterr().out
    assert "download_images.py --input http://127.0.0.1:8747/digits.csv" in printed
    assert "Next: python precompute_latents.py --train_data_dir images-dig" in printed
    with contextlib.closing(socket.create_server(("127.0.0.1", 8747))):  # it has ended
        assert "the demo's server can't be started" in download.refused("--limit", "60")


@pytest.mark.long
def test_ray_data_reads_downloads_and_caches(digits, local_ray, monkeypatch):
    """The lines of docs/latent-cache.md."""
    monkeypatch.chdir(digits)
    found = {}
    code = read_blocks("latent-cache.md", "ray.data")
    exec(code.replace('"images-digits"', f'"{digits}/images-digits"'), found)
    assert found["images"].count() == found["latents"].count() == 60
    (row,) = found["latents"].take(1)
    assert {"latents", "prompt_embeds", "key"} <= row.keys()
    assert row["text"] == "a handwritten digit zero"
    assert pq.ParquetFile("latents.parquet").metadata.num_rows == 60
