"""A server in front of the S3 server, with faults on demand.

    python faulty_server.py PORT ADDRESS FAULTS

FAULTS is a JSON file, read at each request: {end of a key: the faults of its next GETs, in order}.
Faults are "503", "gone", "wrong" (bytes), "cut" (in the middle), "hang" (no answer) and "expired".
With {"": rate}, this share of all requests fails at random, before its effect ("503", "reset") or
after it ("lost": no answer). Requests are logged in FAULTS.log.
"""

import collections
import http.client
import json
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, ADDRESS, FAULTS = sys.argv[1:]
done = collections.Counter()
CODES = {"503": (503, "SlowDown"), "gone": (404, "NoSuchKey"), "expired": (400, "ExpiredToken")}


def choose_fault(method, key):
    faults = json.loads(Path(FAULTS).read_text())
    rate = faults.pop("", 0)
    for end, planned in faults.items():
        if key.endswith(end) and method == "GET" and done[end] < len(planned):
            done[end] += 1
            return planned[done[end] - 1]
    return random.choice(["503", "reset", "lost"]) if random.random() < rate else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def say(self, status, body, headers=(), length=None):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self):
        key = self.path.partition("?")[0]
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        fault = choose_fault(self.command, key)
        with open(f"{FAULTS}.log", "a") as log:
            log.write(f"{self.command} {key}\n")
        if fault in CODES:
            status, code = CODES[fault]
            return self.say(
                status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            )
        if fault == "hang":
            time.sleep(60)
        if fault == "reset":
            self.close_connection = True
            return None
        server = http.client.HTTPConnection(ADDRESS.removeprefix("http://"))
        server.request(self.command, self.path, sent, dict(self.headers))
        answer = server.getresponse()
        status, body, found = answer.status, answer.read(), answer.headers
        server.close()
        kept = [
            (name, value)
            for name, value in found.items()
            if name in ("ETag", "Last-Modified", "Content-Range", "Content-Type")
        ]
        if fault == "wrong":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "cut":
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
        if fault in ("cut", "lost"):
            self.close_connection = True
            return None
        length = found.get("Content-Length", "0") if self.command == "HEAD" else None
        return self.say(status, body, kept, length)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()
