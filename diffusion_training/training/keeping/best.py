"""Keep the weights with the lowest held-out loss, or the best value of a metric, in best/."""

import contextlib
import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusion_training.files import delete, fits, parse_json, saving
from diffusion_training.training.keeping.checkpoints import find_checkpoints
from diffusion_training.training.scores.metric_flags import LOWER_METRICS
from diffusion_training.training.step.signs import HELD_OUT

BEST_METRIC = {"step": int, "metric": str, "value": float}
# flags; values of a metric with others can't be compared
MEASURED_WITH = (
    "metric_image_model", "metric_clip_model", "num_metric_images", "guidance_scale",
    "num_inference_steps", "ddpm_num_inference_steps",
)  # fmt: skip


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
    output_dir: Path,
    record: dict[str, Any],
    step: int,
    save: Callable[[Path], None],
    metric: str | None,
    args: Namespace,
) -> None:
    """Write best/ if this step is the best so far. On the first process.

    save(folder): writes the content of best/.
    record: the last held-out record; or that of metrics, if `metric` decides. If there are averaged
    weights, their loss counts, since they are saved.

    The previous best is kept as best-before until a checkpoint is as new as the best, so that a run
    resumed from an older checkpoint can restore it.
    """
    if record.get("step") != step:
        return
    if metric:
        content = {"step": step, "metric": metric, "value": record[metric]}
        content["measured_with"] = {name: vars(args).get(name) for name in MEASURED_WITH}
    else:
        loss = record.get("held_out_loss_ema", record.get("held_out_loss"))
        content = {"step": step, "held_out_loss": loss}
    best, before = output_dir / "best", output_dir / "best-before"
    steps = [int(path.name.split("-")[-1]) for path in find_checkpoints(output_dir)]
    reached = max(steps, default=-1)
    known = read_best(best)
    is_alike = all(known.get(name) == content.get(name) for name in ("metric", "measured_with"))
    if score(content) < (score(known) if is_alike else math.inf):
        if known and known["step"] <= reached:
            delete(before)
            best.rename(before)
        with saving(output_dir, best) as unfinished:
            (unfinished / "best").mkdir()
            save(unfinished / "best")
            (unfinished / "best/held_out.json").write_text(json.dumps(content))
    if read_best(best).get("step", math.inf) <= reached:  # there is none if no loss was finite
        delete(before)


def score(best: dict[str, Any]) -> float:
    """The loss or metric in held_out.json as a number; lower is better."""
    if "metric" in best:
        return best["value"] * (1 if best["metric"] in LOWER_METRICS else -1)
    return best.get("held_out_loss", math.inf)


def read_best(folder: str | Path) -> dict[str, Any]:
    """Return what `keep_best` wrote: {"step", "held_out_loss"} or {"step", "metric", "value"}.

    {} if there is nothing.
    """
    path = Path(folder) / "held_out.json"
    if not path.is_file():  # a pipe might never end
        return {}
    with contextlib.suppress(OSError, ValueError):
        best = parse_json(path.read_text())
        return best if fits(best, HELD_OUT) or fits(best, BEST_METRIC) else {}
    return {}
