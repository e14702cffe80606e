"""A tiny VAE, text encoder and tokenizer: loaded completely or refused, tried and hashed."""

import copy
import hashlib
import json
import re
import shutil
from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers
from conftest import MODELS, Script, hash_as_before, make_captioned, make_sdxl, make_z_image
from diffusers import AutoencoderKL, AutoencoderTiny, UNet2DModel
from original_layout import to_published
from safetensors.torch import load_file, save_file
from tiny_pipelines import MAKE

import precompute_latents
from diffusion_training.blocks import compute_in_float32
from diffusion_training.data import encoders as module
from diffusion_training.data.encoders import encode_prompts
from diffusion_training.families.base import hash_rules
from diffusion_training.families.opening import open_base
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recording import record_family
from diffusion_training.latents.settings import compare_settings
from diffusion_training.models import EXACT, hash_weights

# ------------------------------------------------------------------- a file of one part


class Parts:
    """A pipeline without the weights of its VAE and a text encoder, which are in a file each."""

    def __init__(self, folder, make, text="text_encoder"):
        make(folder / "whole")
        self.whole = [f"--pretrained_model_name_or_path={folder / 'whole'}"]
        shutil.copytree(folder / "whole", folder / "bare")
        for part in ("vae", text):
            for path in (folder / "bare" / part).glob("*.safetensors"):
                path.unlink()
        config = json.loads((folder / "whole/vae/config.json").read_text())
        vae = getattr(diffusers, config["_class_name"]).from_pretrained(folder / "whole/vae")
        weights = to_published(vae)
        self.vae = {name.removeprefix("first_stage_model."): x for name, x in weights.items()}
        if "Flux2" in config["_class_name"]:  # as in the file for ComfyUI
            half = {"quant_conv.": "encoder.", "post_quant_conv.": "decoder."}
            for name in [name for name in self.vae if "quant_conv." in name]:
                self.vae[half[name.rpartition(".")[0] + "."] + name] = self.vae.pop(name)
        (file,) = (folder / "whole" / text).glob("*.safetensors")
        self.text = load_file(file)
        self.folder = folder

    def flags(self, vae=None, text=None):
        """Flags of the pipeline with the files. vae, text: the weights in them."""
        found = [f"--pretrained_model_name_or_path={self.folder / 'bare'}"]
        for name, weights in (("vae", vae or self.vae), ("text_encoder", text or self.text)):
            path = self.folder / f"{name}.safetensors"
            save_file({key: value.contiguous() for key, value in weights.items()}, path)
            found.append(f"--{name}_name_or_path={path}")
        return [*found, f"--cache_dir={self.folder / 'kept'}"]


def copy_demo(folder):
    shutil.copytree(MODELS, folder)


@pytest.mark.parametrize("make, text, prefix", [
    (copy_demo, "text_encoder", "text_model."),  # CLIP
    (MAKE["flux"], "text_encoder_2", ""),  # T5
    (MAKE["klein"], "text_encoder", "model."),  # Qwen3; a VAE with statistics
])  # fmt: skip
def test_a_file_of_a_part_is_that_part(tmp_path, make, text, prefix):
    """prefix: of names in ComfyUI's files, which transformers may leave out where it saves."""
    parts = Parts(tmp_path, make, text)
    weights = {prefix + name.removeprefix(prefix): x for name, x in parts.text.items()}
    files, whole = parts.flags(text=weights), load(*parts.whole, resolution=32)
    refused(argv=files[:1], resolution=32)  # without the files, weights are missing
    found = load(*files, resolution=32)
    assert module.describe_models(found) == module.describe_models(whole)
    assert len([*(tmp_path / "kept/single_files").glob("[!.]*")]) == 2


@pytest.mark.ci
def test_a_cache_that_is_made_with_files_is_the_pipelines(tmp_path):
    make_captioned(tmp_path / "images", 3)
    parts, precompute = (
        Parts(tmp_path, MAKE["flux"], "text_encoder_2"),
        Script("precompute_latents"),
    )
    for name, base in (("one", parts.whole), ("two", parts.flags())):
        images = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=32", "--center_crop"]
        precompute(*base, *images, f"--output_dir={tmp_path / name}", "--dataloader_num_workers=0")
    (one,) = (tmp_path / "one").glob("*.arrow")
    assert one.read_bytes() == (tmp_path / "two" / one.name).read_bytes()


