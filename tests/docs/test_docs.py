"""README.md and docs/: every command runs or parses; every link, test and sentence exists."""

import ast
import functools
import importlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, Script, finish, make_captioned, make_unet_config, start

PAGES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/memory.md",
    "minimal/README.md",
    *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
MARKS = {"hub", "gpu", "cluster", "network"}  # needed by a command, but missing in tests
SCRIPTS = {path.name for path in ROOT.glob("*.py")}
BLOCK = r"(?:<!-- needs: (\w+) -->\n)?```(bash|python)\n(.*?)```"
# Flags that make a command short; later flags win.
SHORT = {
    "train_unconditional.py": "--max_train_steps 2 --ddpm_num_inference_steps 1 "
    "--eval_batch_size 1 --report_to none "
    "--mixed_precision no --dataloader_num_workers 0",
    "train_text_to_image.py": "--max_train_steps 2 --num_inference_steps 1 "
    "--num_validation_images 1 --report_to none",
    "train_flow.py": "--max_train_steps 2 --num_inference_steps 1 "
    "--num_validation_images 1 --report_to none",
    "precompute_latents.py": "--max_train_samples 400",
    "reconstruct_ema.py": "",
    "caption_images.py": "--overwrite",
    "precompute_latents_ray.py": "--dry_run",  # its own tests start Ray
}


def blocks(page):
    """The blocks of a page: [(mark of `needs` or "", bash or python, text)]."""
    return re.findall(BLOCK, (ROOT / page).read_text(), re.S)


def commands(text):
    """The commands of a bash block, as lists of words, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def find_script(words):
    """(script, its flags) of a command that starts one, else (None, None)."""
    for i, word in enumerate(words):
        if word in SCRIPTS:
            return word, words[i + 1 :]
    return None, None


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_every_page_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("images", "photographs"):
        (tmp_path / "path/to" / name).mkdir(parents=True)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    for name in ("images", "images-digits", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "images.npy").touch()
    for needs, kind, text in blocks(page):
        assert needs in MARKS | {""}
        for words in commands(text) if kind == "bash" else ():
            script, flags = find_script(words)
            flags = [flag.replace("@recipes/", f"@{ROOT}/recipes/") for flag in flags or ()]
            files = [flag for flag in flags if flag.startswith("@") and "/recipes/" not in flag]
            if script and not files:
                module = importlib.import_module(script.removesuffix(".py"))
                flags = [flag.replace("/shared/photos", "path/to/images") for flag in flags]
                module.parse_args(flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_captioned(folder / "images", 6)
    make_unet_config(folder)
    return folder


def run(words, folder, inputs):
    """Run a command: a script, shortened, in this process or two forks; others unchanged."""
    script, flags = find_script(words)
    if words[:2] == ["ACCELERATE_USE_CPU=true", "accelerate"] or script in SHORT:
        flags = flags + shlex.split(SHORT[script])
        if "--find_lr" in flags:
            flags += ["--find_lr_steps", "10"]
        if "--holdout" in flags:
            flags += ["--holdout", "4" if "--posthoc_ema" in flags else "32"]
        if "path/to/images" in flags:
            flags += [
                "--model_config_name_or_path",
                str(inputs / "tiny-unet"),
                "--resolution",
                "16",
            ]
        work = functools.partial(Script(script.removesuffix(".py")), *flags)
        if "--num_processes" in words:
            assert finish(start(work, 2, folder / "log")) == [0, 0], (folder / "log").read_text()
        else:
            work()
        return
    if "benchmarks/evaluate_samples.py" in words:  # in a fork, with a briefly trained judge

        def judge():
            sys.path.insert(0, str(ROOT / "benchmarks"))
            module = importlib.import_module("evaluate_samples")
            module.train_classifier = functools.partial(module.train_classifier, steps=20)
            flags = words[words.index("benchmarks/evaluate_samples.py") + 1 :]
            module.main([*flags, "--num_samples=32", "--num_inference_steps=2"])

        assert finish(start(judge, log=folder / "log")) == [0], (folder / "log").read_text()
        return
    if words[:2] == ["python", "-m"]:  # in a fork, which imports nothing

        def run_module():
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__")

        assert finish(start(run_module, log=folder / "log")) == [0], (folder / "log").read_text()
        return
    text = (
        shlex.join(words)
        .replace("'>'", ">")
        .replace("accelerate launch", shlex.quote(sys.executable))
    )
    text = re.sub(r"^python\b", shlex.quote(sys.executable), text)
    if "mine.py" in words and ">" not in words:
        text += (
            f" {SHORT['train_unconditional.py']} --model_config_name_or_path {inputs / 'tiny-unet'}"
        )
    done = subprocess.run(text, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (text, done.stderr[-2000:])


FIRST_READ = ("README.md", "docs/latent-cache.md", "docs/lora.md")


# the script of new-trainer.md has a test of its own
@pytest.mark.ci
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in FIRST_READ else pytest.mark.long)
        for page in PAGES
        if any(not needs for needs, _, _ in blocks(page)) and "new-trainer" not in page
    ],
)
def test_the_commands_of_a_page_run_in_order(page, tmp_path, monkeypatch, inputs, request):
    if page != "README.md":
        request.getfixturevalue("without_figures")
    for path in ROOT.iterdir():
        if path.name in {
            *SCRIPTS,
            "diffusion_training",
            "demo",
            "configs",
            "benchmarks",
            "accelerate_configs",
        }:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/images").symlink_to(inputs / "images")
    monkeypatch.chdir(tmp_path)
    for needs, kind, text in blocks(page):
        if kind == "bash":
            for words in commands(text):
                # `uv run` needs a network only to install, and pytest runs already
                if not needs or (words[:2] == ["uv", "run"] and "pytest" not in words):
                    run(words, tmp_path, inputs)
        elif kind == "python" and not needs:
            exec(text.replace("num_inference_steps=50", "num_inference_steps=1"), {})


def list_anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short_and_all_links_exist():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
            if "://" in link:
                continue
            target = ((ROOT / page).parent / link) if link else ROOT / page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in list_anchors(target), f"{page}: {link}#{anchor}"
    named = set(re.findall(r"\(docs/(\w[\w-]*\.md)\)", (ROOT / "README.md").read_text()))
    assert named == {path.name for path in ROOT.glob("docs/*.md")}


def test_the_workflow_runs_the_first_commands_of_the_readme():
    text = (ROOT / "README.md").read_text().split("## Start")[1]
    first = [
        shlex.join(words)
        for _, _, block in re.findall(BLOCK, text, re.S)[:1]
        for words in commands(block)
    ]
    with_pip = re.findall(r"^python3 -m venv .*$", text, re.M)
    (for_cpu,) = re.findall(r"`(\S+/pip install torch .*?)`", text)
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert len(first) == len(with_pip) == 2
    for command in (*first, *with_pip, for_cpu):
        assert command in workflow, command


# `accelerate launch` without a number of processes: the command of diffusers' model cards
ANSWERED = "accelerate launch train_unconditional.py --mixed_precision bf16"


def test_one_device_starts_by_python_and_several_by_the_launcher():
    """Pages, docstrings, configs and the notebook; tests of the recipes hold the recipes' heads."""
    several = "--num_processes", "--multi_gpu", "--config_file"
    files = [ROOT / page for page in PAGES]
    folders = ("minimal", "benchmarks", "examples", "accelerate_configs")
    for pattern in ("*.py", *(f"{folder}/*.*" for folder in folders)):
        files += ROOT.glob(pattern)
    count = 0
    for path in files:
        text = re.sub(r"\\+(\\n\",)?\n", " ", path.read_text())  # one command, one line
        for command in re.findall(r"accelerate launch [^\n`]*(?:\.py\b|-m )[^\n`]*", text):
            count += 1
            assert command == ANSWERED or any(each in command for each in several), (path, command)
    assert count > 10


