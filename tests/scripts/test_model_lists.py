"""The lists in docs/models.md: what becomes of each pipeline of diffusers that draws.

`UPDATE=1 pytest -m long tests/scripts/test_model_lists.py` tries all tiny pipelines, and writes the
lists anew. An older diffusers is compared in what it has.
"""

import contextlib
import dataclasses
import enum
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections import defaultdict

import diffusers
import pytest
import tiny_pipelines
from conftest import ROOT, Script, make_captioned
from diffusers.modular_pipelines import ModularPipeline, ModularPipelineBlocks
from diffusers.utils import BaseOutput
from packaging.version import parse
from test_edits import make_pairs

from diffusion_training.errors.sentences import Refused
from diffusion_training.families.names import FACTS
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family

precompute, train = Script("precompute_latents"), Script("train_flow")
# ERNIE-Image's pipeline gives its scheduler a tensor, of which NumPy warns
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of deprecated pipelines
]
TINY = {
    function: f"{among}-{name}"
    for among in ("MAKE", "REFUSED", "BLOCKS", "OTHER_BLOCKS", "EDIT", "OTHERS")
    for name, function in getattr(tiny_pipelines, among).items()
}
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- recorded pipelines -->\n", "<!-- end -->\n"
EDITS = "Edits, trained on pairs of images"
UNTRIED = "Not tried here"
# {class: its list with the oldest diffusers, 0.36, where it is another one}
OLDEST = {
    "BriaFiboPipeline": {"Trained whole and as a LoRA, called for a batch"},
    "QwenImagePipeline": {"Trained whole and as a LoRA, called for each image"},
}
ADVICE = f"""it draws images or videos with a transformer, and is in no list of docs/models.md: make
a tiny pipeline of it in tests/tiny_pipelines.py, or list it under "{UNTRIED}" by UPDATE=1"""


# ------------------------------------------------------------------- all classes


def find_class(name):
    """A class of diffusers; None if it has none, or another library for it is missing."""
    try:
        kind = getattr(diffusers, name)
    except RuntimeError:  # what it imports is missing
        return None
    is_dummy = getattr(kind, "__module__", "").startswith("diffusers.utils.dummy")
    return kind if inspect.isclass(kind) and not is_dummy else None


def list_classes():
    """{name: class} of pipelines that can be opened by a name, of blocks by the name of those."""
    found = {}
    for kind in filter(None, map(find_class, dir(diffusers))):
        if not issubclass(kind, (diffusers.DiffusionPipeline, ModularPipeline)):
            continue
        if not issubclass(kind, ModularPipeline):
            found[kind.__name__] = kind
        elif kind.default_blocks_name:
            found[kind.default_blocks_name] = kind
    del found["DiffusionPipeline"]
    for kind in filter(None, map(find_class, dir(diffusers))):
        is_blocks = issubclass(kind, ModularPipelineBlocks) and vars(kind).get("block_classes")
        if is_blocks and kind.__name__ not in found:  # a variant that no pipeline names
            found[kind.__name__] = type(kind().init_pipeline())
    return found


def name_type(types):
    """[library, class] of a part, as model_index.json lists it; None if it is no part."""
    for kind in types:
        if inspect.isclass(kind) and issubclass(kind, enum.Enum):  # names of schedulers
            return ["diffusers", next(iter(kind)).name]
        if kind is diffusers.SchedulerMixin:  # any
            kind = diffusers.FlowMatchEulerDiscreteScheduler
        library = getattr(kind, "__module__", "").partition(".")[0]
        if inspect.isclass(kind) and library in ("diffusers", "transformers"):
            return [library, kind.__name__]
    return None


def read_class(name, kind):
    """({part: [library, class]}, the names of results), by what a class says of itself."""
    if issubclass(kind, ModularPipeline):
        blocks = getattr(diffusers, name)()
        types = {part.name: (part.type_hint,) for part in blocks.expected_components}
        results = {each.name for each in blocks.outputs}
    else:
        types = kind._get_signature_types()
        outputs = [
            each
            for each in vars(sys.modules[kind.__module__]).values()
            if inspect.isclass(each) and issubclass(each, BaseOutput) and each is not BaseOutput
        ]
        results = {field.name for each in outputs for field in dataclasses.fields(each)}
    named = {part: name_type(each) for part, each in types.items()}
    return {part: entry for part, entry in named.items() if entry}, results


def draws(results):
    """Whether a pipeline draws images or videos, by its results' names; True if it names none."""
    return not results or bool(results & {"image", "images", "frames", "video", "videos"})


def open_alone(folder, name, kind, parts):
    """Why a pipeline is refused by its configs; its family's name if it is opened."""
    is_modular = issubclass(kind, ModularPipeline)
    index = {"_class_name": kind.__name__} | ({"_blocks_class_name": name} if is_modular else {})
    for part, entry in parts.items():
        index[part] = [*entry, {"type_hint": entry}] if is_modular else entry
        config = "scheduler_config.json" if part == "scheduler" else "config.json"
        (folder / part).mkdir(parents=True)
        (folder / part / config).write_text(json.dumps({"_class_name": entry[1]}))
    file = "modular_model_index.json" if is_modular else "model_index.json"
    (folder / file).write_text(json.dumps(index))
    flags = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
    try:
        return open_base(precompute.module.parse_args(flags), record=record_family).family, None
    except Refused as error:
        return None, str(error)


# ------------------------------------------------------------------- lists


