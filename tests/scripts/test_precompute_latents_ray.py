"""A cache made on Ray has the bytes of precompute_latents.py, whichever process is killed."""

import argparse
import ast
import collections
import contextlib
import functools
import io
import json
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import fsspec
import pytest
import tiny_pipelines
import torch
from conftest import (
    CHILDREN,
    MODELS,
    ROOT,
    Script,
    copy_shard,
    finish,
    free_port,
    kill,
    make_captioned,
    make_images,
    make_klein,
    make_masked,
    make_qwen_image,
    make_sdxl,
    read_files,
    replace,
    reset,
    save_as_parquet,
    start,
    start_ray_node,
    wait_until,
)
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
# Without these Ray writes into the home folder, and sends statistics.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

import precompute_latents as single
import precompute_latents_ray as script
from diffusion_training.cluster import remote_cache, remote_rows
from diffusion_training.data.rows import load_rows
from diffusion_training.models import EXACT

NUM_ROWS, ROWS_PER_SHARD, ROWS_PER_PART = 26, 8, 4
ROUNDS = 20
# The modules that the script sends to its workers
MODULES = script.list_own_modules(script.Encoder, script.TransformedRows, script.Refused)


# Ray runs in child processes that import this file: with Ray's threads in the test process,
# the forks of other tests might hang.
HERE = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/scripts")]
CHILD = f"import sys; sys.path[:0] = {HERE}; import test_precompute_latents_ray as test; "


