"""Requests, without Ray, to a server as faulty as the web, on the loopback device."""

import argparse
import asyncio
import collections
import datetime
import io
import ipaddress
import math
import socket
import ssl
import tempfile
import threading
import time

import pytest
from conftest import free_port, wait_until
from hypothesis import assume, given
from hypothesis import strategies as st
from image_server import BAD, FLAGS, GOOD, SLOW, ImageServer, make_image
from test_laws import law

aiohttp = pytest.importorskip("aiohttp", reason="needs requirements-ray.txt")
import psutil  # noqa: E402
from multidict import CIMultiDict  # noqa: E402

import download_images as script  # noqa: E402
from diffusion_training import addresses  # noqa: E402
from diffusion_training.web import downloads as module  # noqa: E402


@pytest.fixture
def server():
    server = ImageServer()
    yield server
    server.close()


def make_args(*flags):
    return script.parse_args(["--input", "x", "--output_dir", "y", *map(str, flags)])


def good_urls(server, count, kind="image"):
    return [f"{server.url}/{kind}/{i}" for i in range(count)]


def fetch(urls, *flags):
    """Return [file or None], [failure or None] for the URLs, with FLAGS and these flags."""
    with tempfile.TemporaryFile() as spool:
        urls = dict(enumerate(urls))
        images, failures, received = asyncio.run(
            module.fetch_rows(urls, spool, make_args(*FLAGS, *flags))
        )
        assert received >= sum(image["last"] - image["first"] for image in images.values())
        assert (
            images.keys() | failures.keys() == urls.keys() and not images.keys() & failures.keys()
        )
        files = dict.fromkeys(urls)
        for row, image in images.items():
            spool.seek(image["first"])
            files[row] = spool.read(image["last"] - image["first"])
    return list(files.values()), [failures.get(row) for row in files]


def reasons(urls, *flags):
    return [failure and failure["reason"] for failure in fetch(urls, *flags)[1]]


# ------------------------------------------------------------------- images and failures


def test_good_images_arrive_unchanged_and_failures_have_reasons(server, monkeypatch):
    monkeypatch.setattr(module.random, "uniform", lambda low, high: 0.1)  # seconds between tries
    kinds = [kind for kind in [*BAD, *GOOD, *GOOD] if kind not in SLOW]
    files, failures = fetch(
        [f"{server.url}/{kind}/{i}" for i, kind in enumerate(kinds)], "--per_host", 64
    )
    for i, kind in enumerate(kinds):
        asked = server.requests[f"/{kind}/{i}"]
        if kind in GOOD:
            assert files[i] == make_image(i) and asked == {"busy": 2, "flaky": 3}.get(kind, 1), kind
        else:
            reason, tries = BAD[kind]
            assert failures[i]["reason"].startswith(reason) and failures[i]["tries"] == tries, (
                failures[i]
            )
            assert asked == tries, kind
    assert server.requests["/circle/"] == module.MAX_REDIRECTS
    assert server.sent < 20_000_000  # the endless body was dropped when it was too large


def test_requests_that_time_out_are_tried_again(server, monkeypatch):
    monkeypatch.setattr(module.random, "uniform", lambda low, high: 0.1)
    start = time.monotonic()
    flags = ["--timeout", 0.6, "--idle_timeout", 0.3]
    _, failures = fetch([f"{server.url}/{kind}/{i}" for i, kind in enumerate(SLOW)], *flags)
    assert failures == [{"reason": "timed out", "tries": 3}] * 3
    # the host that sends drop by drop is never idle, but reaches --timeout
    assert time.monotonic() - start >= 1.8
    assert [server.requests[f"/{kind}/{i}"] for i, kind in enumerate(SLOW)] == [3] * 3


def test_per_host_and_connections_limit_parallel_requests(server):
    for flags, most in ((["--per_host", 3], 3), (["--per_host", 50, "--connections", 7], 7)):
        server.most, server.held = 0, 0  # no answer until there are so many requests at a time

        def answer(most=most):
            wait_until(lambda: server.open == most)
            server.held = math.inf

        threading.Thread(target=answer).start()
        files, _ = fetch(good_urls(server, 40), "--timeout", 100, "--idle_timeout", 100, *flags)
        assert files == [make_image(i) for i in range(40)] and server.most == most


