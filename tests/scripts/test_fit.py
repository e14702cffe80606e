"""--fit: the fastest plan within the memory of a GPU, with the bits of a run without it."""

import contextlib
import io
import json
import re
from argparse import Namespace

import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned
from fake_device import forked

from diffusion_training.training.step import fit
from diffusion_training.training.step.fit import Estimate, choose_plan, list_plans, read_plan
from diffusion_training.training.step.plans import MemoryPlan, Segment, StepMemory

pytestmark = pytest.mark.usefixtures("without_figures")
precompute, FLOW = Script("precompute_latents"), Script("train_flow")
FILE = "pytorch_lora_weights.safetensors"


def make_estimate(swappable=(), gradients=0):
    """Of four segments, whose attention is a third of their operations."""
    segments = [Segment(place, 0, 10, 0, 5, 100, 100, 120, 0, 30, 10) for place in range(4)]
    return Estimate(StepMemory(segments, 10, 0, gradients, 120), 1000, 0, 0, list(swappable), 0)


def test_the_fastest_plan_that_fits_is_chosen():
    estimate = make_estimate([50] * 4)
    held = 1000 + 200
    plans = list(list_plans(estimate))
    assert plans[0] == MemoryPlan() and plans[-1] == MemoryPlan(4, False, 4)
    shares = [estimate.step.share_repeated(plan) for plan in plans if not plan.swapped]
    assert shares == sorted(shares) and shares[-1] == 120 / 480
    assert [plan.swapped for plan in plans[-4:]] == [1, 2, 3, 4]
    for room, plan in {
        held + 420: MemoryPlan(),
        held + 419: MemoryPlan(1, True),
        held + 335: MemoryPlan(1, True),
        held + 334: MemoryPlan(1, False),
        held + 165: MemoryPlan(3, True),
        held + 150: MemoryPlan(3, False),
        held + 149: MemoryPlan(4, False, 3),  # two of the swapped ones are on the device
        held + 50: MemoryPlan(4, False, 4),
        held + 49: None,
    }.items():
        assert choose_plan(estimate, room) == plan, room - held
    assert choose_plan(make_estimate(), 1149) is None  # nothing can be swapped
    assert estimate.count_swapped(MemoryPlan(4, False, 3)) == (150, 150)


def test_a_plan_is_read_from_its_description():
    for plan in (MemoryPlan(), MemoryPlan(3), MemoryPlan(3, True)):
        assert read_plan(plan.describe()) == plan
    assert MemoryPlan(3, True, 2).describe() == "--blocks_to_swap 2 --keep_attention"
    assert read_plan(None) is None


def test_wrong_sizes_end_in_a_sentence():
    flags = FLOW.flags("none", "--pretrained_model_name_or_path=none", "--latents_dir=none")
    for bad in ("0", "-1", "most"):
        assert "argument --fit: " in FLOW.refused(*flags, f"--fit={bad}", status=2)
    auto = [*flags, "--fit=auto", "--train_batch_size=auto"]
    assert "--fit can't be combined with --train_batch_size auto" in FLOW.refused(*auto, status=2)
    shard = [*flags, "--fit=auto", "--shard"]
    assert "--fit can't be combined with --shard" in FLOW.refused(*shard, status=2)


def launch_of(**facts):
    gpu = Namespace(
        get_device_properties=lambda device: Namespace(total_memory=16e9),
        mem_get_info=lambda device: (9e9, 16e9), memory_reserved=lambda device: 1e9,
    )  # fmt: skip
    return Namespace(device=None, accelerator=Namespace(print=print), **facts), gpu


