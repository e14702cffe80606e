"""report.html: what it shows, that nothing in it can harm, and how it looks in a browser."""

import base64
import io
import json
import re
import shutil
import subprocess
import time
from html import escape, unescape

import pytest
from conftest import make_images, metrics
from PIL import Image

import train_text_to_image
import train_unconditional as script

HOSTILE = "<img src=x onerror=document.title=1>&amp;"


@pytest.fixture
def flags(tmp_path, unet_config):
    make_images(tmp_path / "images", 6)
    (tmp_path / f"images/{HOSTILE}.png").write_bytes(b"no image")
    return [
        f"--train_data_dir={tmp_path / 'images'}", f"--model_config_name_or_path={unet_config}", "--resolution=16",
        f"--output_dir={tmp_path / HOSTILE}", "--train_batch_size=2", "--num_epochs=3", "--ddpm_num_inference_steps=2",
        "--eval_batch_size=3", "--save_images_epochs=1", "--logging_steps=1", "--report_to=none",
        "--lr_warmup_steps=0", "--dataloader_num_workers=0", "--checkpointing_steps=99",
    ]  # fmt: skip


def test_it_shows_the_run_and_what_was_left_out_at_every_validation(tmp_path, flags, monkeypatch):
    save_report, written = script.save_report, []

    def spy(step, args):
        save_report(step, args)
        written.append((step, f"Step {step} of 12" in (tmp_path / HOSTILE / "report.html").read_text()))

    monkeypatch.setattr(script, "save_report", spy)
    monkeypatch.setattr(script, "find_signs", lambda *_: {"x": f"a sign {HOSTILE}"})
    script.main(script.parse_args(flags))
    assert written == [(4, True), (8, True), (12, True), (12, True)]
    page = (tmp_path / HOSTILE / "report.html").read_text()
    assert HOSTILE not in page and "<script" not in page  # names are text
    assert not re.search(r"<[^>]*(?:src|href)=(?!\"data:)|https?:|@import|url\(", page)  # nothing is fetched
    text = unescape(re.sub(r"<svg.*?</svg>|<style>.*?</style>|<[^>]*>", " ", page, flags=re.S))
    shown = [f"a sign {HOSTILE}", "Left out: 1 images", f"images/{HOSTILE}.png", "cannot identify image file"]
    shown += ["trained on images for 12 steps", "DiffusionPipeline.from_pretrained(", "learning_rate", "Use it"]
    assert not [words for words in shown if words not in text]
    for name in ("loss", "lr", "grad_norm", "images_per_second", "data_wait"):
        assert f" {name} {metrics(tmp_path / HOSTILE)[-1][name]:.4g}" in text
    assert page.count("<polyline") == 5
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", page)]
    assert [Image.open(io.BytesIO(data)).format for data in pictures] == ["PNG"] * 3
    assert [*map(int, re.findall(r"step (\d+)</figure>", page))] == [12, 8, 4]
    script.main(script.parse_args([*flags, "--num_epochs=4", "--resume_from_checkpoint=latest"]))
    records = metrics(tmp_path / HOSTILE)  # what is known stays known, and is told once
    assert sum("skipped" in record for record in records) == 1 and records[-1]["skipped_images"] == 1
    assert "Left out: 1 images" in (tmp_path / HOSTILE / "report.html").read_text()


def test_a_failure_ends_no_run_and_leaves_the_report_before(tmp_path, flags, monkeypatch, capfd):
    script.main(script.parse_args([*flags, "--num_epochs=1"]))
    before = (tmp_path / HOSTILE / "report.html").read_text()
    monkeypatch.setattr(script, "draw_curves", lambda *_, **__: 1 / 0)
    script.main(script.parse_args([*flags, "--num_epochs=2", "--resume_from_checkpoint=latest"]))
    said = capfd.readouterr()
    assert "report.html could not be written (division by zero)" in said.err and "Done: " in said.out
    assert (tmp_path / HOSTILE / "report.html").read_text() == before


