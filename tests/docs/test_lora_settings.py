"""The pages show settings of LoRAs and what ComfyUI reads; run as a program, it updates them."""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

from diffusion_training.families.lora_layers import LAYERS  # noqa: E402
from diffusion_training.families.lora_settings import SETTINGS, SOURCES  # noqa: E402

COMFYUI = ROOT / "diffusion_training/training/showing/comfyui.tsv"
WIDTH = 120


def describe_settings():
    """The table of settings, a line per model."""
    lines = ["| model | layers | rank | rate | steps x images | pixels | lowest base |"]
    lines.append("|---" * 7 + "|")
    for each in SETTINGS.values():
        lines.append(
            f"| {each.title} | `{each.layers}` | {each.rank} | {each.learning_rate:.0e} | "
            f"{each.steps:,} x {each.images} | {each.resolution} | "
            f"{find_base(each)} |".replace("e-0", "e-")
        )
    return "\n".join(lines)


def find_base(settings):
    """The lowest precision of the frozen base in which a source trains a LoRA of a model."""
    said = " ".join(said.what for said in settings.sources)
    bits = map(int, re.findall(r"base in (?:fp|int|nf)?(\d+)", said))
    return f"{min(bits)} bits"


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


def describe_comfyui():
    """The models whose LoRAs ComfyUI reads, a line per answer."""
    (_, _, title), *rows = (line.split("\t") for line in COMFYUI.read_text().splitlines())
    models = {}
    for _, model, answer in rows:
        models.setdefault(answer, []).append(model)
    lines = [f"| {title} | LoRAs of |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {', '.join(it)} |" for key, it in models.items())])


# {page: {mark above a part: what makes the part}}
PAGES = {
    "lora.md": {"lora settings": describe_settings, "comfyui": describe_comfyui},
    "lora-settings.md": {"lora settings": describe_sources},
}


def find_part(mark):
    return re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=\n<!-- end -->)", re.S)


def test_pages_show_settings_and_what_comfyui_reads():
    for name, parts in PAGES.items():
        for mark, describe in parts.items():
            assert find_part(mark).search((ROOT / "docs" / name).read_text())[0] == describe()


def test_readme_promises_comfyui_only_what_it_reads():
    rows = [line.split("\t") for line in COMFYUI.read_text().splitlines()]
    read = {
        model for _, models, answer in rows for model in models.split(", ") if answer == "reads"
    }
    page = " ".join((ROOT / "README.md").read_text().split())
    (for_all,) = re.findall(r"A LoRA of ([^.]*(?:\.\d[^.]*)*) also opens in ComfyUI, A1111", page)
    (others,) = re.findall(r"sd-scripts\. A LoRA of (.*?) also \[opens in ComfyUI\]", page)
    assert {*re.split(", | or ", f"{for_all}, {others}")} <= read


def test_each_setting_has_its_layers_and_sources():
    for name, each in SETTINGS.items():
        assert each.denoiser in LAYERS, name
        assert {said.source for said in each.sources} <= {*SOURCES}, name
        assert each.sources, name
    assert {each.denoiser for each in SETTINGS.values()} | {"PRXTransformer2DModel"} == {*LAYERS}


if __name__ == "__main__":
    for name, parts in PAGES.items():
        page = ROOT / "docs" / name
        for mark, describe in parts.items():
            text = find_part(mark).sub(lambda _: describe(), page.read_text(), count=1)
            page.write_text(text)
