"""Settings of `accelerate config` and its launcher are used, or an error names them.

Each script is also really launched here. test_train_unconditional.py and
test_train_text_to_image.py launch with the files in accelerate_configs/, and
test_precompute_latents.py launches two processes.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch._dynamo
from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command_parser,
    simple_launcher,
)
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from conftest import (
    ROOT,
    Script,
    finish,
    free_port,
    launch,
    make_captioned,
    make_models,
    metrics,
    start,
    weights,
)
from diffusers import DiffusionPipeline
from filelock import FileLock

pytestmark = pytest.mark.usefixtures("without_figures")
SCRIPTS = {
    "unconditional": Script("train_unconditional"),
    "precompute": Script("precompute_latents"),
    "text": Script("train_text_to_image"),
}
TRAINERS = ["unconditional", "text"]
# As `accelerate config` writes it for one machine.
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": True,
}
DYNAMO = {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default", "dynamo_use_dynamic": True,
          "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": False}  # fmt: skip
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000,
        "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "FULL_STATE_DICT"}  # fmt: skip


@pytest.fixture
def flags(tmp_path, unet_config):
    """{script: flags of a run that takes a second}."""
    make_captioned(tmp_path / "images", 6)
    data = [f"--train_data_dir={tmp_path / 'images'}", "--center_crop"]
    models = f"--pretrained_model_name_or_path={make_models(tmp_path)}"
    more = {
        "unconditional": ["--num_train_epochs=1", f"--model_config_name_or_path={unet_config}"],
        "precompute": [models],
        "text": [models, "--resolution=16", "--dataloader_num_workers=0"],
    }
    for name in TRAINERS:
        more[name] += ["--checkpointing_steps=2", "--lr_warmup_steps=0"]
    return {name: SCRIPTS[name].flags(tmp_path / "out", *data, *more[name]) for name in SCRIPTS}


def environment(tmp_path, **config):
    """The variables that accelerate's launcher sets for a configuration file."""
    (tmp_path / "config.yaml").write_text(json.dumps({**CONFIG, **config}))  # JSON is YAML too
    args = launch_command_parser().parse_args(
        ["--config_file", str(tmp_path / "config.yaml"), "script.py"]
    )
    args, _, _ = _validate_launch_command(args)
    if args.multi_gpu or args.use_fsdp or args.use_megatron_lm:
        env = prepare_multi_gpu_env(args)
    else:
        _, env = prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


def run(tmp_path, name, argv, env, num_processes=1, before=lambda: None):
    """Run a script as launched with `env`. Returns (set of exit statuses, what was printed)."""

    def function():
        os.environ.update(env)
        before()
        SCRIPTS[name](*argv)

    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    return set(finish(start(function, num_processes, log))), log.read_text()


def settings(folder):
    return json.loads((folder / "checkpoint-2/trainer_state.json").read_text())["settings"]


