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
"""

import argparse
import asyncio
import collections
import contextlib
import email.utils
import functools
import glob
import hashlib
import io
import ipaddress
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

import aiohttp
import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem
from PIL import Image, ImageOps
from tqdm.auto import tqdm
from yarl import URL

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # no EPS: Pillow would start Ghostscript
MAX_REDIRECTS = 5
MAX_ERRORS = 3  # shards that can't be written, after which a full disk is more likely than a moment's trouble
# What another day may mend, by the start of the reason: --retry_failed asks for these again.
PASSING = ("timed out", "connection", "broken off", "host not found", "HTTP 429", "HTTP 5")
# Private, though Python calls them global: Azure's own service in each of its networks, old and local forms of IPv6.
NOT_PUBLIC = [ipaddress.ip_network(network) for network in ("168.63.129.16", "fec0::/10", "64:ff9b:1::/48")]
ITEM = {"name": str, "table": str, "first": int, "last": int}  # a piece of work
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Why there is no answer, by the first kind that fits: {0} is the kind of error, {1} what it says
ERRORS = {
    TimeoutError: "timed out",
    (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError): "broken off",
    aiohttp.ClientConnectorDNSError: "host not found",
    aiohttp.ClientSSLError: "TLS: {1}",
    aiohttp.ClientConnectorError: "connection: {0} {1}",
    aiohttp.ClientOSError: "broken off",
    aiohttp.ClientResponseError: "bad answer: not as HTTP has it",
    ValueError: "bad URL: {1}",  # of aiohttp, yarl or the encoding of a name
}

# ------------------------------------------------------------------------------------------------- arguments


def parse_args(argv=None):
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is written."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python download_images.py --input urls.parquet --url_column url --output_dir images",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = number(1, 10**9, int)
    path = os.path.expanduser  # a shell leaves the ~ of --output_dir=~/run as it is
    add = parser.add_argument_group("table").add_argument
    add("--input", type=path, help="parquet, CSV or JSON lines: file, folder or glob")
    add("--url_column", default="url", help="column of URLs")
    add("--caption_column", default="text", help="column of captions; of a list one is drawn")
    add("--keep_columns", nargs="+", default=[], help="columns to copy into the shards")
    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=path, help="everything is written here")
    add("--rows_per_shard", type=count, default=1000, help="source rows per file; a kill loses no more")
    add("--retry_failed", action="store_true", help="try again what may pass now, such as time-outs")
    add = parser.add_argument_group("images").add_argument
    add("--min_size", type=count, default=1, help="least short side, pixels")
    add("--max_aspect_ratio", type=number(1, 10**9), help="of the long side to the short one (None: any)")
    add("--resize_to", type=count, help="shrink to this short side, pixels (None: keep files as is)")
    add("--jpeg_quality", type=number(1, 100, int), default=95, help="of images that were shrunk")
    add = parser.add_argument_group("requests").add_argument
    add("--connections", type=number(1, 10_000, int), default=64, help="requests at a time in each task")
    add("--per_host", type=count, default=8, help="of these, requests to one host")
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
        parser.error(
            "--input, a table with a column of URLs (parquet, CSV or JSON lines), and --output_dir are needed: "
            "such as --input urls.parquet --output_dir images"
        )
    if "/working_dir_files/" in os.path.abspath(args.output_dir):  # where Ray unpacks `ray job submit --working-dir`
        parser.error(f"Ray deletes {os.path.abspath(args.output_dir)} after the job: give --output_dir from the root")
    if args.num_cpus is not None and (args.address or os.environ.get("RAY_ADDRESS", "local")) != "local":
        parser.error("--num_cpus is for a Ray that is started here: leave it out with --address and RAY_ADDRESS")
    own = ["image", "text", "url", "width", "height", "sha256"]
    for names in ([args.url_column, args.caption_column, *args.keep_columns], [*own, *args.keep_columns]):
        if twice := [name for name in names if names.count(name) > 1]:
            parser.error(
                f"--keep_columns would give two columns {twice[0]!r}: leave it out, or rename it in the table"
            )
    try:
        args.allow_private_addresses = args.allow_private_addresses and [
            str(ipaddress.ip_network(network)) for network in args.allow_private_addresses
        ]
    except ValueError as error:
        parser.error(f"--allow_private_addresses: {error}, such as 10.1.0.0/16")
    args.opt_out = [directive.lower() for directive in args.opt_out]
    return args


def number(low, high, kind=float, *words):
    """An argparse type: numbers of a kind from `low` to `high`, so never nan or inf, or one of `words`."""

    def parse(text):
        if text in words:
            return text
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    parse.__name__, parse.bounds = kind.__name__, (low, high, kind)
    return parse


def fail(message, alone=False):
    """End the program with status 1 and one sentence.

    All processes come here for the same reason, so the first of each machine says it; `alone`: this one may be the
    only one to know.
    """
    if alone or os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"\n{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


# ------------------------------------------------------------------------------------------------- addresses


class PrivateAddress(OSError):
    """A connection to an address that is not on the public internet; an OSError, as aiohttp expects of a socket."""


def check_address(address, allowed):
    """Raise PrivateAddress for an IP address, written as the socket library does, that is not to be connected to.

    `allowed`: None, networks that are to be reached though they are not public, or an empty list for all of them. An
    IPv6 address that stands for an IPv4 one (mapped, NAT64, 6to4, Teredo) is judged by that.
    """
    ip = ipaddress.ip_address(address.split("%")[0])
    if ip.version == 6:
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else inner or ip
    public = ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in NOT_PUBLIC))
    if not public and allowed != [] and not any(ip in ipaddress.ip_network(network) for network in allowed or ()):
        raise PrivateAddress("private address")  # the same text for all of a host's, or aiohttp would mix them


def open_socket(address_info, allowed):
    """Make the socket of a connection; `address_info` is what `getaddrinfo` said, and what is connected to next.

    Nothing looks up the name again between here and there. Raises PrivateAddress.
    """
    family, kind, protocol, _, address = address_info
    check_address(address[0], allowed)
    return socket.socket(family, kind, protocol)


# ------------------------------------------------------------------------------------------------- requests


class Failure(Exception):
    """Why a row has no image. `wait`: seconds after which a retry may help, None if it can't."""

    def __init__(self, reason, wait=None):
        super().__init__(reason)
        self.wait = wait


