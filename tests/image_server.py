"""A web server as faulty as the web, for the tests of downloads: the path chooses the answer."""

import asyncio
import collections
import functools
import gzip
import io
import math
import struct
import threading
import zlib

import numpy as np
from PIL import Image

GOOD = "image type slow close chunked hop busy flaky otherbot".split()
# {kind: (beginning of the reason, number of requests with two retries)}
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
    "endless": ("too large: more than --max_bytes", 1),
    "huge": ("too large: 2000000000 bytes", 1),
    "bomb": ("compressed body", 1),
    "pixels": ("too many pixels", 1),
    "noai": ("opted out: noai", 1),
}
SLOW = ("stall", "mute", "drip")  # those that last until a timeout
# Flags of download_images.py for this server
FLAGS = [
    "--timeout",
    "60",
    "--idle_timeout",
    "60",
    "--max_bytes",
    "1000000",
    "--allow_private_addresses",
    "127.0.0.1",
]

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\nshowpage\n"


@functools.lru_cache(20_000)
def make_image(number):
    """The file of image `number`: noise, a PNG or a JPEG."""
    pixels = np.random.default_rng(number).integers(
        0, 256, (40, 48 + number % 5, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG" if number % 2 else "PNG")
    return file.getvalue()


@functools.cache  # a busy machine would make them too slowly
def make_bomb():
    return gzip.compress(bytes(20_000_000), 1)


def make_pixel_bomb():
    """A PNG of some bytes that claims 60,000 x 60,000 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        file.getvalue()[:12] + header + struct.pack(">I", zlib.crc32(header)) + file.getvalue()[33:]
    )


class ImageServer:
    """Serves on a free port of 127.0.0.1, in a thread of its own, until `close`.

    `requests`: how often each path was requested. `most`: the highest number of requests at a time.
    `delay`: seconds before each answer. `sent`: bytes of bodies that do not end. `headers`: those
    of the last request. `held`: images with this number or a higher one are not yet answered.
    """

    def __init__(self, ssl=None):
        self.held = math.inf
        self.requests, self.open, self.most, self.delay, self.sent = (
            collections.Counter(),
            0,
            0,
            0.0,
            0,
        )
        self.loop, self.headers = asyncio.new_event_loop(), {}
        self.server = self.loop.run_until_complete(
            asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024, ssl=ssl)
        )
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def close(self):
        async def end():
            self.server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def serve(self, reader, writer):
        try:
            while (line := await reader.readline()).strip():
                headers = {}
                while (header := await reader.readline()).strip():
                    name, value = header.decode("latin1").split(":", 1)
                    headers[name.strip().lower()] = value.strip()
                self.open += 1
                self.most = max(self.most, self.open)
                try:
                    stay = await self.answer(writer, line.split()[1].decode(), headers)
                    await writer.drain()
                finally:
                    self.open -= 1
                if not stay:
                    break
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # also raised when a client speaks TLS to this server
        finally:
            writer.close()

    async def answer(self, writer, path, headers):
        """Returns whether the connection stays open."""
        self.headers = headers
        self.requests[path] += 1
        await asyncio.sleep(self.delay)
        kind, _, rest = path.strip("/").partition("/")
        number = int(rest) if rest.isdecimal() else 0
        while number >= self.held:
            await asyncio.sleep(0.01)
        image = make_image(number)

        def send(status="200 OK", body=b"", length=None, **more):
            more = {
                "Content-Type": "image/png",
                "Content-Length": len(body) if length is None else length,
            } | {name.replace("_", "-"): value for name, value in more.items()}
            lines = [
                f"HTTP/1.1 {status}",
                *(f"{name}: {value}" for name, value in more.items() if value != ""),
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            return True

        if kind == "image":
            return send(body=image)
        if kind.startswith("header-"):
            return send(body=image, Content_Encoding=kind[7:].replace("empty", " "))
        if kind == "long":
            return send(body=image, X_Long="x" * 20_000)
        if kind == "idna":  # to a host whose name can't be decoded
            return send("302 Found", Location="http://xn--a/")
        if kind == "type":
            return send(body=image, Content_Type="text/plain")
        if kind == "slow":
            send(length=len(image))
            for start in range(0, len(image), len(image) // 5):
                await asyncio.sleep(0.05)
                writer.write(image[start : start + len(image) // 5])
            return True
        if kind == "close":  # the body ends with the connection
            send(body=image, length="", Connection="close")
            return False
        if kind == "chunked":
            send(length="", Transfer_Encoding="chunked")
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(image), image))
            return True
        if kind == "hop":  # to another spelling of the same host, then further
            return send(
                "302 Found",
                Location=f"/image/{number}" if path.endswith("#") else f"../image/{number}",
            )
        if kind.startswith("moved-"):  # to an image if a number is given, else to nowhere
            return send(f"{kind[6:]} Moved", Location=f"/image/{number}" if rest else "")
        if kind == "busy":  # once
            return (
                send(body=image)
                if self.requests[path] > 1
                else send("429 Too Many Requests", Retry_After="1")
            )
        if kind == "flaky":  # twice
            return send(body=image) if self.requests[path] > 2 else send("503 Service Unavailable")
        if kind == "otherbot":
            return send(body=image, X_Robots_Tag="otherbot: noai, noindex")
        if kind == "stall":  # for ever, in the middle of the body
            send(length=len(image))
            writer.write(image[:100])
            await asyncio.sleep(3600)
        if kind == "mute":
            await asyncio.sleep(3600)
        if kind == "drip":  # never idle and never done
            writer.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
            while True:
                await asyncio.sleep(0.1)
                writer.write(b"x")
                await writer.drain()
        if kind == "break":
            send(body=image[: len(image) // 2], length=len(image))
            return False
        if kind == "breakchunk":
            send(length="", Transfer_Encoding="chunked")
            writer.write(b"%x\r\n%b\r\n" % (len(image), image))
            return False
        if kind == "short":  # announces half the length
            send(body=image, length=len(image) // 2)
            return False
        if kind == "cut":  # the connection ends with half of the body
            send(body=image[: len(image) // 2], length="", Connection="close")
            return False
        if kind == "html":
            return send(body=b"<html><body>Sorry</body></html>", Content_Type="text/html")
        if kind == "eps":
            return send(body=EPS)
        if kind == "circle":
            return send("302 Found", Location="/circle/")
        if kind == "private":
            return send("302 Found", Location=f"http://127.0.0.2:{self.port}/image/0")
        if kind == "mapped":
            return send(
                "307 Temporary Redirect", Location=f"http://[::ffff:127.0.0.2]:{self.port}/image/0"
            )
        if kind == "file":
            return send("301 Moved Permanently", Location="file:///etc/passwd")
        if kind == "later":
            return send("429 Too Many Requests", Retry_After="3600")
        if kind == "broken":
            return send("500 Internal Server Error")
        if kind == "endless":
            send(length="", Transfer_Encoding="chunked")
            while self.sent < 8_000_000_000:
                writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
                await writer.drain()
                self.sent += 65536
        if kind == "huge":
            send(body=image, length=2_000_000_000)
            await asyncio.sleep(3600)
        if kind == "bomb":
            return send(body=make_bomb(), Content_Encoding="gzip")
        if kind == "pixels":
            return send(body=make_pixel_bomb())
        if kind == "noai":
            return send(body=image, X_Robots_Tag="all, NoAI")
        return send("404 Not Found")