@pytest.mark.parametrize("name, config", [
    ("unconditional", {"debug": True, "gpu_ids": "0", "enable_cpu_affinity": True}),
    ("precompute", {"mixed_precision": "bf16"}), ("text", {"mixed_precision": "bf16"}),
])  # fmt: skip
def test_common_accelerate_config_keys_are_used(tmp_path, flags, name, config):
    argv = [*flags[name], *["--max_train_steps=2"][: name in TRAINERS]]
    codes, log = run(tmp_path, name, argv, environment(tmp_path, **config))
    assert codes == {0}, log
    precision = config.get("mixed_precision", "no")
    assert re.search(
        rf"Processes: 1 on cpu, \d threads? each; mixed precision: {precision};", log
    ), log
    if name in TRAINERS:
        assert settings(tmp_path / "out")["mixed_precision"] == precision
    else:
        assert json.loads((tmp_path / "out/cache.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_refuses_unsupported_launches(tmp_path, flags, name):
    sentences = {
        "2 processes were launched, but they do not work together": {
            "distributed_type": "MULTI_CPU",
            "num_processes": 2,
        },
        "FSDP is not supported": {
            "distributed_type": "FSDP",
            "fsdp_config": FSDP,
            "use_cpu": False,
        },
    }
    for sentence, config in sentences.items():
        codes, log = run(tmp_path, name, flags[name], environment(tmp_path, **config))
        assert (
            codes == {1}
            and f"\n{SCRIPTS[name].file_name}: {sentence}" in log
            and "Traceback" not in log
        ), log
        assert not (tmp_path / "out").exists()


def test_unsupported_launch_settings_are_refused(tmp_path, flags):
    """They come from a file of `accelerate config` or from environment variables."""
    # Devices are missing: the CPU must not be used silently instead
    missing = {"num_processes": 2, "use_cpu": False, "main_process_port": 0}
    odd, few = "the launched processes can't be set up", "2 processes were launched, but they do"
    for sentence, env in [
        (few, environment(tmp_path, num_processes=2)),
        (
            "MEGATRON_LM is not supported",
            environment(tmp_path, distributed_type="MEGATRON_LM", use_cpu=False),
        ),
        *(
            (few, {**environment(tmp_path, distributed_type=kind, **missing), "WORLD_SIZE": "2"})
            for kind in ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
        ),
        ("DEEPSPEED is not supported", {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("mixed precision fp8 is not supported", {"ACCELERATE_MIXED_PRECISION": "fp8"}),
        ("mixed precision xyz is not supported", {"ACCELERATE_MIXED_PRECISION": "xyz"}),
        (odd, {"WORLD_SIZE": "abc"}),
        (odd, {"RANK": "1", "LOCAL_RANK": "0"}),
        (odd, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"}),
        (odd, {"ACCELERATE_DYNAMO_BACKEND": "nosuch"}),
        (odd, {"ACCELERATE_TORCH_DEVICE": "cuda:99"}),
        (
            "torch.compile with inductor is not possible",
            {"ACCELERATE_DYNAMO_MODE": "nosuch", "ACCELERATE_DYNAMO_BACKEND": "inductor"},
        ),
    ]:
        env = (
            env
            if "ACCELERATE_USE_CPU" in env or "WORLD_SIZE" in env
            else {"ACCELERATE_USE_CPU": "true", **env}
        )
        codes, log = run(tmp_path, "precompute", flags["precompute"], env)
        assert codes == {1} and sentence in log and "Traceback" not in log, (env, log)
        assert not (tmp_path / "out").exists()


def test_launcher_accumulation_steps_work_like_the_flag(tmp_path, flags):
    records, launch = {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}
    flag = "--gradient_accumulation_steps=3"
    for way, argv, env in (("launch", [], launch), ("flag", [flag], {}), ("both", [flag], launch)):
        argv = [*flags["text"], *argv, f"--output_dir={tmp_path / way}"]
        codes, log = run(tmp_path, "text", argv, {"ACCELERATE_USE_CPU": "true", **env})
        assert codes == {0}, log
        records[way] = [(record["loss"], record["grad_norm"]) for record in metrics(tmp_path / way)]
        assert settings(tmp_path / way)["gradient_accumulation_steps"] == 3
    assert records["launch"] == records["flag"] == records["both"] and len(records["flag"]) == 2
    for name in TRAINERS:
        codes, log = run(tmp_path, name, [*flags[name], "--gradient_accumulation_steps=2"], launch)
        assert codes == {1} and "is 2, but accelerate launch sets 3" in log


@pytest.mark.parametrize("name, config", [
    pytest.param("unconditional", {"dynamo_mode": "reduce-overhead"}, marks=pytest.mark.long),
    ("text", {"dynamo_use_fullgraph": True}), ("precompute", {"dynamo_use_dynamic": False}),
])  # fmt: skip
def test_all_dynamo_keys_reach_torch_compile(tmp_path, flags, name, config):
    """Only the trained model or the encoders are compiled, in place, so weights keep names."""
    compiler = torch.nn.Module.compile

    def before():
        def spy(self, **options):
            with (tmp_path / "compiled").open("a") as file:
                file.write(json.dumps([type(self).__name__, options]) + "\n")
            if name == "unconditional":  # with a single process, because it takes a while
                compiler(self, backend="eager")

        torch.nn.Module.compile = spy

    env = environment(tmp_path, dynamo_config={**DYNAMO, **config})
    argv = [*flags[name], *["--max_train_steps=2"][: name in TRAINERS]]
    codes, log = run(tmp_path, name, argv, env, before=before)
    assert codes == {0}, log
    compiled = [json.loads(line) for line in (tmp_path / "compiled").read_text().splitlines()]
    expected = {"backend": "aot_eager", "mode": "default", "fullgraph": False, "dynamic": True}
    for key, value in config.items():
        expected[key.removeprefix("dynamo_").removeprefix("use_")] = value
    models = {"unconditional": ["UNet2DModel"], "text": ["UNet2DConditionModel"]}
    assert compiled == [
        [model, expected] for model in models.get(name, ["Encoder", "CLIPTextModel"])
    ]
    if name in TRAINERS:
        assert settings(tmp_path / "out")["compile"] == "aot_eager"
        assert not any("_orig_mod" in key for key in weights(tmp_path / "out/unet"))
        assert DiffusionPipeline.from_pretrained(tmp_path / "out").unet.dtype == torch.float32


@pytest.mark.long
def test_regional_compilation_works_or_is_refused(tmp_path, flags):
    regional = {"dynamo_backend": "EAGER", "dynamo_use_regional_compilation": True}
    env = environment(tmp_path, dynamo_config={**DYNAMO, **regional})
    codes, log = run(tmp_path, "text", [*flags["text"], "--max_train_steps=2"], env)
    assert codes == {0}, log
    assert not any("_orig_mod" in key for key in weights(tmp_path / "out/unet"))
    assert not any("_orig_mod" in key for key in weights(tmp_path / "out/checkpoint-2/unet"))
    shutil.rmtree(tmp_path / "out")
    codes, log = run(tmp_path, "unconditional", flags["unconditional"], env)
    assert codes == {1} and "torch.compile with eager is not possible (`_repeated_blocks`" in log, (
        log
    )
    codes, log = run(
        tmp_path, "text", [*flags["text"], "--compile=nosuch"], {}, before=lambda: None
    )
    assert codes == {1} and "torch.compile with nosuch is not possible" in log, log


@pytest.mark.long
@pytest.mark.parametrize(
    "name, launcher, env, threads",
    [
        pytest.param(
            "precompute",
            ["--num_processes=1"],
            {},
            len(os.sched_getaffinity(0)),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            "text",
            ["--num_processes=2", "--multi_gpu", "--main_process_port=0"],
            {"OMP_NUM_THREADS": "1"},
            1,
            marks=pytest.mark.long,
        ),
    ],
)
def test_accelerate_launch_uses_omp_num_threads_or_all_cores(
    tmp_path, flags, name, launcher, env, threads
):
    """The user's own OMP_NUM_THREADS counts, even if it equals the launcher's default."""
    env = {"OMP_NUM_THREADS": None, "ACCELERATE_USE_CPU": "true", **env}
    done = launch(*launcher, SCRIPTS[name].file_name, *flags[name], env=env)
    assert done.returncode == 0, done.stderr
    processes = int(launcher[0][-1])
    assert done.stdout.count(f"Processes: {processes} on cpu, {threads} thread") == 1
    assert len(re.findall("^Done[: ]", done.stdout, re.M)) == 1 and "Traceback" not in done.stderr
    if name in TRAINERS:
        last = 6 // processes
        state = json.loads((tmp_path / f"out/checkpoint-{last}/trainer_state.json").read_text())
        assert state["images_seen"] == 6
        assert state["settings"]["num_processes"] == processes
        assert DiffusionPipeline.from_pretrained(tmp_path / "out").unet.dtype == torch.float32
    else:
        assert json.loads((tmp_path / "out/cache.json").read_text())["rows"] == 6


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
@pytest.mark.parametrize("status", [2, 75, 143])
def test_the_launcher_turns_the_scripts_status_into_1(tmp_path, status, quiet):
    """As AGENTS.md and docs/troubleshooting.md say. Python ends with 1 after the error."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n\nsys.exit({status})\n")
    args = launch_command_parser().parse_args(["--cpu", *quiet, str(script)])
    args, *_ = _validate_launch_command(args)
    with pytest.raises((SystemExit, subprocess.CalledProcessError)) as stop:
        simple_launcher(args)
    if quiet:
        assert stop.value.code == 1
    else:
        assert stop.value.returncode == status  # of the script; nothing hands it on


KERNEL = """
import sys
from accelerate import notebook_launcher
sys.modules["bitsandbytes"] = None  # as if it were not installed, or diffusers would import it
import train_unconditional
del sys.modules["bitsandbytes"]

def run(flags):
    import train_unconditional
    train_unconditional.main(train_unconditional.parse_args(flags))

taken, free, port, *flags = sys.argv[1:]
args = train_unconditional.parse_args([*flags, f"--output_dir={taken}"])
try:
    notebook_launcher(train_unconditional.main, (args,), num_processes=2, use_port=port)
except Exception as error:
    print(type(error).__name__)
flags.append(f"--output_dir={free}")
notebook_launcher(run, (flags,), num_processes=2, use_port=port)
"""


@pytest.mark.long
def test_notebook_launcher_starts_two_processes_and_refuses_a_locked_folder(tmp_path, flags):
    """A plain process replaces the kernel. Like it, it imported the script and used no device."""
    (tmp_path / "taken").mkdir()
    argv = [str(tmp_path / "taken"), str(tmp_path / "free"), str(free_port())]
    argv += [flag for flag in flags["unconditional"] if "output_dir" not in flag]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    with FileLock(tmp_path / "taken/.lock"):  # like another process's run
        done = subprocess.run(
            [sys.executable, "-c", KERNEL, *argv], env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ChildFailedError") == 1
    assert f"another process is writing to {tmp_path / 'taken'}: end it" in done.stderr
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [".lock"]
    assert "Processes: 2 on cpu" in done.stdout and metrics(tmp_path / "free")
    assert (tmp_path / "free/model_index.json").is_file()
