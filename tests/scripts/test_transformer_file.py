"""--transformer_file: a denoiser in one file trains to the same bits as in its folder."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned, make_z_image, needs, read_files
from original_layout import save_transformer, split_as_tiny, to_original
from safetensors.torch import load_file, save_file
from test_validation_base import aligned, make_speed_lora  # noqa: F401

from diffusion_training.families import transformer_file
from diffusion_training.families.base import Base
from diffusion_training.families.recording import record_family
from diffusion_training.families.trained import open_trained_base
from diffusion_training.families.transformer_file import unpack_transformer
from diffusion_training.models import find_weight_files, load_weights, read_precision
from diffusion_training.training.showing.validation_base import open_turbo

pytestmark = [
    pytest.mark.usefixtures("without_figures"),
    pytest.mark.filterwarnings("ignore:FluxPosEmbed:FutureWarning"),
]
precompute, train = Script("precompute_latents"), Script("train_flow")
PREFIX = "model.diffusion_model."
LORA = "pytorch_lora_weights.safetensors"
WITH_PREFIX = ("flux2", "flux3", "qwen_image", "sd3")
SIDES = {"qwen_image_2_1": 64}
MAKE = {
    name: tiny_pipelines.MAKE[name]
    for name in (
        "z_image",
        "klein",
        "qwen_image",
        "flux",
        "flux_dev",
        "flux2",
        "sd3",
        "chroma",
        "krea2",
        "qwen_image_2_1",
    )
}
MAKE["flux3"] = tiny_pipelines.BLOCKS["flux3"]


class Made:
    """A pipeline, a cache, the pipeline without its denoiser's weights, and a file of these."""

    def __init__(self, folder, name, dtype=torch.float32, prefix=""):
        self.folder = folder
        self.side = SIDES.get(name, 16)
        MAKE[name](folder / "base")
        if dtype != torch.float32:
            place = folder / "base/transformer"
            kind = json.loads((place / "config.json").read_text())["_class_name"]
            model = getattr(diffusers, kind).from_pretrained(place)
            model.to(dtype).save_pretrained(place)
        # a VAE's weights, which a file with all models has too
        more = {"first_stage_model.conv.weight": torch.ones(2, 2)} if prefix else {}
        self.file = save_transformer(folder / "base", folder / "mine.safetensors", prefix, **more)
        self.bare = folder / "bare/base"  # samples of two bases show this name
        shutil.copytree(folder / "base", self.bare)
        for path in self.bare.glob("transformer/*.safetensors"):
            path.unlink()
        make_captioned(folder / "images", 4)
        flags = [f"--train_data_dir={folder / 'images'}", "--center_crop"]
        flags += [f"--resolution={self.side}", "--dataloader_num_workers=0"]
        base = f"--pretrained_model_name_or_path={folder / 'base'}"
        precompute(base, *flags, f"--output_dir={folder / 'cache'}")

    def flags(self, out, *more, base=None):
        """Flags of two steps with the file; base: flags of another base."""
        flags = train.flags(self.folder / out, f"--latents_dir={self.folder / 'cache'}")
        flags += base or self.with_file(self.file)
        flags += [f"--cache_dir={self.folder / 'kept'}", "--train_batch_size=2"]
        flags += ["--max_train_steps=2", "--learning_rate=0.01", "--checkpointing_steps=1"]
        flags += ["--num_validation_images=1", "--num_inference_steps=2", "--lr_warmup_steps=0"]
        return [*flags, "--validation_prompts", "a digit", *map(str, more)]

    def with_file(self, path):
        return [f"--pretrained_model_name_or_path={self.bare}", f"--transformer_file={path}"]

    @property
    def with_folder(self):
        return [f"--pretrained_model_name_or_path={self.folder / 'base'}"]

    def train_both(self, *more):
        """Train from the folder and from the file, and compare all that is written but texts."""
        train(*self.flags("one", *more, base=self.with_folder))
        train(*self.flags("other", *more))
        one, other = (read_results(self.folder / name) for name in ("one", "other"))
        assert one == other and len(one) > 6

    def draw(self, out):
        """An image by the code of the report."""
        report = json.loads((self.folder / out / "report.json").read_text())
        code = report["usage"].partition("image.resize")[0].partition("image.save")[0]
        made = {}
        torch.manual_seed(0)
        exec(code, made)
        return np.asarray(made["image"])


