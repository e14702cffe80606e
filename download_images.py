"""Download the images of a table of URLs and captions into shards, on one machine or a cluster.

    python download_images.py     # the demo: handwritten digits, from a server on this machine
    python download_images.py --input urls.parquet --output_dir images
    python download_images.py --input 's3://bucket/laion/*.parquet' \\
        --url_column URL --caption_column TEXT --resize_to 512 --rows_per_shard 10000 \\
        --output_dir s3://bucket/images --address auto

Input: parquet, CSV, TSV or JSON lines. --input is a file, a folder or a glob, local or at an
address that fsspec can read (s3://, gs://). --dataset_name reads the tables of a data set on the
hub instead.

Output, in --output_dir: shards named like data-00000-of-00012.parquet, with their rows in the order
of the table. `datasets.load_dataset(output_dir)` and all scripts here can open them. The columns
are image, text, url, width, height, sha256 and those of --keep_columns. The folder __download__/,
which `datasets` ignores, holds failures.jsonl, settings.json, a copy of the table and a record of
each shard. Run the same command again to resume: it downloads only what is missing.

Design:
- Ray only schedules. Each work item is a range of rows with its own shard file, and the files are
  the state.
- Ray's tasks copy the needed columns of tables at addresses. If the tables are parquet and all rows
  are used, their footers determine the names of all shards, so downloads begin while later tables
  are copied. This machine copies tables on its disk, because others may not have them.
- A shard file is either complete or missing. Its footer lists the rows that it holds. Its record
  lists the failures and their reasons. The old record is deleted before a new shard is written, and
  the new record is written after it. So a killed run loses no complete shard: if a shard has no
  record, only the rows that it lacks are requested again.
- `open_socket` checks the address of each connection, whichever URL, redirect or name server it
  came from, and rejects private addresses. Proxies from the environment are not used, since they
  would hide that address.
- Repeated files are found when all shards exist. Shards that hold them are then written again.
- A fault of a row is recorded. A fault of the machine (memory, file descriptors, disk, network)
  ends the task and never skips a row.
Requests, images, tables and shards are in diffusion_training/web/: downloads.py, pictures.py,
tables.py, shards.py.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the "
        "script's repository"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import asyncio
import collections
import contextlib
import functools
import hashlib
import importlib.util
import ipaddress
import itertools
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diffusion_training.arguments import (
    COUNT,
    PATH,
    is_address,
    make_parser,
    name_start,
    number,
    parse_demo,
)
from diffusion_training.cluster.connection import (
    Gauges,
    check_ray_args,
    connect,
    list_own_modules,
    run_tasks,
)

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# `main` starts a server that answers at this address, demo/serve_digits.py
DEMO_ADDRESS = "http://127.0.0.1:8747/"
# The flags of a run without a table. Flags on the command line override them.
DEMO = f"""
    --input {DEMO_ADDRESS}digits.csv --allow_private_addresses 127.0.0.1
    --output_dir images-digits
