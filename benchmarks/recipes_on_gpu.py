"""How much memory do the recipes take on a GPU, and is it what --fit says?

    python benchmarks/recipes_on_gpu.py                          # on a GPU with 80 GB
    python benchmarks/recipes_on_gpu.py --recipes sdxl_lora z_image_lora --cards 8 12 24
    python benchmarks/recipes_on_gpu.py --cards 8 --flags="--base_precision int8"

Each recipe trains the published model's shapes with random weights, in no more memory than nine
tenths of each of the cards: three steps of two batches each, with captions that fill all tokens.
Before step 1, and a LoRA again after step 3, it draws a sample in two steps. Other models end
there, without the hundred GB of disk that their checkpoints need. The text encoders have their true
width and few layers, because they have left the GPU before step 1.

Prints the plan that --fit chose with its estimate; the peak in GB (1e9 bytes) of a step, and of the
samples; what torch had reserved; whether samples had to be decoded on the CPU; and the images per
second of the last step.
"""

import argparse
import atexit
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import bench
import diffusers
import memory
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook

# Not here: edits, which need pairs of images, and models that `make_pipeline` does not know
RECIPES = {
    path.stem: path
    for path in sorted(bench.ROOT.glob("recipes/*.args"))
    if not re.search("edit|2_1|flux1|flux3|krea2|sd35|anima", path.stem)
}
# {beginning of a recipe's name: its model in memory.py}
NAMES = {
    "sd15": "Stable Diffusion 1.5",
    "sdxl": "SDXL",
    "prx_163m": "PRX 163M",
    "z_image": "Z-Image",
    "klein_4b": "FLUX.2 klein 4B",
    "klein_9b": "FLUX.2 klein 9B",
    "qwen_image": "Qwen-Image",
}
# In place of a recipe's own steps
SHORT = ["--max_train_steps=3", "--report_to=none", "--lr_warmup_steps=0"]
SAMPLES = ["--validation_prompts=a dog", "--num_inference_steps=2", "--num_validation_images=1"]


def find_model(recipe):
    """The name in memory.py of the model of a recipe, or None."""
    return next((name for start, name in NAMES.items() if recipe.startswith(start)), None)


def make_tokenizer(tokens, chat):
    """The demo's tokenizer, for captions of up to `tokens` tokens."""
    options = {"subfolder": "tokenizer", "model_max_length": tokens}
    tokenizer = transformers.CLIPTokenizer.from_pretrained(bench.ROOT / "demo/models", **options)
    if not chat:
        return tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        model_max_length=tokens,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def make_clip(width, tokens, tokenizer, projected):
    """A CLIP text encoder of two layers."""
    config = transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        projection_dim=width,
        max_position_embeddings=tokens,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return getattr(transformers, kind)(config)


def make_qwen3(kind, width, layers, tokenizer):
    config = transformers.Qwen3Config(
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(tokenizer),
    )
    return getattr(transformers, kind)(config)


def make_qwen_vl(width, tokenizer):
    """Qwen2.5-VL with one layer for text and one for images."""
    text = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": width // 128, "num_key_value_heads": 4}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": {"rope_type": "default"}}
    text["rope_parameters"] |= {"mrope_section": [16, 24, 24], "rope_theta": 1e6}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": width, "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_pipeline(name, folder, device):
    """Make a folder with the weights of a model of memory.py, all random, in bfloat16."""
    model = memory.MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        denoiser = memory.make_denoiser(model)
        torch.set_default_dtype(torch.float32)
    vae, tokens = memory.make_vae(model), model.tokens
    euler = diffusers.FlowMatchEulerDiscreteScheduler
    dynamic = {"use_dynamic_shifting": True, "base_shift": 0.5, "base_image_seq_len": 256}
    tokenizer = make_tokenizer(tokens, model.family in ("z-image", "flux2-klein", "qwen-image"))
    if model.family == "z-image":
        vae.register_to_config(shift_factor=0.1159)  # its pipeline adds it
        text = make_qwen3("Qwen3Model", denoiser.config.cap_feat_dim, 3, tokenizer)
        parts = (euler(shift=6.0), vae, text, tokenizer, denoiser)
        pipeline = diffusers.ZImagePipeline(*parts)
    elif model.family == "flux2-klein":  # it takes three of its text encoder's first 28 layers
        width = denoiser.config.joint_attention_dim // 3
        text = make_qwen3("Qwen3ForCausalLM", width, 28, tokenizer)
        scheduler = euler(**dynamic, max_image_seq_len=4096, max_shift=1.15)
        parts = (scheduler, vae, text, tokenizer, denoiser)
        pipeline = diffusers.Flux2KleinPipeline(*parts, is_distilled=False)
    elif model.family == "qwen-image":
        text = make_qwen_vl(denoiser.config.joint_attention_dim, tokenizer)
        scheduler = euler(**dynamic, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02)
        parts = (scheduler, vae, text, tokenizer, denoiser)
        pipeline = diffusers.QwenImagePipeline(*parts)
    else:
        scheduler = diffusers.DDPMScheduler.from_pretrained(bench.ROOT / "demo/models/scheduler")
        if model.family == "sdxl":
            texts = [make_clip(768, tokens, tokenizer, False)]
            texts.append(make_clip(1280, tokens, tokenizer, True))
            parts = (vae, *texts, tokenizer, tokenizer, denoiser, scheduler)
            pipeline = diffusers.StableDiffusionXLPipeline(*parts, add_watermarker=False)
        else:  # PRX takes VAE and text encoder from here, and is itself a new model
            prx = model.family == "prx"
            width = model.config["context_in_dim" if prx else "cross_attention_dim"]
            text = make_clip(width, tokens, tokenizer, False)
            unet = diffusers.UNet2DConditionModel() if prx else denoiser
            parts = (vae, text, tokenizer, unet, scheduler, None, None)
            pipeline = diffusers.StableDiffusionPipeline(*parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder)
    return folder


