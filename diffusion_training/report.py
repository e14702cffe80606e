"""The report of a run: report.html, loss.png and the model card.

python -m diffusion_training.report ddpm-photos     # makes report.html again from a run's folder
"""

import base64
import html
import io
import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusion_training.errors import explain
from diffusion_training.files import saving, write_file
from diffusion_training.training.signs import read_best, read_metrics

Description = tuple[list[str], str, str]  # tags for the hub, description, usage
STYLE = """\
:root { color-scheme: light dark } figure { margin: 0 } pre { background: #8882; padding: 1rem }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: 1rem; \
overflow-wrap: anywhere }
.curves { display: grid; gap: 1.5rem; \
grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)) }
.strip, pre { display: flex; gap: 1rem; overflow-x: auto } \
.strip img { max-height: 20rem; display: block }
.curves img { width: 100%; display: block } .sign { border-left: 4px solid #d70 } \
.sign, td { padding-left: 1rem }
td, th { text-align: left; vertical-align: top; border-bottom: 1px solid #8884 } \
th { font-weight: normal }"""


def list_settings(args: Namespace) -> dict[str, Any]:
    """The flags that model card and report show; local paths are cut to their last name."""
    settings = {}
    for key, value in vars(args).items():
        if value is not None and not key.endswith("_dir"):
            is_local = isinstance(value, str) and os.path.isabs(value) and os.path.exists(value)
            settings[key] = Path(value).name if is_local else value
    return settings


def draw_curves(records: list[dict], names: list[str], log: bool = False) -> tuple[Any, str] | None:
    """Plot values of metrics.jsonl over their steps, one line per name.

    A line has at most 300 points, each the mean of several values. Returns (a matplotlib figure,
    the last value of each line as text), or None if there is nothing to plot.
    """
    import matplotlib.figure  # imported here because it takes half a second

    lines = {}
    for name in names:
        points = [(x["step"], x[name]) for x in records if math.isfinite(x.get(name, math.nan))]
        if points:
            lines[name] = np.array(points, float)
    if not lines:
        return None
    parts = "axes.edgecolor axes.labelcolor xtick.color ytick.color legend.labelcolor".split()
    with matplotlib.rc_context(dict.fromkeys(parts, "#888")):  # legible on white and on black
        figure = matplotlib.figure.Figure(figsize=(5, 3))
        # a layout engine would double the time
        figure.subplots_adjust(left=0.15, right=0.97, bottom=0.16, top=0.92)
        axes = figure.add_subplot(xlabel="optimizer step")
        for name, line in lines.items():
            means = [part.mean(axis=0) for part in np.array_split(line, min(len(line), 300))]
            axes.plot(*np.array(means).T, label=name, marker="." if len(means) < 10 else "")
        if log and min(line[:, 1].min() for line in lines.values()) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.3g}")  # the default labels take half of the time
            low, high = axes.get_ylim()
            axes.yaxis.set_minor_formatter("{x:.3g}" if high < 10 * low else "")
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize="small", ncols=1 + len(lines) // 5)
    return figure, ", ".join(f"{name} {line[-1, 1]:.4g}" for name, line in lines.items())


def save_loss(output_dir: str | Path) -> float | None:
    """Plot the losses in metrics.jsonl as loss.png.

    Returns the last training loss, None if none is recorded.
    """
    records = read_metrics(output_dir)
    if drawn := draw_curves(records, ["loss", "held_out_loss", "held_out_loss_ema"], log=True):
        drawn[0].savefig(Path(output_dir) / "loss.png", dpi=150)
    return next((record["loss"] for record in reversed(records) if "loss" in record), None)


def name_run(args: Namespace) -> tuple[str, str | None, str, str]:
    """How a card describes a text-to-image run: (name, base model, data, prompt in quotes).

    The base model is None if there is none.
    """
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    base = args.pretrained_model_name_or_path
    if base and Path(base).exists():
        base = Path(base).resolve().name
    data = args.latents_dir or [args.dataset_name or args.train_data_dir]
    prompt = json.dumps((args.validation_prompts or ["a photograph"])[0])
    return name, base, ", ".join(Path(path).name for path in data), prompt


def name_best(output_dir: str | Path) -> str:
    """A sentence about best/, which --save_best keeps; empty if there is none."""
    best = read_best(Path(output_dir) / "best")
    text = "`best/` holds step {step}, whose held-out loss of {held_out_loss:.4g} is the lowest."
    return text.format(**best) if best else ""


def save_model_card(step: int, describe_model: Callable[..., Description], args: Namespace) -> None:
    """Write README.md as the hub shows it: data, samples, loss curve and settings."""
    output_dir = Path(args.output_dir)
    tags, what, usage = describe_model(step, save_loss(output_dir), args)
    samples = sorted((output_dir / "samples").glob("step-*.png"))
    picture = f"![samples](samples/{samples[-1].name})" if samples else ""
    table = "".join(f"| {key} | {value} |\n" for key, value in list_settings(args).items())
    held_out = [record for record in read_metrics(output_dir) if "held_out_loss" in record]
    if held_out:
        losses = "".join(f"| {name} | {value:.4g} |\n" for name, value in held_out[-1].items())
        table += f"\n| held out (epsilon's squared error) | |\n|---|---|\n{losses}"
    with saving(output_dir, "the model card") as unfinished:
        (unfinished / "README.md").write_text(f"""---
library_name: diffusers
pipeline_tag: {tags[0]}
tags: [diffusers, {", ".join(tags)}]
---

# {args.hub_model_id or output_dir.resolve().name}

{what}

```python
{usage}
```

{picture}
![loss](loss.png)

{name_best(output_dir)}

| setting | value |
|---|---|
{table}""", encoding="utf-8")  # fmt: skip


