"""Open a data set as rows, with images left undecoded."""

import collections
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from datasets.data_files import SPLIT_KEYWORDS, DataFilesList
from huggingface_hub import DatasetCard, dataset_info

from diffusion_training.arguments import is_address, list_values
from diffusion_training.csv_files import find_csv_fault
from diffusion_training.data.flags import list_allowed
from diffusion_training.data.folders import (
    MASK,
    REFERENCE,
    add_captions,
    advise_captions,
    apply_folder_flags,
    check_files,
    describe_files,
    find_owner,
    find_partners,
    get_source,
    has_caption_files,
    has_reference_files,
    is_image,
    list_paths,
    resolve,
    split_suffix,
)
from diffusion_training.data.images import name_image, open_file
from diffusion_training.errors.faults import suppressing_row_errors
from diffusion_training.errors.printing import amount, print_once
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import hash_values
from diffusion_training.library_fixes import (
    end_streams_at_once,
    listed_once,
    refuse_cut_tars,
    skip_captions_that_are_not_utf_8,
    stream_tars_from_storage,
)

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset
# (rows, paths in a local folder, flags) -> (the rows with the columns of references, these columns)
AddReferences: TypeAlias = Callable[[Rows, Sequence[str], Namespace], tuple[Rows, list[str]]]

# Files that hold many images
PACKED = (".parquet", ".arrow", ".tar", ".h5", ".hdf5", ".lance", ".vortex")

# Flags that name a column
ROLES = (
    "image_column",
    "caption_column",
    "class_column",
    "mask_column",
    "conditioning_image_column",
)

# Archives that `datasets` unpacks
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".7z", ".rar")


class ImageRows(NamedTuple):
    """The rows of a data set, with images left undecoded as {"bytes", "path"}."""

    rows: Rows
    column: str  # the column of images
    mask_column: str | None = None
    allowed: Sequence[str] = ()  # see `list_allowed`


def load_rows(
    args: Namespace,
    streaming: bool = False,
    others: Iterable[Any] = (),
    add_references: AddReferences | None = None,
) -> ImageRows:
    """Open the data set. `others` are further columns to read, or lists of them.

    Columns that are not named are not read: they may hold images. add_references: that of
    data/references.py, to read reference images too.
    """
    source = get_source(args)
    # the unconditional trainer has neither flag
    caption_column: Any = vars(args).get("caption_column")
    extension = "." + vars(args).get("caption_extension", ".txt").lstrip(".")
    listed = list_paths(source)  # once, because it takes seconds for 1e5 files
    check_repository(source, extension, args)
    has_captions = has_caption_files(listed, extension)
    builder, rows = open_builder(source, listed, has_captions, streaming, args)
    rows, mask_column = separate_masks(rows, listed, args)
    references: Sequence[str] = ()
    if add_references:
        rows, references = add_references(rows, listed, args)
    names = [*others, mask_column or [], *references]
    wanted = [name for values in names for name in list_values(values)]
    if has_captions and caption_column in wanted:
        if caption_column in rows.features:
            fail(
                f"{source} has captions in a metadata file and in {extension} files beside the "
                "images: move one of them away, or choose another column with --caption_column"
            )
        if streaming:
            fail(
                f"{source} has captions in files beside the images, which --streaming can't read: "
                "leave it out"
            )
        rows = add_captions(rows, caption_column, extension)
    if caption_column in wanted and not streaming:
        rows = apply_folder_flags(rows, caption_column, args)
    features = rows.features or {}
    column = choose_image_column(
        source,
        features,
        wanted,
        list_values(caption_column),
        mask_column,
        references,
        listed,
        extension,
        args,
    )
    image_columns = list_image_columns(features)
    with explained(f"column {column!r} of {source} can't be read as images"):
        for name in [column, *wanted]:
            if name in (column, mask_column, *references, *image_columns):
                inner = getattr(features[name], "feature", None)
                if isinstance(inner, datasets.Value):  # a cast would take them for a line of pixels
                    raise ValueError("it has lists of numbers: store the bytes of an image file")
                # Plain bytes and paths become images too. This must not change the fingerprint,
                # because existing caches refer to it.
                keep = not streaming and name not in image_columns
                options = {"new_fingerprint": rows._fingerprint} if keep else {}
                rows = rows.cast_column(name, datasets.Image(decode=False), **options)
    if os.path.isdir(source) and os.environ.get("RANK", "0") == "0":
        report_unused(source, builder, rows, args.dataset_split, extension)
    if references and not args.allow_missing_conditioning:
        rows = leave_out_incomplete(rows, references, source)
    rows = limit_rows(rows, args)
    rows = rows.select_columns([column, *wanted])
    if streaming:
        end_streams_at_once()
        rows._fingerprint = identify_stream(
            builder, args.dataset_split, column, wanted, args.max_train_samples
        )
    elif len(rows) == 0:
        fail(f"{source} holds no images in split {args.dataset_split!r}")
    return ImageRows(rows, column, mask_column, list_allowed(args))


