"""report.html: its contents, escaping of names, making it again, and its look in a browser."""

import base64
import html
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from html import escape, unescape

import pytest
import torch
from conftest import MODELS, ROOT, Script, make_images, metrics, patch, replace
from PIL import Image

import train_text_to_image
from diffusion_training.families.known import load_family
from diffusion_training.training.showing.report import draw_curves, embed_picture, save_report

HOSTILE = "<img src=x onerror=document.title=1>&amp;"


def curves(page):
    """The texts below the figures."""
    return [
        unescape(text)
        for text in re.findall(r"svg\+xml;base64,[^>]*><figcaption>(.*?)</figcaption>", page)
    ]


def test_report_shows_the_run_and_skipped_images_at_every_validation(
    tmp_path, unet_config, monkeypatch
):
    make_images(tmp_path / "images", 6)
    (tmp_path / f"images/{HOSTILE}.png").write_bytes(b"no image")
    train = Script("train_unconditional")
    flags = train.flags(
        tmp_path / HOSTILE,
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={unet_config}",
        *"--train_batch_size=2 --num_epochs=2 --eval_batch_size=3 --save_images_epochs=1".split(),
        *"--lr_warmup_steps=0 --checkpointing_steps=99".split(),
    )
    written = []

    def record_report(script, describe, step, *rest):
        save_report(script, describe, step, *rest)
        written.append(
            (step, f"Step {step} of 8" in (tmp_path / HOSTILE / "report.html").read_text())
        )

    patch(monkeypatch, "save_report", record_report)
    patch(monkeypatch, "find_signs", lambda *_: {"x": f"a sign {HOSTILE}"})
    train(*flags)
    assert written == [(4, True), (8, True)]
    page = (tmp_path / HOSTILE / "report.html").read_text()
    assert HOSTILE not in page and "<script" not in page  # names are text
    # The page fetches nothing
    assert not re.search(r"<[^>]*(?:src|href)=(?!\"data:)|https?:|@import|url\(", page)
    text = unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S))
    shown = [
        f"a sign {HOSTILE}",
        "Skipped: 1 image ",
        f"images/{HOSTILE}.png",
        "cannot identify image file",
    ]
    shown += [
        f"trained on {tmp_path / 'images'} for 8 steps",
        f"DiffusionPipeline.from_pretrained({json.dumps(str(tmp_path / HOSTILE))}",
        "1 on cpu, 1 thread each; mixed precision: no",
        "7, 2 per step",
        f"torch {torch.__version__.split('+')[0]}",
        "--num_epochs=2",
        f"@{shlex.quote(str(tmp_path / HOSTILE / 'run.args'))}"[2:-1],
    ]
    assert not [words for words in shown if words not in text]
    for first, then in itertools.pairwise(["Samples", "Use it", "The run", "Curves", "Settings"]):
        assert page.index(f"<h2>{first}") < page.index(f"<h2>{then}")
    given, defaults = page[page.index("<h2>Settings") :].split("<details>")
    assert "<th>resolution<td>16" in given and "<th>adam_beta1<td>0.95" in defaults
    last = metrics(tmp_path / HOSTILE)[-1]
    loss, learning_rate = curves(page)[:2]
    assert loss == f"loss {last['loss']:.4g}, mean loss of an epoch {last['epoch_loss']:.4g}"
    assert learning_rate == f"learning rate {last['lr']:.4g}"
    assert not any("TFLOP" in text for text in curves(page))  # on a CPU
    assert 'alt=""' not in page
    for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page):
        assert b"<svg" in base64.b64decode(data) and b"<script" not in base64.b64decode(data)
    pictures = [
        base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", page)
    ]
    assert [Image.open(io.BytesIO(data)).format for data in pictures] == ["PNG"] * 2
    # the last one is large; the model was new, so there is no step 0
    assert re.findall(r"step (\d+)</figcaption>", page) == ["8", "4"]
    assert page.index("step 8</figcaption>") < page.index('class="strip"')


