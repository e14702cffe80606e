"""Records and signs: they are true, are printed once, and continue at a checkpoint."""

import argparse
import json
import math
import os
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import replace

import train_flow
import train_text_to_image
import train_unconditional
from diffusion_training.batches import Objective, Prepared
from diffusion_training.training.progress import NextStep
from diffusion_training.training.records import Records, measure_images
from diffusion_training.training.signs import NUMBERS, find_signs, read_metrics


@pytest.fixture
def run(tmp_path):
    """`run(resumed_at)` -> the Records of a run of 8 steps; its batches are in [-1, 1] already."""
    (tmp_path / "out").mkdir()
    argv = [
        f"--train_data_dir={tmp_path}",
        f"--output_dir={tmp_path}/out",
        "--max_train_steps=8",
        "--report_to=none",
    ]

    def run(global_step=0, *more, num_left_out=0):
        args = train_unconditional.parse_args(
            [*argv, "--lr_warmup_steps=0", "--max_grad_norm=1", *more]
        )
        accelerator = Accelerator(cpu=True)
        checkpoint = tmp_path / "out/checkpoint-3" if global_step else None
        settings = argparse.Namespace(**vars(args), tracker_id="of-the-run")
        records = Records(accelerator, global_step, num_left_out, checkpoint, settings)
        records.begin()
        return records

    return run


def prepare(batch):
    return Prepared(batch["pixel_values"], {}, {})


def batch_of(images, skipped=(), weight=None):
    images = torch.as_tensor(images, dtype=torch.float32)
    weight = torch.full((len(images),), 1 / len(images)) if weight is None else torch.tensor(weight)
    return {
        "pixel_values": images,
        "weight": weight,
        "skipped": list(skipped),
        "waited": (0.0, 0.25),
    }


NOISE = np.random.default_rng(0).uniform(-1, 1, (2, 3, 4, 4))


def step(records, number, batch=None, loss=0.5, norm=0.1, log=True, last=False, epoch=0):
    batch = batch_of(NOISE) if batch is None else batch
    for watched in records.watch([batch]):
        records.measure_inputs(prepare(watched), watched["weight"])
    weight = batch["weight"].sum()
    sums = {"loss": loss * weight, "weight": weight, "grad_norm": torch.tensor(norm)}
    records.add(sums, len(batch["weight"]), epoch, 1e-3)
    records.update(number, log, last)


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]


def test_a_record_is_the_mean_since_the_last(tmp_path, run):
    records = run()
    step(records, 1, loss=1.0, norm=0.5, log=False)
    step(records, 2, loss=2.0, norm=1.5)
    step(records, 3, loss=4.0, norm=2.0, epoch=1)
    one, other = metrics(tmp_path)
    names = "step epoch loss lr grad_norm clipped images_per_second data_wait skipped_images"
    assert list(one) == names.split()
    assert (one["step"], one["epoch"], one["loss"], one["lr"]) == (2, 0, 1.5, 1e-3)
    assert (one["grad_norm"], one["clipped"]) == (1.0, 0.5)
    assert (other["step"], other["epoch"], other["loss"], other["clipped"]) == (3, 1, 4.0, 1.0)
    assert one["images_per_second"] > 0 and one["data_wait"] * 4 / one[
        "images_per_second"
    ] == pytest.approx(0.5)


def test_a_step_without_any_image_has_no_loss_to_record(tmp_path, run):
    records = run()
    step(records, 1, batch_of(NOISE, [("a.png", "broken")], [0.0, 0.0]))
    step(records, 2, loss=3.0)
    (record,) = metrics(tmp_path)
    assert (record["step"], record["loss"], record["skipped_images"]) == (2, 3.0, 1)


