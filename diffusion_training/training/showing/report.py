"""The report of a run, report.html, and loss.png.

python -m diffusion_training.training.showing.report ddpm-photos  # makes report.html again
"""

import base64
import functools
import html
import io
import json
import math
import os
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jinja2
import numpy as np
from PIL.PngImagePlugin import PngImageFile

from diffusion_training.arguments import list_values, name_start
from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import amount, hide_secrets
from diffusion_training.files import write_file
from diffusion_training.training.keeping.best import read_best
from diffusion_training.training.keeping.checkpoints import find_samples
from diffusion_training.training.scores.metric_flags import (
    CLIP_METRICS,
    METRICS,
    SET_METRICS,
    TURBO,
)
from diffusion_training.training.step.signs import read_metrics

STYLE = """\
:root { color-scheme: light dark } figure { margin: 0 } img { max-width: 100%; display: block }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: 1rem; \
overflow-wrap: anywhere }
.curves, .pair { display: grid; gap: 1.5rem; \
grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)) }
.pair { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)) } \
.curves img, .pair img { width: 100% } .strip { display: flex; gap: 1rem; overflow-x: auto } \
.strip img { max-width: none; max-height: 20rem } \
.strip { margin-top: 1.5rem } \
pre { background: #8882; padding: 1rem; white-space: pre-wrap } table { border-collapse: collapse }
.sign { border-left: 4px solid #d70 } .sign, td { padding-left: 1rem } \
summary { cursor: pointer; margin: .5rem 0 }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid #8884 } \
th { font-weight: normal; white-space: nowrap } .files th { white-space: normal }"""
# names of the curves in the report and in loss.png
WORDS = {
    "loss": "loss",
    "epoch_loss": "mean loss of an epoch",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_second": "images per second",
    "data_wait": "share of time spent waiting for data",
    "mfu": "share of the GPU's peak speed",
    "tflops": "TFLOP/s",
    "memory_gb": "memory, GB",
    "held_out_loss": "held-out loss",
    "held_out_loss_ema": "held-out loss of the averaged weights",
    "prior_loss": "change of other predictions",
    "copy_real": "copy among training images",
}
# {flag: the metrics that its network is for}
NETWORKS = {
    "metric_image_model": (*SET_METRICS, "dino-i", "copy"),
    "metric_clip_model": CLIP_METRICS,
}


# code that opens a pipeline and draws an image; see `write_usage`
USAGE = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined).from_string("""
import torch
from diffusers import {{ classes | sort | join(", ") }}
{% if num_images %}
from diffusers.utils import load_image
{% endif %}
{% if "load_file(" in parts %}
from safetensors.torch import load_file
{% endif %}

device = "cuda" if torch.cuda.is_available() else "cpu"
{% if precision != "float32" %}
dtype = torch.{{ precision }} if device == "cuda" else torch.float32
{% endif %}
{% for line in transformer %}
{{ line }}
{% endfor %}
{% if blocks %}
blocks = {{ blocks }}()
{% if can_rewrite %}
blocks.sub_blocks.pop("prompt_upsampler")  # prompts stay as they are
{% endif %}
pipeline = blocks.init_pipeline({{ source }})
{% if transformer %}
pipeline.update_components(transformer=transformer)
{% endif %}
pipeline.load_components({{ options }})
pipeline.to(device)
{% else %}
{% set part = ", transformer=transformer" if transformer %}
pipeline = {{ opener }}({{ source }}{{ part }}{{ more }}).to(device)
{% endif %}
{% for line in setup %}
{{ line }}
{% endfor %}
{% set yours = ["", "  # your image", "  # your images"][[num_images, 2] | min] %}
{% if blocks %}
image = pipeline({{ call }}, output="images")[0]{{ yours }}
{% else %}
image = pipeline({{ call }}).{{ first_image }}{{ yours }}
{% endif %}
{% if 'output_type="np"' not in call %}{# not for arrays #}
image{{ ".resize((256, 256), 0)" if side < 128 }}.save("image.png")
{% endif %}
""")


@dataclass(frozen=True)
class About:
    """The names in a text about a run: paths as the user gave them, or names for other people."""

    step: int
    name: str  # of the result
    base: str | None  # the pretrained pipeline
    data: str
    prompt: str  # in quotes
    validation_base: str | None = None  # of the flags of these names
    validation_lora: str | None = None
    transformer_file: str | None = None