def read_retry_after(headers):
    """Seconds that a server asks to wait, None if it does not say."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):  # no date, or one without a time zone
        return None


def find_opt_out(headers, user_agent, directives):
    """The first of `directives` that an X-Robots-Tag asks of all, or of us by name; None if there is none."""
    me = user_agent.split("/")[0].strip().lower()
    for value in headers.getall("X-Robots-Tag", []):
        agent = None  # a name holds from where it stands to the end of its header
        for part in value.lower().split(","):
            name, colon, directive = (text.strip() for text in part.partition(":"))
            if not colon:
                directive = name
            elif name in ("unavailable_after", "max-snippet", "max-image-preview", "max-video-preview") or " " in name:
                continue  # a directive with a value, or the rest of a date
            else:
                agent = name
            if agent in (None, me) and directive in directives:
                return directive
    return None


class Downloads:
    """The requests of one task, and the file that their images go to as they come."""

    def __init__(self, session, spool, checker, args):
        self.session, self.spool, self.checker, self.args = session, spool, checker, args
        self.hosts = collections.defaultdict(lambda: asyncio.Semaphore(args.per_host))
        self.connections = asyncio.Semaphore(args.connections)
        self.received = 0  # bytes of bodies, also of those that failed

    async def download(self, url):
        """Returns an image, as `store_image` does, or a failure {"reason", "tries"}."""
        for tries in itertools.count(1):
            try:
                return await self.fetch(url)
            except Failure as failure:
                if failure.wait is None or failure.wait > self.args.timeout or tries > self.args.retries:
                    return {"reason": str(failure), "tries": tries}
                wait = max(failure.wait, 2 ** (tries - 2) * random.uniform(0.5, 1.5))  # nobody waits for us meanwhile
            await asyncio.sleep(wait)

    async def fetch(self, url):
        """One try: follow redirects to the image and store it. Raises Failure."""
        left = self.args.timeout
        for _ in range(MAX_REDIRECTS + 1):
            try:
                url = URL(url)
            except ValueError as error:
                raise Failure(f"bad URL: {error}"[:200]) from None
            if url.scheme not in ("http", "https") or not url.host:
                raise Failure(f"not http or https: {url.scheme[:20]!r}")
            # Time counts from when it is our turn. The turn ends when the image is stored, which bounds the memory.
            async with self.hosts[url.host], self.connections:
                start = time.monotonic()
                location, body = await self.request(url, left)
                left -= time.monotonic() - start
                if body is not None:
                    store = functools.partial(store_image, body, self.spool, self.args)
                    return await asyncio.get_running_loop().run_in_executor(self.checker, store)
            url = str(url.join(location))
        raise Failure("too many redirects")

    async def request(self, url, seconds):
        """One request. Returns (where it is redirected to or None, body or None). Raises Failure."""
        try:
            async with asyncio.timeout(seconds), self.session.get(url, allow_redirects=False) as response:
                if directive := find_opt_out(response.headers, self.args.user_agent, self.args.opt_out):
                    raise Failure(f"opted out: {directive}")
                if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                    return URL(response.headers["Location"]), None
                if response.status == 429 or response.status >= 500:
                    raise Failure(f"HTTP {response.status}", read_retry_after(response.headers) or 0.0)
                if response.status != 200:
                    raise Failure(f"HTTP {response.status}")
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise Failure("compressed body")  # not asked for, and a way to make gigabytes of kilobytes
                if (response.content_length or 0) > self.args.max_bytes:
                    raise Failure(f"too large: {response.content_length} bytes")
                body = bytearray()
                async for part in response.content.iter_any():
                    self.received += len(part)
                    body += part
                    if len(body) > self.args.max_bytes:
                        raise Failure("too large: it does not end")
                return None, body
        except Failure:
            raise
        except Exception as error:  # of whatever kind: a strange server must not stop the shard
            if isinstance(getattr(error, "os_error", None), PrivateAddress):
                raise Failure("private address") from None
            reason = next((reason for kind, reason in ERRORS.items() if isinstance(error, kind)), "connection: {} {}")
            cause = getattr(error, "os_error", error)
            wait = 0.0 if isinstance(error, TimeoutError) else None
            raise Failure(reason.format(type(cause).__name__, cause)[:200], wait) from None


async def fetch_rows(urls, spool, args):
    """Download `urls`, {row: URL}, each image into the file `spool` as it comes.

    Returns ({row: image as of `store_image`}, {row: {"reason", "tries"}}, bytes received).
    """
    # Names are looked up in threads of the loop, six by default: one slow name server would hold up the others.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(args.connections))
    make_socket = functools.partial(open_socket, allowed=args.allow_private_addresses)
    connector = aiohttp.TCPConnector(limit=0, socket_factory=make_socket, ttl_dns_cache=300)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=args.idle_timeout, sock_read=args.idle_timeout)
    headers = {"User-Agent": args.user_agent, "Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity"}
    with ThreadPoolExecutor(1) as checker:  # one core, and one decoded image in memory at a time
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False, trust_env=False,
        ) as session:  # fmt: skip
            downloads = Downloads(session, spool, checker, args)
            results = await asyncio.gather(*map(downloads.download, urls.values()))
    images, failures = {}, {}
    for row, result in zip(urls, results, strict=True):
        (failures if "reason" in result else images)[row] = result
    return images, failures, downloads.received


# ------------------------------------------------------------------------------------------------- images


def store_image(data, spool, args):
    """Check an image and add it to the file `spool`, maybe shrunk.

    Returns {"first", "last" byte (excluded) of it there, "width", "height" as it is displayed, "sha256" of the file as
    it came}. Raises Failure if it is none, and OSError if it can't be written.
    """
    stored, width, height = check_image(data, args)
    first = spool.seek(0, os.SEEK_END)
    spool.write(stored)
    sha256 = hashlib.sha256(data).hexdigest()
    return {"first": first, "last": spool.tell(), "width": width, "height": height, "sha256": sha256}


def check_image(data, args):
    """Decode a file to be sure of it. Returns (bytes to store, width, height). Raises Failure.

    It is decoded to the end, because a body that was cut off has a good header; of a JPEG at an eighth of its size.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > Image.MAX_IMAGE_PIXELS:
            raise Failure(f"too many pixels: {width} x {height}")
        if image.getexif().get(0x0112, 1) >= 5:  # EXIF: lies on its side
            width, height = height, width
        if min(width, height) < args.min_size:
            raise Failure(f"too small: {width} x {height}")
        if max(width, height) > (args.max_aspect_ratio or float("inf")) * min(width, height):
            raise Failure(f"aspect ratio: {width} x {height}")
        if args.resize_to is not None and min(width, height) > args.resize_to:
            return shrink_file(image, args.resize_to, args.jpeg_quality)
        image.draft(image.mode, (max(1, width // 8), max(1, height // 8)))
        image.load()
    except Image.DecompressionBombError as error:
        raise Failure(f"too many pixels: {error}") from None
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"not an image: {str(error).split(' <_io')[0]}"[:200]) from None
    return data, width, height


def shrink_file(image, side, quality):
    """Shrink to a short side of `side` pixels: returns (a JPEG of it, width, height).

    What `decode_image` and `shrink` of the other scripts do, but by Pillow: torch would take 0.8 GB of each worker.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # deep grey; Pillow's own conversion would clip it at 255
        values = np.asarray(image, dtype=np.float32) / (1.0 if image.mode == "F" else 65535.0)
        image = Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "L":
        image = image.convert("RGB")
    short, long = min(image.size), max(image.size)
    size = (side, int(side * long / short)) if image.width <= image.height else (int(side * long / short), side)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=quality)
    return file.getvalue(), *size


# ------------------------------------------------------------------------------------------------- files


def open_folder(url):
    """(fsspec file system, path in it, whether it is a disk) of a folder."""
    fs, path = fsspec.core.url_to_fs(url)
    return fs, path.rstrip("/"), isinstance(fs, LocalFileSystem)


def publish(fs, source, path):
    """Show the finished local file `source` as `path`, whole or not at all: by renaming or by one upload.

    s3fs, gcsfs and adlfs show an object when its upload is complete; `with fs.open(path, "wb")` would show half of one
    if it were left by an exception.
    """
    if isinstance(fs, LocalFileSystem):
        with open(source, "rb") as file:
            os.fsync(file.fileno())
        os.replace(source, path)
    else:
        fs.put_file(str(source), path)


def publish_text(fs, folder, text, path):
    """Write a small file whole or not at all, by way of the local `folder`."""
    source = Path(folder, "text")
    source.write_text(text)
    publish(fs, source, path)


def read_rows(url, first, last, columns):
    """Rows `first` to `last` (excluded) of a parquet file, a table of `columns`. Raises OSError if there are fewer."""
    parts, start = [], 0  # `start`: row of the file that comes next
    with fsspec.open(url) as file:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            length = parquet.metadata.row_group(group).num_rows
            if start + length <= first or start >= last:
                start += length
                continue
            for batch in parquet.iter_batches(10_000, [group], columns):  # a group may be larger than the memory
                parts.append(batch.slice(max(0, first - start), max(0, last - max(first, start))))
                start += len(batch)
                if start >= last:
                    break
    if sum(map(len, parts)) != last - first:
        raise OSError(f"{url} has not as many rows as when it was listed")
    return pa.Table.from_batches(parts).select(columns)


def read_shard(path, first, last, spool):
    """Copy the images of a shard into `spool`. Returns ({row: image}, {row: failure}); nothing if it is damaged."""
    try:
        parquet = pq.ParquetFile(path)
        failures = {f["row"]: f for f in json.loads(parquet.metadata.metadata[b"failures"])}
        images, rows = {}, (row for row in range(first, last) if row not in failures)
        for batch in parquet.iter_batches(64, columns=["image", "width", "height", "sha256"]):
            for item in batch.to_pylist():
                start = spool.tell()
                spool.write(item.pop("image")["bytes"])
                images[next(rows)] = {"first": start, "last": spool.tell(), **item}
        return images, failures
    except (OSError, ValueError, KeyError, TypeError, StopIteration):  # a disk that is full says so again
        return {}, {}


def write_images(path, table, first, images, failures, spool, schema):
    """Write a shard: the rows of `table`, the first of which is row `first`, that have an image in `spool`."""
    groups, size = [], 0
    for row in sorted(images):  # row groups of at most 100 images or 32 MB, whichever comes first; never an empty one
        length = images[row]["last"] - images[row]["first"]
        if not groups or len(groups[-1]) == 100 or size + length > 32_000_000:
            groups, size = [*groups, []], 0
        groups[-1].append(row)
        size += length
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_statistics=False) as writer:
        for rows in groups:
            part = table.take(pa.array([row - first for row in rows], pa.int64()))
            columns = {name: part[name] for name in part.column_names}
            columns |= {key: [images[row][key] for row in rows] for key in ("width", "height", "sha256")}
            columns["image"] = []
            for row in rows:
                spool.seek(images[row]["first"])
                file = spool.read(images[row]["last"] - images[row]["first"])
                columns["image"].append({"bytes": file, "path": None})
            arrays = [pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list) else
                      columns[f.name].cast(f.type) for f in schema]  # fmt: skip
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        writer.add_key_value_metadata({"failures": json.dumps(list(failures.values()))})


def choose_rows(table, first, images, failures, args):
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
                urls = choose_rows(table, first, images, failures, args)
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


# ------------------------------------------------------------------------------------------------- table


def name_record(folder, name):
    """The record of a shard."""
    return f"{folder}/__download__/records/{name.removesuffix('.parquet')}.json"


def list_tables(args):
    """The tables that --input names. Returns (file system, their paths in order)."""
    suffixes = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".json")
    try:
        fs, path = fsspec.core.url_to_fs(args.input)
        if glob.has_magic(path):
            paths = fs.glob(path)
        else:
            paths = fs.find(path) if fs.isdir(path) else [path]
        paths = [p for p in sorted(paths) if p.endswith(suffixes) and not PurePosixPath(p).name.startswith((".", "_"))]
        if not paths or not fs.exists(paths[0]):
            raise FileNotFoundError(f"there is no file that ends in {', '.join(suffixes)}")
    except Exception as error:  # of the file system's own kinds, such as missing credentials
        fail(f"--input {args.input} can't be read: {error}")
    return fs, paths


def open_table(fs, path, columns, output_dir, scratch):
    """What a table holds: {"url" of it as parquet, "rows", "digest", "schema" of `columns`}.

    CSV and JSON lines are read once, in a stream, and copied to parquet beside the records: whoever takes a range of
    rows finds it there without reading all before it. Ends the program if the table can't be used.
    """
    try:
        source, digest = fs.unstrip_protocol(path), None
        if not path.endswith(".parquet"):
            with fs.open(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            fs, folder, _ = open_folder(output_dir)
            path = f"{folder}/__download__/tables/{digest}.parquet"
            if not fs.exists(path):
                copy_table(source, columns, f"{scratch}/{digest}")
                publish(fs, f"{scratch}/{digest}", path)
        with fs.open(path) as file:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                raise ValueError(f"no column {missing[0]!r} but {', '.join(names)}")
            if digest is None:  # of the footer, which has sizes and statistics of all that the file holds
                file.seek(-8, os.SEEK_END)
                length = int.from_bytes(file.read(4), "little")
                file.seek(-8 - length, os.SEEK_END)
                digest = hashlib.sha256(file.read(length)).hexdigest()
            schema = pa.schema([parquet.schema_arrow.field(name).remove_metadata() for name in columns])
            rows = parquet.metadata.num_rows
        return {"url": fs.unstrip_protocol(path), "rows": rows, "digest": digest, "schema": schema}
    except (OSError, ValueError, pa.ArrowException) as error:
        fail(f"{source} can't be used ({error}): see --url_column, --caption_column and --keep_columns")


def copy_table(url, columns, path):
    """Copy `columns` of CSV or JSON lines to a local parquet file; types are those that the first megabyte shows."""
    with fsspec.open(url, compression="infer") as file:
        if ".csv" in PurePosixPath(url).suffixes:
            types = dict.fromkeys(
                columns[:2], pa.string()
            )  # also where all captions of the first megabyte are numbers
            convert = pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
            parse = pa.csv.ParseOptions(newlines_in_values=True)
            reader = pa.csv.open_csv(file, parse_options=parse, convert_options=convert)
        else:
            reader = pa.json.open_json(file)
        if missing := [name for name in columns if name not in reader.schema.names]:
            raise ValueError(f"no column {missing[0]!r} but {', '.join(reader.schema.names)}")
        schema = pa.schema([reader.schema.field(name) for name in columns])
        with pq.ParquetWriter(path, schema) as writer:
            for batch in reader:
                writer.write_batch(batch.select(columns))


def make_schema(tables, args):
    """The columns of the shards, as `datasets` writes them, so that `image` is one of images and not of structs."""
    schema = tables[0]["schema"]
    for table in tables[1:]:
        if table["schema"] != schema:
            fail(f"{table['url']} has other types of columns than {tables[0]['url']}: make them the same")
    url, text, *kept = schema
    if not (pa.types.is_string(url.type) or pa.types.is_large_string(url.type)):
        fail(f"--url_column {args.url_column} holds {url.type}, not text")
    inner = text.type.value_type if pa.types.is_list(text.type) else text.type
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        fail(f"--caption_column {args.caption_column} holds {text.type}, neither text nor lists of text")
    own = {"text": text.type, "url": pa.string(), "width": pa.int32(), "height": pa.int32(), "sha256": pa.string()}
    columns = pa.schema([*own.items(), *((field.name, field.type) for field in kept)])
    try:
        kinds = datasets.Features.from_arrow_schema(columns)
    except ValueError as error:
        fail(f"--keep_columns {' '.join(args.keep_columns)}: `datasets` has no such column ({error})")
    return datasets.Features({"image": datasets.Image(), **kinds}).arrow_schema


# ------------------------------------------------------------------------------------------------- main


def find_differences(before, now, prefix=""):
    """What differs between two nested dicts, as ["vae.scaling_factor 0.18215 -> 0.13025"]."""
    found = []
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += find_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} {old} -> {new}")
    return found


def list_items(tables, rows_per_shard):
    """All pieces of work, in order: [{"name" of the shard, "table": URL, "first", "last" (excluded): rows of it}]."""
    ranges = [
        {"table": table["url"], "first": first, "last": min(table["rows"], first + rows_per_shard)}
        for table in tables
        for first in range(0, table["rows"], rows_per_shard)
    ]
    digits = max(5, len(str(len(ranges))))  # as many for all, since `datasets` sorts by name
    return [
        {"name": f"data-{number:0{digits}d}-of-{len(ranges):0{digits}d}.parquet", **item}
        for number, item in enumerate(ranges)
    ]


def list_sizes(fs, folder):
    """{name: bytes} of the files in a folder."""
    fs.invalidate_cache()
    try:
        return {PurePosixPath(entry["name"]).name: entry["size"] for entry in fs.ls(folder, detail=True)}
    except FileNotFoundError:  # object storage has no empty folders
        return {}


def read_json(data):
    """What a file of ours says; nothing if it is damaged."""
    try:
        return json.loads(data)
    except ValueError:
        return {}


def read_records(fs, folder, items):
    """Yield (item, its record) in order, by many requests at a time: object storage is quick only so."""
    with ThreadPoolExecutor(32) as pool:
        for first in range(0, len(items), 1000):
            some = items[first : first + 1000]
            paths = [name_record(folder, item["name"]) for item in some]
            yield from zip(some, map(read_json, pool.map(fs.cat_file, paths)), strict=True)


def choose_items(fs, folder, items, retry_failed):
    """The pieces of work without a record or a shard, and with `retry_failed` those with failures that may pass."""
    records, shards = list_sizes(fs, f"{folder}/__download__/records"), list_sizes(fs, folder)
    done = [item for item in items if PurePosixPath(name_record("", item["name"])).name in records]
    done = [item for item in done if item["name"] in shards]
    if retry_failed:
        records = read_records(fs, folder, done)
        done = [item for item, r in records if r and not any(f["reason"].startswith(PASSING) for f in r["failures"])]
    done = {item["name"] for item in done}
    return [item for item in items if item["name"] not in done]


def run_items(items, args, output_dir, schema):
    """Have Ray do the pieces of work; yields what `download_shard` returns for each, in any order."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns of a change to come, for GPUs
    import ray
    import ray.data

    memory = 2**30 + args.connections * args.max_bytes  # the libraries and one decoded image; bodies on their way
    if not ray.is_initialized():
        try:
            address = args.address or os.environ.get("RAY_ADDRESS", "")
            if re.fullmatch(r"[^/]+:\d+", address):  # Ray itself would take two minutes to find nobody there
                socket.create_connection(address.rsplit(":", 1), timeout=10).close()
            ray.init(args.address, num_cpus=args.num_cpus, logging_level=logging.WARNING, log_to_driver=False)
        except (OSError, ValueError) as error:
            fail(f"Ray at --address {address} can't be used ({error})")
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put its own in place
            signal.signal(number, stop)
    most = max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if most < memory:
        fail(
            f"a task may take {memory / 1e9:.1f} GB and no machine has more than {most / 1e9:.1f} GB for it: lower "
            "--connections or --max_bytes"
        )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = None  # blocks go out as they come in: one piece of work, one result
    # A block costs the driver a millisecond; of a task that holds several, what is done is not done again.
    work = ray.data.from_items(items, override_num_blocks=min(len(items), 20_000))
    settings = {"args": args, "output_dir": output_dir, "schema": schema}
    yield from work.map_batches(
        download_shard, batch_size=1, fn_kwargs=settings, num_cpus=1, memory=memory
    ).iter_rows()


def describe_failures(reasons, rows):
    """Such as "7.1 % failed (HTTP 404 4.0 %, timed out 3.1 %)"."""
    shares = ", ".join(f"{reason} {count / rows:.1%}" for reason, count in reasons.most_common(4))
    return f"{reasons.total() / max(1, rows):.1%} failed" + (f" ({shares})" if shares else "")


def gather(fs, folder, items, scratch):
    """Write failures.jsonl from the records of all shards. Returns (images, bytes of shards, Counter of reasons)."""
    names, reasons, images = list_sizes(fs, f"{folder}/__download__/records"), collections.Counter(), 0
    if missing := sum(name_record("", item["name"]).split("/")[-1] not in names for item in items):
        fail(f"{missing} of {len(items)} shards are not in {folder}: on several machines all must share it")
    sizes = list_sizes(fs, folder)
    with open(f"{scratch}/failures", "w") as file:
        for item, record in read_records(fs, folder, items):
            path, size = f"{folder}/{item['name']}", sizes.get(item["name"])
            if size != record.get("bytes"):
                fs.rm_file(name_record(folder, item["name"]))
                fail(f"{path} has {size} bytes and should have {record.get('bytes')}: the same command mends it")
            for failure in record["failures"]:
                file.write(json.dumps({"table": record["table"], **failure}) + "\n")
                reasons[failure["reason"].split(":")[0]] += 1
            images += record["images"]
    publish(fs, f"{scratch}/failures", f"{folder}/__download__/failures.jsonl")
    return images, sum(sizes[item["name"]] for item in items), reasons


def stop(number, frame):
    """End at once: what is whole stays, and the shard in work is deleted on the way out."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\nStopped by {signal.Signals(number).name}; the same command goes on from here", flush=True)
    raise SystemExit(128 + number)


def main(args):
    """Make the shards; ends with 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as until_the_end:
        try:
            download(args, scratch, until_the_end)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


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