@pytest.fixture(scope="module")
def driver(storage):
    """driver(*argv, setup=None) runs the script in a process that has its own Ray.

    Returns (exit status, output).
    """
    # The paths of pytest's folders are too long for the names of sockets
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = [sys.executable, "-c", CHILD + "test.serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = os.environ | {"RAY_TMPDIR": folder}
    # Started in another folder: in the driver's, workers would import its files instead of
    # those that they are sent
    with subprocess.Popen(command, **pipes, env=env, cwd="/", start_new_session=True) as process:

        def drive(*argv, setup=None):
            pickle.dump(([str(arg) for arg in argv], setup and setup.__name__), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)

        drive.address = pickle.load(process.stdout)
        yield drive
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def serve():
    from ray.cluster_utils import Cluster

    global cluster
    signal.signal(signal.SIGALRM, stop_waiting)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    node = {
        "num_cpus": 2,
        "memory": 15 * 2**29,  # 7.5 GiB, on any machine
        "object_store_memory": 100 * 2**20,
        "include_dashboard": False,
        # Keep idle workers, because their imports take some seconds; notice lost nodes soon
        "_system_config": {"num_workers_soft_limit": 6, "health_check_period_ms": 500},
    }
    cluster = Cluster(True, head_node_args=node)
    disconnect = script.connect(cluster.address, MODULES)
    answer = cluster.address
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            argv, setup = pickle.load(sys.stdin.buffer)
            signal.alarm(900)  # stops a run that hangs
            answer = run(argv, setup and globals()[setup])
            signal.alarm(0)
    disconnect()
    cluster.shutdown()


def stop_waiting(number, frame):
    raise TimeoutError("it took too long")


def run(argv, setup=None):
    """Run the script in this process, changed by `setup()`. Returns (status, what it printed)."""
    reset()
    was = dict(vars(script))
    script.PART_BYTES = ROWS_PER_PART * 3 * 16 * 16
    # Workers do not have this file
    script.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if setup:
        setup()
        script.list_own_modules = lambda *objects: MODULES  # also for encoders of this file
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            script.main(script.parse_args(argv))
        return 0, said.getvalue()
    except SystemExit as stop:
        return stop.code, said.getvalue()
    finally:
        vars(script).update(was)


@pytest.fixture
def flags(tmp_path):
    """26 images, one broken, in 4 shards of 2 parts of 2 batches. Later flags override these."""
    make_captioned(
        tmp_path / "images",
        NUM_ROWS,
        [None if i == 13 else f"No. {i} \U0001f600\0" for i in range(NUM_ROWS)],
    )
    (tmp_path / "images/5.png").write_bytes(b"no image")
    return [
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        "--resolution=16",
        f"--output_dir={tmp_path / 'out'}",
        f"--rows_per_shard={ROWS_PER_SHARD}",
        "--batch_size=2",
        "--random_flip",
        "--latents=sample",
        "--max_skipped=0.2",
        f"--cache_dir={tmp_path / 'datasets-cache'}",
    ]


def precompute(*argv):
    """Run the other script, in this process."""
    Script("precompute_latents")(*argv, "--dataloader_num_workers=0")


@pytest.fixture
def whole(tmp_path, flags):
    """The files that precompute_latents.py makes."""
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    return read_files(tmp_path / "whole")


class Ref:
    """The result of a call without Ray, computed when it is read."""

    def __init__(self, function, *args):
        self.call = functools.cache(functools.partial(function, *args))


class InThread(Ref):
    """The result of a call that runs in a thread of its own, as the calls of an actor do."""

    pool = ThreadPoolExecutor(script.DEPTH)

    def __init__(self, function, *args):
        self.call = self.pool.submit(function, *args).result


class Remote:
    """Ray's interface of a function or a class, without Ray."""

    call_of_actor = Ref

    def __init__(self, what, call=Ref):
        self.what, self.call = what, call

    def options(self, **options):
        return self

    def remote(self, *args):
        if not isinstance(self.what, type):
            if begin := getattr(getattr(self.what, "__self__", None), "begin", None):
                begin(*args)
            return self.call(self.what, *args)
        actor = self.what(*args)
        names = ("make", "try_batch_sizes")
        calls = {name: Remote(getattr(actor, name), self.call_of_actor) for name in names}
        return argparse.Namespace(**calls, __ray_ready__=Remote(lambda: True))


class Gauge:
    """Ray's interface of a gauge, without Ray."""

    values: dict[str, float | None] = {}

    def __init__(self, name, description):
        self.name = name

    def set(self, value):
        self.values[self.name] = value


@pytest.fixture
def without_ray(monkeypatch):
    """Runs the script as `driver` does, but without Ray: one shard at a time, in random order."""
    nodes, rng = [{"Alive": True, "Resources": {"CPU": 2, "memory": 2**34}}], random.Random(0)
    remote = script.ray.remote  # Ray's own decorator, which modules use that are imported late
    for name, value in {
        "get_gpu_ids": lambda: [],
        "nodes": lambda: nodes,
        "cluster_resources": lambda: nodes[0]["Resources"],
        "remote": lambda *decorated, **options: remote(*decorated) if decorated else Remote,
        "put": lambda x: x,
        "wait": lambda refs, **options: (rng.sample(refs, 1), []),
        "get": lambda ref: ref.call() if isinstance(ref, Ref) else ref,
    }.items():
        monkeypatch.setattr(script.ray, name, value)
    monkeypatch.setattr(script, "placement_group", lambda bundles: None)
    for place in (script, script.ray.util):
        monkeypatch.setattr(place, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(script, "PlacementGroupSchedulingStrategy", lambda group, **options: None)
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    once = lambda items, submit, most: ((item, submit(item).call(), None) for item in items)
    monkeypatch.setattr(remote_cache, "run_tasks", once)
    monkeypatch.setattr(script, "connect", lambda address, modules: lambda: None)
    yield lambda *argv, setup=None: run([str(arg) for arg in argv], setup)
    script.open_rows.cache_clear()


# ------------------------------------------------------------------- the same bytes


def test_any_number_of_ray_encoders_writes_the_same_cache_as_one_process(
    tmp_path, flags, whole, without_ray
):
    assert len(whole) == 4 + 6 and whole["skipped.jsonl"].count(b"\n") == 2
    for count in (1, 3):
        code, said = without_ray(
            *flags, f"--num_encoders={count}", f"--output_dir={tmp_path / str(count)}"
        )
        assert code == 0 and "Done: 24 rows, 2 skipped" in said, said
        assert "Next: python train_text_to_image.py --latents_dir " in said
        assert read_files(tmp_path / str(count)) == whole
    assert "3 encoders of 1 CPU threads" in said
    assert re.search(r"\d% waiting for images, [1-3] encoder", said), said
    assert not re.search(r"-\d+ starting", said), said
    gauges = {name.removeprefix("precompute_latents_"): Gauge.values[name] for name in Gauge.values}
    assert gauges["rows_done"] == NUM_ROWS and gauges["rows_per_second"] > 0
    assert 0 < gauges["waiting_share"] < 1
    assert 1 <= gauges["encoders_at_work"] <= 3 - gauges["encoders_waiting"]


class Torn(script.Encoder):
    """Two threads that assign the last task on the own core go on together, if both can."""

    meeting = threading.Barrier(2)

    @property
    def own_task(self):
        return self.last

    @own_task.setter
    def own_task(self, task):
        self.last = task
        try:
            self.meeting.wait(0.2)
        except threading.BrokenBarrierError:  # the other thread can't come
            self.meeting.reset()


def torn_encoder():
    script.Encoder = Torn


def test_shards_that_are_made_at_the_same_time_never_get_each_others_rows(
    tmp_path, flags, whole, without_ray, monkeypatch
):
    monkeypatch.setattr(Remote, "call_of_actor", InThread)
    code, said = without_ray(*flags, "--num_encoders=1", setup=torn_encoder)
    assert code == 0, said
    assert read_files(tmp_path / "out") == whole


class Rows:
    """Replaces a data set of Ray Data, without Ray."""

    def __init__(self, rows, override_num_blocks=None):
        self.rows = rows

    def map(self, stage, fn_kwargs=None, fn_constructor_args=(), **options):
        if isinstance(stage, type):
            stage = stage(*fn_constructor_args)
        return Rows(stage(row, **(fn_kwargs or {})) for row in self.rows)

    def iter_rows(self):
        return self.rows


def on_ray_data():
    import ray_data

    script.make_shards = ray_data.make_shards


def test_ray_data_benchmark_makes_the_same_cache(tmp_path, flags, whole, without_ray, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ray_data

    monkeypatch.setattr(ray_data, "NOTES", tmp_path)
    monkeypatch.setattr(ray_data.ray, "put", script.ray.put)
    monkeypatch.setattr(ray_data.ray, "get", script.ray.get)
    monkeypatch.setattr(ray_data.ray, "get_gpu_ids", list)
    monkeypatch.setattr(ray_data.ray.data, "from_items", Rows)
    code, said = without_ray(*flags, setup=on_ray_data)
    assert code == 0 and read_files(tmp_path / "out") == whole, said


@pytest.mark.long
def test_ray_data_benchmark_compares_speeds_and_tries_faults(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ray_data

    flags = [*ray_data.FLAGS, "--resolution=8", "--rows_per_shard=256"]
    rows = list(ray_data.measure_speed(flags, rounds=1))
    assert [row[1] for row in rows] == ["ray_core", "ray_data"]
    ended = ray_data.try_fault("ray_core", "exit", flags, limit=150)
    assert ended[2].startswith("status 0") and ended[3] == "8", ended


def use_base(make):
    """Flags of a pipeline that `make(folder)` saves."""
    return lambda folder: [f"--pretrained_model_name_or_path={make(folder / 'base')}"]


def use_sdxl(folder):
    """It has crops at random, and here images of two shapes."""
    make_images(folder / "images", 6, size=(20, 30))
    (folder / "base").mkdir()
    return use_base(make_sdxl)(folder)


def use_masks(folder):
    return [f"--train_data_dir={make_masked(folder / 'data')}", "--bucket_step=4"]


def edit_captions(folder, edit):
    path = folder / "images/metadata.jsonl"
    rows = [edit(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)))


def use_two_captions(folder):
    number = lambda row: int(row["file_name"].split(".")[0])
    more = lambda row: {"long": f"the {number(row)}"} | ({"text": None} if number(row) == 3 else {})
    edit_captions(folder, lambda row: row | more(row))
    return ["--caption_column", "text", "long", "--caption_weights", "2", "3"]


def use_recorded(name):
    """An encoder takes what the driver has found out by trying the text encoders."""

    def use(folder):
        long = {"text": "more tokens than are read " * 120}
        edit_captions(folder, lambda row: row | (long if row["file_name"] == "3.png" else {}))
        flags = use_base(tiny_pipelines.MAKE[name])(folder)
        return [*flags, "--resolution=32", "--no-random_flip", "--mixed_precision=bf16"]

    return use


KINDS = ("embeddings", "ids")
MOMENTS = ("--latents=moments", "--mixed_precision=bf16")
SAME_BYTES = {  # {name: (function that gives flags, more flags, words of cache.json)}
    "masks in several sizes": (use_masks, ["--resolution", "8", "16"], '"masks"'),
    "moments and ids": (
        lambda folder: [*MOMENTS, "--no-random_flip", "--batch_size=3"],
        ["--text_cache=ids"],
        '"latents": "moments"',
    ),
    "captions": (use_two_captions, [], '"captions"'),
    "captions without padding": (use_two_captions, ["--model_family=prx"], '"captions"'),
}
SLOW_SAME_BYTES = {
    name: (use_recorded(name), [], '"captions_cut": 1') for name in ("flux", "lumina2")
}
for kind in KINDS:
    text = [f"--text_cache={kind}"]
    SAME_BYTES[f"prx {kind}"] = (lambda folder: ["--model_family=prx"], text, '"ragged embeddings"')
    SLOW_SAME_BYTES[f"sdxl {kind}"] = (use_sdxl, [*MOMENTS, *text], '"sdxl"')
    # latents in patches with a scale per channel
    for name, make in {"klein": make_klein, "qwen_image": make_qwen_image}.items():
        case = (use_base(make), ["--latents=moments", *text], '"scaling_factor": [')
        SLOW_SAME_BYTES[f"{name} {kind}"] = case


@pytest.mark.parametrize(
    "name", [*SAME_BYTES, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW_SAME_BYTES)]
)
def test_ray_cache_has_the_bytes_of_one_process(tmp_path, flags, without_ray, name):
    use, more, words = (SAME_BYTES | SLOW_SAME_BYTES)[name]
    flags = [*flags, *use(tmp_path), *more]
    precompute(*flags, f"--output_dir={tmp_path / 'one'}")
    code, said = without_ray(*flags, "--num_encoders=2")
    one = read_files(tmp_path / "one")
    assert code == 0 and read_files(tmp_path / "out") == one, said
    described = [data.decode() for path, data in one.items() if path.endswith("cache.json")]
    assert described and all(words in text for text in described)
    if "captions_cut" in words:
        assert "1 of 24 captions have more than 4096 bytes, or more tokens than" in said


def test_ray_completes_several_resolutions_to_the_bytes_of_separate_runs(
    tmp_path, flags, without_ray
):
    """The other script was interrupted: one cache lacks two shards, the other one is missing."""
    for side in ("8", "16"):
        precompute(*flags, f"--resolution={side}", f"--output_dir={tmp_path / 'alone' / side}")
    flags += ["--resolution", "8", "16"]
    half = tmp_path / "out/8"
    shutil.copytree(tmp_path / "alone/8", half)
    (half / "state.json").unlink()
    (half / "data-00001-of-00004.arrow").write_bytes(b"half")
    (half / "data-00003-of-00004.arrow").unlink()
    code, said = without_ray(*flags, "--num_encoders=2")
    assert (
        code == 0
        and said.count("making it again") == 2
        and said.count("Done: 24 rows, 2 skipped") == 2
    ), said
    assert read_files(tmp_path / "out") == read_files(tmp_path / "alone")
    shutil.rmtree(tmp_path / "out/16")
    precompute(*flags)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "alone")


def test_ray_encoder_finds_batch_size_auto_and_later_runs_keep_it(tmp_path, flags, without_ray):
    flags += ["--batch_size=auto", "--rows_per_shard=12"]
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    code, said = without_ray(*flags)
    assert code == 0 and re.search(
        r"images  memory, GB  images/s\n +1 .*\n +2 .*\n +4 .*\n +8 .*\n +12 ", said
    ), said
    assert "Batch size: 12\n" in said and read_files(tmp_path / "out") == read_files(
        tmp_path / "whole"
    )
    (tmp_path / "out/data-00001-of-00003.arrow").unlink()
    code, said = without_ray(*flags)
    assert code == 0 and "Batch size: 12\n" in said and "memory, GB" not in said
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")
    code, said = without_ray(*flags, f"--output_dir={tmp_path / 'other'}", setup=other_models)
    assert (
        code == 1 and "the models on this node differ" in said and not (tmp_path / "other").exists()
    ), said


@pytest.mark.long
def test_batch_size_auto_works_on_real_ray(tmp_path, flags, driver):
    code, said = driver(*flags, "--batch_size=auto", "--rows_per_shard=4")
    assert (
        code == 0
        and "images  memory" in said
        and "Batch size: 4\n" in said
        and "Done: 24 rows" in said
    ), said


@pytest.mark.ci
def test_one_process_two_processes_and_ray_write_the_same_cache(tmp_path, flags, whole, driver):
    """A real Ray runs a copy of the script with another name in another folder.

    So workers can only import modules that were sent to them.
    """
    shutil.copy(ROOT / "precompute_latents_ray.py", tmp_path / "mine.py")
    command = [sys.executable, tmp_path / "mine.py", *flags, f"--address={driver.address}"]
    command.append("--num_encoders=2")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILDREN), str(ROOT)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd="/", env=env, **pipes) as alone:
        output = f"--output_dir={tmp_path / 'two'}"
        two = start(lambda: precompute(*flags, output), 2, log=tmp_path / "log")
        assert finish(two) == [0, 0], (tmp_path / "log").read_text()
        assert read_files(tmp_path / "two") == whole
        said, errors = alone.communicate()
    assert alone.returncode == 0 and "Done: 24 rows, 2 skipped" in said, errors
    assert "2 encoders of 1 CPU threads" in said
    assert "waiting for images" in errors
    assert read_files(tmp_path / "out") == whole


