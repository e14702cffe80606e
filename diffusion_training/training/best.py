"""Keep the weights with the lowest held-out loss in best/."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusion_training.files import delete, fits, saving
from diffusion_training.training.checkpoints import find_checkpoints
from diffusion_training.training.signs import HELD_OUT


def restore_best(output_dir: Path, reached: int) -> None:
    """Restore best/ as it was at the step `reached`. A new run, with -1, deletes it."""
    best, before = output_dir / "best", output_dir / "best-before"
    for folder in (best, before):
        if read_best(folder).get("step", -1) > reached:
            delete(folder)
    if (before / "held_out.json").exists():  # else it is the user's
        if best.exists():
            delete(before)
        else:
            before.rename(best)


def keep_best(
    output_dir: Path, record: dict[str, Any], step: int, save: Callable[[Path], None]
) -> None:
    """Write best/ if the held-out loss at this step is the lowest so far. On the first process.

    save(folder): writes the content of best/.
    record: the last held-out record. If there are averaged weights, their loss counts, since they
    are saved.

    The previous best is kept as best-before until a checkpoint is as new as the best, so that a run
    resumed from an older checkpoint can restore it.
    """
    if record.get("step") != step:
        return
    loss = record.get("held_out_loss_ema", record.get("held_out_loss"))
    best, before = output_dir / "best", output_dir / "best-before"
    steps = [int(path.name.split("-")[-1]) for path in find_checkpoints(output_dir)]
    reached = max(steps, default=-1)
    known = read_best(best)
    if loss < known.get("held_out_loss", math.inf):
        if known and known["step"] <= reached:
            delete(before)
            best.rename(before)
        with saving(output_dir, best) as unfinished:
            (unfinished / "best").mkdir()
            save(unfinished / "best")
            content = json.dumps({"step": step, "held_out_loss": loss})
            (unfinished / "best/held_out.json").write_text(content)
    if read_best(best).get("step", math.inf) <= reached:  # there is none if no loss was finite
        delete(before)


def read_best(folder: str | Path) -> dict[str, Any]:
    """Return {"step", "held_out_loss"} as `keep_best` wrote them, or {} if there are none."""
    with contextlib.suppress(OSError, ValueError):
        best = json.loads((Path(folder) / "held_out.json").read_text())
        return best if fits(best, HELD_OUT) else {}
    return {}
