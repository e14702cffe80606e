"""--streaming gives the cache of a copy on disk, resumes exactly, and reports errors."""

import json
import os
import random
import shutil
import tarfile
import time

import datasets
import pytest
from conftest import (
    MODELS,
    Script,
    assert_same_weights,
    kill,
    make_captioned,
    make_masked,
    make_models,
    make_prx,
    metrics,
    start,
    wait_until,
)

precompute = Script("precompute_latents")
train_text_to_image = Script("train_text_to_image")
train_flow = Script("train_flow")
pytestmark = pytest.mark.usefixtures("without_figures")
CAPTIONS = [f"a digit {'zero one two'.split()[i % 3]}" for i in range(11)]


def make_shards(folder, sizes=(4, 1, 6)):
    """The images of `make_captioned` in parquet files of so many rows, in groups of two."""
    make_captioned(folder / "images", sum(sizes))
    (folder / "parquet").mkdir()
    kinds = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    images = [
        {"bytes": (folder / f"images/{i}.png").read_bytes(), "path": f"{i}.png"}
        for i in range(sum(sizes))
    ]
    for shard, size in enumerate(sizes):
        first = sum(sizes[:shard])
        rows = {"image": images[first : first + size], "text": CAPTIONS[first : first + size]}
        rows = datasets.Dataset.from_dict(rows, features=kinds)
        rows.to_parquet(folder / f"parquet/train-{shard}.parquet", batch_size=2)
    return folder / "parquet"


@pytest.fixture
def raw(storage, tmp_path, flags):
    """The address of a bucket: parquet/ holds the files of `flags`, tars/ the same rows."""
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem()
    bucket = f"raw-{time.time_ns()}"
    fs.mkdir(bucket)
    fs.pipe(f"{bucket}/parquet/__download__/urls.parquet", b"none of the data")
    for shard, rows in enumerate((range(4), range(4, 5), range(5, 11))):
        name = f"train-{shard}.parquet"
        fs.put_file(str(tmp_path / "parquet" / name), f"{bucket}/parquet/{name}")
        with tarfile.open(tmp_path / "shard.tar", "w") as tar:
            for row in rows:
                tar.add(tmp_path / f"images/{row}.png", f"{row}.png")
                (tmp_path / "caption").write_text(CAPTIONS[row])
                tar.add(tmp_path / "caption", f"{row}.txt")
        fs.put_file(str(tmp_path / "shard.tar"), f"{bucket}/tars/{shard + 8:03d}.tar")
    yield f"s3://{bucket}"
    fs.rm(bucket, recursive=True)


@pytest.fixture
def flags(tmp_path):
    """A cache of 11 images in 6 shards that takes a second; later flags override these."""
    return precompute.flags(
        tmp_path / "out",
        f"--train_data_dir={make_shards(tmp_path)}",
        f"--pretrained_model_name_or_path={MODELS}",
        *"--rows_per_shard=2 --random_flip --latents=sample --streaming".split(),
    )


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_streaming_writes_the_same_shards_as_a_copy_on_disk(tmp_path, flags, capsys):
    precompute(*flags)
    assert "A stream; each row is" in capsys.readouterr().out
    whole = contents(tmp_path / "out")
    state = json.loads(whole["state.json"])
    assert [file["filename"] for file in state["_data_files"]] == [
        f"data-{i:05d}.arrow" for i in range(6)
    ]
    assert datasets.load_from_disk(str(tmp_path / "out"))["text"][:] == CAPTIONS
    described = json.loads(whole["cache.json"])
    assert (described["rows"], described["source"]["rows"]) == (11, None)
    precompute(
        *[flag for flag in flags if flag != "--streaming"], f"--output_dir={tmp_path / 'plain'}"
    )
    for i in range(6):
        plain = tmp_path / f"plain/data-{i:05d}-of-00006.arrow"
        assert plain.read_bytes() == whole[f"data-{i:05d}.arrow"]
    # A finished cache does not read the stream, and repairs damaged files.
    shutil.rmtree(tmp_path / "plain")
    for damaged in (0, 2, 5):
        if damaged:
            (tmp_path / f"out/data-{damaged:05d}.arrow").write_bytes(b"damaged")
        precompute(*flags)
        assert contents(tmp_path / "out") == whole
        assert (f"data-{damaged:05d}.arrow is damaged" in capsys.readouterr().out) == bool(damaged)