def test_a_text_encoder_in_fp8_is_multiplied_by_its_scales(tmp_path):
    parts = Parts(tmp_path, copy_demo)
    name = next(name for name in parts.text if name.endswith("q_proj.weight"))
    scaled = (parts.text[name] / 0.01).to(torch.float8_e4m3fn)
    more = {name: scaled, name.replace("weight", "scale_weight"): torch.tensor(0.01)}
    more["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    more["spiece_model"] = torch.zeros(9, dtype=torch.uint8)
    found = load(*parts.flags(text=parts.text | more)).text_encoders[0].state_dict()
    (own,) = [x for key, x in found.items() if name.removeprefix("text_model.") in key]
    assert torch.equal(own, (scaled.float() * 0.01).bfloat16().float())
    assert not torch.equal(own, parts.text[name])


def test_a_file_that_is_not_wholly_a_part_is_refused(tmp_path):
    parts = Parts(tmp_path, copy_demo)
    vae, text = parts.vae, parts.text
    bias = next(name for name in text if name.endswith("q_proj.bias"))
    words = next(name for name in text if "token_embedding" in name)

    def without(weights, name):
        return {key: value for key, value in weights.items() if key != name}

    for said, flags in {
        "the AutoencoderKL of": {"vae": {**vae, "loss.logvar": torch.ones(1)}},
        "which has no loss.logvar": {"vae": {**vae, "loss.logvar": torch.ones(1)}},
        "it lacks decoder.conv_out.bias": {"vae": without(vae, "decoder.conv_out.bias")},
        "has other shapes of encoder.conv_in.bias": {
            "vae": {**vae, "encoder.conv_in.bias": torch.ones(3)}
        },
        "NaN": {"vae": {**vae, "decoder.conv_out.bias": vae["decoder.conv_out.bias"] * torch.nan}},
        "1 unexpected keys, such as extra.weight": {
            "text": {**text, "extra.weight": torch.ones(1)}
        },
        "1 missing keys, such as": {"text": without(text, bias)},
        "does not fit the CLIPTextModel of": {"text": {**text, words: text[words][1:]}},
        "it is none of its text encoders": {"text": {words: text[words], bias: text[bias]}},
    }.items():
        refused(said, argv=parts.flags(**flags))
        kept = tmp_path / "kept/single_files"
        assert not [path for path in kept.glob("[!.]*") if ("vae" in flags) == ("vae" in path.name)]
    (tmp_path / "vae.safetensors").write_bytes(b"no weights")
    refused(
        "vae.safetensors can't be read", argv=[f"--vae_name_or_path={tmp_path}/vae.safetensors"]
    )
    args = precompute_latents.parse_args([
        f"--train_data_dir={MODELS}", f"--vae_name_or_path={tmp_path / 'vae.safetensors'}",
        f"--text_encoder_name_or_path={MODELS / 'text_encoder'}",
    ])  # fmt: skip
    with pytest.raises(SystemExit, match="is a file, and its config is the pipeline's: give --p"):
        open_base(args)
    MAKE["qwen_image"](tmp_path / "qwen")
    said = "reads no AutoencoderKLQwenImage from one file: leave it out"
    qwen = f"--pretrained_model_name_or_path={tmp_path / 'qwen'}"
    refused(said, argv=[*parts.flags()[1:2], qwen])


# ------------------------------------------------------------------- the models


def load(*argv, resolution=16, dtype=torch.float32):
    argv = [f"--pretrained_model_name_or_path={MODELS}", *map(str, argv)]
    args = precompute_latents.parse_args(
        [f"--train_data_dir={MODELS}", f"--resolution={resolution}", *argv]
    )
    encoders = module.load_encoders(open_base(args, record=record_family), dtype)
    scale = encoders.family.downscale(encoders.vae)
    module.check_sides(scale, args.resolution, args.bucket_step)
    return encoders


def refused(*said, **options):
    with pytest.raises(SystemExit) as stop:
        load(*options.pop("argv", ()), **options)
    assert all(part in str(stop.value) for part in said), stop.value


@pytest.fixture
def models(tmp_path):
    """A folder of models that a test may damage."""
    return shutil.copytree(MODELS, tmp_path / "models")


def test_images_become_moments_and_prompts_become_the_last_hidden_state():
    encoders = load()
    vae, text_encoders = encoders.vae, encoders.text_encoders
    ids = {"input_ids": torch.tensor([[1, 2, 3]])}
    pixels = torch.randint(
        256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        moments = module.encode_images(encoders, pixels)
        posterior = vae.encode(pixels / 127.5 - 1).latent_dist
        embeds = encode_prompts(encoders, ids)["prompt_embeds"]
        expected = text_encoders[0](ids["input_ids"]).last_hidden_state
    torch.testing.assert_close(moments, torch.cat([posterior.mean, posterior.std], dim=1))
    assert torch.equal(embeds, expected) and embeds.shape == (1, 3, 32)
    assert encoders.family.downscale(vae) == 2 and moments.shape == (3, 8, 8, 8)
    low = load(dtype=torch.bfloat16)
    with torch.no_grad():
        close = module.encode_images(low, pixels)
        text = encode_prompts(low, ids)["prompt_embeds"]
    assert close.dtype == text.dtype == torch.float32 and 0 < (close - moments).abs().max() < 0.1


def make_tiny(folder, **config):
    blocks = {"encoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1)}
    blocks |= {"decoder_block_out_channels": (8, 8), "num_decoder_blocks": (1, 1)}
    vae = AutoencoderTiny(in_channels=1, out_channels=1, **blocks, **config)
    vae.save_pretrained(folder)
    return vae


def test_autoencoder_tiny_and_models_from_several_folders_load(tmp_path, models):
    made = make_tiny(tmp_path / "tiny")
    apart = [
        f"--vae_name_or_path={tmp_path / 'tiny'}",
        f"--text_encoder_name_or_path={MODELS / 'text_encoder'}",
    ]
    encoders = load(*apart, f"--tokenizer_name_or_path={MODELS / 'tokenizer'}")
    vae, family = encoders.vae, encoders.family
    assert isinstance(vae, AutoencoderTiny) and family.downscale(vae) == 2 and not vae.training
    assert not family.has_moments(vae) and family.has_moments(load().vae)
    module.try_encoders(encoders)
    pixels = torch.randint(256, (2, 1, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(
            module.encode_images(encoders, pixels), made.eval().encode(pixels / 127.5 - 1).latents
        )
    described, whole = module.describe_models(encoders), module.describe_models(load())
    assert described["vae"]["class"] == "AutoencoderTiny"
    assert described["vae"]["scaling_factor"] == made.config.scaling_factor
    assert {k: v for k, v in described.items() if k != "vae"} == {
        k: v for k, v in whole.items() if k != "vae"
    }
    # a custom text encoder needs a tokenizer in its folder
    shutil.copytree(MODELS / "text_encoder", tmp_path / "both")
    refused(
        f"{tmp_path / 'both'} does not hold the model of",
        argv=[f"--text_encoder_name_or_path={tmp_path / 'both'}"],
    )
    shutil.copytree(MODELS / "tokenizer", tmp_path / "both", dirs_exist_ok=True)
    both = load(f"--text_encoder_name_or_path={tmp_path / 'both'}")
    assert len(both.tokenizers[0]) == len(encoders.tokenizers[0])


def test_models_with_missing_weights_are_refused(models):
    """transformers would add random weights, and diffusers would leave them out."""
    for part, file in (
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors"),
    ):
        whole = load_file(MODELS / part / file)
        for missing in (sorted(whole)[:1], sorted(whole)):
            kept = {name: tensor for name, tensor in whole.items() if name not in missing} or {
                "x": torch.ones(1)
            }
            save_file(kept, models / part / file, metadata={"format": "pt"})
            said = (
                f"{models} does not hold the {part} of a Stable Diffusion pipeline "
                f"({len(missing)} missing keys"
            )
            refused(said, argv=[f"--pretrained_model_name_or_path={models}"])
        wrong = {**whole, sorted(whole)[0]: torch.ones(2, 3, 4)}
        save_file(wrong, models / part / file, metadata={"format": "pt"})
        refused(f"does not hold the {part}", argv=[f"--pretrained_model_name_or_path={models}"])
        shutil.copy(MODELS / part / file, models / part / file)


@pytest.mark.parametrize("file, change, said", [
    ("vae/config.json", {"shift_factor": 0.1}, "its config has shift_factor, by which"),
    ("vae/config.json", {"latents_mean": [0.0] * 4}, "its config has latents_mean, by which"),
    ("vae/config.json", {"_class_name": "VQModel"},
     "its class is VQModel, not AutoencoderKL or AutoencoderTiny"),
    ("vae/config.json", {"norm_num_groups": True}, "the VAE does not work (group_norm()"),
    ("text_encoder/config.json", {"num_attention_heads": -1},
     "the text encoder does not work (invalid shape"),
    ("text_encoder/config.json", {"layer_norm_eps": None},
     "the text encoder does not work (layer_norm()"),
    ("text_encoder/config.json", {"vocab_size": 100}, "does not hold the text_encoder"),
    ("tokenizer/tokenizer_config.json", {"pad_token": None}, "or no padding token"),
])  # fmt: skip
def test_model_configs_that_do_not_work_are_refused(models, file, change, said):
    content = json.loads((models / file).read_text())
    (models / file).write_text(json.dumps({**content, **change}))
    with pytest.raises(SystemExit) as stop:
        module.try_encoders(load(f"--pretrained_model_name_or_path={models}"))
    assert said in str(stop.value) and "\n" not in str(stop.value)


def test_folders_without_a_pipeline_are_refused_by_name(tmp_path, models):
    refused(
        f"{tmp_path} does not hold the text_encoder of a Stable",
        argv=[f"--pretrained_model_name_or_path={tmp_path}"],
    )
    shutil.rmtree(models / "tokenizer")
    refused(
        f"{models} does not hold the tokenizer of",
        argv=[f"--pretrained_model_name_or_path={models}"],
    )
    UNet2DModel(
        block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    ).save_pretrained(tmp_path / "unet")  # fmt: skip
    refused(
        "does not hold the model of a Stable",
        "UNet2DModel",
        argv=[f"--vae_name_or_path={tmp_path / 'unet'}"],
    )
    refused("--resolution 15 is not a multiple of 2, which this VAE needs", resolution=15)


def test_a_tokenizer_without_a_limit_cuts_at_the_text_encoders_length(models):
    """A tokenizer without tokenizer_config.json has no maximum length."""
    path = models / "tokenizer/tokenizer_config.json"
    content = json.loads(path.read_text())
    assert load().tokenizers[0].model_max_length == 8
    path.write_text(json.dumps({**content, "model_max_length": 10**30}))
    own = f"--pretrained_model_name_or_path={models}"
    assert load(own).tokenizers[0].model_max_length == 8
    for limit in (5, 2):  # a start and an end token
        path.write_text(json.dumps({**content, "model_max_length": limit}))
        assert load(own).tokenizers[0].model_max_length == limit
    path.write_text(json.dumps({**content, "model_max_length": 1}))
    refused("captions get 1 token, but need 2", argv=[own])


def test_hash_weights_depends_on_values_and_not_on_names(tmp_path):
    vae = load().vae
    digest = module.hash_weights(vae)
    vae.half().save_pretrained(tmp_path / "half")
    # rounding changes the weights
    assert module.hash_weights(AutoencoderKL.from_pretrained(tmp_path / "half")) != digest
    again = load().vae
    again.renamed, again.quant_conv = again.quant_conv, None
    assert module.hash_weights(again) == digest
    with torch.no_grad():
        next(again.parameters()).view(-1)[0] += 1e-4
    assert module.hash_weights(again) != digest
    assert re.fullmatch("narrow:[0-9a-f]{64}", digest)
    wide, tall = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    tall.weight.data = wide.weight.data.view(3, 2)
    assert module.hash_weights(wide) != module.hash_weights(tall)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_weights_have_one_hash_in_every_precision(dtype):
    """Hashed as they are stored. The second word is the hash of older versions."""
    model = torch.nn.Sequential(torch.nn.Linear(1500, 1500), torch.nn.LayerNorm(3)).to(dtype)
    model[0].weight.data.mul_(1e3)  # beyond the range of float16's numbers below 1
    model[0].weight.data = model[0].weight.data.t()  # not contiguous
    model[0].bias.data[:1024] = 0  # the numbers that are tried first fit any precision
    digest = hash_weights(model)
    digests, columns = hash_weights(model, with_old=True).split(), []
    assert digests == [digest, hash_as_before(model)]
    for weight in model.parameters():
        exact = torch.bfloat16 if weight.dim() == 1 and len(weight) == 3 else dtype
        stored = weight.detach().contiguous().to(exact).flatten().view(torch.uint8).numpy()
        start = f"{exact} {tuple(weight.shape)}"
        columns.append(hashlib.sha256(start.encode() + stored.tobytes()).hexdigest())
    assert digest == f"narrow:{hashlib.sha256(''.join(sorted(columns)).encode()).hexdigest()}"
    assert hash_weights(copy.deepcopy(model).float()) == digest
    assert hash_weights(copy.deepcopy(model).double()) == digest
    other = copy.deepcopy(model).float()
    other[0].weight.data[-1, -1] += 2**-10
    assert hash_weights(other) != digest
    if dtype == torch.bfloat16:  # the same bytes
        other = copy.deepcopy(model)
        other[0].weight.data = other[0].weight.data.contiguous().view(torch.float16)
        assert hash_weights(other) != digest


def test_describe_models_shows_every_difference():
    seen = []
    for change in ("nothing", "scaling_factor", "weight", "bias", "tokens", "limit", "nothing"):
        encoders = load()
        vae, text_encoders = encoders.vae, encoders.text_encoders
        tokenizers = encoders.tokenizers
        with torch.no_grad():
            if change == "scaling_factor":
                vae.register_to_config(scaling_factor=0.18215)
            elif change == "weight":
                vae.decoder.conv_out.weight.view(-1)[-1] += 1e-3
            elif change == "bias":
                text_encoders[0].final_layer_norm.bias[0] += 1e-3
            elif change == "tokens":
                tokenizers[0].add_tokens(["<another>"])
            elif change == "limit":
                tokenizers[0].model_max_length = 7
        seen.append(module.describe_models(encoders))
    assert seen[0] == seen[-1] and len({json.dumps(described) for described in seen}) == 6
    assert seen[4].pop("tokenizer_rules") != seen[0]["tokenizer_rules"]  # with another token
    seen[4]["tokenizer_rules"] = seen[0]["tokenizer_rules"]
    where = [
        [name for name in seen[0] if described[name] != seen[0][name]] for described in seen[1:-1]
    ]
    assert where == [["vae"], ["vae"], ["text_encoder"], ["tokenizer"], ["tokenizer"]]


def make_tokenizers(folder):
    """The demo's tokenizer, and one that differs only in the order of two merges."""
    first = transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
    first.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    merges = content["model"]["merges"]
    merges.insert(0, merges.pop(merges.index(["t", "h"])))  # before ["h", "a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return first, transformers.CLIPTokenizer.from_pretrained(folder)


def test_tokenizers_with_the_same_vocabulary_and_other_merges_differ(tmp_path):
    first, other = make_tokenizers(tmp_path)
    text = "The quick brown fox, 123 times!"
    assert module.describe_tokenizer(first, text) == module.describe_tokenizer(other, text)
    assert first("that").input_ids != other("that").input_ids
    rules = hash_rules(first)
    assert rules != hash_rules(other)
    first(["a", "that"], padding="max_length", truncation=True, max_length=5)
    assert hash_rules(first) == rules  # padding and truncation are those of a call
    encoders = load()
    before = module.describe_models(encoders)
    encoders.tokenizers[:] = [other]
    changes = compare_settings(before, module.describe_models(encoders))
    assert [change.split()[0] for change in changes] == ["tokenizer_rules.tokenizer"]
    before["tokenizer_rules"]["libraries"] = "tokenizers 0.1"
    assert compare_settings(before, module.describe_models(encoders)) == []
    before["vae"] = None
    assert len(compare_settings(before, module.describe_models(encoders))) == 1


def test_a_recorded_pipeline_is_known_by_the_merges_of_its_tokenizers(tmp_path):
    first, other = make_tokenizers(tmp_path)

    def hash_parts(**others):
        parts = SimpleNamespace(others=others, record=lambda captions, options: None)
        return hash_rules(Recorded.load_tokenizer(None, None, {}, parts))

    assert hash_parts(tokenizer=first, feature_extractor=None) == hash_parts(tokenizer=first)
    assert hash_parts(tokenizer=first) != hash_parts(tokenizer=other)
    processors = [
        SimpleNamespace(tokenizer=tokenizer, chat_template=template)
        for tokenizer, template in ((first, "a"), (other, "a"), (first, "b"))
    ]
    assert len({hash_parts(processor=processor) for processor in processors}) == 3


def shorten_files(folder, dtype):
    """Write all of a pipeline's weights, except the VAE's, in 16 bits."""
    for path in folder.rglob("*.safetensors"):
        if path.parent.name != "vae":
            weights = load_file(path).items()
            short = {n: w.to(dtype) if w.is_floating_point() else w for n, w in weights}
            save_file(short, path, {"format": "pt"})


def encode_both(folder):
    """For float32 and `EXACT`: the encoders, their description, and all embeddings of captions."""
    for dtype in (torch.float32, EXACT):
        args = precompute_latents.parse_args(
            [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
        )
        base = open_base(args, record=record_family)
        encoders = module.load_encoders(base, dtype)
        with torch.inference_mode():  # as precompute_latents.py encodes
            embeds = [dict(module.encode_caption(encoders, "a red apple, 12"))]
        embeds.append(module.encode_empty_prompt(encoders, base))
        module.try_encoders(encoders)
        yield encoders, module.describe_models(encoders), embeds


def count_bytes(encoders):
    return sum(weight.nbytes for weight in encoders.text_encoders.parameters())


def check_exact(folder):
    """Returns the share of float32's memory."""
    (whole, described, embeds), (exact, again, same) = encode_both(folder)
    assert described == again
    for one, other in zip(embeds, same, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    return count_bytes(exact) / count_bytes(whole)


@pytest.mark.parametrize("make, dtype", [(make_z_image, "bfloat16"), (make_sdxl, "float16")])
def test_exact_encoders_have_float32s_bits_in_less_memory(tmp_path, make, dtype):
    """Only blocks are in 16 bits, which are nearly all of a true text encoder."""
    folder = make(tmp_path)
    shorten_files(folder, getattr(torch, dtype))
    assert 0.7 < check_exact(folder) < 0.8


def test_exact_encoders_are_in_float32_if_any_file_is(tmp_path):
    """Weights that were read as 16 bits would lose digits."""
    folder = make_sdxl(tmp_path)
    shorten_files(folder / "text_encoder_2", torch.float16)
    _, (encoders, *_) = encode_both(folder)
    first, second = ({w.dtype for w in each.parameters()} for each in encoders.text_encoders)
    assert first == {torch.float32} and second == {torch.float32, torch.float16}
    assert check_exact(folder) > 0.8


@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
def test_exact_encoders_of_any_pipeline_have_float32s_bits(tmp_path, name):
    MAKE[name](tmp_path)
    shorten_files(tmp_path, torch.bfloat16)
    assert check_exact(tmp_path) <= 1


def test_a_model_that_has_rounded_numbers_of_its_own_does_not_compute_exactly():
    """Gemma keeps a factor that it computes in the precision in which it is loaded."""
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=torch.bfloat16)]))
    factor = torch.tensor(2**0.5, dtype=torch.bfloat16)
    model.register_buffer("from_file", factor)
    assert compute_in_float32(model) and model.from_file.dtype == torch.float32
    model.register_buffer("own", factor.bfloat16(), persistent=False)
    assert not compute_in_float32(model)