def test_slow_hosts_do_not_delay_other_hosts(server):
    """A row waits only for a free connection to its own host, and never for another's retry."""
    stalled = ImageServer()
    try:
        stalled.held = 0  # no answer before all images of the other host were requested

        def answer():
            wait_until(lambda: server.requests.total() == 50)
            stalled.held = math.inf

        threading.Thread(target=answer).start()
        urls = good_urls(stalled, 8) + good_urls(server, 50)
        urls = [url.replace("127.0.0.1", "localhost") for url in urls[:8]] + urls[8:]
        flags = (
            "--connections 8 --per_host 4 --retries 0 --timeout 100 --idle_timeout 100 "
            "--allow_private_addresses 127.0.0.0/8 ::1"
        ).split()
        files, _ = fetch(urls, *flags)
        assert files == [make_image(i) for i in (*range(8), *range(50))]
    finally:
        stalled.close()


@pytest.mark.parametrize("kind", ["endless", "huge", "bomb"])
def test_downloads_of_too_large_bodies_are_aborted(server, kind):
    before = psutil.Process().memory_info().rss
    found = reasons([f"{server.url}/{kind}/{i}" for i in range(20)], "--per_host", 20)
    assert all(reason.startswith(BAD[kind][0]) for reason in found)
    assert server.sent < 20 * 10_000_000  # a megabyte each, and the contents of sockets and buffers
    assert psutil.Process().memory_info().rss - before < 200_000_000


def test_retries_wait_as_long_as_retry_after_asks(server):
    start = time.monotonic()
    files, _ = fetch([f"{server.url}/busy/1"])
    assert files == [make_image(1)] and time.monotonic() - start >= 1
    assert reasons([f"{server.url}/busy/2"], "--retries", 0) == ["HTTP 429"]
    headers = {"Retry-After": module.email.utils.formatdate(time.time() + 6000, usegmt=True)}
    assert 5000 < module.read_retry_after(headers) <= 6000
    found = [module.read_retry_after({"Retry-After": value}) for value in ("7", "", "soon", "-1")]
    assert found == [7, None, None, None]


def test_failed_connections_have_reasons_and_tls_checks_host_names(server, tmp_path, monkeypatch):
    """For example, TLS to a plain server, a self-signed certificate, and a closed port."""
    x509 = pytest.importorskip(
        "cryptography.x509", reason="needs cryptography, which comes with moto"
    )
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1)
    )
    certificate = certificate.add_extension(
        x509.SubjectAlternativeName([x509.DNSName("localhost")]), False
    )
    pem = certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    formats = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "both").write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *formats))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "both")
    safe = ImageServer(context)
    try:
        long = "http://" + "a" * 80 + ".com/"
        own = ["--allow_private_addresses", "127.0.0.1", "::1"]
        for url, start in {
            f"https://localhost:{safe.port}/image/1": "TLS",
            f"https://127.0.0.1:{server.port}/image/1": ("TLS", "connection"),
            f"http://127.0.0.1:{free_port()}/": "connection",
            "http://name.invalid/": "host not found",
            long: ("bad URL", "host not found"),
            "x": "not http",
            "ftp://a/": "not http",
        }.items():
            (reason,) = reasons([url], *own)
            assert reason.startswith(start), (url, reason)
        # A trusted certificate must match the host name, although the connection is to an address.
        trusting = ssl.create_default_context(cafile=tmp_path / "both")
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting)
        found = reasons(
            [f"https://{host}:{safe.port}/image/1" for host in ("localhost", "127.0.0.1")], *own
        )
        assert found[0] is None and found[1].startswith("TLS")
    finally:
        safe.close()


