"""Records and signs: they are true, are printed once, and continue at a checkpoint."""

import argparse
import json
import math
import os
import re
import time
import tracemalloc

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import train_flow
import train_text_to_image
import train_unconditional
from diffusion_training.batches import Objective, Prepared
from diffusion_training.training.progress import NextStep, Progress
from diffusion_training.training.records import Records, measure_images
from diffusion_training.training.run_folder import RunFolder
from diffusion_training.training.step.signs import NUMBERS, Inputs, find_signs, read_metrics


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
        costs = argparse.Namespace(describe=str, describe_attention=str, measure=lambda speed: {})
        state = {"global_step": global_step, "data_step": global_step, "images_seen": 0}
        reached = global_step if checkpoint else -1
        folder = RunFolder("train.py", None, checkpoint, {}, None, checkpoint_step=reached)
        progress = Progress(state, 100, 2, 1)
        records = Records(accelerator, folder, progress, {}, None, costs, num_left_out, settings)
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
    records.progress.global_step = records.progress.data_step = number
    if last:
        records.args.max_train_steps = number
    records.add(sums, NextStep(number, epoch, len(batch["weight"]), 1), 1e-3)
    records.update(log)


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]


def test_a_record_holds_means_since_the_last_record(tmp_path, run):
    records = run()
    step(records, 1, loss=1.0, norm=0.5, log=False)
    step(records, 2, loss=2.0, norm=1.5)
    step(records, 3, loss=4.0, norm=2.0, epoch=1)
    one, other = metrics(tmp_path)
    names = "step epoch loss lr grad_norm clipped images_per_second data_wait skipped_images"
    assert list(one) == names.split()
    assert (one["step"], one["epoch"], one["loss"], one["lr"]) == (2, 1, 1.5, 1e-3)
    assert (one["grad_norm"], one["clipped"]) == (1.0, 0.5)
    assert (other["step"], other["epoch"], other["loss"], other["clipped"]) == (3, 2, 4.0, 1.0)
    assert one["images_per_second"] > 0 and one["data_wait"] * 4 / one[
        "images_per_second"
    ] == pytest.approx(0.5)


def test_without_a_terminal_a_record_is_a_line_and_an_epoch_has_its_mean(run, capsys):
    records = run()
    for number in (1, 2, 3):
        step(records, number, loss=float(number), epoch=int(number == 3))
    said = capsys.readouterr()
    assert "\r" not in said.out + said.err
    lines = [line for line in said.out.splitlines() if line.startswith(("Step", "Epoch"))]
    assert lines[0].startswith("Step 1 of 8: epoch 1 of 1, loss 1, waiting ")
    assert re.search(r" img/s, lr 1\.0e-03, \d+ s left$", lines[0])
    assert len(lines) == 4 and lines[2] == "Epoch 1 of 1: mean loss 1.5"


def test_a_step_without_usable_images_writes_no_record(tmp_path, run):
    records = run()
    step(records, 1, batch_of(NOISE, [("a.png", "broken")], [0.0, 0.0]))
    step(records, 2, loss=3.0)
    (record,) = metrics(tmp_path)
    assert (record["step"], record["loss"], record["skipped_images"]) == (2, 3.0, 1)


def test_a_skipped_image_is_named_once_also_after_a_resume(tmp_path, run, capfd):
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


def test_a_loss_that_is_not_finite_ends_the_run_before_saving(tmp_path, run):
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


def test_the_run_ends_if_no_image_can_be_decoded(tmp_path, run):
    broken = batch_of(np.zeros((2, 3, 4, 4)), [("a.png", "broken")], [0.0, 0.0])
    with pytest.raises(SystemExit, match=r"none of the last 2 images .* a.png \(broken\)"):
        step(run(), 8, broken, last=True)
    records = run()
    step(records, 1, broken)
    with pytest.raises(SystemExit, match="none of the last 4 images"):  # the first epoch has ended
        step(records, 2, broken, epoch=1)
    many = batch_of(np.zeros((100, 3, 1, 1)), [], [0.0] * 100)
    with pytest.raises(SystemExit, match="none of the last 100 images could be used$"):
        step(run(), 1, many)
    records = run()
    step(records, 1)
    step(records, 8, broken, last=True)  # an epoch may end on a broken one


