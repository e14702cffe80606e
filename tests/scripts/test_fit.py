"""--fit: the fastest plan within the memory of a GPU, with the bits of a run without it."""

import contextlib
import gc
import io
import json
import os
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pipelines
import torch
from conftest import ROOT, Script, finish, make_captioned, start
from diffusers import AutoencoderKLFlux2
from fake_device import forked
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from diffusion_training import blocks
from diffusion_training.blocks import describe_memory_plan
from diffusion_training.training.step import fit
from diffusion_training.training.step.fit import Estimate, choose_plan, list_plans, read_plan
from diffusion_training.training.step.plans import ALL, MemoryPlan, Segment, StepMemory

pytestmark = pytest.mark.usefixtures("without_figures")
precompute, FLOW = Script("precompute_latents"), Script("train_flow")
FILE = "pytorch_lora_weights.safetensors"


def make_estimate(swappable=(), gradients=0):
    """Of four segments, whose attention is a third of their operations."""
    segments = [Segment(place, 0, 10, 0, 5, 100, 100, 120, 0, 30, 10) for place in range(4)]
    return Estimate(StepMemory(segments, 10, 0, gradients, 360), 1000, 0, 0, list(swappable), 0)


def test_the_fastest_plan_that_fits_is_chosen():
    estimate = make_estimate([50] * 4)
    held = 1000 + 200
    plans = list(list_plans(estimate))
    assert plans[0] == MemoryPlan() and plans[-1] == replace(ALL, swapped=4)
    shares = [estimate.step.share_repeated(plan) for plan in plans if not plan.swapped]
    assert shares == sorted(shares) and shares[-1] == 120 / 480
    assert [plan.swapped for plan in plans[-4:]] == [1, 2, 3, 4]
    for room, plan in {
        held + 420: MemoryPlan(),
        held + 419: MemoryPlan(1, True),
        held + 335: MemoryPlan(1, True),
        held + 334: MemoryPlan(1, False),
        held + 165: MemoryPlan(3, True),
        held + 150: MemoryPlan(3),
        held + 149: replace(ALL, swapped=3),  # two of the swapped ones are on the device
        held + 50: replace(ALL, swapped=4),
        held + 49: None,
    }.items():
        assert choose_plan(estimate, room) == plan, room - held
    assert choose_plan(make_estimate(), 1149) is None  # nothing can be swapped
    assert estimate.count_swapped(replace(ALL, swapped=3)) == (150, 150)


def test_a_plan_is_read_from_its_description():
    for plan in (MemoryPlan(), MemoryPlan(3), MemoryPlan(3, True), ALL):
        assert read_plan(plan.describe()) == plan
    assert ALL.describe() == "--gradient_checkpointing"
    swapped = replace(ALL, keeps_attention=True, swapped=2)
    assert swapped.describe() == "--blocks_to_swap 2 --keep_attention"
    assert read_plan(swapped.describe()) == replace(swapped, swapped=0)
    for flags, described in {
        (("gradient_checkpointing", True), ("keep_attention", False)): "--gradient_checkpointing",
        (
            ("checkpoint_blocks", 2),
            ("keep_attention", True),
        ): "--checkpoint_blocks 2 --keep_attention",
        (("checkpoint_blocks", 2), ("fitted", "--checkpoint_blocks 3")): "--checkpoint_blocks 3",
        (): "no gradient checkpointing",
    }.items():
        assert describe_memory_plan(dict(flags)) == described


def test_wrong_sizes_end_in_a_sentence():
    flags = FLOW.flags("none", "--pretrained_model_name_or_path=none", "--latents_dir=none")
    for bad in ("0", "-1", "nan", "most"):
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


