"""What rows of a data set may name: no pipe, no private host, no bucket, unless it is allowed."""

import http.server
import io
import json
import os
import re
import socket
import threading
import zipfile

import datasets
import fsspec
import pytest
from conftest import MODELS, TRAINING, Script, make_unet_config
from PIL import Image

from diffusion_training import addresses
from diffusion_training.addresses import Offline, Unreached
from diffusion_training.arguments import Flags
from diffusion_training.data.flags import list_allowed
from diffusion_training.data.images import open_file
from diffusion_training.errors.faults import is_machines_fault

precompute, train = Script("precompute_latents"), Script("train_unconditional")
SECRETS = ("PASSWORD", "SIGNATURE")


def encode_image(value):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (value, 90, 200)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def without_waits(monkeypatch):
    """No host has answered yet, and a server's fault is tried again at once."""
    monkeypatch.setattr(addresses, "ANSWERED", {})
    monkeypatch.setattr(addresses, "SILENT", set())
    monkeypatch.setattr(addresses, "WAITS", {Unreached: (0, 0), Offline: (0, 0, 0, 0)})


class Answers(http.server.BaseHTTPRequestHandler):
    """/404, /503 and so on have this status; /to?PATH redirects; others are images."""

    def do_GET(self):
        self.server.asked.append(self.path)
        word = re.split("[?;]", self.path)[0].strip("/")
        body = encode_image(int(word) % 256 if word.isdigit() else 0)
        status = int(word) if word in ("404", "403", "503", "429") else 200
        if self.server.faults:
            status = self.server.faults.pop()
        if word == "to":
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            body = b""
        else:
            self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.asked, server.faults = [], []
        server.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read(path, *allowed):
    with open_file(str(path), allowed) as file:
        return file.read()


def test_rows_read_files_of_the_disk_and_of_archives(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("in/a?#.png", b"packed")
    for path in ("", "file://", "local://"):
        assert read(f"{path}{tmp_path}/a.png") == b"picture"
    assert read(f"zip://in/a?#.png::{tmp_path}/b.zip") == b"packed"
    assert read(f"zip://in/a?#.png::file://{tmp_path}/b.zip") == b"packed"
    with pytest.raises(FileNotFoundError) as gone:
        read(tmp_path / "gone.png")
    assert isinstance(gone.value.errno, int)


@pytest.mark.parametrize("how", ["{}", "file://{}", "local://{}", "zip://a.png::{}",
                                 "zip://a.png::file://{}", "gzip://a::local://{}"])  # fmt: skip
def test_no_row_reads_a_pipe_or_a_device(tmp_path, how):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match="it is not a file"):
            read(how.format(path))


@pytest.mark.parametrize("path", [
    "s3://bucket/a.png", "memory://a.png", "github://org:repo@main/a.png", "hf://datasets/me/b/a",
    "ftp://host/a.png", "sftp://host/a.png", "ssh://host/a", "smb://host/a", "data:image/png,x://",
    "simplecache::http://8.8.8.8/a.png", "filecache::s3://bucket/a", "zip://a.png::s3://bucket/b.zip",
    "reference://a::s3://bucket/b", "zip://a::memory://b.zip", "dir://a::s3://bucket/b",
])  # fmt: skip
def test_rows_may_name_other_addresses_only_where_the_user_allows_it(path, monkeypatch):
    def connect(*args, **options):
        raise ConnectionError("it was opened")

    monkeypatch.setattr(fsspec, "url_to_fs", connect)
    with pytest.raises(ValueError, match="only of http and https: allow others with --allow_addre"):
        read(path, "s3://bucket-of-mine", "s3://bucke", "hf://datasets/me/other", "http://8.8.8.8")
    with pytest.raises((ConnectionError, Unreached), match="it was opened|can't be reached"):
        read(path, path.rpartition("/")[0] if path.count("/") > 2 else path)


def test_private_hosts_are_refused_also_after_a_redirect(server, monkeypatch):
    where = server.address
    refused = [
        f"{where}/1", f"{where}/1?a=b", where.replace("127.0.0.1", "localhost") + "/1",
        where.replace("127.0.0.1", "2130706433") + "/1", f"zip://a::{where}/1",
        where.replace("http://", "http://me:b@") + "/1",
    ]  # fmt: skip
    for path in refused:
        with pytest.raises(ValueError, match="private address|no valid address"):
            read(path, f"{where}0", "http://127.0.0", f"{where}/2")
    assert not server.asked
    assert read(f"{where}/1", where) == read(f"{where}/1", f"{where}/1") == encode_image(1)
    # a public host that redirects to a private one: only the first connection is allowed
    real, seen = addresses.check_address, []

    def check(address, allowed):
        seen.append(address)
        if len(seen) > 1:
            real(address, allowed)

    monkeypatch.setattr(addresses, "check_address", check)
    other = where.replace("127.0.0.1", "localhost")
    with pytest.raises(ValueError, match="private address"):
        read(f"{where}/to?{other}/5")
    assert "/5" not in server.asked


def test_what_a_server_answers_is_the_rows_fault_or_is_tried_again(server):
    for path in ("404", "404?id=1", "403?a*b[c]"):
        with pytest.raises(ValueError, match=f"^HTTP {path[:3]}$"):
            read_public(server, path)
    for path in ("503", "429?x=1"):
        with pytest.raises(Unreached, match=f"^HTTP {path[:3]}$"):
            read_public(server, path)
    assert read_public(server, "7?id=1") == encode_image(7)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreached, match="its server can't be reached"):
            read_public(server, "1")
    server.address = "http://no-such-host.invalid"
    addresses.ANSWERED.clear()
    with pytest.raises(Unreached, match="its server can't be reached"):
        read_public(server, "1?a=b")