"""
MAX_URL = 500  # characters; a record cuts longer URLs
# Shards that may fail before the run stops. After more, the cause is probably permanent, such as a
# full disk.
MAX_ERRORS = 3
HASHES = 2**24  # of files, that a task of --skip_repeated compares
AHEAD = 4  # tables that are copied while the images of an earlier one are downloaded
# Flags that determine the content of the shards. A folder holds only one download.
FIXED = (
    "url_column",
    "caption_column",
    "keep_columns",
    "rows_per_shard",
    "min_size",
    "max_aspect_ratio",
    "resize_to",
    "jpeg_quality",
    "max_bytes",
    "opt_out",
    "where",
    "limit",
    "skip_repeated",
)


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is written.
    """
    parser = make_parser(__file__, __doc__, "docs/download.md")
    add = parser.add_argument_group("table").add_argument
    add("--input", type=PATH, help="parquet, CSV, TSV or JSON lines: file, folder or glob")
    add(
        "--dataset_name",
        type=PATH,
        help="instead of --input: data set of such tables, on the hub or local",
    )
    add(
        "--dataset_config_name",
        help="configuration of the data set, if it has several",
        needs="--dataset_name",
    )
    add("--dataset_split", default="train", help="split to read", needs="--dataset_name")
    add("--url_column", default="url", help="column of URLs")
    add("--caption_column", default="text", help="column of captions, or of lists of captions")
    add("--keep_columns", nargs="+", default=[], help="columns to copy into the shards")
    add(
        "--where",
        help="use only matching rows, such as 'similarity > 0.3 and width >= 512' (default: all)",
    )
    add("--limit", type=COUNT, help="use only this many rows, the first ones (default: all)")
    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=PATH, help="required: folder or address for all output")
    add(
        "--rows_per_shard",
        type=number(1, 10**7, int),
        default=1000,
        help="number of rows of the table per output file; a killed task loses at most this many",
    )
    add(
        "--retry_failed",
        action="store_true",
        help="retry rows with a temporary failure, such as a time-out",
    )
    add = parser.add_argument_group("images").add_argument
    add(
        "--min_size",
        type=COUNT,
        default=1,
        help="skip images with a side shorter than this many pixels",
    )
    add(
        "--max_aspect_ratio",
        type=number(1, 10**9),
        help="skip images whose long side is more than this many times the short side (default: "
        "any)",
    )
    add(
        "--skip_repeated",
        action="store_true",
        default=None,
        help="skip a row if an earlier row has the same file, by sha256",
    )
    add(
        "--resize_to",
        type=COUNT,
        help="shrink images so that the short side has this many pixels (default: keep the files)",
    )
    add(
        "--jpeg_quality",
        type=number(1, 100, int),
        default=95,
        help="JPEG quality of images that --resize_to shrinks",
        needs="--resize_to",
    )
    add = parser.add_argument_group("requests").add_argument
    add(
        "--connections",
        type=number(1, 10_000, int),
        default=64,
        help="requests at the same time in each task",
    )
    add(
        "--per_host",
        type=COUNT,
        default=8,
        help="requests at the same time to one host in each task",
    )
    add(
        "--timeout",
        type=number(0.001, 10**6),
        default=30,
        help="maximum seconds for a request with its redirects",
    )
    add(
        "--idle_timeout",
        type=number(0.001, 10**6),
        default=10,
        help="maximum seconds to connect, or to wait for the next bytes",
    )
    add(
        "--retries",
        type=number(0, 100, int),
        default=2,
        help="retries after a time-out or HTTP status 429 or 5xx",
    )
    add(
        "--max_bytes",
        type=number(1, 10**15, int),
        default=10_000_000,
        help="skip files larger than this many bytes",
    )
    add(
        "--user_agent",
        default="download_images/1.0",
        help="how requests identify you: name/version (+contact)",
    )
    add(
        "--opt_out",
        nargs="*",
        default="noai noimageai noindex noimageindex".split(),
        help="skip images with one of these X-Robots-Tag directives",
    )
    add(
        "--allow_private_addresses",
        nargs="*",
        help="connect to private addresses too: all, or only networks such as 10.1.0.0/16",
    )
    add = parser.add_argument_group("Ray").add_argument
    add(
        "--address",
        help="address of a Ray cluster (default: RAY_ADDRESS, or start Ray on this machine)",
    )
    add(
        "--num_cpus",
        type=number(1, 10_000, int),
        help="concurrent tasks, if Ray is started on this machine (default: one per core)",
    )

    args = parser.parse_args(argv)
    if args.input is args.dataset_name is None:
        args = parse_demo(parser, DEMO, argv)
    if (args.input is None) == (args.dataset_name is None) or args.output_dir is None:
        needed = "--output_dir and one of --input and --dataset_name are needed"
        parser.error(f"{needed}, such as --input urls.parquet --output_dir images")
    check_ray_args(parser, args.address, args.output_dir)
    address = args.address or os.environ.get("RAY_ADDRESS", "local")
    if args.num_cpus is not None and address != "local":
        parser.error(
            "--num_cpus works only if Ray is started on this machine: "
            "leave it out with --address or RAY_ADDRESS"
        )
    if not args.user_agent.isprintable():
        parser.error(f"--user_agent {args.user_agent!r} must be one line of printable characters")
    read = [args.url_column, args.caption_column, *args.keep_columns]
    written = ["image", "text", "url", "width", "height", "sha256", *args.keep_columns]
    for columns in (read, written):
        for name in columns:
            if columns.count(name) > 1:
                parser.error(
                    f"--keep_columns would give two columns {name!r}: leave it out, or rename it"
                )
    if args.where is not None:
        from diffusion_training.web.filters import find_columns  # it imports pyarrow

        try:
            find_columns(args.where)
        except (ValueError, OverflowError) as error:
            parser.error(f"--where: {error}")
    networks = args.allow_private_addresses
    try:
        networks = networks and [str(ipaddress.ip_network(text)) for text in networks]
    except ValueError as error:
        parser.error(f"--allow_private_addresses: {error}; give a network such as 10.1.0.0/16")
    opt_out = [directive.lower() for directive in args.opt_out]
    return parser.freeze(args, allow_private_addresses=networks, opt_out=opt_out)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from tqdm.auto import tqdm

