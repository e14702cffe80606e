"""What `accelerate config` and its launcher say is used or refused in a sentence, in every script."""

import json
import os
import re
import shutil

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from conftest import ROOT, finish, launch, make_captioned, metrics, start, weights
from diffusers import DiffusionPipeline, UNet2DConditionModel

import precompute_latents
import train_text_to_image
import train_unconditional

SCRIPTS = {"unconditional": train_unconditional, "precompute": precompute_latents, "text": train_text_to_image}
TRAINERS = ["unconditional", "text"]
# As `accelerate config` writes it for one machine.
CONFIG = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0, "main_training_function": "main",
    "mixed_precision": "no", "num_machines": 1, "num_processes": 1, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": True,
}  # fmt: skip
DYNAMO = {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default", "dynamo_use_dynamic": True,
          "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": False}  # fmt: skip
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000,
        "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "FULL_STATE_DICT"}  # fmt: skip


@pytest.fixture
def flags(tmp_path, unet_config):
    """{script: flags of a run that takes a second}."""
    make_captioned(tmp_path / "images", 6)
    shutil.copytree(ROOT / "demo/models", tmp_path / "sd")
    UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=32,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).save_pretrained(tmp_path / "sd/unet")  # fmt: skip
    data = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", f"--output_dir={tmp_path / 'out'}",
            "--dataloader_num_workers=0", "--center_crop"]  # fmt: skip
    training = ["--train_batch_size=1", "--num_train_epochs=1", "--logging_steps=1", "--report_to=none",
                "--checkpointing_steps=2", "--lr_warmup_steps=0"]  # fmt: skip
    models = f"--pretrained_model_name_or_path={tmp_path / 'sd'}"
    return {
        "unconditional": [*data, *training, f"--model_config_name_or_path={unet_config}", "--eval_batch_size=1",
                          "--ddpm_num_inference_steps=1"],
        "precompute": [*data, models],
        "text": [*data, *training, models],
    }  # fmt: skip


def environment(tmp_path, **config):
    """What accelerate's launcher sets for a configuration file, less what it found here."""
    (tmp_path / "config.yaml").write_text(json.dumps({**CONFIG, **config}))  # JSON is YAML too
    args = launch_command_parser().parse_args(["--config_file", str(tmp_path / "config.yaml"), "script.py"])
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
        script = SCRIPTS[name]
        script.main(script.parse_args([str(arg) for arg in argv]))

    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    return set(finish(start(function, num_processes, log))), log.read_text()


def settings(folder):
    return json.loads((folder / "checkpoint-2/trainer_state.json").read_text())["settings"]


@pytest.mark.parametrize("name, config", [
    ("unconditional", {}), ("unconditional", {"debug": True}), ("unconditional", {"gpu_ids": "0"}),
    ("unconditional", {"enable_cpu_affinity": True}), *((name, {"mixed_precision": "bf16"}) for name in SCRIPTS),
])  # fmt: skip
def test_plain_keys_are_used(tmp_path, flags, name, config):
    codes, log = run(tmp_path, name, flags[name], environment(tmp_path, **config))
    assert codes == {0}, log
    precision = config.get("mixed_precision", "no")
    assert re.search(rf"Processes: 1 on cpu, \d threads each; mixed precision: {precision}\n", log), log
    if name in TRAINERS:
        assert settings(tmp_path / "out")["mixed_precision"] == precision
    else:
        dtype = {"no": "float32", "bf16": "bfloat16"}[precision]
        assert json.loads((tmp_path / "out/cache.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("name, config, sentence", [
    *((name, {"distributed_type": "MULTI_CPU", "num_processes": 2}, "2 processes were launched but each sees 1")
      for name in SCRIPTS),
    ("text", {"num_processes": 2}, "2 processes were launched but each sees 1"),
    *((name, {"distributed_type": "FSDP", "fsdp_config": FSDP, "use_cpu": False}, "FSDP is not supported")
      for name in SCRIPTS),
    ("text", {"distributed_type": "MEGATRON_LM", "use_cpu": False}, "MEGATRON_LM is not supported"),
])  # fmt: skip
def test_what_can_not_be_done_is_refused(tmp_path, flags, name, config, sentence):
    codes, log = run(tmp_path, name, flags[name], environment(tmp_path, **config))
    assert codes == {1} and sentence in log and "Traceback" not in log
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("env, sentence", [
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED is not supported"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed precision fp8 is not supported"),
    ({"ACCELERATE_MIXED_PRECISION": "xyz"}, "mixed precision xyz is not supported"),
    ({"WORLD_SIZE": "abc"}, "can't be set up as they were launched"),
    ({"RANK": "1", "LOCAL_RANK": "0"}, "can't be set up as they were launched"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"}, "can't be set up as they were launched"),
    ({"ACCELERATE_DYNAMO_MODE": "nosuch", "ACCELERATE_DYNAMO_BACKEND": "inductor"}, "with inductor is not possible"),
    ({"ACCELERATE_DYNAMO_BACKEND": "nosuch"}, "can't be set up as they were launched"),
    ({"ACCELERATE_TORCH_DEVICE": "cuda:99"}, "can't be set up as they were launched"),
])  # fmt: skip
def test_an_odd_environment_is_refused(tmp_path, flags, env, sentence):
    codes, log = run(tmp_path, "precompute", flags["precompute"], {"ACCELERATE_USE_CPU": "true", **env})
    assert codes == {1} and sentence in log and "Traceback" not in log, log


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_XPU", "MULTI_NPU"])
def test_devices_that_are_not_there_are_not_replaced_in_silence(tmp_path, flags, kind):
    env = environment(tmp_path, distributed_type=kind, num_processes=2, use_cpu=False, main_process_port=0)
    codes, log = run(tmp_path, "unconditional", flags["unconditional"], {**env, "WORLD_SIZE": "2"})
    assert codes == {1} and "2 processes were launched but each sees 1" in log, log