def one_part_a_shard():
    script.PART_BYTES = 2**26


@pytest.mark.long
def test_many_small_shards_on_real_ray_have_the_bytes_of_one_process_in_twenty_runs(
    tmp_path, driver
):
    """A shard of one task each: most tasks are assigned while another thread assigns one."""
    make_captioned(tmp_path / "images", 240)
    flags = [
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        "--resolution=16",
        "--rows_per_shard=5",
        "--batch_size=2",
        "--random_flip",
        f"--cache_dir={tmp_path / 'datasets-cache'}",
    ]
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    whole = read_files(tmp_path / "whole")
    for number in range(ROUNDS):
        out = tmp_path / f"out{number}"
        argv = [*flags, "--num_encoders=1", f"--output_dir={out}"]
        code, said = driver(*argv, setup=one_part_a_shard)
        assert code == 0, said
        found = read_files(out)
        assert [name for name in whole if found.get(name) != whole[name]] == []


def test_ray_demo_uses_the_flags_of_the_precompute_latents_demo(capsys):
    args = script.parse_args(["--num_encoders=3"])
    said = capsys.readouterr().out
    assert (
        "so this is the demo. The full command:\n"
        "python precompute_latents_ray.py --pretrained_model_name_or_path" in said
    )
    theirs = dict(vars(single.parse_args([])))
    for name in ("streaming", "import_latents"):
        assert theirs.pop(name) is False and name not in vars(args)
    assert args.num_encoders == 3
    assert all(getattr(args, name, None) == value for name, value in theirs.items())


loaded: list[torch.dtype] = []  # precisions, in the order in which models were loaded


def noting_encoder():
    load = script.load_encoders

    def load_encoders(base, dtype):
        loaded.append(dtype)
        return load(base, dtype)

    script.load_encoders = load_encoders


@pytest.mark.long
def test_ray_encoders_in_bf16_load_float32_only_for_rows_that_need_it(
    tmp_path, flags, without_ray, monkeypatch
):
    """And compare the models with the driver's in both precisions."""
    flags.append("--mixed_precision=bf16")
    low, exact = torch.bfloat16, torch.float32
    loaded.clear()
    code, said = without_ray(*flags, "--num_encoders=2", setup=noting_encoder)
    assert code == 0 and loaded == [EXACT, low, low, low], said  # the driver, two encoders
    encode_images = single.encode_images

    def overflow(encoders, pixel_values):
        latents = encode_images(encoders, pixel_values)
        is_row_9 = encoders.vae.dtype == low and pixel_values.max() > 175
        return latents * float("inf") if is_row_9 else latents

    monkeypatch.setattr(single, "encode_images", overflow)
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    flags.append(f"--output_dir={tmp_path / 'again'}")
    describe = script.describe_models

    def describe_other(encoders):
        sha256 = encoders.vae.dtype == exact and {"vae": {"sha256": "another"}}
        return describe(encoders) | (sha256 or {})

    monkeypatch.setattr(script, "describe_models", describe_other)
    code, said = without_ray(*flags)
    assert code == 1 and "could not be made: ValueError: the models on this node" in said, said
    monkeypatch.setattr(script, "describe_models", describe)
    loaded.clear()
    code, said = without_ray(*flags, setup=noting_encoder)
    assert code == 0 and loaded == [EXACT, low, low, exact], said
    assert read_files(tmp_path / "again") == read_files(tmp_path / "whole")


def test_both_cache_scripts_resume_and_repair_each_others_caches(
    tmp_path, flags, whole, without_ray, capsys
):
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    names = sorted(name for name in whole if name.endswith(".arrow"))
    (tmp_path / "out" / names[0]).unlink()
    (tmp_path / "out" / names[2]).write_bytes(whole[names[2]][:-8])
    before = {name: (tmp_path / "out" / name).stat().st_ino for name in (names[1], names[3])}
    code, said = without_ray(*flags)
    assert code == 0 and f"{names[0]} is gone" in said and f"{names[2]} is damaged" in said, said
    assert read_files(tmp_path / "out") == whole
    # Good files were not written again
    assert before == {name: (tmp_path / "out" / name).stat().st_ino for name in before}
    precompute(*flags)
    assert read_files(tmp_path / "out") == whole
    for make in (lambda *argv: without_ray(*argv)[1], precompute):
        wrong = copy_shard(tmp_path / "out", 0, 1)
        code, said = without_ray(*flags, "--dry_run")
        assert code == 0 and f"again, which this command does without --dry_run: {wrong}; " in said
        said = make(*flags) or capsys.readouterr().out
        assert f"{wrong} holds rows of another shard, such as " in said, said
        assert read_files(tmp_path / "out") == whole


# ------------------------------------------------------------------- killed processes


def marker(args, name):
    """A file next to --cache_dir, because --output_dir may be elsewhere."""
    return Path(args.cache_dir).parent / name


def dying_decoder(part, pickled):
    """A task that is killed once when it has decoded row 4."""
    done, mark = (
        script.decode_part(part, pickled),
        marker(pickle.loads(pickled).args, f"decoded-{part[0]}"),
    )
    if part[0] == 4 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return done


class Dies(script.Encoder):
    """An encoder that is killed once, when the file of the second shard is written.

    The driver does not know that the file exists, and the third shard is in work.
    """

    def __init__(self, job):
        super().__init__(job)
        self.decode_here = self.decode_anywhere = script.ray.remote(max_retries=0)(dying_decoder)

    def make(self, shard):
        result, done = super().make(shard), marker(self.job.args, "done")
        if shard[0] == 1 and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def kill_both():
    script.Encoder = Dies


def kill_both_and_hold_back():
    """Let the driver record only the first two shards, and then wait until it is killed."""
    kill_both()
    shards = script.make_shards

    def make_shards(*args):
        for number, made in shards(*args):
            if number < 2:
                yield number, made
        signal.pause()

    script.make_shards = make_shards


def start_driver(log, setup, *argv):
    """Start the script in a separate process, changed by a function of this file."""
    code = (
        CHILD
        + f"code, said = test.run(sys.argv[1:], test.{setup.__name__}); print(said); sys.exit(code)"
    )
    options = {"stdout": log.open("w"), "stderr": subprocess.STDOUT, "cwd": "/"}
    return subprocess.Popen([sys.executable, "-c", code, *argv], **options)


MARKS = {"done", "decoded-4"}


