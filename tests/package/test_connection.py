"""How the scripts start Ray or connect to it. A fake Ray records the calls."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, free_port

from diffusion_training.cluster import connection as module
from diffusion_training.errors.sentences import Refused

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
import download_images  # noqa: E402
import precompute_latents  # noqa: E402


def test_uv_run_does_not_make_ray_send_the_working_folder():
    """Ray would send it, with its data, to each worker, and start the worker with `uv run`."""
    assert not ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


@pytest.fixture
def calls(monkeypatch):
    """The calls to a fake Ray: [(name, arguments)]. Like the real one, it sets signal handlers."""
    calls, there = [], []

    def init(address, **options):
        calls.append(("init", address, options))
        there.append(True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    monkeypatch.setattr(ray, "is_initialized", lambda: bool(there))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: (calls.append(("shutdown",)), there.clear()))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: argparse.Namespace(get_node_id=int))
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return calls


def test_find_modules_lists_the_package_and_scripts_for_ray_workers():
    scripts = [str(ROOT / "download_images.py"), str(ROOT / "precompute_latents.py")]
    package = str(ROOT / "diffusion_training")
    found = module.list_own_modules(
        download_images.download_shard, precompute_latents.TransformedRows, Refused
    )
    assert found == sorted([package, *scripts]) and all(map(os.path.exists, found))
    assert module.list_own_modules(Refused, download_images.fail) == [package]


def test_connect_starts_ray_with_the_modules_and_shuts_it_down(calls):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    disconnect = module.connect(None, ["/a", "/b"], num_cpus=3)
    ((_, address, options),) = calls
    assert (
        address is None
        and options["runtime_env"] == {"py_modules": ["/a", "/b"]}
        and options["num_cpus"] == 3
    )
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    disconnect()
    assert calls[1:] == [("shutdown",)]


def test_connect_uses_a_running_ray_and_does_not_shut_it_down(calls):
    ray.init("of a notebook")
    del calls[:]
    module.connect(None, ["/a"])()
    assert calls == []


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_connect_fails_at_once_if_no_ray_is_at_the_address(calls, monkeypatch, way):
    begin, address = time.time(), f"127.0.0.1:{free_port()}"
    if way == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        SystemExit, match=rf"Ray can't be started or found at {address} \(.*refused"
    ):
        module.connect(address if way == "flag" else None, [])
    assert time.time() - begin < 60 and not calls  # Ray itself would look for minutes
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        module.connect(address, [])
    assert calls[0][:2] == ("init", address)


def test_an_error_of_ray_init_becomes_one_sentence(calls, monkeypatch):
    def init(*args, **options):
        raise ConnectionError("no node\nanywhere")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        SystemExit, match=r"Ray can't be started or found at auto \(no node anywhere\)"
    ):
        module.connect("auto", [])
    with pytest.raises(SystemExit, match=r"Ray can't be started \(no node"):
        module.connect(None, [])


def test_a_raylet_that_has_died_ends_the_program_in_one_sentence(monkeypatch, capsys):
    """While it listens, and after the run has disconnected, nothing happens."""
    looks = []
    ended = argparse.Namespace(wait=lambda seconds: len(looks) > 4, is_set=lambda: False)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with socket.socket() as raylet:
        raylet.bind(("127.0.0.1", 0))
        raylet.listen()
        place = raylet.getsockname()
        connect = socket.create_connection
        note = lambda *args, **options: looks.append(place) or connect(*args, **options)
        monkeypatch.setattr(socket, "create_connection", note)
        module.watch_raylet(place, ended)
        assert len(looks) == 5
    del looks[:]
    with pytest.raises(SystemExit) as stop:
        module.watch_raylet(place, ended)
    assert stop.value.code == 1 and len(looks) == 1
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "the raylet, has died" in said
    assert said.endswith("saved files are complete: start Ray again if you had started it, and "
                         "the same command continues")  # fmt: skip
    del looks[:]
    ended.is_set = lambda: True
    module.watch_raylet(place, ended)
    assert capsys.readouterr().err == ""


LOST = """
import time
import psutil, ray
from diffusion_training.cluster.connection import connect

connect(None, [], num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
[raylet] = [each for each in psutil.Process().children() if each.name() == "raylet"]
raylet.kill()
time.sleep(60)
"""


@pytest.mark.long
def test_a_raylet_that_is_killed_leaves_one_sentence_and_no_log(tmp_path):
    """Of a Ray that the script has started; its agents may print other lines on a cluster."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_enable_pipe_based_agent_to_parent_health_check", None)
    (tmp_path / "lost.py").write_text(LOST)
    command = [sys.executable, tmp_path / "lost.py"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    said = (ended.stdout + ended.stderr).strip()
    assert said.startswith("lost.py: Ray's process on this machine") and "\n" not in said, said
