"""Download the images that a table of URLs and captions names into shards to train from, on one machine or a cluster.

    python download_images.py --input urls.parquet --output_dir images
    python download_images.py --input 's3://bucket/laion/*.parquet' --url_column URL --caption_column TEXT \\
        --resize_to 512 --rows_per_shard 10000 --output_dir s3://bucket/images --address auto

Reads parquet, CSV or JSON lines: a file, a folder or a glob, on a disk or wherever fsspec reaches (s3://, gs://).
Writes into --output_dir data-00000-of-00012.parquet and so on, which `datasets.load_dataset(output_dir)` and all
scripts here open: columns image, text, url, width, height, sha256 and those of --keep_columns, rows in the order of
the table. Beside them __download__/, which `datasets` overlooks: failures.jsonl, settings.json and a record of every
shard. The same command again downloads only what is missing.

What stands where, and why:
- Ray Data only schedules: each piece of work is a range of rows and has the name of its file, and the files are the
  state. A piece that is done twice, after a kill or on a node that was given up for lost, gives the same file again.
- A shard shows up whole or not at all, and knows in its own footer which of its rows failed, and why; its record comes
  after it. So a kill between the two loses nothing, and --retry_failed keeps all that was got before.
- `open_socket` sees the very address of each connection, whatever a URL, a redirect or a name server came up with:
  there private addresses are refused. Proxies in the environment are not used, since they would connect elsewhere.
- A task keeps --connections requests going and puts images into a file on its disk as they come: the memory it takes
  is that of the requests, and a slow host holds up nobody.
What is asked of the web is in diffusion_training/web/: downloads.py, pictures.py, tables.py, shards.py.
"""

import asyncio
import collections
import contextlib
import hashlib
import ipaddress
import itertools
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # before more of it is imported, which may not be there

from diffusion_training.arguments import COUNT, PATH, make_parser, number
from diffusion_training.cluster import connect, find_modules
from diffusion_training.errors import fail, in_one_sentence
from diffusion_training.files import find_differences
from diffusion_training.remote import open_folder, publish, publish_text
from diffusion_training.web.downloads import fetch_rows
from diffusion_training.web.shards import (
    PASSING,
    choose_items,
    gather,
    list_sizes,
    name_record,
    read_json,
    read_shard,
    write_images,
)
from diffusion_training.web.tables import list_items, list_tables, make_schema, open_table, read_rows

MAX_ERRORS = 3  # shards that can't be written, after which a full disk is more likely than a moment's trouble
ITEM = {"name": str, "table": str, "first": int, "last": int}  # a piece of work

# ------------------------------------------------------------------------------------------------- the flags