def test_each_reason_to_choose_nothing_or_to_stop_has_a_sentence(monkeypatch, capsys):
    launch, gpu = launch_of(compile=None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    for module in (fit, blocks):
        monkeypatch.setattr(module, "is_gpu", lambda device: device is None)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    flags = {"fit": 1.0, "rank": None, "base_precision": None, "optimizer": "adamw"}
    flags |= {"use_ema": False, "latents_dir": None, "cache_latents": None}
    flags |= {"validation_prompts": None, "num_validation_images": 0} | dict.fromkeys(blocks.PLANS)

    def choose(model, launch=launch, accumulation_steps=1, **more):
        args = Namespace(**flags | more)
        given = {"unet": model}, None, {}, accumulation_steps, {}, args
        assert fit.fit_models(launch, *given) is None
        return capsys.readouterr().out

    for name in blocks.PLANS:
        said = choose(model, **{name: 2})
        assert said == f"Fit: --{name} is given, so --fit chooses nothing\n"
    said = "Fit: Linear has no repeated blocks, so there is nothing to choose\n"
    assert choose(torch.nn.Linear(2, 2)) == said
    cpu = Namespace(**vars(launch) | {"device": torch.device("cpu")})
    assert choose(model, cpu) == "Fit: --fit chooses for a GPU, and does nothing on a CPU\n"
    with pytest.raises(SystemExit, match="^--fit 17: a GPU has only 16 GB: use --fit auto$"):
        choose(model, fit=17.0)
    estimate = make_estimate()
    monkeypatch.setattr(fit, "estimate_run", lambda *given: estimate)
    with pytest.raises(SystemExit) as stopped:
        choose(model, fit=1e-6)
    assert str(stopped.value) == (
        "--fit 1e-06: 1e-06 GB may be used, but the run needs at least 1.15e-06 GB in a step, "
        "0 GB of the host's memory. It would need 1.11e-06 GB with --optimizer adamw8bit, "
        "1.04e-06 GB with half the --resolution"
    )
    estimate = make_estimate(gradients=100)  # which later micro-batches find
    for steps, least in {1: 1.15, 2: 1.25}.items():
        with pytest.raises(SystemExit, match=f"at least {least}e-06 GB in a step"):
            choose(model, accumulation_steps=steps, fit=1e-6)

    def fail(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fit, "estimate_run", fail)
    for rank, advice in {None: "--full_bf16", 4: "--base_precision int8"}.items():
        with pytest.raises(SystemExit, match=f"even if one block computes .*: try {advice}"):
            choose(model, rank=rank)


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
            fit.choose_plan = lambda estimate, room: replace(ALL, swapped=2)
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


@pytest.mark.ci
def test_no_encoder_waits_on_the_device_while_steps_run_from_a_cache(
    tmp_path, monkeypatch, capsys, base
):
    """From images they compute in each step, and are counted."""
    sample = ["--validation_prompts", "a digit", "--num_inference_steps=1"]
    sample += ["--num_validation_images=1"]
    kinds = (AutoencoderKLFlux2, Qwen3ForCausalLM)
    take, counts, estimates = FLOW.module.train_step, [], []

    def note(*given):
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, kinds)]
        alive = [each for each in alive if not next(each.parameters()).is_meta]
        counts.append(len(alive))
        return take(*given)

    monkeypatch.setattr(FLOW.module, "train_step", note)
    FLOW(*list_flags(base, *sample), f"--output_dir={tmp_path / 'cached'}")
    assert counts == [0, 0]
    assert (tmp_path / "cached/samples/step-0000000.png").exists()  # the VAE was there for it

    def choose(estimate, room):
        estimates.append(estimate)
        return choose_plan(estimate, room)

    monkeypatch.setattr(fit, "choose_plan", choose)
    take_for_a_gpu(monkeypatch, 1e9)
    two = ["--train_batch_size=1", "--gradient_accumulation_steps=2"]
    FLOW(*list_flags(base, "--fit=auto", *two), f"--output_dir={tmp_path / 'fitted'}")
    (cached,) = estimates
    assert cached.encoders == 0 and cached.step.adds_up
    images = [base[0], f"--train_data_dir={base[1].split('=')[1]}/../images", "--resolution=64"]
    counts.clear()
    FLOW(*list_flags(images, "--fit=auto"), f"--output_dir={tmp_path / 'images'}")
    assert counts == [2, 2]
    alone, without = estimates[1:3]
    assert not alone.step.adds_up
    folder = Path(base[0].split("=")[1])
    files = [*folder.glob("vae/*.safetensors"), *folder.glob("text_encoder/*.safetensors")]
    assert alone.encoders == pytest.approx(sum(file.stat().st_size for file in files), rel=0.05)
    assert without.encoders == 0 and without.held == alone.held - alone.encoders
    assert 0 < without.held - cached.held < alone.encoders / 2  # what is left is the batch
    assert "--cache_latents" not in capsys.readouterr().out  # the same plan fits in 1 GB
    room = alone.count(MemoryPlan()) - alone.encoders / 2
    take_for_a_gpu(monkeypatch, room)
    FLOW(*list_flags(images, "--fit=auto"), f"--output_dir={tmp_path / 'small'}")
    said = "GB of VAE and text encoders: then no gradient checkpointing fits"
    assert said in capsys.readouterr().out


