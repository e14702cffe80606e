"""Downloads from a web server that is as bad as the web, by a real local Ray; nothing leaves the loopback device."""

import asyncio
import collections
import contextlib
import datetime
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, free_port, wait_until
from image_server import ImageServer, make_image
from PIL import Image

ray = pytest.importorskip("ray", reason="needs requirements-ray.txt")
aiohttp = pytest.importorskip("aiohttp", reason="needs requirements-ray.txt")
import psutil  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import download_images as script  # noqa: E402
import precompute_latents  # noqa: E402

GOOD = "image type slow close chunked hop busy flaky otherbot".split()
# Start of the reason, and requests, with two retries
BAD = {
    "stall": ("timed out", 3),
    "mute": ("timed out", 3),
    "drip": ("timed out", 3),
    "break": ("broken off", 1),
    "breakchunk": ("broken off", 1),
    "short": (("bad answer", "not an image"), 1),
    "cut": ("not an image: image file is truncated", 1),
    "html": ("not an image: cannot identify", 1),
    "eps": ("not an image: cannot identify", 1),
    "circle": ("too many redirects", 1),
    "private": ("private address", 1),
    "mapped": ("private address", 1),
    "file": ("not http or https: 'file'", 1),
    "later": ("HTTP 429", 1),
    "broken": ("HTTP 500", 3),
    "missing": ("HTTP 404", 1),
    "endless": ("too large: it does not end", 1),
    "huge": ("too large: 2000000000 bytes", 1),
    "bomb": ("compressed body", 1),
    "pixels": (("not an image", "too many pixels"), 1),
    "noai": ("opted out: noai", 1),
}
FAST = ["--timeout", "2", "--idle_timeout", "1", "--max_bytes", "1000000", "--allow_private_addresses", "127.0.0.1"]