from diffusion_training.csv_files import get_suffix
from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import hide_secrets, name_address
from diffusion_training.errors.sentences import CHANGED, explained, fail, in_one_sentence
from diffusion_training.files import find_differences, lock_folder
from diffusion_training.remote import has_file, open_folder, reading, remove, writing
from diffusion_training.web.image_shards import (
    choose_items,
    choose_urls,
    describe_shard,
    find_repeats,
    gather,
    list_repeated,
    list_sizes,
    name_record,
    read_json,
    read_record,
    read_shard,
    split_digests,
    write_images,
)
from diffusion_training.web.pictures import THREADS
from diffusion_training.web.tables import (
    copy_table,
    copy_tables,
    digest_table,
    list_items,
    list_tables,
    make_schema,
    plan_copies,
    read_rows,
)


def serve_demo() -> None:
    """Start the server of the demo. It ends with this process, or when `main` ends."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "demo/serve_digits.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not end it while downloads run
    )
    CHANGED.enter_context(server)
    CHANGED.callback(server.kill)
    if not server.stdout or not server.stdout.readline():
        fail(f"the demo's server can't be started: another program answers at {DEMO_ADDRESS}")


def copy_options(args: Namespace, folder: str) -> dict[str, Any]:
    """The arguments of `copy_table` that all tables share."""
    return {
        "columns": [args.url_column, args.caption_column, *args.keep_columns],
        "rows_per_group": args.rows_per_shard,
        "folder": folder,
        "where": args.where,
    }


def copy_share(source: str, digest: str, args: Namespace, folder: str) -> dict[str, Any]:
    """Call `copy_table`, as a Ray task. Returns {"error": reason} if it fails."""
    try:
        return copy_table(source, digest, **copy_options(args, folder))
    except SystemExit as error:  # a task must not exit
        return {"error": str(error)}


def download_shard(
    item: dict, args: Namespace, folder: str, schema: pa.Schema, copied: dict | None = None
) -> dict[str, Any]:
    """Make the shard and the record of a work item of `list_items`, as a Ray task.

    Images of an existing shard are kept. With --retry_failed, its temporary failures are tried
    again. `copied` is the result of the table's `copy_share`. Returns {"rows", "images",
    "received": bytes, "failures": {reason: count}}, or {"error": reason} if the shard could not be
    written.
    """
    from diffusion_training.web.downloads import fetch_rows  # here, so --help needs no aiohttp

    if item["digest"] and copied is None:
        copied = copy_share(item["table"], item["digest"], args, folder)
    if copied and "error" in copied:
        return copied
    fs, root, _ = open_folder(folder)
    path = f"{folder}/{item['name']}"
    record_path = name_record(folder, item["name"])
    first = item["first"]
    # Images are first collected in a file beside the shards, where there is room for them, or in
    # TMPDIR if the shards are in object storage.
    spool_folder = root if folder == root else None
    try:
        with reading(path) as shard, tempfile.TemporaryFile(dir=spool_folder) as spool:
            table = read_rows(item).rename_columns(["url", "text", *args.keep_columns])
            images = read_shard(shard, item, spool)
            is_missing = images is None
            images = images or {}
            digest = {} if is_missing else describe_shard(shard)
            record = read_record(fs, record_path)
            failures = {}
            if record.get("sha256") == digest.get("sha256"):
                failures = {failure["row"]: failure for failure in record.get("failures", ())}
            rows = list(images)
            repeated = [rows[position] for position in item.get("repeated", ()) if rows]
            for row in repeated:
                del images[row]
                failures[row] = {
                    "row": row,
                    "url": table["url"][row - first].as_py(),
                    "tries": 1,
                    "reason": "repeated: an earlier row has the same file",
                }
            urls = choose_urls(table, first, images, failures, args)
            downloaded, refused, received = asyncio.run(fetch_rows(urls, spool, args))
            for row, failure in refused.items():
                failures[row] = {"row": row, "url": urls[row], **failure}
            if downloaded or repeated or is_missing:
                images |= downloaded
                with writing(path) as unfinished:
                    write_images(unfinished, table, first, images, spool, schema)
                    digest = describe_shard(unfinished)
                    remove(record_path)  # before the shard changes: they must never disagree
            failed = [failures[row] for row in sorted(failures.keys() - images.keys())]
            for failure in failed:
                failure["url"] = name_address(failure.get("url") or "")[:MAX_URL]
            source = hide_secrets(item["table"])
            record = {"images": len(images), **digest, "table": source, "failures": failed}
            with writing(record_path) as unfinished:
                unfinished.write_text(json.dumps(record))
    except (OSError, MemoryError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {explain(error)}"
        return {"error": f"{path} could not be made on {socket.gethostname()} ({reason})"}
    reasons = collections.Counter(failure["reason"].split(":")[0] for failure in failed)
    return {"rows": len(table), "images": len(images), "received": received, "failures": reasons}


def connect_to_ray(args: Namespace) -> Callable[[], float]:
    """Connect to Ray until `main` ends. Returns a function that counts the tasks to submit."""
    import ray

    modules = list_own_modules(download_shard, fail)
    CHANGED.callback(connect(args.address, modules, num_cpus=args.num_cpus))
    # read each time, because nodes may join the cluster
    return lambda: 2 * ray.cluster_resources().get("CPU", 1) + 1


def start_copying(args: Namespace, folder: str) -> Callable[[str, str], Any]:
    """Return a function that starts `copy_share` on Ray, which retries it if a machine is lost."""
    import ray

    task = ray.remote(num_cpus=1, memory=2**30, scheduling_strategy="SPREAD")(copy_share)
    return lambda source, digest: task.remote(source, digest, args, folder)


def copy_on_cluster(tables: list[tuple[str, str]], args: Namespace, folder: str) -> list[dict]:
    """Copy tables (source, digest) with Ray, where rows can be counted only in the copies."""
    count_tasks, copy = connect_to_ray(args), start_copying(args, folder)
    copies = {}
    with contextlib.closing(run_tasks(tables, lambda table: copy(*table), count_tasks)) as works:
        for table, copied, error in tqdm(works, total=len(tables), desc="Tables", leave=False):
            if error or "error" in copied:
                fail(f"{table[0]} can't be copied: {error}" if error else copied["error"])
            copies[table] = copied
    return [copies[table] for table in tables]


def run_items(
    items: list[dict], args: Namespace, folder: str, schema: pa.Schema
) -> Generator[dict]:
    """Run `download_shard` on Ray for each item; yield the results in any order."""
    count_tasks = connect_to_ray(args)
    import ray

    # 1 GB for the libraries and one image of any size, 256 MB for each of the other images that are
    # decoded at the same time, and the bodies of the requests.
    memory = 2**30 + (THREADS - 1) * 2**28 + args.connections * args.max_bytes
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    largest = max(node.get("memory", 0) for node in nodes)
    if largest < memory:
        fail(
            f"a task may take {memory / 1e9:.1f} GB and no machine has more than "
            f"{largest / 1e9:.1f} GB for it: lower --connections or --max_bytes"
        )
    as_task = ray.remote(num_cpus=1, memory=memory, max_retries=0, scheduling_strategy="SPREAD")
    task = as_task(download_shard)
    shared = [ray.put(value) for value in (args, folder, schema)]
    copy = start_copying(args, folder)
    left = iter(dict.fromkeys((item["table"], item["digest"]) for item in items if item["digest"]))
    copies: dict[str, Any] = {}  # {table: Ray's reference to the result of its `copy_share`}
    begun = set()

    def submit(item: dict) -> Any:
        if item["digest"] and item["table"] not in begun:
            begun.add(item["table"])
            for table in itertools.islice(left, 1 if copies else AHEAD):
                copies[table[0]] = copy(*table)
        # Ray starts the task once the table is copied.
        return task.remote(item, *shared, copies.get(item["table"]))

    for item, result, error in run_tasks(items, submit, count_tasks):
        rows = f"rows {item['first']} to {item['last'] - 1} of {item['table']}"
        yield {"error": f"{rows} could not be downloaded: {error}"} if error else result


def find_repeated(items: list[dict], args: Namespace, folder: str) -> list[dict]:
    """Find the shards with files that repeat those of earlier rows, byte for byte.

    Returns their work items, with "repeated": positions of these files in the shard. The first row
    in the order of the tables keeps the file, so the order in which shards were made does not
    matter. Ray's tasks read the hashes and split them by their first bytes; for each part another
    task compares the hashes of all shards.
    """
    count_tasks = connect_to_ray(args)
    import ray

    step = min(HASHES // args.rows_per_shard, math.ceil(len(items) / count_tasks())) or 1
    names = [(number, item["name"]) for number, item in enumerate(items)]
    groups = [dict(names[first : first + step]) for first in range(0, len(names), step)]
    parts = 2 + len(items) * args.rows_per_shard // HASHES
    as_task = functools.partial(ray.remote, num_cpus=1, memory=2**31)
    split = as_task(num_returns=parts, scheduling_strategy="SPREAD")(split_digests)
    compare = as_task(max_retries=0)(find_repeats)
    try:
        by_part = zip(*(split.remote(folder, group, parts) for group in groups), strict=True)
        found = []
        for _, images, error in run_tasks(by_part, lambda part: compare.remote(*part), count_tasks):
            if error:
                fail(f"repeated files could not be found: {error}; run the same command again")
            found.append(images)
    except ray.exceptions.RayTaskError as error:
        fail(explain(error.cause))
    return list_repeated(items, np.concatenate(found))


# -------------------------------------------------------------------------------------------------
# the run


def describe_failures(reasons: collections.Counter, rows: int) -> str:
    """The share of failures and their reasons: "7.1% failed (HTTP 404 4.0%, timed out 3.1%)"."""
    shares = ", ".join(f"{reason} {count / rows:.1%}" for reason, count in reasons.most_common(4))
    return f"{reasons.total() / rows:.1%} failed" + (f" ({shares})" if shares else "")


def describe_download(tables_fs: Any, paths: list[str], args: Namespace) -> tuple[dict, list[str]]:
    """Return (the settings that determine the shards' content, the digests of the tables)."""
    with ThreadPoolExecutor(16) as pool:
        digests = list(pool.map(functools.partial(digest_table, tables_fs), paths))
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    settings = {"format_version": 2, **{name: getattr(args, name) for name in FIXED}}
    settings["input"] = {"tables": len(paths), "sha256": digest}
    return settings, digests


def download(
    missing: list[dict], num_rows: int, args: Namespace, folder: str, schema: Any
) -> list[str]:
    """Make the missing shards in Ray tasks, and show the progress. Returns the tasks' errors."""
    rows_done = num_rows - sum(item["last"] - item["first"] for item in missing)
    bar = tqdm(total=num_rows, initial=rows_done, unit="row", desc="Rows")
    start = time.perf_counter()
    rows = images = received = 0
    reasons = collections.Counter()
    errors = []
    gauges = Gauges(
        "download_images",
        rows_done="Rows of the table that are done, with an image or a failure",
        images_per_second="Images that were downloaded per second",
        bytes_per_second="Bytes that were received per second",
        failed_share="Share of the rows of this run that failed",
    )
    # Closing it ends the tasks that still run, before Ray is shut down.
    with contextlib.closing(run_items(missing, args, folder, schema)) as results:
        for result in results if missing else ():
            if "error" in result:
                errors.append(result["error"])
                if len(errors) > MAX_ERRORS:
                    break
                continue
            rows += result["rows"]
            images += result["images"]
            received += result["received"]
            reasons.update(result["failures"])
            seconds = time.perf_counter() - start
            speed = f"{images / seconds:.1f} images/s, {received / seconds / 1e6:.1f} MB/s"
            bar.set_postfix_str(f"{speed}, {describe_failures(reasons, rows)}", refresh=False)
            bar.update(result["rows"])
            gauges.set(
                rows_done=bar.n,
                images_per_second=images / seconds,
                bytes_per_second=received / seconds,
                failed_share=reasons.total() / rows,
            )
    bar.close()
    return errors


def report_result(summary: dict, num_rows: int, args: Namespace) -> None:
    """Print the result. Stops with an error if there is no image at all."""
    failed = describe_failures(collections.Counter(summary["failures"]), num_rows)
    why = (
        f"Reasons: {args.output_dir}/__download__/failures.jsonl; "
        "--retry_failed tries temporary failures again"
    )
    if not summary["images"]:
        fail(f"no image could be downloaded from {num_rows:,} rows: {failed}. {why}")
    print(
        f"Done: {summary['images']:,} images ({summary['bytes'] / 1e9:.3f} GB) "
        f"are in {args.output_dir}; {failed}"
    )
    if summary["failures"]:
        print(why)
    streaming = " --streaming" if is_address(args.output_dir) else ""
    model = "... (your model)"
    if (args.input or "").startswith(DEMO_ADDRESS):
        model = f"{HERE}/demo/models --model_family prx --resolution 8"
        model += " --output_dir latents-digits-flow"
    print(
        f"Next: {name_start('precompute_latents.py')} --train_data_dir {args.output_dir}"
        f"{streaming} --pretrained_model_name_or_path {model}"
    )


@in_one_sentence
def main(args: Namespace) -> None:
    """Make the shards.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    for package in ("aiohttp", "ray"):
        if importlib.util.find_spec(package) is None:
            fail(f"{package} is missing: pip install -r requirements-ray.txt")

    if (args.input or "").startswith(DEMO_ADDRESS):
        serve_demo()

    # Open the output folder, or make it.
    tables_fs, paths = list_tables(args)
    with explained(f"--output_dir {args.output_dir} can't be written to"):
        fs, root, folder = open_folder(args.output_dir)
        settings_path = f"{folder}/__download__/settings.json"
        summary_path = f"{folder}/__download__/summary.json"
        names = list_sizes(fs, root)
        if folder == root:
            lock = lock_folder(
                Path(root), args.output_dir, lambda names: "__download__" in names, "download"
            )
        elif names and not has_file(fs, settings_path):
            fail(
                f"--output_dir {args.output_dir} holds {min(names)} and no download: "
                "choose another folder"
            )
        for name in ("records", "tables"):
            fs.makedirs(f"{root}/__download__/{name}", exist_ok=True)

    # Read the tables, copy them if that is necessary now, and cut them into work items.
    settings, digests = describe_download(tables_fs, paths, args)
    if has_file(fs, settings_path):
        differences = find_differences(read_json(fs, settings_path), settings)
        if differences:
            fail(
                f"{args.output_dir} holds another download ({', '.join(differences)}): "
                "choose another --output_dir"
            )
    sources = list(zip(map(tables_fs.unstrip_protocol, paths), digests, strict=True))
    options = copy_options(args, folder)
    if args.limit or isinstance(tables_fs, LocalFileSystem):
        copies = copy_tables(sources, args.limit, **options)
        tables = list(tqdm(copies, total=len(paths), desc="Tables", leave=False))
    elif args.where is None and all(get_suffix(path) == ".parquet" for path in paths):
        tables = plan_copies(sources, **options)
    else:
        tables = copy_on_cluster(sources, args, folder)
    num_rows = sum(table["rows"] for table in tables)
    if num_rows == 0:
        condition = f" with --where {args.where}" if args.where else ""
        fail(f"{args.input or args.dataset_name} holds no rows{condition}")
    schema = make_schema(tables, args)
    items = list_items(tables, args.rows_per_shard)
    with writing(settings_path) as path:
        path.write_text(json.dumps(settings, indent=1))

    # Download the missing shards.
    missing = choose_items(fs, folder, items, args.retry_failed)
    # A summary means that an earlier run has finished and searched for repeated files.
    is_finished = not missing and has_file(fs, summary_path)
    tqdm.write(f"{num_rows:,} rows in {len(items):,} shards, {len(missing):,} of them to do")
    if missing:
        remove(summary_path)  # valid only for a complete download
    errors = download(missing, num_rows, args, folder, schema)
    # Repeated files are found only when all shards exist, so that the order in which they were made
    # does not matter.
    if args.skip_repeated and not is_finished:
        while not errors and (repeated := find_repeated(items, args, folder)):
            with contextlib.closing(run_items(repeated, args, folder, schema)) as results:
                errors = [result["error"] for result in results if "error" in result]
    if errors:
        fail(f"{errors[0]}; run the same command again to make the missing shards")

    # All shards are complete: write the summary.
    summary = gather(fs, folder, items)
    if folder == root:
        for name in ("", "__download__", "__download__/records", "__download__/tables"):
            for leftover in Path(root, name).glob(".tmp-*"):  # from tasks that were killed
                leftover.unlink(missing_ok=True)
    report_result(summary, num_rows, args)
    if folder == root:
        lock.release(force=True)


if __name__ == "__main__":
    main(args)
