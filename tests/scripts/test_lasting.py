"""A run outlives its terminal and its trackers; folders and addresses keep what is not a run's."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import fsspec
import psutil
import pytest
from accelerate import Accelerator
from conftest import (
    ROOT,
    Script,
    checkpoints,
    finish,
    make_images,
    metrics,
    needs,
    patch,
    start,
    wait_until,
)
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.errors.printing import hide_secrets, name_address, note_secrets

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_unconditional")
LATEST = "--resume_from_checkpoint=latest"


@pytest.fixture
def flags(tmp_path, unet_config):
    """A run of 3 steps."""
    make_images(tmp_path / "images", 3)
    return train.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={unet_config}",
        "--max_train_steps=3",
    )


def close_terminal():
    """Let stdout and stderr be a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(reader)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("terminal", ["closed pipe", "full disk"])
def test_run_outlives_a_terminal_that_takes_no_output(tmp_path, flags, terminal, num_processes):
    def run():
        if terminal == "closed pipe":
            close_terminal()
        train(*flags)

    log = "/dev/full" if terminal == "full disk" else os.devnull
    assert {*finish(start(run, num_processes, log))} == {0}
    assert (tmp_path / "out/unet").is_dir() and len(checkpoints(tmp_path / "out")) == 1
    assert metrics(tmp_path / "out")


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_ends_a_run_with_a_checkpoint_unless_nohup_ignores_it(tmp_path, flags, ignored):
    def run():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        train(*flags, f"--max_train_steps={40 if ignored else 100_000}")

    pids = start(run)
    records = tmp_path / "out/metrics.jsonl"
    wait_until(lambda: records.exists() and records.read_bytes())
    os.kill(pids[0], signal.SIGHUP)
    assert finish(pids) == [0 if ignored else 129]
    assert len(checkpoints(tmp_path / "out")) == 1
    assert (tmp_path / "out/unet").exists() == ignored


def test_run_goes_on_without_a_tracker_that_fails(tmp_path, flags, monkeypatch, capfd):
    def lose(*args, **options):
        raise BrokenPipeError("the tracker's process has ended")

    monkeypatch.setattr(Accelerator, "log", lose)
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log_images", lose)
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.finish", lose)
    train(*flags, "--report_to=tensorboard")
    said = capfd.readouterr().err
    sentence = "--report_to tensorboard failed; metrics.jsonl has all records (the tracker's proc"
    assert said.count(sentence) == 1 and said.count("the trackers could not be closed") == 1
    assert said.count("tensorboard did not take samples; the folder samples/ has them") == 1
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2, 3]
    assert (tmp_path / "out/unet").is_dir()


@pytest.mark.long
@needs("wandb")
def test_run_goes_on_without_the_process_of_wandb(tmp_path, flags, monkeypatch):
    """wandb sends what it gets to a process of its own, which is killed after the first record."""
    log = Accelerator.log

    def log_and_kill(self, values, step):
        log(self, values, step)
        for child in psutil.Process().children(recursive=True):
            if "wandb" in child.name():
                child.kill()
                child.wait()

    monkeypatch.setattr(Accelerator, "log", log_and_kill)
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = train.fork(*flags, "--report_to=wandb")
    assert said.count("wandb did not take samples; the folder samples/ has them (") == 1
    assert said.count("the trackers could not be closed (") == 1
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2, 3]
    assert (tmp_path / "out/unet").is_dir()


# ------------------------------------------------------------------- whose folder is it?


def test_a_second_start_of_a_run_resumes_or_is_refused(tmp_path, flags):
    (tmp_path / "out").mkdir()
    train(*flags, "--max_train_steps=2")
    assert "out holds checkpoint-2 of an earlier run: resume it" in train.refused(*flags)
    flags = [*flags, f"--checkpoints_to={tmp_path / 'copies'}"]
    train(*flags, LATEST)
    (tmp_path / "out").rename(tmp_path / "lost")
    assert "copies holds checkpoint-3 of an earlier run: resume" in train.refused(*flags)
    train(*flags, LATEST, "--max_train_steps=4")
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    for name in ("run.args", "metrics.jsonl"):  # perhaps only checkpoints were copied here
        (tmp_path / "out" / name).unlink()
    train(*flags, LATEST, "--max_train_steps=5")
    assert "checkpoint-5" in checkpoints(tmp_path / "out")