def read_results(folder):
    """{file: content} of weights, checkpoints and samples."""
    ends = (".safetensors", ".bin", "adapter_config.json")
    return {
        name: content
        for name, content in read_files(folder).items()
        if name.endswith(ends) or "samples/" in name
    }


@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
def test_a_lora_trains_and_draws_to_the_same_bits_as_from_the_folder(tmp_path, monkeypatch, name):
    split_as_tiny(monkeypatch)
    made = Made(tmp_path, name, prefix=PREFIX if name in WITH_PREFIX else "")
    made.train_both("--rank=2")
    assert np.array_equal(made.draw("one"), made.draw("other"))
    assert len(list((tmp_path / "kept/single_files").glob("mine-*/config.json"))) == 1


@pytest.mark.long
def test_all_that_reads_the_base_reads_the_file(tmp_path, monkeypatch):
    """The rounded and swapped base, that of the samples, and the check of a resumed run."""
    split_as_tiny(monkeypatch)
    made = Made(tmp_path, "flux", torch.bfloat16)
    adapter = make_speed_lora(tmp_path / "base", tmp_path / "adapter.safetensors")
    more = ["--rank=2", "--base_precision=int8", "--blocks_to_swap=all"]
    more += [f"--training_adapter={adapter}", f"--validation_base={tmp_path / 'base'}"]
    made.train_both(*more)
    other = tmp_path / "other.safetensors"
    save_file({name: 2 * x for name, x in load_file(made.file).items()}, other)
    more += ["--resume_from_checkpoint=latest", "--max_train_steps=3"]
    said = train.refused(*made.flags("other", *more, base=made.with_file(other)))
    assert "transformer is of another LoRA (another base): keep base and flags" in said
    train(*made.flags("other", *more))


@pytest.mark.long
def test_a_whole_model_in_bfloat16_trains_to_the_same_bits_as_from_the_folder(tmp_path):
    made = Made(tmp_path, "z_image", torch.bfloat16, PREFIX)
    made.train_both("--mixed_precision=bf16")
    trained = load_file(tmp_path / "other/transformer/diffusion_pytorch_model.safetensors")
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    config = (tmp_path / "other/transformer/config.json").read_text()
    assert config == (tmp_path / "one/transformer/config.json").read_text()
    assert str(tmp_path) not in config


@pytest.mark.long
def test_from_the_hub_all_but_the_denoisers_weights_are_fetched(hub, tmp_path):
    made = Made(tmp_path, "z_image")
    hub.add("org/z", tmp_path / "base")
    base = ["--pretrained_model_name_or_path=org/z", f"--transformer_file={made.file}"]
    for out, more in (("lora", ["--rank=2"]), ("whole", ["--no-use_ema"])):
        train(*made.flags(out, *more, base=base))
    asked = [each.path for each in hub.requests]
    assert any(path.endswith("/vae/diffusion_pytorch_model.safetensors") for path in asked)
    assert any(path.endswith("/transformer/config.json") for path in asked)
    assert not any("/transformer/diffusion_pytorch_model" in path for path in asked)
    train(*made.flags("plain", "--rank=2", base=base[:1]))
    assert any("/transformer/diffusion_pytorch_model" in each.path for each in hub.requests)
    lora = f"lora/{LORA}", f"plain/{LORA}"
    one, other = ((tmp_path / path).read_bytes() for path in lora)
    assert one == other