@forked
def run_a_recipe_on_a_gpu(folder, base):
    text = io.StringIO()
    flags = [f"@{ROOT / 'recipes/klein_4b_lora.args'}", base, "--train_data_dir=images"]
    flags += ["--resolution=64", "--rank=2", "--max_train_steps=1", "--dataloader_num_workers=0"]
    flags += ["--validation_prompts", "a digit", "--num_inference_steps=1", "--report_to=none"]
    with contextlib.redirect_stdout(text):
        FLOW(*flags, "--num_validation_images=1", f"--cache_dir={folder / 'caches'}")
    (folder / "said").write_text(text.getvalue())


@pytest.mark.ci
def test_a_recipe_prints_its_plan_with_the_three_estimates(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    make_captioned(tmp_path / "images", 2, ["a digit zero", "one"])
    run_a_recipe_on_a_gpu(tmp_path, base[0])
    (line,) = re.findall("^Fit: .*", (tmp_path / "said").read_text(), flags=re.M)
    pattern = (
        r"Fit: no gradient checkpointing: (\S+) GB in a step, (\S+) GB and the VAE while samples "
        r"are drawn, 0 GB of the host's memory, of (\S+) GB that may be used \(estimated\)"
    )
    step, drawing, room = map(float, re.fullmatch(pattern, line).groups())
    assert 0 < drawing < step < room and 13 < room < 14.4  # nine tenths of what is free of 16 GB


def take_for_a_gpu(monkeypatch, room):
    """Let --fit take the CPU for a GPU with so many bytes: compiled code needs a real device."""
    for module in (fit, blocks):
        monkeypatch.setattr(module, "is_gpu", lambda device: True)
    gpu, module = launch_of()[1], torch.cpu
    gpu.get_device_properties = lambda device: Namespace(total_memory=room)
    gpu.mem_get_info, gpu.memory_reserved = lambda device: (room / 0.9, room), lambda device: 0
    for name, value in vars(gpu).items():
        monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.parametrize(
    "compiles",
    [pytest.param(False, marks=pytest.mark.ci), pytest.param(True, marks=pytest.mark.long)],
)
def test_a_compiled_run_keeps_the_plan_of_its_checkpoint(
    tmp_path, monkeypatch, capsys, base, compiles
):
    """Without `compiles`, all but the compiler runs."""
    estimates = []

    def choose(estimate, room):
        estimates.append(estimate)
        return choose_plan(estimate, room)

    monkeypatch.setattr(fit, "choose_plan", choose)
    if not compiles:
        monkeypatch.setattr(FLOW.module, "compile_model", lambda *given: None)

    def run(name, room, *more):
        with monkeypatch.context() as patched:
            take_for_a_gpu(patched, room)
            FLOW(*list_flags(base, "--compile=aot_eager", *more), f"--output_dir={tmp_path / name}")
        torch._dynamo.reset()
        lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("Fit", "With"))]
        return lines, (tmp_path / name / FILE).read_bytes()

    stop, resume = "--max_train_steps=1", "--resume_from_checkpoint=latest"
    run("first", 1e9, "--fit=auto", stop)
    room, less = (estimates[0].count(plan) + 1000 for plan in (MemoryPlan(1, True), ALL))
    _, expected = run("whole", room, "--fit=auto")
    (line,), _ = run("stopped", room, "--fit=auto", stop)
    assert line.startswith("Fit: --checkpoint_blocks 1")
    plan = line.split(": ")[1]
    for name in ("larger", "smaller", "none"):
        shutil.copytree(tmp_path / "stopped", tmp_path / name)
    lines, found = run("larger", 1e9, "--fit=auto", resume)
    assert len(lines) == 1 and lines[0].startswith(f"Fit: {plan}: ") and found == expected
    said = f"With --compile the last bits change: the checkpoint has {plan}, this run has "
    lines, _ = run("smaller", less, "--fit=auto", resume)
    assert lines[1].startswith(said) and lines[1].removeprefix(said) == lines[0].split(": ")[1]
    lines, _ = run("none", less, resume)
    assert lines == [f"{said}no gradient checkpointing"]