@dataclass(frozen=True)
class Description:
    """A script's description of its result, for the report and the model card."""

    tags: list[str]  # for the hub; the first one is the task
    what: str
    usage: str  # code
    base: str | None = None  # the pipeline that training started from, as the user gave it


# a script's `describe_model`
DescribeModel: TypeAlias = Callable[[About, Namespace], Description]


def name_run(step: int, args: Namespace, local: bool) -> About:
    """Return the names for texts about a run. local: paths as given, for the report.

    Else they are for Markdown, which puts data and base in backticks: they hold none.
    """

    def name(path: str) -> str:
        if local:
            return path
        shown = Path(path).resolve().name if os.path.exists(path) else path
        return " ".join(shown.replace("`", "'").split())

    flags = vars(args)
    output_dir = args.output_dir
    base = flags.get("pretrained_model_name_or_path")
    sources = ("latents_dir", "dataset_name", "train_data_dir", "data")
    data = next(flags[source] for source in sources if flags.get(source))
    prompts = flags.get("validation_prompts") or ["a photograph"]
    return About(
        step,
        output_dir if local else flags.get("hub_model_id") or Path(output_dir).resolve().name,
        base and name(base),
        ", ".join(map(name, list_values(data))),
        json.dumps(flags.get("instance_prompt") or prompts[0]),
        **{
            key: flags[key] and name(flags[key])
            for key in ("validation_base", "validation_lora", "transformer_file")
            if key in flags
        },
    )


def write_usage(
    source: str,
    call: str,
    setup: Sequence[str] = (),
    opener: str = "DiffusionPipeline.from_pretrained",
    precision: str = "float32",
    more: str = "",
    side: int = 512,
    blocks: str = "",
    can_rewrite: bool = False,
    dtype_name: str = "dtype",
    transformer: Sequence[str] = (),
    first_image: str = "images[0]",
) -> str:
    """Return code that opens a pipeline and draws an image, with or without a GPU.

    call: arguments of the pipeline. setup: lines before the call. opener: a function. precision: of
    the pipeline on a GPU. more: further arguments of `opener`. side: of the image in pixels; a
    small one is enlarged. blocks: the class of a modular pipeline's blocks, which opens it instead.
    can_rewrite: have these a block that rewrites prompts? dtype_name: see `DTYPE`.
    transformer: lines that load one in place of the pipeline's. first_image: of its result.
    """
    parts = "\n".join([*transformer, *setup])
    made = re.findall(r"= (\w+)\.from_(?:config|single_file)", parts)
    if precision != "float32":  # modular pipelines have only the newer name
        more = f", {'dtype' if blocks else dtype_name}=dtype{more}"
    return USAGE.render(
        classes={blocks or opener.split(".")[0], *made},
        parts=parts,
        source=json.dumps(source),
        options=more.removeprefix(", "),
        num_images=call.count("load_image("),
        call=call,
        setup=setup,
        opener=opener,
        precision=precision,
        more=more,
        side=side,
        blocks=blocks,
        can_rewrite=can_rewrite,
        transformer=transformer,
        first_image=first_image,
    ).strip()


def draw_curves(records: list[dict], names: list[str], log: bool = False) -> tuple[Any, str] | None:
    """Plot values of metrics.jsonl over their steps, one line per name.

    A line has at most 300 points, each the mean of several values. Returns (a matplotlib figure,
    the last value of each line as text), or None if there is nothing to plot.
    """
    import matplotlib.figure  # takes half a second

    lines = {}
    for name in names:
        points = [(x["step"], x[name]) for x in records if math.isfinite(x.get(name, math.nan))]
        if points:
            lines[name] = np.array(points, float)
    if not lines:
        return None
    parts = "axes.edgecolor axes.labelcolor xtick.color ytick.color legend.labelcolor".split()
    with matplotlib.rc_context(dict.fromkeys(parts, "#888")):  # readable on white and on black
        figure = matplotlib.figure.Figure(figsize=(5, 3))
        # a layout engine would double the time
        figure.subplots_adjust(left=0.15, right=0.97, bottom=0.16, top=0.92)
        axes = figure.add_subplot(xlabel="optimizer step")
        for name, line in lines.items():
            means = [part.mean(axis=0) for part in np.array_split(line, min(len(line), 300))]
            axes.plot(
                *np.array(means).T,
                label=WORDS.get(name, name),
                marker="." if len(means) < 10 else "",
            )
        lowest = min(line[:, 1].min() for line in lines.values())
        if not log and lowest >= 0:
            axes.set_ylim(bottom=0)  # otherwise a small rise would look like a large one
        if log and lowest > 0:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            # as many digits as tell the labels apart; the default ones take half of the time
            digits = max(3, math.ceil(-math.log10(high / low - 1)) + 2)
            axes.yaxis.set_major_formatter(f"{{x:.{digits}g}}")
            axes.yaxis.set_minor_formatter(f"{{x:.{digits}g}}" if high < 10 * low else "")
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize="small", ncols=1 + len(lines) // 5)
    return figure, ", ".join(
        f"{WORDS.get(name, name)} {line[-1, 1]:.4g}" for name, line in lines.items()
    )