def parse_args(argv=None):
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is written."""
    parser = make_parser(__file__, __doc__)
    add = parser.add_argument_group("table").add_argument
    add("--input", type=PATH, help="parquet, CSV or JSON lines: file, folder or glob")
    add("--url_column", default="url", help="column of URLs")
    add("--caption_column", default="text", help="column of captions; of a list one is drawn")
    add("--keep_columns", nargs="+", default=[], help="columns to copy into the shards")
    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=PATH, help="everything is written here")
    add("--rows_per_shard", type=COUNT, default=1000, help="source rows per file; a kill loses no more")
    add("--retry_failed", action="store_true", help="try again what may pass now, such as time-outs")
    add = parser.add_argument_group("images").add_argument
    add("--min_size", type=COUNT, default=1, help="least short side, pixels")
    add("--max_aspect_ratio", type=number(1, 10**9), help="of the long side to the short one (None: any)")
    add("--resize_to", type=COUNT, help="shrink to this short side, pixels (None: keep files as is)")
    add("--jpeg_quality", type=number(1, 100, int), default=95, help="of images that were shrunk")
    add = parser.add_argument_group("requests").add_argument
    add("--connections", type=number(1, 10_000, int), default=64, help="requests at a time in each task")
    add("--per_host", type=COUNT, default=8, help="of these, requests to one host")
    add("--timeout", type=number(0.001, 10**6), default=30, help="seconds for a whole request with its redirects")
    add("--idle_timeout", type=number(0.001, 10**6), default=10, help="seconds to connect, and without a byte")
    add("--retries", type=number(0, 100, int), default=2, help="after time-outs, 429 and 5xx")
    add("--max_bytes", type=number(1, 10**15, int), default=10_000_000, help="largest file")
    add("--user_agent", default="download_images/1.0", help="say who you are: name/version (+contact)")
    directives = ["noai", "noimageai", "noindex", "noimageindex"]
    add("--opt_out", nargs="*", default=directives, help="X-Robots-Tag directives to respect")
    add("--allow_private_addresses", nargs="*", help="hosts that are not public: all, or of these networks")
    add = parser.add_argument_group("Ray").add_argument
    add("--address", help="of a cluster (None: as RAY_ADDRESS says, or start one here)")
    add("--num_cpus", type=number(1, 10_000, int), help="tasks at a time, if Ray is started here (None: cores)")

    args = parser.parse_args(argv)
    if args.input is None or args.output_dir is None:
        parser.error("--input and --output_dir are needed, such as --input urls.parquet --output_dir images")
    if "/working_dir_files/" in os.path.abspath(args.output_dir):  # where Ray unpacks `ray job submit --working-dir`
        parser.error(f"Ray deletes {os.path.abspath(args.output_dir)} after the job: give --output_dir from the root")
    if args.num_cpus is not None and (args.address or os.environ.get("RAY_ADDRESS", "local")) != "local":
        parser.error("--num_cpus is for a Ray that is started here: leave it out with --address and RAY_ADDRESS")
    own = ["image", "text", "url", "width", "height", "sha256"]
    for names in ([args.url_column, args.caption_column, *args.keep_columns], [*own, *args.keep_columns]):
        if twice := [name for name in names if names.count(name) > 1]:
            parser.error(f"--keep_columns would give two columns {twice[0]!r}: leave it out, or rename it")
    try:
        args.allow_private_addresses = args.allow_private_addresses and [
            str(ipaddress.ip_network(network)) for network in args.allow_private_addresses
        ]
    except ValueError as error:
        parser.error(f"--allow_private_addresses: {error}, such as 10.1.0.0/16")
    args.opt_out = [directive.lower() for directive in args.opt_out]
    return args


# ------------------------------------------------------------------------------------------------- the work


def choose_urls(table, first, images, failures, args):
    """{row: URL} of what is to be asked for; rows that can't be asked for join `failures`."""
    urls = {}
    for row, url, text in zip(
        itertools.count(first), table["url"].to_pylist(), table["text"].to_pylist(), strict=False
    ):
        known = failures.get(row)
        if row in images or (known and not (args.retry_failed and known["reason"].startswith(PASSING))):
            continue
        if not url or text is None:
            failures[row] = {"row": row, "url": url, "reason": "no caption" if url else "no URL", "tries": 0}
        else:
            urls[row] = url
    return urls


