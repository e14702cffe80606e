"""The metadata of a model card: base and data if they are on the hub, and the licence."""

import os

import pytest

import train_text_to_image
from diffusion_training.arguments import Flags
from diffusion_training.families.known import load_family
from diffusion_training.training.showing.captioned_card import describe_text_to_image
from diffusion_training.training.showing.card import describe_for_hub, save_model_card, tabulate
from diffusion_training.training.showing.report import Description, name_run
from diffusion_training.training.showing.sample_base import SampleBase
from diffusion_training.training.showing.validation_base import OtherBase

OTHER = "license: other\nlicense_name: my-licence\nlicense_link: LICENSE.md"


def describe(folder, **flags):
    """The metadata of a card. Default flags: a LoRA for a base on the hub."""
    values = {"cache_dir": str(folder), "dataset_name": "me/photos", "instance_prompt": "a sks dog"}
    settings = Flags(**values | flags)
    base = flags.get("base", "org/base")
    described = Description(["text-to-image", "lora"], "A LoRA.", "code", base)
    return describe_for_hub(described, settings).to_dict()


@pytest.fixture
def cached(tmp_path):
    """`cached(text)`: the local cache of the hub has org/base with this at the head of its card."""

    def cached(text):
        repository = tmp_path / "models--org--base"
        for name in ("refs", "snapshots/abc"):
            (repository / name).mkdir(parents=True, exist_ok=True)
        (repository / "refs/main").write_text("abc")
        (repository / "snapshots/abc/README.md").write_text(f"---\n{text}\n---\n# Base\n")
        return tmp_path

    return cached


def test_card_names_base_model_dataset_prompt_and_licence(cached):
    assert describe(cached("license: openrail++")) == {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["diffusers", "text-to-image", "lora"],
        "base_model": "org/base",
        "datasets": ["me/photos"],
        "instance_prompt": "a sks dog",
        "license": "openrail++",
    }


def test_card_gives_name_and_link_of_an_other_licence(cached):
    described = describe(cached(OTHER))
    assert (described["license"], described["license_name"]) == ("other", "my-licence")
    assert described["license_link"] == "https://huggingface.co/org/base/blob/main/LICENSE.md"
    described = describe(cached(OTHER.replace("LICENSE.md", "https://a.b/c")))
    assert described["license_link"] == "https://a.b/c"


@pytest.mark.parametrize("text", ["license: other", "language: en", "license: [", "\0"])
def test_card_omits_a_licence_that_can_not_be_read(cached, text):
    described = describe(cached(text))
    assert not [name for name in described if "license" in name] and described["base_model"]


def test_card_names_no_local_folders(cached, tmp_path, monkeypatch):
    """The hub rejects a card whose base or data is not an id."""
    monkeypatch.chdir(cached("license: mit"))
    (tmp_path / "org/base").mkdir(parents=True)
    folders = {"dataset_name": str(tmp_path), "base": "org/base"}
    for flags in (folders, {"dataset_name": None, "base": None}, {**folders, "base": "../gone"}):
        described = describe(tmp_path, **flags)
        assert not described.keys() & {"base_model", "datasets", "license"}


def test_card_table_escapes_prompts():
    table = tabulate("setting", {"seed": 1, "prompts": ["a <sks> dog | cat"], "name": "a\nb"})
    assert table.splitlines() == [
        "| setting | |",
        "|---|---|",
        "| seed | 1 |",
        "| prompts | ['a &lt;sks&gt; dog &#124; cat'] |",
        "| name | a b |",
    ]
    assert "0.1235" in tabulate("loss", {"held_out_loss": 0.123456}, ".4g")


def test_names_of_folders_bring_no_markup_into_a_card(tmp_path):
    name = "a`<img src=x>![b](c)\n# *d*"
    for folder in ("runs", "data"):
        (tmp_path / folder / name).mkdir(parents=True)
    out, data = tmp_path / "runs" / name, tmp_path / "data" / name
    values = {"output_dir": str(out), "train_data_dir": str(data)}
    os.mkfifo(out / "README.md")  # reading it would never end
    save_model_card(
        3, lambda about, args: Description(["x"], f"On `{about.data}`.", "code"), Flags(**values)
    )
    lines = (out / "README.md").read_text().splitlines()
    assert "# a\\`&lt;img src=x&gt;!\\[b\\](c) # \\*d\\*" in lines
    assert "On `a'<img src=x>![b](c) # *d*`." in lines
    assert len([line for line in lines if "img" in line]) == 2


def test_the_code_loads_the_lora_of_samples_for_their_base_alone(tmp_path):
    flags = ["--latents_dir=x", "--pretrained_model_name_or_path=base", "--rank=4"]
    flags += ["--validation_lora=lcm.safetensors", f"--output_dir={tmp_path / 'mine'}"]
    flags += ["--resolution=64", "--validation_prompts", "one"]
    args = train_text_to_image.parse_args(flags)
    family = load_family("sd")
    own = SampleBase(name="base", family=family, num_inference_steps=20, guidance_scale=7.5)
    other = OtherBase(
        name="base", family=family, num_inference_steps=4, guidance_scale=1.0,
        lora="lcm.safetensors", prefix="turbo-", base=None, scheduler=None,
        sampler=("LCMScheduler", {}), resolution=64, launch=None, args=args,
    )  # fmt: skip
    about = name_run(1, args, local=False)
    usage = describe_text_to_image(family, "U-Net", False, about, args, bases=[own, other]).usage
    fast, plain = usage.split("# base, 20 steps, guidance 7.5\n")
    assert fast.startswith("# base with lcm.safetensors, 4 steps, no guidance\n")
    trained = 'pipeline.load_lora_weights("mine"'
    assert f'{trained}, adapter_name="trained")' in fast and f"{trained})" in plain
    assert 'pipeline.load_lora_weights("lcm.safetensors", adapter_name="speed")' in fast
    assert "LCMScheduler" in fast and "num_inference_steps=4" in fast
    assert "lcm" not in plain.lower() and "num_inference_steps=20" in plain
