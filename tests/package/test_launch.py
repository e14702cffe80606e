"""The launch: impossible flags end in an error, signals are agreed on, memory is kept and freed."""

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import time
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config import config_args
from conftest import finish, free_port, kill, patch, reset, start, wait_until
from filelock import FileLock
from huggingface_hub.constants import HF_HOME

import train_unconditional
from diffusion_training.arguments import Flags
from diffusion_training.errors.sentences import AGAIN, CHANGED, PEER_ENDED, fail, in_one_sentence
from diffusion_training.launch import (
    Launch,
    accelerator_options,
    advise_launcher,
    advise_precision,
    keep_memory,
    make_launch,
)
from diffusion_training.meeting import Meeting
from diffusion_training.stopping import StopSignal, end_stopped
from diffusion_training.training.run_folder import RunFolder, end_run, open_run
from diffusion_training.training.showing import hub


@pytest.fixture(autouse=True)
def threads():
    """What a launch may set for this process."""
    yield
    torch.set_num_threads(1)


def launch_with(args):
    return make_launch(Accelerator(**accelerator_options(args)), args)


def make(**flags):
    return launch_with(Flags(**{"mixed_precision": None, "compile": None, **flags}))


def test_a_start_by_python_says_what_it_does_not_use(monkeypatch, tmp_path):
    """The devices and the file of `accelerate config` are made up."""
    config = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(config))
    assert advise_launcher("no") is None
    chosen = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1}
    for precision, said in (("bf16", "(mixed_precision: bf16)"), ("no", None)):
        config.write_text(json.dumps(chosen | {"mixed_precision": precision}))
        assert said is None or said in advise_launcher("no"), precision
        assert advise_launcher(precision) is None
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert "One of 4 devices is used: `accelerate launch`" in advise_launcher("no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert advise_launcher("no") is None


def test_float32_by_default_on_a_gpu_prints_advice_once(monkeypatch, capsys):
    """The GPU is made up. The advice changes no setting."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    flags = Flags(mixed_precision=None, allow_tf32=False)
    said = advise_precision(cuda, "no", flags)
    assert "--mixed_precision bf16 or --allow_tf32 is faster" in said
    assert "--allow_tf32" not in advise_precision(cuda, "no", Flags(mixed_precision=None))
    for device, precision, chosen in (
        (cpu, "no", flags),
        (cuda, "bf16", flags),
        (cuda, "no", Flags(mixed_precision="no", allow_tf32=False)),
        (cuda, "no", Flags(mixed_precision=None, allow_tf32=True)),
    ):
        assert advise_precision(device, precision, chosen) is None
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert advise_precision(cuda, "no", flags) is None
    patch(monkeypatch, "advise_precision", lambda *found: f"told of {found[1]}")
    assert make().mixed_precision == "no"
    assert capsys.readouterr().out.count("told of no\n") == 1


def test_compiled_code_is_kept_with_the_downloads_unless_a_variable_names_a_folder(monkeypatch):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)
    with CHANGED:
        make(compile="inductor", cache_dir="cache")
        assert os.environ[name] == os.path.join("cache", "diffusion_training", "inductor")
    with CHANGED:
        make(compile="inductor")
        assert os.environ[name] == os.path.join(HF_HOME, "diffusion_training", "inductor")
    assert name not in os.environ
    with CHANGED:
        make()
        assert name not in os.environ
    monkeypatch.setenv(name, "own")
    with CHANGED:
        make(compile="inductor", cache_dir="cache")
    assert os.environ[name] == "own"


def test_make_launch_refuses_unsupported_settings(monkeypatch):
    with pytest.raises(
        SystemExit,
        match="fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or",
    ):
        make(mixed_precision="fp16")
    for name, value, sentence in (
        (
            "ACCELERATE_USE_FSDP",
            "true",
            "FSDP is not supported: launch on one device, or on several with DDP",
        ),
        (
            "ACCELERATE_MIXED_PRECISION",
            "fp8",
            "mixed precision fp8 is not supported: choose no, fp16 or bf16",
        ),
        (
            "WORLD_SIZE",
            "2",
            "2 processes were launched, but they do not work together .*: on CPUs set ACCEL",
        ),
        ("WORLD_SIZE", "abc", "the launched processes can't be set up"),
        ("ACCELERATE_FP8_BACKEND", "TE", "mixed precision fp8 is not supported"),
        ("ACCELERATE_TORCH_DEVICE", "meta", "can't be set up .*cannot be called on meta tensors"),
    ):
        with monkeypatch.context() as launched, pytest.raises(SystemExit, match=sentence):
            reset()
            launched.setenv(name, value)
            make()


def test_shard_refuses_fsdp_and_disables_the_autocast_cache(monkeypatch):
    launch = make(shard=True)
    assert launch.accelerator.autocast_handler.cache_enabled is False
    assert launch.shard is False and launch.has_weights  # one process has everything
    for name, value, sentence in (
        ("USE_FSDP", "true", "FSDP is not supported: use --shard, and launch with DDP"),
        (
            "DYNAMO_BACKEND",
            "EAGER",
            "torch.compile, which --shard does not support: add --no-compile",
        ),
    ):
        with monkeypatch.context() as launched, pytest.raises(SystemExit, match=sentence):
            reset()
            launched.setenv(f"ACCELERATE_{name}", value)
            make(shard=True)


def test_make_launch_reads_the_settings_of_accelerate_launch(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    launch = make(gradient_accumulation_steps=1)
    found = {"mixed_precision": "bf16", "compile": None, "gradient_accumulation_steps": 3}
    assert launch.settings() == found and launch.dtype == torch.bfloat16
    # or Accelerate would divide once more
    assert launch.accelerator.gradient_accumulation_steps == 1
    assert launch.cores == len(os.sched_getaffinity(0))
    assert (launch.rank, launch.num_processes, launch.is_main) == (0, 1, True)
    assert "mixed precision: bf16\n" in capsys.readouterr().out
    reset()
    assert make(mixed_precision="no", compile="inductor").settings() == {
        "mixed_precision": "no",
        "compile": "inductor",
        "gradient_accumulation_steps": 3,
    }
    reset()
    with pytest.raises(SystemExit, match="--gradient_accumulation_steps is 2, but .* sets 3"):
        make(gradient_accumulation_steps=2)


def test_loader_processes_default_to_all_cores_but_one():
    for cores, wanted, expected in ((1, None, 0), (5, None, 4), (99, None, 8), (2, 7, 7)):
        launch = Launch(Accelerator(cpu=True), cores, "no", None, 1)
        assert launch.choose_workers(wanted) == expected


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators have their own ways"
)
def test_keep_memory_lets_glibc_keep_freed_memory():
    def touched(megabytes=64):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * (megabytes << 20)
        # page faults, of 4 KiB each
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_memory()
    touched()
    assert touched() < 100


def test_a_signal_is_noted_and_the_third_kills(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    stop_signal = StopSignal(1)
    assert stop_signal.agree() == 0
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)  # as torchrun forwards its signals
    assert stop_signal.agree() == stop_signal.received == signal.SIGINT
    stop_signal.close()
    assert signal.getsignal(signal.SIGTERM) == handler

    def run():
        StopSignal(1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)

    assert finish(start(run)) == [-signal.SIGTERM]


def test_processes_agree_on_a_signal_that_one_received(tmp_path):
    def run():
        AGAIN.clear()  # of a trainer that an earlier test ran in this process
        accelerator = Accelerator(cpu=True)
        stop_signal = StopSignal(2)
        assert stop_signal.agree() == 0
        if accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop_signal.agree() == signal.SIGTERM
        end_stopped(accelerator, stop_signal.agree(), 7, 9)

    assert finish(start(run, 2, tmp_path / "log")) == [143, 143], (tmp_path / "log").read_text()
    said = "Stopped by SIGTERM after step 7 of 9; the same command continues from there"
    assert (tmp_path / "log").read_text().count(said) == 1


def test_end_run_unlocks_the_folder_and_uploads_to_the_hub(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(hub, "get_paths_info", lambda *args, **options: [])
    monkeypatch.setattr(hub, "upload_folder", lambda **options: calls.append(options))
    launch = make()
    index = tmp_path / "modular_model_index.json"
    index.write_text(json.dumps({"vae": ["x", "Y", {"pretrained_model_name_or_path": None}]}))
    # a range test has nothing to upload
    for flags in (
        {"push_to_hub": False, "find_lr": False},
        {"push_to_hub": True, "find_lr": True},
        {"push_to_hub": True, "find_lr": False},
    ):
        args = Flags(output_dir=str(tmp_path), hub_model_id="it", **flags)
        lock = FileLock(tmp_path / ".lock", is_singleton=True)
        lock.acquire()
        lock.acquire()  # as after a failed run in a notebook
        # with the full name from the hub
        run = RunFolder("train.py", lock, None, {}, "me/it")
        end_run(launch, run, "Done: it is there", ["unet/*"], args)
        with FileLock(tmp_path / ".lock", timeout=0):
            assert "Done: it is there" in capsys.readouterr().out
    (call,) = calls
    assert call["repo_id"] == "me/it" and call["folder_path"] == str(tmp_path)
    assert json.loads(index.read_text())["vae"][2] == {"pretrained_model_name_or_path": "me/it"}
    assert call["allow_patterns"] == [
        "*model_index.json",
        "loss.png",
        "samples/*",
        "unet/*",
        "README.md",
    ]

    def offline(**options):
        raise ConnectionError("no network")

    monkeypatch.setattr(hub, "get_paths_info", lambda *args, **options: [])
    monkeypatch.setattr(hub, "upload_folder", offline)
    with pytest.raises(
        SystemExit, match=r"upload to me/it failed; everything is in .* \(no network\)"
    ):
        end_run(launch, run, "Done", [], args)
    run = RunFolder("train.py", None, None, {}, "me/it", tracker_id="a1")
    assert run.settings() == {"hub_model_id": "me/it", "tracker_id": "a1"}


def test_deterministic_kernels_are_switched_off_after_the_run(tmp_path, monkeypatch):
    """After the run, failed or not, the process has its previous settings."""

    def settings():
        cudnn = torch.backends.cudnn
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn.benchmark,
            cudnn.deterministic,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    @in_one_sentence
    def main(args):
        launch_with(args)
        seen.append(settings())
        if len(seen) > 2:
            fail("no")

    seen = []
    trainer = train_unconditional.parse_args
    argv = [f"--train_data_dir={tmp_path}", f"--output_dir={tmp_path}/out", "--report_to=none"]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = settings()
    assert before == (False, False, True, False, None)
    for flags in ([], ["--deterministic"], ["--deterministic"], ["--no-deterministic"]):
        reset()
        with pytest.raises(SystemExit) if len(seen) > 1 else contextlib.nullcontext():
            main(trainer([*argv, *flags]))
        assert settings() == before
    exact = (True, False, False, True, ":4096:8")
    assert seen == [before, exact, exact, before]
    # a user's own value is kept
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    reset()
    with pytest.raises(SystemExit):
        main(trainer([*argv, "--deterministic"]))
    assert seen[-1] == (*exact[:-1], ":16:8") and settings() == (*before[:-1], ":16:8")


def test_find_lr_creates_no_hub_repository(tmp_path, monkeypatch):
    made = []
    repository = lambda name, **options: made.append(name) or argparse.Namespace(repo_id="me/it")
    monkeypatch.setattr(hub, "create_repo", repository)
    (tmp_path / "images").mkdir()
    argv = [f"--train_data_dir={tmp_path}/images", f"--output_dir={tmp_path}/out", "--push_to_hub"]
    for more, expected in (["--find_lr"], None), ([], "me/it"):
        reset()
        args = train_unconditional.parse_args([*argv, *more])
        run = open_run(launch_with(args), "train_unconditional.py", args)
        run.lock.release(force=True)
        assert run.hub_model_id == expected
    assert made == ["out"]


def start_second(folder, monkeypatch):
    """Start the second process of two, whose first one does not exist; returns its id."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    def connect(args):
        (folder / "begun").touch()
        accelerator_options(args)

    main = in_one_sentence(connect)
    return start(lambda: main(Flags(mixed_precision=None)), log=folder / "log")


def test_a_process_that_waits_for_the_first_machine_can_be_stopped(tmp_path, monkeypatch):
    pids = start_second(tmp_path, monkeypatch)
    wait_until((tmp_path / "begun").exists)
    time.sleep(0.2)
    os.kill(pids[0], signal.SIGTERM)
    assert finish(pids) == [143]


def test_a_first_machine_that_does_not_answer_ends_in_a_sentence(tmp_path, monkeypatch):
    patch(monkeypatch, "CONNECTING", 0.1)
    assert finish(start_second(tmp_path, monkeypatch)) == [1]
    said = (tmp_path / "log").read_text()
    assert "has not answered for 0 seconds ([Errno 111] Connection refused): is it running" in said


@pytest.mark.parametrize("late", ["works", "dies", "dies at once", "is interrupted"])
def test_processes_meet_after_any_time_or_stop(tmp_path, monkeypatch, late):
    """The first process waits longer than torch's time-out. If the other one dies, it ends."""
    patch(monkeypatch, "TIMEOUT", timedelta(seconds=4))

    def work(args):
        launch = make_launch(Accelerator(**accelerator_options(args)), args)
        (tmp_path / f"begun-{launch.rank}").touch()
        if launch.rank and late == "dies at once":
            os._exit(1)
        end = Meeting(launch)
        if launch.rank:
            time.sleep(5 if late == "works" else 0.5)
            os._exit(1) if late == "dies" else time.sleep(300 * (late == "is interrupted"))
        end.wait()

    main = in_one_sentence(work)
    pids = start(lambda: main(Flags(mixed_precision=None, compile=None)), 2, tmp_path / "log")
    wait_until((tmp_path / "begun-0").exists)
    if late == "is interrupted":
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGTERM)
    codes = finish(pids[:1], 200)
    kill(pids[1:]) if late == "is interrupted" else finish(pids[1:])
    assert codes == [{"works": 0, "is interrupted": 143}.get(late, PEER_ENDED)]
