"""Serve the digits on this machine, and a table of their URLs, for the demo of download_images.py.

    python demo/serve_digits.py

It ends with Ctrl-C, or when its standard input is closed.
"""

import csv
import http.server
import io
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq

ADDRESS = "127.0.0.1", 8747


def list_files() -> dict[str, bytes]:
    """{path of a URL: content}."""
    rows = pq.read_table(Path(__file__).parent / "digits/train.parquet").to_pylist()
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["url", "text"])
    files = {}
    for number, row in enumerate(rows):
        path = f"/{number}.png"
        files[path] = row["image"]["bytes"]
        writer.writerow(["http://{}:{}{}".format(*ADDRESS, path), row["text"]])
    return files | {"/digits.csv": table.getvalue().encode()}


class Handler(http.server.BaseHTTPRequestHandler):
    files = list_files()

    def do_GET(self) -> None:
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for each request."""


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(ADDRESS, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("Serving http://{}:{}/digits.csv".format(*ADDRESS), flush=True)
    sys.stdin.read()