def test_what_is_skipped_is_named_once_also_when_the_run_goes_on(tmp_path, run, capfd):
    records = run(num_left_out=2)
    step(records, 1, batch_of(NOISE, [("a.png", "broken"), ("b.png", "odd")]))
    step(records, 2, batch_of(NOISE, [("a.png", "broken")]))
    step(records, 3, batch_of(NOISE, [("c.png", "broken")]))
    said = capfd.readouterr().err
    assert [said.count(f"Skipped {name}.png (") for name in "abc"] == [1, 1, 1]
    assert [record["skipped_images"] for record in metrics(tmp_path)] == [4, 4, 5]
    told = [record.get("skipped") for record in metrics(tmp_path)]
    assert told == [{"a.png": "broken", "b.png": "odd"}, None, {"c.png": "broken"}]
    records = run(2)
    # steps after the checkpoint are recorded again
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2]
    step(records, 3, batch_of(NOISE, [("a.png", "broken"), ("c.png", "broken")]))
    said = capfd.readouterr().err
    assert "a.png" not in said and said.count("Skipped c.png") == 1
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2, 3]
    assert metrics(tmp_path)[2]["skipped_images"] == 3


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved(tmp_path, run):
    records = run()
    with pytest.raises(
        SystemExit, match=r"not finite at step 1 \(last checkpoint: none\); try a lower"
    ):
        step(records, 1, loss=math.nan, log=False)
    (tmp_path / "out/checkpoint-3").mkdir()
    (tmp_path / "out/checkpoint-3/trainer_state.json").touch()
    for wrong in ({"loss": math.inf}, {"norm": math.nan}):
        with pytest.raises(SystemExit, match="not finite at step 4 .*checkpoint-3"):
            step(run(3), 4, **wrong)
    assert metrics(tmp_path) == []


def test_when_nothing_decodes_the_run_ends(tmp_path, run):
    broken = batch_of(np.zeros((2, 3, 4, 4)), [("a.png", "broken")], [0.0, 0.0])
    with pytest.raises(SystemExit, match=r"none of the last 2 images .* a.png \(broken\)"):
        step(run(), 8, broken, last=True)
    many = batch_of(np.zeros((100, 3, 1, 1)), [], [0.0] * 100)
    with pytest.raises(SystemExit, match="none of the last 100 images could be used$"):
        step(run(), 1, many)
    records = run()
    step(records, 1)
    step(records, 8, broken, last=True)  # an epoch may end on a broken one


def test_what_a_power_cut_has_spoilt_is_left_out(tmp_path):
    whole = {"step": 1, **dict.fromkeys(NUMBERS, 0.5)}
    lines = [
        json.dumps(whole),
        '{"step": 2, "lo',
        "\0\0\0",
        "[]",
        "1",
        '{"loss": 1}',
        '{"step": 1, "loss": 0.5}',
    ]
    lines += [json.dumps(whole | wrong) for wrong in (
        {"loss": math.nan}, {"loss": "x"}, {"data_wait": None}, {"step": 1.5}, {"step": True},
        {"signs": []}, {"more": []},
    )]  # fmt: skip
    lines += ['{"step": 4, "held_out_loss": 0.25}', '{"step": 5, "held_out_loss": "x"}']
    lines += [
        json.dumps(whole | {"step": 6, "signs": {"lr": "why"}, "skipped": {"a.png": "broken"}})
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 4, 6]
    assert [record["step"] for record in read_metrics(tmp_path, 4)] == [1, 4]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_tracker_that_does_not_work_is_one_sentence(run, monkeypatch):
    def no_login(*args):
        raise ValueError("api_key not configured (no-tty)")

    monkeypatch.setattr(Accelerator, "init_trackers", no_login)
    with pytest.raises(
        SystemExit, match=r"wandb does not work: run `wandb login`, set .* \(api_key not configured"
    ):
        run(0, "--report_to=wandb")
    with pytest.raises(SystemExit, match=r"tensorboard does not work: pass --report_to none"):
        run(0, "--report_to=tensorboard")


def test_a_resumed_run_is_the_same_run_in_trackers(run, monkeypatch):
    """Records after the checkpoint are written again and replace the earlier ones."""
    given = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *args: given.append(args[-1]))
    run(0)
    run(3)
    assert [options["wandb"]["id"] for options in given] == ["of-the-run"] * 2
    assert {options["wandb"]["resume"] for options in given} == {"allow"}
    assert [options["tensorboard"]["purge_step"] for options in given] == [0, 4]


# ------------------------------------------------------------------- signs


