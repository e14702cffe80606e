"""The package and the scripts: layers without cycles, the loop in each trainer, flags."""

import argparse
import ast
import collections
import importlib
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, needs

import diffusion_training

PACKAGE = ROOT / "diffusion_training"
SCRIPTS = [
    "download_images", "precompute_latents", "precompute_latents_ray", "reconstruct_ema",
    "train_flow", "train_on_ray", "train_text_to_image", "train_unconditional",
]  # fmt: skip
TRAINERS = ["train_flow", "train_text_to_image", "train_unconditional"]
# A module imports only from layers above its own line.
LAYERS = """
__init__ batches errors library_fixes pillow cluster.supervisor
arguments
families.tape families.mask_values
families.reference_latents families.recorded_text families.modular
families.pipeline_code
csv_files files order heartbeat cluster.connection memory web.pictures web.filters
families.names families.class_labels data.flags
flags
latents.flags
loading models
remote quantization web.downloads families.base families.original_layout families.denoiser_call
launch families.denoiser_trial families.recorded_captions families.recorded_latents
web.tables families.flux2 families.prx families.qwen_image families.z_image
families.stable_diffusion
web.shards
families.known families.recorded data.folders
families.opening
data.arrays data.images data.streams data.transforms
data.texts data.buckets data.image_cache
data.references
data.rows
data.class_labels
data.captions
data.captioned_images
latents.ranges
latents.columns latents.fetch latents.passes cluster.remote_rows
latents.shards
latents.encoders
latents.plan latents.published
latents.cache
latents.reader cluster.remote_cache
latents.filtered latents.shared latents.stream
latents.source
latents.encoding
training.lora_files training.lokr training.sharding training.distances training.networks
training.signs training.lora training.progress training.optimizers training.objective
training.replicas training.samples training.pipelines training.denoiser
training.prior training.metrics training.hub
training.checkpoints training.costs training.held_out training.posthoc
training.best training.copies training.records training.snapshot
training.report
training.run_folder
training.metadata training.tuning
training.card
training.state
"""
# Modules that the workers of a download import. torch would take 0.8 GB in each worker.
LIGHT = (
    "errors pillow arguments files remote cluster.connection "
    "web.pictures web.downloads web.filters web.tables web.shards"
).split()


def name_module(path):
    return str(path.relative_to(PACKAGE)).removesuffix(".py").replace(os.sep, ".")


MODULES = {
    name_module(path): path
    for path in PACKAGE.rglob("*.py")
    if path.parent == PACKAGE or path.stem[0] != "_"
}


def find_imports(path):
    """{module of the package or script: names} that a file imports."""
    found = collections.defaultdict(set)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in (
            "diffusion_training",
            *SCRIPTS,
        ):
            found[
                node.module.removeprefix("diffusion_training").removeprefix(".") or "__init__"
            ] |= {alias.name for alias in node.names}
    return found


def test_modules_import_only_from_layers_above():
    layers = [line.split() for line in LAYERS.strip().splitlines()]
    layer = {name: i for i, names in enumerate(layers) for name in names}
    assert layer.keys() == MODULES.keys()
    for name, path in MODULES.items():
        for other in find_imports(path):
            assert layer[other] < layer[name], f"{name} imports {other}"


def test_latents_modules_do_not_import_training_modules():
    """`latents/` does not import `training/`, directly or indirectly."""
    reached, waiting = set(), [name for name in MODULES if name.startswith("latents.")]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += find_imports(MODULES[name]).keys() - reached
    assert "latents.source" in reached and "families.known" in reached
    assert not [name for name in reached if name.startswith("training.")]


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


def definitions(path):
    return [node for node in ast.parse(path.read_text()).body if hasattr(node, "name")]


def calls(node):
    """The names of the functions and methods that a piece of code calls itself."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            names.add(ast.unparse(part.func))
    return names


@pytest.mark.parametrize("script", TRAINERS)
def test_main_of_each_trainer_has_the_accelerator_and_the_loop(script):
    """`main` makes the Accelerator, prepares models and optimizer, and has the loop itself."""
    (main,) = (node for node in definitions(ROOT / f"{script}.py") if node.name == "main")
    assert {"Accelerator", "accelerator.prepare"} <= calls(main)
    (loop,) = (node for node in main.body if isinstance(node, ast.While))
    assert {"train_step", "training.save_checkpoint", "evaluate"} <= calls(loop)


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
    named = set(re.findall(r"^([a-z_]+)", (ROOT / "requirements.txt").read_text(), re.M))
    # for one --optimizer and one metric, which name them if they are missing
    named |= {"bitsandbytes", "torchmetrics"}
    ray = (
        named
        | set(re.findall(r"^([a-z_]+)", (ROOT / "requirements-ray.txt").read_text(), re.M))
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
    assert project["project"]["name"] == "diffusion_training"
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
    command = [sys.executable, "-I", "-X", "importtime", tmp_path / f"{script}.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    *imports, sentence = run.stderr.strip().splitlines()
    assert run.returncode == 1 and all(line.startswith("import time:") for line in imports)
    assert "needs the package diffusion_training: run `pip install" in sentence
    assert (f"start from minimal/{script}.py" in sentence) == (script in TRAINERS)
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


def find_parser(script):
    """The parser that a script's parse_args builds."""
    found = []

    def catch(parser, *args):
        found.append(parser)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as m, pytest.raises(InterruptedError):
        m.setattr(argparse.ArgumentParser, "parse_args", catch)
        importlib.import_module(script).parse_args([])
    return found[0]


@needs("ray")
def test_flags_of_the_same_name_are_equal_in_all_scripts():
    """In the scripts that train or make caches. The download has other flags."""
    seen, differ = {}, set()
    for script in SCRIPTS[1:]:
        for action in find_parser(script)._actions:
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
    parser = find_parser(script)
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
            "^network_weights|^checkpoints_to$|^metric_.*_model$|^validation_images$"
        )
        if path := re.search(paths, action.dest):
            assert (
                action.dest == "logging_dir"
                or action.type("~/x") == os.path.expanduser("~/x") != "~/x"
            )
        if action.type is None or path:
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
