"""Classes of a data set: their names become captions."""

from argparse import Namespace
from collections import Counter
from typing import Any

import datasets

from diffusion_training.data.folders import get_source
from diffusion_training.data.rows import ImageRows
from diffusion_training.data.texts import strip_caption
from diffusion_training.errors.printing import amount, print_once, printable
from diffusion_training.errors.sentences import fail
from diffusion_training.files import hash_values

MAX_CLASSES = 10_000  # the embedding of a class has as many numbers as there are classes
TEXT = ("string", "large_string", "string_view")  # pandas 3 and polars write the second


def name_classes(images: ImageRows, args: Namespace) -> tuple[ImageRows, list[str]]:
    """Replace --class_column by --caption_column, which has the names of the classes.

    It has None where an image has no class, or one with an empty name. Returns (the rows, the names
    in the order of their numbers). Names are stripped of blanks, as captions are. The fingerprint
    of the rows covers the names.
    """
    column = args.class_column
    rows: Any = images.rows
    labels: list[Any] = rows[column][:]
    what = f"--class_column {column} of {get_source(args)}"
    names = list_names(rows.features[column], labels, what)
    if is_text(rows.features[column]):
        # the empty prompt is no class
        captions = [strip_caption(label or "") or None for label in labels]
    else:
        has_class = [label is not None and 0 <= label < len(names) for label in labels]
        captions = [
            names[label] if known else None for label, known in zip(labels, has_class, strict=True)
        ]
    if not any(captions):
        fail(f"{what} has no class for any image: all labels are missing, empty or negative")
    if unused := len({*names} - {*captions, ""}):
        print_once(f"{what}: {unused:,} of {amount(len(names), 'class')} have no images")
    fingerprint = hash_values([rows._fingerprint, names, captions])
    rows = rows.remove_columns(column)
    rows = rows.add_column(args.caption_column, captions, new_fingerprint=fingerprint)
    return images._replace(rows=rows), names


def is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in TEXT


def list_names(feature: Any, labels: list[Any], what: str) -> list[str]:
    """The names of the classes. Numbers without names, 0 to n - 1, are their own names.

    what: names the column in messages.
    """
    if isinstance(feature, datasets.ClassLabel):
        names = [strip_caption(name) for name in feature.names]
        repeated = [name for name, count in Counter(names).items() if name and count > 1]
        if repeated:
            fail(
                f"{what} has classes whose names differ only in blanks, such as "
                f"{printable(repeated[0])!r}: rename one"
            )
        return names
    known = [label for label in labels if label is not None]
    if is_text(feature):
        names = sorted({strip_caption(label) for label in known} - {""})
    elif "int" in getattr(feature, "dtype", ""):
        most = max(known, default=-1)
        names = [str(number) for number in range(min(most, MAX_CLASSES) + 1)]
    else:
        fail(f"{what} holds neither numbers nor names of classes")
    if len(names) > MAX_CLASSES:
        fail(f"{what} has more than {MAX_CLASSES:,} classes: is it the right column?")
    return names