def test_the_first_images_are_measured_and_a_sign_is_told_once(tmp_path, run, capfd):
    """Images from 0 to 1, and one black image in seven, also in a resumed run."""
    images = (NOISE + 1) / 2
    records = run()
    for number in range(1, 8):
        step(records, number, batch_of(images[:1] if number > 1 else np.zeros((1, 3, 4, 4))))
    signs = [record.get("signs", {}) for record in metrics(tmp_path)]
    assert signs[0].keys() == {"range", "colour"} and not any(signs[1:])
    assert signs[0]["range"].startswith("images have values from 0 to 0")
    assert signs[0]["colour"].startswith("100%")
    assert capfd.readouterr().err.count("Worth a look: ") == 2
    step(run(7), 8, batch_of(images), last=True)
    assert not any("signs" in record for record in metrics(tmp_path)[1:])
    assert "Worth a look" not in capfd.readouterr().err


@pytest.mark.parametrize("script", [train_unconditional, train_text_to_image, train_flow])
def test_only_the_first_hundred_images_are_looked_at_and_each_is_prepared_once(run, script):
    records, prepared, given = run(), [], []
    models = {"unet": torch.nn.Linear(1, 1)}

    def counting(batch):
        prepared.append(len(batch["weight"]))
        return prepare(batch)

    def loss(objective, models, prepared, weight):
        given.append(prepared)
        return (weight * models["unet"].weight).sum()

    batches = records.watch([batch_of(np.ones((30, 3, 1, 1)))] * 9)
    optimizer = torch.optim.SGD(models["unet"].parameters())
    measure = records.measure_inputs
    objective = Objective(counting, None, loss, None, None)
    step = NextStep(number=0, epoch=0, images=270, micro_batches=9)
    script.train_step(
        records.accelerator, objective, models, optimizer, batches, step, 0, 1.0, measure
    )
    assert prepared == [30] * 9 and records.num_measured == 120
    assert records.first_images.count.item() == pytest.approx(4)
    assert len(given) == 9 and all(
        images.shape == (30, 3, 1, 1) and (condition, more) == ({}, {})
        for images, condition, more in given
    )


def test_images_are_measured_by_their_weight():
    images = torch.tensor([[-1.0, 1.0], [0.5, 0.5], [9.0, -9.0]]).view(3, 1, 1, 2)
    weight = torch.tensor([0.5, 0.25, 0.0])
    sums = [-0.5 + 0.125, 0.5 + 0.125, 0.5 + 0.0625, 0.25, 0.5 * 2]
    for masks, masked in (({}, 0), ({"mask": torch.tensor([0.0, 0.1, 0.0])}, 0.5)):
        masks = {name: mask.view(3, 1, 1, 1) for name, mask in masks.items()}
        found = measure_images(Prepared(images, {}, masks), weight)
        assert torch.stack(found).tolist() == pytest.approx([*sums, masked, 0.75])


def test_roughness_is_1_of_noise_and_little_of_what_is_smooth():
    """For a wave of `cycles` in 32 pixels it is 1 - cos(2 pi cycles / 32) at any amplitude."""
    x, one = torch.arange(32) / 32, torch.ones(1)
    for cycles in (1, 4, 8):
        wave = (7 * torch.sin(2 * torch.pi * cycles * x)).expand(1, 3, 32, 32)
        assert measure_images(Prepared(wave, {}, {}), one).roughness == pytest.approx(
            1 - math.cos(2 * math.pi * cycles / 32), abs=0.04
        )
    noise = Prepared(torch.randn(1, 3, 64, 64), {}, {})
    assert measure_images(noise, one).roughness == pytest.approx(1, abs=0.05)


def test_samples_that_are_still_noise_late_in_a_run_are_told(tmp_path, run, capfd):
    """At half of the run, step 4 of 8, and at its end, and none twice."""
    smooth = torch.linspace(-1, 1, 16).expand(2, 3, 16, 16)
    for at, roughness, told in ((4, 0.9, 4), (3, 0.9, None), (8, 0.9, 8), (8, 0.1, None)):
        records = run()
        records.check_samples(roughness, 4)  # before there is a record
        for number in range(1, 9):
            step(records, number, batch_of(smooth), last=number == 8)
            if number == at:
                records.check_samples(None, number)  # as other processes do
                records.check_samples(roughness, number)
                records.check_samples(roughness, number)
        signs = {
            record["step"]: record["signs"]["noise"]
            for record in read_metrics(tmp_path / "out")
            if "noise" in record.get("signs", {})
        }
        assert list(signs) == ([told] if told else [])
        said = f"the samples of step {told} are nearly as rough as noise (0.90; the data 0."
        assert not told or (signs[told].startswith(said) and len(signs[told]) < 160)
        assert capfd.readouterr().err.count("as rough as noise") == bool(told)
        assert [record["step"] for record in metrics(tmp_path) if "loss" in record] == [
            *range(1, 9)
        ]


