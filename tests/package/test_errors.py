"""Errors: an expected one ends the program with one sentence; others keep their traceback."""

import argparse
import ast
import contextlib
import errno
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import datasets
import pytest
import torch
from conftest import ROOT
from diffusers import DDPMScheduler
from transformers import AutoModel

from diffusion_training.arguments import Flags, make_parser
from diffusion_training.errors.faults import explain, is_machines_fault
from diffusion_training.errors.printing import hide_secrets, note_secrets, printable
from diffusion_training.errors.sentences import (
    CHECKS,
    PEER_ENDED,
    UNDO,
    describe_expected,
    explained,
    fail,
    in_one_sentence,
)
from diffusion_training.errors.stop_signals import end_if_stopped, holding_signals

TRAINER = argparse.Namespace(train_batch_size=1)


def test_fail_prints_one_sentence_with_the_script_name_and_exits_with_1(capsys):
    @in_one_sentence
    def main(args):
        fail(f"{args} is no number: give one")

    with pytest.raises(SystemExit) as stop:
        main("x")
    assert stop.value.code == 1
    assert capsys.readouterr().err == "\ntest_errors.py: x is no number: give one\n"


@pytest.mark.parametrize("world, rank, alone, said", [
    ("1", "0", False, True), ("2", "0", False, True),
    ("2", "1", False, False), ("2", "1", True, True),
    ("1", "1", False, True),  # a single process prints, whatever its rank
])  # fmt: skip
def test_only_one_process_prints_an_error_unless_alone(
    monkeypatch, capsys, world, rank, alone, said
):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_RANK", rank)

    def check_late(args):
        CHECKS.append(lambda: fail("why", alone))
        raise ZeroDivisionError

    for main in (lambda args: fail("why", alone), check_late):
        with pytest.raises(SystemExit) as stop:
            in_one_sentence(main)(None)
        assert stop.value.code == 1 and ("why" in capsys.readouterr().err) is said


@pytest.mark.parametrize("flag, said", [
    ("batch_size", "try a smaller --batch_size (auto finds the largest that fits)"),
    ("connections", "try a smaller --num_cpus or --connections"),
])  # fmt: skip
def test_out_of_memory_suggests_a_flag_of_the_script(capsys, flag, said):
    with pytest.raises(SystemExit):
        in_one_sentence(fail_for_memory)(argparse.Namespace(**{flag: 1}))
    assert said in capsys.readouterr().err


def fail_for_memory(args):
    raise MemoryError


@pytest.mark.parametrize("error, sentence", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to"),
     "there is not enough memory (CUDA out of memory"),
    (MemoryError(), "there is not enough memory (MemoryError): try a smaller --train_batch_size"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: "
                  "can't allocate memory: you"), "enough memory"),
    (OSError(28, "No space left on device"),
     "[Errno 28] No space left on device; files saved before are complete"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
     "a process that loads data was killed"),
    (torch.distributed.DistBackendError("NCCL"),
     "another process has ended: see its message (NCCL)"),
    (RuntimeError("[../gloo/pair.cc:534] Connection closed by peer"),
     "another process has ended: see its message"),
])  # fmt: skip
def test_common_failures_end_in_one_sentence(capsys, monkeypatch, error, sentence):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")  # only this process knows the error

    @in_one_sentence
    def main(args):
        raise error

    with pytest.raises(SystemExit) as stop:
        main(TRAINER)
    said = capsys.readouterr().err.strip()
    status = PEER_ENDED if sentence.startswith("another process") else 1
    assert stop.value.code == status and sentence in said and "\n" not in said


def test_out_of_memory_suggests_batch_size():
    assert "--batch_size" in describe_expected(MemoryError(), argparse.Namespace(batch_size=1))


def test_unexpected_errors_keep_their_traceback():
    with pytest.raises(IndexError):
        in_one_sentence(lambda args: [][1])(TRAINER)
    reraised = (
        "Caught RuntimeError in DataLoader worker process 0.\n"
        "Original Traceback:\nRuntimeError: a bug of mine"
    )
    assert describe_expected(RuntimeError(reraised), TRAINER) is None