def make_photographs(folder, side, count):
    """Write square images with captions that fill all tokens of any model."""
    bench.make_images(folder, count, bench.make_pictures(side))
    text = "zero one two three four five six seven eight nine " * 60
    lines = [json.dumps({"file_name": f"{i}.jpg", "text": text}) for i in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def run(recipe, card, more, base, folder):
    """Train a recipe in a process of its own. Returns the cells of its row.

    card: its GB. more: flags to add.
    """
    text = RECIPES[recipe].read_text()
    words = shlex.split(text, comments=True)
    script = re.search(r"train_\w+\.py", text)[0]
    size = int(words[words.index("--train_batch_size") + 1])
    flags = [f"@{RECIPES[recipe]}", f"--train_data_dir={folder / 'images'}", *SHORT]
    flags += [f"--output_dir={folder / recipe}", f"--cache_dir={folder / 'cache'}"]
    if base:
        flags += [f"--pretrained_model_name_or_path={base}", *SAMPLES]
        if find_model(recipe).startswith("PRX"):
            flags.append("--model_family=prx")
    if "--total_batch_size" in words:
        flags.append(f"--total_batch_size={2 * size}")
    elif "--gradient_accumulation_steps" in words:
        flags.append("--gradient_accumulation_steps=2")
    if "--fit" in words:
        flags.append(f"--fit={0.9 * card * 2**30 / 1e9:.3f}")
    command = [sys.executable, __file__, "--child", str(card), script, *flags, *more]
    env = {"HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run(command, cwd=bench.ROOT, env=env, capture_output=True, text=True)
    shutil.rmtree(folder / recipe, ignore_errors=True)
    peaks = re.findall(r"^peak ([\d.]+) GB, reserved ([\d.]+), ([\d.]+) s", done.stdout, flags=re.M)
    if done.returncode or not peaks:
        print(f"{shlex.join(command)} failed:\n{done.stdout[-1000:]}", file=sys.stderr)
        print(done.stderr[-3000:], file=sys.stderr)
        return ["failed", *[""] * 5]
    peaks = [tuple(map(float, peak)) for peak in peaks]
    step = max(peaks[1:3])
    drawing = max([peaks[0], *peaks[3:]])[0]
    seconds = peaks[2][2]
    said = re.search(r"^Fit: (.* GB.*), of", done.stdout, flags=re.M)
    return [
        said[1] if said else "",
        f"{step[0]:.1f}",
        f"{drawing:.1f}" if base else "",
        f"{max(reserved for _, reserved, _ in peaks):.1f}",
        "CPU" if "decoded on the CPU" in done.stdout else "",
        f"{2 * size / seconds:.2f}",
    ]


def child(card, script, *flags):
    """Run a trainer in the memory of a card. Prints the peaks between its steps.

    Without --rank the process ends after step 3.
    """
    gpu = bench.find_gpu()
    recipe = Path(flags[0][1:])
    if gpu:
        room = 0.9 * int(card) * 2**30
        total = gpu.get_device_properties().total_memory
        gpu.set_per_process_memory_fraction(min(1.0, room / total))
    ends = [time.time()]

    def note(*optimizer):
        if gpu:
            gpu.synchronize()
        ends.append(time.time())
        peak, reserved = (
            (gpu.max_memory_allocated() / 1e9, gpu.max_memory_reserved() / 1e9) if gpu else (0, 0)
        )
        seconds = ends[-1] - ends[-2]
        print(f"\npeak {peak:.2f} GB, reserved {reserved:.2f}, {seconds:.3f} s", flush=True)
        if gpu:
            gpu.reset_peak_memory_stats()
        if len(ends) > 3 and "--rank" not in recipe.read_text():
            os._exit(0)

    register_optimizer_step_post_hook(note)
    atexit.register(note)
    shutil.disk_usage = lambda path: SimpleNamespace(free=2**60)
    sys.argv, sys.path[0] = [script, *flags], str(bench.ROOT)
    runpy.run_path(str(bench.ROOT / script), run_name="__main__")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--cards", nargs="+", type=int, default=[80], help="their GB")
    parser.add_argument("--flags", default="", help="to add to the recipes, in one word")
    cli = parser.parse_args(argv)
    print(bench.machine(), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in dict.fromkeys(map(find_model, cli.recipes)):
            base, side = None, 64
            with tempfile.TemporaryDirectory(dir=folder) as inside:
                inside = Path(inside)
                if model:
                    base = make_pipeline(model, inside / "base", bench.find_device())
                    side = memory.MODELS[model].side
                # few, because --cache_latents encodes as many at once as fit on the GPU
                make_photographs(inside / "images", side, 4 if side == 1024 else 64)
                for name in (each for each in cli.recipes if find_model(each) == model):
                    for card in cli.cards:
                        cells = run(name, card, shlex.split(cli.flags), base, inside)
                        rows.append([name, str(card), *cells])
                        print(rows[-1], flush=True)
    columns = ["recipe", "card", "chosen", "a step", "samples", "reserved", "decoded on"]
    columns.append("images/s")
    bench.show("Memory of the recipes, GB", columns, rows)
    if any("failed" in row for row in rows):
        sys.exit("Some runs failed; see above")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