def write_run(tmp_path, count):
    """A text-to-image run of `count` records with held-out losses, a cache that lacks a row, and its flags."""
    for name in ("cache", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "cache/skipped.jsonl").write_text(json.dumps({"row": 1, "key": HOSTILE, "reason": "broken"}) + "\n")
    kinds = {"epoch": 0, "loss": 0.5, "lr": 1e-4, "grad_norm": 0.1, "clipped": 0.0, "images_per_second": 9.0}
    records = [{"step": 10 * i, **kinds, "data_wait": 0.01, "skipped_images": 0} for i in range(1, count + 1)]
    names = ["held_out_loss", "held_out_loss_ema", *(f"held_out_loss_t0.{i}" for i in range(1, 10))]
    records += [{"step": 10 * i, **dict.fromkeys(names, 1 / i)} for i in range(1, 10)]
    (tmp_path / "out/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "out/samples").mkdir()
    for step in range(20):
        Image.effect_noise((1200, 900), 100).save(tmp_path / f"out/samples/step-{step:07d}.png")
    argv = ["--pretrained_model_name_or_path=x", f"--latents_dir={tmp_path / 'cache'}", "--max_train_steps=90"]
    argv += [
        f"--output_dir={tmp_path / 'out'}",
        f"--validation_prompts=</pre><script>document.title=1</script>{HOSTILE}",
    ]
    return train_text_to_image.parse_args(argv)


def test_a_long_run_costs_little_and_a_cache_tells_what_it_lacks(tmp_path, capfd):
    args = write_run(tmp_path, 100_000)
    begin = time.process_time()
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    read = time.process_time() - begin  # the yardstick, as machines differ
    train_text_to_image.save_report(90, args)
    assert len(records) >= 100_000 and time.process_time() - begin - read < 4 * read + 1
    page = (tmp_path / "out/report.html").read_text()
    assert len(page) < 2_000_000 and page.count("data:image/png") == 8 and "broken" in page
    assert "<script" not in page and HOSTILE not in page and capfd.readouterr().err == ""
    assert page.count("<figcaption>") == 7 and page.count("<polyline") == 5 + 2 + 9


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH to look at the report with")
@pytest.mark.parametrize("width, height, dark", [(390, 844, True), (1280, 900, False)])
def test_it_looks_right_in_a_browser(tmp_path, width, height, dark):
    train_text_to_image.save_report(90, write_run(tmp_path, 30))
    look = """<script>parent.document.body.dataset.seen = JSON.stringify({
        title: document.title, width: innerWidth, wide: document.documentElement.scrollWidth,
        ink: getComputedStyle(document.querySelector("svg text")).fill,
        dark: matchMedia("(prefers-color-scheme: dark)").matches,
        columns: getComputedStyle(document.querySelector(".curves")).gridTemplateColumns.split(" ").length,
        pictures: [...document.images].map(image => [image.naturalWidth, image.height]),
        lines: [...document.querySelectorAll("svg")].map(svg => [svg, ...svg.querySelectorAll("polyline, text")].map(
            part => part.getBoundingClientRect()).map(box => [box.left, box.right, box.top, box.bottom]))})</script>"""
    page = escape((tmp_path / "out/report.html").read_text() + look)
    frame = f"<iframe style='border: 0' width={width} height={height} srcdoc=\"{page}\"></iframe>"  # a window is wider
    (tmp_path / "look.html").write_text(frame)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", "--window-size=1400,1000"]
    command += [(tmp_path / "look.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    seen = json.loads(unescape(re.search('data-seen="(.*?)"', dom)[1]))
    assert seen["title"] == "out" and seen["dark"] is dark and seen["width"] == width
    assert seen["wide"] <= width  # nothing sticks out
    assert seen["columns"] == (1 if width == 390 else 3)
    assert seen["ink"] == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
    assert len(seen["pictures"]) == 8 and all(wide == 400 and high > 200 for wide, high in seen["pictures"])
    for svg, *parts in seen["lines"]:
        for left, right, top, bottom in parts:  # all within its own picture
            assert svg[0] - 1 <= left <= right <= svg[1] + 1 and svg[2] - 1 <= top <= bottom <= svg[3] + 1
