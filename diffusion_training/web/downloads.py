"""Requests to untrusted servers: limits, retries, opt-outs, and no private addresses."""

import asyncio
import collections
import email.utils
import errno
import functools
import random
import threading
import time
from argparse import Namespace
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import IO, Any

import aiohttp
from yarl import URL

from diffusion_training.addresses import PrivateAddress, open_socket
from diffusion_training.errors.printing import hide_secrets
from diffusion_training.web.pictures import THREADS, Failure, store_image

# The reason of a failed request, by the first matching type. {0} is the type of the error, {1} its
# message.
ERRORS = {
    TimeoutError: "timed out",
    (
        aiohttp.ClientPayloadError,
        aiohttp.ServerDisconnectedError,
        ConnectionResetError,
    ): "broken off",
    aiohttp.ClientConnectorDNSError: "host not found",
    aiohttp.ClientSSLError: "TLS: {1}",
    aiohttp.ClientConnectorError: "connection: {0} {1}",
    aiohttp.ClientOSError: "broken off",
    aiohttp.ClientResponseError: "bad answer: invalid HTTP",
    ValueError: "bad URL: {1}",  # from aiohttp, yarl or the encoding of a host name
    Exception: "connection: {0} {1}",
}
MAX_REDIRECTS = 5
# Errors that mean that this machine has run out of something, not that the server failed.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
# X-Robots-Tag directives that have a value after a colon
WITH_VALUE = ("unavailable_after", "max-snippet", "max-image-preview", "max-video-preview")
COMPRESSED = {"gzip", "x-gzip", "deflate", "br", "zstd", "compress"}


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before a retry, from the Retry-After header, or None."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):  # not a date, or a date without a time zone
        return None


def find_opt_out(headers: Any, user_agent: str, directives: Collection[str]) -> str | None:
    """The first of `directives` in an X-Robots-Tag header for all agents or for ours, or None."""
    own_name = user_agent.split("/")[0].strip().lower()
    for value in headers.getall("X-Robots-Tag", []):
        agent = None  # an agent's name applies to all directives after it in the same header
        for part in value.lower().split(","):
            name, colon, directive = (text.strip() for text in part.partition(":"))
            if not colon:
                directive = name
            elif name in WITH_VALUE or " " in name:
                continue  # a directive with a value, or the rest of a date
            else:
                agent = name
            if agent in (None, own_name) and directive in directives:
                return directive
    return None


