"""Requests that may go wrong in every way: limits, retries, opt-outs, and no private address."""

import asyncio
import collections
import email
import functools
import ipaddress
import itertools
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import aiohttp
from yarl import URL

from diffusion_training.web.pictures import Failure, store_image

# Private, though Python calls them global: Azure's own service in each of its networks, old and local forms of IPv6.
NOT_PUBLIC = [ipaddress.ip_network(network) for network in ("168.63.129.16", "fec0::/10", "64:ff9b:1::/48")]

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

MAX_REDIRECTS = 5


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