def write_run(tmp_path, count):
    """Write the records and samples of a text-to-image run, whose cache lacks a row.

    Returns the flags of the run.
    """
    for name in ("cache", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "cache/skipped.jsonl").write_text(
        json.dumps({"row": 1, "key": HOSTILE, "reason": "broken"}) + "\n"
    )
    kinds = {
        "epoch": 1,
        "loss": 0.5,
        "grad_norm": 0.1,
        "clipped": 0.0,
        "images_per_second": 9.0,
        "memory_gb": 2.0,
    }
    records = [
        {"step": 10 * i, **kinds, "lr": 1e-4 / i, "data_wait": 0.01 / i, "skipped_images": 0}
        for i in range(1, count + 1)
    ]
    names = ["held_out_loss", "held_out_loss_ema", *(f"held_out_loss_t0.{i}" for i in range(1, 10))]
    records += [{"step": 10 * i, **dict.fromkeys(names, 1 / i)} for i in range(1, 10)]
    (tmp_path / "out/metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (tmp_path / "out/samples").mkdir()
    for step in range(12):
        Image.effect_noise((600, 450), 100).save(tmp_path / f"out/samples/step-{step:07d}.png")
    argv = [
        f"--pretrained_model_name_or_path={MODELS}",
        f"--latents_dir={tmp_path / 'cache'}",
        "--max_train_steps=90",
    ]
    argv += [f"--output_dir={tmp_path / 'out'}"]
    hostile = f"</pre><script>document.title=1</script>{HOSTILE}"
    argv += ["--validation_prompts", hostile, "a photo of a cat"]
    return train_text_to_image.parse_args(argv)


def save(args, step=90):
    describe_model = partial(train_text_to_image.describe_model, load_family("sd"))
    settings = replace(args, resolution=16)
    save_report(train_text_to_image.__file__, describe_model, step, settings, {"time": "9 s"})


@pytest.mark.long
def test_report_of_a_long_run_is_cheap_and_lists_rows_the_cache_lacks(tmp_path, capfd):
    args = write_run(tmp_path, 30_000)
    begin = time.process_time()
    records = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    read = time.process_time() - begin  # the yardstick, because machines differ in speed
    save(args)
    print(f"{read:.2f} s to read, {time.process_time() - begin - read:.2f} s to report")
    assert len(records) >= 30_000 and time.process_time() - begin - read < 8 * read + 2
    page = (tmp_path / "out/report.html").read_text()
    assert len(page) < 2_000_000 and page.count("data:image/") == 7 + 6 and "broken" in page
    assert "<script" not in page and HOSTILE not in page and capfd.readouterr().err == ""
    # a constant speed and memory need no curve
    names = ["loss", "held-out loss", "held_out_loss_t0.1", "learning rate", "norm of", "share of"]
    assert [text.startswith(name) for text, name in zip(curves(page), names, strict=True)]


def test_pictures_in_a_report_are_small(tmp_path, monkeypatch):
    """Digits are PNGs, which keep their edges, and photographs are JPEGs, also without colours."""
    noise = Image.effect_noise((600, 450), 100)
    pictures = {"gray": noise, "colours": Image.merge("RGB", [noise, noise.rotate(180), noise])}
    pictures["digits"] = Image.new("L", (600, 450))
    kinds = {}
    for name, picture in pictures.items():
        path = tmp_path / f"{name}-1.png"
        picture.convert("RGB").save(path)  # as grids are
        tag = embed_picture(path, 1100, 0)
        kinds[name] = re.search("data:image/(.*?);", tag)[1]
        assert len(tag) < 500_000
    assert kinds == {"gray": "jpeg", "colours": "jpeg", "digits": "png"}
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # 45 prompts at 1024 px exceed Pillow's
    assert embed_picture(path, 500, 0)


def test_failed_report_keeps_the_old_one_and_the_run_continues(
    tmp_path, monkeypatch, capfd, without_figures
):
    args = write_run(tmp_path, 3)
    save(args)
    before = (tmp_path / "out/report.html").read_text()
    patch(monkeypatch, "draw_curves", lambda *_: 1 / 0)
    save(args, 91)
    assert "report.html could not be written (division by zero)" in capfd.readouterr().err
    assert (tmp_path / "out/report.html").read_text() == before
    assert html.escape("'a photo of a cat'") in before  # prompts are told apart


@pytest.mark.long
def test_report_can_be_made_again_from_a_copied_folder(tmp_path):
    """On another machine, without the data and the cache."""
    save(write_run(tmp_path, 3))
    before = (tmp_path / "out/report.html").read_text()
    (tmp_path / "out").rename(tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "copy/report.html").unlink()
    lines = [
        line
        for line in (tmp_path / "copy/metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    with (tmp_path / "copy/metrics.jsonl").open("a") as file:  # one more step
        file.write(json.dumps(json.loads(lines[-1]) | {"step": 100, "loss": 0.25}) + "\n")
    command = [sys.executable, "-m", "diffusion_training.training.showing.report"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([*command, "copy"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (made.returncode, made.stdout, made.stderr) == (0, "copy/report.html\n", "")
    page = (tmp_path / "copy/report.html").read_text()
    assert "Step 90 of 90" in before and "Step 100 of 90" in page and "broken" in page
    assert (curves(before)[0], curves(page)[0]) == ("loss 0.5", "loss 0.25")
    assert curves(page)[1:] == curves(before)[1:]
    cut = lambda text: text[text.index("<h2>Samples") : text.index("<h2>Curves")]
    assert cut(page) == cut(before)
    wrong = subprocess.run(
        [*command, tmp_path], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert wrong.returncode == 1 and wrong.stderr.startswith(
        "usage: python -m diffusion_training.training.showing.report RUN"
    )


def test_draw_curves_uses_finite_values_and_at_most_300_points():
    records = [{"step": i, "loss": 1 / i, "lr": 0.0} for i in range(1, 1001)] + [
        {"step": 1001, "loss": float("nan")}
    ]
    figure, said = draw_curves(records, ["loss", "lr", "nothing"], log=True)
    one, other = figure.axes[0].lines
    assert (
        len(one.get_xdata()) == 300
        and said == "loss 0.001, learning rate 0"
        and figure.axes[0].get_yscale() == "linear"
    )
    assert (
        one.get_ydata()[0] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
        and other.get_ydata().max() == 0
    )
    assert draw_curves(records, ["loss"], log=True)[0].axes[0].get_yscale() == "log"
    assert draw_curves(records, ["nothing"]) is None


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium on PATH to look at the report with"
)
@pytest.mark.parametrize(
    "width, height, dark", [(390, 844, True), pytest.param(1280, 900, False, marks=pytest.mark.ci)]
)
def test_report_layout_is_right_in_a_browser(tmp_path, width, height, dark):
    save(write_run(tmp_path, 30))
    look = """<script>addEventListener("load", () => { parent.document.body.dataset.seen = JSON.stringify({
        title: document.title, width: innerWidth, wide: document.documentElement.scrollWidth,
        ink: getComputedStyle(document.body).color,
        dark: matchMedia("(prefers-color-scheme: dark)").matches,
        columns: getComputedStyle(document.querySelector(".curves")).gridTemplateColumns.split(" ").length,
        pair: [...document.querySelectorAll(".pair img")].map(image => image.getBoundingClientRect().width),
        pictures: [...document.querySelectorAll(".strip img")].map(image => [image.naturalWidth, image.height]),
        curves: [...document.querySelectorAll(".curves img")].map(image => [image, image.getBoundingClientRect()]).map(
            ([image, box]) => [image.naturalWidth, image.naturalHeight, box.left, box.right, box.width, box.height])
        })})</script>"""  # noqa: E501
    page = escape((tmp_path / "out/report.html").read_text() + look)
    # In a frame, because a browser window can't be as narrow as a phone
    frame = f"<iframe style='border: 0' width={width} height={height} srcdoc=\"{page}\"></iframe>"
    (tmp_path / "look.html").write_text(frame)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom",
        "--window-size=1400,1000",
    ]
    command += [(tmp_path / "look.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    seen = json.loads(unescape(re.search('data-seen="(.*?)"', dom)[1]))
    assert seen["title"] == "out" and seen["dark"] is dark and seen["width"] == width
    assert seen["wide"] <= width  # nothing is wider than the window
    assert seen["columns"] == (1 if width == 390 else 3)
    assert seen["ink"] == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
    assert len(seen["pictures"]) == 5 and all(
        wide == 400 and high > 200 for wide, high in seen["pictures"]
    )
    assert len(seen["pair"]) == 2 and min(seen["pair"]) > (300 if width == 390 else 500)
    assert len(seen["curves"]) == 6
    for natural_width, natural_height, left, right, wide, high in seen["curves"]:
        # The curve is drawn and fits the page
        assert 0 <= left < right <= width and wide > 250 and natural_width > 250
        assert high == pytest.approx(wide * natural_height / natural_width, rel=0.02)