@pytest.mark.ci
def test_killed_ray_encoder_task_and_driver_do_not_change_the_cache(
    tmp_path, flags, whole, driver, bucket, request
):
    """The files of the killed driver, in a bucket, are complete, and the same command resumes."""
    flags.append("--output_dir=s3://bucket/latents")
    argv = [*flags, f"--address={driver.address}"]

    def drive():
        os.chdir("/")
        print(run(argv, kill_both_and_hold_back))

    process = start(drive, log=tmp_path / "log")
    record = "bucket/latents/unfinished/data-00002-of-00004.arrow.json"
    killed = lambda: MARKS < set(os.listdir(tmp_path)) and bucket.exists(record)
    wait_until(killed, 500)
    kill(process)
    made = objects(bucket, "bucket/latents")
    # a shard whose record is not there yet is made again
    shards = {name for name in made if f"unfinished/{name}.json" in made}
    assert {"data-00001-of-00004.arrow"} <= shards < whole.keys(), (tmp_path / "log").read_text()
    assert all(made[name] == whole[name] for name in shards) and "state.json" not in made
    times = {name: bucket.info(f"bucket/latents/{name}")["LastModified"] for name in shards}
    # only now, because the fork needs the real Ray
    without_ray = request.getfixturevalue("without_ray")
    code, said = without_ray(*flags)  # at once: the killed driver's workers may still run
    assert code == 0, said
    assert objects(bucket, "bucket/latents") == whole
    assert times == {name: bucket.info(f"bucket/latents/{name}")["LastModified"] for name in shards}


class DiesAlways(script.Encoder):
    def make(self, shard):
        if shard[0] == 1:
            with marker(self.job.args, "tries").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(shard)


def dying_encoder():
    script.Encoder = DiesAlways


class Gone(script.Encoder):
    """Fails as Ray does when the process of an encoder ends with the second shard.

    All shards that the encoder has are lost, and the first of them fails first.
    """

    gone = False

    def begin(self, shard):
        self.gone |= shard[0] == 1
        with marker(self.job.args, "tries").open("a") as file:
            file.write(str(shard[0]))

    def make(self, shard):
        if self.gone:
            raise script.ray.exceptions.RayActorError(None, "no memory")
        return super().make(shard)


def gone_encoder():
    script.Encoder = Gone
    script.ray.wait = lambda refs, **options: (refs[:1], [])


def test_rows_whose_encoder_dies_four_times_are_reported(tmp_path, flags, whole, without_ray):
    """Rows that were at the same encoder are not reported."""
    code, said = without_ray(*flags, setup=gone_encoder)
    assert (
        code == 1
        and "rows 8 to 15 could not be made: its process died 4 times, out of memory?" in said
    ), said
    assert (
        tmp_path / "tries"
    ).read_text() == "0120111" and "data-00000-of-00004.arrow" in os.listdir(tmp_path / "out")
    assert without_ray(*flags)[0] == 0 and read_files(tmp_path / "out") == whole


@pytest.mark.long
def test_real_ray_reports_rows_whose_encoder_dies_four_times(tmp_path, flags, whole, driver):
    code, said = driver(*flags, setup=dying_encoder)
    assert code == 1 and "rows 8 to 15 could not be made: its process died 4 times" in said, said
    assert (tmp_path / "tries").read_text() == "xxxx"


class Slow(script.Encoder):
    def decode(self, *args):
        for batch in super().decode(*args):
            time.sleep(0.3)
            yield batch


class Slowest(script.Encoder):
    def decode(self, *args):
        for batch in super().decode(*args):
            time.sleep(10)
            yield batch


def slow_encoder():
    script.Encoder = Slow


@pytest.mark.long
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_ray_run_soon_and_leaves_complete_files(
    tmp_path, flags, whole, driver, number, code
):
    log, out = tmp_path / "log", tmp_path / "out"
    process = start_driver(log, slow_encoder, *flags, f"--address={driver.address}")
    wait_until(lambda: list(out.glob("unfinished/data-*")) or process.poll() is not None, 120)
    begin = time.time()
    process.send_signal(number)
    assert process.wait(30) == code, log.read_text()
    assert (
        time.time() - begin < 15
        and f"Stopped by {number.name}; saved files are complete" in log.read_text()
    )
    assert not list(out.rglob(".tmp-*")) and 1 <= len(list(out.glob("data-*"))) < 4
    assert driver(*flags)[0] == 0 and read_files(out) == whole


# ------------------------------------------------------------------- errors


class Raises(script.Encoder):
    def decode(self, *args):
        for batch in super().decode(*args):
            if batch["row"][0] == 12:
                with marker(self.job.args, "tries").open("a") as file:
                    file.write("x")
                raise RuntimeError("CUDA error: too hot")
            yield batch


def raising_encoder():
    script.Encoder = Raises


def test_ray_reports_a_model_error_after_four_tries(tmp_path, flags, whole, without_ray):
    code, said = without_ray(*flags, setup=raising_encoder)
    assert (
        code == 1 and said.count("precompute_latents_ray.py:") == 1 and "Traceback" not in said
    ), said
    assert (
        "rows 8 to 15 could not be made: RuntimeError: CUDA error: too hot (on" in said
        and "tried 4 times" in said
    )
    assert (tmp_path / "tries").read_text() == "xxxx"
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("data-*")}
    assert all(
        whole[name] == data for name, data in made.items()
    ) and "state.json" not in os.listdir(tmp_path / "out")


