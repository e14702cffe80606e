"""Write the files in this folder with an older commit; tests/scripts/test_old_files.py opens them.

    git worktree add --detach ../older 8241d28
    PYTHONPATH=../older OMP_NUM_THREADS=1 python tests/old/make.py

Do not run it with the tree that is being tested: then the files would not be old. It writes

    images/, masked/    8 tiny pictures each, with captions; masked/ has masks as well
    models/             tiny pipelines and configs: 549 tokens, 16 numbers per token, 4 channels
    caches/KIND         one latent cache of each kind, 8 rows in two shards
    runs/NAME           one run of each trainer, as it was after step 2 of 4: checkpoint-2, run.args
                        and metrics.jsonl. The LoRA's file is that of step 4. So are the tensors in
                        expected.safetensors: those of the run's checkpoint-4
    expected.json       the machine that computed these tensors, losses, hashes of held-out images
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
CAPTIONS = [
    f"a handwritten digit {name}" for name in "zero one two three four five six".split()
] + ["a"]
CACHE = "--resolution=8 --rows_per_shard=4 --batch_size=4 --dataloader_num_workers=0".split()
IMAGES, SD = "--train_data_dir=images", "--pretrained_model_name_or_path=models/sd"
SEVERAL = "--caption_column text short --caption_weights 0.3 0.7"
CACHES = {
    "plain": [IMAGES, SD],
    "ids": [IMAGES, SD, "--text_cache=ids"],
    "sample": [IMAGES, SD, "--latents=sample"],
    "flip": [IMAGES, SD, "--random_flip"],
    "captions": [IMAGES, SD, *SEVERAL.split()],
    "sizes": ["--train_data_dir=masked", SD, "--resolution=16", "--bucket_step=4", "--random_flip"],
    "sdxl": [IMAGES, "--pretrained_model_name_or_path=models/sdxl", "--random_flip"],
    "prx": [IMAGES, SD, "--model_family=prx"],
}
# The large epsilon keeps other CPUs close to these results. With the usual one, Adam takes full
# steps also where a gradient is only rounding, such as that of a bias before a group norm.
RUN = """--max_train_steps=4 --checkpointing_steps=2 --train_batch_size=3 --learning_rate=1e-2
    --adam_epsilon=1e-2 --lr_scheduler=cosine --lr_warmup_steps=1 --logging_steps=1
    --report_to=none""".split()
UNET = "--unet_config_name_or_path=models/unet_condition.json"
RUNS = {  # script, flags
    "unconditional": f"""train_unconditional {IMAGES} --resolution=8 --random_flip
        --model_config_name_or_path=models/unet.json --dataloader_num_workers=0 --eval_batch_size=1
        --ddpm_num_inference_steps=2""",
    "text_to_image": f"train_text_to_image {SD} {UNET} --latents_dir=caches/flip --random_flip",
    "flow": f"""train_flow {SD} --latents_dir=caches/prx
        --transformer_config_name_or_path=models/prx.json""",
    "lora": f"train_text_to_image {SD} --latents_dir=caches/plain --rank=2 --lora_alpha=4",
    "holdout": f"""train_text_to_image {SD} {UNET} --latents_dir=caches/plain --holdout=2
        --validation_steps=2""",
}
RUNS = {name: line.split() for name, line in RUNS.items()}


def make_images():
    """Smooth pictures, whose files are small; none is symmetric, so that mirroring shows."""
    import numpy as np
    from PIL import Image

    sizes = [(10, 12), (20, 10), (9, 18), (12, 12)]
    for folder, masks in (("images", False), ("masked", True)):
        Path(folder).mkdir()
        for i, caption in enumerate(CAPTIONS):
            height, width = sizes[i % 4]
            y, x = np.mgrid[:height, :width]
            pixels = np.stack([20 * i + 9 * x, 20 * i + 5 * y, 255 - 11 * x - 3 * i], axis=-1).clip(
                0, 255
            )
            Image.fromarray(pixels.astype(np.uint8)).save(f"{folder}/{i}.png")
            if masks:
                Path(folder, f"{i}.txt").write_text(caption)
            if masks and i % 3 == 0:
                Image.fromarray((255 * (x < width // 2)).astype(np.uint8)).save(
                    f"{folder}/{i}.mask.png"
                )
    short = [caption.split()[-1] for caption in CAPTIONS]
    short[2] = None  # a caption that is missing
    rows = [
        {"file_name": f"{i}.png", "text": CAPTIONS[i], "short": short[i]}
        for i in range(len(CAPTIONS))
    ]
    Path("images/metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_models(demo):
    import diffusers
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(demo / "models/tokenizer")
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=8,
        scaling_factor=0.5,
    )
    options = {
        "sample_size": 4,
        "layers_per_block": 1,
        "block_out_channels": (4,),
        "norm_num_groups": 2,
        "dropout": 0.1,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
    }
    unet = diffusers.UNet2DConditionModel(**options)
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    models = vae, transformers.CLIPTextModel(config), tokenizer, unet, scheduler, None, None
    pipeline = diffusers.StableDiffusionPipeline(*models, requires_safety_checker=False)
    pipeline.save_pretrained("models/sd")
    second = transformers.CLIPTextModelWithProjection(config)
    parts = vae, pipeline.text_encoder, second, tokenizer, tokenizer
    for part, name in zip(
        parts, "vae text_encoder text_encoder_2 tokenizer tokenizer_2".split(), strict=True
    ):
        part.save_pretrained(f"models/sdxl/{name}")
    scheduler.save_pretrained("models/sdxl/scheduler")
    index = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.36.0"}
    index |= {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }
    index |= {
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    index |= {"tokenizer_2": index["tokenizer"], "scheduler": ["diffusers", "DDIMScheduler"]}
    Path("models/sdxl/model_index.json").write_text(json.dumps(index, indent=2))
    configs = {
        "unet_condition": unet,
        "unet": diffusers.UNet2DModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(4,),
            norm_num_groups=2,
            dropout=0.1,
            add_attention=False,
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        ),
    }
    configs["prx"] = diffusers.PRXTransformer2DModel(
        in_channels=4,
        patch_size=2,
        context_in_dim=16,
        hidden_size=8,
        num_heads=1,
        depth=1,
        axes_dim=[4, 4],
    )
    options |= {
        "cross_attention_dim": 32,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
    }
    options["projection_class_embeddings_input_dim"] = 8 + 6 * options["addition_time_embed_dim"]
    configs["unet_sdxl"] = diffusers.UNet2DConditionModel(**options)
    for name, model in configs.items():
        Path(f"models/{name}.json").write_text(model.to_json_string())


def read_tensors(checkpoint):
    """Read a checkpoint as {folder or file: all its tensors, sorted by name, as one vector}."""
    found = {}
    for path in sorted(Path(checkpoint).rglob("*.safetensors")):
        tensors = load_file(path)
        name = "/".join(path.relative_to(checkpoint).parts[:1])
        found[name] = torch.cat([tensors[key].float().flatten() for key in sorted(tensors)])
    state = torch.load(Path(checkpoint, "optimizer.bin"), weights_only=True)["state"]
    numbers = [state[i][key].float().flatten() for i in sorted(state) for key in sorted(state[i])]
    return found | {"optimizer.bin": torch.cat(numbers)}


def describe_machine():
    """The things that decide the bits of float operations."""
    import diffusers

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(reversed([line.replace("\t", "").split(":", 1) for line in lines if ":" in line]))
    cpu = [fields.get(name, "?").strip() for name in ("model name", "cpu family", "model")]
    vectors = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "cpu": cpu,
        "vectors": vectors,
    }


def main():
    import importlib
    import tempfile

    import datasets

    scripts = ["precompute_latents", *{script for script, *_ in RUNS.values()}]
    scripts = {name: importlib.import_module(name) for name in scripts}
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
    os.chdir(HERE)
    for folder in ("images", "masked", "models", "caches", "runs"):
        shutil.rmtree(folder, ignore_errors=True)
    make_images()
    make_models(Path(scripts["precompute_latents"].__file__).parent / "demo")

    def run(name, *flags):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        scripts[name].main(scripts[name].parse_args(flags))

    for kind, flags in CACHES.items():
        run("precompute_latents", *CACHE, *flags, f"--output_dir=caches/{kind}")
    expected = {"machine": describe_machine(), "held_out": {}, "losses": {}}
    for name, (script, *flags) in RUNS.items():
        run(script, *RUN, *flags, f"--output_dir=runs/{name}")
        folder = Path("runs", name)
        save_file(read_tensors(folder / "checkpoint-4"), folder / "expected.safetensors")
        state = json.loads((folder / "checkpoint-4/trainer_state.json").read_text())
        expected["held_out"][name] = state["settings"]["held_out"]
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        records = list(map(json.loads, lines))
        keys = "step", "loss", "held_out_loss", "held_out_loss_ema"
        expected["losses"][name] = [
            {key: record[key] for key in keys if key in record}
            for record in records
            if record.get("step", 0) > 2 and {*keys[1:]} & record.keys()
        ]
        kept = [
            line for line, record in zip(lines, records, strict=True) if record.get("step", 0) <= 2
        ]
        (folder / "metrics.jsonl").write_text("".join(kept))
        keep = {
            "checkpoint-2",
            "run.args",
            "metrics.jsonl",
            "expected.safetensors",
            "pytorch_lora_weights.safetensors",
        }
        for path in folder.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
