"""Faults of libraries: each is there without our change, and gone with it.

A test fails if the library has mended its fault, and names the change to remove. Where another test
shows that the change helps, the docstring names that test.
"""

import importlib.metadata
import importlib.util
import io
import platform
import tarfile
import time

import accelerate.optimizer
import datasets
import pytest
import torch
from accelerate import Accelerator
from conftest import make_images
from datasets.packaged_modules.webdataset.webdataset import WebDataset, text_loads
from datasets.utils import file_utils
from fsspec.implementations.local import LocalFileSystem

from diffusion_training import library_fixes
from diffusion_training.library_fixes import (
    decode_caption,
    end_streams_at_once,
    look_for_lomo_once,
    refuse_cut_tars,
)
from diffusion_training.models import compile_model


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """The libraries as they are installed, whatever other tests have changed in this process."""
    monkeypatch.setattr(tarfile.TarFile, "tarinfo", tarfile.TarInfo)
    monkeypatch.setattr(file_utils, "xopen", library_fixes.xopen)
    find_lomo = library_fixes.is_lomo_available.__wrapped__
    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", find_lomo)
    monkeypatch.setitem(WebDataset.DECODERS, "txt", text_loads)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 5)
    with torch._dynamo.config.patch(recompile_limit=8):
        yield


def assert_has_fault(fault, library, change):
    python = library == "Python"
    version = platform.python_version() if python else importlib.metadata.version(library)
    advice = f"when older ones are no longer supported, remove {change} from library_fixes.py"
    assert fault, f"{library} {version} mended this: {advice}"


def error_of(function, *args):
    """What an exception says; an empty string if there is none."""
    try:
        function(*args)
    except Exception as error:
        return repr(error)
    return ""


def make_tar():
    """Return (a tar of four files, where each begins)."""
    data, begins = io.BytesIO(), []
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in "abcd":
            begins.append(tar.offset)
            info = tarfile.TarInfo(name)
            info.size = 512
            tar.addfile(info, io.BytesIO(b"x" * 512))
    return data.getvalue(), begins


@pytest.mark.parametrize("fault", ["cut between two files", "cut in a header", "damaged header"])
def test_tarfile_reads_a_broken_tar_as_a_shorter_one(fault):
    """Through `load_rows`: test_a_truncated_tar_is_refused_not_read_as_a_shorter_one."""
    whole, begins = make_tar()
    broken = {
        "cut between two files": whole[: begins[2]],
        "cut in a header": whole[: begins[2] + 100],
        "damaged header": whole[: begins[2]] + b"?" * 512 + whole[begins[2] + 512 :],
    }[fault]

    def read(data):
        return tarfile.open(fileobj=io.BytesIO(data)).getnames()

    assert_has_fault(error_of(read, broken) == "", "Python", "refuse_cut_tars")
    refuse_cut_tars()
    assert read(whole) == ["a", "b", "c", "d"]
    assert "was cut off or is damaged at byte 2,048" in error_of(read, broken)


def test_datasets_names_no_file_for_a_caption_that_is_not_utf_8():
    """Through `load_rows`: test_captions_in_tars_are_those_of_files_beside_images."""
    error = error_of(WebDataset.DECODERS["txt"], b"caf\xe9")
    assert_has_fault("UnicodeDecodeError" in error, "datasets", "skip_captions_that_are_not_utf_8")
    assert decode_caption(b"caf\xe9") is None and decode_caption(b"caf\xc3\xa9\n") == "café\n"


def test_torch_hangs_if_a_loader_process_can_not_send_a_batch():
    """With the change: test_a_loader_process_that_can_not_send_a_batch_ends_the_run."""

    class Items(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return lambda: None  # can't be pickled

    loader = torch.utils.data.DataLoader(Items(), None, sampler=[0], num_workers=1, timeout=1)
    waited = "timed out" in error_of(list, loader)
    assert_has_fault(waited, "torch", "exit_if_sending_fails")


def test_datasets_lists_a_folder_for_each_pattern(tmp_path, monkeypatch):
    """With the change: test_load_rows_lists_a_folder_only_once."""
    folder = make_images(tmp_path / "images", 2)
    listed, listing = [], LocalFileSystem.ls
    monkeypatch.setattr(
        LocalFileSystem, "ls", lambda fs, path, **k: listed.append(path) or listing(fs, path, **k)
    )
    datasets.load_dataset_builder(folder, cache_dir=tmp_path / "cached")
    assert_has_fault(len(listed) > 10, "datasets", "functools.cache in listed_once")


def test_datasets_reads_a_bracket_in_a_folders_path_as_a_pattern(tmp_path):
    """With the change: test_special_characters_in_folder_paths_are_taken_literally."""
    folder = make_images(tmp_path / "by [artist]", 2)
    error = error_of(datasets.load_dataset_builder, folder)
    assert_has_fault("contain any" in error, "datasets", "glob_in_folder in listed_once")


def test_datasets_opens_tars_with_an_option_that_s3fs_does_not_have(storage):
    """With the change: test_streaming_from_a_bucket_gives_the_rows_of_a_copy_on_disk."""
    if storage is None:
        pytest.skip("needs moto[server]")
    fs = pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem()
    bucket = f"fault-{time.time_ns()}"
    fs.mkdir(bucket)
    fs.pipe(f"{bucket}/a.tar", make_tar()[0])
    files = datasets.StreamingDownloadManager().iter_archive(f"s3://{bucket}/a.tar")
    error = error_of(list, files)
    assert_has_fault("'block_size'" in error, "datasets", "stream_tars_from_storage")


def test_datasets_waits_after_each_pass_over_a_shuffled_stream(tmp_path, monkeypatch):
    for name in "ab":
        rows = datasets.Dataset.from_dict({"number": [1, 2]})
        rows.to_parquet(tmp_path / f"{name}.parquet")
    stream = datasets.load_dataset(str(tmp_path), split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=2)
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    assert len(list(stream)) == 4
    assert_has_fault(5 in waits, "datasets", "end_streams_at_once")
    waits.clear()
    end_streams_at_once()
    assert len(list(stream)) == 4 and not any(waits)


def test_accelerate_looks_for_lomo_in_each_step_of_an_optimizer(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Accelerator(cpu=True).prepare_optimizer(torch.optim.SGD([weight]))
    find_spec, searched = importlib.util.find_spec, []
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: searched.append(name) or find_spec(name)
    )

    def count_searches():
        searched.clear()
        optimizer.step()
        return searched.count("lomo_optim")

    count_searches()
    assert_has_fault(count_searches() > 0, "accelerate", "look_for_lomo_once")
    look_for_lomo_once()
    count_searches()
    assert count_searches() == 0


def test_torch_stops_compiling_after_eight_sizes():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    def count_compiled(compile):
        compiled = []

        def backend(graph, inputs):
            compiled.append(inputs)
            return graph.forward

        torch._dynamo.reset()
        model = Double()
        compile(model, backend)
        for size in range(2, 12):
            model(torch.ones(size))
        return len(compiled)

    alone = count_compiled(lambda model, backend: model.compile(backend=backend, dynamic=False))
    assert_has_fault(alone == 8, "torch", "raise_recompile_limit")
    assert count_compiled(lambda model, backend: compile_model(model, backend, 2)) == 10