def download_shard(batch, args, output_dir, schema):
    """The piece of work that Ray schedules: a range of rows of a table -> a shard and its record.

    `batch` has one row: {"name" of the shard, "table", "first", "last"}. What a shard that is there holds is kept;
    with --retry_failed, those of its failures that may pass are tried again. Returns {"rows", "images", "received":
    bytes, "failures": JSON of {reason: count}, "error": why nothing could be written}, each a list of one.
    """
    name, url, first, last = (kind(batch[key][0]) for key, kind in ITEM.items())
    fs, folder, on_disk = open_folder(output_dir)
    path, record_path = f"{folder}/{name}", name_record(folder, name)
    counts = {"rows": [last - first], "images": [0], "received": [0], "failures": ["{}"], "error": [""]}
    try:
        # The temporary folder lies beside the shards, where renaming is possible; for object storage in TMPDIR.
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder if on_disk else None) as work:
            table = read_rows(url, first, last, [args.url_column, args.caption_column, *args.keep_columns])
            table = table.rename_columns(["url", "text", *args.keep_columns])
            with open(f"{work}/spool", "w+b") as spool:
                old = path
                if not on_disk and fs.exists(path):
                    old = f"{work}/old"
                    fs.get_file(path, old)
                images, failures = read_shard(old, first, last, spool)
                urls = choose_urls(table, first, images, failures, args)
                if urls:
                    new, failed, counts["received"][0] = asyncio.run(fetch_rows(urls, spool, args))
                    images |= new
                    failures = {row: failure for row, failure in failures.items() if row not in new}
                    failures |= {row: {"row": row, "url": urls[row], **failed[row]} for row in failed}
                    failures = dict(sorted(failures.items()))
                if urls or not os.path.exists(old):
                    old = f"{work}/shard"
                    write_images(old, table, first, images, failures, spool, schema)
            with open(old, "rb") as file:
                sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), os.path.getsize(old)
            if old == f"{work}/shard":
                if fs.exists(record_path):  # of a first try: no record must ever tell of another shard
                    fs.rm_file(record_path)
                publish(fs, old, path)
            record = {"images": len(images), "bytes": size, "sha256": sha256, "table": url}
            record = json.dumps(record | {"failures": list(failures.values())})
            publish_text(fs, work, record, record_path)
    except (OSError, pa.ArrowException) as error:
        return counts | {"error": [f"{path} could not be made ({type(error).__name__}: {error})"]}
    reasons = collections.Counter(failure["reason"].split(":")[0] for failure in failures.values())
    return counts | {"images": [len(images)], "failures": [json.dumps(reasons)]}


def run_items(items, args, output_dir, schema):
    """Have Ray do the pieces of work; yields what `download_shard` returns for each, in any order."""
    import ray

    memory = 2**30 + args.connections * args.max_bytes  # the libraries and one decoded image; bodies on their way
    options = {} if args.num_cpus is None else {"num_cpus": args.num_cpus}
    connect(args.address, find_modules(download_shard, fetch_rows), **options)
    most = max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if most < memory:
        few = f"no machine has more than {most / 1e9:.1f} GB for it"
        fail(f"a task may take {memory / 1e9:.1f} GB and {few}: lower --connections or --max_bytes")
    # Blocks go out as they come in: one piece of work, one result.
    ray.data.DataContext.get_current().target_max_block_size = None
    # A block costs the driver a millisecond; of a task that holds several, what is done is not done again.
    work = ray.data.from_items(items, override_num_blocks=min(len(items), 20_000))
    settings = {"args": args, "output_dir": output_dir, "schema": schema}
    yield from work.map_batches(
        download_shard, batch_size=1, fn_kwargs=settings, num_cpus=1, memory=memory
    ).iter_rows()


# ------------------------------------------------------------------------------------------------- the run


def describe_failures(reasons, rows):
    """Such as "7.1 % failed (HTTP 404 4.0 %, timed out 3.1 %)"."""
    shares = ", ".join(f"{reason} {count / rows:.1%}" for reason, count in reasons.most_common(4))
    return f"{reasons.total() / max(1, rows):.1%} failed" + (f" ({shares})" if shares else "")