@pytest.fixture(scope="session")
def ray_folder():
    """Where Ray keeps its files: a short path, because sockets lie there, and nothing in the home folder."""
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
    ray.init("local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def server():
    server = ImageServer()
    yield server
    server.close()


def make_table(path, urls, **columns):
    captions = [f'caption {i}, "quoted"\nand on' for i in range(len(urls))]
    pq.write_table(
        pa.table({"url": urls, "text": captions, "id": range(len(urls)), **columns}), path, row_group_size=17
    )
    return str(path)


def good_urls(server, count, kind="image"):
    return [f"{server.url}/{kind}/{i}" for i in range(count)]


def run(table, output, *flags):
    script.main(script.parse_args(["--input", str(table), "--output_dir", str(output), *FAST, *map(str, flags)]))


def start(table, output, *flags, env=None):
    """The same as a process of its own."""
    command = [sys.executable, ROOT / "download_images.py", "--input", table, "--output_dir", output, *FAST, *flags]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
    return subprocess.Popen(list(map(str, command)), env={**os.environ, **(env or {})}, **options)


def end(process, code=0, timeout=200):
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return output


def contents(folder):
    """{name: bytes} of all files but settings.json."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != "settings.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_rows(folder):
    return pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet"))).to_pylist()


def read_failures(folder):
    return [json.loads(line) for line in Path(folder, "__download__/failures.jsonl").read_text().splitlines()]


def make_args(*flags):
    return script.parse_args(["--input", "x", "--output_dir", "y", *FAST, *map(str, flags)])


def fetch(urls, *flags):
    """Without Ray and files: ([file or None], [reason or None]) of each URL."""
    with tempfile.TemporaryFile() as spool:
        images, failures, _ = asyncio.run(script.fetch_rows(dict(enumerate(urls)), spool, make_args(*flags)))
        files = dict.fromkeys(range(len(urls)))
        for row, image in images.items():
            spool.seek(image["first"])
            files[row] = spool.read(image["last"] - image["first"])
    return list(files.values()), [failures.get(row, {}).get("reason") for row in files]


# ------------------------------------------------------------------------------------------------- what comes


def check_download(server, kinds, folder, ids=True):
    """Every good image is there once, in order, as it is; every bad one is in the list, with its reason."""
    rows, failures = read_rows(folder), read_failures(folder)
    good = [i for i, kind in enumerate(kinds) if kind in GOOD]
    assert [row["id"] for row in rows] == good
    for row in rows:
        i = row["id"]
        assert row["image"] == {"bytes": make_image(i), "path": None} and row["url"] == f"{server.url}/{kinds[i]}/{i}"
        assert row["text"].startswith(f"caption {i},") and (row["width"], row["height"]) == (48 + i % 5, 40)
        assert row["sha256"] == script.hashlib.sha256(make_image(i)).hexdigest()
    assert [failure["row"] for failure in failures] == [i for i, kind in enumerate(kinds) if kind not in GOOD]
    for failure in failures:
        reason, tries = BAD[kinds[failure["row"]]]
        assert failure["reason"].startswith(reason) and failure["tries"] == tries, failure
        assert failure["url"] == f"{server.url}/{kinds[failure['row']]}/{failure['row']}"


def test_good_images_arrive_once_in_order_and_failures_have_their_reasons(local_ray, server, tmp_path, capsys):
    kinds = [kind for pair in zip(BAD, GOOD * 3, strict=False) for kind in pair] + GOOD
    urls = [f"{server.url}/{kind}/{i}" for i, kind in enumerate(kinds)]
    table = make_table(tmp_path / "urls.parquet", urls)
    run(table, tmp_path / "out", "--keep_columns", "id", "--rows_per_shard", 20)
    check_download(server, kinds, tmp_path / "out")
    for i, kind in enumerate(kinds):
        if kind in GOOD:
            assert server.requests[f"/{kind}/{i}"] == {"busy": 2, "flaky": 3}.get(kind, 1), kind
        elif kind != "circle":
            assert server.requests[f"/{kind}/{i}"] == BAD[kind][1], kind
    assert server.requests["/circle/"] == script.MAX_REDIRECTS
    assert server.sent < 20_000_000  # the endless body was left when it was too large
    printed = capsys.readouterr().out
    assert f"Done: {len([k for k in kinds if k in GOOD])} images" in printed and "HTTP 404" not in printed
    assert not list((tmp_path / "out").glob(".tmp-*"))

    # The same command asks for nothing again, and changes nothing
    before, server.requests = contents(tmp_path / "out"), collections.Counter()
    run(table, tmp_path / "out", "--keep_columns", "id", "--rows_per_shard", 20)
    assert contents(tmp_path / "out") == before and not server.requests


def test_datasets_and_the_other_scripts_open_the_shards(local_ray, server, tmp_path):
    table = make_table(tmp_path / "urls.parquet", [*good_urls(server, 7), None, f"{server.url}/missing/8"])
    run(table, tmp_path / "out", "--rows_per_shard", 4)
    for rows in (
        datasets.load_dataset("parquet", data_dir=str(tmp_path / "out"), split="train"),
        datasets.load_dataset(str(tmp_path / "out"), split="train"),
    ):
        assert isinstance(rows.features["image"], datasets.Image) and len(rows) == 7
        assert [row["image"].size for row in rows] == [(row["width"], row["height"]) for row in rows]
    args = precompute_latents.parse_args(
        ["--train_data_dir", str(tmp_path / "out"), *"--vae_name_or_path a --text_encoder_name_or_path b".split()]
    )
    rows, column = precompute_latents.load_rows(args, others=["text"])
    items = [precompute_latents.transform(i, 0, rows[i], column, 3, args) for i in range(7)]
    assert not any(item["skipped"] for item in items) and items[6]["text"].startswith("caption 6,")
    assert [failure["reason"] for failure in read_failures(tmp_path / "out")] == ["no URL", "HTTP 404"]


def test_a_shard_without_a_single_image_does_no_harm(local_ray, server, tmp_path):
    table = make_table(tmp_path / "urls.parquet", [*good_urls(server, 3), *good_urls(server, 3, "missing")])
    run(table, tmp_path / "out", "--rows_per_shard", 3)
    assert len(datasets.load_dataset(str(tmp_path / "out"), split="train")) == 3


def test_tables_of_any_kind_give_the_same_shards(local_ray, server, tmp_path):
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
        found.append({name: data for name, data in contents(output).items() if name.startswith("data-")})
        assert len(found[-1]) == 3
    for other in found[1:3]:
        assert other == found[0]
    # The row of a failure counts in its own table
    assert [read_failures(tmp_path / f"out{k}")[0]["row"] for k in (0, 3, 4)] == [24, 14, 14]
    assert found[3] == found[4] and read_rows(tmp_path / "out3") == read_rows(tmp_path / "out0")


def test_limits_of_requests(server):
    server.delay = 0.05
    for flags, most in ((["--per_host", 3], 3), (["--per_host", 50, "--connections", 7], 7)):
        server.most = 0
        files, _ = fetch(good_urls(server, 40), *flags)
        assert files == [make_image(i) for i in range(40)] and server.most == most


def test_slow_hosts_hold_up_nobody(server):
    """Rows wait for a free connection to their own host only, and nobody for a retry."""
    stalled = ImageServer()
    try:
        urls = [f"{stalled.url.replace('127.0.0.1', 'localhost')}/mute/{i}" for i in range(8)] + good_urls(server, 50)
        flags = [
            "--connections",
            8,
            "--per_host",
            4,
            "--retries",
            0,
            "--allow_private_addresses",
            "127.0.0.0/8",
            "::1",
        ]
        soon = []
        threading.Timer(0.9, lambda: soon.append(server.requests.total())).start()
        files, reasons = fetch(urls, *flags)
        assert reasons[:8] == ["timed out"] * 8 and files[8:] == [make_image(i) for i in range(50)]
        assert soon == [50]  # all that can be had, before the first silent request was given up
    finally:
        stalled.close()


@pytest.mark.parametrize("kind", ["endless", "huge", "bomb"])
def test_bodies_are_left_when_they_are_too_large(server, kind):
    before = psutil.Process().memory_info().rss
    _, reasons = fetch([f"{server.url}/{kind}/{i}" for i in range(20)], "--per_host", 20)
    assert all(reason.startswith(BAD[kind][0]) for reason in reasons)
    assert server.sent < 20 * 10_000_000  # a megabyte each, and what sockets and buffers hold
    assert psutil.Process().memory_info().rss - before < 200_000_000


def test_a_request_that_never_rests_has_an_end(server):
    start = time.monotonic()
    assert fetch([f"{server.url}/drip/1"], "--retries", 0)[1] == ["timed out"]
    assert 2 <= time.monotonic() - start < 4


def test_what_is_wrong_with_a_connection(server, tmp_path):
    """TLS where there is none or with a certificate that nobody signed, a closed port, a name that nobody has."""
    import ssl

    x509 = pytest.importorskip("cryptography.x509", reason="needs cryptography, which comes with moto")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    certificate = certificate.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
    pem = certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    formats = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "both").write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *formats))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "both")
    safe = ImageServer(context)
    try:
        urls = [f"https://localhost:{safe.port}/image/1", f"https://127.0.0.1:{server.port}/image/1"]
        urls += [
            f"http://127.0.0.1:{free_port()}/",
            "http://name.invalid/",
            "http://" + "a" * 80 + ".com/",
            "x",
            "ftp://a/",
        ]
        flags = ["--allow_private_addresses", "127.0.0.1", "::1"]
        reasons = fetch(urls, *flags)[1]
        starts = [
            "TLS",
            ("TLS", "connection"),
            "connection",
            "host not found",
            ("bad URL", "host not found"),
            "not http",
            "not http",
        ]
        assert all(map(str.startswith, reasons, starts)), reasons
        # Signed, for this name: the connection goes to an address, the certificate is that of the name
        code = "import test_download_images as t, sys; print(*t.fetch(sys.argv[1:3], *sys.argv[3:])[1], sep='|')"
        urls = [f"https://{host}:{safe.port}/image/1" for host in ("localhost", "127.0.0.1")]
        env = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "both"), "PYTHONPATH": str(ROOT / "tests")}
        command = [sys.executable, "-c", code, *urls, *flags]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert ended.stdout.startswith("None|TLS"), ended
    finally:
        safe.close()


def test_a_full_disk_is_no_failure_of_the_image(server):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(script.fetch_rows({0: f"{server.url}/image/1"}, Full(), make_args()))


def test_retries_wait_as_long_as_asked(server):
    start = time.monotonic()
    files, _ = fetch([f"{server.url}/busy/1"])
    assert files == [make_image(1)] and time.monotonic() - start >= 1
    assert fetch([f"{server.url}/busy/2"], "--retries", 0)[1] == ["HTTP 429"]
    headers = {"Retry-After": script.email.utils.formatdate(time.time() + 60, usegmt=True)}
    assert 55 < script.read_retry_after(headers) <= 60
    assert [script.read_retry_after({"Retry-After": value}) for value in ("7", "", "soon", "-1")] == [
        7,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "values, found",
    [
        (["noai"], "noai"),
        (["all"], None),
        (["nofollow, NoImageAI"], "noimageai"),
        (["otherbot: noai, noindex"], None),
        (["otherbot: noai, download_images: noindex"], "noindex"),
        (["Download_Images: noai"], "noai"),
        (["otherbot: noai", "noindex"], "noindex"),
        (["unavailable_after: 25 Jun 2030 15:00:00 PST, noai"], "noai"),
        (["unavailable_after: Tue, 25 Jun 2030 15:00:00 GMT, noai"], "noai"),
        (["max-image-preview: none, noindex"], "noindex"),
        ([], None),
    ],
)
def test_opt_out(values, found):
    from multidict import CIMultiDict

    args = make_args()
    headers = CIMultiDict([("x-robots-tag", value) for value in values])
    assert script.find_opt_out(headers, args.user_agent, args.opt_out) == found
    assert script.find_opt_out(headers, args.user_agent, make_args("--opt_out").opt_out) is None


# ------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 127.8.9.10 0.0.0.0 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1 "
    "100.100.100.200 192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 "
    "255.255.255.255 168.63.129.16 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 "
    "fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 fec0::1 ff02::1 2001:db8::1 64:ff9b:1::1 64:ff9b::7f00:1 "
    "64:ff9b::a9fe:a9fe 2002:7f00:1:: 2002:a00:1:: 2001:0:0:0:0:0:80ff:fffe".split(),
)
def test_private_addresses_are_refused(address):
    with pytest.raises(script.PrivateAddress):
        script.check_address(address, None)
    script.check_address(address, [])  # all are allowed
    with pytest.raises(script.PrivateAddress):
        script.check_address(address, ["192.168.77.0/24"])


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_not(address):
    script.check_address(address, None)


def test_networks_of_ones_own():
    script.check_address("192.168.77.5", ["192.168.77.0/24", "fd00::/8"])
    script.check_address("fd00::1", ["192.168.77.0/24", "fd00::/8"])
    script.check_address("::ffff:192.168.77.5", ["192.168.77.0/24"])


HOSTS = ["127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0.0.0.0", "0", "[::1]", "[::]",
         "[::ffff:7f00:1]", "user:password@127.0.0.1", "example.com@127.0.0.1",
         "example.com%2F@127.0.0.1", "127.0.0.1%2F.example.com@127.0.0.1", "①②⑦.0.0.1", "127。0。0。1"]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_no_spelling_of_a_private_host_gets_through(server, host, monkeypatch):
    monkeypatch.setitem(os.environ, "http_proxy", server.url)  # nor a proxy
    url = f"http://{host}:{server.port}/image/1"
    command = ["--input", "x", "--output_dir", "y", "--timeout", "2", "--retries", "0"]
    with tempfile.TemporaryFile() as spool:
        images, failures, _ = asyncio.run(script.fetch_rows({0: url}, spool, script.parse_args(command)))
    assert not images and not server.requests and server.open == 0
    assert failures[0]["reason"].startswith(("private address", "bad URL", "host not found", "connection")), failures
    if host in ("127.0.0.1", "localhost", *HOSTS[8:13]):
        assert failures[0]["reason"] == "private address"


def test_a_name_that_changes_its_address_is_checked_where_it_is_connected_to(server, monkeypatch):
    """DNS rebinding: public when first asked, private afterwards; and public and private at once."""
    asked, connected, connect = [], [], asyncio.BaseEventLoop.sock_connect

    def look_up(host, port, *args, **kwargs):
        asked.append(host)
        addresses = {"both.test": ["127.0.0.1", "10.0.0.1"]}.get(host, ["127.0.0.1"])
        if host == "rebind.test" and asked.count(host) == 1:
            addresses = ["192.88.98.1"]  # public, and answered by nobody here
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def record(self, sock, address):
        connected.append(address[0])
        if address[0] == "192.88.98.1":
            raise ConnectionRefusedError("nobody is there")
        return await connect(self, sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    from asyncio import selector_events

    connect = selector_events.BaseSelectorEventLoop.sock_connect
    monkeypatch.setattr(selector_events.BaseSelectorEventLoop, "sock_connect", record)
    urls = {
        i: f"http://{host}:{server.port}/image/1" for i, host in enumerate(["rebind.test", "both.test", "one.test"])
    }
    args = script.parse_args(["--input", "x", "--output_dir", "y"])
    for _ in range(2):  # of a second task, which asks anew
        with tempfile.TemporaryFile() as spool:
            images, failures, _ = asyncio.run(script.fetch_rows(urls, spool, args))
        assert not images and not server.requests
        assert failures[1]["reason"] == failures[2]["reason"] == "private address"
    assert failures[0]["reason"] == "private address" and asked.count("rebind.test") == 2
    assert set(connected) == {"192.88.98.1"}  # what was checked is what was connected to
    args.allow_private_addresses = []
    with tempfile.TemporaryFile() as spool:
        images, _, _ = asyncio.run(script.fetch_rows({0: urls[2]}, spool, args))
    assert images and "127.0.0.1" in connected  # the same, allowed: the test would have seen it


# ------------------------------------------------------------------------------------------------- images


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(mode="RGB", size=(300, 200)):
    y, x = np.mgrid[: size[1], : size[0]]
    pixels = np.stack([x * 255 / size[0], y * 255 / size[1], 128 + 120 * np.sin(x / 9)], -1)
    image = Image.fromarray(pixels.astype(np.uint8))
    if mode == "I;16":
        return Image.fromarray((pixels[..., 2] * 256).astype(np.uint16))
    image = image.convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(pixels[..., 0].astype(np.uint8)))
    return image


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "RGBA", "LA", "I;16"])
def test_shrunk_images_are_those_of_the_other_scripts(mode):
    image = photograph(mode)
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG")
    stored, width, height = script.check_image(data, make_args("--resize_to", 64, "--jpeg_quality", 100))
    expected = precompute_latents.shrink(precompute_latents.decode_image({"bytes": data, "path": None}, 3), 64)
    assert (height, width) == tuple(expected.shape[1:]) == (64, 96)
    pixels = precompute_latents.decode_image({"bytes": stored, "path": None}, 3)
    assert pixels.shape == expected.shape
    # Colour is stored at half the resolution, so compare the brightness
    grey = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    difference = ((pixels.float() - expected.float()) * grey).sum(0).abs()
    assert difference.mean() < 1 and difference.max() < 12


def test_shrinking_rotates_and_never_enlarges():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(photograph(), "JPEG", exif=exif)
    assert script.check_image(data, make_args()) == (data, 200, 300)
    stored, width, height = script.check_image(data, make_args("--resize_to", 100))
    assert (width, height) == (100, 150) == Image.open(io.BytesIO(stored)).size
    assert not Image.open(io.BytesIO(stored)).getexif()
    assert script.check_image(data, make_args("--resize_to", 200)) == (data, 200, 300)
    small = script.check_image(data, make_args("--resize_to", 100, "--jpeg_quality", 20))[0]
    assert len(small) < len(stored)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_files_that_were_cut_are_no_images(kind):
    data = encode(photograph(), kind)
    assert script.check_image(data, make_args())[1:] == (300, 200)
    for flags in ([], ["--resize_to", 64]):
        with pytest.raises(script.Failure, match="not an image"):
            script.check_image(data[: len(data) * 2 // 3], make_args(*flags))


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--min_size", 201], "too small: 300 x 200"),
        (["--max_aspect_ratio", 1.4], "aspect ratio: 300 x 200"),
        (["--min_size", 200, "--max_aspect_ratio", 1.5], None),
    ],
)
def test_size_and_aspect_ratio(flags, reason):
    with pytest.raises(script.Failure, match=reason) if reason else contextlib.nullcontext():
        script.check_image(encode(photograph()), make_args(*flags))


def test_decompression_bombs_are_not_decoded():
    for size, where in (((13_000, 7_000), "too many pixels: 13000 x 7000"), ((20_000, 20_000), "too many pixels")):
        data = encode(Image.new("1", size))
        before = time.monotonic()
        with pytest.raises(script.Failure, match=where):
            script.check_image(data, make_args())
        assert time.monotonic() - before < 0.5


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--input, a table with a column of URLs"),
        (["--input", "x", "--output_dir", "y", "--connections", "0"], "--connections: 0 is not between 1 and"),
        (["--input", "x", "--output_dir", "y", "--timeout", "0"], "--timeout: 0 is not between 0.001 and"),
        (["--input", "x", "--output_dir", "y", "--timeout", "nan"], "--timeout: nan is not between 0.001 and"),
        (
            ["--input", "x", "--output_dir", "y", "--max_aspect_ratio", "0.5"],
            "--max_aspect_ratio: 0.5 is not between 1 and",
        ),
        (
            ["--input", "x", "--output_dir", "y", "--jpeg_quality", "101"],
            "--jpeg_quality: 101 is not between 1 and 100",
        ),
        (["--input", "x", "--output_dir", "y", "--keep_columns", "width"], "two columns 'width'"),
        (["--input", "x", "--output_dir", "y", "--keep_columns", "id", "id"], "two columns 'id'"),
        (["--input", "x", "--output_dir", "y", "--num_cpus", "2", "--address", "auto"], "--num_cpus is for a Ray"),
        (["--input", "x", "--output_dir", "/tmp/ray/working_dir_files/y"], "Ray deletes /tmp/ray/working_dir_files/y"),
        (
            ["--input", "x", "--output_dir", "y", "--allow_private_addresses", "10.0.0.1/8"],
            "--allow_private_addresses",
        ),
    ],
)
def test_bad_flags_end_in_a_sentence(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.parse_args(flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    assert "example: python download_images.py --input" in capsys.readouterr().out
    assert all(len(action) <= 60 for action in re.findall(r'help="([^"]*)"', Path(script.__file__).read_text()))


def refused(capsys, table, output, *flags):
    with pytest.raises(SystemExit) as stop:
        run(table, output, *flags)
    assert stop.value.code == 1
    return capsys.readouterr().err


def test_bad_tables_end_in_a_sentence(tmp_path, capsys):
    table = make_table(tmp_path / "urls.parquet", ["http://127.0.0.1/"] * 3)
    out = tmp_path / "out"
    assert "can't be read" in refused(capsys, tmp_path / "none.parquet", out)
    assert "can't be read" in refused(capsys, tmp_path / "*.csv", out)
    assert "no column 'URL' but url, text, id" in refused(capsys, table, out, "--url_column", "URL")
    assert "no column 'x'" in refused(capsys, table, out, "--keep_columns", "x")
    assert "--url_column id holds int64" in refused(capsys, table, out, "--url_column", "id")
    assert "--caption_column id holds int64" in refused(capsys, table, out, "--caption_column", "id")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    assert "bad.parquet can't be used" in refused(capsys, tmp_path / "bad.parquet", out)
    (tmp_path / "bad.csv").write_text("url,text\nhttp://a\nhttp://b,c,d\n")
    assert "bad.csv can't be used" in refused(capsys, tmp_path / "bad.csv", out)
    (tmp_path / "bad.jsonl").write_text('{"url": "a", "text"\n')
    assert "bad.jsonl can't be used" in refused(capsys, tmp_path / "bad.jsonl", out)
    make_table(tmp_path / "empty.parquet", pa.array([], pa.string()))
    assert "holds no rows" in refused(capsys, tmp_path / "empty.parquet", out)
    make_table(tmp_path / "map.parquet", ["http://a"], map=pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())))
    assert "has no such column" in refused(capsys, tmp_path / "map.parquet", out, "--keep_columns", "map")
    (tmp_path / "two").mkdir()
    shutil.copy(table, tmp_path / "two/a.parquet")
    make_table(tmp_path / "two/b.parquet", ["http://127.0.0.1/"], id=["text"])
    assert "other types of columns" in refused(capsys, tmp_path / "two", out, "--keep_columns", "id")
    assert not list(out.glob("*.parquet"))


def test_other_folders_and_settings_are_refused(local_ray, server, tmp_path, capsys):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 5)), tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    assert "holds thesis.txt and no download" in refused(capsys, table, tmp_path / "full")
    assert "can't be written to" in refused(capsys, table, tmp_path / "full/thesis.txt")
    run(table, out)
    before = contents(out)
    assert "resize_to None -> 8" in refused(capsys, table, out, "--resize_to", 8)
    assert "rows_per_shard 1000 -> 2" in refused(capsys, table, out, "--rows_per_shard", 2)
    make_table(tmp_path / "urls.parquet", good_urls(server, 5, "type"))
    assert re.search(r"input.sha256 \w+ -> \w+\)", refused(capsys, table, out))
    assert contents(out) == before
    # What does not change the images is free to differ
    make_table(tmp_path / "urls.parquet", good_urls(server, 5))
    run(table, out, "--retries", 5, "--connections", 3, "--timeout", 9)
    assert contents(out) == before


def test_a_task_that_is_too_large_for_every_machine_is_refused(local_ray, server, tmp_path, capsys):
    table = make_table(tmp_path / "urls.parquet", good_urls(server, 5))
    assert "lower --connections or --max_bytes" in refused(capsys, table, tmp_path / "out", "--max_bytes", 10**12)


def test_a_ray_that_is_not_there_is_named(tmp_path, ray_folder):
    table = make_table(tmp_path / "urls.parquet", ["http://127.0.0.1/"])
    output = end(start(table, tmp_path / "out", "--address", f"127.0.0.1:{free_port()}"), code=1)
    assert "can't be used" in output and "Traceback" not in output


def test_a_full_disk_ends_in_a_sentence(local_ray, server, tmp_path, capsys):
    """Here: a folder where the shard should be."""
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 5)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    name = "data-00001-of-00002.parquet"
    (out / name).unlink()
    (out / name).mkdir()
    (out / name / "x").write_text("")
    (out / "__download__/records/data-00001-of-00002.json").unlink()
    assert f"{name} could not be made" in refused(capsys, table, out, "--rows_per_shard", 3)
    shutil.rmtree(out / name)
    run(table, out, "--rows_per_shard", 3)
    assert len(read_rows(out)) == 5


# ------------------------------------------------------------------------------------------------- going on


def test_shards_that_are_gone_are_made_again_and_records_without_asking(local_ray, server, tmp_path):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    before = contents(out)
    (out / "data-00001-of-00003.parquet").unlink()
    (out / "__download__/records/data-00002-of-00003.json").unlink()
    server.requests.clear()
    run(table, out, "--rows_per_shard", 3)
    assert contents(out) == before
    assert sorted(server.requests) == [f"/image/{i}" for i in (3, 4, 5)]


def test_a_shard_that_is_not_as_recorded_is_named_and_mended(local_ray, server, tmp_path, capsys):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    before, path = contents(out), out / "data-00001-of-00003.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert "the same command mends it" in refused(capsys, table, out, "--rows_per_shard", 3)
    run(table, out, "--rows_per_shard", 3)
    assert contents(out) == before


@pytest.mark.parametrize("what", ["shard", "record", "settings"])
def test_what_was_damaged_is_mended_or_named(local_ray, server, tmp_path, capsys, what):
    """Here by bytes that changed in the middle, which leaves the footer of a shard as it is."""
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 9)), tmp_path / "out"
    run(table, out, "--rows_per_shard", 3)
    before, record = contents(out), out / "__download__/records/data-00001-of-00003.json"
    path = {
        "shard": out / "data-00001-of-00003.parquet",
        "record": record,
        "settings": out / "__download__/settings.json",
    }
    data = bytearray(path[what].read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path[what].write_bytes(data)
    if what == "settings":
        assert "holds another download (format_version None -> 1" in refused(capsys, table, out, "--rows_per_shard", 3)
        return
    if what == "record":
        assert "the same command mends it" in refused(capsys, table, out, "--rows_per_shard", 3)
    else:
        record.unlink()
    run(table, out, "--rows_per_shard", 3)
    assert contents(out) == before


def test_two_downloads_into_one_folder_are_refused(server, tmp_path, capsys):
    table, out = make_table(tmp_path / "urls.parquet", good_urls(server, 3)), tmp_path / "out"
    (out / "__download__").mkdir(parents=True)
    with script.FileLock(out / "__download__/.lock"):
        assert "another process is writing to" in refused(capsys, table, out)


def test_retry_failed_keeps_what_was_got(local_ray, server, tmp_path):
    """Rows that failed for good are left, those that may pass asked again, and no good one is asked twice or lost."""
    urls = good_urls(server, 12)
    urls[1], urls[4], urls[7] = f"{server.url}/flaky/1", f"{server.url}/missing/4", f"{server.url}/flaky/7"
    table, out = make_table(tmp_path / "urls.parquet", urls), tmp_path / "out"
    flags = ["--rows_per_shard", 4, "--keep_columns", "id", "--retries", 0]
    run(table, out, *flags)
    assert [(f["row"], f["reason"]) for f in read_failures(out)] == [(1, "HTTP 503"), (4, "HTTP 404"), (7, "HTTP 503")]
    server.requests.clear()
    run(table, out, *flags)
    assert not server.requests
    old = contents(out)
    run(table, out, *flags, "--retry_failed")  # still unwilling
    assert server.requests == {"/flaky/1": 1, "/flaky/7": 1}
    assert {k: v for k, v in contents(out).items() if "data-" in k} == {k: v for k, v in old.items() if "data-" in k}
    server.requests |= {"/flaky/1": 5, "/flaky/7": 5}
    run(table, out, *flags, "--retry_failed")
    assert [row["id"] for row in read_rows(out)] == [i for i in range(12) if i != 4]
    assert [row["image"]["bytes"] for row in read_rows(out)] == [make_image(i) for i in range(12) if i != 4]
    assert [(f["row"], f["reason"]) for f in read_failures(out)] == [(4, "HTTP 404")]
    assert server.requests == {"/flaky/1": 6, "/flaky/7": 6}  # no good row was asked for again
    # The same shards as if all had been well at once
    server.requests |= {"/flaky/1": 5, "/flaky/7": 5}
    run(table, tmp_path / "fresh", *flags)
    assert contents(out) == contents(tmp_path / "fresh")
    # Killed between the shard and its record: the shard knows better
    record = "__download__/records/data-00000-of-00003.json"
    (out / record).write_bytes(old[record])
    with pytest.raises(SystemExit):
        run(table, out, *flags)
    server.requests.clear()
    run(table, out, *flags, "--retry_failed")
    assert contents(out) == contents(tmp_path / "fresh") and not server.requests


def undisturbed(server, tmp_path, *flags):
    """A table of 120 images and some that fail, and what a run that is left alone makes of it."""
    urls = [f"{server.url}/{'missing' if i % 20 == 7 else 'image'}/{i}" for i in range(120)]
    table = make_table(tmp_path / "urls.parquet", urls)
    run(table, tmp_path / "undisturbed", *flags)
    assert len(read_rows(tmp_path / "undisturbed")) == 114
    server.delay, server.requests = 0.2, collections.Counter()
    return table, contents(tmp_path / "undisturbed")


def whole(folder):
    """Numbers of the shards that are done."""
    return sorted(int(path.name[5:10]) for path in Path(folder).glob("__download__/records/*.json"))


def workers(address):
    """The processes of Ray that download."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "".join(process.info["cmdline"] or [""]).startswith("ray::MapBatches"):
                if any(address in part for parent in process.parents() for part in parent.cmdline()):
                    found.append(process)
    return found


def test_a_killed_worker_loses_and_repeats_nothing(local_ray, server, tmp_path):
    flags = ["--rows_per_shard", "10"]
    table, expected = undisturbed(server, tmp_path, *flags)
    driver = start(table, tmp_path / "out", *flags, "--address", local_ray)
    killed = 0
    for least in (1, 4):
        wait_until(lambda least=least: len(whole(tmp_path / "out")) >= least and workers(local_ray))
        wait_until(lambda: server.open > 4)  # so that requests are lost
        for worker in workers(local_ray):
            worker.kill()
            killed += 1
    assert "Done: 114 images" in end(driver) and killed >= 2
    assert contents(tmp_path / "out") == expected
    again = [path for path, count in server.requests.items() if count > 1]
    assert 0 < len(again) <= killed * 10  # no more than the shards in work


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_killed_driver_loses_and_repeats_nothing(local_ray, server, tmp_path, number, code):
    flags = ["--rows_per_shard", "10"]
    table, expected = undisturbed(server, tmp_path, *flags)
    out = tmp_path / "out"
    driver = start(table, out, *flags, "--address", local_ray)
    wait_until(lambda: len(whole(out)) >= 4)
    driver.send_signal(number)
    printed = end(driver, code)
    if number != signal.SIGKILL:
        assert "the same command goes on from here" in printed and "Traceback" not in printed, printed
    wait_until(lambda: not workers(local_ray))  # Ray ends what a lost driver started
    assert 4 <= len(whole(out)) < 12
    for number in whole(out):
        name = f"data-{number:05d}-of-00012.parquet"
        assert (out / name).read_bytes() == expected[name]
    rows = {row for number in whole(out) for row in range(10 * number, 10 * number + 10)}
    before = server.requests.copy()
    run(table, out, *flags)
    assert contents(out) == expected
    asked = {int(path.split("/")[-1]) for path in (server.requests - before)}
    assert not asked & rows


def test_a_killed_node_loses_and_repeats_nothing(local_ray, server, tmp_path):
    """A cluster of two machines, one of which dies."""
    flags = ["--rows_per_shard", "10"]
    table, expected = undisturbed(server, tmp_path, *flags)
    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(True, head_node_args={**options, "include_dashboard": False})
    try:
        node = cluster.add_node(**options)
        driver = start(table, tmp_path / "out", *flags, "--address", cluster.address)
        wait_until(lambda: len(whole(tmp_path / "out")) >= 3)
        cluster.remove_node(node, allow_graceful=False)
        assert len(whole(tmp_path / "out")) < 12
        assert "Done: 114 images" in end(driver)
        assert contents(tmp_path / "out") == expected
        assert len([path for path, count in server.requests.items() if count > 1]) <= 20
    finally:
        cluster.shutdown()


def test_object_storage(local_ray, storage, server, tmp_path):
    """The table comes from an S3 server, and the shards go there; a killed driver leaves whole objects only."""
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem()
    fs.mkdir("downloads")
    table = make_table(tmp_path / "urls.parquet", [*good_urls(server, 30), f"{server.url}/flaky/30"])
    fs.put_file(table, "downloads/tables/urls.parquet")
    source, out, flags = (
        "s3://downloads/tables/*.parquet",
        "s3://downloads/out",
        ["--rows_per_shard", "5", "--retries", "0"],
    )

    def done():
        fs.invalidate_cache()
        return len(fs.glob("downloads/out/__download__/records/*.json"))

    server.delay = 0.5
    driver = start(source, out, *flags, "--address", local_ray)
    wait_until(lambda: done() >= 2)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not workers(local_ray))
    assert done() < 7
    server.delay = 0
    run(source, out, *flags)
    fs.invalidate_cache()
    assert len(fs.cat("downloads/out/__download__/failures.jsonl").splitlines()) == 1
    server.requests["/flaky/30"] = 5
    run(source, out, *flags, "--retry_failed")
    fs.invalidate_cache()
    fs.get("downloads/out/", str(tmp_path / "copy/"), recursive=True)
    assert [row["image"]["bytes"] for row in read_rows(tmp_path / "copy")] == [make_image(i) for i in range(31)]
    assert read_failures(tmp_path / "copy") == []
    assert sum(server.requests[f"/image/{i}"] for i in range(30)) <= 40  # two shards were in work when it was killed