def test_attempt_tries_four_times_and_returns_the_reason():
    calls = []

    def work(error=None):
        calls.append(error)
        if error is not None and len(calls) <= script.TRIES:
            raise error
        return "done"

    result, reason = script.attempt(lambda: work(RuntimeError("too\nhot")))
    assert (
        result is None
        and len(calls) == 4
        and re.match(r"RuntimeError: too hot \(on .*, tried 4 times", reason)
    )
    assert script.attempt(lambda: work(RuntimeError())) == ("done", None) and len(calls) == 5
    result, reason = script.attempt(lambda: script.fail("the disk is full"))
    assert result is None and reason.startswith("the disk is full (on ")
    with pytest.raises(KeyboardInterrupt):
        script.attempt(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def broken_decoder():
    def decode_part(part, pickled, real=script.decode_part):
        if part[0] == 20:
            raise MemoryError("no more of it")
        return real(part, pickled)

    script.decode_part = decode_part


def test_ray_reports_rows_that_could_not_be_decoded(tmp_path, flags, whole, without_ray):
    """All rows of the part are named. Other shards are made, and the same command resumes."""
    code, said = without_ray(*flags, setup=broken_decoder)
    assert (
        code == 1
        and "rows 16 to 23 could not be made: RuntimeError: rows 20 to 23 could not be decoded"
        in said
    )
    assert "no more of it" in said and not (tmp_path / "out/state.json").exists()
    assert without_ray(*flags)[0] == 0 and read_files(tmp_path / "out") == whole


def test_list_parts_splits_each_shard_into_parts_of_whole_batches(flags):
    job = argparse.Namespace(
        caches=[single.parse_args([*flags, "--rows_per_shard=100"])], num_rows=250, part_rows=48
    )
    assert script.list_parts((0, (0, 1)), job) == [
        (0, 48, (0, 1)),
        (48, 96, (0, 1)),
        (96, 100, (0, 1)),
    ]
    assert script.list_parts((2, (1,)), job) == [(200, 248, (1,)), (248, 250, (1,))]


def test_ray_tasks_decode_the_next_shard_while_one_is_encoded(flags, without_ray, monkeypatch):
    """Tasks are a few parts ahead of the encoder in each shard, and no two shards mix."""
    engine = script.Engine(1, 2, {}, 0)
    job = argparse.Namespace(
        caches=[single.parse_args(flags)], num_rows=24, part_rows=2, rows=None, threads=1
    )
    job.engine, job.locate = engine, lambda number, indices: {}
    encoder, given, encoded, steps = object.__new__(script.Encoder), [], [], threading.Semaphore(0)
    decode = Remote(lambda part, rows: [{"part": part}])
    task = argparse.Namespace(
        remote=lambda part, rows: given.append(part[0]) or decode.remote(part, rows)
    )
    vars(encoder).update(job=job, turn=threading.Lock(), reason=None, own_task=None)
    encoder.assigning = threading.Lock()
    vars(encoder).update(encoders=None, load_exact=None, device=None)
    vars(encoder).update(decode_anywhere=task, decode_here=task)

    def encode_all(batches, *models):
        for batch in batches:
            encoded.append(batch["part"][0])
            assert steps.acquire(timeout=20)
            yield batch

    monkeypatch.setattr(script, "encode_all", encode_all)
    monkeypatch.setattr(script, "write_each", lambda writing, paths, rows, encoded: list(encoded))
    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=encoder.make, args=((number, (0,)),)))
        threads[-1].start()
        wait_until(lambda: len(given) == 3 + 2 * number and encoded, 20)
    for step in range(12):
        wait_until(lambda: len(encoded) == step + 1, 20)
        shard, end = divmod(step, 4)
        of_shard = [first for first in given if first // 8 == encoded[-1] // 8]
        assert of_shard == sorted(of_shard) and len(of_shard) == min(4, end + 3)
        assert len(given) == 4 * shard + len(of_shard) + 2 * (2 - shard)
        steps.release()
    [thread.join(20) for thread in threads]
    assert [first // 8 for first in encoded[::4]] == [first // 8 for first in encoded[3::4]]
    assert sorted(encoded) == sorted(given) == list(range(0, 24, 2)) and not encoder.turn.locked()


def other_models():
    real = script.describe_models
    script.describe_models = lambda encoders: real(encoders) | {"vae": {"sha256": "another"}}


def test_ray_node_with_different_models_is_refused(tmp_path, flags, without_ray):
    code, said = without_ray(*flags, setup=other_models)
    differences = "(vae.class AutoencoderKL -> None, vae.sha256"
    assert code == 1 and f"node differ from the driver's {differences}" in said, said
    assert not list((tmp_path / "out").glob("data-*"))


def test_ray_workers_load_the_data_if_the_drivers_cache_is_missing(tmp_path, flags):
    args = single.parse_args(flags)
    rows = load_rows(args, others=["text"]).rows
    pickled = lambda fingerprint: pickle.dumps(
        script.PickledRows(args, [], None, fingerprint, pickle.dumps(rows))
    )
    assert len(pickle.dumps(rows)) < 20_000
    assert len(script.open_rows(pickled(rows._fingerprint)).rows) == NUM_ROWS
    script.open_rows.cache_clear()
    shutil.rmtree(tmp_path / "datasets-cache")
    assert len(script.open_rows(pickled(rows._fingerprint)).rows) == NUM_ROWS
    shutil.rmtree(tmp_path / "datasets-cache")
    with pytest.raises(ValueError, match="this node finds different data"):
        script.open_rows(pickled("another"))


def test_ray_refuses_changed_settings_too_many_bad_rows_and_locked_folders(
    tmp_path, flags, whole, without_ray
):
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    code, said = without_ray(*flags, "--seed=3")
    assert code == 1 and "transform.seed 0 -> 3" in said
    code, said = without_ray(*flags, "--max_skipped=0.01", f"--output_dir={tmp_path / 'other'}")
    assert code == 1 and "more than --max_skipped 0.01 allows" in said and said.count(".py:") == 1
    assert not list((tmp_path / "other").glob(".tmp-*"))
    code, said = without_ray(*flags, "--max_skipped=0.2", f"--output_dir={tmp_path / 'other'}")
    assert code == 0 and read_files(tmp_path / "other") == whole
    with FileLock(tmp_path / "out/.lock"):
        (tmp_path / "out/.tmp-of-another-run").touch()
        code, said = without_ray(*flags)
        assert code == 1 and "another process is writing" in said
        assert (tmp_path / "out/.tmp-of-another-run").exists()


@pytest.fixture
def plan(flags, monkeypatch):
    """plan(*argv, nodes=[(CPUs, GPUs), ...]) plans for such a cluster.

    Returns (engine, sentences). types: of the nodes' GPUs. memory: GB of each node.
    """

    def planned(*argv, nodes=((4, 0), (4, 0)), types=(), memory=20, weights=10**9):
        nodes = [{"CPU": cpus, "GPU": gpus, "memory": memory * 1e9} for cpus, gpus in nodes]
        total = {name: sum(node[name] for node in nodes) for name in nodes[0]}
        for node, kind in zip(nodes, types, strict=False):
            node |= {f"accelerator_type:{kind}": 1} if kind else {}
        found = [{"Alive": True, "Resources": node} for node in nodes]
        gone = {"Alive": False, "Resources": {"CPU": 99, "GPU": 99, "memory": 2**50}}
        monkeypatch.setattr(script.ray, "nodes", lambda: [*found, gone])
        monkeypatch.setattr(script.ray, "cluster_resources", lambda: total)
        return script.plan_engine(script.parse_args([*flags, *argv]), weights)

    return planned


def test_plan_engine_uses_all_cpus_and_gpus_of_ray(plan):
    engine, said = plan()
    assert said == ("Ray: 2 nodes, 8 CPUs, 0 GPUs; 1 encoders of 1 CPU threads")
    assert engine.ahead == 4  # of each of two shards
    assert (engine.place["CPU"], engine.place["GPU"]) == (1, 0)
    assert engine.place["memory"] - 2 * engine.task_memory == 10**9  # the weights
    engine, said = plan(nodes=((8, 4), (8, 4), (8, 0)))
    assert said.endswith("; 8 encoders of 1 GPUs") and engine.ahead == 2
    assert engine.place["GPU"] == 1 and engine.place.keys() == {"CPU", "GPU", "memory"}
    engine, said = plan("--gpus_per_encoder=0.5", nodes=((8, 4),), memory=40)
    assert said.endswith("; 8 encoders of 0.5 GPUs")
    engine, said = plan("--num_encoders=3", nodes=((99, 4),))
    assert said.endswith("; 3 encoders of 1 GPUs") and engine.ahead == 17
    engine, _ = plan("--gpus_per_encoder=0", "--num_encoders=2", nodes=((8, 4),))
    assert engine.place["GPU"] == 0
    types = {"nodes": ((8, 4), (8, 2), (8, 0)), "types": ("A100", "T4", None)}
    engine, said = plan("--accelerator_type=T4", **types)
    assert said.endswith("24 CPUs, 2 GPUs; 2 encoders of 1 GPUs")
    assert 0 < engine.place["accelerator_type:T4"] < 0.01


def test_plan_engine_fits_encoders_and_tasks_into_memory(plan):
    """An encoder takes 2.3 GB here, and a task 1.3 GB: 3.7 GB is the least."""
    # Eight GPUs, and memory for two encoders with a task each
    _, said = plan(nodes=((8, 8),), memory=10)
    assert said.endswith(
        "8 encoders of 1 GPUs\n"
        "Ray has a place for 2 of 8 encoders (1 GPUs, 1 CPU and 3.7 GB each); "
        "the others wait for more nodes"
    )
    _, said = plan("--gpus_per_encoder=0.6", nodes=((8, 4),))
    assert "; 4 encoders of 1 GPUs" in said  # no encoder uses parts of two GPUs
    _, said = plan("--num_encoders=4", nodes=((2, 0),))
    assert "a place for 2 of 4 encoders" in said  # each with a core for its task
    # A node of 6 GB, of which Ray gives out 3: an encoder, or a task
    with pytest.raises(SystemExit, match=r"need 0 GPUs, 1 CPU and 3.7 GB, and no node"):
        plan(nodes=((4, 0),), memory=3)
    _, said = plan("--num_encoders=1", nodes=((4, 0),), memory=3)
    assert "a place for 0 of 1 encoders" in said


def test_plan_engine_refuses_or_waits_for_missing_resources(plan):
    types = {"nodes": ((8, 4), (8, 2), (8, 0)), "types": ("A100", "T4", None)}
    for argv, options, said in [
        (
            ["--accelerator_type=H100"],
            types,
            "no node of Ray has --accelerator_type H100; there is A100, T4: if .* --num_encoders",
        ),
        (
            ["--accelerator_type=H100"],
            {},
            "no node of Ray has --accelerator_type H100; there is none",
        ),
        (["--accelerator_type=T4", "--gpus_per_encoder=3"], types, "a task need 3 GPUs, 1 CPU"),
        (
            ["--gpus_per_encoder=1"],
            {},
            "need 1 GPUs, 1 CPU and 3.7 GB, and no node of Ray has that: .* --num_encoders",
        ),
        ([], {"nodes": ((0, 0),)}, "need 0 GPUs, 1 CPU and 3.7 GB"),
        ([], {"weights": 2**35}, "^an encoder and a task need .* 37.0 GB, and no"),
        (["--gpus_per_encoder=2"], {"nodes": ((4, 1), (4, 1))}, "need 2 GPUs"),
        (["--mixed_precision=fp16"], {}, "fp16 does nothing on a CPU"),
    ]:
        with pytest.raises(SystemExit, match=said):
            plan(*argv, **options)

    # An autoscaling cluster: no GPU yet, or the head alone, which runs no tasks
    for argv in (["--gpus_per_encoder=1"], ["--accelerator_type=H100"]):
        for nodes in (((4, 0),), ((0, 0),)):
            engine, said = plan("--num_encoders=64", *argv, nodes=nodes)
            assert (engine.num_encoders, engine.place["GPU"]) == (64, 1)
            assert "; 64 encoders of 1 GPUs" in said and "a place for 0 of 64 encoders" in said


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--train_data_dir=nowhere"], "--train_data_dir nowhere is not a folder"),
        (["--train_data_dir=s3://a/b", "--dataset_split=test"], "--dataset_split is for folders"),
        (
            ["--output_dir=/tmp/ray/working_dir_files/x"],
            "Ray deletes /tmp/ray/working_dir_files/x after the job",
        ),
        (
            ["--train_data_dir=s3://a/b", "--output_dir=s3://a/b/c"],
            "--output_dir s3://a/b/c lies in --train_data_dir",
        ),
        (
            ["--train_data_dir=s3://a/b/", "--output_dir=s3://a/b"],
            "--output_dir s3://a/b lies in --train_data_dir",
        ),
        (["--mixed_precision=fp16", "--gpus_per_encoder=0"], "--mixed_precision fp16 needs GPUs"),
        (["--accelerator_type=T4", "--gpus_per_encoder=0"], "--accelerator_type chooses GPUs"),
        (["--num_encoders=0"], "--num_encoders: 0 is not between 1 and"),
    ],
)
def test_precompute_latents_ray_reports_bad_flags_in_one_line(argv, sentence):
    error = Script("precompute_latents_ray").refused(*argv, status=2)
    assert sentence in error.splitlines()[-1]