@in_one_sentence
def main(args):
    """Make the shards; ends with 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as until_the_end:
        download(args, scratch, until_the_end)


def download(args, scratch, until_the_end):
    """What `main` does, with a local folder for what is not yet whole, and an ExitStack that holds the lock."""
    # The folder that is there, or a new one
    try:
        fs, folder, on_disk = open_folder(args.output_dir)
        output_dir, settings_path = fs.unstrip_protocol(folder), f"{folder}/__download__/settings.json"
        if fs.isfile(folder):
            raise OSError("it is a file")
        names = list_sizes(fs, folder)
        started = fs.exists(settings_path)
        if others := [name for name in names if not started and not name.startswith((".", "__download__"))]:
            fail(f"--output_dir {args.output_dir} holds {others[0]} and no download: choose another folder")
        tables_fs, paths = list_tables(args)
        for name in ("records", "tables"):
            fs.makedirs(f"{folder}/__download__/{name}", exist_ok=True)
        if on_disk:
            until_the_end.enter_context(FileLock(f"{folder}/__download__/.lock").acquire(timeout=0))
    except Timeout:
        fail(f"another process is writing to {args.output_dir}: end it, or choose another --output_dir")
    except Exception as error:  # of the file system's own kinds, such as missing credentials
        fail(f"--output_dir {args.output_dir} can't be written to ({error})")

    # The table
    columns = [args.url_column, args.caption_column, *args.keep_columns]
    with ThreadPoolExecutor(16) as pool:
        tables = list(pool.map(lambda path: open_table(tables_fs, path, columns, output_dir, scratch), paths))
    num_rows = sum(table["rows"] for table in tables)
    if num_rows == 0:
        fail(f"--input {args.input} holds no rows")
    schema, items = make_schema(tables, args), list_items(tables, args.rows_per_shard)
    fixed = ["url_column", "caption_column", "keep_columns", "rows_per_shard", "min_size", "max_aspect_ratio"]
    fixed += ["resize_to", "jpeg_quality", "max_bytes", "opt_out"]
    digest = hashlib.sha256("".join(table["digest"] for table in tables).encode()).hexdigest()[:16]
    settings = {"format_version": 1, **{name: getattr(args, name) for name in fixed}}
    settings["input"] = {"tables": len(tables), "rows": num_rows, "sha256": digest}
    if not started:
        publish_text(fs, scratch, json.dumps(settings, indent=1), settings_path)
    elif differences := find_differences(read_json(fs.cat_file(settings_path)), settings):
        fail(f"{args.output_dir} holds another download ({', '.join(differences)}): choose another --output_dir")

    # What is missing
    missing = choose_items(fs, folder, items, args.retry_failed)
    rows_missing = sum(item["last"] - item["first"] for item in missing)
    tqdm.write(f"{num_rows:,} rows in {len(items):,} shards, {len(missing):,} of them to do")
    bar = tqdm(total=num_rows, initial=num_rows - rows_missing, unit="row", desc="Rows")
    start, images, received, rows, reasons, errors = time.perf_counter(), 0, 0, 0, collections.Counter(), []
    for result in run_items(missing, args, output_dir, schema) if missing else ():
        errors += [result["error"]] if result["error"] else []
        if len(errors) > MAX_ERRORS:
            break
        images, received, rows = images + result["images"], received + result["received"], rows + result["rows"]
        reasons.update(json.loads(result["failures"]))
        seconds = time.perf_counter() - start
        speed = f"{images / seconds:.1f} images/s, {received / seconds / 1e6:.1f} MB/s"
        bar.set_postfix_str(f"{speed}, {describe_failures(reasons, rows)}", refresh=False)
        bar.update(result["rows"])
    bar.close()
    if errors:
        fail(f"{errors[0]}; the same command goes on from the shards that are whole")

    # All is whole
    images, size, reasons = gather(fs, folder, items, scratch)
    if on_disk:
        for leftover in Path(folder).glob(".tmp-*"):  # of tasks that were killed
            shutil.rmtree(leftover, ignore_errors=True)
    failed = describe_failures(reasons, num_rows)
    print(f"Done: {images:,} images ({size / 1e9:.3f} GB) are in {args.output_dir}; {failed}")
    if reasons:
        print(f"Why: {args.output_dir}/__download__/failures.jsonl; --retry_failed tries again what may pass")


if __name__ == "__main__":
    main(parse_args())