def test_signals_outside_training_end_the_run_and_handlers_are_restored(capsys):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with pytest.raises(SystemExit) as stop:
            in_one_sentence(lambda args, number=number: os.kill(os.getpid(), number))(None)
        assert stop.value.code == code
        said = capsys.readouterr()
        assert (
            f"Stopped by {signal.Signals(number).name}; saved files are complete" in said.out
            and not said.err
        )
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_signal_ends_the_run_even_if_its_exception_is_swallowed(capsys):
    def swallowed(args):
        with contextlib.suppress(SystemExit):  # as in a destructor
            os.kill(os.getpid(), signal.SIGTERM)
        end_if_stopped()

    def swallowed_at_the_end(args):
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)

    def caught_as_an_error(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            fail("it holds no model")

    for main in (swallowed, swallowed_at_the_end, caught_as_an_error):
        with pytest.raises(SystemExit) as stop:
            in_one_sentence(main)(None)
        said = capsys.readouterr()
        assert stop.value.code == 143 and "Stopped by SIGTERM" in said.out and not said.err


@pytest.mark.parametrize("flags, words", [
    ({}, "the same command"),
    ({"resume_from_checkpoint": "latest"}, "the same command"),
    ({"resume_from_checkpoint": None}, "the same command with --resume_from_checkpoint latest"),
    ({"resume_from_checkpoint": "checkpoint-2"}, "command with --resume_from_checkpoint latest"),
])  # fmt: skip
def test_a_stopped_script_names_the_command_that_continues(capsys, flags, words):
    """Without the flag, a trainer refuses a folder with checkpoints."""
    with pytest.raises(SystemExit):
        in_one_sentence(lambda args: os.kill(os.getpid(), signal.SIGTERM))(
            argparse.Namespace(**flags)
        )
    assert f"{words} continues from here" in capsys.readouterr().out


def test_a_signal_in_a_destructor_is_reported_once(capsys, monkeypatch):
    """Python would print the traceback of its exception, and the run would go on."""

    class Ends:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    with pytest.raises(SystemExit) as stop:
        in_one_sentence(lambda args: Ends() and None)(None)
    assert stop.value.code == 143 and "Stopped by SIGTERM" in capsys.readouterr().out
    assert not lost


def test_ctrl_c_while_the_program_ends_prints_no_traceback():
    program = """if True:
        import atexit, gc, os, signal, time
        from diffusion_training.errors.sentences import in_one_sentence

        def end():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

        gc.disable()  # as the parser of a script does
        in_one_sentence(lambda args: atexit.register(end))(None)
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_ctrl_c_during_the_imports_of_a_script_prints_no_traceback(is_ignored):
    program = """if True:
        import os, signal
        from diffusion_training.arguments import make_parser

        make_parser("script.py", "a script").parse_args()
        os.kill(os.getpid(), signal.SIGINT)
        print("ignored")
    """
    action = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    prepare = lambda: signal.signal(signal.SIGINT, action)
    options = {"cwd": ROOT, "capture_output": True, "preexec_fn": prepare}
    done = subprocess.run([sys.executable, "-c", program], **options)
    expected = (0, b"ignored\n") if is_ignored else (-signal.SIGINT, b"")
    assert (done.returncode, done.stdout, done.stderr) == (*expected, b"")


UNEXPECTED = """
import gc, sys
from diffusion_training.arguments import make_parser
from diffusion_training.errors.sentences import in_one_sentence

@in_one_sentence
def main(args):
    raise KeyError("no bucket at s3://me:hunter22@host/photos, key hunter22")

parser = make_parser(__file__, "a script")
parser.add_argument("--train_data_dir")
main(parser.parse_args())
"""


def test_the_traceback_of_an_unexpected_error_hides_secrets(tmp_path):
    (tmp_path / "script.py").write_text(UNEXPECTED)
    command = [sys.executable, "script.py", "--train_data_dir=s3://me:hunter22@host/photos"]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, **options, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr, done.stderr
    assert "KeyError: 'no bucket at s3://***@host/photos, key ***'" in done.stderr
    assert "hunter22" not in done.stdout + done.stderr


def test_printing_non_ascii_to_an_ascii_terminal_does_not_fail(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    in_one_sentence(lambda args: print("Müll.png", flush=True))(None)
    assert shown.buffer.getvalue() == b"M\\xfcll.png\n"


def test_explain_gives_one_line(tmp_path):
    wrapped = datasets.exceptions.DatasetGenerationError(
        "An error occurred while generating the dataset"
    )
    wrapped.__cause__ = ValueError("a column\n  too few")
    assert explain(wrapped) == "a column too few"
    worker = (
        "Caught OSError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n  x\nOSError: y"
    )
    assert explain(OSError(worker)) == "OSError: y"
    assert (
        explain(OSError("cannot identify image file <_io.BytesIO object at 0x7f>"))
        == "cannot identify image file"
    )
    with pytest.raises(OSError, match="does not appear to have a file") as offline:
        DDPMScheduler.from_pretrained("some/pipeline", subfolder="scheduler", cache_dir=tmp_path)
    assert explain(offline.value).startswith("scheduler/scheduler_config.json of some/pipeline is")
    for load in (AutoModel.from_pretrained, DDPMScheduler.from_pretrained):
        with pytest.raises(Exception) as nowhere:
            load("/nowhere/model")
        assert explain(nowhere.value).startswith("there is no such folder, and no model on the hub")
    with pytest.raises(UnicodeEncodeError) as name:
        "images/\udcff.png".encode()
    said = "'images/\\udcff.png' can't be read as text: rename it, or write it in UTF-8"
    assert explain(name.value) == said
    assert explain(KeyError()) == "KeyError" and len(explain(ValueError("x" * 1000))) == 404


def test_explained_wraps_errors_but_passes_refusals():
    with (
        pytest.raises(SystemExit, match=r"^that can't be read \(no such thing\)$"),
        explained("that can't be read"),
    ):
        raise ValueError("no such thing")
    with pytest.raises(SystemExit, match="^choose another$"), explained("that can't be read"):
        fail("choose another")
    # torch raises it wherever the main thread is
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(RuntimeError) as passed, explained("that can't be read"):
        raise killed
    assert passed.value is killed


def list_patterns():
    """The regular expressions of errors/: compiled ones, and those in calls of `re`."""
    calls = [f"re.{name}" for name in "compile search match fullmatch sub split findall".split()]
    for path in sorted((ROOT / "diffusion_training/errors").glob("*.py")):
        module = importlib.import_module(f"diffusion_training.errors.{path.stem}")
        yield from (value for value in vars(module).values() if isinstance(value, re.Pattern))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                with contextlib.suppress(ValueError):  # it is made of other values
                    yield re.compile(ast.literal_eval(node.args[0]))


# what a word of a megabyte may be made of
PIECES = [
    "a", ".", "/", "?", ":", "=", "[", " ", "\n", "://", "::", "://a:", "://a:b ", "://@", "://[",
    "a@", "models--", "models--a--b", "models--a--b/snapshots/", "--", "-a", "/a/resolve/",
    "/a/b/resolve/c/", "Dataset 'a' ", ".tmp-", ".tmp-0123456789a", "?a=b&", " <_io", "iVBORw0K/",
]  # fmt: skip


@pytest.mark.ci
def test_no_pattern_of_errors_takes_more_than_a_second_for_a_megabyte():
    patterns = [*list_patterns()]
    assert len(patterns) > 8
    for piece in PIECES:
        text = piece * (10**6 // len(piece))
        for pattern in patterns:
            begin = time.process_time()
            pattern.sub("", text)
            took = time.process_time() - begin
            assert took < 2, f"{pattern.pattern} takes {took:.1f} s for {piece!r}"
    note_secrets(["--checkpoints_to=s3://me:PASSWORD@host/run?sig=SIGNATURE"])
    for piece in PIECES:
        text = piece * (10**6 // len(piece))
        begin = time.process_time()
        with pytest.raises(SystemExit) as refused:
            fail(f"{text} is no image ({explain(ValueError(text))})")
        hide_secrets(f"https://{text}", printed=True, address=f"s3://{text}")
        took = time.process_time() - begin
        assert took < 8 and len(str(refused.value)) < 2100, f"{took:.1f} s for {piece!r}"
    note_secrets([])


def test_a_sentence_shows_no_control_character_and_not_all_of_a_long_value(capsys):
    value = "\x1b[31m" + "word " * 1000 + "end"
    parser = make_parser("train.py", "Train.")
    parser.add_argument("--seed", type=int)
    for refuse in (
        lambda: in_one_sentence(lambda args: fail(f"no {value}: give\nanother"))(None),
        lambda: in_one_sentence(raise_error)(argparse.Namespace()),
        lambda: parser.parse_args([f"--seed={value}"]),
        lambda: parser.parse_args([f"--train_data_dir={value}"]),
    ):
        with pytest.raises(SystemExit):
            refuse()
        said = capsys.readouterr().err
        assert "\x1b" not in said and len(said) < 2300 and "end" in said
        assert "?[31m" in said or r"\x1b[31m" in said


def raise_error(args):
    raise OSError("no file \x1b[31m end")


def test_printable_replaces_control_characters():
    assert printable("a\x1b[31mb\nc\u202ed é.png") == "a?[31mb?c?d é.png"


def test_main_runs_twice_in_a_thread_with_read_only_args():
    args, seen = Flags(rate=1.0), []

    @in_one_sentence
    def main(args):
        with pytest.raises(AttributeError, match="args.rate is read-only"):
            args.rate *= 2
        seen.append(args.rate)

    for _ in range(2):
        thread = threading.Thread(target=main, args=(args,))
        thread.start()
        thread.join()
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("error, machines", [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory"), True),
    (OSError(errno.EMFILE, "many"), True), (RuntimeError("could not create a primitive"), True),
    (RuntimeError("can't start new thread"), True), (OSError(errno.ENFILE, "many"), True),
    (OSError(errno.EIO, "disk"), True), (OSError(errno.ESTALE, "nfs"), True),
    (OSError(errno.ENOSPC, "full"), True), (OSError(errno.ENOTCONN, "away"), True),
    (ConnectionError("reset"), True), (TimeoutError(), True),
    (OSError(errno.ENOMEM, "memory"), True),
    (FileNotFoundError(errno.ENOENT, "gone"), False), (OSError(errno.ENAMETOOLONG, "long"), False),
    (OSError(errno.ELOOP, "links"), False), (NotADirectoryError(errno.ENOTDIR, "file"), False),
    (PermissionError(errno.EACCES, "not for you"), False),
    (IsADirectoryError(errno.EISDIR, "folder"), False),
    (OSError("image file is truncated"), False), (ValueError("a bad header"), False),
    (SyntaxError("not PNG"), False),
    (FileNotFoundError("%s not found. The URL contains glob", "http://host/a?b"), False),
])  # fmt: skip
def test_is_machines_fault_separates_machine_faults_from_bad_rows(error, machines):
    assert is_machines_fault(error) is machines


def test_undo_runs_only_when_main_fails():
    undone = []
    for fails in (False, True):

        @in_one_sentence
        def main(args, fails=fails):
            UNDO.append(lambda: undone.append(fails))
            return fail("no model") if fails else None

        with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
            main(None)
        assert undone == [True] * fails


@pytest.mark.parametrize(
    "said", ["could not create a primitive", "can't start new thread", "std::bad_alloc"]
)
def test_out_of_memory_is_recognized_in_every_wording(said):
    assert "there is not enough memory" in describe_expected(RuntimeError(said), TRAINER)


@pytest.mark.parametrize("error", [None, ValueError])
def test_holding_signals_delays_a_signal_to_the_end_of_the_block(capsys, error):
    reached = []

    def main(args):
        with holding_signals():
            signal.raise_signal(signal.SIGTERM)
            reached.append("the end of the block")
            if error:
                raise error
        reached.append("what follows")

    with pytest.raises(SystemExit) as stop:
        in_one_sentence(main)(TRAINER)
    assert stop.value.code == 143 and reached == ["the end of the block"]
    assert "Stopped by SIGTERM" in capsys.readouterr().out


@pytest.mark.parametrize("with_triton", [True, False])
def test_nothing_stays_frozen_at_exit_where_triton_would_report_leaks(with_triton):
    code = f"""if True:
        import argparse, atexit, gc, sys
        from diffusion_training.errors.sentences import in_one_sentence
        sys.modules |= {{"triton": None}} if {with_triton} else {{}}
        gc.disable()  # as from the flags on, see `Parser.parse_known_args`
        in_one_sentence(lambda args: print(gc.get_freeze_count() > 0))(argparse.Namespace())
        atexit._run_exitfuncs()
        print(gc.get_freeze_count() > 0)
    """
    env = os.environ | {"PYTHONPATH": ""}  # without tests/children, which freezes at exit
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(not with_triton)], done.stderr