def test_streaming_from_a_bucket_gives_the_rows_of_a_copy_on_disk(tmp_path, flags, raw):
    precompute(*flags)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.arrow")}
    tars = f"--train_data_dir={raw}/tars/{{008..010}}.tar"
    for number, argv in enumerate(
        [
            [f"--train_data_dir={raw}/parquet/"],
            [tars, "--caption_column=txt"],
            [f"--train_data_dir={raw}/tars/*.tar", "--caption_column=txt", "--max_train_samples=4"],
        ]
    ):
        out = tmp_path / f"out-{number}"
        precompute(*flags, *argv, f"--output_dir={out}")
        made = {path.name: path.read_bytes() for path in out.glob("*.arrow")}
        assert len(made) == (2 if number == 2 else 6)
        assert made.items() <= expected.items()

    for source, sentence in {
        f"{raw}/tars/{{008..011}}.tar": f"there is no {raw}/tars/011.tar",
        f"{raw}/*/*": "it holds both parquet files and tars: choose with /*.parquet or /*.tar",
        f"{raw}/nothing": "it holds neither parquet files nor tars",
    }.items():
        said = precompute.refused(*flags, f"--train_data_dir={source}")
        assert f"{source} can't be loaded as a data set ({sentence})" in said
    said = precompute.refused(*flags, tars, "--no-streaming", status=2)
    assert "is an address: give --streaming, or copy the data to a disk" in said


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_streaming_cache_resumes_to_the_same_bytes(
    tmp_path, flags, num_processes, monkeypatch
):
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    whole, encode = contents(tmp_path / "whole"), precompute.module.encode

    def slow(*args):
        time.sleep(0.1)
        return encode(*args)

    monkeypatch.setattr(precompute.module, "encode", slow)
    shards = lambda: len(list((tmp_path / "out").glob("data-*")))
    for moment in random.Random(num_processes).sample(range(5), 2):
        pids = start(lambda: precompute(*flags, "--dataloader_num_workers=1"), num_processes)
        wait_until(lambda moment=moment: shards() > moment)
        kill(pids)
    precompute.fork(*flags, num_processes=num_processes)
    assert contents(tmp_path / "out") == whole


def test_streaming_skips_failed_rows_and_refuses_changed_data(tmp_path, flags, capfd):
    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "parquet/train-2.parquet"), split="train"
    )
    rows = rows.cast_column("image", datasets.Image(decode=False))
    broken = rows.map(
        lambda row, i: row | {"image": {"bytes": b"x", "path": "x"}} if i == 1 else row,
        with_indices=True,
    )
    broken.to_parquet(tmp_path / "parquet/train-2.parquet")
    said = precompute.refused(*flags)
    assert "1 of 11 rows could not be used, more than --max_skipped 0.05 allows" in said
    precompute(*flags, "--max_skipped=0.1")
    whole = contents(tmp_path / "out")
    assert json.loads(whole["skipped.jsonl"])["row"] == 6
    precompute(*flags, "--max_skipped=0.1")
    assert contents(tmp_path / "out") == whole
    capfd.readouterr()
    path = tmp_path / "parquet/train-1.parquet"
    os.utime(path, (1, 1))
    assert "holds another cache (source.fingerprint" in precompute.refused(
        *flags, "--max_skipped=0.1"
    )
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 + 1 :])
    assert "the stream can't be read" in precompute.refused(
        *flags, f"--output_dir={tmp_path / 'other'}"
    )