def test_an_address_with_other_files_is_refused(tmp_path, flags):
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies/notes.txt").write_text("mine")
    error = train.refused(*flags, f"--checkpoints_to={tmp_path / 'copies'}")
    assert "copies holds notes.txt and no run of this script: choose another address" in error


def test_every_row_of_the_table_of_second_starts_has_a_test():
    page = (ROOT / "docs/resume.md").read_text()
    table = page.partition("## Whose folder is it?")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].strip("| ") for line in table.splitlines() if line[:1] == "|"]
    second = test_a_second_start_of_a_run_resumes_or_is_refused
    tests = {
        "nothing, or an empty folder": [second],
        "a run (`run.args`), or complete checkpoints": [second],
        "a run that was stopped while it fetched its checkpoint": [
            test_run_stopped_while_it_fetches_its_checkpoint_starts_again
        ],
        "files, but no run": [test_folder_with_records_of_another_program_is_left_alone],
        "at `--checkpoints_to`: a run of the same name": [second],
        "at `--checkpoints_to`: a run of another name, or other files": [
            test_an_address_belongs_to_the_runs_of_one_name,
            test_an_address_with_other_files_is_refused,
        ],
        "a `README.md` that you edited, pictures of other names in `samples/`": [
            test_an_edited_model_card_is_kept,
            test_a_picture_of_the_user_among_the_samples_stays_and_harms_nothing,
        ],
    }
    assert rows[2:] == [*tests]


def test_folder_with_records_of_another_program_is_left_alone(tmp_path, flags):
    (tmp_path / "out/unet").mkdir(parents=True)
    for name in ("metrics.jsonl", "README.md", "unet/mine"):
        (tmp_path / "out" / name).write_text("mine")
    error = train.refused(*flags)
    assert "holds README.md and no run of this script: choose another folder" in error
    for name in ("metrics.jsonl", "README.md", "unet/mine"):
        assert (tmp_path / "out" / name).read_text() == "mine"


def test_run_stopped_while_it_fetches_its_checkpoint_starts_again(tmp_path, flags, monkeypatch):
    flags = [*flags, f"--checkpoints_to={tmp_path / 'copies'}", LATEST]
    train(*flags)
    (tmp_path / "out").rename(tmp_path / "lost")
    fetched = []

    def stop(url, names, step, folder):
        (folder / "samples").mkdir()
        fetched.append(step)
        raise SystemExit(143)

    with monkeypatch.context() as stopped:
        patch(stopped, "fetch_checkpoint", stop)
        with pytest.raises(SystemExit):
            train(*flags)
    assert fetched == [3] and (tmp_path / "out/samples").exists()
    train(*flags, "--max_train_steps=4")
    assert checkpoints(tmp_path / "out") == {"checkpoint-3", "checkpoint-4"}


def test_an_address_belongs_to_the_runs_of_one_name(tmp_path, flags):
    address = f"--checkpoints_to={tmp_path / 'copies'}"
    train(*flags, address)
    there = {path: path.read_bytes() for path in (tmp_path / "copies").rglob("*") if path.is_file()}
    for more in ([], [LATEST]):
        error = train.refused(*flags, address, f"--output_dir={tmp_path / 'seed-1'}", *more)
        assert "copies holds the run out, and this one is seed-1: choose another address" in error
    assert {path: path.read_bytes() for path in there} == there
    # the same name on another machine
    other = f"--output_dir={tmp_path / 'machine/out'}"
    train(*flags, address, other, LATEST, "--max_train_steps=4")
    assert checkpoints(tmp_path / "machine/out") == {"checkpoint-3", "checkpoint-4"}
    assert (
        f"--checkpoints_to {tmp_path / 'copies'}-again"
        in (tmp_path / "out/report.html").read_text()
    )


