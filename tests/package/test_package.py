"""The package and the scripts: layers without cycles, the loop in each trainer, flags."""

import argparse
import ast
import collections
import graphlib
import importlib
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tokenize
import tomllib

import pytest
from conftest import ROOT, find_parser, needs

import diffusion_training

PACKAGE = ROOT / "diffusion_training"
SCRIPTS = [
    "caption_images", "download_images", "precompute_latents", "precompute_latents_ray",
    "reconstruct_ema", "train_flow", "train_on_ray", "train_text_to_image", "train_unconditional",
]  # fmt: skip
TRAINERS = ["train_flow", "train_text_to_image", "train_unconditional"]
# The rooms of the package, from the ground up: one imports only from those before it.
ROOMS = [
    "errors",
    "",
    "families",
    "families.recorded",
    "data",
    "latents",
    "training.lora",
    "training.scores",
    "training.step",
    "training.keeping",
    "training.showing",
    "training",
    "web",
    "cluster",
]
# The most tokens that a script and the modules that it imports may have: what a reader of the
# script inherits. Comments, docstrings, brackets and commas are not counted. The first number is
# for what is imported at the start. The second one adds what functions import when they are called,
# and what only types need, since moving an import does not make a script smaller.
LIMITS = {
    "caption_images": (21_700, 24_800),
    "download_images": (17_700, 19_900),
    "precompute_latents": (44_800, 68_900),
    "precompute_latents_ray": (52_200, 76_300),
    "reconstruct_ema": (12_500, 13_600),
    "train_flow": (89_300, 132_200),
    "train_on_ray": (10_400, 10_400),
    "train_text_to_image": (89_700, 114_900),
    "train_unconditional": (53_900, 63_500),
}
# Rooms and modules that a script never imports, also not in a function: it can't need them.
NEVER = {
    "train_flow": ["training.step.objective", "web", "cluster"],
    "train_text_to_image": ["families.recorded", "latents.cache", "latents.plan", "web", "cluster"],
    "train_unconditional": [
        "latents",
        "training.lora",
        "families",
        "data.references",
        "data.captioned_flags",
        "training.text_to_image_flags",
        "training.showing.grid",
        "training.showing.readers",
    ],
}
# Modules that no script imports at the start, because few runs need them: recorded pipelines,
# caches that are in a bucket, have billions of rows or are still being made, and the networks that
# measure samples.
RARE = [
    "families.recorded", "latents.stream", "latents.fetch", "latents.ranges", "latents.follow",
    "training.scores.metrics", "training.scores.networks", "training.scores.distances",
]  # fmt: skip
# The only import of a room above, inside a function.
UPWARDS = {("families.recording", "families.recorded.reading")}
# Modules that the workers of a download import. torch would take 0.8 GB in each worker.
LIGHT = (
    "errors.sentences pillow arguments files remote cluster.connection "
    "web.pictures web.downloads web.filters web.tables web.image_shards"
).split()


def name_module(path):
    return str(path.relative_to(PACKAGE)).removesuffix(".py").replace(os.sep, ".")


MODULES = {
    name_module(path): path
    for path in PACKAGE.rglob("*.py")
    if path.parent == PACKAGE or path.stem[0] != "_"
}


