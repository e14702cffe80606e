"""The model card of a run: README.md, as the hub shows it."""

import contextlib
import html
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.utils import validate_repo_id

from diffusion_training.files import saving
from diffusion_training.training.keeping.checkpoints import find_samples
from diffusion_training.training.scores.metric_flags import METRICS
from diffusion_training.training.showing.report import (
    DescribeModel,
    Description,
    name_best,
    name_run,
    save_loss,
)
from diffusion_training.training.step.signs import read_metrics


def save_model_card(step: int, describe: DescribeModel, args: Namespace) -> None:
    """Write README.md: data, samples, loss curve and settings. Paths are cut to their last part."""
    output_dir = Path(args.output_dir)
    about = name_run(step, args, local=False)
    described = describe(about, args)
    save_loss(output_dir)
    path = output_dir / "README.md"
    if path.is_file() and not is_unchanged(path.read_text("utf-8", "replace")):
        print(f"{path} is kept as it is, because it was edited")
        return
    samples = find_samples(output_dir)
    picture = f"![samples](samples/{samples[-1].name})" if samples else ""
    records = read_metrics(output_dir)
    held_out = [record for record in records if "held_out_loss" in record]
    losses = tabulate("held-out loss", held_out[-1] if held_out else {}, ".4g")
    measured = [record for record in records if "metric_images" in record]
    quality = {name: value for name, value in (measured or [{}])[-1].items() if name in METRICS}
    listed = list_settings(args)
    given = {name: value for name, value in listed.items() if name in args.given}
    defaults = {name: value for name, value in listed.items() if name not in given}
    text = f"""---
{describe_for_hub(described, args).to_yaml()}
---

# {escape_title(about.name)}

{described.what}

```python
{described.usage}
```

{picture}
![loss](loss.png)

{name_best(output_dir)}

{tabulate("setting", given)}
{losses}
{tabulate("metric of the samples", quality, ".4g")}
<details><summary>Settings left at their defaults</summary>

{tabulate("setting", defaults)}
</details>
"""
    with saving(output_dir, "the model card") as unfinished:
        (unfinished / "README.md").write_text(text + sign_text(text), encoding="utf-8")


def list_settings(args: Namespace) -> dict[str, Any]:
    """Return the flags for the model card, with local paths cut to their last name."""
    listed = {}
    for key, value in vars(args).items():
        if value is not None and not key.endswith("_dir"):
            is_local = isinstance(value, str) and os.path.exists(value)
            listed[key] = Path(value).resolve().name if is_local else value
    return listed


def sign_text(text: str) -> str:
    """A comment for the end of a card that tells whether it was edited."""
    return f"\n<!-- checksum {xxhash.xxh3_128_hexdigest(text.encode())} -->\n"


def is_unchanged(card: str) -> bool:
    """Whether a card is as `save_model_card` wrote it."""
    text, _, _ = card.rpartition("\n<!-- checksum ")
    return card == text + sign_text(text)


def tabulate(title: str, values: dict[str, Any], form: str = "") -> str:
    """A table in Markdown; empty without values."""
    rows = "".join(f"| {name} | {escape_cell(f'{x:{form}}')} |\n" for name, x in values.items())
    return f"| {title} | |\n|---|---|\n{rows}" if rows else ""


def escape_title(text: str) -> str:
    """Text for a heading: no HTML, no link or picture, and one line."""
    escaped = re.sub(r"([\\`*\[\]])", r"\\\1", html.escape(text, quote=False))
    return " ".join(escaped.split())


def escape_cell(text: str) -> str:
    """Text for a cell: no HTML, as in "a photo of <sks> dog", and one cell, as for "a | b"."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())


def describe_for_hub(described: Description, args: Namespace) -> ModelCardData:
    """The part of a card that the hub reads: it links base and data, and shows the licence.

    The hub rejects a card whose base or data is not a repository id.
    """
    flags = vars(args)
    base = described.base if is_hub_id(described.base) else None
    data = flags.get("dataset_name")
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag=described.tags[0],
        tags=["diffusers", *described.tags],
        base_model=base,
        datasets=[data] if is_hub_id(data) else None,
        instance_prompt=flags.get("instance_prompt") or flags.get("caption_prefix"),
        **read_license(base, args),
    )


def is_hub_id(name: str | None) -> bool:
    """Whether a name is a repository id on the hub, not a file or folder."""
    if name is None or os.path.exists(name):
        return False
    with contextlib.suppress(ValueError):
        validate_repo_id(name)
        return True
    return False


def read_license(base: str | None, args: Namespace) -> dict[str, str]:
    """The licence that the base's card names; {} if the card can't be read or names none.

    The card is read from the local cache. With --push_to_hub there is a network, so it is fetched.
    """
    if base is None:
        return {}
    flags = vars(args)
    with contextlib.suppress(Exception):
        path = hf_hub_download(
            base,
            "README.md",
            revision=flags.get("revision"),
            cache_dir=flags.get("cache_dir"),
            local_files_only=not flags.get("push_to_hub"),
        )
        card = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        if card["license"] != "other":
            return {"license": card["license"]}
        link = card["license_link"]
        if "://" not in link:
            link = f"https://huggingface.co/{base}/blob/main/{link}"
        return {"license": "other", "license_name": card["license_name"], "license_link": link}
    return {}
