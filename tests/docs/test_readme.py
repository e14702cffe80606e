"""README.md: its figures are those of the pages, recipes and files that they come from."""

import re

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
MEMORY = (ROOT / "docs/memory.md").read_text()


def read_table(page, head):
    """{first cell: the other cells} of the table whose head begins with `head`."""
    lines = page[page.index(f"\n| {head} |") :].strip().split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {re.sub(r"^\[(.*)\]\(.*\)$", r"\1", row[0]): row[1:] for row in rows}


LORAS = read_table(README, "LoRA of")


def list_flags(cell):
    """The flags that a cell of memory.md's table stands for, as its legend says."""
    if cell == "no":
        return "[more flags](docs/memory.md#what-fits)"
    flags = {"E": "--cache_latents cpu", "half the side": "--resolution 512"}
    parts = re.split(r", | (?=\*)", cell)
    added = [flag for part, flag in flags.items() if part in parts]
    return f"`{' '.join(added)}`" if added else ""


@pytest.mark.parametrize("model", LORAS)
def test_loras_are_as_in_the_tables_of_memory(model):
    fits = read_table(MEMORY, "a LoRA of")
    ram = read_table(MEMORY, "model | VAE and text encoders")
    _, _, small, larger, memory, _ = LORAS[model]
    assert [small, larger] == [list_flags(cell) for cell in fits[model][:2]]
    assert memory == f"{max(map(float, ram[model])):.0f} GB"


def test_only_krea_2_needs_more_than_its_recipe_on_8_gb():
    fits = read_table(MEMORY, "a LoRA of")
    assert {model for model, cells in fits.items() if cells[0] == "no"} == {"Krea 2"}
    said = "[8 GB are enough for a LoRA](docs/memory.md#what-fits) (of Krea 2, for a smaller one)"
    assert said in README
    assert "Krea 2 fits on 8 GB with attention alone" in MEMORY


def test_the_first_download_is_as_in_its_recipe():
    (low, high) = re.search(r"The run downloads (\d+) to (\d+) GB and writes", README).groups()
    recipe = re.search(r"@(recipes/\S+)", README)[1]
    assert f"# {low} to {high} GB to download" in (ROOT / recipe).read_text()


def test_the_fine_tune_fits_as_memory_says():
    cells = read_table(MEMORY, "the whole model")["Stable Diffusion 1.5"]
    said = r"a GPU with (\d+) GB \((\d+) GB with (.*?), (\d+) GB with (.*?) as well\)"
    card, other, first, least, second = re.search(said, " ".join(README.split())).groups()
    assert (first, second) == ("`--optimizer adamw8bit`", "`--no-use_ema`")
    cells = dict(zip((8, 12, 16, 24, 48, 80), cells, strict=True))
    assert cells[int(least)] == "bf16, GC, 8-bit, no EMA"
    assert cells[int(other)] == "bf16, GC, 8-bit" and cells[int(card)] == "bf16"


def test_the_hours_from_scratch_are_those_of_the_recipes_steps():
    said = r"at (\d+) px on a GPU with (\d+) GB\. .*\[(\d+) hours\].*? ([\d,]+) steps"
    side, card, hours, named = re.search(said, " ".join(README.split())).groups()
    recipe = (ROOT / f"recipes/unet_{side}_{card}gb.args").read_text()
    steps = int(re.search(r"--max_train_steps (\d+)", recipe)[1])
    assert named == f"{steps:,}"
    page = (ROOT / "docs/training.md").read_text()
    rows = re.findall(rf"^\| [\d,]+ \| {side} \| {steps:,} \| .*? \| ([\d.]+) \| .*\|$", page, re.M)
    assert rows and all(round(float(row)) == int(hours) for row in rows)


def test_the_numbers_of_patches_are_right():
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    words = f"{words} fifteen sixteen seventeen eighteen nineteen twenty".split()
    names = [path.stem for path in ROOT.glob("patches/*.diff")]
    own = [name for name in names if not name.startswith(("twin_", "stage_"))]
    twins = [name for name in names if name.startswith("twin_")]
    assert f"{words[len(own)]} patches" in README
    changing = (ROOT / "docs/changing.md").read_text()
    assert f"([{words[len(own)]}](patches.md) for big scripts" in changing
    assert f"[{words[len(twins)]}](#a-twin) for" in changing


def test_the_glossary_is_sorted_linked_and_has_no_word_that_no_page_uses():
    names = ("README", "docs/training", "docs/data", "docs/memory", "docs/lora")
    pages = [(ROOT / f"{name}.md").read_text() for name in names]
    assert all("glossary.md)" in page for page in pages)
    words = [*read_table((ROOT / "docs/glossary.md").read_text(), "word")]
    assert words == sorted(words, key=str.lower) and len(words) > 50
    others = [path.read_text() for path in ROOT.glob("docs/*.md") if path.name != "glossary.md"]
    text = " ".join(" ".join(others).split()).lower()
    for word in words:
        parts = re.split(r", | \(|\)", word.lower())
        assert any(re.search(rf"\b{re.escape(part)}", text) for part in parts if part), word


def test_minimal_has_the_number_of_scripts_that_its_row_says():
    page = (ROOT / "minimal/README.md").read_text()
    files = {path.name for path in ROOT.glob("minimal/*.py")}
    assert len(files) == 6 and "| six scripts in [minimal/]" in README
    assert {*re.findall(r"^\| \[(\w+\.py)\]", page, re.M)} == files
