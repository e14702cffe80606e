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
from diffusion_training.errors.sentences import Refused, fail, in_one_sentence

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
import download_images  # noqa: E402
import precompute_latents  # noqa: E402
import precompute_latents_ray  # noqa: E402
import train_on_ray  # noqa: E402


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
    context = argparse.Namespace(get_node_id=int, gcs_address="127.0.0.1:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
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


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ray_starts_has_its_own_status(calls, monkeypatch, number, code):
    """Ray replaces the handler of SIGTERM before it is ready."""
    ends = []
    monkeypatch.setattr(module.atexit, "register", ends.append)  # would end the tests
    start = ray.init
    monkeypatch.setattr(ray, "init", lambda *args, **options: [
        start(*args, **options), signal.raise_signal(number)])  # fmt: skip
    run = in_one_sentence(lambda args: module.connect(None, []))
    with pytest.raises(SystemExit) as stop:
        run(argparse.Namespace())
    assert stop.value.code == code and len(ends) == 1


STOPPED = """
import argparse, os, signal, threading
import ray._private.worker as worker
from diffusion_training.cluster.connection import connect
from diffusion_training.errors.sentences import in_one_sentence

begin = worker.connect

def interrupted(*args, **options):
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
    return begin(*args, **options)

worker.connect = interrupted
in_one_sentence(lambda args: connect(None, []))(argparse.Namespace())
"""


@pytest.mark.long
def test_a_real_ray_that_is_stopped_while_it_starts_does_not_abort(tmp_path):
    """Python's own end would abort, with the status 134, in a Ray that has only half begun."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", STOPPED]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 143, run.stderr
    assert "Stopped by SIGTERM; saved files are complete" in run.stdout


def test_a_run_that_is_refused_after_it_has_connected_reports_no_death_of_ray(calls, monkeypatch):
    watched = []
    node = {"NodeID": 0, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": 1}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(module, "watch_ray", lambda *places: watched.append(places))

    @in_one_sentence
    def main(args):
        module.connect(None, [])
        fail("Ray has 2 CPUs")

    with pytest.raises(SystemExit):
        main(argparse.Namespace())
    [(raylet, gcs, ended)] = watched
    assert (raylet, gcs) == (("127.0.0.1", 1), ("127.0.0.1", 6379)) and ended.is_set()


@pytest.mark.parametrize("script, argv", [
    (download_images, []),
    (precompute_latents_ray, []),
    (train_on_ray, ["--max_workers=2", str(ROOT / "train_unconditional.py")]),
])  # fmt: skip
def test_an_empty_address_is_refused(script, argv, capsys):
    """For example, that of a variable which is not set."""
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["--address=", *argv])
    assert stop.value.code == 2 and "--address is empty: leave it out" in capsys.readouterr().err


def test_a_head_node_that_does_not_answer_ends_the_program_before_ray_does(monkeypatch, capsys):
    """It may be restarted, and the raylet lives a while longer."""
    now, down = [0], []

    def wait(seconds):
        now[0] += seconds
        return now[0] > 200

    def connect(place, timeout):
        if place == ("head", 6379) and now[0] in down:
            raise TimeoutError("timed out")
        return argparse.Namespace(close=lambda: None)

    ended = argparse.Namespace(wait=wait, is_set=lambda: False)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(os, "_exit", sys.exit)
    down += [*range(10, 50), *range(60, 100)]
    module.watch_ray(("here", 1), ("head", 6379), ended)
    assert now[0] == 201 and capsys.readouterr().err == ""
    now[0] = 0
    down += range(100, 120)
    with pytest.raises(SystemExit) as stop:
        module.watch_ray(("here", 1), ("head", 6379), ended)
    said = capsys.readouterr().err
    assert stop.value.code == 1 and 59 + 0.75 * 60 <= now[0] < 59 + 60
    assert "Ray's head node does not answer at head:6379 (timed out); saved files" in said


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
        module.watch_ray(place, (*place,), ended)
        assert len(looks) == 6  # at both processes
    del looks[:]
    with pytest.raises(SystemExit) as stop:
        module.watch_ray(place, (*place,), ended)
    assert stop.value.code == 1 and len(looks) == 1
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "the raylet, has died" in said
    assert said.endswith("saved files are complete: start Ray again if you had started it, and "
                         "the same command continues")  # fmt: skip
    del looks[:]
    ended.is_set = lambda: True
    module.watch_ray(place, (*place,), ended)
    assert capsys.readouterr().err == ""


LOST = """
import sys, time
import psutil, ray
from diffusion_training.cluster.connection import connect

connect(None, [], num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
[process] = [each for each in psutil.Process().children() if each.name() == sys.argv[1]]
process.kill()
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("name, said_first", [
    ("raylet", "lost.py: Ray's process on this machine"),
    ("gcs_server", "lost.py: Ray's head node does not answer at "),
])  # fmt: skip
def test_a_process_of_ray_that_is_killed_leaves_one_sentence_and_no_log(tmp_path, name, said_first):
    """Of a Ray that the script has started; its agents may print other lines on a cluster."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "20"  # shorter than usual
    environment |= {"PYTHONPATH": str(ROOT)}
    environment.pop("RAY_enable_pipe_based_agent_to_parent_health_check", None)
    (tmp_path / "lost.py").write_text(LOST)
    command = [sys.executable, tmp_path / "lost.py", name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    said = (ended.stdout + ended.stderr).strip()
    assert said.startswith(said_first) and "\n" not in said, said