def test_a_full_disk_raises_instead_of_failing_the_image(server):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(module.fetch_rows({0: f"{server.url}/image/1"}, Full(), make_args(*FLAGS)))


@pytest.mark.parametrize("values, found", [
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
    (["max-snippet: -1, max-video-preview: 0, noai"], "noai"),
    ([], None),
])  # fmt: skip
def test_find_opt_out_reads_x_robots_tag_headers(values, found):
    args = make_args()
    headers = CIMultiDict([("x-robots-tag", value) for value in values])
    assert module.find_opt_out(headers, args.user_agent, args.opt_out) == found
    assert module.find_opt_out(headers, args.user_agent, make_args("--opt_out").opt_out) is None


# ------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 127.8.9.10 0.0.0.0 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 "
    "169.254.169.254 100.64.0.1 100.100.100.200 192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 "
    "203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16 "
    ":: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 "
    "fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 fec0::1 ff02::1 2001:db8::1 "
    "64:ff9b:1::1 64:ff9b::7f00:1 "
    "64:ff9b::a9fe:a9fe 2002:7f00:1:: 2002:a00:1:: 2001:0:0:0:0:0:80ff:fffe".split(),
)
def test_private_addresses_are_refused(address):
    with pytest.raises(addresses.PrivateAddress):
        addresses.check_address(address, None)
    addresses.check_address(address, [])  # all are allowed
    with pytest.raises(addresses.PrivateAddress):
        addresses.check_address(address, ["192.168.77.0/24"])


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_allowed(address):
    addresses.check_address(address, None)


def test_allow_private_addresses_accepts_given_networks():
    addresses.check_address("192.168.77.5", ["192.168.77.0/24", "fd00::/8"])
    addresses.check_address("fd00::1", ["192.168.77.0/24", "fd00::/8"])
    addresses.check_address("::ffff:192.168.77.5", ["192.168.77.0/24"])


HOSTS = [
    "127.0.0.1", "localhost", "2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0.0.0.0", "0",
    "[::1]", "[::]", "[::ffff:7f00:1]", "user:password@127.0.0.1", "example.com@127.0.0.1",
    "example.com%2F@127.0.0.1", "127.0.0.1%2F.example.com@127.0.0.1", "①②⑦.0.0.1", "127。0。0。1",
]  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_every_spelling_of_a_private_host_is_refused(server, host):
    url, args = f"http://{host}:{server.port}/image/1", make_args("--timeout", 2, "--retries", 0)
    images, failures, _ = asyncio.run(module.fetch_rows({0: url}, io.BytesIO(), args))
    assert not images and not server.requests and server.open == 0
    assert failures[0]["reason"].startswith(
        ("private address", "bad URL", "host not found", "connection")
    ), failures
    if host in ("127.0.0.1", "localhost", *HOSTS[8:13]):
        assert failures[0]["reason"] == "private address"


