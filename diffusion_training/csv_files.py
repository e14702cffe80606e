"""Check CSV files before they are read: a stray quote would join their rows without a word."""

import csv
from pathlib import PurePosixPath

import fsspec

MOST = 2**20  # characters of a value; pyarrow reads no longer rows


def check_csv(url: str) -> str | None:
    """Check the quotes and the number of values of all rows, which readers of tables do not.

    A reader takes a quote at the start of a value and all lines up to the next quote for one value.
    pandas fills up rows that are too short. Raises ValueError with the line of such a row. Returns
    a sentence if values span several lines, which may be meant, else None.
    """
    name = PurePosixPath(url.lower().removesuffix(".gz"))
    delimiter = "\t" if name.suffix == ".tsv" else ","
    csv.field_size_limit(MOST)
    spanning = []
    begin = 1  # the line in which a row begins
    # latin-1 reads any bytes, and what CSV consists of is the same in UTF-8
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
                'with a quote must end with one, and a quote inside it is written twice: ""'
            ) from None
    if not spanning:
        return None
    return (
        f"{url}: {len(spanning):,} rows span several lines, the first one begins in line "
        f"{spanning[0]:,}. If that is not meant, a quote is missing or too many"
    )
