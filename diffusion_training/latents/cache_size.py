"""How large a latent cache will be, before it is made."""

import functools
import math

from tqdm.auto import tqdm

from diffusion_training.data.captions import prepare_captions
from diffusion_training.families.base import Tokenizers
from diffusion_training.latents.columns import list_columns


def measure_captions(tokenizers: Tokenizers, texts: list[str]) -> dict[str, float]:
    """{choice of --text_cache: the mean length of captions}, if it is stored without padding.

    Each caption is truncated to the text encoder's limit. Empty without captions.
    """
    is_ragged, in_bytes = tokenizers.family.ragged, tokenizers.family.caption_unit != "tokens"
    if not texts or not (is_ragged or in_bytes):
        return {}
    prepared = prepare_captions(tokenizers, texts)
    lengths = {"ids": [len(ids) for ids in tokenizers[0](prepared, truncation=True).input_ids]}
    if is_ragged:  # the ids of a recorded pipeline are bytes
        tokens = [tokenizers[0].count_tokens(text) for text in prepared] if in_bytes else None
        lengths["embeddings"] = tokens or lengths["ids"]
    return {kind: sum(each) / len(each) for kind, each in lengths.items()}


def count_bytes(cache: dict, tokens: float | None = None) -> tuple[int, int]:
    """(bytes of the numbers in a row, how many of these are for captions).

    tokens: in an average caption, used if padding is not stored. Images count as the largest size.
    """
    total = of_captions = 0
    for column in list_columns(cache):
        size = column.count_bytes(tokens)
        total += size
        if column.is_of_caption or column.name == "prompt_lengths":
            of_captions += size
    return total, of_captions


def compare_captions(cache: dict, lengths: dict[str, float]) -> dict[str, int]:
    """{each choice of --text_cache: bytes that a caption takes with it}. lengths: of captions."""
    padded = [name for name in cache["features"] if name not in ("ragged embeddings", "ragged ids")]
    sizes = {}
    for kind in ("ids", "embeddings"):
        features = [*padded, "ragged embeddings"] if kind in lengths else padded
        chosen = {**cache, "text_cache": kind, "features": features}
        sizes[kind] = count_bytes(chosen, lengths.get(kind))[1]
    if "embeddings" in lengths:
        chosen = {**cache, "text_cache": "embeddings", "features": padded}
        sizes["embeddings with padding"] = count_bytes(chosen)[1]
    return sizes


def describe_size(cache: dict, lengths: dict[str, float], compare: bool) -> str:
    """A sentence on how big a cache will be.

    lengths: those of `measure_captions`. compare: add the size of captions with each --text_cache.
    """
    features = cache["features"]
    tokens = lengths.get(cache["text_cache"])
    num_rows = cache["source"]["rows"]  # None for a stream
    # no size has more pixels than the square
    about = "up to " if "ragged latents" in features else ""
    if tokens or "ragged embeddings" in features:
        about = "about "
        tokens = tokens or cache["prompt_embeds_shape"][0]
    row_bytes, text_bytes = count_bytes(cache, tokens)
    show = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
    each = f"{about}{show(row_bytes)} ({show(text_bytes)} for the caption) and the text"
    if num_rows is None:
        sentence = f"A stream; each row is {each}"
    else:
        num_shards = math.ceil(num_rows / cache["rows_per_shard"])
        total = f"{about}{show(num_rows * row_bytes)} in {num_shards:,} shards"
        sentence = f"{num_rows:,} rows of {each}: {total}"
    if compare:
        choices = compare_captions(cache, lengths).items()
        sizes = [f"{show((num_rows or 1) * size)} as {kind}" for kind, size in choices]
        sentence += f"; captions take {', '.join(sizes)}"
    return sentence