def identify_stream(builder: datasets.DatasetBuilder, *taken: Any) -> str:
    """Return a fingerprint of a stream.

    It covers the files, their revisions (for files on a disk, the modification times), and `taken`,
    the values that select what is read from them.
    """
    files = {
        str(name): [list(paths), paths.origin_metadata]
        for name, paths in (builder.config.data_files or {}).items()
    }
    return hash_values([files, taken])


def limit_rows(rows: Rows, args: Namespace) -> Rows:
    """Take --max_train_samples rows, drawn at random; from a stream the first ones."""
    if args.max_train_samples is None:
        return rows
    if isinstance(rows, datasets.IterableDataset):  # shuffling would draw others in each epoch
        return rows.take(args.max_train_samples)
    return rows.shuffle(seed=args.seed).take(min(args.max_train_samples, len(rows)))


def leave_out_incomplete(
    rows: datasets.Dataset, references: Sequence[str], source: str
) -> datasets.Dataset:
    """The rows that have an image in all columns of references; prints how many have not."""
    is_whole = np.ones(len(rows), bool)
    for name in references:
        column = rows.data[name]
        parts = [pc.is_null(pc.struct_field(column, part)) for part in ("bytes", "path")]
        is_missing = pc.and_(*parts).to_pylist()
        is_whole &= ~np.array(pick(rows, is_missing), bool)
    if not is_whole.any():
        fail(f"{source}: no image has a reference in {', '.join(references)}")
    if not is_whole.all():
        print_once(
            f"{source}: {amount(int((~is_whole).sum()), 'image')} of {len(rows)} without a "
            "reference left out; --allow_missing_conditioning trains them as text to image"
        )
        rows = rows.select(np.flatnonzero(is_whole))
    return rows


def pick(rows: datasets.Dataset, values: list[Any]) -> list[Any]:
    """The values of the rows that are chosen, by their positions in the table."""
    if rows._indices is None:
        return values
    return [values[i] for i in rows._indices.column(0).to_pylist()]


def open_builder(
    source: str, listed: Sequence[str], has_captions: bool, streaming: bool, args: Namespace
) -> tuple[datasets.DatasetBuilder, Rows]:
    """Open a data set; returns (its builder, its rows). listed: the paths in a local folder."""

    def open_as(kind: str, files: Any = None) -> datasets.DatasetBuilder:
        return datasets.load_dataset_builder(
            kind, args.dataset_config_name, data_files=files, cache_dir=args.cache_dir
        )

    refuse_cut_tars()
    skip_captions_that_are_not_utf_8()
    if os.path.isdir(source) and "::" in source:
        fail(f"{source}: `datasets` reads '::' in a path as an archive: rename the folder")
    cache = args.cache_dir or datasets.config.HF_DATASETS_CACHE
    with explained(f"{cache} can't be written to: give another folder with --cache_dir"):
        os.makedirs(cache, exist_ok=True)  # it is in the home folder, which may be read-only
    with explained(f"{source} can't be loaded as a data set"), listed_once(source):
        check_files(listed)
        if is_address(source):
            stream_tars_from_storage()
            builder = open_as(*find_files(source))
        elif has_captions or (is_image_folder(listed) and not has_configs(source)):
            builder = open_as("imagefolder", list_split_files(source))
        else:
            builder = open_as(source)
    splits = builder.config.data_files or {}
    files = splits.get(args.dataset_split, [])
    metadata = []
    if builder.name == "imagefolder":
        metadata = [path for path in files if os.path.basename(path) in builder.METADATA_FILENAMES]
        if any(path.lower().endswith(".zip") for paths in splits.values() for path in paths):
            builder.config.drop_labels = True  # `datasets` fails at folders of images in archives
    tables = files if builder.name == "csv" else metadata
    described = f"{source} (with {' and '.join(metadata[:2])})" if metadata else source
    for path in tables:
        if path.lower().endswith((".csv", ".tsv")) and os.path.isfile(path):
            with explained(f"{path} can't be loaded as a data set"):
                print_once(find_csv_fault(path))
    with explained(f"{described} can't be loaded as a data set"):
        if streaming:
            # `datasets` 5 would decode the images of a folder on the hub, which no cast undoes
            builder.config.decode_num_threads = 0
            return builder, builder.as_streaming_dataset(split=args.dataset_split)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=args.dataset_split)
    if metadata:
        if not isinstance(rows.features["image"], datasets.Image):
            fail(f"{described} has a column 'image', which hides the images: rename it")
        paths = pc.struct_field(rows.data["image"], "path").to_pylist()
        path, count = collections.Counter(paths).most_common(1)[0]
        sentence = f"{described} names {path} {count} times"
        if count > 1 and len(metadata) > 1:
            fail(f"{sentence}: keep only one of these files")
        if count > 1:
            print_once(f"{sentence}; each time counts as an image")
    return builder, rows