def test_output_dir_may_share_a_name_prefix_with_train_data_dir(flags):
    args = script.parse_args(
        [*flags, "--train_data_dir=s3://a/images", "--output_dir=s3://a/images-latents"]
    )
    assert args.output_dir == "s3://a/images-latents"


def test_make_absolute_changes_only_local_paths(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()  # also the name of a split, which is no path
    (tmp_path / "base.safetensors").touch()
    argv = [
        "--train_data_dir=images",
        "--vae_name_or_path=some/model",
        "--single_file_config=train",
    ]
    args = script.parse_args([*flags, *argv, "--pretrained_model_name_or_path=base.safetensors"])
    there = script.make_absolute(args)
    assert there.pretrained_model_name_or_path == str(tmp_path / "base.safetensors")
    assert there.train_data_dir == str(tmp_path / "images") and args.train_data_dir == "images"
    changed = {name for name in vars(args) if getattr(args, name) != getattr(there, name)}
    assert (
        changed == {"train_data_dir", "pretrained_model_name_or_path", "single_file_config"}
        and there.dataset_split == "train"
    )


def test_dry_run_needs_no_ray(flags, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(script.ray, "init", lambda *args, **options: pytest.fail("Ray was started"))
    Script("precompute_latents_ray")(*flags, "--dry_run")
    assert "26 rows of" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_only_precompute_latents_ray_imports_ray_at_its_start(monkeypatch):
    """The package imports Ray only inside functions."""
    for path in {*ROOT.glob("*.py"), *ROOT.glob("diffusion_training/**/*.py")} - {
        ROOT / "precompute_latents_ray.py"
    }:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "ray"], path
    monkeypatch.setitem(sys.modules, "ray", None)
    said = "^precompute_latents_ray.py: Ray is missing: pip install -r requirements-ray.txt$"
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(ROOT / "precompute_latents_ray.py"))


# ------------------------------------------------------------------- object storage


@pytest.fixture
def bucket(storage, tmp_path, flags):
    """An S3 file system with the images of `flags` in s3://bucket/images.

    They are stored as download_images.py would write them.
    """
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem(
        skip_instance_cache=True, use_listings_cache=False
    )
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    save_as_parquet(tmp_path / "images", tmp_path / "parquet", [f"data-{k}" for k in range(3)])
    (tmp_path / "parquet/__download__").mkdir()
    shutil.copy(tmp_path / "parquet/data-0.parquet", tmp_path / "parquet/__download__/urls.parquet")
    for path in (tmp_path / "parquet").rglob("*.parquet"):
        fs.put_file(str(path), f"bucket/images/{path.relative_to(tmp_path / 'parquet')}")
    return fs


def objects(fs, folder):
    """{name: bytes} of a folder on S3."""
    fs.invalidate_cache()
    return {path.removeprefix(f"{folder}/"): fs.cat_file(path) for path in fs.find(folder)}


def without_source(files):
    """The files that do not contain the fingerprint of the source."""
    return {
        name: data
        for name, data in files.items()
        if name not in ("cache.json", "run.args", "state.json")
    }


@pytest.mark.ci
def test_ray_cache_in_a_bucket_has_the_bytes_of_one_on_disk(tmp_path, flags, without_ray, bucket):
    precompute(
        *flags, f"--train_data_dir={tmp_path / 'parquet'}", f"--output_dir={tmp_path / 'disk'}"
    )
    disk = read_files(tmp_path / "disk")
    there = [*flags, "--train_data_dir=s3://bucket/images/"]
    code, said = without_ray(*there, "--output_dir=s3://bucket/latents")
    assert code == 0 and "Done: 24 rows, 2 skipped, are in s3://bucket/latents" in said, said
    made = objects(bucket, "bucket/latents")
    assert made.keys() == disk.keys() and without_source(made) == without_source(disk)
    code, said = without_ray(*there)  # remote images, local cache
    assert code == 0 and read_files(tmp_path / "out") == made, said

    # A complete cache is not written again. Damaged, missing and half-made parts are repaired
    times = {path: bucket.info(path)["LastModified"] for path in bucket.find("bucket/latents")}
    names = sorted(name for name in made if name.endswith(".arrow"))
    bucket.pipe_file(f"bucket/latents/{names[1]}", made[names[1]][:-8])
    bucket.rm_file(f"bucket/latents/{names[2]}")
    code, said = without_ray(*there, "--output_dir=s3://bucket/latents", setup=raising_encoder)
    assert code == 1 and f"{names[1]} is damaged" in said and f"{names[2]} is gone" in said, said
    assert not bucket.exists("bucket/latents/state.json")
    code, said = without_ray(*there, "--output_dir=s3://bucket/latents")
    assert code == 0 and objects(bucket, "bucket/latents") == made, said
    same = [f"bucket/latents/{name}" for name in (names[0], names[3])]
    assert all(bucket.info(path)["LastModified"] == times[path] for path in same)

    # A trial: the first rows, of the first two of three files
    code, said = without_ray(*there, "--max_train_samples=12", f"--output_dir={tmp_path / 'trial'}")
    assert code == 0 and "Done: 11 rows, 1 skipped" in said, said
    rows = datasets.load_from_disk(str(tmp_path / "trial"))
    assert rows["text"][:] == datasets.load_from_disk(str(tmp_path / "out"))["text"][:11]

    # Refused
    for argv, sentence in {
        "--seed=3": (
            "s3://bucket/latents holds another cache (--seed 0 -> 3; transform.seed 0 -> 3)"
        ),
        "--output_dir=s3://bucket": (
            "s3://bucket holds images/__download__/urls.parquet and no latent cache"
        ),
        "--output_dir=s3://nowhere/x": "--output_dir s3://nowhere/x can't be",
        "--caption_column=caption": "s3://bucket/images has no column 'caption', only",
        "--train_data_dir=s3://bucket/latents2": "it holds no parquet files",
    }.items():
        code, said = without_ray(*there, "--output_dir=s3://bucket/latents", argv)
        assert code == 1 and sentence in said, said
    both = [*there, "--rows_per_shard=26", "--resolution", "8", "16"]
    code, said = without_ray(*both, "--output_dir=s3://bucket/latents")
    assert code == 1 and "s3://bucket/latents is a cache itself" in said, said
    assert objects(bucket, "bucket/latents") == made

    # Two resolutions, then each one alone: nothing is made again
    for side in ([], ["--resolution=8", "--output_dir=s3://bucket/both/8"]):
        code, said = without_ray(*both, "--output_dir=s3://bucket/both", *side)
        assert code == 0 and "Done: 24 rows, 2 skipped, are in s3://bucket/both/8" in said, said
    code, said = without_ray(*there, "--rows_per_shard=26", f"--output_dir={tmp_path / '16'}")
    assert code == 0 and objects(bucket, "bucket/both/16") == read_files(tmp_path / "16"), said
    assert {path.split("/")[2] for path in bucket.find("bucket/both")} == {"8", "16"}


