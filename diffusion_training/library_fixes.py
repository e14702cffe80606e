"""Changes to libraries: each works around a fault. No other module changes a library.

A change lasts from its call on, or for a block. tests/package/test_library_fixes.py checks that the
library still has each fault. When such a test fails, remove the change.
"""

import contextlib
import functools
import glob
import multiprocessing.queues
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.optimizer
import datasets
import torch
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from datasets.utils.file_utils import xopen
from fsspec.implementations.local import LocalFileSystem


def refuse_cut_tars() -> None:
    """Let tarfile raise ReadError for a tar without a proper end.

    Python 3.11 reads a tar that was cut off or damaged between two files as a shorter one
    (https://github.com/python/cpython/issues/120740, open, for damaged ones).
    """
    tarfile.TarFile.tarinfo = TarMember


class TarMember(tarfile.TarInfo):
    """A file in a tar; see `refuse_cut_tars`."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "TarMember":
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            # a proper end, or a file that is not a tar
            is_end = isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
            if is_end or tar.offset == 0:
                raise
            file = tar.fileobj
            while hasattr(file, "fileobj"):  # a decompressor
                file = file.fileobj
            name = getattr(file, "name", getattr(file, "path", "a tar"))
            raise tarfile.ReadError(
                f"{name} was cut off or is damaged at byte {tar.offset:,} ({error}): copy it again"
            ) from None


def stream_tars_from_storage() -> None:
    """Let `datasets` stream tars from object storage, such as s3://bucket/000.tar.

    `datasets` 5.2 opens a tar with block_size=0, for faster streaming from http and the hub
    (https://github.com/huggingface/datasets/pull/6578). Other file systems, such as s3fs, raise
    TypeError for it.
    """
    datasets.utils.file_utils.xopen = open_for_tars


def open_for_tars(file: Any, *args: Any, **options: Any) -> Any:
    """`xopen` of `datasets`; see `stream_tars_from_storage`."""
    if str(file).split("://")[0] not in ("http", "https", "hf"):
        options.pop("block_size", None)
    return xopen(file, *args, **options)


def skip_captions_that_are_not_utf_8() -> None:
    """Let `datasets` read a caption in a tar that is not UTF-8 as a missing one.

    `datasets` 5.2 raises UnicodeDecodeError, without the name of the file or the tar, and none of
    the tars can be used. An image beside such a caption on a disk has no caption either.
    """
    for extension in ("txt", "text", "transcript"):
        WebDataset.DECODERS[extension] = decode_caption


def decode_caption(data: bytes) -> str | None:
    """Text from UTF-8, None if it is in another encoding."""
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode()
    print_first("Captions in tars that are not UTF-8 are not used: their images have no caption")
    return None


print_first = functools.cache(print)  # a sentence only once


def end_streams_at_once() -> None:
    """Let a pass over a shuffled stream of parquet files end without a wait of 5 s.

    `datasets` 5.2 waits so that Arrow's threads end before Python does; otherwise Arrow may hang
    (https://github.com/apache/arrow/issues/45214, open). It waits after each pass, and the device
    would wait as well.
    """
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


@contextlib.contextmanager
def listed_once(source: str) -> Iterator[None]:
    """List a local folder only once in the block, and take its path literally.

    `datasets` 5.2 lists it for each of the 66 patterns that a split's files may match
    (https://github.com/huggingface/datasets/pull/8014, open), and reads the `[` in its path as part
    of a pattern (https://github.com/huggingface/datasets/issues/7468, open).
    """
    source = Path(source).as_posix()  # as fsspec has it on each system
    find = LocalFileSystem.find
    glob_pattern = LocalFileSystem.glob

    def glob_in_folder(fs: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:
        if path.startswith(f"{source}/"):
            path = glob.escape(source) + path.removeprefix(source)
        return glob_pattern(fs, path, *args, **options)

    LocalFileSystem.find = functools.cache(find)
    LocalFileSystem.glob = glob_in_folder
    try:
        yield
    finally:
        LocalFileSystem.find = find
        LocalFileSystem.glob = glob_pattern


def exit_if_sending_fails() -> None:
    """Let a loader process exit if it can't send a batch, for example if shared memory is full.

    Python 3.11 prints the error, drops the batch and continues
    (https://github.com/python/cpython/issues/84376, open), and torch 2.15 waits for that batch
    forever (https://github.com/pytorch/pytorch/issues/142884, open).
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        lambda error, batch: os._exit(1)
    )


def look_for_lomo_once() -> None:
    """Let accelerate find out once whether the package lomo_optim is installed.

    accelerate 1.15 asks twice in each step of an optimizer. Python then looks into all folders of
    sys.path, which may be on another machine.
    """
    accelerate.optimizer.is_lomo_available = is_lomo_available


is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)


def raise_recompile_limit(num_shapes: int) -> None:
    """Let torch compile a model separately for each of `num_shapes` shapes of its inputs.

    torch 2.15 compiles a function 8 times, and runs it uncompiled for further shapes, with only a
    line in its log. torch.compile has an argument `recompile_limit` for this since
    https://github.com/pytorch/pytorch/pull/177936, but torch 2.13 lacks it. Use it when
    requirements.txt asks for a newer torch.
    """
    torch._dynamo.config.recompile_limit = 8 * num_shapes