def test_a_servers_fault_is_tried_again(server):
    server.faults += [503, 503, 429, 429]  # the size is asked for twice
    assert read_public(server, "7") == encode_image(7)
    server.faults += 6 * [503]
    with pytest.raises(Unreached, match="^HTTP 503$"):
        read_public(server, "8")
    assert server.faults == [] and not is_machines_fault(Unreached("HTTP 503"))


def test_a_lost_network_is_no_fault_of_a_row(server):
    """But a host that is gone is, while another one answers."""
    working = server.address
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}"

    def read_from(address, path):
        server.address = address
        return read_public(server, path)

    for path in ("1", "1", "2", "3"):  # before any host has answered
        with pytest.raises(Unreached):
            read_from(gone, path)
    with pytest.raises(Offline, match="127.0.0.1 can't be reached, nor can any other server"):
        read_from(gone, "4")
    assert read_from(working, "7") == encode_image(7)
    for path in "12345":
        with pytest.raises(Unreached):
            read_from(gone, path)
    server.shutdown()
    server.server_close()
    for address in (gone, "http://no-such-host.invalid", working):
        with pytest.raises(Offline) as raised:
            read_from(address, "6")
        assert is_machines_fault(raised.value)


def test_a_trainer_ends_where_the_network_is_lost(tmp_path, server):
    """No row is left out of a step. The first four rows can be read."""
    names = [f"{server.address}/{number}" for number in range(8)]
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"image": names}).to_parquet(tmp_path / "data/a.parquet")
    server.faults = Closing(server, answers=8)  # a request for the size, and one for the content
    error = train.refused(
        *TRAINING, f"--output_dir={tmp_path / 'out'}", "--image_column=image",
        f"--train_data_dir={tmp_path / 'data'}", f"--allow_addresses={server.address}",
        f"--model_config_name_or_path={make_unet_config(tmp_path)}", "--resolution=16",
        "--train_batch_size=4", "--max_train_steps=4", "--dataloader_num_workers=0",
    )  # fmt: skip
    assert "127.0.0.1 can't be reached, nor can any other server" in error
    assert "check the network, then run the command again" in error and "Traceback" not in error
    assert "Skipped" not in error


class Closing:
    """Faults of a server that takes no connections after so many answers."""

    def __init__(self, server, answers):
        self.server, self.answers = server, answers

    def __bool__(self):
        self.answers -= 1
        if self.answers < 0:
            self.server.shutdown()
            self.server.server_close()
        return self.answers < 0

    def pop(self):
        return 503


def read_public(server, path):
    """As if the server were a public one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(addresses, "check_address", lambda address, allowed: None)
        return read(f"{server.address}/{path}")


def test_a_data_set_of_the_hub_may_name_its_own_files():
    flags = Flags(dataset_name="me/photos", allow_addresses=["s3://mine"])
    assert list_allowed(flags) == ("s3://mine", "hf://datasets/me/photos")
    assert addresses.is_below("hf://datasets/me/photos@main/a.png", "hf://datasets/me/photos")
    assert not addresses.is_below("hf://datasets/me/photos2/a.png", "hf://datasets/me/photos")


def test_a_cache_of_addresses_keeps_its_secrets_and_skips_what_rows_may_not_name(
    tmp_path, server, capfd
):
    os.mkfifo(tmp_path / "pipe")
    where = server.address.replace("http://", "http://me:PASSWORD@")
    good = [f"{where}/{number}?id={number}&sig=SIGNATURE" for number in range(1, 9)]
    bad = [
        f"{where}/404?sig=SIGNATURE", f"{where}/404;SIGNATURE", f"{where}/503?SIGNATURE",
        f"file://{tmp_path}/pipe", "s3://me:PASSWORD@bucket/a?SIGNATURE", f"local://{tmp_path}/pipe",
        "iVBORw0KGgo" + "A" * 100_000,
    ]  # fmt: skip
    (tmp_path / "data").mkdir()
    names = {"image": [*good, *bad], "text": ["a"] * len(good + bad)}
    datasets.Dataset.from_dict(names).to_parquet(tmp_path / "data/a.parquet")
    flags = precompute.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'data'}",
        "--image_column=image",
        f"--pretrained_model_name_or_path={MODELS}",
        f"--allow_addresses={where}",
        "--max_skipped=0.6",
    )
    precompute(*flags)
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert len({*rows["key"]}) == 8 and all(
        key.startswith(f"{server.address}/{number}~") for number, key in enumerate(rows["key"], 1)
    )
    skipped = [json.loads(line) for line in open(tmp_path / "out/skipped.jsonl")]
    reasons = [entry["reason"] for entry in skipped]
    said = capfd.readouterr()
    assert [reason.split(":")[0] for reason in reasons] == [
        "HTTP 404", "HTTP 404", "not read", "it is not a file",
        "rows may name addresses only of http and https", "it is not a file",
        "it is text, such as base64",
    ]  # fmt: skip
    assert skipped[-1]["key"] == "row 14"
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert secret not in said.out + said.err
        assert not [content for content in written if secret.encode() in content]
    # the row of the server's fault is tried again, and those of base64 end in a short sentence
    error = precompute.refused(*flags, "--max_skipped=0.1")
    assert len(error.splitlines()[-1]) < 500 and "it is text, such as base64" in error