def test_an_edited_model_card_is_kept(tmp_path, flags, capfd):
    card = tmp_path / "out/README.md"
    train(*flags)
    written = card.read_text()
    train(*flags, LATEST, "--max_train_steps=4")
    assert card.read_text() != written and "is kept" not in capfd.readouterr().out
    card.write_text(card.read_text().replace("# out", "# My model"))
    edited = card.read_text()
    train(*flags, LATEST, "--max_train_steps=5")
    assert card.read_text() == edited
    assert capfd.readouterr().out.count("README.md is kept as it is, because it was edited") == 1


def test_a_picture_of_the_user_among_the_samples_stays_and_harms_nothing(tmp_path, flags, capfd):
    train(*flags)
    picture = tmp_path / "out/samples/step-best.png"
    picture.write_bytes(Path(tmp_path / "images/0.png").read_bytes())
    train(*flags, LATEST, "--max_train_steps=4")
    assert picture.exists() and "could not be written" not in capfd.readouterr().err
    assert "step-best" not in (tmp_path / "out/README.md").read_text()


# ------------------------------------------------------------------- secrets


@pytest.mark.parametrize("text, hidden", [
    ("https://me:PASSWORD@host/a.tar", "https://***@host/a.tar"),
    ("s3://bucket/run", "s3://bucket/run"),
    ("see https://host/a.png?sig=SECRET&x=1 (404)", "see https://host/a.png?*** (404)"),
    ("zip://a.jpg::https://PASSWORD@host/a.zip?t=SECRET", "zip://a.jpg::https://***@host/a.zip?***"),
    ("s3://bucket/part-??.parquet", "s3://bucket/part-?***"),
    ("hf://datasets/me/photos@main/a.zip", "hf://datasets/me/photos@main/a.zip"),
    ("me@host.org, what = 1?", "me@host.org, what = 1?"),
    (["https://PASSWORD@host", 3], ["https://***@host", 3]),
    ("s3://me:PASS@WORD@host/run", "s3://***@host/run"),
    ("--to='s3://me:PASS/WORD@host/run'", "--to='s3://***@host/run'"),
    ("s3://me:PASS WORD@host/run is full", "s3://***@host/run is full"),
    ("s3://host/run?SECRET is full", "s3://host/run?*** is full"),
    ("(https://host/run?sig=a'SECRET')", "(https://host/run?***')"),
    ("https://host/run#token=SECRET.", "https://host/run?***."),
    ("http://1.1.1.1:90/a is down, ask me@x.org", "http://1.1.1.1:90/a is down, ask me@x.org"),
    ("s3://bucket/photos#1/0?.tar", "s3://bucket/photos?***"),
    ("zip://what?#1@2x.jpg::/data/a;b.zip", "zip://what?#1@2x.jpg::/data/a;b.zip"),
    ("http://[::1]:9000/x?y", "http://[::1]:9000/x?***"),
])  # fmt: skip
def test_hide_secrets_cuts_passwords_and_queries(text, hidden):
    assert hide_secrets(text) == hidden


@pytest.mark.parametrize("address, hidden, repeated", [  # repeated: by an error of a library
    ("s3://me@corp.com:PASSWORD@host/run", "s3://***@host/run", "PASSWORD@host is unknown"),
    ("s3://me:12 PASSWORD@host/run", "s3://***@host/run", "12 PASSWORD@host is unknown"),
    ("ftp://me:PASS/WORD@host/run", "ftp://***@host/run", "no integer value: 'PASS'"),
    ("ftp://me:1%2FPASSWORD@host/run", "ftp://***@host/run", "'1/PASSWORD' is no password"),
    ("s3://me:a\nPASSWORD@host/run", "s3://***@host/run", "PASSWORD"),
    ("https://me:a?PASSWORD@host/x?q=SECRET", "https://?***", "SECRET"),
    ("https://host/a b?sig=c d=SECRET", "https://host/a b?***", "url: /a b?sig=c d=SECRET"),
    ("https://host/x.tar?SECRET", "https://host/x.tar?***", "no x.tar?SECRET"),
    ("https://host/x#t=a&key=SECRET", "https://host/x?***", "the key SECRET"),
    ("zip://a::ftp://me:b::PASSWORD@host/z?t=SECRET", "zip://a::ftp://***@host/z?***", "SECRET"),
])  # fmt: skip
def test_secrets_of_the_command_line_are_hidden_wherever_they_are_repeated(
    address, hidden, repeated
):
    note_secrets(["--seed=3", f"--checkpoints_to={address}", "s3://me:other@host", "x=1"])
    assert hide_secrets(f"{address} is full, ask me@x.org") == f"{hidden} is full, ask me@x.org"
    assert hide_secrets([address]) == [hidden]
    said = hide_secrets(f"can't read it ({repeated})", printed=True)
    assert "***" in said and not [word for word in ("PASS", "SECRET") if word in said]
    note_secrets([hidden])
    assert hide_secrets(repeated, printed=True) == repeated


