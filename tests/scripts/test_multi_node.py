"""Several machines: two launches on loopback, as Slurm starts them.

Each has its own folders, and they share the output folder.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    free_port,
    launch,
    make_captioned,
    make_unet_config,
    metrics,
    read_losses,
    wait_until,
)

train = Script("train_unconditional")

# Slurm's commands for two nodes on this machine: if one node fails, the other one ends too.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in 0 1; do
    SLURM_NODEID=$node HF_HOME=$NODES/$node TMPDIR=$NODES/$node "$@" > $NODES/$node.log 2>&1 &
done
wait -n; status=$?
[ $status = 0 ] || sleep 0.1
wait -n; other=$?
exit $((status > other ? status : other))
"""


@pytest.fixture
def nodes(tmp_path):
    """The environment of a job on two nodes, and the nodes' folders."""
    (tmp_path / "bin").mkdir()
    for node in "01":
        (tmp_path / "nodes" / node).mkdir(parents=True)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    while True:
        job = random.randrange(10_000)
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", 20_000 + job)):
                break
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {
        "SLURM_NNODES": 2,
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_GPUS_ON_NODE": 1,
    }
    return {
        **os.environ,
        "PATH": path,
        "NODES": str(tmp_path / "nodes"),
        "ACCELERATE_USE_CPU": "true",
        **{name: str(value) for name, value in slurm.items()},
    }


def signal_node(nodes, node, number=signal.SIGKILL):
    """Send a signal to all processes of a node, as if the machine were lost.

    This includes processes in their own sessions. Returns the number of processes.
    """
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HF_HOME={nodes['NODES']}/{node}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), number)
                found += 1
    return found


@pytest.mark.long
def test_two_machines_stop_together_and_train_to_the_bits_of_one(tmp_path, nodes):
    make_captioned(tmp_path / "images", 7)
    out, whole, many = tmp_path / "two machines", tmp_path / "one machine", "--max_train_steps=2000"
    more = [
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={make_unet_config(tmp_path)}",
        "--ddpm_num_inference_steps=1",
        "--lr_warmup_steps=0",
        "--use_ema",
        "--checkpointing_steps=2",
        "--mixed_precision=no",
        "--lr_scheduler=constant",
    ]
    job = [ROOT / "accelerate_configs/slurm.sh", "train_unconditional.py", *train.flags(out, *more)]
    logs = lambda: [(tmp_path / f"nodes/{node}.log").read_text() for node in "01"]
    for number, sentence in (
        (signal.SIGKILL, "another process has ended"),
        (signal.SIGSTOP, "has been silent for 34"),
    ):
        before = checkpoints(out) if out.exists() else set()
        run = subprocess.Popen([*job, many], cwd=ROOT, env=nodes)
        try:
            wait_until(lambda: out.exists() and checkpoints(out) - before, 120)
            time.sleep(5)  # so that they have received each other's beats
            signal_node(nodes, 1, number)
            begin = time.time()
            wait_until(lambda: not signal_node(nodes, 0, 0), 60)
            print(f"{number.name}: {time.time() - begin:.0f} s")
        finally:
            for node in "01":
                signal_node(nodes, node)
            assert run.wait(60) != 0, logs()
        assert sentence in logs()[0], logs()
    last = max(int(name.split("-")[1]) for name in checkpoints(out)) + 3
    subprocess.run([*job, f"--max_train_steps={last}"], cwd=ROOT, env=nodes, check=True)
    one = ["--multi_gpu", "--num_processes", 2, "--main_process_port", 0, "train_unconditional.py"]
    flags = train.flags(whole, *more, f"--max_train_steps={last}")
    said = launch(*one, *flags, env={"ACCELERATE_USE_CPU": "true"})
    assert said.returncode == 0, said.stderr
    for part in ("unet", f"checkpoint-{last}/unet_ema"):
        assert_same_weights(out / part, whole / part)
    assert read_losses(out) == read_losses(whole)


@pytest.mark.long
def test_torchrun_continues_with_the_machines_that_are_left_and_that_join(tmp_path):
    """As docs/cluster.md shows it, with machines of one process each."""
    (command,) = re.findall(
        r"```bash\n(export \w+=1)\ntorchrun (.*?) \\\n", (ROOT / "docs/cluster.md").read_text()
    )
    variable, value = command[0].removeprefix("export ").split("=")
    endpoint = f"127.0.0.1:{free_port()}"
    words = command[1].replace("first-machine:29400", endpoint).replace("=gpu", "=1").split()
    out = tmp_path / "out"
    flags = [
        f"--train_data_dir={ROOT / 'demo/digits'}",
        f"--model_config_name_or_path={ROOT / 'demo/digits_unet.json'}",
        "--resolution=8",
        "--max_train_steps=100000",
        "--checkpointing_steps=20",
        "--resume_from_checkpoint=latest",
    ]
    env = os.environ | {variable: value, "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", *words]
    launch += [str(ROOT / "train_unconditional.py"), *train.flags(out, *flags)]
    machines = []

    def add_machine():
        with open(tmp_path / f"{len(machines)}.log", "wb") as log:
            options = {"env": env, "stdout": log, "stderr": log, "start_new_session": True}
            machines.append(subprocess.Popen(launch, **options))
        return machines[-1]

    def list_steps():
        path = out / "metrics.jsonl"
        return [record["step"] for record in metrics(out)] if path.exists() else []

    def count_processes():
        """The number of processes that wrote the newest checkpoint."""
        states = sorted(out.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
        return json.loads(states[-1].read_text())["settings"]["num_processes"] if states else 0

    def kill_machine(machine):
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(machine.pid)
            for process in [agent, *agent.children(recursive=True)]:
                process.kill()

    try:
        add_machine()
        other = add_machine()
        wait_until(lambda: count_processes() == 2, 300)
        kill_machine(other)
        wait_until(lambda: count_processes() == 1, 300)
        third = add_machine()
        wait_until(lambda: count_processes() == 2, 300)
        saved = checkpoints(out)
        for machine in (machines[0], third):
            machine.terminate()
        assert [machine.wait(120) for machine in (machines[0], third)] == [1, 1]
        assert checkpoints(out) - saved  # the trainers have saved
        assert list_steps() == [*range(1, len(list_steps()) + 1)]
    finally:
        for machine in machines:
            kill_machine(machine)
