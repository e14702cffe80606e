"""A server in front of the S3 server, with faults on demand.

    python faulty_server.py PORT ADDRESS FAULTS

FAULTS is a JSON file, read at each GET: {end of a key: the faults of its next GETs, in order}.
Faults are "503", "gone", "wrong" (bytes), "cut" (in the middle), "hang" (no answer) and "expired".
Requests are logged in FAULTS.log.
"""

import collections
import json
import sys
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, ADDRESS, FAULTS = sys.argv[1:]
done = collections.Counter()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def say(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        key = self.path.partition("?")[0]
        with open(f"{FAULTS}.log", "a") as log:
            log.write(f"{self.command} {key}\n")
        fault = None
        for end, faults in json.loads(Path(FAULTS).read_text()).items():
            if key.endswith(end) and self.command == "GET" and done[end] < len(faults):
                fault = faults[done[end]]
                done[end] += 1
        codes = {
            "503": (503, "SlowDown"),
            "gone": (404, "NoSuchKey"),
            "expired": (400, "ExpiredToken"),
        }
        if fault in codes:
            status, code = codes[fault]
            return self.say(
                status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            )
        if fault == "hang":
            time.sleep(60)
        names = ("Range", "Authorization", "x-amz-date", "x-amz-content-sha256", "Host")
        headers = {name: value for name in names if (value := self.headers.get(name))}
        request = urllib.request.Request(ADDRESS + self.path, headers=headers, method=self.command)
        try:
            with urllib.request.urlopen(request) as answer:
                status, body, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, body, found = error.code, error.read(), error.headers
        kept = [
            (name, value)
            for name, value in found.items()
            if name in ("ETag", "Last-Modified", "Content-Range")
        ]
        if fault == "wrong":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "cut":
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return None
        if self.command == "HEAD":
            self.send_response(status)
            for name, value in [*kept, ("Content-Length", found.get("Content-Length", "0"))]:
                self.send_header(name, value)
            self.end_headers()
            return None
        return self.say(status, body, kept)

    do_HEAD = do_GET


ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()