@pytest.mark.long
def test_the_true_sizes_of_flux_are_checked_by_the_header_alone(tmp_path, monkeypatch):
    """FLUX.1-dev's 12 billion weights, in a file of 24 GB without content."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True)
    model.save_config(tmp_path / "base/transformer")
    weights = to_original("FluxTransformer2DModel", model.config, model.state_dict())
    path = tmp_path / "flux1-dev.safetensors"
    unpacked = []
    monkeypatch.setattr(transformer_file, "unpack_once", lambda *args: unpacked.append(args))
    family = SimpleNamespace(model="FluxTransformer2DModel", folder="transformer")
    base = Base(family, "base", str(tmp_path / "base"), {})
    write_header(weights, path)
    unpack_transformer(str(path), base, None)
    assert len(unpacked) == 1
    write_header(weights | {"double_blocks.0.extra": torch.empty(2)}, path)
    with pytest.raises(SystemExit, match="which has no double_blocks.0.extra$"):
        unpack_transformer(str(path), base, None)
    del weights["double_blocks.18.img_attn.qkv.bias"], weights["single_blocks.0.linear1.weight"]
    write_header(weights, path)
    with pytest.raises(SystemExit, match="it lacks double_blocks.18.img_attn.qkv.bias, single_"):
        unpack_transformer(str(path), base, None)


def write_header(weights, path):
    """A file of weights in bfloat16 that takes no room on the disk, for its content is a hole."""
    header = {}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + 2 * weight.numel()
        about = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def z_image(tmp_path_factory):
    """(a folder of Z-Image, its denoiser in one file)."""
    folder = tmp_path_factory.mktemp("z_image")
    make_z_image(folder / "base")
    return folder / "base", save_transformer(folder / "base", folder / "z.safetensors")


def list_flags(tmp_path, base, path):
    flags = [f"--pretrained_model_name_or_path={base}", f"--transformer_file={path}"]
    flags += [f"--cache_dir={tmp_path / 'kept'}", "--latents_dir=none", "--rank=2"]
    return [*flags, f"--output_dir={tmp_path / 'out'}"]


def test_weights_in_8_bits_are_converted_exactly_or_refused(tmp_path, z_image, monkeypatch):
    monkeypatch.setattr(transformer_file, "SHARD", "100KB")
    base, path = z_image
    exact = load_file(path)
    rounded = {
        name: x.to(torch.float8_e4m3fn) if x.dim() > 1 else x.bfloat16()
        for name, x in exact.items()
    }
    path = tmp_path / "z-turbo-fp8.safetensors"
    save_file(rounded, path)
    args = train.module.parse_args(list_flags(tmp_path, base, path))
    opened = open_trained_base(args, "train_flow.py", record_family)
    assert len(find_weight_files(opened.transformer, "")) > 1
    kind, precision = diffusers.ZImageTransformer2DModel, read_precision(opened.transformer)
    weights = load_weights(kind, opened.transformer, precision).state_dict()
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}
    query = weights["layers.1.attention.to_q.weight"].float()
    expected = rounded["layers.1.attention.qkv.weight"][:32].float()
    assert torch.equal(query, expected) and query.abs().max() > 0
    assert opened.family.is_distilled(opened)

    for name, value, what in (
        # a scale of a weight that is not there, or that is not in fp8; newer formats
        ("layers.0.x.scale_weight", torch.ones(1), "layers.0.x.scale_weight"),
        ("layers.0.attention_norm1.weight_scale", torch.ones(1), "layers.0.attention_norm1.weight"),
        ("layers.0.attention.qkv.comfy_quant", write_format("nvfp4"), "layers.0.attention.qkv.com"),
        ("layers.0.attention.qkv.weight", torch.ones(96, 32, dtype=torch.int8), "I8"),
    ):
        save_file(rounded | {name: value}, path)
        said = train.refused(*list_flags(tmp_path, base, path))
        assert f"{path} holds quantized weights ({what}" in said and "bf16" in said
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    said = train.refused(*list_flags(tmp_path, base, tmp_path / "mine.gguf"))
    assert "mine.gguf needs the package gguf: pip install gguf, or give the .safetensors" in said
    assert not (tmp_path / "out").exists()


@needs("gguf")
def test_a_gguf_file_is_its_weights_in_bfloat16(tmp_path, z_image):
    import gguf

    base, path = z_image
    rounded = {}

    def write(name, left_out=""):
        """In 8 and in 4 bits, with their scales; norms and biases stay as they are."""
        writer = gguf.GGUFWriter(tmp_path / name, "lumina2")
        for number, (key, weight) in enumerate(load_file(path).items()):
            is_wide = weight.dim() > 1 and weight.shape[-1] % 32 == 0
            kinds = gguf.GGMLQuantizationType
            kind = (kinds.Q8_0, kinds.Q4_1)[number % 2] if is_wide else kinds.F32
            data = gguf.quantize(weight.float().numpy(), kind)
            rounded[key] = torch.from_numpy(gguf.dequantize(data, kind).copy())
            if is_wide:
                rounded[key] = rounded[key].bfloat16()
            if key != left_out:
                writer.add_tensor(key, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    folders = []
    files = [write("mine.gguf"), tmp_path / "same.safetensors"]
    save_file(rounded, files[1])
    for file in files:
        args = train.module.parse_args(list_flags(tmp_path, base, file))
        opened = open_trained_base(args, "train_flow.py", record_family)
        folders.append(Path(opened.transformer))
    assert read_files(folders[0]) == read_files(folders[1]) and len({*folders}) == 2
    turbo = SimpleNamespace(validation_base=str(files[0]), cache_dir=args.cache_dir)
    assert Path(open_turbo(None, opened, None, None, turbo).transformer) == folders[0]
    assert not transformer_file.write_loading("Kind", str(files[0]), "mine.gguf", "base", "dtype")
    assert torch.bfloat16 in {weight.dtype for weight in rounded.values()}
    for file, sentence in (
        (write("lacks.gguf", "layers.1.attention.qkv.weight"), "it lacks layers.1.attention."),
        (tmp_path / "none.gguf", "none.gguf can't be read"),
    ):
        (tmp_path / "none.gguf").write_bytes(b"GGUF and no more")
        assert sentence in train.refused(*list_flags(tmp_path, base, file))


def test_scales_hold_for_a_weight_its_rows_or_blocks_of_128():
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 3)
    whole = torch.empty(200, 300)
    for i in range(2):
        for j in range(3):
            whole[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = blocks[i, j]
    rows = torch.rand(200)
    multiply = transformer_file.multiply
    for scale, factor in (
        (blocks, whole), (rows, rows[:, None]), (rows[:, None], rows[:, None]),
        (torch.tensor(0.3), 0.3), (torch.full((1, 1), 0.3), 0.3),
    ):  # fmt: skip
        found = multiply(weight, scale, "x.weight_scale")
        assert torch.equal(found, (weight.float() * factor).bfloat16())
    for shape in ((3, 2), (300,), (200, 2), (1, 300)):
        with pytest.raises(ValueError, match="x.weight_scale of shape"):
            multiply(weight, torch.rand(shape), "x.weight_scale")


def write_format(name):
    return torch.tensor([*json.dumps({"format": name}).encode()], dtype=torch.uint8)


@pytest.mark.parametrize("form", ["scale_weight", "weight_scale", "weight_scale_inv"])
def test_scales_of_fp8_are_multiplied_into_the_weights(tmp_path, z_image, form):
    """As the programs write them that have the three names, and every tensor is used."""
    base, path = z_image
    exact = load_file(path)
    stored, expected = {}, {}
    torch.manual_seed(0)
    for name, weight in exact.items():
        stored[name] = expected[name] = weight.bfloat16()
        if weight.dim() != 2 or not name.endswith(".weight"):
            continue
        rows, columns = weight.shape
        shape = {"scale_weight": (1,), "weight_scale": (rows, 1)}.get(
            form, (-(-rows // 128), -(-columns // 128))
        )
        scale = torch.rand(shape) + 0.5
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[name.removesuffix("weight") + form] = scale
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
        stored[name.removesuffix("weight") + "comfy_quant"] = write_format("float8_e4m3fn")
        for row in range(rows):
            whole = (
                scale
                if form == "scale_weight"
                else scale[row // (1 if len(scale) == rows else 128)]
            )
            whole = whole.repeat_interleave(128)[:columns] if form == "weight_scale_inv" else whole
            stored_row = stored[name][row].float()
            expected[name] = expected[name].clone()
            expected[name][row] = (stored_row * whole).bfloat16()
    save_file(expected, tmp_path / "expected.safetensors")
    save_file(stored | {"scaled_fp8": torch.empty(2)}, tmp_path / "scaled.safetensors")
    opened = []
    for name in ("expected", "scaled"):
        args = list_flags(tmp_path, base, tmp_path / f"{name}.safetensors")
        args = train.module.parse_args(args)
        folder = open_trained_base(args, "train_flow.py", record_family).transformer
        (file,) = Path(folder).glob("*.safetensors")
        opened.append(load_file(file))
    one, other = opened
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    assert {weight.dtype for weight in other.values()} == {torch.bfloat16}
    # without the scales it is another model, and the code of the card does not read the file
    plain = load_weights(diffusers.ZImageTransformer2DModel, str(base), subfolder="transformer")
    query = plain.state_dict()["layers.1.attention.to_q.weight"]
    assert not torch.allclose(query, other["layers.1.attention.to_q.weight"].float(), rtol=0.1)
    path = str(tmp_path / "scaled.safetensors")
    assert transformer_file.write_loading("K", path, "scaled", "base", "dtype") == []
    stored["layers.0.attention.qkv." + form] = torch.ones(7)
    save_file(stored, path)
    said = train.refused(*list_flags(tmp_path, base, path))
    assert "layers.0.attention.qkv." + form + " of shape [7] scales a weight of [96, 32]" in said


def test_unsuitable_files_end_in_a_sentence(tmp_path, z_image):
    base, path = z_image
    weights = load_file(path)
    first = "layers.0.adaLN_modulation.0.bias"

    def refused(found, base=base):
        path = tmp_path / "bad.safetensors"
        save_file(found, path) if isinstance(found, dict) else path.write_bytes(found)
        said = train.refused(*list_flags(tmp_path, base, path))
        assert not (tmp_path / "out").exists() and not [*(tmp_path / "kept").glob("*/*-*")]
        return said

    fit = "bad.safetensors does not fit the ZImageTransformer2DModel of"
    assert "bad.safetensors can't be read (" in refused(b"no safetensors")
    said = train.refused(*list_flags(tmp_path, base, tmp_path / "none.safetensors"))
    assert "none.safetensors can't be read (" in said
    said = train.refused(*list_flags(tmp_path, base, tmp_path))
    assert "can't be read (" in said
    said = refused({name: x for name, x in weights.items() if not name.startswith("layers.0.")})
    assert fit in said and ": it lacks layers.0.attention.norm_q.weight, layers.0.att" in said
    assert said.count("layers.0") == 3 and "more weights" in said
    said = refused(weights | {"layers.2.a": torch.ones(2), "lora": torch.ones(2)})
    assert fit in said and said.endswith(", which has no layers.2.a, lora\n")
    wide = {name: x.repeat(*[2] * x.dim()) for name, x in weights.items()}
    assert f"{base}, which has other shapes of " in refused(wide)
    assert "and 7" in refused(wide) and "more weights" in refused(wide)
    said = refused(weights | {first: torch.full_like(weights[first], torch.nan)})
    assert "bad.safetensors can't be unpacked (1 weights with NaN or infinity, such as " in said
    assert f"such as {first})" in said
    del weights[first]
    assert refused(weights).endswith(f"it lacks {first}\n")

    # another architecture, whose conversion asks for names; a class that diffusers does not convert
    for kind, expected in (
        ("FluxTransformer2DModel", f"{path.name} does not fit the FluxTransformer2DModel"),
        ("PRXTransformer2DModel", "reads no PRXTransformer2DModel from one file: leave it out"),
    ):
        family = SimpleNamespace(model=kind, folder="transformer")
        opened = Base(family, "base", str(tmp_path / kind), {})
        (tmp_path / kind / "transformer").mkdir(parents=True)
        config = {"_class_name": kind, "num_layers": 1, "num_single_layers": 1}
        (tmp_path / kind / "transformer/config.json").write_text(json.dumps(config))
        with pytest.raises(SystemExit, match=expected):
            unpack_transformer(str(path), opened, str(tmp_path / "kept"))


def test_a_file_that_is_changed_is_unpacked_again(tmp_path, z_image):
    base, path = z_image
    args = train.module.parse_args(list_flags(tmp_path, base, tmp_path / "z.safetensors"))
    weights = load_file(path)
    folders = []
    for factor in (1, 1, 2):
        if factor == 2 or not folders:
            save_file({name: factor * x for name, x in weights.items()}, args.transformer_file)
        folders.append(Path(open_trained_base(args, "train_flow.py", record_family).transformer))
    assert folders[0] == folders[1] != folders[2]
    assert [*folders[2].parent.glob("*/")] == [folders[2]]