def save_loss(output_dir: str | Path) -> None:
    """Plot the losses in metrics.jsonl as loss.png."""
    records = read_metrics(output_dir)
    if drawn := draw_curves(records, ["loss", "held_out_loss", "held_out_loss_ema"], log=True):
        drawn[0].savefig(Path(output_dir) / "loss.png", dpi=150)


def name_best(output_dir: str | Path) -> str:
    """Return a sentence about best/, which --save_best keeps; empty if there is none."""
    best = read_best(Path(output_dir) / "best")
    text = "`best/` holds step {step}, which has the lowest held-out loss: {held_out_loss:.4g}."
    if "metric" in best:
        text = "`best/` holds step {step}, which has the best {metric}: {value:.4g}."
    return text.format(**best) if best else ""


def advise_step(measured: list[dict]) -> str:
    """A sentence that says which step to take, by the likenesses of --validation_metrics.

    A step repeats its training images if its samples are nearer to them than they are to each
    other. Among the others, the one is best with the highest mean of the likenesses to prompts and
    real images, each from 0 at its lowest step to 1 at its highest.

    measured: records of metrics.
    """
    measured = [record for record in measured if record["step"]]  # 0: before training
    names = [name for name in ("clip-t", "clip-i", "dino-i") if name in (measured or [{}])[-1]]
    if len(measured) < 2 or not names:
        return ""
    original = [
        record for record in measured if record.get("copy", -1) <= record.get("copy_real", 1)
    ]
    if not original:
        return (
            "The samples of every step are nearer to a training image than these are to each "
            "other, so all repeat them: train for fewer steps, or with more images."
        )

    def rate(record: dict) -> float:
        total = 0.0
        for name in names:
            values = [other[name] for other in measured if name in other]
            span = max(values) - min(values)
            total += (record.get(name, min(values)) - min(values)) / span if span else 0
        return total

    best = max(original, key=rate)
    among = ""
    if "copy_real" in best:
        among = ", among the steps that do not repeat the training images"
    return f"Take step {best['step']}: it is best in {' and '.join(names)} together{among}."


def save_report(
    script: str, describe: DescribeModel, step: int, args: Namespace, facts: dict[str, str]
) -> None:
    """Write report.html, and report.json with the values that only the run knows.

    facts: {name: value} to list besides the settings. If this fails, the run continues.
    """
    output_dir = Path(args.output_dir)
    try:
        described = describe(name_run(step, args, local=True), args)
        skipped = {}
        # rows that a cache lacks, if its list is still there
        for folder in vars(args).get("latents_dir") or []:
            path = Path(folder) / "skipped.jsonl"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            try:
                rows = list(map(json.loads, text.splitlines()))
            except ValueError as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            for row in rows:
                skipped[hide_secrets(row["key"])] = hide_secrets(row["reason"])
        flags = {name: value for name, value in vars(args).items() if value is not None}
        given = {name: flags[name] for name in args.given if name in flags}
        typed = [""]
        for word in args.typed:  # a line for each flag
            if word.startswith(("--", "@")):
                typed.append("")
            typed[-1] += f" {shlex.quote(hide_secrets(word))}"
        again = [f"@{output_dir / 'run.args'}", "--output_dir", f"{output_dir}-again"]
        again += ["--no-push_to_hub"] * bool(flags.get("push_to_hub"))
        if flags.get("checkpoints_to"):  # an address belongs to one run
            again += ["--checkpoints_to", flags["checkpoints_to"].rstrip("/") + "-again"]
        start = name_start(script)
        about = {
            "name": flags.get("hub_model_id") or output_dir.resolve().name,
            "step": step,
            "max_train_steps": args.max_train_steps,
            "what": described.what,
            "usage": described.usage,
            "facts": facts,
            "command": start + " \\\n   ".join(typed),
            "again": f"{start} {shlex.join(again)}",
            "num_skipped": len(skipped),
            "skipped": dict(list(skipped.items())[:100]),
            "given": given,
            "settings": flags,
        }
        write_file(output_dir / "report.json", json.dumps(about, indent=1))
        make_report(output_dir)
    except Exception as error:
        print(f"\nreport.html could not be written ({explain(error)})", file=sys.stderr)