@pytest.mark.long
def test_plans_have_the_same_bits_in_runs_compiled_with_aot_eager(tmp_path, base):
    """As docs/memory.md has it."""
    plans = ("", "--checkpoint_blocks=1", "--gradient_checkpointing")
    plans += ("--gradient_checkpointing --keep_attention",)
    found = []
    for number, plan in enumerate(plans):
        out = tmp_path / str(number)
        FLOW(*list_flags(base, "--compile=aot_eager", *plan.split()), f"--output_dir={out}")
        torch._dynamo.reset()
        files = sorted((out / "checkpoint-2").rglob("*.safetensors"))
        found.append({str(file.relative_to(out)): load_file(file) for file in files})
    first, *others = found
    differences = [
        (weight - other[file][name]).abs().max().item()
        for other in others
        for file, weights in first.items()
        for name, weight in weights.items()
    ]
    assert len(differences) > 100 and max(differences) == 0


def run_on_two(folder, base):
    """Train on two processes, as on GPUs of 1 GB and of the size that `folder` / "room" has."""
    patch = pytest.MonkeyPatch()
    rank, change = int(os.environ["RANK"]), fit.checkpoint_gradients
    take_for_a_gpu(patch, [1e9, float((folder / "room").read_text())][rank])

    def note(models, plan):
        change(models, plan)
        counts = [len(blocks.list_checkpointed(model)) for model in models.values()]
        (folder / f"{rank}.json").write_text(json.dumps(counts))

    patch.setattr(fit, "checkpoint_gradients", note)
    FLOW(*list_flags(base, "--fit=auto"), f"--output_dir={folder / 'out'}")


@pytest.mark.long
def test_the_smaller_of_two_gpus_decides(tmp_path, monkeypatch, base):
    estimates = []
    monkeypatch.setattr(fit, "choose_plan", lambda estimate, room: estimates.append(estimate))
    with monkeypatch.context() as patched:
        take_for_a_gpu(patched, 1e9)
        with contextlib.suppress(SystemExit):  # there is no plan
            FLOW(*list_flags(base, "--fit=auto"), f"--output_dir={tmp_path / 'one'}")
    monkeypatch.undo()
    exchanged = 2 * estimates[0].step.gradients  # DDP's buckets
    (tmp_path / "room").write_text(str(estimates[0].count(MemoryPlan(1)) + exchanged))
    codes = finish(start(lambda: run_on_two(tmp_path, base), 2, tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert codes == [0, 0], said
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert counts[0] == counts[1] != [0]
    assert said.count("Fit: ") == 1 and f"Fit: --checkpoint_blocks {counts[0][0]} " in said
