"""Find, write, prune, check and load checkpoints. Nothing is unpickled."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch.utils.serialization import config

from diffusion_training import __version__
from diffusion_training.batches import Models
from diffusion_training.draws import KEYS
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import checksum_files, delete, fits, saving
from diffusion_training.models import KEEP, is_adapted
from diffusion_training.training.step.optimizers import load_optimizer
from diffusion_training.training.step.sharding import gather_model, gather_state, load_weights_of

# Settings that decide what a model learns: --init_from prints which have changed
OBJECTIVE = (
    "shift",
    "weighting_scheme",
    "logit_mean",
    "logit_std",
    "mode_scale",
    "min_timestep",
    "max_timestep",
    "snr_gamma",
    "noise_offset",
    "input_perturbation",
    "clip_skip",
    "embedded_guidance_scale",
)

# what trainer_state.json holds in any checkpoint
STATE = {
    "version": str,
    "keys": int,
    "global_step": int,
    "data_step": int,
    "images_seen": int,
    "checksums": dict,
    "settings": {"num_images": int, "optimizer": str, "held_out": (None, {"of": str})},
}


def find_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    steps = {}
    for state in Path(output_dir).glob("checkpoint-*/trainer_state.json"):
        step = state.parent.name.removeprefix("checkpoint-")
        if step.isdecimal():
            steps[state.parent] = int(step)
    return sorted(steps, key=lambda path: steps[path])


def find_samples(output_dir: str | Path) -> list[Path]:
    """Return the samples of a run in its folder, oldest first; other pictures are the user's."""
    paths = sorted(Path(output_dir, "samples").glob("step-*.png"))
    return [
        path for path in paths if path.is_file() and path.stem.removeprefix("step-").isdecimal()
    ]


def find_checkpoint(given: str | None, output_dir: str) -> Path | None:
    """Return the checkpoint that --resume_from_checkpoint means, or None to start afresh.

    Stops with an error if the machines do not find the same one.
    """
    checkpoints = find_checkpoints(output_dir)
    path = None
    if given == "latest":
        if checkpoints:
            path = checkpoints[-1]
        elif os.environ.get("RANK", "0") == "0":
            print(f"No checkpoint in {output_dir} yet: starting afresh")
    elif given:
        # --output_dir first, because the working directory may have a folder of the same name
        path = Path(output_dir, given)
        if not path.is_dir():
            path = Path(given)
        if not (path / "trainer_state.json").is_file():
            fail(
                f"--resume_from_checkpoint {given} is not a complete checkpoint, neither as a path "
                f"nor in {output_dir}: choose another, or latest"
            )
        # pruning and `latest` go by the step number, so no newer checkpoint may remain
        if checkpoints and path.resolve() != checkpoints[-1].resolve():
            advice = "delete the newer ones, or choose another --output_dir"
            fail(f"{checkpoints[-1]} is newer than {path}, or of another run: {advice}")
    elif checkpoints:
        advice = "resume it with --resume_from_checkpoint latest, or choose another --output_dir"
        fail(f"{output_dir} holds {checkpoints[-1].name} of an earlier run: {advice}")
    if len(set(gather_object([path and path.name]))) > 1:
        fail(
            "the machines found different checkpoints: choose an --output_dir that they share, "
            "or pass --checkpoints_to"
        )
    return path


def save_checkpoint(
    path: Path,
    state: dict[str, Any],
    models: Iterable[tuple[str, torch.nn.Module]],
    moments: Callable[[], dict[str, Any]],
    scale: dict[str, Any],
    write_extra: Callable[[Path], None] | None,
) -> None:
    """Write checkpoint-N, on the first process.

    It holds the weights of `models`, each in a folder named after it, the optimizer and `state`.
    This is all that a resumed run needs: data order and noise follow from the step.

    models: (name, model), whole. moments: returns the state of the optimizer. scale: see
    `get_scale`. write_extra: writes files for other programs into the folder.
    """
    with saving(path.parent, path, ".tmp-saving-checkpoint") as unfinished:
        if path.exists() and path not in find_checkpoints(path.parent):
            raise FileExistsError("it exists and is not a checkpoint: move it away")
        folder = unfinished / path.name
        for name, model in models:
            save_weights(model, folder / name)
        if write_extra:
            write_extra(folder)
        # `checksum_files` covers all bytes. The zip's own checksum takes as long as writing does.
        with config.patch({"save.compute_crc32": False}):
            torch.save(moments(), folder / "optimizer.bin")
            torch.save(scale, folder / "scaler.bin")
        state = {**state, "version": __version__, "keys": KEYS}
        state["checksums"] = checksum_files(folder)
        own = xxhash.xxh3_128(json.dumps(state).encode())  # covers the rest of the file
        state["checksums"]["trainer_state.json"] = own.hexdigest()
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))


def get_scale(accelerator: Accelerator) -> dict[str, Any]:
    """The state of the scaler of fp16, empty without one."""
    return accelerator.scaler.state_dict() if accelerator.scaler else {}