def test_the_record_after_an_epoch_has_the_mean_of_its_losses_resumed_or_not(tmp_path, run):
    told = [(1, 0, 1.0), (2, 0, 3.0), (3, 1, 9.0), (4, 1, 5.0), (5, 2, 4.0), (6, 2, 8.0)]

    def go_on(records, steps):
        for number, epoch, loss in steps:
            step(records, number, loss=loss, epoch=epoch, last=number == 6)

    go_on(run(), told)
    whole = [record.get("epoch_loss") for record in metrics(tmp_path)]
    assert (
        whole == [None, None, 2.0, None, 7.0, 6.0]
        and read_metrics(tmp_path / "out")[2]["epoch_loss"] == 2.0
    )
    (tmp_path / "out/checkpoint-3").mkdir()
    go_on(run(3), told[3:])  # resumed within an epoch
    assert [record.get("epoch_loss") for record in metrics(tmp_path)] == whole


def test_what_is_left_is_estimated_without_pauses(run, monkeypatch):
    records = run()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    now, bar = [0.0], records.bar
    bar._time = lambda: now[0]
    bar.start_t = bar.last_print_t = 0.0
    for number in range(1, 5):
        now[0] += 1
        step(records, number, log=False)
        with records.paused():
            now[0] += 100
    assert bar.format_dict["elapsed"] == pytest.approx(4) and bar.format_dict["rate"] in (
        None,
        pytest.approx(1),
    )


@pytest.mark.parametrize("argv, images, record, found", [
    ([], {}, {}, set()),
    (["--max_train_steps=200", "--lr_warmup_steps=0"], {}, {}, set()),
    # a common choice with averaged weights
    (["--lr_scheduler=constant"], {}, {}, set()),
    (["--no-use_ema"], {}, {"lr": 1e-6}, set()),
    (["--no-use_ema"], {}, {}, {"lr"}),
    ([], {"low": 0.0}, {}, {"range"}),
    ([], {"high": 255.0}, {}, {"range"}),
    ([], {"flat": 0.2}, {}, {"colour"}),
    ([], {"masked": 0.2}, {}, {"masks"}),
    ([], {}, {"clipped": 0.6}, {"clipped"}),
    # too few steps to judge
    (["--max_train_steps=20", "--lr_warmup_steps=0"], {},
     {"clipped": 0.6, "data_wait": 0.6}, set()),
    ([], {}, {"data_wait": 0.06}, {"waiting"}),
    (["--ema_power=1"], {}, {}, {"ema"}),
    (["--max_train_steps=2000", "--ema_max_decay=0.9999", "--ema_inv_gamma=0.01"], {}, {}, {"ema"}),
])  # fmt: skip
def test_signs_are_told_apart_and_a_sane_run_has_none(tmp_path, argv, images, record, found):
    args = train_unconditional.parse_args(
        [f"--train_data_dir={tmp_path}", "--max_train_steps=10000", *argv]
    )
    steps = np.linspace(0, args.max_train_steps, 11).astype(int)[1:]
    start = {"loss": 1, "lr": args.learning_rate, "data_wait": 0.01, "clipped": 0.1}
    start["grad_norm"] = 0.5
    # records of the warm-up are ignored
    records = [{"step": 1, **start, "clipped": 1, "data_wait": 1}]
    records += [{"step": int(step), **start, **record} for step in steps]
    images = {
        "low": -0.9,
        "high": 0.8,
        "square": 0.3,
        "flat": 0.01,
        "rough": 0.1,
        "masked": 0,
        **images,
    }
    signs = find_signs(records, list(images.values()), args)
    assert signs.keys() == found
    assert all("\n" not in text and len(text) < 160 for text in signs.values())