def test_read_metrics_skips_damaged_lines(tmp_path):
    whole = {"step": 1, **dict.fromkeys(NUMBERS, 0.5)}
    lines = [
        json.dumps(whole),
        '{"step": 2, "lo',
        "\0\0\0",
        "[]",
        "1",
        '{"loss": 1}',
        '{"step": 1, "loss": 0.5}',
        '{"step": 1, "loss": 0.5, "held_out_loss": 0.5}',
        "[" * 10**5,
    ]
    lines += [json.dumps(whole | wrong) for wrong in (
        {"loss": math.nan}, {"loss": "x"}, {"data_wait": None}, {"step": 1.5}, {"step": True},
        {"lr": 10**400},
    )]  # fmt: skip
    lines += ['{"step": 4, "held_out_loss": 0.25}', '{"step": 5, "held_out_loss": "x"}']
    lines += [
        json.dumps(whole | {"step": 6, "signs": {"lr": "why"}, "skipped": {"a.png": "broken"}})
    ]
    # of a record with odd fields, the others are read
    odd = {"signs": [], "note": "x", "more": math.inf, "huge": 10**400}
    lines += [json.dumps(whole | {"step": 7} | odd)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 4, 6, 7]
    assert read_metrics(tmp_path)[-1] == whole | {"step": 7}
    assert [record["step"] for record in read_metrics(tmp_path, 4)] == [1, 4]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_tracker_that_fails_to_start_ends_in_a_sentence(run, monkeypatch):
    def no_login(*args):
        raise ValueError("api_key not configured (no-tty)")

    monkeypatch.setattr(Accelerator, "init_trackers", no_login)
    with pytest.raises(
        SystemExit, match=r"wandb does not work: run `wandb login`, set .* \(api_key not configured"
    ):
        run(0, "--report_to=wandb")
    with pytest.raises(SystemExit, match=r"tensorboard does not work: pass --report_to none"):
        run(0, "--report_to=tensorboard")


def test_trackers_continue_the_same_run_after_a_resume(run, monkeypatch):
    """Records after the checkpoint are written again and replace the earlier ones."""
    given = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *args: given.append(args[-1]))
    run(0)
    run(3)
    assert [options["wandb"]["id"] for options in given] == ["of-the-run"] * 2
    assert {options["wandb"]["resume"] for options in given} == {"allow"}
    assert [options["tensorboard"]["purge_step"] for options in given] == [0, 4]


def write_metrics(folder, count):
    """Records of `count` epochs, the last two of which have two each; one skipped image each."""
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(count):
            record = {"step": i + 1, **dict.fromkeys(NUMBERS, 0.5), "epoch": min(i, count - 2)}
            record |= {"skipped": {f"photo-{i}.png": "broken"}, "skipped_images": i + 1}
            record |= {"signs": {"range": "why"}} if i == 7 else {}
            file.write(json.dumps(record) + "\n")
            if i % 1000 == 9:
                file.write(json.dumps({"step": i + 1, "held_out_loss": float(i)}) + "\n")


