"""Check CSV files before they are read, because a stray quote would silently join rows."""

import csv
from pathlib import PurePosixPath

import fsspec

MAX_VALUE = 2**20  # characters; pyarrow does not read longer rows


def check_csv(url: str) -> str | None:
    """Check the quotes and the number of values of all rows, which table readers do not do.

    After a quote at the start of a value, a reader takes all lines up to the next quote as this
    value. pandas fills up rows that are too short. Raises ValueError with the line of such a row.
    Returns a warning if values span several lines, which may be intended, else None.
    """
    name = PurePosixPath(url.lower().removesuffix(".gz"))
    delimiter = "\t" if name.suffix == ".tsv" else ","
    csv.field_size_limit(MAX_VALUE)
    spanning = []
    begin = 1  # the line in which a row begins
    # latin-1 reads any bytes, and quotes and delimiters are the same in UTF-8
    options = {"encoding": "latin-1", "newline": "", "compression": "infer"}
    with fsspec.open(url, "rt", **options) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        width = 0
        try:
            for row in reader:
                width = width or len(row)
                if len(row) not in (0, width):
                    raise ValueError(f"{len(row)} values instead of {width}")
                if reader.line_num > begin:
                    spanning.append(begin)
                begin = reader.line_num + 1
        except (csv.Error, ValueError) as error:
            raise ValueError(
                f"the row that begins in line {begin} can't be read: {error}. A value that begins "
                'with a quote must end with one, and a quote inside it must be doubled: ""'
            ) from None
    if not spanning:
        return None
    return (
        f"{url}: {len(spanning):,} rows span several lines, the first one begins in line "
        f"{spanning[0]:,}. If this is not intended, look for a stray or missing quote"
    )