def shorten(reason):
    """A reason without names and shapes, and without the errors of a pipeline's own code."""
    if "draws for a task of its own" in reason:
        return "it is for another task; the error names the class to train instead"
    reason = re.sub(".*(can't be trained here|these scripts can't train): ", "", reason)
    reason = re.sub("it has a .*Scheduler, and only", "only", reason)
    reason = re.sub("(with(out an image| [a-z_]+=)(, )?)+", "", reason)
    reason = re.sub("an error in a trial at .*?(; |$)", r"an error\1", reason)
    reason = re.sub(", from noise of the shape .*", "", reason)
    if "it draws videos with sound" in reason:
        return "it draws videos with sound in one transformer"
    reason = re.sub(", which stills can't teach.*", ", which stills can't teach", reason)
    reason = re.sub("(or by blocks), which are.*", r"\1", reason)
    reason = re.sub("it has two experts: .*", "it has two experts", reason)
    reason = re.sub("more than one denoiser: .*", "more than one denoiser", reason)
    reason = re.sub("noise of the shapes? .*", "noise of other shapes", reason)
    reason = re.sub(r"returns \[.*\] for", "returns other shapes for", reason)
    own = "its code raises an error"
    parts = dict.fromkeys(reason.split("; "))
    return "; ".join(part for part in parts if part != own or len(parts) == 1)


def describe(folder, make):
    """(class, titles of the lists that it is in) of a tiny pipeline; None if diffusers lacks it."""
    try:
        base = make(folder / "base")
    except (AttributeError, ImportError) as error:
        assert re.match("module diffusers has no attribute|No module named 'diffusers", str(error))
        return None
    index = json.loads(next(base.glob("*index.json")).read_text())
    kind = index.get("_blocks_class_name") or index["_class_name"]
    if not (base / "transformer").exists():  # an older diffusers saves only a list of its parts
        return None
    said = io.StringIO()

    def attempt(script, *flags):
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                script(f"--pretrained_model_name_or_path={base}", *flags)
            except SystemExit:
                return said.getvalue().strip().splitlines()[-1].split(": ", 1)[1]
        return "yes"

    def cache(images):
        flags = ["--resolution=64", "--dataloader_num_workers=0", f"--output_dir={folder / images}"]
        return attempt(precompute, f"--train_data_dir={folder.parent / images}", *flags)

    def try_training(images, *more):
        output = ["--max_train_steps=1", f"--output_dir={folder}/out-{images}-{len(more)}"]
        flags = ["--train_batch_size=2", "--caption_dropout=0", "--report_to=none", *output]
        return attempt(train, f"--latents_dir={folder / images}", *flags, *more)

    titles = []
    cached = cache("images")
    if cached == "yes":
        ways = {"whole": try_training("images"), "as a LoRA": try_training("images", "--rank=2")}
        calls = re.findall("is called with (.*)", said.getvalue())
        of = "each image" if "each image" in calls[0] else "a batch"
        trained = [way for way, result in ways.items() if result == "yes"]
        titles.append(f"Trained {' and '.join(trained)}, called for {of}")
    edited = cache("pairs")
    if edited == "yes" and try_training("pairs", "--rank=2") == "yes":
        titles.append(EDITS)
    reason = edited if "edits images" in cached else cached
    assert titles or re.search("can't be trained here: |can't train: ", reason), reason
    return kind, titles or [f"Refused: {shorten(reason)}"]


def read_lists(text):
    """{class: titles of the lists that it is in} of the page's text."""
    text = text[text.index(BEGIN) : text.index(END)]
    found = defaultdict(set)
    for title, names in re.findall(r"^- \*\*(.*?)\*\*:\s(.*?)(?=\n- |\Z)", text, re.M | re.S):
        for name in re.findall("`(.*?)`", names):
            found[name].add(title)
    return dict(found)


def write_lists(text, found):
    """A page's text with other lists."""
    titles = {title for each in found.values() for title in each}
    lines = []
    order = ("Trained", "Edits,", "Refused:", "Not")
    for title in sorted(titles, key=lambda title: (order.index(title.split()[0]), title)):
        names = ", ".join(f"`{name}`" for name in sorted(found) if title in found[name])
        lines += textwrap.wrap(f"- **{title}**: {names}", 120, subsequent_indent="  ")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n".join(lines) + "\n" + text[end:]


def test_the_lists_are_true(tmp_path, monkeypatch):
    page = PAGE.read_text()
    listed = read_lists(page)
    newest = re.search("^diffusers==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert f"pipelines of diffusers {newest} that" in page
    is_older = parse(diffusers.__version__) < parse(newest)
    found, candidates = {}, {}
    for name, kind in list_classes().items():
        parts, results = read_class(name, kind)
        if "transformer" not in parts or not draws(results):
            continue  # a U-Net, or sounds and others
        family, refusal = open_alone(tmp_path / "alone" / name, name, kind, parts)
        if not (family and family.name in FACTS):  # has a page of its own
            candidates[name] = kind.__name__
            found[kind.__name__] = {f"Refused: {shorten(refusal)}" if refusal else UNTRIED}
    if not is_older and not os.environ.get("UPDATE"):
        missing = sorted(found.keys() - listed.keys())
        assert not missing, f"{', '.join(missing)}: {ADVICE}"
    make_captioned(tmp_path / "images", 2)
    make_pairs(tmp_path / "pairs", 2)
    tiny_pipelines.make_small(monkeypatch)
    tried = defaultdict(set)
    for make, name in TINY.items():
        if described := describe(tmp_path / name, make):
            kind, titles = described
            tried[candidates[kind]].update(titles)
    found |= tried
    if is_older:  # it may have classes that the newest has no more, and can't save all
        listed |= OLDEST
        known = {name for name in found.keys() & listed.keys() if found[name] != {UNTRIED}}
        found, listed = ({name: each[name] for name in known} for each in (found, listed))
    if os.environ.get("UPDATE") and not is_older:
        PAGE.write_text(write_lists(page, found))
    else:
        assert found == listed
