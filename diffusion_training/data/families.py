"""Families of models: what the pipelines of each make of a caption before a text encoder sees it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any


@functools.cache
def prx_preprocessor() -> Any:
    from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor  # here, because it takes a second

    return TextPreprocessor()


def clean_text(tokenizer: Any, text: str) -> str:
    """A caption as PRXPipeline cleans prompts: in lower case, without addresses, Chinese and most signs."""
    return prx_preprocessor().clean_text(text)


def ask(tokenizer: Any, text: str) -> str:
    """A caption as ZImagePipeline puts it to a language model: the turn of a user, and the beginning of an answer."""
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=True)


@dataclasses.dataclass(frozen=True)
class Family:
    """pipeline: how the name of its class begins; title: what people call it.

    prepare: (tokenizer, caption) -> the text that is tokenized. masked: whether padding is left out, so that
    embeddings are as long as the caption, up to `max_length` tokens; `layer` of the text encoder's hidden states is
    what the model gets.
    """

    pipeline: str
    title: str
    masked: bool = False
    prepare: Callable | None = None
    layer: int = -1
    max_length: int = 0


FAMILIES = {
    "sdxl": Family("StableDiffusionXL", "Stable Diffusion XL"),
    "sd": Family("StableDiffusion", "Stable Diffusion"),
    "prx": Family("PRX", "PRX", masked=True, prepare=clean_text, max_length=256),
    "z-image": Family("ZImage", "Z-Image", masked=True, prepare=ask, layer=-2, max_length=512),
}


class Tokenizers(list):
    """The tokenizers of a pipeline, one for each text encoder, and the name of the family that they are of."""

    def __init__(self, tokenizers: Iterable, family: str = "sd") -> None:
        super().__init__(tokenizers)
        self.family = family
