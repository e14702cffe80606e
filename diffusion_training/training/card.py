"""The model card of a run: README.md, as the hub shows it."""

import contextlib
import html
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.utils import validate_repo_id

from diffusion_training.files import saving
from diffusion_training.training.report import (
    About,
    Description,
    list_settings,
    name_best,
    name_run,
    save_loss,
)
from diffusion_training.training.signs import read_metrics


def save_model_card(
    step: int, describe: Callable[[About, Namespace], Description], settings: Namespace
) -> None:
    """Write README.md: data, samples, loss curve and settings. Paths are cut to their last part."""
    output_dir = Path(settings.output_dir)
    about = name_run(step, settings, local=False)
    described = describe(about, settings)
    save_loss(output_dir)
    samples = sorted((output_dir / "samples").glob("step-*.png"))
    picture = f"![samples](samples/{samples[-1].name})" if samples else ""
    held_out = [record for record in read_metrics(output_dir) if "held_out_loss" in record]
    losses = tabulate("held-out loss", held_out[-1] if held_out else {}, ".4g")
    listed = list_settings(settings)
    given = {name: value for name, value in listed.items() if name in settings.given}
    defaults = {name: value for name, value in listed.items() if name not in given}
    with saving(output_dir, "the model card") as unfinished:
        (unfinished / "README.md").write_text(f"""---
{describe_for_hub(described, settings).to_yaml()}
---

# {about.name}

{described.what}

```python
{described.usage}
```

{picture}
![loss](loss.png)

{name_best(output_dir)}

{tabulate("setting", given)}
{losses}
<details><summary>Settings left at their defaults</summary>

{tabulate("setting", defaults)}
</details>
""", encoding="utf-8")  # fmt: skip


def tabulate(title: str, values: dict[str, Any], form: str = "") -> str:
    """A table in Markdown; empty without values."""
    cells = {name: escape_cell(f"{value:{form}}") for name, value in values.items()}
    rows = "".join(f"| {name} | {cell} |\n" for name, cell in cells.items())
    return f"| {title} | |\n|---|---|\n{rows}" if rows else ""


def escape_cell(text: str) -> str:
    """Text for a cell: no HTML, as in "a photo of <sks> dog", and one cell, as for "a | b"."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())


def describe_for_hub(described: Description, settings: Namespace) -> ModelCardData:
    """The part of a card that the hub reads: it links base and data, and shows the licence.

    The hub rejects a card whose base or data is not a repository id.
    """
    flags = vars(settings)
    base = described.base if is_hub_id(described.base) else None
    data = flags.get("dataset_name")
    return ModelCardData(
        library_name="diffusers",
        pipeline_tag=described.tags[0],
        tags=["diffusers", *described.tags],
        base_model=base,
        datasets=[data] if is_hub_id(data) else None,
        instance_prompt=flags.get("instance_prompt"),
        **read_license(base, settings),
    )


def is_hub_id(name: str | None) -> bool:
    """Whether a name is a repository id on the hub, not a file or folder."""
    if name is None or os.path.exists(name):
        return False
    with contextlib.suppress(ValueError):
        validate_repo_id(name)
        return True
    return False


def read_license(base: str | None, settings: Namespace) -> dict[str, str]:
    """The licence that the base's card names; {} if the card can't be read or names none.

    The card is read from the local cache. With --push_to_hub there is a network, so it is fetched.
    """
    if base is None:
        return {}
    flags = vars(settings)
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