def gather_models(models: Models) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each name and model, whole on the first process. Call it on every process."""
    for name, model in models.items():
        yield name, gather_model(model)


def give_parts(models: Models, optimizer: torch.optim.Optimizer) -> None:
    """Give the parts of sharded models and moments that the first process gathers, in order."""
    for _ in gather_models(models):
        pass
    gather_state(optimizer)


def prune_checkpoints(saved: Path, total_limit: int | None, held: Path | None = None) -> None:
    """Delete the oldest checkpoints beyond --checkpoints_total_limit.

    saved: the newest, which is never deleted. held: one that is still being copied.
    """
    if total_limit is None:
        return
    others = [checkpoint for checkpoint in find_checkpoints(saved.parent) if checkpoint != saved]
    for checkpoint in others[: max(0, len(others) - total_limit + 1)]:
        if checkpoint != held:
            delete(checkpoint)


def save_weights(model: torch.nn.Module, folder: Path) -> None:
    """Save a model for `from_pretrained`, a LoRA as its adapter, other modules as their weights."""
    if is_adapted(model):
        model.adapter.save(model, folder)
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")


def read_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_weights` wrote."""
    if is_adapted(model):
        model.adapter.load(model, folder)
    elif (folder / "adapter_config.json").is_file():
        fail(f"{folder} is a LoRA, but without --rank the whole model is trained: {KEEP}")
    elif hasattr(model, "save_pretrained"):
        load_weights_of(model, folder)
    else:
        model.load_state_dict(load_file(folder / "model.safetensors"))


def read_state(checkpoint: Path | None, num_images: int | None) -> dict[str, Any]:
    """Return a checkpoint's progress in training and data, and its settings; zeros for None.

    num_images: images per epoch; None if the position in the data does not matter.
    """
    if checkpoint is None:
        return {"global_step": 0, "data_step": 0, "images_seen": 0, "settings": {}}
    with explained(f"{checkpoint} is damaged; resume from another or choose a new --output_dir"):
        if not (checkpoint / "trainer_state.json").is_file():  # a pipe might never end
            raise ValueError("trainer_state.json is not a file")
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        own = state["checksums"].pop("trainer_state.json", None)
        if own != xxhash.xxh3_128(json.dumps(state).encode()).hexdigest():
            raise ValueError("trainer_state.json has changed since it was written")
        if not fits(state, STATE):
            raise ValueError("trainer_state.json does not have the fields of a checkpoint")
        if state["keys"] != KEYS:
            fail(
                f"{checkpoint} was made by version {state['version']}, which draws "
                "other noise and another order: resume with that version"
            )
        before = state["settings"]["num_images"]
        if num_images not in (before, None):  # other images: the current epoch starts again
            if sys.maxsize in (before, num_images):
                way = "with" if before == sys.maxsize else "without"
                fail(f"{checkpoint} was made {way} --streaming: resume it {way} --streaming")
            state["images_seen"] = state["images_seen"] // before * num_images
    return state


def load_models_from(path: Path, models: Models, state: dict) -> None:
    """Load a checkpoint's weights.

    Raises ValueError if a file that a resumed run reads differs from its checksum in `state`. Other
    files may come and go: .DS_Store, a preview, or a LoRA file that the user moves.
    """
    present = checksum_files(path)
    for name, checksum in state["checksums"].items():
        is_read = "/" in name or name in ("optimizer.bin", "scaler.bin")
        if is_read and present.get(name) != checksum:
            raise ValueError(f"{name} has changed since it was written")
    for name, model in models.items():
        folder = path / name
        if not folder.is_dir():  # without an average, --use_ema starts from the trained weights
            folder = path / name.removesuffix("_ema")
        read_weights(model, folder)


def list_added(models: Models, state: dict) -> list[str]:
    """The models that a checkpoint lacks, because the script added them later."""
    written = {Path(name).parts[0] for name in state["checksums"]}
    return [name for name in models if not {name, name.removesuffix("_ema")} & written]


def find_start(init_from: str | None) -> Path | None:
    """Return the checkpoint that --init_from names, itself or by its run; None without the flag."""
    if init_from is None:
        return None
    if (Path(init_from) / "trainer_state.json").is_file():
        return Path(init_from)
    checkpoints = find_checkpoints(init_from)
    if not checkpoints and (Path(init_from) / "model_index.json").is_file():
        fail(
            f"--init_from {init_from} is a pipeline, not a checkpoint: pass it as "
            "--pretrained_model_name_or_path, and the run begins at step 0"
        )
    if not checkpoints:
        fail(f"--init_from {init_from} is neither a complete checkpoint nor a run with one")
    return checkpoints[-1]


