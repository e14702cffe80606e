"""Classes of a data set: their names become captions."""

from argparse import Namespace
from typing import Any

import datasets

from diffusion_training.data.folders import get_source
from diffusion_training.data.rows import ImageRows
from diffusion_training.errors import fail
from diffusion_training.files import hash_values

MAX_CLASSES = 10_000  # the embedding of a class has as many numbers as there are classes


def name_classes(images: ImageRows, args: Namespace) -> tuple[ImageRows, list[str]]:
    """Replace --class_column by --caption_column, which has the names of the classes.

    It has None where an image has no class, or one with an empty name. Returns (the rows, the names
    in the order of their numbers). The fingerprint of the rows covers the names.
    """
    column = args.class_column
    rows: Any = images.rows
    labels: list[Any] = rows[column][:]
    what = f"--class_column {column} of {get_source(args)}"
    names = list_names(rows.features[column], labels, what)
    if rows.features[column].dtype == "string":
        captions = [label or None for label in labels]  # the empty prompt is no class
    else:
        has_class = [label is not None and 0 <= label < len(names) for label in labels]
        captions = [
            names[label] if known else None for label, known in zip(labels, has_class, strict=True)
        ]
    fingerprint = hash_values([rows._fingerprint, names, captions])
    rows = rows.remove_columns(column)
    rows = rows.add_column(args.caption_column, captions, new_fingerprint=fingerprint)
    return images._replace(rows=rows), names


def list_names(feature: Any, labels: list[Any], what: str) -> list[str]:
    """The names of the classes. Numbers without names, 0 to n - 1, are their own names.

    what: names the column in messages.
    """
    if isinstance(feature, datasets.ClassLabel):
        return feature.names
    dtype = getattr(feature, "dtype", "")
    if dtype == "string":
        names = sorted({label for label in labels if label})
    elif "int" in dtype and any(label is not None for label in labels):
        most = max(label for label in labels if label is not None)
        names = [str(number) for number in range(min(most, MAX_CLASSES) + 1)]
    else:
        fail(f"{what} holds neither numbers nor names of classes")
    if len(names) > MAX_CLASSES:
        fail(f"{what} has more than {MAX_CLASSES:,} classes: is it the right column?")
    return names