def test_dns_rebinding_never_connects_to_a_private_address(server, monkeypatch):
    """DNS rebinding: public when first asked and private afterwards, or both at once."""
    from asyncio import selector_events

    asked, connected, connect = [], [], selector_events.BaseSelectorEventLoop.sock_connect

    def look_up(host, port, *args, **kwargs):
        asked.append(host)
        addresses = {"both.test": ["127.0.0.1", "10.0.0.1"]}.get(host, ["127.0.0.1"])
        if host == "rebind.test" and asked.count(host) == 1:
            addresses = ["192.88.98.1"]  # public; nothing answers there
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses
        ]

    async def record(self, sock, address):
        connected.append(address[0])
        if address[0] == "192.88.98.1":
            raise ConnectionRefusedError("nobody is there")
        return await connect(self, sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(selector_events.BaseSelectorEventLoop, "sock_connect", record)
    hosts = ["rebind.test", "both.test", "one.test"]
    urls = {i: f"http://{host}:{server.port}/image/1" for i, host in enumerate(hosts)}
    args = make_args()
    for _ in range(2):  # a second task asks again
        images, failures, _ = asyncio.run(module.fetch_rows(urls, io.BytesIO(), args))
        assert not images and not server.requests
        assert failures[1]["reason"] == failures[2]["reason"] == "private address"
    assert failures[0]["reason"] == "private address" and asked.count("rebind.test") == 2
    assert set(connected) == {"192.88.98.1"}  # only the checked address
    allowed = make_args("--allow_private_addresses")
    images, _, _ = asyncio.run(module.fetch_rows({0: urls[2]}, io.BytesIO(), allowed))
    assert images and "127.0.0.1" in connected  # the test would notice a connection


def test_an_environment_proxy_is_not_asked_for_private_hosts(server, monkeypatch):
    """The proxy itself may have a private address."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, server.url)
    assert (
        reasons(["http://10.0.0.1/image/1"], "--retries", 0) == ["private address"]
        and not server.requests
    )


def test_redirects_are_checked_like_any_other_url(server):
    found = reasons(
        [f"{server.url}/{kind}/1" for kind in ("private", "mapped", "file", "circle", "hop")]
    )
    assert found == [
        "private address",
        "private address",
        "not http or https: 'file'",
        "too many redirects",
        None,
    ]
    assert collections.Counter(server.requests)["/image/0"] == 0


def test_four_opt_out_directives_are_respected_by_default():
    assert sorted(make_args().opt_out) == ["noai", "noimageai", "noimageindex", "noindex"]


# ------------------------------------------------------------------- machine faults


def test_many_hosts_open_no_more_sockets_than_connections(server):
    """At most one for each active request, also if hosts keep connections open."""
    most, end, process = [0], threading.Event(), psutil.Process()

    def watch():
        while not end.wait(0.002):
            most[0] = max(most[0], sum(c.raddr != () for c in process.net_connections("tcp")))

    thread = threading.Thread(target=watch)
    thread.start()
    urls = [
        f"http://127.0.{1 + i // 200}.{1 + i % 200}:{server.port}/image/{i}" for i in range(300)
    ]
    try:
        with pytest.MonkeyPatch.context() as m:
            loop = asyncio.SelectorEventLoop
            connect = loop.sock_connect
            m.setattr(
                loop,
                "sock_connect",
                lambda self, sock, to: connect(self, sock, ("127.0.0.1", to[1])),
            )
            files, _ = fetch(urls, "--connections", 20, "--allow_private_addresses")
    finally:
        end.set(), thread.join()
    assert all(files) and most[0] < 100  # of both ends


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), OSError(23, "in system"), OSError(12, "memory")]
)
def test_lack_of_descriptors_or_memory_raises_instead_of_failing_rows(server, monkeypatch, error):
    def open_socket(address, allowed):
        raise error

    monkeypatch.setattr(module, "open_socket", open_socket)
    with pytest.raises(OSError, match=f"{error.strerror}.*: lower --connections"):
        fetch(good_urls(server, 3))


def test_a_machine_without_network_raises_instead_of_failing_rows(server, monkeypatch):
    def look_up(host, *args, **kwargs):
        if host.endswith(".test"):
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    urls = [f"http://{i}.test/" for i in range(25)]
    with pytest.raises(
        OSError, match="none of 25 hosts could be reached: is this machine on the network"
    ):
        fetch(urls)
    # one host answers, or too few rows or hosts fail to blame this machine
    for fine in ([*urls, f"{server.url}/missing/1"], urls[:15], urls[:1] * 25):
        assert reasons(fine)[0].startswith("host not found")


@pytest.mark.parametrize(
    "url", ["http://xn--a/", "http://[::1", "http://a:99999/", "http://\ud800.com/", "http://a..b/"]
)
def test_a_host_that_can_not_be_decoded_fails_only_its_own_row(server, url):
    assert reasons([url, f"{server.url}/image/1"])[1] is None
    assert reasons([url])[0].startswith(("bad URL", "host not found"))


def test_good_images_with_strange_headers_are_accepted(server):
    found = reasons(
        [
            f"{server.url}/header-{kind}/1"
            for kind in ("none", "binary", "utf-8", "aws-chunked", "empty")
        ]
    )
    assert found == [None] * 5
    assert reasons([f"{server.url}/long/1", f"{server.url}/idna/1"])[0] is None
    assert reasons([f"{server.url}/idna/1"])[0].startswith("bad URL")


def test_waits_between_tries_are_at_most_ninety_seconds(server, monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    server.delay = 0
    monkeypatch.setattr(module, "asyncio", argparse.Namespace(**{**vars(asyncio), "sleep": sleep}))
    fetch([f"{server.url}/broken/1"], "--retries", 12)
    assert len(slept) == 12 and 30 <= max(slept) <= 90 and slept[0] < 1


def test_waits_between_tries_double_up_to_a_minute_with_random_jitter(server, monkeypatch):
    slept, drawn = [], []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(module, "asyncio", argparse.Namespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(module.random, "uniform", lambda *bounds: drawn.append(bounds) or 1)
    fetch([f"{server.url}/broken/1"], "--retries", 9)
    assert slept == [0.5, 1, 2, 4, 8, 16, 32, 60, 60] and {*drawn} == {(0.5, 1.5)}
    slept.clear()
    fetch([f"{server.url}/mute/1"], "--retries", 1, "--idle_timeout", 0.1)
    assert slept == [0.5]


def test_requests_name_the_user_agent_and_count_received_bytes(server):
    args = make_args(*FLAGS)
    urls = dict(enumerate(good_urls(server, 2, "chunked")))
    *_, received = asyncio.run(module.fetch_rows(urls, io.BytesIO(), args))
    assert received == len(make_image(0)) + len(make_image(1))
    said = {name: server.headers.get(name) for name in ("user-agent", "accept", "accept-encoding")}
    expected = {
        "user-agent": args.user_agent,
        "accept": "image/*,*/*;q=0.5",
        "accept-encoding": "identity",
    }
    assert said == expected and args.user_agent


def test_only_redirect_statuses_are_followed_and_all_hops_share_a_timeout(server):
    found = reasons(
        [f"{server.url}/moved-{status}/1" for status in (301, 302, 303, 307, 308, 300, 304)]
    )
    assert found == [None] * 5 + ["HTTP 300", "HTTP 304"]
    assert reasons([f"{server.url}/moved-302"]) == ["HTTP 302"]
    for timeout in (0.6, 6, 60):  # seconds, more on a machine that is too busy for the first
        server.delay = 0.6 * timeout
        flags = ["--timeout", timeout, "--idle_timeout", timeout, "--retries", 0]
        assert reasons([f"{server.url}/hop/7"], *flags) == ["timed out"]
        if server.requests["/image/7"]:  # the redirect was followed before the timeout
            break
    assert server.requests["/image/7"]


def test_bodies_up_to_max_bytes_are_accepted_and_compressed_ones_refused(server):
    size = len(make_image(2))
    urls = [f"{server.url}/image/2", f"{server.url}/chunked/2"]
    assert reasons(urls, "--max_bytes", size) == [None] * 2
    assert reasons(urls, "--max_bytes", size - 1) == [
        f"too large: {size} bytes",
        "too large: more than --max_bytes",
    ]
    kinds = ("gzip", "x-gzip", "deflate", "BR", "zstd", "compress", "identity,br")
    assert reasons([f"{server.url}/header-{kind}/1" for kind in kinds]) == ["compressed body"] * 7


def test_directive_values_do_not_opt_out_and_past_retry_after_means_now():
    values = CIMultiDict([("x-robots-tag", "max-image-preview: none")])
    assert module.find_opt_out(values, "me", ["none"]) is None
    headers = {"Retry-After": module.email.utils.formatdate(time.time() - 60, usegmt=True)}
    assert module.read_retry_after(headers) == 0


def test_host_names_are_looked_up_in_parallel(server, monkeypatch):
    """Otherwise a name server that is slow for some hosts would delay all."""
    together = threading.Barrier(12, timeout=100)

    def look_up(host, *args, **kwargs):
        together.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    urls = [f"http://{i}.test:{server.port}/image/{i}" for i in range(12)]
    assert reasons(urls, "--connections", 12, "--timeout", 200) == [None] * 12


def test_thread_limits_raise_and_unknown_errors_fail_only_the_row(server, monkeypatch):
    def open_socket(address, allowed):
        raise RuntimeError(said)

    monkeypatch.setattr(module, "open_socket", open_socket)
    said = "can't start new thread"
    with pytest.raises(OSError, match="can't start new thread: lower --connections"):
        fetch(good_urls(server, 1))
    said = "strange"
    assert reasons(good_urls(server, 1)) == ["connection: RuntimeError strange"]


def test_ten_unreachable_hosts_and_twenty_rows_mean_no_network(monkeypatch):
    def look_up(host, *args, **kwargs):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for rows, hosts in ((20, 10), (30, 30)):
        with pytest.raises(OSError, match=f"none of {hosts} hosts could be reached"):
            fetch([f"http://{i % hosts}.test/{i}" for i in range(rows)])
    for rows, hosts in ((19, 19), (20, 9)):
        assert len(reasons([f"http://{i % hosts}.test/{i}" for i in range(rows)])) == rows


@pytest.mark.parametrize("error, reason", [
    (TimeoutError(), "timed out"), (aiohttp.ClientPayloadError("x"), "broken off"),
    (aiohttp.ServerDisconnectedError(), "broken off"),
    (ConnectionResetError(104, "x"), "broken off"),
    (aiohttp.ClientOSError(32, "Broken pipe"), "broken off"), (ValueError("x"), "bad URL: x"),
    (aiohttp.ClientResponseError(argparse.Namespace(real_url="x"), ()),
     "bad answer: invalid HTTP"),
])  # fmt: skip
def test_each_download_error_has_its_reason(error, reason):
    def get(*args, **options):
        raise error

    downloads = module.Downloads(argparse.Namespace(get=get), None, None, make_args("--retries", 0))
    assert asyncio.run(downloads.download("http://a/")) == {"reason": reason, "tries": 1}


# ------------------------------------------------------------------- addresses

PRIVATE = [ipaddress.ip_network(network) for network in (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32", "::/96", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "2001:db8::/32",
)]  # fmt: skip


def spell(ip):
    """All spellings of an address that `ipaddress` accepts, also inside IPv6 addresses."""
    inside = []
    if ip.version == 4:
        value, mask = int(ip), 0xFFFFFFFF
        inside = [
            (0xFFFF << 32) | value,  # ::ffff:a.b.c.d, mapped
            (0x2002 << 112) | (value << 80) | 1,  # 6to4
            (0x64FF9B << 96) | value,  # NAT64
            (0x20010000 << 96) | (0x08080808 << 64) | (value ^ mask),  # Teredo, of a public server
        ]
    for one in [ip, *map(ipaddress.IPv6Address, inside)]:
        yield from {str(one), one.compressed, one.exploded}
        if one.version == 6:
            yield from (
                one.exploded.upper(),
                f"{one}%eth0",
                f"{one.exploded.rpartition(':')[0]}:{ipaddress.IPv4Address(int(one) % 2**32)}"
                if "." in one.exploded  # Python 3.13's form of mapped addresses
                else f"{one.exploded[:-9]}{ipaddress.IPv4Address(int(one) % 2**32)}",
            )


@law(300)
@given(st.sampled_from(PRIVATE).flatmap(lambda network: st.ip_addresses(network=network)))
def test_private_addresses_are_refused_in_every_spelling(ip):
    for address in spell(ip):
        with pytest.raises(addresses.PrivateAddress):
            addresses.check_address(address, None)
        addresses.check_address(address, [])


@law(300)
@given(st.ip_addresses(v=4))
def test_public_addresses_are_allowed_in_every_spelling(ip):
    assume(ip.is_global and not any(ip in network for network in PRIVATE if network.version == 4))
    for address in spell(ip):
        addresses.check_address(address, None)
