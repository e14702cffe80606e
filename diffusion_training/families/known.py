"""The model families: --model_family and model_index.json choose among them."""

import functools
import importlib
import re

from diffusion_training.families.base import Family
from diffusion_training.families.names import FACTS


@functools.cache
def load_family(name: str) -> Family:
    """The family of a name in `FACTS`. Its file is imported when it is first used."""
    module, kind = FACTS[name].kind.split(".")
    return getattr(importlib.import_module(f"diffusion_training.families.{module}"), kind)()


def find_family(class_name: str) -> Family | None:
    """The family of a pipeline, by the class in its model_index.json, or None."""
    for name, facts in FACTS.items():
        if re.fullmatch(facts.pipelines, class_name):
            return load_family(name)
    return None
