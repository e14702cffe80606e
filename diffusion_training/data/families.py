"""Families of models: how their pipelines prepare a caption for the text encoder."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any


@functools.cache
def prx_preprocessor() -> Any:
    # imported here because it takes a second
    from diffusers.pipelines.prx.pipeline_prx import TextPreprocessor

    return TextPreprocessor()


def clean_text(tokenizer: Any, text: str) -> str:
    """Clean a caption as PRXPipeline cleans prompts.

    It is put in lower case, without addresses, Chinese characters and most symbols.
    """
    return prx_preprocessor().clean_text(text)


def ask(tokenizer: Any, text: str) -> str:
    """Format a caption as ZImagePipeline does for its language model.

    It becomes the message of a user, followed by the beginning of an answer.
    """
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    pipeline: how the name of its pipeline's class begins. title: its usual name. masked: whether
    padding is left out, so that embeddings are as long as the caption, up to `max_length` tokens.
    prepare: (tokenizer, caption) -> the text that is tokenized. layer: the text encoder's hidden
    states that the model gets.
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
    """The tokenizers of a pipeline, one for each text encoder, and the name of their family."""

    def __init__(self, tokenizers: Iterable, family: str = "sd") -> None:
        super().__init__(tokenizers)
        self.family = family
