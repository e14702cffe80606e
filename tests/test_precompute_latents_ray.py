import ast
import contextlib
import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from conftest import ROOT, finish, free_port, make_captioned, reset, start, wait_until
from test_precompute_latents import MODELS, contents

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
# Without these Ray writes into the home folder, and sends statistics.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

import precompute_latents as single
import precompute_latents_ray as script

NUM_ROWS, ROWS_PER_SHARD, ROWS_PER_PART = 26, 8, 4


# Processes that import this file and work: beside Ray's threads the forks of other tests might hang.
CHILD = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]}; import test_precompute_latents_ray as test; "


@pytest.fixture(scope="module")
def driver(storage):
    """driver(*argv, setup=None) runs the script in a process with a Ray of its own. Returns (status, what it said)."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # pytest's own are too long for the names of sockets
    command = [sys.executable, "-c", CHILD + "test.serve(sys.argv[1])", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:

        def drive(*argv, setup=None):
            pickle.dump(([str(arg) for arg in argv], setup and setup.__name__), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)

        drive.address = pickle.load(process.stdout)
        yield drive
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def serve(folder):
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    script.ray.init(
        num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, _temp_dir=folder,
        runtime_env=script.RUNTIME_ENV, logging_level="error", log_to_driver=False,
    )  # fmt: skip
    answer = script.ray.get_runtime_context().gcs_address
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            argv, setup = pickle.load(sys.stdin.buffer)
            answer = run(argv, setup and globals()[setup])
    script.ray.shutdown()


def run(argv, setup=None):
    """Run the script in this process, changed by `setup()`. Returns (status, what it printed)."""
    reset()
    was = dict(vars(script))
    script.PART_BYTES = ROWS_PER_PART * 3 * 16 * 16
    script.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this file
    if setup:
        setup()
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
    """26 images in 4 shards of 2 parts of 2 batches, one image broken; later flags win over these."""
    make_captioned(
        tmp_path / "images", NUM_ROWS, [None if i == 13 else f"No. {i} \U0001f600\0" for i in range(NUM_ROWS)]
    )
    (tmp_path / "images/5.png").write_bytes(b"no image")
    return [
        f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}", "--resolution=16",
        f"--output_dir={tmp_path / 'out'}", f"--rows_per_shard={ROWS_PER_SHARD}", "--batch_size=2", "--random_flip",
        "--latents=sample", "--max_skipped=0.2", f"--cache_dir={tmp_path / 'datasets-cache'}",
    ]  # fmt: skip


def precompute(*argv):
    """The other script."""
    reset()
    single.main(single.parse_args([*map(str, argv), "--dataloader_num_workers=0"]))


@pytest.fixture
def whole(tmp_path, flags):
    """The files that precompute_latents.py makes."""
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    return contents(tmp_path / "whole")


# ------------------------------------------------------------------- the same bytes


def test_one_process_two_processes_and_any_encoders_and_tasks_write_the_same_bytes(tmp_path, flags, whole, driver):
    assert len(whole) == 4 + 6 and whole["skipped.jsonl"].count(b"\n") == 2
    two = start(lambda: precompute(*flags, f"--output_dir={tmp_path / 'two'}"), 2, log=tmp_path / "log")
    assert finish(two) == [0, 0], (tmp_path / "log").read_text()
    assert contents(tmp_path / "two") == whole
    for name, engine in {
        "one": ["--num_encoders=1", "--num_transform_cpus=1"],
        "three": ["--num_encoders=3", "--gpus_per_encoder=0"],
    }.items():
        code, said = driver(*flags, *engine, f"--output_dir={tmp_path / name}")
        assert code == 0 and "Done: 24 rows, 2 skipped" in said, said
        assert contents(tmp_path / name) == whole
    assert "3 encoders of 1 CPU threads" in said and "waiting for images" in said


@pytest.mark.long
def test_moments_of_whole_shards_in_other_precision(tmp_path, flags, driver):
    flags += ["--latents=moments", "--no-random_flip", "--mixed_precision=bf16", "--batch_size=3"]
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    code, said = driver(*flags)
    assert code == 0, said
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_each_script_goes_on_with_what_the_other_began_and_mends_it(tmp_path, flags, whole, driver):
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    names = sorted(name for name in whole if name.endswith(".arrow"))
    (tmp_path / "out" / names[0]).unlink()
    (tmp_path / "out" / names[2]).write_bytes(whole[names[2]][:-8])
    before = {name: (tmp_path / "out" / name).stat().st_ino for name in (names[1], names[3])}
    code, said = driver(*flags)
    assert code == 0 and f"{names[0]} is gone" in said and f"{names[2]} is damaged" in said, said
    assert contents(tmp_path / "out") == whole
    assert before == {name: (tmp_path / "out" / name).stat().st_ino for name in before}  # what was good was left alone
    precompute(*flags)
    assert contents(tmp_path / "out") == whole


def test_parts_are_cut_where_batches_are_and_named_by_what_they_hold(tmp_path):
    argv = ["--train_data_dir=.", "--pretrained_model_name_or_path=.", "--resolution=512", "--batch_size=16"]
    args = script.parse_args(argv)
    parts = script.plan_parts(1024, 2048, args)
    assert parts[0] == (1024, 1104) and parts[-1][1] == 2048  # 5 batches of 16 are 63 MB
    assert [first for first, _ in parts] == list(range(1024, 2048, 80))
    assert script.plan_parts(0, 7, args) == [(0, 7)]
    names = [script.name_part(*part, args) for part in parts]
    args.batch_size = 8
    assert len({*names, *(script.name_part(*part, args) for part in parts)}) == 2 * len(parts)
    shards = [f"data-{i}" for i in range(3)]
    args.rows_per_shard = 100
    there = [script.name_part(100, 180, args)]
    missing, left, todo = script.find_missing(shards, {"data-0": {}}, 250, there, args)
    assert missing == {"data-1": [(100, 180), (180, 200)], "data-2": [(200, 250)]}
    assert left == {"data-1": 1, "data-2": 1} and todo == [(180, 200), (200, 250)]


def test_a_part_holds_what_encode_all_yields(tmp_path):
    rows = pa.RecordBatch.from_pydict({"x": pa.array([1.0, 2.0], pa.float16()), "text": ["a\0", "\U0001f600"]})
    skipped = [{"row": 3, "key": "3.png", "reason": "broken"}]
    items = [(1, rows, [], 0), (3, rows.slice(0, 0), skipped, 2)]
    script.write_part(tmp_path / "x.part", iter(items))
    assert list(script.read_parts([tmp_path / "x.part"], 3)) == items
    assert [path.name for path in tmp_path.iterdir()] == ["x.part"]
    with pytest.raises(ValueError, match="1 rows too few"):
        list(script.read_parts([tmp_path / "x.part"], 4))
    data = (tmp_path / "x.part").read_bytes()
    (tmp_path / "x.part").write_bytes(b"\1" * 16 + data[16:])
    with pytest.raises(ValueError, match="x.part is damaged"):
        list(script.read_parts([tmp_path / "x.part"], 3))
    assert not list(tmp_path.iterdir())  # to be made again


# ------------------------------------------------------------------- whoever dies


def marker(args, name):
    """A file beside the folder --cache_dir: --output_dir may be elsewhere."""
    return Path(args.cache_dir).parent / name


class Dies(script.Encoder):
    """An encoder that is killed once as it begins with row 8, and once when the file of the next part is there."""

    def __call__(self, block):
        first = block["first"][0].as_py()
        begun, done = marker(self.args, "begun"), marker(self.args, "done")
        if first == 8 and not begun.exists():
            begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().__call__(block)
        if first == 12 and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def kill_encoder():
    script.Encoder = Dies


def kill_transform_task():
    real = script.transform_part

    def transform_part(item, args, **rest):
        done = real(item, args=args, **rest)
        mark = marker(args, f"transformed-{item['first'][0]}")
        if item["first"][0].as_py() in (4, 16) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    script.transform_part = transform_part


def kill_both():
    kill_encoder()
    kill_transform_task()


def test_killed_encoders_and_tasks_change_nothing(tmp_path, flags, whole, driver):
    code, said = driver(*flags, setup=kill_both)
    marks = {"begun", "done", "transformed-4", "transformed-16"}
    assert code == 0 and marks < set(os.listdir(tmp_path)), said
    assert contents(tmp_path / "out") == whole


class Slow(script.Encoder):
    def __call__(self, block):
        time.sleep(0.5)
        return super().__call__(block)


def slow_encoder():
    script.Encoder = Slow


def start_driver(log, *argv):
    """The script as a process of its own, with slow encoders."""
    code = CHILD + "code, said = test.run(sys.argv[1:], test.slow_encoder); print(said); sys.exit(code)"
    return subprocess.Popen([sys.executable, "-c", code, *argv], stdout=log.open("w"), stderr=subprocess.STDOUT)


def test_a_killed_driver_leaves_whole_files_and_the_same_command_goes_on(tmp_path, flags, whole, driver):
    log, out = tmp_path / "log", tmp_path / "out"
    process = start_driver(log, *flags, f"--address={driver.address}")
    wait_until(lambda: list(out.glob("unfinished/data-*")) or process.poll() is not None, 120)
    process.kill()
    process.wait()
    made = {path.name: path.read_bytes() for path in out.glob("data-*")}
    assert 1 <= len(made) < 4 and all(whole[name] == data for name, data in made.items()), log.read_text()
    inodes = {path.stem: (out / path.stem).stat().st_ino for path in out.glob("unfinished/data-*")}
    with pytest.raises(FileNotFoundError):
        datasets.load_from_disk(str(out))
    code, said = driver(*flags)  # at once: the dead one's workers may not have noticed yet
    assert code == 0, said
    assert contents(out) == whole
    assert inodes and all((out / name).stat().st_ino == inode for name, inode in inodes.items())


@pytest.mark.long
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_soon_and_leaves_whole_files_only(tmp_path, flags, whole, driver, number, code):
    log, out = tmp_path / "log", tmp_path / "out"
    process = start_driver(log, *flags, f"--address={driver.address}")
    wait_until(lambda: list(out.glob("unfinished/data-*")) or process.poll() is not None, 120)
    begin = time.time()
    process.send_signal(number)
    assert process.wait(30) == code, log.read_text()
    assert time.time() - begin < 15 and f"Stopped by {number.name}; what is saved is whole" in log.read_text()
    assert not list(out.rglob(".tmp-*")) and 1 <= len(list(out.glob("data-*"))) < 4
    assert driver(*flags)[0] == 0 and contents(out) == whole


# ------------------------------------------------------------------- things that go wrong


class Raises(script.Encoder):
    def encode(self, block):
        if block["first"][0].as_py() == 12:
            with marker(self.args, "tries").open("a") as file:
                file.write("x")
            raise RuntimeError("CUDA error: too hot")
        return super().encode(block)


def raising_encoder():
    script.Encoder = Raises


def test_a_model_that_raises_is_tried_again_and_then_named(tmp_path, flags, whole, driver):
    code, said = driver(*flags, setup=raising_encoder)
    assert code == 1 and said.count("precompute_latents.py:") == 1 and "Traceback" not in said, said
    assert "rows 12 to 15 could not be made, tried 4 times: RuntimeError: CUDA error: too hot" in said
    assert (tmp_path / "tries").read_text() == "xxxx"
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("data-*")}
    assert all(whole[name] == data for name, data in made.items()) and "state.json" not in os.listdir(tmp_path / "out")


def test_tries_are_counted_over_the_processes_that_die(tmp_path):
    path, calls = tmp_path / "x.encode", []
    path.write_text("...")  # three died
    assert script.attempt(lambda: calls.append(1) or "done", path) == ("done", None)
    assert calls == [1] and not path.exists()
    path.write_text("....")
    result, reason = script.attempt(calls.append, path)
    assert result is None and calls == [1] and "died 4 times; did it run out of memory?" in reason
    path.unlink()
    result, reason = script.attempt(lambda: single.fail("the disk is full"), path)
    assert result is None and reason.startswith("precompute_latents.py: the disk is full (on ")
    assert script.attempt(lambda: 1, tmp_path / "gone/x")[0] is None


def test_workers_load_the_data_by_themselves_where_the_drivers_files_are_not(tmp_path, flags):
    args = single.parse_args(flags)
    rows, column = single.load_rows(args, others=["text"])
    pickled = lambda fingerprint: pickle.dumps((args, column, 3, None, fingerprint, pickle.dumps(rows)))  # noqa: E731
    assert len(pickle.dumps(rows)) < 20_000
    assert len(script.open_rows(pickled(rows._fingerprint)).rows) == NUM_ROWS
    script.open_rows.cache_clear()
    shutil.rmtree(tmp_path / "datasets-cache")
    assert len(script.open_rows(pickled(rows._fingerprint)).rows) == NUM_ROWS
    shutil.rmtree(tmp_path / "datasets-cache")
    with pytest.raises(ValueError, match="this node reads other data"):
        script.open_rows(pickled("another"))


def test_other_settings_too_many_bad_rows_and_bad_folders_are_refused(tmp_path, flags, whole, driver):
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    code, said = driver(*flags, "--seed=3")
    assert code == 1 and "transform.seed 0 -> 3" in said
    code, said = driver(*flags, "--max_skipped=0.01", f"--output_dir={tmp_path / 'other'}")
    assert code == 1 and "more than --max_skipped 0.01 allows" in said and said.count(".py:") == 1
    assert not list((tmp_path / "other").glob(".tmp-*"))
    code, said = driver(*flags, "--max_skipped=0.2", f"--output_dir={tmp_path / 'other'}")
    assert code == 0 and contents(tmp_path / "other") == whole
    with single.FileLock(tmp_path / "out/.lock"):
        (tmp_path / "out/.tmp-of-another-run").touch()
        code, said = driver(*flags)
        assert code == 1 and "another process is writing" in said
        assert (tmp_path / "out/.tmp-of-another-run").exists()


def test_what_no_node_can_give_is_refused_and_not_waited_for(flags, driver):
    code, said = driver(*flags, "--gpus_per_encoder=1")
    assert code == 1 and "an encoder needs 0 CPUs, 1 GPUs and" in said and "no node of Ray has that" in said, said


def test_a_ray_that_is_not_there_is_named(flags, capsys, tmp_path):
    begin = time.time()
    reset()
    with pytest.raises(SystemExit):
        script.main(script.parse_args([*flags, f"--address=127.0.0.1:{free_port()}"]))
    said = capsys.readouterr().err
    assert time.time() - begin < 30 and "Ray can't be started or found at 127.0.0.1" in said, said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("argv, sentence", [
    (["--train_data_dir=nowhere"], "--train_data_dir nowhere is not a folder"),
    (["--train_data_dir=s3://a/b", "--max_train_samples=5"], "--max_train_samples is for folders"),
    (["--train_data_dir=s3://a/b", "--dataset_split=test"], "--dataset_split is for folders"),
    (["--output_dir=/tmp/ray/working_dir_files/x"], "Ray deletes /tmp/ray/working_dir_files/x after the job"),
    (["--train_data_dir=s3://a/b", "--output_dir=s3://a/b/c"], "--output_dir s3://a/b/c lies in --train_data_dir"),
    (["--mixed_precision=fp16", "--gpus_per_encoder=0"], "--mixed_precision fp16 needs GPUs"),
    (["--num_encoders=0"], "--num_encoders: 0 is not between 1 and"),
])  # fmt: skip
def test_bad_arguments_end_with_one_line(argv, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        script.parse_args(argv)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_workers_get_paths_from_the_root_and_nothing_else_changes(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()  # also the name of a split, which is no path
    args = script.parse_args([*flags, "--train_data_dir=images", "--vae_name_or_path=some/model"])
    there = script.make_absolute(args)
    assert there.train_data_dir == str(tmp_path / "images") and args.train_data_dir == "images"
    changed = {name for name in vars(args) if getattr(args, name) != getattr(there, name)}
    assert changed == {"train_data_dir"} and there.dataset_split == "train"


def test_dry_run_needs_no_ray(flags, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(script.ray, "init", lambda *args, **options: pytest.fail("Ray was started"))
    reset()
    script.main(script.parse_args([*flags, "--dry_run"]))
    assert "26 rows of" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_the_other_scripts_do_not_need_ray():
    for path in {*ROOT.glob("*.py")} - {*ROOT.glob("*_ray.py")} - {ROOT / "download_images.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "ray"], path
    code = "import sys; sys.modules['ray'] = None; import precompute_latents, train_text_to_image, train_unconditional"
    code += "; print('fine'); import precompute_latents_ray"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 1
        and done.stdout == "fine\n"
        and done.stderr.strip().endswith("Ray is missing: pip install -r requirements-ray.txt")
    )


def test_the_demo(tmp_path):
    env = {**os.environ, "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray-", dir="/tmp"), "HF_HOME": str(tmp_path)}
    command = [sys.executable, ROOT / "precompute_latents_ray.py", "--output_dir", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)
    assert done.returncode == 0 and "short for\npython precompute_latents_ray.py --pretrained" in done.stdout, (
        done.stderr
    )
    precompute("--output_dir", tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# ------------------------------------------------------------------- object storage


@pytest.fixture
def bucket(storage, tmp_path, flags):
    """An S3 file system, with the images of `flags` in s3://bucket/images as download_images.py would write them."""
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem(
        skip_instance_cache=True, use_listings_cache=False
    )
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    rows = datasets.load_dataset(str(tmp_path / "images"), split="train", cache_dir=str(tmp_path / "datasets-cache"))
    rows = rows.cast_column("image", datasets.Image(decode=False))
    items = [{**row, "image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}} for row in rows]
    (tmp_path / "parquet/__download__").mkdir(parents=True)
    for k in range(3):
        part = datasets.Dataset.from_list(items[10 * k : 10 * k + 10])
        part = part.cast_column("image", datasets.Image(decode=False)).add_column("other", [k] * len(part))
        part.to_parquet(str(tmp_path / f"parquet/data-{k}.parquet"), batch_size=3)
    shutil.copy(tmp_path / "parquet/data-0.parquet", tmp_path / "parquet/__download__/urls.parquet")
    for path in (tmp_path / "parquet").rglob("*.parquet"):
        fs.put_file(str(path), f"bucket/images/{path.relative_to(tmp_path / 'parquet')}")
    return fs


def objects(fs, folder):
    """{name: bytes} of what lies in a folder of S3."""
    fs.invalidate_cache()
    return {path.removeprefix(f"{folder}/"): fs.cat_file(path) for path in fs.find(folder)}


def without_source(files):
    """What does not tell where the images came from: not the fingerprint, and what is made of it."""
    return {name: data for name, data in files.items() if name not in ("cache.json", "run.args", "state.json")}


def test_images_and_cache_at_an_address_give_the_bytes_of_those_on_a_disk(tmp_path, flags, driver, bucket):
    precompute(*flags, f"--train_data_dir={tmp_path / 'parquet'}", f"--output_dir={tmp_path / 'disk'}")
    disk = contents(tmp_path / "disk")
    there = [*flags, "--train_data_dir=s3://bucket/images/"]
    code, said = driver(*there, "--output_dir=s3://bucket/latents", setup=kill_both)
    assert code == 0 and "Done: 24 rows, 2 skipped, are in s3://bucket/latents" in said, said
    made = objects(bucket, "bucket/latents")
    assert made.keys() == disk.keys() and without_source(made) == without_source(disk)
    assert len(datasets.load_from_disk("s3://bucket/latents")) == 24

    # Whole: nothing is written again. Damaged, gone, begun: mended
    times = {path: bucket.info(path)["LastModified"] for path in bucket.find("bucket/latents")}
    names = sorted(name for name in made if name.endswith(".arrow"))
    bucket.pipe_file(f"bucket/latents/{names[1]}", made[names[1]][:-8])
    bucket.rm_file(f"bucket/latents/{names[2]}")
    bucket.pipe_file("bucket/latents/unfinished/rows-16-20-by-2.part", b"half")
    code, said = driver(*there, "--output_dir=s3://bucket/latents")
    assert code == 1 and f"{names[1]} is damaged" in said and f"{names[2]} is gone" in said, said
    assert "s3://bucket/latents/unfinished/rows-16-20-by-2.part is damaged or gone" in said
    assert not bucket.exists("bucket/latents/state.json")
    code, said = driver(*there, "--output_dir=s3://bucket/latents")
    assert code == 0 and objects(bucket, "bucket/latents") == made, said
    same = [f"bucket/latents/{name}" for name in (names[0], names[3])]
    assert all(bucket.info(path)["LastModified"] == times[path] for path in same)

    # Refused
    for argv, sentence in {
        "--seed=3": "s3://bucket/latents holds another cache (transform.seed 0 -> 3)",
        "--output_dir=s3://bucket": "s3://bucket holds images/__download__/urls.parquet and no latent cache",
        "--output_dir=s3://nowhere/x": "--output_dir s3://nowhere/x can't be",
        "--caption_column=caption": "s3://bucket/images has no column 'caption' but",
        "--train_data_dir=s3://bucket/latents2": "it holds no parquet files",
    }.items():
        code, said = driver(*there, "--output_dir=s3://bucket/latents", argv)
        assert code == 1 and sentence in said, said
    assert objects(bucket, "bucket/latents") == made


def test_images_that_change_at_an_address_are_not_mixed(tmp_path, flags, bucket):
    args = script.parse_args([*flags, "--train_data_dir=s3://bucket/images"])
    rows = script.RemoteRows(args)
    again = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 5000 and len(again) == NUM_ROWS
    assert [caption for caption in again[[25, 0, 9, 10, 11]]["text"]] == rows[[25, 0, 9, 10, 11]]["text"]
    assert again[[9, 10]]["text"][1].startswith("No. 1")
    script.open_parquet.cache_clear(), script.read_group.cache_clear()
    script.fsspec.url_to_fs("s3://bucket")[0].invalidate_cache()  # workers never list, and so have no such cache
    bucket.put_file(str(tmp_path / "parquet/data-1.parquet"), "bucket/images/data-0.parquet")
    again[[25]]
    with pytest.raises(ValueError, match="data-0.parquet: it has changed"):
        again[[0]]
    assert script.RemoteRows(args)._fingerprint != rows._fingerprint
    bucket.pipe_file("bucket/images/data-2.parquet", b"no parquet")
    with pytest.raises(SystemExit):
        script.RemoteRows(args)


@pytest.mark.long
def test_a_killed_driver_leaves_whole_objects_and_the_same_command_goes_on(tmp_path, flags, driver, bucket):
    flags = [*flags, "--train_data_dir=s3://bucket/images", "--output_dir=s3://bucket/latents"]
    code, said = driver(*flags, f"--output_dir={tmp_path / 'out'}")
    assert code == 0, said
    process = start_driver(tmp_path / "log", *flags, f"--address={driver.address}")
    wait_until(lambda: bucket.glob("bucket/latents/unfinished/data-*") or process.poll() is not None, 120)
    process.kill()
    process.wait()
    made = {path: bucket.info(path)["LastModified"] for path in bucket.glob("bucket/latents/data-*")}
    assert 1 <= len(made) < 4, (tmp_path / "log").read_text()
    code, said = driver(*flags, setup=kill_both)
    assert code == 0, said
    assert objects(bucket, "bucket/latents") == contents(tmp_path / "out")
    done = [path for path in made if bucket.info(path)["LastModified"] == made[path]]
    assert done


# ------------------------------------------------------------------- whole nodes, and memory


def start_node(folder, log, *flags):
    """A Ray node with a CPU of its own on the loopback interface, which ends with its process group."""
    code = "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", code, "start", "--block", "--num-cpus=1", f"--object-store-memory={100 * 2**20}"]
    command += ["--include-dashboard=false"] if "--head" in flags else []
    log = open(log, "a")
    return subprocess.Popen([*command, *flags], stdout=log, stderr=log, start_new_session=True)


def end_node(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def encoders_and_tasks(head):
    """The ids of the processes of Ray's workers under a node, that may be killed."""
    import psutil

    found = [child for child in psutil.Process(head.pid).children(recursive=True)]
    return [child.pid for child in found if "ray::" in " ".join(child.cmdline()[:1])]


@pytest.mark.long
def test_losing_workers_at_random_and_a_node_changes_nothing(tmp_path, flags, whole):
    port, log, nodes = free_port(), tmp_path / "log", []
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    flags = [*flags, "--rows_per_shard=4", "--batch_size=1"]
    precompute(*flags, f"--output_dir={tmp_path / 'again'}")
    whole, rng = contents(tmp_path / "again"), random.Random(0)
    try:
        nodes.append(start_node(log, log, "--head", f"--port={port}", f"--temp-dir={folder}"))
        time.sleep(10)
        nodes += [start_node(log, log, f"--address=127.0.0.1:{port}") for _ in range(2)]
        time.sleep(10)
        options = ["--num_encoders=2", "--num_transform_cpus=1", f"--address=127.0.0.1:{port}"]
        process = start_driver(tmp_path / "said", *flags, *options)
        wait_until(lambda: list((tmp_path / "out/unfinished").glob("*.part")) or process.poll() is not None, 120)
        for _ in range(2):
            for pid in rng.sample(encoders_and_tasks(nodes[0]), 1):
                os.kill(pid, signal.SIGKILL)
            time.sleep(3)
        assert process.poll() is None, (tmp_path / "said").read_text()
        end_node(nodes.pop())
        assert process.wait(240) == 0, (tmp_path / "said").read_text()
    finally:
        for node in nodes[::-1]:
            end_node(node)
        shutil.rmtree(folder, ignore_errors=True)
    assert contents(tmp_path / "out") == whole


class Slower(script.Encoder):
    """A slow encoder that notes how much Ray holds in its object store."""

    def __call__(self, block):
        from ray._private.internal_api import get_memory_info_reply, get_state_from_address

        state = get_state_from_address(script.ray.get_runtime_context().gcs_address)
        store = get_memory_info_reply(state).store_stats
        with marker(self.args, "memory").open("a") as file:
            file.write(f"{store.object_store_bytes_used} {store.spilled_bytes_total}\n")
        time.sleep(0.2)
        single.encode_images = lambda vae, images: images[:, :1, ::8, ::8].float().repeat(1, 8, 1, 1)
        return super().__call__(block)


def slower_encoder():
    script.Encoder = Slower
    script.PART_BYTES = 4 * 2**20


@pytest.mark.long
def test_memory_stays_in_bounds_while_encoders_are_slow(tmp_path, flags, driver):
    make_captioned(tmp_path / "images", 1200)
    size = 1200 * 3 * 256**2 / 2**20  # MiB of pixels, through a store of 100
    code, said = driver(*flags, "--resolution=256", "--rows_per_shard=40", "--batch_size=5", setup=slower_encoder)
    used, spilled = zip(
        *[map(int, line.split()) for line in (tmp_path / "memory").read_text().splitlines()], strict=True
    )
    assert code == 0 and len(used) > 50 and size > 220, said
    print(f"{size:.0f} MiB of pixels: at most {max(used) / 2**20:.0f} MiB at a time, {max(spilled)} bytes spilled")
    assert max(used) < 90 * 2**20 and max(spilled) == 0