def check_repository(source: str, extension: str, args: Namespace) -> None:
    """Stop with an error if a data set on the hub has files beside images, as a folder may have.

    `datasets` would not read them, or read nothing else. extension: that of caption files.
    """
    if os.path.exists(source) or is_address(source):
        return
    try:
        names = [each.rfilename for each in dataset_info(source).siblings or []]
    except Exception:  # `datasets` says why, or has the data set in its cache
        return
    if not is_image_folder(names):
        return
    flags = vars(args)
    has_metadata = any(Path(name).stem == "metadata" for name in names)
    found = {
        "captions in files": has_caption_files(names, extension) and not has_metadata,
        "masks": "mask_column" in flags
        and not args.mask_column
        and any(find_owner(name, MASK) for name in names),
        "references": "conditioning_image_column" in flags
        and not args.conditioning_image_column
        and has_reference_files(names),
    }
    if beside := " and ".join(what for what, is_found in found.items() if is_found):
        fail(
            f"{source} has {beside} beside the images, which are read from a folder: run `hf "
            f"download {source} --repo-type dataset --local-dir FOLDER`, then give "
            "--dataset_name FOLDER"
        )


def list_splits(spec: str) -> set[str]:
    """The names of the splits in --dataset_split: train[:10%]+test -> {train, test}."""
    return {part.partition("[")[0].strip() for part in spec.split("+")}


def list_split_files(folder: str) -> dict[str, DataFilesList]:
    """{split: its files}. A folder such as train/, test/ or valid/, at any depth, holds a split.

    Without train/, all other files are in that split. `datasets` itself would also look for such
    words in names, and a single image `red train.png` would leave out all others.
    """
    names = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}
    found: dict[str, list[str]] = {}
    for path in filter(os.path.isfile, sorted(list_files_of_folder(folder))):
        folders = Path(path).relative_to(folder).parts[:-1]
        split = next((names[name] for name in folders if name in names), "")
        found.setdefault(split, []).append(path)
    if others := found.pop("", None):
        found.setdefault("train", others)
    # with their times, as `datasets` has them, so that changed images are read again
    return {
        split: DataFilesList(files, [(str(os.path.getmtime(path)),) for path in files])
        for split, files in found.items()
    }


def is_image_folder(listed: Sequence[str]) -> bool:
    """Whether a folder holds more images than files of many; listed: the paths in it.

    `datasets` itself chooses by the most frequent suffix, which may be that of other files beside
    the images, such as photo.json.
    """
    return sum(map(is_image, listed)) > sum(path.lower().endswith(PACKED) for path in listed)


def has_configs(folder: str) -> bool:
    """Whether the README.md of a folder says which files a data set has."""
    card = Path(folder, "README.md")
    return card.is_file() and "configs" in DatasetCard.load(card).data.to_dict()


def find_files(address: str) -> tuple[str, list[str]]:
    """Return (the `datasets` builder for the files at an address, the files), or ValueError."""
    from diffusion_training.remote import list_data  # here: few data sets are at an address

    folder, found = list_data(address, (".parquet", ".tar"))
    kinds = {Path(name).suffix.lower() for name in found}
    if len(kinds) != 1:
        raise ValueError(
            "it holds both parquet files and tars: choose with /*.parquet or /*.tar"
            if kinds
            else "it holds neither parquet files nor tars"
        )
    kind = "webdataset" if ".tar" in kinds else "parquet"
    return kind, [f"{folder}/{name}" for name in found]


def list_image_columns(features: Any) -> list[str]:
    return [name for name, feature in features.items() if isinstance(feature, datasets.Image)]