@pytest.mark.parametrize("address", [
    "http://localhost:9000/bucket/photo-2x.tar",
    "hf://datasets/me/photos@main/a:b",
    "s3://bucket/{0..9}*.tar",
    "zip://a#1;2@3.jpg::photos.zip",
    "gs://bucket/a:b@c/d",
])  # fmt: skip
def test_addresses_without_secrets_stay(address):
    note_secrets([address])
    assert hide_secrets(f"saved to {address}", printed=True) == f"saved to {address}"


SPELLINGS = [  # of the part after ://, X is a secret
    "me:X@host/a", "me:X@host:90/a", "me:X@[::1]:90/a", "X@host/a", "me@corp.org:X@host/a",
    "me:b@X@host/a", "me:b/X@host/a", "me:b?X@host/a", "me:b#X@host/a", "me:b;X@host/a",
    "me:b:X@host/a", "me:b::X@host/a", "me:12 X@host/a", "me:83749261/X@host", "me:80/X@host/a",
    "me:80?X@host", "me:b c X@host/a", "me:b%40X@host/a", "me:b%40X%40host/a", "me:X%40host/a",
    "me:'X'@host/a", "me:\"X\"@host/a", ":X@host/a", "me%3AX@host/a", "me:X@host", "X:@host/a",
    "host/a?sig=X", "host/a?X", "host/a?a.X", "host/a?a/X", "host/a?/X", "host/a?.X", "host/?X",
    "host?X", "host/a?x=1&sig=X", "host/a?x=1;sig=X", "host/a?sig=X#b", "host/a#X", "host/a#sig=X",
    "host/a#a.X", "host/a#/X", "host/a;token=X", "host/a;X", "host/a;X/b", "host/a;X?b", "host;X",
    "host:90/a?X", "host:90/a#X", "host:90/a;X", "host:90?X", "[::1]:90/a?X", "[::1]/a;X",
    "host/a?u=me@corp.org&sig=X", "me:b@host/a?u=me@corp.org&sig=X", "host:90/a?u=a@b&sig=X",
    "host/https://me:X@other/a", "host/https://other/a?X", "me:X@host/https://other/a",
    "host/a::s3://me:X@other/a", "host/a::s3://other/a?X", "host/a%3Fb?X", "host/a??X", "host/a?#X",
    "host/a?q=b c X", "host/a?=X", "me:b://X@host/a", "host/a?u=https://me:X@other",
]  # fmt: skip


@pytest.mark.parametrize("scheme", ["https", "s3", "zip://a.jpg::ftp", "simplecache::memory"])
def test_no_spelling_of_an_address_shows_its_secret(scheme):
    secret = "8rV7qZu2"
    for spelling in SPELLINGS:
        rest = spelling.replace("X", secret)
        address = f"{scheme}://{rest}"
        # what a library may repeat of it: the value of a query, or the password
        part = re.search(r"(?<=[?#;=&])[^?#;=&@]*X[^?#;=&@]*|X", spelling)[0].replace("X", secret)
        note_secrets([f"--checkpoints_to={address}"])
        texts = [
            hide_secrets(address),
            hide_secrets(f"{address} is full ({rest}; {part})", printed=True),
            name_address(address),
        ]
        note_secrets([])
        texts += [
            hide_secrets(f"can't read {rest}, or {part}", address=address),
            hide_secrets(f"'{address}'"),
            hide_secrets(json.dumps({"url": address})),
        ]
        if " " in spelling:  # the end of an address in a text can't be seen
            texts = texts[:4]
        assert len(SPELLINGS) >= 60 and not [text for text in texts if secret in text], spelling
        assert hide_secrets(texts[0]) == texts[0], spelling