def test_every_path_and_name_in_agents_exists():
    text = (ROOT / "AGENTS.md").read_text()
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    paths = set(re.findall(r"[\w./-]*/[\w./-]*|\b[a-z_]+\.py\b", quoted))
    assert len(paths) > 20 and not [path for path in paths if not (ROOT / path).exists()]
    sources = "".join(path.read_text() for path in (*ROOT.glob("*.py"), ROOT / "tests/conftest.py"))
    for name in ("compute_loss", "predict_noise", "train_step", "parse_args", "start"):
        assert f"`{name}" in text or f"{name}(" in text
        assert f"def {name}(" in sources, name


def test_every_test_named_in_a_page_exists():
    there = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    } | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        missing = set(re.findall(r"\btest_\w+", (ROOT / page).read_text())) - there
        assert not missing, f"{page}: {missing}"
    promises = (ROOT / "CONTRIBUTING.md").read_text().split("## Promises")[1].split("\n## ")[0]
    promises = promises.split("\n- ")[1:]
    assert len(promises) > 10 and all("`test_" in promise for promise in promises)


def list_strings(tree):
    """The strings of a file, with {UNet2DModel.__name__} replaced by the name of the class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            name = lambda part: re.fullmatch(r"\{(\w+)\.__name__\}", part)
            parts = [ast.unparse(ast.JoinedStr([part]))[2:-1] for part in node.values]
            yield "".join(match[1] if (match := name(part)) else part for part in parts)


def test_every_sentence_of_troubleshooting_is_in_the_code():
    """The parts between `...` occur in the strings of the scripts and the package."""
    said = ""
    for path in [*ROOT.glob("*.py"), *(ROOT / "diffusion_training").rglob("*.py")]:
        said += "\n".join(list_strings(ast.parse(path.read_text()))) + "\n"
    text = (ROOT / "docs/troubleshooting.md").read_text()
    # the quoted sentences at the start of each item
    items = re.findall(r"^- ((?:`[^`]+`(?:, | or | \(or |$)?)+)", text, re.M)
    quoted = [sentence for item in items for sentence in re.findall("`([^`]+)`", item)]
    assert len(quoted) > 8
    for sentence in quoted:
        for part in sentence.split("..."):
            assert part.strip() in said, f"nothing says {part.strip()!r} of {sentence!r}"
