"""Choose the captions of an image, and shuffle their tags.

Captions come from one column, which may hold lists, or from several columns. Either one caption is
drawn, or all are kept.
"""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from diffusion_training.arguments import list_values
from diffusion_training.data.transform_settings import Transform
from diffusion_training.draws import draw_caption, step_seed

# a row's caption, or the list of all its captions, with None for a missing one
Text: TypeAlias = Any


@dataclass(frozen=True)
class CaptionChoice:
    """Decides which caption of an image an epoch uses, and the order of its tags."""

    seed: int
    weights: list[float] | None  # for several captions
    shuffle: bool = False
    num_kept: int = 0  # tags at the front that stay in place
    prefixes: tuple[str, ...] = ()  # words before the tags, of each source, which stay there too


def choose_captions(
    args: Namespace, weights: list[float] | None, prefixes: Iterable[str | None]
) -> CaptionChoice:
    """prefixes: the --caption_prefix of each source."""
    kept = tuple(filter(None, prefixes))
    return CaptionChoice(args.seed, weights, args.shuffle_caption, args.keep_tokens, kept)


def add_prefix(text: str, prefix: str | None) -> str:
    """A caption with --caption_prefix, which it may already have."""
    if not prefix or text.startswith(prefix):
        return text
    return f"{prefix} {text}".strip()


def strip_caption(text: str) -> str:
    """Cut off what is around a caption: blanks, line breaks, and the mark at the start of a file.

    Captions from all sources go through this, since a chat model reads these characters too.
    """
    return text.removeprefix("\ufeff").strip()


def draw_text(item: dict, choice: float, transform: Transform) -> str:
    """Return the caption of a row; `choice` in [0, 1) picks one from a list.

    Raises ValueError if there is none.
    """
    text = item[transform.caption_column]
    if isinstance(text, list) and text:
        text = text[int(choice * len(text))]
    if text is None or text == []:
        raise ValueError("it has no caption")
    if not isinstance(text, str):
        raise ValueError(f"its caption is not text but {text!r:.60}")
    text = strip_caption(text)
    if transform.skip_empty_captions and not text:
        raise ValueError("its caption is empty")
    return add_prefix(text, transform.caption_prefix)


def list_captions(item: dict, transform: Transform) -> list[str | None]:
    """Return the captions of a row, one for each of --caption_weights, with None for a missing one.

    Raises ValueError if their number is wrong, if one is not a string, or if all are missing.
    """
    texts = [item[name] for name in list_values(transform.caption_column)]
    count = len(transform.caption_weights or [])
    if len(texts) == 1 and isinstance(texts[0], list):
        texts = texts[0] + [None] * (count - len(texts[0]))
    if len(texts) != count:
        raise ValueError(f"it has {len(texts)} captions for {count} --caption_weights")
    if wrong := [text for text in texts if not isinstance(text, str | None)]:
        raise ValueError(f"its caption is not text but {wrong[0]!r:.60}")
    texts = [text if text is None else strip_caption(text) for text in texts]
    if transform.skip_empty_captions:
        texts = [text or None for text in texts]
    if not any(text is not None for text in texts):
        raise ValueError("it has no caption")
    prefix = transform.caption_prefix
    return [text if text is None else add_prefix(text, prefix) for text in texts]


def choose_caption(text: Text, epoch: int | None, row: int, choice: CaptionChoice) -> str:
    """Return the caption that a trainer uses for a row in an epoch.

    One caption of a list (see `list_captions`) is drawn by the weights. --shuffle_caption shuffles
    its comma-separated tags in each epoch, as kohya's sd-scripts do; the first --keep_tokens tags
    stay in place, behind --caption_prefix. A held-out row, with epoch None, always gets the same
    caption, not shuffled.
    """
    if isinstance(text, list):
        exists = [caption is not None for caption in text]
        text = text[draw_caption(choice.seed, epoch, row, choice.weights or (), exists)]
    if choice.shuffle and epoch is not None:
        has = [prefix for prefix in choice.prefixes if text.startswith(prefix)]
        front = max(has, key=len, default="")
        front += "," * text.startswith(f"{front},")
        tags = [tag.strip() for tag in text.removeprefix(front).split(",")]
        rest = tags[choice.num_kept :]
        rng = np.random.default_rng(step_seed("tags", choice.seed, epoch, row))
        shuffled = [rest[i] for i in rng.permutation(len(rest))]
        text = f"{front} {', '.join(tags[: choice.num_kept] + shuffled)}".strip()
    return text
