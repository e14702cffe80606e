"""The pages show the LoRA settings; `python tests/docs/test_lora_settings.py` updates them."""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from diffusion_training.families.lora_layers import LAYERS  # noqa: E402
from diffusion_training.families.lora_settings import SETTINGS, SOURCES  # noqa: E402

FIGURE = re.compile(r"(?<=<!-- lora settings -->\n).*?(?=\n<!-- end -->)", re.S)
WIDTH = 120


def describe_settings():
    """The table of settings, a line per model."""
    lines = ["| model | layers | rank | rate | steps x images | pixels | base |"]
    lines.append("|---" * 7 + "|")
    for each in SETTINGS.values():
        lines.append(
            f"| {each.title} | `{each.layers}` | {each.rank} | {each.learning_rate:.0e} | "
            f"{each.steps:,} x {each.images} | {each.resolution} | "
            f"{each.base_precision or '16 bits'} |".replace("e-0", "e-")
        )
    return "\n".join(lines)


def describe_sources():
    """What each source says, and what was chosen."""
    parts = []
    for name, (address, commit) in SOURCES.items():
        page = commit if "//" in commit else f"https://github.com/{address}/tree/{commit}"
        parts.append(f"- {name}: [{address}]({page})")
    for each in SETTINGS.values():
        parts.append(f"\n## {each.title}\n")
        for said in each.sources:
            paths = ", ".join(f"`{path}`" for path in said.path.split(", "))
            parts += textwrap.wrap(
                f"- {said.source} ({paths}): {said.what}.",
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        parts += [""] * bool(each.sources)
        more = f"Caption dropout {each.caption_dropout:g}, weight decay {each.weight_decay:g}"
        more += ", noise levels logit-normal with the pipeline's shift" * bool(each.timesteps)
        parts += textwrap.wrap(
            f"**Chosen.** {each.chosen} {more}.",
            WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(parts)


PAGES = {"lora.md": describe_settings, "lora-settings.md": describe_sources}


def test_pages_show_the_settings():
    for name, describe in PAGES.items():
        assert FIGURE.search((ROOT / "docs" / name).read_text())[0] == describe()


def test_each_setting_has_its_layers_and_sources():
    for name, each in SETTINGS.items():
        assert each.denoiser in LAYERS, name
        assert {said.source for said in each.sources} <= {*SOURCES}, name
        assert each.sources, name
    assert {each.denoiser for each in SETTINGS.values()} | {"PRXTransformer2DModel"} == {*LAYERS}


if __name__ == "__main__":
    for name, describe in PAGES.items():
        page = ROOT / "docs" / name
        page.write_text(FIGURE.sub(lambda _: describe(), page.read_text(), count=1))