def list_curves(records: list[dict], facts: dict[str, str]) -> list[tuple[list[str], bool]]:
    """Choose the curves of the report: [(names of values in one picture, logarithmic?)]."""
    epochs = [record["epoch"] for record in records if "loss" in record]
    held_out = {name for record in records if "held_out_loss" in record for name in record}
    held_out = sorted(held_out - {"step"})
    # if each record has its own epoch, the epoch's mean would repeat the loss
    loss = ["loss"] if 2 * len(set(epochs)) > len(epochs) else ["loss", "epoch_loss"]
    pictures = [
        (loss, True),
        ([name for name in held_out if not name[-1].isdigit()], True),
        ([name for name in held_out if name[-1].isdigit()], True),
        (["prior_loss"], True),
        (["clip-t", "clip-i", "dino-i", "copy", "copy_real"], False),
        ([f"{TURBO}{name}" for name in ("clip-t", "clip-i", "dino-i", "copy")], False),
        (["kid", f"{TURBO}kid"], False),
        (["fid", f"{TURBO}fid"], True),
        (["lr"], False),
        (["grad_norm"], True),
        (["images_per_second"], False),
        (["data_wait", "mfu"], False),
        ([] if " on cpu" in facts.get("processes", "") else ["tflops"], False),
        (["memory_gb"], False),
    ]
    chosen = []
    for names, log in pictures:
        lines = [[record[name] for record in records if name in record] for name in names]
        # a constant needs no curve
        if any(line and (log or max(line) > 1.02 * min(line)) for line in lines):
            chosen.append((names, log))
    return chosen


@functools.lru_cache(16)  # most were in the report before, and take half a second each
def embed_picture(path: Path, side: int, modified: int) -> str:
    """Return a picture of samples as an <img>, at most `side` pixels wide. modified: its time."""
    buffer, kind = io.BytesIO(), "png"  # it keeps the edges of digits
    with PngImageFile(path) as picture:  # `Image.open` refuses very large ones
        picture.thumbnail((side, 4 * side))
        if picture.getcolors(2**15):  # a PNG of photographs would take seconds
            picture.save(buffer, kind, optimize=True)
        if not 0 < buffer.tell() < 300_000:  # photographs, perhaps in black and white
            buffer, kind = io.BytesIO(), "jpeg"
            picture.convert("RGB").save(buffer, kind, quality=90)
    data = base64.b64encode(buffer.getvalue()).decode()
    step = int(path.stem.split("-")[1])
    caption = f"step {step}" if step else "step 0, before training"
    return (
        f'<figure><img alt="samples of {caption}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def show_quality(records: list[dict], settings: dict[str, Any]) -> str:
    """The section of the report on --validation_metrics; empty without them."""
    measured = [record for record in records if "metric_images" in record]
    if not measured:
        return ""
    last = measured[-1]
    with_turbo = [*METRICS, *(f"{TURBO}{name}" for name in METRICS)]
    names = [name for name in with_turbo if name in last]
    networks = [settings[flag] for flag, known in NETWORKS.items() if {*names} & {*known}]
    of = f"{last['metric_images']} samples against {last['real_images']} real images"

    def show(record: dict, name: str) -> str:
        value, low, high = (record.get(f"{name}{end}", math.nan) for end in ("", "_low", "_high"))
        return f"{value:.3g} ({low:.3g} to {high:.3g})"

    table = [["step", *names]]
    for record in measured[-30:]:
        table.append([str(record["step"]), *(show(record, name) for name in names)])
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(x)}" for x in row) for row in table)
    caption = f"{of}, by {' and '.join(networks)}. In brackets are 95 % intervals."
    if any(name.startswith(TURBO) for name in names):
        drawn = [settings.get(flag) for flag in ("validation_base", "validation_lora")]
        caption += f" {TURBO} are samples with {' and '.join(filter(None, drawn))}."
    return (
        f"<h2>Quality of the samples</h2><p>{html.escape(advise_step(measured))}</p>"
        f"<p>{html.escape(caption)}</p><table>{rows}</table>"
    )


