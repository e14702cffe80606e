"""download_images.py against img2dataset, on the same images from a server on this machine.

    python benchmarks/downloads.py                                          # ours alone
    python -m venv other && other/bin/pip install img2dataset               # needs older libraries
    python benchmarks/downloads.py --img2dataset other/bin/img2dataset

Two photographs of 1365 x 910 px are downloaded again and again. They are stored unchanged, and
shrunk to a short side of 512 px. The two programs take turns. CPU time is that of the whole
machine, including the server, so nothing else should run.
"""

import functools
import http.server
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import bench
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from precompute_speed import make_photos

# For each program: its flags for --resize_to 512, and for unchanged files.
SHRINK = {
    "ours": (["--resize_to=512"], []),
    "img2dataset": (
        [
            "--resize_mode=keep_ratio",
            "--resize_only_if_bigger=True",
            "--image_size=512",
            "--encode_quality=95",
        ],
        ["--resize_mode=no", "--skip_reencode=True"],
    ),
}


def serve(photos):
    """Serve the photos at every address; returns the server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            photo = photos[int(self.path.rsplit("/", 1)[1]) % len(photos)]
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", str(len(photo)))
            self.end_headers()
            self.wfile.write(photo)

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 1024

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make_command(way, table, out, shrinks, cli):
    """Return the command of a program."""
    cores, each = len(os.sched_getaffinity(0)), max(1, cli.rows // 8)
    if way == "ours":
        command = [
            sys.executable,
            bench.ROOT / "download_images.py",
            "--input",
            table,
            "--output_dir",
            out,
        ]
        command += [
            "--allow_private_addresses",
            "--connections=64",
            "--per_host=64",
            f"--rows_per_shard={each}",
        ]
        return [*command, f"--num_cpus={cores}", *SHRINK[way][not shrinks]]
    command = [
        cli.img2dataset,
        "--url_list",
        table,
        "--output_folder",
        out,
        "--input_format=parquet",
    ]
    command += [
        "--output_format=parquet",
        "--caption_col=text",
        f"--number_sample_per_shard={each}",
    ]
    return [*command, "--thread_count=64", f"--processes_count={cores}", *SHRINK[way][not shrinks]]


def count_images(folder):
    """Count the images in the shards of either program."""
    tables = [pq.read_table(path) for path in Path(folder).glob("*.parquet")]
    return sum(
        table["status"].to_pylist().count("success")
        if "status" in table.schema.names
        else len(table)
        for table in tables
    )


def count_cpu():
    """Return the CPU seconds of all processes on all cores, including Ray's niced workers."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)


def measure(way, table, shrinks, cli):
    """Return (wall, CPU) seconds of a run, and exit if an image is missing."""
    with tempfile.TemporaryDirectory() as work:
        before, start = count_cpu(), time.perf_counter()
        command = make_command(way, table, f"{work}/out", shrinks, cli)
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=work)
        wall, cpu = time.perf_counter() - start, count_cpu() - before
        if done.returncode or count_images(f"{work}/out") != cli.rows:
            sys.exit(f"{way} did not get all images: {done.stdout[-500:]} {done.stderr[-1000:]}")
        return wall, cpu


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size=None, mixed_precision=None, batch_size=None, steps=None
    )
    parser.add_argument("--rows", type=int, default=4000, help="images to download")
    parser.add_argument("--img2dataset", help="command of img2dataset (default: do not compare)")
    cli = parser.parse_args(argv)
    server = serve(list(make_photos(1365)))
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/urls.parquet"
        urls = [f"http://127.0.0.1:{server.server_port}/{i}" for i in range(cli.rows)]
        pq.write_table(pa.table({"url": urls, "text": urls}), table)
        runs = {
            (way, shrinks): functools.partial(measure, way, table, shrinks, cli)
            for shrinks in (False, True)
            for way in ["ours"] + ["img2dataset"] * bool(cli.img2dataset)
        }
        found = bench.interleaved(runs, cli.rounds)
    server.shutdown()
    rows = []
    for (way, shrinks), times in found.items():
        wall, cpu = zip(*times, strict=True)
        what = "shrunk to 512 px" if shrinks else "as they came"
        rows.append(
            [
                what,
                way,
                bench.spread([cli.rows / x for x in wall], "{:.0f}"),
                bench.spread(cpu, "{:.1f}"),
            ]
        )
    bench.show(bench.machine(), ["images", "program", "images/s", "CPU, s"], rows)


if __name__ == "__main__":
    main()