def choose_image_column(
    source: str,
    features: Any,
    wanted: list[str],
    caption_columns: list[str],
    mask_column: str | None,
    references: Sequence[str],
    listed: Sequence[str],
    extension: str,
    args: Namespace,
) -> str:
    """The column of images. Stops with an error if it, or one of the wanted columns, is missing.

    listed: the paths in a local folder. extension: that of caption files.
    """
    columns = list_image_columns(features)
    column = args.image_column
    if column is None:
        column = columns[0] if len(columns) == 1 and "image" not in features else "image"
    known = ", ".join(features)
    if column not in features:
        fail(f"{source} has no column {column!r}, only {known}: choose with --image_column")
    for name in wanted:
        if name in columns and name in caption_columns:
            fail(f"column {name!r} of {source} holds images: choose another --caption_column")
        if [column, *wanted].count(name) > 1:
            given = [f"--{flag}" for flag in ROLES if name in list_values(vars(args).get(flag))]
            fail(
                f"column {name!r} of {source} can't have two roles: choose another with "
                f"{' or '.join(given)}"
            )
        if name not in features:
            advice = advise_captions(listed, extension)
            if name == mask_column:
                advice = "choose with --mask_column"
            elif name in references:
                advice = "choose with --conditioning_image_column"
            if name == vars(args).get("class_column"):
                advice = "choose with --class_column"
            fail(f"{source} has no column {name!r}, only {known}: {advice}")
    return column


def is_stray(path: str | None) -> bool:
    """Whether a file in an archive is no image; `datasets` makes a row of it too."""
    return (path or "").startswith("zip://") and not is_image(path)


def is_wanted(path: str | None) -> bool:
    return not any(find_owner(path, end) for end in (MASK, REFERENCE)) and not is_stray(path)


def separate_masks(rows: Rows, listed: Sequence[str], args: Namespace) -> tuple[Rows, str | None]:
    """Take masks (photo.mask.png beside photo.jpg, with any suffix of images) out of the rows.

    They are added as a column "mask" if the script has --mask_column and it is not set, or set to
    "mask". Returns (the rows, the column of masks or None). The fingerprint of the rows depends on
    the masks.

    listed: the paths in a local folder.
    """
    source = get_source(args)
    mask_column = vars(args).get("mask_column")
    may_add = "mask_column" in args and mask_column in (None, "mask")
    if not isinstance((rows.features or {}).get("image"), datasets.Image):
        return rows, mask_column
    if isinstance(rows, datasets.IterableDataset):
        if may_add and mask_column is None and any(find_owner(path, MASK) for path in listed):
            fail(
                f"{source} has masks beside the images, which --streaming can't read: leave it out"
            )
        rows = rows.cast_column("image", datasets.Image(decode=False))
        return rows.filter(lambda item: is_wanted(item["image"]["path"])), mask_column
    paths = pc.struct_field(rows.data["image"], "path").to_pylist()
    images = [row for row, path in enumerate(paths) if is_wanted(path)]
    strays = [path for path in paths if is_stray(path)]
    if strays:
        print_once(
            f"{source}: not used: {amount(len(strays), 'file')} in archives, such as "
            f"{name_image(0, {'path': strays[0]}, source)} (unpack archives that hold captions)"
        )
    if len(images) < len(paths):  # they are equal if a metadata file names only images
        rows = rows.select(images)
    if not may_add or "mask" in rows.features:
        return rows, mask_column
    masks = find_partners([*paths, *listed], MASK, "masks")
    if not masks:
        return rows, mask_column
    # the fingerprint of the rows covers masks in archives
    fingerprint = hash_values(sorted([rows._fingerprint, *describe_files(masks.values())]))
    column = [masks.get(split_suffix(paths[row])[0]) for row in images]
    return rows.add_column("mask", column, new_fingerprint=fingerprint), "mask"