@pytest.fixture(params=[pytest.param("train_text_to_image", marks=pytest.mark.long), "train_flow"])
def trainer(request, tmp_path, flags):
    """(a script that trains from images and captions, flags of 4 steps of 4 images)."""
    argv = [
        f"--pretrained_model_name_or_path={make_models(tmp_path)}",
        "--max_train_steps=4",
        "--checkpointing_steps=2",
        "--random_flip",
        "--num_validation_images=1",
    ]
    if request.param == "train_flow":
        argv.append(f"--transformer_config_name_or_path={make_prx(tmp_path / 'config')}")
    script = {"train_text_to_image": train_text_to_image, "train_flow": train_flow}[request.param]
    return script, script.flags(tmp_path / "trained", *argv)


def stream_of(tmp_path):
    return [
        f"--train_data_dir={tmp_path / 'parquet'}",
        "--streaming",
        "--shuffle_buffer=5",
        "--resolution=16",
    ]


@pytest.mark.ci
def test_streaming_trainers_resume_exactly(tmp_path, trainer, raw):
    """One of the two trainers reads from a bucket, in two processes."""
    script, argv = trainer
    num_processes = 2 if script is train_text_to_image else 1
    argv = [
        *argv,
        *stream_of(tmp_path),
        f"--train_batch_size={4 // num_processes}",
        "--dataloader_num_workers=1",
    ]
    if script is train_text_to_image:
        argv += [f"--train_data_dir={raw}/tars/{{008..010}}.tar", "--caption_column=txt"]
    script.fork(*argv, num_processes=num_processes)
    again = [*argv, f"--output_dir={tmp_path / 'again'}", "--resume_from_checkpoint=latest"]
    script.kill_after_checkpoint(tmp_path / "again", *again, num_processes=num_processes)
    assert "Resuming from" in script.fork(*again, num_processes=num_processes)
    model = "unet" if script is train_text_to_image else "transformer"
    assert_same_weights(tmp_path / "trained" / model, tmp_path / "again" / model)


def test_train_text_to_image_reads_a_cache_made_by_streaming(tmp_path, flags):
    precompute(*flags)
    models = f"--pretrained_model_name_or_path={make_models(tmp_path)}"
    data = [f"--latents_dir={tmp_path / 'out'}", "--holdout=2", "--random_flip"]
    steps = ["--max_train_steps=1", "--train_batch_size=4"]
    train_text_to_image(*train_text_to_image.flags(tmp_path / "trained", models, *data, *steps))
    assert metrics(tmp_path / "trained")[-1]["step"] == 1


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([], "--streaming needs --max_train_steps"),
        (["--max_train_steps=1", "--holdout=2"], "leave --holdout or --streaming out"),
        (["--max_train_steps=1", "--train_batch_size=auto"], "give a number"),
        (
            ["--max_train_steps=1", "--bucket_step=8"],
            "make a cache with precompute_latents.py --streaming",
        ),
        (
            ["--max_train_steps=1", "--instance_prompt=x"],
            "--instance_prompt needs the images on a disk",
        ),
        (["--max_train_steps=1", "--latents_dir=x"], "--streaming does nothing with --latents_dir"),
    ],
)
@pytest.mark.parametrize(
    "script", [train_text_to_image, train_flow], ids=lambda x: x.module.__name__
)
def test_streaming_refuses_unsupported_flags_before_loading(script, argv, sentence):
    argv = ["--streaming", *argv, "--pretrained_model_name_or_path=x"]
    data = [] if "--latents_dir=x" in argv else ["--dataset_name=x"]
    assert sentence in script.refused(*argv, *data, status=2)


def test_streaming_supports_bucket_step_but_not_caption_and_mask_files(tmp_path, flags):
    precompute(*flags, "--bucket_step=8")
    assert "size" in datasets.load_from_disk(str(tmp_path / "out")).column_names
    for name, masks in (("captions", False), ("masks", True)):
        folder = make_masked(tmp_path / name, 4, masks=masks)
        if masks:  # and captions in a file
            make_captioned(folder, 4)
            for path in folder.glob("*.txt"):
                path.unlink()
        said = precompute.refused(
            *flags, f"--train_data_dir={folder}", f"--output_dir={tmp_path}/x"
        )
        assert f"{folder} has {name}" in said and "which --streaming can't read" in said
    error = precompute.refused(*flags, "--folder_repeats", status=2)
    assert "--folder_repeats needs the images on a disk" in error