def test_two_ray_runs_writing_to_one_address_give_the_same_files(flags, whole, without_ray):
    """There is no lock: one run begins, another makes the whole cache, then the first continues."""
    MemoryFileSystem.store.clear()
    flags.append("--output_dir=memory://bucket/latents")

    def make_shards(*args, real=script.make_shards):
        script.make_shards, made = real, real(*args)
        yield next(made)
        script.main(script.parse_args(flags))
        yield from made

    code, said = without_ray(*flags, setup=lambda: setattr(script, "make_shards", make_shards))
    assert (
        code == 0 and said.count("Done: 24 rows, 2 skipped, are in memory://bucket/latents") == 2
    ), said
    assert objects(fsspec.filesystem("memory"), "/bucket/latents") == whole


def storm(flags, address, without_ray, set_rate):
    """Make caches while calls fail, for STORM minutes (default: 1). Yields after each of them."""
    rng, counts = random.Random(0), collections.Counter()
    end = time.time() + 60 * float(os.environ.get("STORM", "1"))
    while time.time() < end:
        fs, folder = fsspec.url_to_fs(address)
        if fs.exists(folder):
            fs.rm(folder, recursive=True)
        rate, code = rng.choice([0.01, 0.03, 0.1, 0.3]), 1
        while code:
            set_rate(rate)
            code, said = without_ray(*flags, f"--output_dir={address}")
            counts[f"status {code}"] += 1
            assert code in (0, 1) and "Traceback" not in said, said
            if code:
                assert said.count("precompute_latents_ray.py: ") == 1, said
                rate *= 0.8
        print(dict(counts), flush=True)
        set_rate(0)
        yield fs


@pytest.mark.long
def test_random_errors_of_s3_never_change_the_cache(
    tmp_path, flags, bucket, whole, without_ray, faulty
):
    """Each request may fail before its effect, or after it: see tests/faulty_server.py."""

    def set_rate(rate):
        (tmp_path / "faults").write_text(json.dumps({"": rate}))

    faulty({"": 0})
    type(bucket).clear_instance_cache()  # of connections to the server without faults
    for _ in storm(flags, "s3://bucket/latents", without_ray, set_rate):
        assert objects(bucket, "bucket/latents") == whole
    type(bucket).clear_instance_cache()


@pytest.mark.long
def test_random_errors_of_a_store_never_change_the_cache(flags, whole, without_ray, monkeypatch):
    """Each call may fail before its effect, or after it."""
    rng, counts, rates = random.Random(0), collections.Counter(), [0]

    def fail_at_random(name):
        real = getattr(MemoryFileSystem, name)

        def call(*args, **options):
            moment = rng.choices(["before", "after", "never"], [*rates * 2, 1])[0]
            if moment == "before":
                counts[name] += 1
                raise ConnectionResetError("reset by peer")
            result = real(*args, **options)
            if moment == "after":
                counts[name] += 1
                raise TimeoutError("no answer")
            return result

        monkeypatch.setattr(MemoryFileSystem, name, call)

    names = ("put_file", "get_file", "cat_file", "rm_file", "rm", "find", "exists", "info")
    for name in names:
        fail_at_random(name)
    set_rate = functools.partial(rates.__setitem__, 0)
    for fs in storm(flags, "memory://bucket/latents", without_ray, set_rate):
        assert objects(fs, "/bucket/latents") == whole
    print(dict(counts))


def test_remote_rows_refuse_files_that_changed_at_the_address(tmp_path, flags, bucket):
    args = script.parse_args([*flags, "--train_data_dir=s3://bucket/images"])
    rows = remote_rows.RemoteRows(args)
    again = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 5000 and len(again) == NUM_ROWS
    trial = remote_rows.RemoteRows(replace(args, max_train_samples=4))
    assert trial.starts == [0, 4] and trial[[0, 3]]["text"] == rows[[0, 3]]["text"]
    assert [caption for caption in again[[25, 0, 9, 10, 11]]["text"]] == rows[[25, 0, 9, 10, 11]][
        "text"
    ]
    assert again[[9, 10]]["text"][1].startswith("No. 1")
    remote_rows.open_parquet.cache_clear(), remote_rows.read_group.cache_clear()
    # Workers never list folders, so they have no such cache
    fsspec.url_to_fs("s3://bucket")[0].invalidate_cache()
    bucket.put_file(str(tmp_path / "parquet/data-1.parquet"), "bucket/images/data-0.parquet")
    again[[25]]
    with pytest.raises(ValueError, match="data-0.parquet: it has changed"):
        again[[0]]
    assert remote_rows.RemoteRows(args)._fingerprint != rows._fingerprint
    bucket.pipe_file("bucket/images/data-2.parquet", b"no parquet")
    with pytest.raises(SystemExit):
        remote_rows.RemoteRows(args)


# ------------------------------------------------------------------- clusters that grow and shrink


def spot_machines():
    """Two nodes, of which one is lost every half minute, and another one comes.

    On a slow machine a node is lost only after the next shard, so that the run comes to its end.
    """
    set_encoder_memory(9)
    script.Encoder, make = Slowest, script.make_shards
    script.TRIES = 1  # so that one death that is counted would end the run
    nodes, last = [], [time.monotonic()]

    def add_node():
        for _ in range(4):  # a busy machine may not start it in the time that Ray gives
            with contextlib.suppress(Exception):
                nodes.append(cluster.add_node(num_cpus=1, memory=11 * 2**30))
                return

    def make_shards(*args):
        add_node(), add_node()
        for made in make(*args):
            if time.monotonic() > last[0] + 30:  # here, because Ray adds none in other threads
                cluster.remove_node(nodes.pop(0), allow_graceful=False)
                print("a machine is lost", flush=True)
                add_node()
                last[0] = time.monotonic()
            yield made
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)

    script.make_shards = make_shards


@pytest.mark.long
def test_a_cluster_that_loses_a_machine_every_half_minute_makes_the_same_cache(
    tmp_path, flags, driver
):
    flags.append("--rows_per_shard=2")
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    code, said = driver(*flags, "--num_encoders=2", setup=spot_machines)
    assert code == 0 and read_files(tmp_path / "out") == read_files(tmp_path / "whole"), said
    assert said.count("a machine is lost") > 1, said


def set_encoder_memory(gigabytes):
    """Let each encoder need this memory. A task needs 1 GiB, and the first node has 7.5."""
    real = script.plan_engine
    script.plan_engine = lambda args, weights: real(args, (gigabytes - 1) * 2**30)


def room_for_one_encoder():
    set_encoder_memory(5)


def room_for_two_encoders_without_a_task():
    set_encoder_memory(3.5)


def room_for_one_encoder_without_a_task():
    set_encoder_memory(7)


@pytest.mark.long
@pytest.mark.parametrize(
    "setup, memory", [(room_for_one_encoder, "6.4"), (room_for_two_encoders_without_a_task, "4.8")]
)
def test_ray_run_finishes_with_fewer_places_than_encoders(
    tmp_path, flags, whole, driver, setup, memory
):
    code, said = driver(*flags, "--num_encoders=2", setup=setup)
    assert code == 0 and read_files(tmp_path / "out") == whole, said
    assert f"Ray has a place for 1 of 2 encoders (0 GPUs, 1 CPU and {memory} GB each)" in said
    assert "1 starting or waiting for a place" in said


@pytest.mark.long
def test_ray_run_is_refused_if_no_node_has_memory_for_an_encoder_and_a_task(flags, driver):
    code, said = driver(*flags, setup=room_for_one_encoder_without_a_task)
    assert code == 1 and "a task need 0 GPUs, 1 CPU and 8.6 GB, and no node" in said, said