def test_the_smallest_device_decides(monkeypatch):
    launch, gpu = launch_of()
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    assert fit.measure_room(launch, "auto") == 0.9 * 10e9
    assert fit.measure_room(launch, 12.0) == 12e9
    monkeypatch.setattr(fit, "gather_object", lambda own: [*own, 8e9])
    assert fit.measure_room(launch, "auto") == 8e9
    with pytest.raises(SystemExit, match="^--fit 12: a GPU has only 8 GB: use --fit auto$"):
        fit.measure_room(launch, 12.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    make_captioned(folder / "images", 2, ["a digit zero", "one"])
    name = f"--pretrained_model_name_or_path={tiny_pipelines.MAKE['klein'](folder / 'base')}"
    data = [f"--train_data_dir={folder / 'images'}", "--resolution=64"]
    precompute(name, *data, f"--output_dir={folder / 'cache'}", "--dataloader_num_workers=0")
    return [name, f"--latents_dir={folder / 'cache'}"]


def list_flags(base, *more):
    flags = FLOW.flags("none", *base, "--rank=2", "--lora_layers=all", "--train_batch_size=2")
    flags += ["--learning_rate=0.01", "--max_train_steps=2", "--checkpointing_steps=1"]
    return [*flags, *more]


def test_on_a_cpu_it_does_nothing(tmp_path, capsys, base):
    FLOW(*list_flags(base, "--fit=auto"), f"--output_dir={tmp_path}")
    assert "Fit: --fit chooses for a GPU, and does nothing on a CPU" in capsys.readouterr().out
    assert "--fit=auto" in (tmp_path / "run.args").read_text()


@forked
def run_on_a_gpu(folder, base):
    """Train with several sizes of memory, as on a GPU of 16 GB."""
    said, files = {}, {}
    sizes = {"plain": [], "auto": ["--fit=auto"], "given": ["--fit=auto", "--checkpoint_blocks=1"]}
    sizes |= {size: [f"--fit={size}"] for size in ("0.1", "0.08", "0.01", "17")}
    choose = fit.choose_plan
    for name, flags in sizes.items():
        out = folder / name
        if name == "0.08":  # the host's memory takes so little of this model that 0.1 is the same
            fit.choose_plan = lambda estimate, room: MemoryPlan(4, False, 2)
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            with contextlib.suppress(SystemExit):
                FLOW(*list_flags(base, *flags), f"--output_dir={out}")
        fit.choose_plan = choose
        said[name] = text.getvalue()
        if (out / FILE).exists():
            files[name] = (out / FILE).read_bytes()
    equal = [name for name in files if files[name] == files["plain"]]
    (folder / "said.json").write_text(json.dumps([said, equal]))


@pytest.mark.long
def test_each_size_of_memory_has_its_plan_and_the_same_bits(tmp_path, base):
    run_on_a_gpu(tmp_path, base)
    said, equal = json.loads((tmp_path / "said.json").read_text())
    lines = {name: re.search("(?:Fit: |--fit).*", text) for name, text in said.items()}
    lines = {name: line and line[0] for name, line in lines.items()}
    assert equal == ["plain", "auto", "given", "0.1", "0.08"]
    assert lines["plain"] is None
    assert lines["given"] == "Fit: --checkpoint_blocks is given, so --fit chooses nothing"
    assert lines["17"] == "--fit 17: a GPU has only 16 GB: use --fit auto"
    chosen = [
        re.match(r"Fit: (.*): (\S+) GB in a step", lines[name]) for name in equal[1:2] + equal[3:]
    ]
    plans = [each[1] for each in chosen]
    assert plans[0] == "no gradient checkpointing"
    assert plans[1].startswith("--checkpoint_blocks ") and plans[2] == "--blocks_to_swap 2"
    needed = [float(each[2]) for each in chosen]
    assert needed[0] > 0.1 >= needed[1] > 0.05 and needed[2] > 0.05
    assert "0.01 GB may be used, but the run needs at least" in lines["0.01"]
    assert "GB with half the --resolution" in lines["0.01"]
    state = json.loads((tmp_path / "0.08/checkpoint-2/trainer_state.json").read_text())
    assert state["settings"]["fitted"] == plans[2] and state["settings"]["fit"] == 0.08
    assert plans[2] in (tmp_path / "0.08/report.html").read_text()
    assert "--fit=auto" in (tmp_path / "auto/run.args").read_text()
