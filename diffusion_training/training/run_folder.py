"""Open and lock the output folder of a run, and write its files, completely or not at all."""

import contextlib
import os
import secrets
import time
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock

from diffusion_training.arguments import Flags, format_args, name_start
from diffusion_training.errors.printing import hide_secrets
from diffusion_training.errors.sentences import UNDO, explained, fail, surviving
from diffusion_training.files import (
    check_output_dir,
    clean,
    delete_if_empty,
    fits,
    lock_folder,
    parse_json,
    saving,
)
from diffusion_training.launch import Launch
from diffusion_training.training.keeping.best import restore_best
from diffusion_training.training.keeping.checkpoints import (
    find_checkpoint,
    find_checkpoints,
    find_samples,
    find_start,
    read_start,
    read_state,
)
from diffusion_training.training.keeping.posthoc import FOLDER as SNAPSHOTS
from diffusion_training.training.keeping.posthoc import prune_snapshots
from diffusion_training.training.keeping.writer import Writer

if TYPE_CHECKING:
    from diffusion_training.training.keeping.copies import Copies

# files that a user puts into the folder of a run, to ask for samples or a checkpoint
REQUESTS = ("sample-now", "save-now")


@dataclass(frozen=True)
class RunFolder:
    """The locked folder of a run, and the checkpoint to begin from."""

    script: str  # the file that is run
    lock: BaseFileLock | None  # None except on the first process
    checkpoint: Path | None  # to resume from
    checkpoint_settings: dict[str, Any]  # those of the run that wrote it; {} without one
    hub_model_id: str | None
    init_checkpoint: Path | None = None  # of --init_from, unless the run resumes another
    # checkpoint with the models' configs, or those of adapters; None without --init_from or --rank
    config_checkpoint: Path | None = None
    command: str = ""  # the content of run.args
    checkpoint_step: int = -1  # -1 without a checkpoint to resume from
    tracker_id: str | None = None  # a resumed run keeps it, so it is one run in wandb
    copies: "Copies | None" = None  # at --checkpoints_to; None except on the first process
    writer: Writer = field(default_factory=Writer)  # of checkpoints

    def read_state(self, num_images: int, args: Namespace) -> dict[str, Any]:
        """The state in which the run begins; see `read_state`."""
        if self.init_checkpoint:
            return read_start(self.init_checkpoint, args)
        return read_state(self.checkpoint, num_images)

    def settings(self) -> dict[str, Any]:
        return {"hub_model_id": self.hub_model_id, "tracker_id": self.tracker_id}


def complete_args(args: Namespace, *found: Any, **others: Any) -> Flags:
    """The flags with the values that the run found for them, such as --train_batch_size auto.

    Checkpoints, trackers, the report and run.args record them, without passwords in addresses.

    found: `Launch`, `RunFolder`, `Data`, `Plan`. others: single values.
    """
    completed = dict(vars(args))
    for each in found:
        completed |= each.settings()
    completed = {name: hide_secrets(value) for name, value in (completed | others).items()}
    return Flags(args.given, args.typed, **completed)