@pytest.mark.parametrize("name", TRAINERS)
def test_accumulation_of_the_launch_is_that_of_the_flag(tmp_path, flags, name):
    records = {}
    for way, argv, env in (
        ("launch", [], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}),
        ("flag", ["--gradient_accumulation_steps=3"], {}),
        ("both", ["--gradient_accumulation_steps=3"], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}),
    ):
        argv = [*flags[name], *argv, f"--output_dir={tmp_path / way}"]
        codes, log = run(tmp_path, name, argv, {"ACCELERATE_USE_CPU": "true", **env})
        assert codes == {0}, log
        records[way] = [(record["loss"], record["grad_norm"]) for record in metrics(tmp_path / way)]
        assert settings(tmp_path / way)["gradient_accumulation_steps"] == 3
    assert records["launch"] == records["flag"] == records["both"] and len(records["flag"]) == 2
    argv = [*flags[name], "--gradient_accumulation_steps=2"]
    codes, log = run(tmp_path, name, argv, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"})
    assert codes == {1} and "--gradient_accumulation_steps 2, but the launch says 3" in log


@pytest.mark.parametrize("name, config", [
    ("unconditional", {"dynamo_mode": "reduce-overhead"}), ("text", {"dynamo_use_fullgraph": True}),
    ("precompute", {"dynamo_use_dynamic": False}),
])  # fmt: skip
def test_every_key_of_dynamo_reaches_the_compiler(tmp_path, flags, name, config):
    """Compiled in place: the weights keep their names, and nothing but what is trained or encodes is compiled."""
    compiler = torch.nn.Module.compile

    def before():
        def spy(self, **options):
            with (tmp_path / "compiled").open("a") as file:
                file.write(json.dumps([type(self).__name__, options]) + "\n")
            compiler(self, backend="eager")

        torch.nn.Module.compile = spy

    env = environment(tmp_path, dynamo_config={**DYNAMO, **config})
    codes, log = run(tmp_path, name, flags[name], env, before=before)
    assert codes == {0}, log
    compiled = [json.loads(line) for line in (tmp_path / "compiled").read_text().splitlines()]
    expected = {"backend": "aot_eager", "mode": "default", "fullgraph": False, "dynamic": True}
    for key, value in config.items():
        expected[key.removeprefix("dynamo_").removeprefix("use_")] = value
    models = {"unconditional": ["UNet2DModel"], "text": ["UNet2DConditionModel"]}
    assert compiled == [[model, expected] for model in models.get(name, ["Encoder", "CLIPTextModel"])]
    if name in TRAINERS:
        assert settings(tmp_path / "out")["compile"] == "aot_eager"
        assert not any("_orig_mod" in key for key in weights(tmp_path / "out/unet"))
        assert DiffusionPipeline.from_pretrained(tmp_path / "out").unet.dtype == torch.float32


def test_regional_compilation_is_done_or_refused(tmp_path, flags):
    env = environment(tmp_path, dynamo_config={**DYNAMO, "dynamo_use_regional_compilation": True})
    codes, log = run(tmp_path, "text", [*flags["text"], "--max_train_steps=2"], env)
    assert codes == {0}, log
    assert not any("_orig_mod" in key for key in weights(tmp_path / "out/unet"))
    resumed = [*flags["text"], "--max_train_steps=3", "--resume_from_checkpoint=latest"]
    codes, log = run(tmp_path, "text", resumed, env)
    assert codes == {0} and "Resuming from" in log, log
    shutil.rmtree(tmp_path / "out")
    codes, log = run(tmp_path, "unconditional", flags["unconditional"], env)
    assert codes == {1} and "torch.compile with aot_eager is not possible (`_repeated_blocks`" in log, log
    codes, log = run(tmp_path, "text", [*flags["text"], "--compile=nosuch"], {}, before=lambda: None)
    assert codes == {1} and "torch.compile with nosuch is not possible" in log, log


def test_threads_are_the_users_or_all_cores(tmp_path, flags):
    """Really launched: what the user says before the launcher counts, also if the launcher says the same by itself."""
    cores = len(os.sched_getaffinity(0))
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    argv = ["precompute_latents.py", *flags["precompute"], "--dry_run"]
    for launcher, env, threads in (
        (["--num_processes=1"], {}, cores),
        (["--num_processes=1"], {"OMP_NUM_THREADS": "1"}, 1),
        (["--num_processes=1", "--num-cpu-threads-per-process=1"], {}, 1),
    ):
        done = launch(*launcher, *argv, env={**own, "OMP_NUM_THREADS": None, **env})
        assert done.returncode == 0, done.stderr
        assert f"Processes: 1 on cpu, {threads} threads each" in done.stdout
