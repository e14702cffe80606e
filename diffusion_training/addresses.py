"""Files that rows of a data set name: on a disk, at a public host, or where the user allows it.

A data set may be a stranger's. A row could name a pipe, which never ends, a server of the own
network, or a bucket that only the user's keys open.
"""

import contextlib
import functools
import io
import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

# Addresses that Python calls global, though they are private: the service address that Azure has in
# each of its networks, and old and local forms of IPv6.
NOT_PUBLIC = [
    ipaddress.ip_network(network) for network in ("168.63.129.16", "fec0::/10", "64:ff9b:1::/48")
]
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Schemes of files in archives, as `datasets` writes them: zip://photo.jpg::photos.zip
PACKED = ("zip://", "tar://", "gzip://", "bz2://", "xz://", "lz4://", "zstd://")


class PrivateAddress(OSError):
    """A connection to an address that is not on the public internet.

    It is an OSError because aiohttp expects that when a socket can't be made.
    """


class Unreached(OSError):
    """A server has not answered, or has a fault: the row may be readable later."""


class Offline(ConnectionError):
    """The network is gone, or a server that has answered before: a fault of the machine."""


# seconds between tries
WAITS: dict[type[Exception], tuple[float, ...]] = {Unreached: (1, 4), Offline: (1, 4, 16, 64)}
MOST = 2**30 + 1  # bytes of a file: one more than an image may have
# {(host, port) that has answered: the networks that may be reached, see `check_address`}
ANSWERED: dict[tuple[str, int], list[str] | None] = {}
SILENT: set[str] = set()  # addresses that were tried in vain before any host had answered
FEW = 4  # such addresses that are taken for servers that are gone


def check_address(address: str, allowed: list[str] | None) -> None:
    """Raise PrivateAddress for an IP address, as the socket library writes it, that is not public.

    `allowed` lists the private networks that may be reached: None allows none, [] allows all. If an
    IPv6 address contains an IPv4 address (mapped, NAT64, 6to4, Teredo), the latter counts.
    """
    ip = ipaddress.ip_address(address.split("%")[0])
    if ip.version == 6:
        if ip in NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1]) or ip
    reserved = ip.is_multicast or ip.is_reserved or any(ip in network for network in NOT_PUBLIC)
    if allowed == [] or (ip.is_global and not reserved):
        return
    if not any(ip in ipaddress.ip_network(network) for network in allowed or ()):
        # The text is the same for all addresses of a host, so aiohttp need not merge several texts.
        raise PrivateAddress("private address")


def open_socket(address_info: tuple, allowed: list[str] | None) -> socket.socket:
    """Make the socket for an address of `getaddrinfo`. Raises PrivateAddress.

    The name is not looked up again, so the checked address is the one that is connected to.
    """
    family, kind, protocol, _, address = address_info
    check_address(address[0], allowed)
    return socket.socket(family, kind, protocol)


async def get_public_client(**options: Any) -> Any:
    """The HTTP client for fsspec. It connects to no private address, also after redirects."""
    import aiohttp

    make_socket = functools.partial(open_socket, allowed=None)
    connector = aiohttp.TCPConnector(socket_factory=make_socket)
    return aiohttp.ClientSession(connector=connector, **options)


def is_below(address: str, folder: str) -> bool:
    rest = address.removeprefix(folder.rstrip("/"))
    return rest != address and rest[:1] in ("", "/", "@")  # @: before a revision on the hub


@contextlib.contextmanager
def opening(path: str, allowed: Sequence[str]) -> Iterator[IO[bytes]]:
    """Open the file that a row names. `allowed`: see `list_allowed`.

    Raises ValueError if a row may not name it, or if its server refuses it. Waits for a server with
    a fault, then raises Unreached, or Offline if no server can be reached.
    """
    *outer, target = path.split("::")
    target = re.sub(r"^(file|local)://", "", target)
    scheme = target.partition("://")[0] if "://" in target else ""
    options = {}
    is_packed = all(each.startswith(PACKED) for each in outer)
    named = (path, target) if is_packed else (path,)
    if not any(is_below(each, folder) for each in named for folder in allowed):
        if is_packed and scheme in ("http", "https"):
            options = {scheme: {"get_client": get_public_client}}
        elif scheme or not is_packed:
            raise ValueError(
                "rows may name addresses only of http and https: allow others with "
                "--allow_addresses"
            )
    if not scheme and os.path.exists(target) and not os.path.isfile(target):
        raise ValueError("it is not a file")  # a pipe or a device might never end
    if not outer and not scheme:
        with open(target, "rb") as file:
            yield file
        return
    whole = "::".join([*outer, target])
    if scheme in ("http", "https"):
        yield io.BytesIO(fetch(whole, target, options))
        return
    # not `fsspec.open`, which takes the ? of a query for a pattern
    fs, name = fsspec.url_to_fs(whole)
    with fs.open(name) as file:
        yield file


def fetch(path: str, target: str, options: dict[str, Any]) -> bytes:
    """The content of a file at an HTTP server. target: the address without what it is packed in."""
    tries = 0
    while True:
        try:
            fs, name = fsspec.url_to_fs(path, **options)
            with fs.open(name) as file:
                content = file.read(MOST)
            ANSWERED[find_host(target)] = None if options else []
            return content
        except Exception as error:
            fault = find_fault(error, target)
            if fault is None:
                raise
            waits = WAITS.get(type(fault), ())
            if tries >= len(waits):
                raise fault from None
        time.sleep(waits[tries])
        tries += 1


def find_host(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def find_fault(error: Exception, target: str) -> Exception | None:
    """What an error of an HTTP request means for a row: fsspec hides all behind a 404."""
    chain: list[Any] = [error]
    for each in chain:  # it grows meanwhile; aiohttp keeps the system's error in `os_error`
        causes = (each.__cause__, each.__context__, getattr(each, "os_error", None))
        chain += [cause for cause in causes if cause and cause not in chain]
    if any(isinstance(each, PrivateAddress) for each in chain):
        return ValueError("private address: allow it with --allow_addresses")
    status = next((each.status for each in chain if hasattr(each, "status")), None)
    if status is not None and status < 500 and status != 429:
        return ValueError(f"HTTP {status}")
    if any(isinstance(each, ValueError) for each in chain):  # of the address
        return ValueError("it is no valid address")
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    if status is not None:
        return Unreached(f"HTTP {status}")
    if not names & {"ClientError", "TimeoutError", "ConnectionError"}:
        return None
    reason = type(chain[-1]).__name__
    if is_online(target):
        return Unreached(f"its server can't be reached ({reason})")
    return Offline(
        f"{find_host(target)[0]} can't be reached, nor can any other server ({reason}): check the "
        "network, then run the command again"
    )


def is_online(failed: str) -> bool:
    """Whether an address that can't be reached is that of a server which is gone.

    A data set of many hosts has such addresses, and a run goes on without them. But one that has
    answered before is not gone, and without a network no row would be read any more.
    """
    if not ANSWERED:
        SILENT.add(failed)
        return len(SILENT) < FEW
    return find_host(failed) not in ANSWERED and can_connect(*[*ANSWERED.items()][-1])


def can_connect(host: tuple[str, int], allowed: list[str] | None) -> bool:
    with contextlib.suppress(OSError):
        for info in socket.getaddrinfo(*host, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), open_socket(info, allowed) as connection:
                connection.settimeout(10)
                connection.connect(info[4])
                return True
    return False