def test_read_metrics_keeps_a_part_of_the_records_of_a_long_run(tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion_training.training.step.signs.MOST_RECORDS", 100)
    write_metrics(tmp_path, 3001)
    records = read_metrics(tmp_path)
    trained = [record["step"] for record in records if "loss" in record]
    assert 50 < len(trained) < 104 and trained[0] == 1 and trained[-1] == 3001
    assert {*np.diff(trained[2:-1]).tolist()} <= {31, 32}  # evenly; held-out losses count too
    assert [r["held_out_loss"] for r in records if "held_out_loss" in r] == [9, 1009, 2009]
    assert [record["step"] for record in records if "signs" in record] == [8]
    assert sum(len(record.get("skipped", ())) for record in records) <= 100
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_memory_of_a_resumed_run_does_not_grow_with_its_records(tmp_path, run, count):
    """Less than 150 bytes for each skipped image, and nothing for a record."""
    records = run()
    write_metrics(tmp_path / "out", count)
    tracemalloc.start()
    records = run(count)
    step(records, count + 1)
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12e6 + 150 * count
    record = metrics(tmp_path)[-1]
    assert (record["step"], record["skipped_images"], record["epoch_loss"]) == (
        count + 1,
        count,
        0.5,
    )


# ------------------------------------------------------------------- signs


def test_the_first_images_are_measured_and_a_sign_is_printed_once(tmp_path, run, capfd):
    """Images from 0 to 1, and one black image in seven, also in a resumed run."""
    images = (NOISE + 1) / 2
    records = run()
    for number in range(1, 8):
        step(records, number, batch_of(images[:1] if number > 1 else np.zeros((1, 3, 4, 4))))
    signs = [record.get("signs", {}) for record in metrics(tmp_path)]
    assert signs[0].keys() == {"range"} and not any(signs[1:])
    assert signs[0]["range"].startswith("images have values from 0 to 0")
    assert capfd.readouterr().err.count("Worth a look: ") == 1
    step(run(7), 8, batch_of(images), last=True)
    assert not any("signs" in record for record in metrics(tmp_path)[1:])
    assert "Worth a look" not in capfd.readouterr().err


@pytest.mark.parametrize("script", [train_unconditional, train_text_to_image, train_flow])
def test_only_the_first_100_images_are_measured(run, script):
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
    assert records.first_images[-1].item() == pytest.approx(4)
    assert len(given) == 9 and all(
        images.shape == (30, 3, 1, 1) and (condition, more) == ({}, {})
        for images, condition, more in given
    )


def test_images_are_measured_by_their_weight():
    images = torch.tensor([[-1.0, 1.0], [0.5, 0.5], [9.0, -9.0]]).view(3, 1, 1, 2)
    weight = torch.tensor([0.5, 0.25, 0.0])
    sums = [-0.5 + 0.125, 0.5 + 0.125, 0.5 + 0.0625, 0.75]
    found = measure_images(Prepared(images, {}, {}), weight)
    assert found.tolist() == pytest.approx(sums)


def test_epoch_loss_is_the_mean_of_the_epoch_also_after_a_resume(tmp_path, run):
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


def test_the_progress_bar_leaves_pauses_out_of_its_estimate(run, monkeypatch):
    records = run()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    now, bar = [0.0], records.bar
    bar._time = lambda: now[0]
    bar.start_t = bar.last_print_t = 0.0
    for number in range(1, 5):
        now[0] += 1
        step(records, number, log=False)
        with records.timed("checkpoint_seconds"):
            now[0] += 100
    assert bar.format_dict["elapsed"] == pytest.approx(4) and bar.format_dict["rate"] in (
        None,
        pytest.approx(1),
    )


NO_WARMUP = "--lr_warmup_steps=0"
BRIGHT = Inputs(lowest=0.0)
SMALL = Inputs(mean_square=0.18**2)


@pytest.mark.parametrize("script, inputs, sentence", [
    (train_unconditional, Inputs(-0.9, 0.8, 0.3), None),
    (train_unconditional, BRIGHT, "images have values from 0 to 1, but black is -1 and white 1"),
    (train_unconditional, Inputs(highest=255.0), "images have values from -1 to 2.6e+02, but"),
    (train_unconditional, SMALL, None),
    (train_text_to_image, Inputs(-9.0, 9.0, 1.0), None),
    (train_text_to_image, SMALL, "the latents have a root mean square of 0.18, not of about 1"),
    (train_flow, Inputs(mean_square=5.5**2), "the latents have a root mean square of 5.5, not"),
])  # fmt: skip
def test_sign_range_is_found_in_images_and_in_latents(tmp_path, script, inputs, sentence):
    argv = [f"--train_data_dir={tmp_path}"]
    if script != train_unconditional:
        argv = ["--pretrained_model_name_or_path=x", "--latents_dir=y"]
    argv += ["--max_train_steps=10", NO_WARMUP]
    signs = find_signs([RECORD], inputs, script.parse_args(argv))
    assert [*signs] == (["range"] if sentence else [])
    assert not sentence or (signs["range"].startswith(sentence) and len(signs["range"]) < 160)


RECORD = {"step": 1, "loss": 1, "lr": 1e-4, "data_wait": 0.0}


def find(tmp_path, records, *argv, learned=1.0, constant=math.nan, script=train_unconditional):
    """The signs in records that follow a first one. records: changes of RECORD."""
    argv = [f"--train_data_dir={tmp_path}", "--max_train_steps=2000", *argv]
    records = [RECORD, *({**RECORD, **record} for record in records)]
    return find_signs(records, Inputs(), script.parse_args(argv), learned, lambda: constant)


@pytest.mark.parametrize("step, waiting, argv, found", [
    (29, 0.9, [NO_WARMUP], False),
    (30, 0.24, [NO_WARMUP], False),
    (30, 0.26, [NO_WARMUP], True),
    (100, 0.04, [NO_WARMUP], False),
    (100, 0.06, [NO_WARMUP], True),
    (599, 0.06, ["--lr_warmup_steps=500"], False),
    (600, 0.06, ["--lr_warmup_steps=500"], True),
])  # fmt: skip
def test_sign_waiting_is_found_above_5_percent_or_early_25_percent(
    tmp_path, step, waiting, argv, found
):
    signs = find(tmp_path, [{"step": step, "data_wait": waiting}], *argv)
    assert [*signs] == ["waiting"] * found


def test_sign_waiting_names_what_makes_reading_faster(tmp_path):
    records = [{"step": 1000, "data_wait": 0.5}]
    for argv, words in (
        ([], "50% of the time: try --cache_images, or more --dataloader_num_workers than "),
        (["--cache_images"], "a faster disk, or more memory"),
    ):
        assert words in find(tmp_path, records, NO_WARMUP, *argv)["waiting"]
    for argv, words in (
        (
            [f"--train_data_dir={tmp_path}"],
            "try precompute_latents.py, or more --dataloader_num_workers",
        ),
        (["--latents_dir=x"], "a faster disk, or more memory"),
        (
            ["--latents_dir", "x", "s3://y/z", "--shards_dir=d"],
            "try a larger --shards_size, so that",
        ),
    ):
        argv += ["--pretrained_model_name_or_path=x", "--max_train_steps=2000", NO_WARMUP]
        args = train_text_to_image.parse_args(argv)
        assert words in find_signs([RECORD | records[0]] * 2, Inputs(), args)["waiting"]


def test_sign_lora_is_found_after_100_steps_in_which_nothing_was_learned(tmp_path):
    for step, learned, found in [(99, 0.0, False), (100, 0.0, True), (2000, 1e-9, False)]:
        signs = find(tmp_path, [{"step": step}], NO_WARMUP, learned=learned)
        assert [*signs] == ["lora"] * found


def test_sign_zero_is_found_if_the_learning_rate_was_always_0(tmp_path):
    """A LoRA then learns nothing either, which is not a second sign."""
    for step, rate, found in [
        (29, 0.0, False),
        (30, 0.0, True),
        (200, 0.0, True),
        (200, 1e-9, False),
    ]:
        argv = [f"--train_data_dir={tmp_path}", "--max_train_steps=2000", NO_WARMUP]
        records = [RECORD | {"lr": rate}, RECORD | {"step": step, "lr": 0.0}]
        args = train_unconditional.parse_args(argv)
        assert [*find_signs(records, Inputs(), args, 0.0 if not rate else 1.0)] == ["zero"] * found


def make_losses(*means, noise=0.05):
    """Eight records around each mean, as changes of RECORD; the last is of step 2000."""
    noises = np.random.default_rng(0).normal(1, noise, 8 * len(means))
    losses = np.repeat(means, 8) * noises
    steps = np.linspace(50, 2000, len(losses)).astype(int).tolist()
    return [{"step": step, "loss": loss} for step, loss in zip(steps, losses.tolist(), strict=True)]


@pytest.mark.parametrize("means, constant, kind, said", [
    ((0.9, 0.5, 0.3, 0.2), 1.0, None, ""),
    ((0.9, 0.5, 0.6, 0.5), 1.0, None, ""),  # it rises by less than half
    ((0.9, 0.2, 0.6, 0.5), 1.0, "high", r"the loss rose from 0.1[89]\d* to 0.[56]\d*: try a lower"),
    ((0.9, 0.2, 0.6, 0.9), 1.0, "high", r"the loss rose from 0.1[89]\d* to 0.[89]\d*: try a lower"),
    ((1.3, 1.0, 0.9, 0.9), 1.0, "nothing", r"the loss is still 0.[89]\d*, .* 1: try --find_lr"),
    ((1.0, 1.0, 1.0, 1.0), 1.0, "nothing", r"the loss is still (0.9\d*|1.0\d*), and a constant"),
    ((1.0, 1.0, 1.0, 1.0), math.nan, None, ""),  # a loss that a constant can't be tried with
    ((1.0, 1.0, 0.9, 0.72), 1.0, None, ""),  # not above 70 % by more than the noise
    ((0.9, 0.0, 0.6, 0.9), 1.0, None, ""),  # a loss of 0 has no logarithm
])  # fmt: skip
def test_signs_high_and_nothing_are_told_apart_by_the_course_of_the_loss(
    tmp_path, means, constant, kind, said
):
    signs = find(tmp_path, make_losses(*means), NO_WARMUP, constant=constant)
    assert [*signs] == ([kind] if kind else [])
    assert not kind or re.match(said, signs[kind])


def test_sign_high_needs_a_rise_above_the_noise(tmp_path):
    losses = make_losses(0.5, 0.3, 0.5, 0.5, noise=0.01)
    assert [*find(tmp_path, losses, NO_WARMUP)] == ["high"]
    assert find(tmp_path, make_losses(0.5, 0.3, 0.5, 0.5, noise=0.5), NO_WARMUP) == {}


def test_signs_of_the_loss_wait_until_the_model_had_time_to_learn(tmp_path):
    """1,000 steps after the warm-up, or the end of the run. Too few records have no sign."""
    losses = make_losses(1.0, 1.0, 1.0, 1.0)
    assert [*find(tmp_path, losses, NO_WARMUP, constant=1.0)] == ["nothing"]
    assert find(tmp_path, losses[:30], NO_WARMUP, constant=1.0) == {}
    early = [record | {"step": 900 + i} for i, record in enumerate(losses)]
    assert find(tmp_path, early, NO_WARMUP, constant=1.0) == {}
    assert [*find(tmp_path, early, NO_WARMUP, "--max_train_steps=931", constant=1.0)] == ["nothing"]
    assert find(tmp_path, losses, "--lr_warmup_steps=1990", constant=1.0) == {}


def test_only_the_first_process_writes_records(tmp_path, run):
    records = run()
    records.accelerator = argparse.Namespace(
        is_main_process=False, log=lambda *args, **options: None
    )
    records.write({"step": 1, "loss": 1.0})
    assert os.path.getsize(tmp_path / "out/metrics.jsonl") == 0


def test_images_per_second_counts_pauses_and_a_record_has_their_seconds(tmp_path, run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    records = run()
    for number, pauses in enumerate([(), (7, 3), ()], 1):
        for pause in pauses:
            with records.timed("checkpoint_seconds"):
                now[0] += pause
        now[0] += 1
        step(records, number)
    one, two, three = metrics(tmp_path)
    assert one["images_per_second"] == pytest.approx(2) == three["images_per_second"]
    assert two["images_per_second"] == pytest.approx(2 / 11) and two["checkpoint_seconds"] == 3
    assert "checkpoint_seconds" not in one | three