def add_and_lose_nodes():
    """Two nodes join when encoders wait for them. One is lost later and not replaced.

    Slowest, so that the second encoder starts before the first has made all shards.
    """
    set_encoder_memory(9)
    script.Encoder, make = Slowest, script.make_shards
    nodes, seen = [], set()

    def add_nodes():
        nodes.extend(cluster.add_node(num_cpus=1, memory=11 * 2**30) for _ in range(2))

    def make_shards(missing, job, show):
        def watch(at_work, waiting):
            show(at_work, waiting)
            if not seen:
                add_nodes()
            seen.add(at_work)

        for made in make(missing, job, watch):
            if 2 in seen and len(nodes) == 2:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            yield made
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)

    script.make_shards = make_shards


@pytest.mark.long
def test_ray_run_uses_late_nodes_and_survives_a_lost_node(tmp_path, flags, driver):
    flags.append("--rows_per_shard=4")
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    code, said = driver(*flags, "--num_encoders=2", setup=add_and_lose_nodes)
    assert code == 0 and read_files(tmp_path / "out") == read_files(tmp_path / "whole"), said
    assert "Ray has a place for 0 of 2 encoders (0 GPUs, 1 CPU and 10.7 GB each); the" in said
    phases = [
        "0 encoders, 2 starting or waiting for a place",
        ", 2 encoders]",
        "waiting for images, 1 encoder, 1 starting or waiting for a place",
    ]
    found = [said.find(phase) for phase in phases]
    assert found == sorted(found) and -1 not in found, said


class Impatient(script.Encoder):
    """An encoder whose shared tasks never get a core."""

    def __init__(self, job):
        super().__init__(job)
        script.PATIENCE = 0.2
        never = script.ray.remote(num_cpus=99, scheduling_strategy="SPREAD")
        self.decode_anywhere = never(script.decode_part)


def impatient_encoder():
    script.Encoder = Impatient


@pytest.mark.long
def test_ray_encoder_decodes_on_its_own_core_if_all_others_are_busy(tmp_path, flags, whole, driver):
    code, said = driver(*flags, setup=impatient_encoder)
    assert code == 0 and read_files(tmp_path / "out") == whole, said


# ------------------------------------------------------------------- lost nodes, and memory


def end_node(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Processes of Ray that end their node with them
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


def find_workers(node):
    """The ids of the worker processes under a Ray node, which may be killed."""
    import psutil

    found = []
    for child in psutil.Process(node.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = "".join(child.cmdline()[:1])
            if title.startswith("ray::") and title not in AGENTS:
                found.append(child.pid)
    return found


class Slower(script.Encoder):
    """A slow encoder that notes how much Ray holds in its object store."""

    def decode(self, *args):
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        single.encode_images = lambda encoders, images: (
            images[:, :1, ::2, ::2].float().repeat(1, 8, 1, 1)
        )
        state = get_state_from_address(script.ray.get_runtime_context().gcs_address)
        for batch in super().decode(*args):
            store = get_memory_info_reply(state).store_stats
            with marker(self.job.args, "memory").open("a") as file:
                file.write(f"{store.object_store_bytes_used} {store.spilled_bytes_total}\n")
            time.sleep(0.05)
            yield batch


def slower_encoder():
    script.Encoder = Slower
    script.PART_BYTES = 4 * 2**20


@pytest.mark.long
def test_object_store_stays_bounded_while_encoders_are_slow(tmp_path, flags, driver):
    make_captioned(tmp_path / "images", 1200)
    size = 1200 * 3 * 256**2 / 2**20  # MiB of pixels, through a store of 100
    code, said = driver(
        *flags, "--resolution=256", "--rows_per_shard=40", "--batch_size=5", setup=slower_encoder
    )
    used, spilled = zip(
        *[map(int, line.split()) for line in (tmp_path / "memory").read_text().splitlines()],
        strict=True,
    )
    assert code == 0 and len(used) > 50 and size > 220, said
    print(
        f"{size:.0f} MiB of pixels: at most {max(used) / 2**20:.0f} MiB at a time, "
        f"{max(spilled)} bytes spilled"
    )
    assert max(used) < 90 * 2**20 and max(spilled) == 0


def plain_encoder():
    """For `start_driver`: the unchanged script."""


# Holds as many bytes as the last line says
HOLDING = """
import sys
for line in sys.stdin:
    held = None
    held = b"x" * int(line)
"""


@pytest.mark.long
@pytest.mark.parametrize("attacks", ["kills", "memory"])
def test_minutes_of_random_kills_on_real_ray_do_not_change_the_cache(
    tmp_path, flags, bucket, attacks
):
    """Kill encoders, tasks, nodes and the driver at random, STORM minutes long (default: 3).

    Or let another program take memory for a moment, so that Ray kills workers. Images and cache are
    in a bucket, and each node's object store is the smallest that Ray allows. Whenever a run ends
    well, its files are compared, and another begins.
    """
    import psutil

    memory, most = psutil.virtual_memory(), 6 * 2**30
    limit = (memory.total - memory.available + most) / memory.total
    holder = subprocess.Popen([sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, text=True)
    env = os.environ | {"RAY_memory_usage_threshold": f"{min(0.95, limit)}"}
    flags = [*flags, "--train_data_dir=s3://bucket/images/", "--rows_per_shard=2", "--batch_size=1"]
    out, rng, counts = "bucket/latents", random.Random(0), collections.Counter()
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    said = tmp_path / "said"
    options = ["--num_encoders=2", f"--address=127.0.0.1:{port}"]
    nodes: list[subprocess.Popen] = []
    driver = None

    def begin():
        return start_driver(
            said, plain_encoder, *flags, "--output_dir=s3://bucket/latents", *options
        )

    def add_node():
        nodes.append(start_ray_node(tmp_path, f"--address=127.0.0.1:{port}", env=env))

    def judge():
        """Check a run that ended by itself: complete, or stopped because of the kills."""
        assert "Traceback" not in said.read_text(), said.read_text()
        if driver.returncode == 0:
            assert objects(bucket, out) == whole
            counts["whole"] += 1
            bucket.rm(out, recursive=True)
        else:
            counts["stopped with a sentence"] += 1
            assert driver.returncode == 1 and "the same command" in said.read_text(), (
                said.read_text()
            )

    try:
        # A driver is connected to the head, and ends at once without it: so the head is not killed
        head = ["--head", f"--port={port}", f"--temp-dir={folder}"]
        nodes.append(start_ray_node(tmp_path, *head, env=env))
        add_node()
        add_node()
        driver = begin()
        assert driver.wait(600) == 0, said.read_text()
        whole = objects(bucket, out)
        precompute(
            *flags, f"--train_data_dir={tmp_path / 'parquet'}", f"--output_dir={tmp_path / 'disk'}"
        )
        assert without_source(whole) == without_source(read_files(tmp_path / "disk"))
        bucket.rm(out, recursive=True)
        driver = begin()
        end = time.time() + 60 * float(os.environ.get("STORM", "3"))
        while time.time() < end:
            time.sleep(rng.uniform(1, 6) if rng.random() < 0.9 else 40)  # time to make some shards
            assert nodes[0].poll() is None, "Ray's head has ended by itself"
            if driver.poll() is not None:
                judge()
                driver = begin()
                counts["begun"] += 1
                continue
            what = rng.choices(["worker", "node", "driver"], [12, 1, 1])[0]
            if attacks == "memory":
                what = "memory"
                for size in (rng.uniform(0.5, 1) * most, 0):
                    holder.stdin.write(f"{size:.0f}\n")
                    holder.stdin.flush()
                    time.sleep(rng.uniform(1, 4))
            elif what == "worker":
                workers = [pid for node in nodes for pid in find_workers(node)]
                for pid in rng.sample(workers, min(1, len(workers))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            elif what == "node":
                end_node(nodes.pop(rng.randrange(1, len(nodes))))  # never the head
                add_node()
            else:
                driver.kill()
                driver.wait()
                driver = begin()
            counts[what] += 1
        for _ in range(5):  # without attacks, perhaps on new nodes
            code = driver.wait(600)
            judge()
            if code == 0:
                break
            driver = begin()
        assert code == 0
        logs = "".join(path.read_text() for path in Path(folder).glob("session_*/logs/raylet*.out"))
        counts["killed by Ray"] = logs.count("worker(s), kill details")
        assert counts["killed by Ray"] or attacks != "memory", logs[-3000:]
    finally:
        if driver:
            driver.kill()
            driver.wait()
        for node in nodes[::-1]:
            end_node(node)
        holder.kill()
        holder.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print(dict(counts))