# ------------------------------------------------------------------------------------------------- at length


@pytest.mark.long
def test_ten_thousand_images_of_a_bad_web(local_ray, server, tmp_path):
    """A tenth of the rows fails in every way; memory stays bounded, killed workers and drivers lose nothing."""
    rng = np.random.default_rng(0)
    kinds = [str(rng.choice(list(BAD) if rng.random() < 0.1 else GOOD[:5])) for _ in range(10_000)]
    urls = [f"{server.url}/{kind}/{i}" for i, kind in enumerate(kinds)]
    table = make_table(tmp_path / "urls.parquet", urls)
    flags = ["--rows_per_shard", "500", "--keep_columns", "id", "--per_host", "64", "--address", local_ray]
    began, most = time.monotonic(), 0
    undisturbed = start(table, tmp_path / "undisturbed", *flags)
    while undisturbed.poll() is None:
        for worker in workers(local_ray):
            with contextlib.suppress(psutil.Error):
                most = max(most, worker.memory_info().rss)
        time.sleep(0.2)
    printed = end(undisturbed)
    print(f"{time.monotonic() - began:.0f} s, {most / 1e6:.0f} MB in a worker, {server.sent / 1e6:.0f} MB without end")
    print(printed.splitlines()[-2])
    check_download(server, kinds, tmp_path / "undisturbed")
    assert most < 600_000_000

    out, drivers = tmp_path / "out", 0
    while len(whole(out)) < 20 if out.exists() else True:
        driver = start(table, out, *flags)
        drivers += 1
        least = len(whole(out)) + 4
        for number in (0, 1):
            wait_until(lambda: driver.poll() is not None or len(whole(out)) >= min(20, least - 2 * number), 200)  # noqa: B023
            for worker in workers(local_ray)[:1]:
                with contextlib.suppress(psutil.Error):
                    worker.kill()
        if driver.poll() is None:
            driver.kill()
        driver.communicate()
        assert drivers < 12
    end(start(table, out, *flags))
    print(f"{drivers} drivers and as many workers were killed")
    check_download(server, kinds, out)
    mine, theirs = contents(out), contents(tmp_path / "undisturbed")
    assert {name for name in theirs if mine.get(name) != theirs[name]} <= {n for n in theirs if "data-" not in n}
