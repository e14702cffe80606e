"""Check CSV files before they are read, because a stray quote would silently join rows."""

import csv
import os

import fsspec

MAX_VALUE = 2**20  # characters
MAX_ROW = 2**22  # characters
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of such a file


def get_suffix(url: str) -> str:
    """The suffix of a file's name in lower case, such as .csv or .csv.gz.

    It ignores the query of a URL, such as ?download=true.
    """
    name = url.lower()
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0]
    inner, outer = os.path.splitext(name)
    return os.path.splitext(inner)[1] + outer if outer == ".gz" else outer


def find_compression(url: str) -> str | None:
    """The compression of a file for fsspec, by its name."""
    return "gzip" if get_suffix(url).endswith(".gz") else None


def find_csv_fault(url: str) -> str | None:
    """Check the quotes and the number of values of all rows, which table readers do not do.

    After a quote at the start of a value, a reader takes all lines up to the next quote as this
    value. pandas fills up rows that are too short. Raises ValueError with the line of such a row,
    or of one that has more than `MAX_ROW` characters.
    Returns a warning if values span several lines, which may be intended, else None.
    """
    delimiter = "\t" if get_suffix(url).startswith(".tsv") else ","
    csv.field_size_limit(MAX_VALUE)
    spanning = []
    begin = 1  # the line in which a row begins
    # latin-1 reads any bytes, and quotes and delimiters are the same in UTF-8
    options = {"encoding": "latin-1", "newline": "", "compression": find_compression(url)}
    with fsspec.open(url, "rb", compression=find_compression(url)) as file:
        if file.read(2) in UTF_16:
            raise ValueError("it is in UTF-16: save it as UTF-8")
    with fsspec.open(url, "rt", **options) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        width = 0
        try:
            for row in reader:
                width = width or len(row)
                if len(row) not in (0, width):
                    raise ValueError(f"{len(row)} values instead of {width}")
                if sum(map(len, row)) > MAX_ROW:
                    raise ValueError(f"it has more than {MAX_ROW:,} characters")
                if reader.line_num > begin:
                    spanning.append(begin)
                begin = reader.line_num + 1
        except (csv.Error, ValueError) as error:
            reason = str(error)
            if "field limit" in reason:
                reason = f"a value has more than {MAX_VALUE:,} characters, the most that is read"
            raise ValueError(
                f"the row that begins in line {begin} can't be read: {reason}. A value that begins "
                'with a quote must end with one, and a quote inside it must be doubled: ""'
            ) from None
    if not spanning:
        return None
    return (
        f"{url}: {len(spanning):,} rows span several lines, the first one begins in line "
        f"{spanning[0]:,}. If this is not intended, look for a stray or missing quote"
    )