def report_unused(
    folder: str, builder: datasets.DatasetBuilder, rows: Rows, split: str, extension: str
) -> None:
    """Print which files of a folder are not in the data set; `datasets` omits them silently.

    folder: see `get_source`. extension: that of caption files.
    """
    # Other builders read all files of a split. A stream's rows are not known in advance.
    leaves_out = builder.name == "imagefolder" and isinstance(rows, datasets.Dataset)
    used = []
    for name in list_image_columns(rows.features) if leaves_out else ():  # images and masks
        used += filter(None, pc.struct_field(rows.data[name], "path").to_pylist())
    captions = {os.path.splitext(path)[0] + extension for path in used}

    def is_read(path: str) -> bool:
        """Whether a file that the builder lists is read; it lists all, as possible archives."""
        base = os.path.basename(path)
        is_metadata = base in builder.METADATA_FILENAMES
        return is_metadata or path in captions or base.lower().endswith(ARCHIVES)

    splits = builder.config.data_files or {}
    wanted = list_splits(split)
    others = [name for name in splits if name not in wanted and "all" not in wanted]
    if others:
        count = sum(len(splits[name]) for name in others)
        names = ", ".join(map(str, others))
        example = os.path.relpath(splits[others[0]][0], folder)
        sentence = f"{amount(count, 'file')} of other splits ({names}), such as {example}"
        print_once(f"{folder}: not used: {sentence}")
    for name, paths in splits.items():
        used += [path for path in paths if name != split or not leaves_out or is_read(path)]
    known = {os.path.join(resolve(os.path.dirname(path)), os.path.basename(path)) for path in used}
    files = list_files_of_folder(folder)
    is_card = re.compile(r"(.*/)?readme\.md", re.IGNORECASE).fullmatch  # of a data set
    unused = sorted(path for path in files if path not in known and not is_card(path))
    if unused:
        suffixes = [Path(path).suffix.lower() or "no suffix" for path in unused]
        kinds = collections.Counter(suffixes).most_common(5)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds)
        example = os.path.relpath(unused[0], folder)
        print_once(
            f"{folder}: {len(unused)} of {len(files)} files are not used ({counts}), "
            f"such as {example}"
        )


def list_files_of_folder(root: str) -> list[str]:
    """The files in a folder, and folders that can't be entered, except hidden ones and __names."""
    files = []
    for folder, folders, names in os.walk(root):
        for name in folders:
            path = f"{folder}/{name}"
            if os.path.islink(path) or not os.access(path, os.R_OK | os.X_OK):
                names.append(name)
        files += [os.path.join(folder, name) for name in names]

    # also leaves out __download__, which download_images.py writes
    return [
        path for path in files if not re.search(r"/(\.|__)", Path(path).as_posix()[len(root) :])
    ]


def read_items(rows: Rows, keys: list[tuple]) -> list[dict]:
    """The rows of some keys (epoch, row, ...), as dicts.

    They are read together, because reading a single row takes longer than decoding a small image.
    """
    if len(keys[0]) == 4:  # streamed: the key holds the row itself
        return [item for _, _, _, item in keys]
    columns = rows[[key[1] for key in keys]]
    rows_of_values = zip(*columns.values(), strict=True)
    return [dict(zip(columns, values, strict=True)) for values in rows_of_values]


def name_rows(rows: datasets.Dataset, column: str, source: str, numbers: range) -> list[str]:
    """The names of consecutive rows, as in a cache: see `name_image`. No image is read."""
    images = rows.data[column]
    paths = pa.nulls(len(images), pa.string())  # for an array
    if pa.types.is_struct(images.type):
        paths = pc.struct_field(images, "path")
    own = slice(numbers.start, numbers.stop)
    if rows._indices is None:
        paths = paths[own]
    else:  # drawn by --max_train_samples
        paths = paths.take(rows._indices.column(0)[own])
    pairs = zip(numbers, paths.to_pylist(), strict=True)
    return [name_image(row, {"path": path}, source) for row, path in pairs]


class RowDataset(torch.utils.data.Dataset):
    """The rows of `load_rows` and their names; a script's subclass defines the batches."""

    sizes: Any = None  # of each row, int [rows, 2], if they differ
    num_left_out = 0  # images that could not be decoded when they were cached
    holds = "images"  # what `digest` covers

    def __init__(self, images: ImageRows, source: str, shuffle_buffer: int = 0) -> None:
        self.rows, self.column, _, self.allowed = images
        self.source = source  # see `get_source`
        self.shuffle_buffer = shuffle_buffer  # for a stream
        self.fingerprint = self.rows._fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """The name of each row, as in a cache: its file in the folder, or its number.

        No image is read.
        """
        return name_rows(self.rows, self.column, self.source, range(len(self.rows)))

    def longest(self, row: int) -> Any:
        """A batch of one row, with a caption as long as captions can be."""
        return self[[(0, row, 1.0)]]

    def digest(self, row: int) -> str:
        """A hash of a row's image. If the row has only its path, the file is read."""
        image = self.rows[row][self.column]
        data = image["pixels"].numpy().tobytes() if "pixels" in image else image["bytes"]
        # the file may be gone, or the path may be only a name for the bytes
        with suppressing_row_errors():
            if data is None or "size" in image:
                with open_file(image["path"], self.allowed) as file:
                    data = file.read()
        return xxhash.xxh3_128_hexdigest(data or repr(image["path"]).encode())