def find_imports(path, at_start=False):
    """{module of the package or script: names} that a file imports.

    at_start: leave out what functions import when they are called, and what only types need.
    """
    found = collections.defaultdict(set)

    def visit(node):
        is_later = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if at_start and is_later:
            return
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
            "diffusion_training",
            *SCRIPTS,
        ):
            name = node.module.removeprefix("diffusion_training").removeprefix(".")
            for alias in node.names:
                inner = f"{name}.{alias.name}".removeprefix(".")
                found[inner if inner in MODULES else name or "__init__"].add(alias.name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def find_room(module):
    return module.rpartition(".")[0]


def test_rooms_import_only_from_rooms_below():
    assert {find_room(name) for name in MODULES} == {*ROOMS}
    place = lambda module: ROOMS.index(find_room(module))
    pairs = [(name, other) for name, path in MODULES.items() for other in find_imports(path)]
    assert {(name, other) for name, other in pairs if place(other) > place(name)} == UPWARDS


def test_no_modules_import_each_other():
    graph = {name: find_imports(path).keys() for name, path in MODULES.items()}
    order = [*graphlib.TopologicalSorter(graph).static_order()]  # raises CycleError
    assert len(order) == len(MODULES) > 100


def test_a_name_stands_in_one_room():
    counts = collections.Counter(name.split(".")[-1] for name in MODULES)
    assert {name for name, count in counts.items() if count > 1} == {"flags"}


def test_contributing_has_a_line_for_each_room_with_its_files_and_imports():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.split("<!-- map -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    name = lambda text: "" if text.strip("()") == "top" else text.strip("`/").replace("/", ".")
    assert [name(row[0]) for row in rows] == ROOMS
    for room, _, files, imports in rows:
        room = name(room)
        own = {each for each in MODULES if find_room(each) == room and each != "__init__"}
        listed = re.findall(r"`(\w+)`", files)
        assert sorted(listed) == sorted(each.split(".")[-1] for each in own), room
        paths = [MODULES[each] for each in own]
        used = {find_room(each) for path in paths for each in find_imports(path, at_start=True)}
        assert {name(each) for each in imports.split(", ") if imports} == used - {room}, room


def count_tokens(path):
    """The tokens of a file, a docstring as one, without comments, round brackets and commas."""
    lines = io.StringIO(path.read_text()).readline
    left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    kept = [each.string for each in tokenize.generate_tokens(lines) if each.type not in left_out]
    return sum(text not in ("(", ")", ",", "") for text in kept)


def find_reached(script, at_start):
    """The modules that a script imports, itself and through others."""
    paths = {**MODULES, **{name: ROOT / f"{name}.py" for name in SCRIPTS}}
    reached, waiting = {}, [script]
    while waiting:
        name = waiting.pop()
        reached[name] = paths[name]
        waiting += find_imports(paths[name], at_start).keys() - reached.keys()
    return reached


def is_in(module, places):
    return any(f"{module}.".startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_no_more_than_it_needs(script):
    counted = []
    for limit, at_start in zip(LIMITS[script], (True, False), strict=True):
        reached = find_reached(script, at_start)
        tokens = sum(map(count_tokens, reached.values()))
        counted.append((0.9 * limit < tokens < limit, f"{tokens:,} in {len(reached)} files"))
    assert all(is_within for is_within, _ in counted), counted
    assert not [name for name in reached if is_in(name, NEVER.get(script, []))]
    assert not [name for name in find_reached(script, True) if is_in(name, RARE)]


def test_only_precompute_latents_ray_imports_another_script():
    for script in SCRIPTS:
        others = find_imports(ROOT / f"{script}.py").keys() & set(SCRIPTS)
        assert others == ({"precompute_latents"} if script == "precompute_latents_ray" else set())


def test_only_library_fixes_changes_libraries():
    """No other code assigns to an attribute of what it imports."""
    for path in [*MODULES.values(), *(ROOT / f"{script}.py" for script in SCRIPTS)]:
        if path.stem == "library_fixes":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [alias.asname or alias.name for node in imports for alias in node.names]
        imported = {name.split(".")[0] for name in names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = ast.unparse(node)
                assert changed.split(".")[0] not in imported, f"{path.name} changes {changed}"


def test_every_module_has_a_docstring():
    for name, path in MODULES.items():
        first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        assert len(first) > 20 and first.endswith("."), name


# Modules without a test file of their name: the files that fail if the module is wrong. A file that
# does not import the module has a word that leads to it (a name, or a flag).
COVERED = {
    "__main__": "package/test_wheel.py -m",
    "batches": "package/test_records.py",
    "data.captioned_data": "package/test_stream.py",
    "data.captioned_flags": "scripts/test_tags.py",
    "data.captioned_images": "package/test_references.py",
    "data.class_names": "scripts/test_classes.py",
    "data.prompts": "scripts/test_preserve_prior.py",
    "data.texts": "package/test_captions.py, scripts/test_several_captions.py --caption_weights",
    "data.transform_settings": "package/test_references.py",
    "data.transforms": "package/test_captions.py",
    "families.base": "scripts/test_new_family.py, package/test_lora_files.py lora_files",
    "families.class_labels": "scripts/test_classes.py",
    "families.known": "package/test_families.py",
    "families.lora_layers": "package/test_families.py",
    "families.names": "package/test_families.py",
    "families.opening": "package/test_recorded.py",
    "families.original_layout": "package/test_lora_files.py",
    "families.recording": "package/test_recorded.py",
    "families.trained": "scripts/test_transformer_file.py",
    "families.prx": "package/test_families.py prx",
    "families.stable_diffusion": "package/test_families.py sdxl",
    "families.recorded.calls": "package/test_recorded.py",
    "families.recorded.family": "package/test_recorded.py, package/test_reference_latents.py",
    "families.recorded.findings": "package/test_recorded.py, "
    "package/test_reference_latents.py has_the_bits_of_the_pipeline",
    "families.recorded.layout": "package/test_recorded.py has_the_bits_of_the_pipeline, "
    "package/test_reference_latents.py has_the_bits_of_the_pipeline",
    "families.recorded.modular": "scripts/test_modular_pipelines.py has_the_bits_of_its_blocks",
    "families.recorded.pipeline_run": "package/test_recorded.py",
    "families.recorded.reading": "package/test_recorded.py",
    "families.recorded.tape": "package/test_recorded.py",
    "families.recorded.text_tensors": "package/test_recorded.py",
    "families.recorded.trial": "package/test_recorded.py two_lengths",
    "draws": "package/test_order.py",
    "errors.sentences": "package/test_errors.py",
    "errors.faults": "package/test_errors.py, package/test_hub.py fault_of",
    "latents.batch_inputs": "scripts/test_several_captions.py read_prompts, "
    "scripts/test_aspect_ratios.py .mask.png, scripts/test_edits.py references",
    "latents.cache_size": "package/test_cache.py",
    "latents.data_file": "scripts/test_argument_files.py --data",
    "latents.cache_flags": "scripts/test_precompute_latents.py --rows_per_shard",
    "latents.fetch": "package/test_stream.py",
    "latents.passes": "package/test_cache.py, scripts/test_precompute_latents.py --batch_size=auto",
    "latents.plan": "package/test_cache.py",
    "latents.published": "scripts/test_classes.py --import_latents",
    "latents.settings": "package/test_encoders.py",
    "latents.shards": "package/test_reader.py",
    "latents.shared": "scripts/test_argument_files.py",
    "latents.source": "package/test_reader.py, scripts/test_drawing.py --validation_prompts",
    "host_memory": "scripts/test_checkpoints_beside.py",
    "memory": "package/test_fake_device.py measure_memory",
    "meeting": "package/test_launch.py",
    "stopping": "package/test_launch.py",
    "pillow": "package/test_images.py decode_image",
    "errors.printing": "package/test_errors.py",
    "errors.stop_signals": "package/test_errors.py",
    "training.keeping.best": "scripts/test_save_best.py",
    "training.showing.captioned_card": "scripts/test_modular_pipelines.py",
    "training.showing.captioned_samples": "scripts/test_edits.py",
    "training.keeping.checkpoint_copy": "scripts/test_checkpoints_beside.py",
    "training.step.denoiser": "package/test_models.py, "
    "scripts/test_train_text_to_image.py --unet_config_name_or_path",
    "training.scores.distances": "benchmarks/test_evaluate_samples.py",
    "training.lora.lora_flags": "scripts/test_train_lora.py --rank",
    "families.lora_settings": "docs/test_lora_settings.py",
    "training.showing.metadata": "scripts/test_train_lora.py modelspec",
    "training.scores.metric_flags": "scripts/test_metrics.py",
    "training.step.flow_schedule": "scripts/test_flow_families.py choose_shift",
    "training.scores.networks": "scripts/test_metrics.py",
    "training.showing.pipelines": "package/test_run_folder.py",
    "training.showing.single_file_output": "scripts/test_single_file.py --output_single_file",
    "training.lora.prior": "scripts/test_preserve_prior.py",
    "training.step.samplers": "scripts/test_sharding.py try_sampler",
    "training.lora.quantization": "scripts/test_base_precision.py",
    "training.showing.grid": "package/test_run_folder.py",
    "training.showing.readers": "scripts/test_comfyui_loader.py, "
    "scripts/test_train_lora.py models/loras",
    "training.showing.sample_base": "scripts/test_validation_base.py --validation_base",
    "training.showing.samples": "package/test_run_folder.py",
    "training.lora.training_adapter": "scripts/test_validation_base.py --training_adapter",
    "training.keeping.writer": "scripts/test_checkpoints_beside.py writer",
    "training.saver": "scripts/test_posthoc_ema.py",
    "training.results": "scripts/test_save_best.py --save_best",
    "training.state": "scripts/test_replicas.py",
    "training.text_to_image_flags": "scripts/test_full_bf16.py --shard, scripts/test_fit.py --fit",
}


def test_every_module_has_a_test_file_of_its_name_or_a_file_that_covers_it():
    tests = ROOT / "tests"
    named = {path.stem for room in ("package", "scripts") for path in tests.glob(f"{room}/test_*")}
    unnamed = {name for name in MODULES if f"test_{name.split('.')[-1]}" not in named}
    assert unnamed - {"__init__"} == COVERED.keys()
    for name, covered in COVERED.items():
        room, _, leaf = f"diffusion_training.{name}".rpartition(".")
        imported = rf"from {room}\.{leaf} import|from {room} import .*\b{leaf}\b|\b{room}\.{leaf}\b"
        for each in covered.split(", "):
            file, _, word = each.partition(" ")
            text = (tests / file).read_text()
            assert re.search(re.escape(word) if word else imported, text), f"{file} has no {name}"


def definitions(path):
    return [node for node in ast.parse(path.read_text()).body if hasattr(node, "name")]


def list_calls(node):
    """The names of the functions and methods that a piece of code calls itself, line by line."""
    found = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    found.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func) for call in found]


def calls(node):
    return set(list_calls(node))


@pytest.mark.parametrize("script", TRAINERS)
def test_main_of_each_trainer_has_the_accelerator_and_the_loop(script):
    """`main` shows what is trained and saved, and the loop its verbs, in the order of time."""
    (main,) = (node for node in definitions(ROOT / f"{script}.py") if node.name == "main")
    assert {"Accelerator", "make_optimizer", "accelerator.prepare", "make_lr_scheduler"} <= calls(
        main
    )
    # what a checkpoint holds has its names here
    (state,) = (
        node
        for node in ast.walk(main)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TrainState"
    )
    held = ["models", "averages", "optimizer", "progress", "settings"]
    assert [keyword.arg for keyword in state.keywords] == held
    (loop,) = (node for node in main.body if isinstance(node, ast.While))
    order = [
        "train_step", "progress.advance", "averages.update", "records.add", "lr_scheduler.step",
        "stop_signal.agree", "records.log", "saver.save_snapshot", "saver.save_checkpoint",
        "score", "show",
    ]  # fmt: skip
    assert [name for name in list_calls(loop) if name in order] == order
    # what is not done in each step has its condition in sight
    for name in order[6:]:
        (within,) = (node for node in loop.body if isinstance(node, ast.If) and name in calls(node))
        assert "progress.is_due" in calls(within.test), name


@needs("aiohttp")
def test_download_modules_import_no_torch():
    names = ", ".join(f"diffusion_training.{name}" for name in LIGHT)
    code = (
        f"import {names}, download_images, sys; "
        "print([x for x in ('torch', 'accelerate') if x in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout == "[]\n", said.stderr


def test_every_imported_package_is_in_the_requirements():
    named = set(re.findall(r"^(\w+)", (ROOT / "requirements.txt").read_text(), re.M))
    # for one --optimizer, one metric and one format, which name them if they are missing
    named |= {"bitsandbytes", "torchmetrics", "gguf"}
    ray = (
        named
        | set(re.findall(r"^(\w+)", (ROOT / "requirements-ray.txt").read_text(), re.M))
        | {"ray", "yarl"}
    )
    for name, path in [*MODULES.items(), *((script, ROOT / f"{script}.py") for script in SCRIPTS)]:
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        imported = {"pillow" if each == "PIL" else each for each in imported}
        imported -= {*sys.stdlib_module_names, "diffusion_training", *SCRIPTS}
        clustered = name in (
            "precompute_latents_ray",
            "train_on_ray",
            "download_images",
        ) or name.startswith(("web.", "cluster."))
        assert imported <= (ray if clustered else named), (
            name,
            imported - (ray if clustered else named),
        )
    assert {"wandb", "tensorboard"} <= named


def test_pyproject_takes_version_and_requirements_from_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "diffusion_training.__version__"
    }
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {
        "file": ["requirements.txt"]
    }


@pytest.mark.parametrize(
    "version, fits", [("0.1.0", True), ("0.1.9", True), ("0.2.0", False), ("1.1.0", False)]
)
def test_check_version_refuses_another_version(version, fits, monkeypatch):
    monkeypatch.setattr(diffusion_training, "__version__", "0.1.3")
    if fits:
        diffusion_training.check_version(version, "mine.py")
    else:
        with pytest.raises(
            SystemExit, match=f"mine.py needs version {version} of diffusion_training, but 0.1.3"
        ):
            diffusion_training.check_version(version, "mine.py")


def test_every_script_calls_check_version_before_other_imports():
    for script in SCRIPTS:
        look, text = (
            f'check_version("{diffusion_training.__version__}", Path(',
            (ROOT / f"{script}.py").read_text(),
        )
        assert 0 < text.index(look) < text.index("from diffusion_training.")
        assert text.index(look) < re.search(r"^ *import (torch|ray|diffusers)", text, re.M).start()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_the_package_says_how_to_install_it(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    # it may be installed in this environment
    hidden = "import runpy, sys; sys.modules['diffusion_training'] = None; "
    code = f"{hidden}runpy.run_path('{script}.py', run_name='__main__')"
    command = [sys.executable, "-X", "importtime", "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    *imports, sentence = run.stderr.strip().splitlines()
    assert run.returncode == 1 and all(line.startswith("import time:") for line in imports)
    assert "needs the package diffusion_training: run `pip install" in sentence
    has_twin = (ROOT / f"minimal/{script}.py").is_file()
    assert (f"start from minimal/{script}.py" in sentence) == has_twin
    assert has_twin == (script in (*TRAINERS, "precompute_latents"))
    assert not any(line.split()[-1] in ("torch", "numpy", "pyarrow") for line in imports)


def test_a_script_with_an_older_package_ends_in_one_sentence(tmp_path):
    older = (PACKAGE / "__init__.py").read_text().replace(diffusion_training.__version__, "0.0.9")
    (tmp_path / "diffusion_training").mkdir()
    (tmp_path / "diffusion_training/__init__.py").write_text(older)
    (tmp_path / "mine.py").write_text((ROOT / "download_images.py").read_text())
    run = subprocess.run(
        [sys.executable, tmp_path / "mine.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (
        run.returncode == 1
        and run.stderr.startswith("mine.py needs version")
        and run.stderr.count("\n") == 1
    )


# ------------------------------------------------------------------- the flags

ON_RAY = {"precompute_latents_ray", "train_on_ray"}
# What takes seconds to import. The standard library and pyarrow take tenths of a second.
SLOW = {"PIL", "accelerate", "datasets", "diffusers", "numpy", "ray", "torch", "transformers"}
CACHE = "--pretrained_model_name_or_path=x --dataset_name=x"
REFUSED = {
    "caption_images": "--train_data_dir=nowhere --pretrained_model_name_or_path=x",
    "download_images": "--input=x --output_dir=x --keep_columns url",
    "precompute_latents": f"{CACHE} --train_data_dir=.",
    "precompute_latents_ray": f"{CACHE} --mixed_precision=fp16 --gpus_per_encoder=0",
    "reconstruct_ema": "run --output_dir=x --sigma_rel 0.5",
    "train_flow": f"{CACHE} --rank=4 --init_from=x",
    "train_on_ray": f"--max_workers=2 train_flow.py {CACHE} --rank=4 --init_from=x",
    "train_text_to_image": f"{CACHE} --lora_alpha=2",
    "train_unconditional": "--train_data_dir=nowhere",
}


@pytest.mark.parametrize(
    "flags, status", [("--help", 0), ("--outptu_dir=x", 2), ("--output_di=x", 2), (None, 2)]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_refused_flags_import_nothing_that_is_slow(script, flags, status, tmp_path):
    flags = (flags or REFUSED[script]).split()
    command = [sys.executable, "-X", "importtime", ROOT / f"{script}.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    imports, said = [], []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else said).append(line)
    assert done.returncode == status and len(imports) > 50, said
    assert (not said) if status == 0 else ".py: error: " in said[-1], said
    assert not {line.split()[-1].split(".")[0] for line in imports} & SLOW
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_parses_no_flags(script, monkeypatch):
    """With the start method spawn, loader processes import it under this name."""
    if script in ON_RAY:
        pytest.importorskip("ray")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--no_such_flag"])
    names = runpy.run_path(str(ROOT / f"{script}.py"), run_name="__mp_main__")
    assert "main" in names and "args" not in names


# Flags with different defaults, because diffusers' two scripts differ, or because a script has its
# own kind of data.
DEFAULTS = {
    "--resolution", "--output_dir", "--lr_scheduler", "--adam_beta1", "--adam_weight_decay",
    "--tracker_project_name", "--guidance_scale", "--num_inference_steps",
}  # fmt: skip


@needs("ray")
def test_flags_of_the_same_name_are_equal_in_all_scripts():
    """In the scripts that train or make caches. The others read no captions and no pipeline."""
    seen, differ = {}, set()
    for script in SCRIPTS[2:]:
        for action in find_parser(importlib.import_module(script).parse_args)._actions:
            for option in action.option_strings:
                kind = getattr(action.type, "bounds", action.type)
                means = type(action), kind, action.nargs, tuple(action.choices or ()), action.help
                first, default = seen.setdefault(option, (means, action.default))
                # a cache may have several resolutions
                assert means == first or option == "--resolution", (script, option)
                differ |= {option} if action.default != default else set()
    assert len(seen) > 100 and differ == DEFAULTS


@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=needs("ray")) if name in ON_RAY else name for name in SCRIPTS],
)
def test_every_number_flag_has_bounds_and_every_flag_a_help_group(script):
    parser = find_parser(importlib.import_module(script).parse_args)
    chapters = [group.title for group in parser._action_groups[2:]]
    assert len(chapters) >= 3
    assert (ROOT / re.search(r"Documentation: (\S+)", parser.format_help())[1]).is_file()
    assert "examples:" in parser.epilog and "(None: " not in parser.format_help()
    for action in parser._actions[1:]:
        assert action.container.title in chapters, action.option_strings
        assert action.type not in (int, float), (
            f"{action.option_strings}: say its bounds with number()"
        )
        paths = (
            "_dir$|_path$|^dataset_name$|^resume_from|^init_from|^input$|^single_file|"
            "^network_weights|^checkpoints_to$|^metric_.*_model$|^validation_(images|base|lora)$"
            "|^training_adapter$|^transformer_file$|^output_file$|^data$|^validation_prompts_file$"
        )
        if path := re.search(paths, action.dest):
            assert (
                action.dest == "logging_dir"
                or action.type("~/x") == os.path.expanduser("~/x") != "~/x"
            )
        if action.type in (None, str.strip) or path or action.dest == "output_name":
            continue
        low, high, kind = action.type.bounds
        assert math.isfinite(low) and math.isfinite(high) and low < high
        for value in ("nan", "inf", "-inf", "x", "", str(low - 1), str(high * 10 + 1)):
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                action.type(value)
        assert action.type(str(low)) == low and type(action.type(str(low))) is kind
        assert action.default is None or low <= action.default <= high


def test_download_images_names_the_missing_package_and_shows_its_help_without_it(tmp_path):
    """Its packages are in requirements-ray.txt alone."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['aiohttp'] = None")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*flags):
        command = [sys.executable, str(ROOT / "download_images.py"), *flags]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    done = run("--help")
    assert done.returncode == 0 and "--input" in done.stdout, done.stderr
    done = run("--input", "urls.csv", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "aiohttp is missing: pip install -r requirements-ray.txt" in done.stderr
    assert not (tmp_path / "out").exists()