def read_start(start: Path, args: Namespace) -> dict[str, Any]:
    """Return the state in which a run with --init_from begins.

    It continues from the step of the other run's checkpoint, but its data starts from the
    beginning.
    """
    state = read_state(start, None)
    before = state.pop("settings")
    for name in ("prediction_type", "rescale_betas_zero_snr"):  # they decide what the model learns
        if name not in before:
            continue
        if not hasattr(args, name):
            fail(f"{start} is of another trainer: this one has no --{name}")
        now = vars(args)[name]
        if before[name] != now:
            fail(
                f"{start} was trained with {name} {before[name]}, not {now}: "
                "keep the flag as it was"
            )
    step = state["global_step"]
    if args.max_train_steps and args.max_train_steps <= step:
        fail(
            f"--max_train_steps {args.max_train_steps} must be above {step}: this run counts from "
            f"the step of {start}"
        )
    state.pop("cuts", None)
    return state | {"images_seen": 0, "settings": {}, "before": before}


def check_start(start: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Stop with an error if the two runs do not hold out the same part of all images.

    Otherwise one run would train on images that the other holds out. before: the settings of the
    checkpoint `start`. settings: those of this run.
    """
    names = ("holdout", "seed", "held_out_below")
    holds_out = bool(settings["held_out"])
    if not before["held_out"]:
        if holds_out:
            fail(
                f"{start} held out no images, so it may have been trained on those that --holdout "
                "sets aside: remove --holdout"
            )
        return
    if not holds_out or any(before[name] != settings[name] for name in names):
        advice = "and keep the images as they were"
        if before["holdout"] < 1:
            advice = "and keep the names of the images"
        fail(
            f"{start} held out other images than this run, so one run would be measured on images "
            f"that the other trains on: pass --holdout {before['holdout']:g} "
            f"--seed {before['seed']}, {advice}"
        )


def load_start(
    accelerator: Accelerator, start: Path, models: Models, state: dict, settings: dict[str, Any]
) -> None:
    """Load the weights of --init_from; the averaged weights start from its averaged weights.

    Models that the other run did not have keep the weights that they start with.

    settings: what a checkpoint records.
    """
    before = state["before"]
    check_start(start, before, settings)
    added = list_added(models, state)
    known = {name: model for name, model in models.items() if name not in added}
    with explained(f"{start} is damaged or from another model"):
        load_models_from(start, known, state)
    if added:
        accelerator.print(f"Not in {start}, so these start anew: {', '.join(added)}")
    changes = describe_changes(before, settings, OBJECTIVE)
    accelerator.print(
        f"Starting from the weights of {start}, at step {state['global_step']}{changes}"
    )


def describe_changes(before: dict[str, Any], settings: dict[str, Any], names: Iterable[str]) -> str:
    """The settings that have changed, to be printed, such as ", shift 2.0 -> None"."""
    changes = ""
    for name in names:
        if name in settings and before.get(name, settings[name]) != settings[name]:
            changes += f", {name} {before[name]} -> {settings[name]}"
    return changes


def check_held_out(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Stop with an error if a resumed run would hold out other images than its checkpoint."""
    held = settings["held_out"]
    held_before = before["held_out"]
    if not held or held == held_before:
        return
    if not held_before:
        fail(
            f"{path} held out no images, so it was trained on those that --holdout sets aside: "
            "remove --holdout"
        )
    if held["of"] != held_before["of"]:
        fail(
            f"{path} was trained on {held_before['of']}, this run on {held['of']}, so the held-out "
            "images can't be compared: keep the data as it was, or remove --holdout"
        )
    fail(
        f"{path} held out other images, so it may have been trained on some that this run holds "
        "out: keep images, --holdout and --seed as they were, or remove --holdout"
    )


def load_checkpoint(
    accelerator: Accelerator,
    path: Path,
    models: Models,
    optimizer: torch.optim.Optimizer,
    state: dict,
    settings: dict,
) -> None:
    """Load checkpoint-N into models, optimizer and fp16 scaler, and print changed settings."""
    before = state["settings"]
    check_held_out(path, before, settings)
    kind = before["optimizer"]
    if kind != settings["optimizer"]:
        fail(
            f"{path} was trained with --optimizer {kind}, not {settings['optimizer']}: keep "
            f"--optimizer {kind}, or choose a new --output_dir"
        )
    added = list_added(models, state)
    if any("_posthoc_" in name for name in added):
        fail(
            f"{path} has other averages of --posthoc_ema: keep the flag as it was, or choose a new "
            "--output_dir and begin with --init_from"
        )
    if added:
        fail(
            f"{path} has no weights of {', '.join(added)}: a module can be added only to a new "
            "run; begin one with --init_from or --pretrained_model_name_or_path"
        )
    try:
        load_models_from(path, models, state)
        # the processes of a machine share mapped memory
        saved = torch.load(path / "optimizer.bin", map_location="cpu", weights_only=True, mmap=True)
        load_optimizer(optimizer, saved)
        scale = torch.load(path / "scaler.bin", weights_only=True)
        if accelerator.scaler is not None and scale:
            accelerator.scaler.load_state_dict(scale)
    except Exception as error:
        reason = str(error).strip().split("\n")[-1]
        fail(
            f"{path} is damaged or from another model ({reason}); resume from another or "
            "choose a new --output_dir"
        )
    names = [name for name in settings if not name.startswith(("resume_from", "held_out"))]
    accelerator.print(f"Resuming from {path}{describe_changes(before, settings, names)}")