class Downloads:
    """The requests of one task, and the file to which their images are appended."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        spool: IO[bytes],
        checker: ThreadPoolExecutor,
        args: Namespace,
    ) -> None:
        self.session = session
        self.spool = spool
        self.checker = checker
        self.args = args
        self.hosts = collections.defaultdict(lambda: asyncio.Semaphore(args.per_host))
        self.connections = asyncio.Semaphore(args.connections)
        self.locks = (threading.Lock(), threading.Lock())  # those of `store_image`
        self.answered = False  # whether any server has answered
        self.unreached = set()  # hosts that could not be connected to
        self.received = 0  # bytes, including those of failed downloads

    async def download(self, url: str) -> dict:
        """Download with retries; returns the result of `store_image` or {"reason", "tries"}."""
        tries = 0
        while True:
            tries += 1
            try:
                return await self.fetch(url)
            except Failure as failure:
                wait = failure.wait
                if wait is None or wait > self.args.timeout or tries > self.args.retries:
                    return {"reason": hide_secrets(str(failure), address=url), "tries": tries}
            backoff = min(60, 2 ** (tries - 2)) * random.uniform(0.5, 1.5)
            # outside of `fetch`, so it does not occupy a connection
            await asyncio.sleep(max(wait, backoff))

    async def fetch(self, url: Any) -> dict:
        """Try once: follow redirects to the image and store it.

        Raises Failure, or OSError if the machine is at fault.
        """
        seconds = self.args.timeout
        location = url
        for hop in range(MAX_REDIRECTS + 1):
            try:
                url = url.join(URL(location)) if hop else URL(location)
                host = url.host
            except Exception as error:  # decoders of host names raise errors of many types
                raise Failure(f"bad URL: {error}"[:200]) from None
            if url.scheme not in ("http", "https") or not host:
                raise Failure(f"not http or https: {url.scheme[:20]!r}")
            # The time limit counts from here, not while waiting for a free connection. The
            # connection is held until the image is stored, which limits the memory.
            async with self.hosts[host], self.connections:
                start = time.monotonic()
                location, body = await self.request(url, seconds)
                seconds -= time.monotonic() - start
                if body is not None:
                    work = functools.partial(store_image, body, self.spool, self.args, *self.locks)
                    return await asyncio.get_running_loop().run_in_executor(self.checker, work)
        raise Failure("too many redirects")

    async def request(self, url: URL, seconds: float) -> tuple[str | None, bytearray | None]:
        """Send one request; returns (redirect or None, body or None). Raises like `fetch`."""
        try:
            async with (
                asyncio.timeout(seconds),
                self.session.get(url, allow_redirects=False) as response,
            ):
                self.answered = True
                headers = response.headers
                status = response.status
                directive = find_opt_out(headers, self.args.user_agent, self.args.opt_out)
                if directive:
                    raise Failure(f"opted out: {directive}")
                if status in (301, 302, 303, 307, 308) and "Location" in headers:
                    return headers["Location"], None
                if status == 429 or status >= 500:
                    raise Failure(f"HTTP {status}", read_retry_after(headers) or 0.0)
                if status != 200:
                    raise Failure(f"HTTP {status}")
                encodings = headers.get("Content-Encoding", "").lower().replace(",", " ")
                if COMPRESSED.intersection(encodings.split()):
                    # We asked for identity, and a few kilobytes could expand to gigabytes.
                    raise Failure("compressed body")
                if (response.content_length or 0) > self.args.max_bytes:
                    raise Failure(f"too large: {response.content_length} bytes")
                body = bytearray()
                async for part in response.content.iter_any():
                    self.received += len(part)
                    body += part
                    if len(body) > self.args.max_bytes:
                        raise Failure("too large: more than --max_bytes")
                return None, body
        except Failure:
            raise
        except Exception as error:  # any type, because no server may stop the shard
            cause = getattr(error, "os_error", error)
            if isinstance(cause, PrivateAddress):
                raise Failure("private address") from None
            if getattr(cause, "errno", None) in EXHAUSTED or str(cause) == "can't start new thread":
                raise OSError(f"{cause}: lower --connections") from None
            if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                self.unreached.add(url.raw_host)
            reason = next(reason for kind, reason in ERRORS.items() if isinstance(error, kind))
            wait = 0.0 if isinstance(error, TimeoutError) else None
            raise Failure(reason.format(type(cause).__name__, cause)[:200], wait) from None


async def fetch_rows(
    urls: dict[int, str], spool: IO[bytes], args: Namespace
) -> tuple[dict[int, dict], dict[int, dict], int]:
    """Download `urls`, {row: URL}, and append each image to the file `spool`.

    Returns ({row: image}, {row: {"reason", "tries"}}, bytes received). Raises OSError if this
    machine is at fault.
    """
    # Threads of the event loop look up host names. By default there are few, so a slow name server
    # would block all requests.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(args.connections))
    make_socket = functools.partial(open_socket, allowed=args.allow_private_addresses)
    # Each request has its own connection, since idle ones kept for reuse would take all file
    # descriptors.
    connector = aiohttp.TCPConnector(
        limit=0, socket_factory=make_socket, ttl_dns_cache=300, force_close=True
    )
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=args.idle_timeout, sock_read=args.idle_timeout
    )
    headers = {
        "User-Agent": args.user_agent,
        "Accept": "image/*,*/*;q=0.5",
        "Accept-Encoding": "identity",
    }
    with ThreadPoolExecutor(THREADS) as checker:
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_line_size=2**16,
            max_field_size=2**16,
        ) as session:
            downloads = Downloads(session, spool, checker, args)
            results = await asyncio.gather(*map(downloads.download, urls.values()))
    if not downloads.answered and len(urls) >= 20 and len(downloads.unreached) >= 10:
        raise OSError(
            f"none of {len(downloads.unreached)} hosts could be reached: "
            "is this machine on the network?"
        )
    images = {}
    failures = {}
    for row, result in zip(urls, results, strict=True):
        if "reason" in result:
            failures[row] = result
        else:
            images[row] = result
    return images, failures, downloads.received