def test_of_latents_the_size_is_looked_at_and_no_range_or_colour(tmp_path):
    argv = [
        "--pretrained_model_name_or_path=x",
        f"--latents_dir={tmp_path}",
        "--max_train_steps=10",
    ]
    args = train_text_to_image.parse_args(argv)
    record = {"step": 1, "loss": 1, "lr": 1e-4, "data_wait": 0, "clipped": 0}
    for mean_square, wrong in ((0.18**2, "0.18"), (1.0, None), (5.5**2, "5.5")):
        signs = find_signs([record], [-9.0, 9.0, mean_square, 1.0, 0.5, 0.0], args)
        assert signs.keys() == ({"latents"} if wrong else set())
        assert (
            f"root mean square of {wrong}, not of about 1" in signs.get("latents", "") or not wrong
        )
    turn = find_signs([{**record, "step": 1000, "data_wait": 0.5}], None, args)["waiting"]
    assert "a faster disk, or more memory" in turn
    args = replace(args, latents_dir=[*args.latents_dir, "s3://bucket/latents"])
    turn = find_signs([{**record, "step": 1000, "data_wait": 0.5}], None, args)["waiting"]
    assert "try a larger --shards_size, so that more is fetched ahead" in turn


def test_what_waits_for_data_is_told_what_to_turn(tmp_path):
    record = {"step": 1000, "loss": 1, "lr": 1e-4, "data_wait": 0.5, "clipped": 0}
    for argv, words in (
        ([], "try --cache_images, or more"),
        (["--cache_images"], "a faster disk, or more memory"),
    ):
        argv = [f"--train_data_dir={tmp_path}", "--max_train_steps=2000", *argv]
        assert words in find_signs([record], None, train_unconditional.parse_args(argv))["waiting"]


def test_a_lora_that_has_learned_nothing_after_100_steps_is_told(tmp_path):
    argv = [
        f"--train_data_dir={tmp_path}",
        "--max_train_steps=2000",
        "--no-use_ema",
        "--lr_warmup_steps=0",
    ]
    record, args = (
        {"loss": 1, "lr": 1e-4, "data_wait": 0, "clipped": 0},
        train_unconditional.parse_args(argv),
    )
    for step, learned, told in [(99, 0.0, False), (100, 0.0, True), (2000, 1e-9, False)]:
        records = [{"step": 1, **record}, {"step": step, **record, "lr": 0}]
        assert ("lora" in find_signs(records, None, args, learned)) == told


@pytest.mark.parametrize("most, batch, total, kind, said", [
    (40.0, 16, 80.0, "idle", "at most 40 of 80 GB are in use: try --train_batch_size 32, or"),
    (75.0, 16, 80.0, "full", "up to 75 of 80 GB are in use: try a lower"),
    (60.0, 16, 80.0, None, None),
    (47.0, 1, 80.0, None, None),  # a second image would not fit
    (40.0, 16, None, None, None),  # a CPU
])  # fmt: skip
def test_a_gpu_that_lies_idle_or_is_nearly_full_is_told(tmp_path, most, batch, total, kind, said):
    argv = [f"--train_data_dir={tmp_path}", "--max_train_steps=2000", f"--train_batch_size={batch}"]
    args = train_unconditional.parse_args(argv)
    costs = argparse.Namespace(total_gb=total, held=8.0 if batch > 1 else 2.0)
    record = {"loss": 1, "lr": 1e-4, "data_wait": 0, "clipped": 0, "memory_gb": most}
    signs = find_signs([{"step": 1, **record}, {"step": 30, **record}], None, args, 1.0, costs)
    assert signs.keys() == ({kind} if kind else set()) and (not kind or said in signs[kind])
    assert all(len(text) < 160 for text in signs.values())
    # one record is too few to judge
    assert find_signs([{"step": 1, **record}], None, args, 1.0, costs) == {}


def test_nothing_is_told_by_other_processes(tmp_path, run):
    records = run()
    records.accelerator = argparse.Namespace(
        is_main_process=False, log=lambda *args, **options: None
    )
    records.write({"step": 1, "loss": 1.0})
    assert os.path.getsize(tmp_path / "out/metrics.jsonl") == 0


def test_a_pause_is_no_part_of_the_rate(tmp_path, run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    records = run()
    now[0] += 1
    with records.paused():
        now[0] += 100
    step(records, 1)
    assert metrics(tmp_path)[0]["images_per_second"] == pytest.approx(2)
