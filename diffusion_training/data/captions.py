"""Captions -> tokens, and warnings about captions."""

import functools
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import datasets
import torch

from diffusion_training.data.texts import CaptionChoice, Text, add_prefix, choose_caption
from diffusion_training.errors.printing import printable
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Tokenizers

MULTIPLE = 32  # tokens; see `choose_length`


def prepare_captions(tokenizers: Tokenizers, texts: Sequence[str]) -> list[str]:
    """Prepare captions for the tokenizer as the family does.

    A very long caption is cut first, far beyond the limit of tokens, because a tokenizer takes
    minutes and gigabytes for megabytes of text.
    """
    if tokenizers.classes:
        clean = functools.partial(tokenizers.family.prepare, tokenizers[0])
        return [get_token(text, tokenizers.classes, clean) for text in texts]
    tokenizer = tokenizers[0]
    limit = 128 * tokenizer.model_max_length
    return [tokenizers.family.prepare(tokenizer, text[:limit]) for text in texts]


def get_token(text: str, tokens: dict[str, str], clean: Callable[[str], str]) -> str:
    """The token of a caption, "" for no class. tokens: {name or token: the token of the class}."""
    for word in (text, clean(text)):
        if not text or word in tokens:
            return tokens.get(word, "")
    some = ", ".join(printable(name) for name in list(tokens)[:6])
    fail(f"{printable(text[:60])!r} is not a class; the classes are {some} ...")


def tokenize(tokenizers: Tokenizers, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """Captions -> `Tokens`, padded or truncated to model_max_length.

    If `texts` holds N lists of K captions, the shapes are [N, K, model_max_length], and
    "prompt_lengths", int32 [N, K], is added: the number of tokens that a cache stores of each
    caption, -1 for a missing caption.
    """
    if texts and isinstance(texts[0], list):
        return tokenize_lists(tokenizers, texts)
    prepared = prepare_captions(tokenizers, texts)
    batch = {}
    for suffix, tokenizer in zip(tokenizers.family.suffixes, tokenizers, strict=True):
        tokens = tokenizer(prepared, padding="max_length", truncation=True, return_tensors="pt")
        batch[f"input_ids{suffix}"] = tokens.input_ids
        if tokenizers.family.masked and not suffix:
            batch["prompt_mask"] = tokens.attention_mask.bool()
    return batch


def tokenize_lists(tokenizers: Tokenizers, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    exists = torch.tensor([[text is not None for text in row] for row in texts])
    batch = tokenize(tokenizers, [text or "" for row in texts for text in row])
    batch = {name: tokens.unflatten(0, exists.shape) for name, tokens in batch.items()}
    if "prompt_mask" in batch:
        batch["prompt_mask"] &= exists[..., None]
    lengths = batch.get("prompt_mask", torch.ones_like(batch["input_ids"])).sum(dim=-1)
    return batch | {"prompt_lengths": torch.where(exists, lengths, -1).int()}


def choose_length(longest: int, most: int) -> int:
    """How many tokens the captions of a batch are padded to, if its longest one has `longest`.

    Multiples of 32, so that torch.compile meets few shapes, but not more than `most`.
    """
    return min(math.ceil(max(1, longest) / MULTIPLE) * MULTIPLE, most)


def count_lengths(most: int) -> int:
    """How many values `choose_length` can have."""
    return math.ceil(most / MULTIPLE)


def tokenize_batch(
    tokenizers: Tokenizers, choice: CaptionChoice, texts: Iterable[Text], keys: Iterable[tuple]
) -> dict[str, Any]:
    """Tokenize the captions of a batch, with little padding where the model does not see it.

    For each of the `keys` (epoch, row, ...), `texts` holds a caption, or a list to choose from.
    """
    pairs = zip(texts, keys, strict=True)
    chosen = [choose_caption(text, key[0], key[1], choice) for text, key in pairs]
    tokens: dict[str, Any] = dict(tokenize(tokenizers, chosen))
    if "prompt_mask" in tokens:
        lengths = tokens["prompt_mask"].sum(dim=1).tolist()
        if tokenizers.are_ragged:
            length = choose_length(max(lengths), tokenizers[0].model_max_length)
            is_left = tokenizers[0].padding_side == "left"
            used = slice(-length, None) if is_left else slice(length)
            for name in ("input_ids", "prompt_mask"):
                tokens[name] = tokens[name][:, used]
        tokens["prompt_lengths"] = lengths
    return tokens


def tokenize_longest(tokenizers: Tokenizers, choice: CaptionChoice) -> dict[str, Any]:
    """A batch of one caption, with as many tokens as captions can have."""
    return tokenize_batch(tokenizers, choice, ["a " * tokenizers[0].model_max_length], [(0, 0)])


def sample_captions(
    rows: datasets.Dataset | datasets.IterableDataset,
    column: str | list[str],
    prefix: str | None = None,
) -> list[str]:
    """The captions of up to 10,000 evenly spaced rows, from one or several columns.

    From a stream, they are those of the first 100 rows. prefix: --caption_prefix.
    """
    selected = rows.select_columns(column)
    captions: list[Any] = []
    if isinstance(selected, datasets.IterableDataset):
        with explained("the stream can't be read"):
            for row in selected.take(100):
                captions += row.values()
    else:
        for values in selected[:: max(1, len(rows) // 10**4)].values():
            captions += values
    texts = [text[0] if isinstance(text, list) and text else text for text in captions]
    return [add_prefix(text, prefix) for text in texts if isinstance(text, str)]


def report_equal(texts: list[str], args: Namespace) -> None:
    """Warn if all captions are the same and no flag made them so.

    Usually the column is then wrong.
    """
    if (
        len(texts) > 1
        and len(set(texts)) == 1
        and not (args.instance_prompt and texts[0].endswith(args.instance_prompt))
        and not args.folder_repeats
    ):
        print(
            f"All captions that were checked are {printable(texts[0][:60])!r}: "
            "is --caption_column right?"
        )


def report_cut(count: int, total: int, limit: int, unit: str, where: str = "") -> None:
    """Print how many captions are truncated. unit: `Family.caption_unit`."""
    if count:
        print(
            f"{where}{count:,} of {total:,} captions have more than {limit} {unit}, "
            "and the rest is cut off"
        )


def report_emptied(tokenizers: Tokenizers, texts: list[str]) -> None:
    """Print how many captions lose all their words in preparation for the tokenizer."""
    emptied = [
        text
        for text, left in zip(texts, prepare_captions(tokenizers, texts), strict=True)
        if text.strip() and not left
    ]
    if emptied:
        such = f"such as {printable(emptied[0][:60])!r}"
        print(
            f"{len(emptied):,} of {len(texts):,} captions have no words after cleaning, {such}: "
            "see docs/from-scratch.md"
        )


def are_cut(tokenizers: Tokenizers, texts: Sequence[Text]) -> list[bool]:
    """Whether each caption, or any in each list, has more tokens than the text encoders take."""
    if texts and isinstance(texts[0], list):
        cut = iter(are_cut(tokenizers, [text or "" for row in texts for text in row]))
        return [any([next(cut) for _ in row]) for row in texts]
    # A second tokenizer has the same limit and the same vocabulary.
    encodings = tokenizers[0](prepare_captions(tokenizers, texts), truncation=True).encodings
    return [bool(encoding.overflowing) for encoding in encodings]