def make_report(output_dir: str | Path) -> None:
    """Make report.html from a run's folder: one file for any browser, without a network."""

    def escape(value: Any) -> str:
        return html.escape(str(value))

    def tabulate(pairs: Iterable[tuple]) -> str:
        rows = ""
        for name, value in pairs:
            text = shlex.join(map(str, value)) if isinstance(value, list) else str(value)
            rows += f"<tr><th>{escape(name)}<td>{escape(text)}"
        return f"<table>{rows}</table>"

    output_dir = Path(output_dir)
    about = json.loads((output_dir / "report.json").read_text())
    records = read_metrics(output_dir)
    facts = about["facts"]
    settings = about["settings"]
    given = about["given"]
    curves = signs = skipped_section = ""
    for names, log in list_curves(records, facts):
        if drawn := draw_curves(records, names, log):
            buffer = io.BytesIO()
            figure, values = drawn
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            svg = base64.b64encode(buffer.getvalue()).decode()
            curves += (
                f'<figure><img alt="a curve with the last value {escape(values)}" '
                f'src="data:image/svg+xml;base64,{svg}">'
                f"<figcaption>{escape(values)}</figcaption></figure>"
            )
    paths = find_samples(output_dir)
    # samples from before training, to compare; a run with --init_from starts at a later step
    first, last = paths[:-1][:1], paths[-1:]
    if first and first[0].stem != "step-0000000" and "init_from" not in settings:
        first = []
    between = paths[len(first) : -1]
    stride = 1  # a power of two, so that a report has mostly the pictures of the one before
    while len(between) > 6 * stride:
        stride *= 2
    pair, strip = (
        "".join(embed_picture(path, side, path.stat().st_mtime_ns) for path in chosen)
        for chosen, side in ((first + last, 1100), (between[::stride], 400))
    )
    step = about["step"]
    count = 0
    skipped = {}
    for record in records:
        step = max(step, record["step"])
        count = max(count, record.get("skipped_images", 0))
        skipped |= record.get("skipped", {})
        for sign in record.get("signs", {}).values():
            signs += f'<p class="sign">Worth a look, at step {record["step"]}: {escape(sign)}</p>'
    count = max(len(skipped) + about["num_skipped"], count)
    if count:
        rows = list((skipped | about["skipped"]).items())[:100]
        skipped_section = f"<h2>Skipped: {amount(count, 'image')}</h2>"
        skipped_section += f'<div class="files">{tabulate(rows)}</div>'
    defaults = {key: value for key, value in settings.items() if key not in given}
    name = escape(about["name"])
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\
<style>{STYLE}</style>
<meta name="viewport" content="width=device-width"><h1>{name}</h1>\
<p>{escape(about["what"].replace("`", ""))}</p>
<p>Step {step} of {about["max_train_steps"]}, {time.strftime("%Y-%m-%d %H:%M")}.
{escape(name_best(output_dir).replace("`", ""))}</p>{signs}
<h2>Samples</h2><div class="pair">{pair or "None were drawn."}</div><div class="strip">{strip}</div>
{show_quality(records, settings)}
<h2>Use it</h2><pre>{escape(about["usage"])}</pre>
<h2>The run</h2>{tabulate(facts.items())}
<p>The command:</p><pre>{escape(about["command"])}</pre>
<p>To repeat the run in another folder:</p><pre>{escape(about["again"])}</pre>
<h2>Curves</h2><div class="curves">{curves}</div>
{skipped_section}
<h2>Settings</h2>{tabulate(given.items())}
<details><summary>{amount(len(defaults), "setting")} with the default value</summary>\
{tabulate(defaults.items())}</details></html>"""
    write_file(output_dir / "report.html", page)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "report.json").is_file():
        sys.exit(
            "usage: python -m diffusion_training.training.showing.report RUN "
            "(RUN: the --output_dir of a run that has written report.json)"
        )
    make_report(sys.argv[1])
    print(f"{sys.argv[1]}/report.html")