def test_names_of_addresses_stay_distinct_and_names_without_a_query_stay():
    addresses = [f"https://me:PASSWORD@host/photo.png?id={number}" for number in range(1000)]
    names = {*map(name_address, addresses)}
    assert len(names) == 1000
    assert all(re.fullmatch(r"https://host/photo\.png~[0-9a-f]{16}", name) for name in names)
    for name in (
        "dogs/one#1?.png",
        "row 3",
        "https://host:80/a b.png",
        "zip://a?b.jpg::b.zip",
        "hf://datasets/me/photos@main/a.png",
        "C:/a;b.png",
        "s3://bucket/a&b=c.png",
    ):
        assert name_address(name) == name


def test_an_address_that_was_recorded_without_its_secret_must_be_given_again(tmp_path, capfd):
    (tmp_path / "run.args").write_text("--checkpoints_to='s3://***@host/run?***'")
    with pytest.raises(SystemExit):
        train.module.parse_args([f"@{tmp_path}/run.args"])
    assert "s3://***@host/run?*** lacks its password or query" in capfd.readouterr().err
    args = train.module.parse_args([f"@{tmp_path}/run.args", "--checkpoints_to=s3://me:b@host/run"])
    assert args.checkpoints_to == "s3://me:b@host/run"


@pytest.mark.parametrize("flag", ["logging_dir", "cache_dir"])
def test_folders_of_this_machine_are_no_addresses(flag, capfd):
    with pytest.raises(SystemExit):
        train.module.parse_args([f"--{flag}=https://me:PASSWORD@host/x"])
    said = capfd.readouterr().err
    assert "https://***@host/x is an address: give a local folder" in said


class SecretFiles(LocalFileSystem):
    """A store whose address holds a password and a signature; its files are in `folder`."""

    protocol = "secret"
    folder = None

    @classmethod
    def _strip_protocol(cls, path):
        is_address = str(path).startswith("secret://")
        return str(cls.folder) if is_address else super()._strip_protocol(path)


def find_secrets(folder):
    """The files below a folder that hold one of the secrets."""
    secrets = (b"PASSWORD", b"SIGNATURE")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in paths if any(secret in path.read_bytes() for secret in secrets)]


def test_a_run_records_and_prints_no_password_and_no_signed_query(tmp_path, flags, capfd):
    fsspec.register_implementation("secret", SecretFiles, clobber=True)
    SecretFiles.folder = tmp_path / "copies"
    address = "secret://me@org:12 PASSWORD@host/run?sig=SIGNATURE&of=b SIGNATURE"
    train(*flags, f"--checkpoints_to={address}", "--report_to=tensorboard")
    assert (tmp_path / "copies/checkpoint-3/trainer_state.json").exists()
    said = capfd.readouterr()
    assert not [secret for secret in ("PASSWORD", "SIGNATURE") if secret in said.out + said.err]
    assert not find_secrets(tmp_path / "out") and not find_secrets(tmp_path / "copies")
    assert "secret://***@host/run?***" in (tmp_path / "out/run.args").read_text()
    (tmp_path / "copies/notes.txt").write_text("mine")
    for path in (tmp_path / "copies").rglob("checkpoints_to.owner"):
        path.write_bytes(b"key another")
    error = train.refused(*flags, f"--checkpoints_to={address}", LATEST)
    assert "secret://***@host/run?*** holds the run another" in error


def test_a_refused_flag_prints_no_password(tmp_path, capfd):
    with pytest.raises(SystemExit):
        train.module.parse_args(["--checkpoints_to=s3:/me:PASSWORD@host", "--seed=-1"])
    with pytest.raises(SystemExit):
        train.module.parse_args(["--seed=https://me:PASSWORD@host/a?sig=SIGNATURE"])
    said = capfd.readouterr().err
    assert "https://***@host/a?***" in said and "SIGNATURE" not in said and "PASSWORD" not in said