def save_report(
    step: int, script: str, describe_model: Callable[..., Description], args: Namespace
) -> None:
    """Write report.html, and report.json, which stores what only the run knows.

    If this fails, the run continues.
    """
    output_dir = Path(args.output_dir)
    try:
        losses = [record["loss"] for record in read_metrics(output_dir) if "loss" in record]
        _, what, usage = describe_model(step, losses[-1] if losses else None, args)
        skipped = {}
        # rows that a cache lacks, if its list is still there
        for folder in getattr(args, "latents_dir", None) or []:
            path = Path(folder) / "skipped.jsonl"
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            for row in map(json.loads, text.splitlines()):
                skipped[row["key"]] = row["reason"]
        about = {
            "name": args.hub_model_id or output_dir.resolve().name,
            "script": Path(script).name,
            "step": step,
            "max_train_steps": args.max_train_steps,
            "what": what,
            "usage": usage,
            "num_skipped": len(skipped),
            "skipped": dict(list(skipped.items())[:100]),
            "settings": list_settings(args),
        }
        write_file(output_dir / "report.json", json.dumps(about, indent=1))
        make_report(output_dir)
    except Exception as error:
        print(f"\nreport.html could not be written ({explain(error)})", file=sys.stderr)


def make_report(output_dir: str | Path) -> None:
    """Make report.html from a run's folder: one file, for any browser, also offline."""

    def escape(value: Any) -> str:
        return html.escape(str(value))

    def tabulate(pairs: Iterable[tuple]) -> str:
        return "".join(f"<tr><th>{escape(name)}<td>{escape(value)}" for name, value in pairs)

    output_dir = Path(output_dir)
    about = json.loads((output_dir / "report.json").read_text())
    records = read_metrics(output_dir)
    held_out = {name for record in records if "held_out_loss" in record for name in record}
    held_out = sorted(held_out - {"step"})
    curves = strip = signs = ""
    for names, log in [
        (["loss", "epoch_loss"], True),
        ([name for name in held_out if not name[-1].isdigit()], True),
        ([name for name in held_out if name[-1].isdigit()], True),
        (["lr"], False),
        (["grad_norm"], True),
        (["images_per_second"], False),
        (["data_wait", "mfu"], False),
        (["tflops"], False),
        (["memory_gb"], False),
    ]:
        if drawn := draw_curves(records, names, log):
            buffer = io.BytesIO()
            figure, values = drawn
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
            svg = base64.b64encode(buffer.getvalue()).decode()
            curves += (
                f'<figure><img alt="" src="data:image/svg+xml;base64,{svg}">'
                f"<figcaption>{escape(values)}</figcaption></figure>"
            )
    samples = sorted((output_dir / "samples").glob("step-*.png"), reverse=True)
    order = "newest first"
    # what training started from, to compare with; a run with --init_from starts at a later step
    if samples and (samples[-1].stem == "step-0000000" or "init_from" in about["settings"]):
        samples = [samples[-1], *samples[:-1]]
        order = "the oldest, then newest first"
    for i in np.linspace(0, len(samples) - 1, min(8, len(samples))):
        path = samples[round(i)]
        number = int(path.stem.split("-")[1])
        caption = f"step {number}" if number else "step 0, before training"
        buffer = io.BytesIO()
        with Image.open(path) as picture:
            picture.thumbnail((400, 640))  # so that the file stays small
            picture.save(buffer, "PNG", optimize=True)
        png = base64.b64encode(buffer.getvalue()).decode()
        strip += f'<figure><img alt="" src="data:image/png;base64,{png}">{caption}</figure>'
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
    skipped |= about["skipped"]
    name = escape(about["name"])
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>\
<style>{STYLE}</style>
<meta name="viewport" content="width=device-width"><h1>{name}</h1>\
<p>{escape(about["what"].replace("`", ""))}</p>
<p>Step {step} of {about["max_train_steps"]}, {time.strftime("%Y-%m-%d %H:%M")}.
{escape(name_best(output_dir).replace("`", ""))}</p>{signs}
<h2>Curves</h2><div class="curves">{curves}</div>
<h2>Samples, {order}</h2><div class="strip">{strip or "None were drawn."}</div>
<h2>Use it</h2><pre>{escape(about["usage"])}</pre>
<p>The same run again: <code>accelerate launch {escape(about["script"])} @run.args</code></p>
<h2>Left out: {count} images</h2><table>{tabulate(list(skipped.items())[:100])}</table>
<h2>Settings</h2><table>{tabulate(about["settings"].items())}</table></html>"""
    write_file(output_dir / "report.html", page)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1], "report.json").is_file():
        sys.exit(
            "usage: python -m diffusion_training.report RUN, "
            "the --output_dir of a run that has written a report"
        )
    make_report(sys.argv[1])
    print(f"{sys.argv[1]}/report.html")