def open_run(launch: Launch, script: str, args: Namespace) -> RunFolder:
    """Make, lock and clean --output_dir, and make the hub repository. script: the file that is run.

    The files of an earlier run stay until `begin_run`.
    """
    check_output_dir(vars(args))
    output_dir = Path(args.output_dir)
    copies_to = None if args.find_lr else args.checkpoints_to
    given = args.resume_from_checkpoint
    if copies_to:  # here, because most runs make no copies
        from diffusion_training.training.keeping.copies import (
            Copies,
            name_checkpoint,
            share_checkpoint,
        )

        given = given and name_checkpoint(given, copies_to)
    command = format_args(vars(complete_args(args, launch)), name_start(Path(script).name))
    lock = None
    copies = None
    if launch.is_main:
        if not output_dir.exists():
            UNDO.append(partial(delete_if_empty, output_dir))
        lock = lock_folder(
            output_dir, output_dir, lambda names: is_of_run(output_dir, names), "run of this script"
        )
        for best in (output_dir / "best", output_dir / "best-before"):
            keeps_best = args.save_best or vars(args).get("save_best_metric")
            if keeps_best and best.exists() and not (best / "held_out.json").is_file():
                fail(
                    f"--save_best would replace {best}, which is not from a run: rename that folder"
                )
        for name in ("samples", SNAPSHOTS):
            path = output_dir / name
            if os.path.lexists(path) and not path.is_dir():
                fail(f"{path} is not a folder, and the run needs one there: rename this file")
        with explained(f"--output_dir {output_dir} can't be written to"):
            clean(output_dir)
        # it marks the folder as a run's, before anything is fetched into it
        if not args.find_lr and not (output_dir / "run.args").exists():
            write_command(command, output_dir)
        if copies_to:
            copies = Copies(copies_to, output_dir, args.checkpoints_total_limit)
            copies.open()
            copies.fetch(given)
    launch.accelerator.wait_for_everyone()
    folder = output_dir
    if copies_to:
        folder = share_checkpoint(launch.accelerator, copies, copies_to, output_dir)
    if folder != output_dir:
        given = "latest"  # the only one there
    # On all processes, so that all of them stop if there is an error
    checkpoint = find_checkpoint(given, str(folder))
    state = read_state(checkpoint, None)
    hub_model_id = args.hub_model_id
    if launch.is_main and args.push_to_hub and not args.find_lr:
        # imported here, because few runs upload their result
        from diffusion_training.training.showing.hub import make_repository

        hub_model_id = make_repository(args)
    init_from = vars(args).get("init_from")
    init_checkpoint = None if checkpoint else find_start(init_from)
    tracker_id = None
    if args.report_to in ("wandb", "all"):
        tracker_id = os.environ.get("WANDB_RUN_ID")  # if the user has set it
        # a run that resumes a checkpoint of another folder is a new run
        if checkpoint and checkpoint.parent.resolve() == output_dir.resolve():
            tracker_id = tracker_id or state["settings"].get("tracker_id")
        tracker_id = tracker_id or secrets.token_hex(4)
    return RunFolder(
        script=script,
        lock=lock,
        checkpoint=checkpoint,
        checkpoint_settings=state["settings"],
        hub_model_id=hub_model_id,
        init_checkpoint=init_checkpoint,
        config_checkpoint=(
            (checkpoint or init_checkpoint) if init_from or vars(args).get("rank") else None
        ),
        command=command,
        checkpoint_step=state["global_step"] if checkpoint else -1,
        tracker_id=tracker_id,
        copies=copies,
    )


def take_requests(output_dir: Path) -> list[str]:
    """Remove the files of `REQUESTS` from a run's folder, and return their names.

    Call it on the first process.
    """
    taken = [name for name in REQUESTS if (output_dir / name).is_file()]
    for name in taken:
        (output_dir / name).unlink()
    return taken


def begin_run(run: RunFolder, output_dir: Path) -> None:
    """Replace the files of an earlier run, once this one works: a folder holds only one run.

    Call it on the first process.
    """
    take_requests(output_dir)  # of before the first step
    if run.checkpoint is None:
        for old in [*find_samples(output_dir), *(output_dir / "samples").glob("before-??.png")]:
            old.unlink()
    restore_best(output_dir, run.checkpoint_step)
    prune_snapshots(output_dir, run.checkpoint_step)
    write_command(run.command, output_dir)


def is_of_run(folder: Path, names: set[str]) -> bool:
    """Whether a folder with files of these names is a run's, by what its files hold.

    A latent cache is not, though it has a run.args, too.
    """
    if "cache.json" in names:
        return False
    if find_checkpoints(folder):  # perhaps only checkpoints were copied here
        return True
    with contextlib.suppress(OSError, ValueError):
        if "run.args" in names:
            # bytes, as a name among the flags may have others than UTF-8
            return (folder / "run.args").read_bytes().split(b"\n")[0].endswith(b" @run.args")
        if "find_lr.json" in names:
            return fits(parse_json((folder / "find_lr.json").read_text()), {"smoothed": list})
    return False


def write_command(command: str, output_dir: Path) -> None:
    """Write run.args, the flags of a command, to repeat it."""
    with saving(output_dir, "run.args") as unfinished:
        (unfinished / "run.args").write_bytes(os.fsencode(command))


def end_run(launch: Launch, run: RunFolder, done: str, files: list[str], args: Namespace) -> None:
    """Upload if asked for, print `done`, and release everything. files: patterns to upload."""
    accelerator = launch.accelerator
    accelerator.wait_for_everyone()
    if launch.num_processes > 1:
        # torch 2.11 can hang at exit if gloo's thread has not finished the last gather
        time.sleep(0.1)
    if launch.is_main and args.push_to_hub and not args.find_lr:
        from diffusion_training.training.showing.hub import upload_run

        upload_run(run.hub_model_id, args.output_dir, files)
    with surviving("the trackers could not be closed"):
        accelerator.end_training()
    accelerator.print(done)  # after wandb's summary
    if run.lock is not None:
        run.lock.release(force=True)
