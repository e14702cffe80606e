"""Make a latent cache from rows that were chosen from another one with `datasets`.

python -m diffusion_training.latents.filtered chosen --like latents --output_dir latents-chosen
"""

import argparse
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from diffusion_training.arguments import PATH, make_parser
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import explained, fail, in_one_sentence
from diffusion_training.files import clean, delete, lock_folder, write_file
from diffusion_training.latents.cache import finish_cache, writing_shard
from diffusion_training.latents.columns import (
    checksum_row,
    group_by_checksum,
    list_columns,
    name_empty_files,
    view_rows,
)
from diffusion_training.latents.passes import LatentRows
from diffusion_training.latents.reader import FILTERED, load_cache
from diffusion_training.latents.settings import name_shard
from diffusion_training.remote import read_bytes

# entries that `finish_cache` makes anew, or that are true only of the other cache
COUNTED = ("rows", "encoded_again", "captions_cut", "skipped", "shards", "batch_size")
BEGUN = b"{}"  # cache.json until the cache is complete


def make_filtered(rows: datasets.Dataset, like: str, output_dir: Path) -> None:
    """Write `rows`, with the columns and models of the cache `like`, as a cache.

    Rows may be missing, repeated or in another order, and numbers may have changed: all checksums
    are computed again. A row that still has the checksum of its numbers must be one of the cache's,
    because rows from a cache of another VAE would be trained on as if they fitted.
    """
    opened = load_cache(like)
    if not len(rows):
        fail("there are no rows to write")
    # drops other columns, such as one that was added to choose rows
    schema = next(batch.schema for batch in opened.shards)
    cache = {name: value for name, value in opened.settings.items() if name not in COUNTED}
    fingerprint = f"{FILTERED}{rows._fingerprint}"
    cache["source"] = {"fingerprint": fingerprint, "rows": len(rows)}
    groups = group_by_checksum(list_columns(cache))
    own = pa.schema([field for field in schema if field.name not in groups])
    # without checksums, rows of another VAE could not be told from the cache's
    if missing := {*own.names, "checksum"} - {*rows.column_names}:
        fail(f"the rows have no column {min(missing)!r}, which {like} has")
    known = np.concatenate([batch["checksum"].to_numpy() for batch in opened.shards])

    def is_begun(names: set[str]) -> bool:
        """Whether this command was ended here before it was done."""
        begun = {"cache.json", "unfinished"}
        return begun <= names and (output_dir / "cache.json").read_bytes() == BEGUN

    lock = lock_folder(output_dir, output_dir, is_begun, "cache that this command has begun")
    clean(output_dir)
    for path in output_dir.glob("[!.]*"):
        delete(path)
    write_file(output_dir / "cache.json", BEGUN)
    (output_dir / "unfinished").mkdir()
    rows = rows.select_columns([*own.names, "checksum"])
    rows = rows.with_format("arrow")
    per_shard = cache["rows_per_shard"]
    for number, first in enumerate(range(0, len(rows), per_shard)):
        numbers = range(first, min(first + per_shard, len(rows)))
        with writing_shard(output_dir / name_shard(number, cache), numbers) as (_, add):
            table = rows[first : first + per_shard]
            row = first
            with explained(f"the columns differ from those of {like}"):
                before = table["checksum"]
                table = pa.table({name: table[name] for name in own.names}).cast(own)
            for batch in table.combine_chunks().to_batches():
                columns = {name: batch[name] for name in own.names}
                for checksum, names in groups.items():
                    for name in names:
                        check_numbers(name, columns[name])
                    views = {name: view_rows(columns[name]) for name in names}
                    sums = [
                        checksum_row({name: view[row] for name, view in views.items()})
                        for row in range(len(batch))
                    ]
                    columns[checksum] = pa.array(sums, schema.field(checksum).type)
                now = columns["checksum"].to_numpy()
                was = before[row - first : row - first + len(batch)].to_numpy()
                is_foreign = (was.astype(now.dtype) == now) & ~np.isin(now, known)
                if is_foreign.any():
                    fail(
                        f"row {row + int(is_foreign.argmax())} is of another cache than "
                        f"{like}: give --like the cache that it was chosen from"
                    )
                numbers = range(row, row + len(batch))
                row += len(batch)
                add(LatentRows(0, numbers, pa.RecordBatch.from_pydict(columns, schema), [], {}))
    empty_prompt = {
        name: np.load(io.BytesIO(read_bytes(f"{like}/{file}.npy")))
        for name, file in name_empty_files(cache).items()
    }
    write_file(output_dir / "cache.json", json.dumps(cache, indent=1))
    finish_cache(output_dir, empty_prompt, 1.0)
    lock.release(force=True)


def check_numbers(name: str, column: pa.ListArray | pa.FixedSizeListArray) -> None:
    """End the program if a column lacks numbers, or holds some that are not finite."""
    numbers = column.flatten()
    if column.null_count or numbers.null_count:
        fail(f"column {name!r} has missing values: leave such rows out")
    if not np.isfinite(numbers.to_numpy()).all():
        fail(f"column {name!r} has numbers that are not finite: leave such rows out")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__file__, __doc__)
    add = parser.add_argument
    add("rows", type=PATH, help="folder of `datasets.Dataset.save_to_disk`")
    add("--like", type=PATH, required=True, help="the cache that the rows were chosen from")
    add("--output_dir", type=PATH, required=True, help="folder for the new cache")
    return parser.freeze(parser.parse_args(argv))


@in_one_sentence
def main(args: argparse.Namespace) -> None:
    with explained(f"{args.rows} is not a folder of save_to_disk"):
        state = Path(args.rows, "state.json")  # of one split
        if state.is_file() and not json.loads(state.read_text())["_data_files"]:
            raise ValueError("it holds no rows")  # `datasets` can't load it
        rows = datasets.load_from_disk(args.rows)
        if not isinstance(rows, datasets.Dataset):
            raise ValueError(f"it holds several splits: {', '.join(rows)}. Give one split's folder")
    make_filtered(rows, args.like, Path(args.output_dir))
    print(f"{args.output_dir} is a latent cache of {amount(len(rows), 'row')}")


if __name__ == "__main__":
    main(parse_args())
