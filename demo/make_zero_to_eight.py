"""Write demo/zero_to_eight and demo/nines, with which tests and benchmarks train LoRAs.

    python demo/make_zero_to_eight.py

demo/zero_to_eight is a pipeline that never saw a 9. Its U-Net is trained here on the digits 0 to 8
of demo/digits (some minutes on a CPU), and stored in float16. The other models are those of
demo/models.
demo/nines is the training data: all nines, and ten images of each other digit, because a LoRA that
is trained on nines alone forgets the others. Together the two folders have 3 MB.
"""

import contextlib
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
from diffusers import StableDiffusionPipeline

HERE = Path(__file__).parent.resolve()
MODELS = f"--pretrained_model_name_or_path {shlex.quote(str(HERE / 'models'))}"
TRAIN = f"""
    --latents_dir latents --unet_config_name_or_path {shlex.quote(str(HERE / "digits_text_to_image_unet.json"))}
    --output_dir trained --train_batch_size 64 --num_train_epochs 100 --learning_rate 3e-3 --lr_scheduler cosine
    --lr_warmup_steps 100 --snr_gamma 5 --report_to none
"""  # noqa: E501


def save(rows, numbers, folder):
    folder.mkdir(exist_ok=True)
    rows.select(numbers).to_parquet(folder / "train.parquet")


def run(script, flags):
    subprocess.run(
        [sys.executable, HERE.parent / script, *shlex.split(f"{MODELS} {flags}")], check=True
    )


def main():
    rows = datasets.load_dataset(str(HERE / "digits"), split="train")
    by_text = {
        text: [i for i, other in enumerate(rows["text"]) if other == text]
        for text in set(rows["text"])
    }
    nines = by_text.pop("a handwritten digit nine")
    save(
        rows,
        sorted([*nines, *(i for numbers in by_text.values() for i in numbers[:10])]),
        HERE / "nines",
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        save(rows, sorted(i for numbers in by_text.values() for i in numbers), Path("digits"))
        run("precompute_latents.py", "--train_data_dir digits --resolution 8 --output_dir latents")
        run("train_text_to_image.py", TRAIN)
        pipeline = StableDiffusionPipeline.from_pretrained("trained")
        pipeline.unet.half()
        pipeline.save_pretrained(HERE / "zero_to_eight")


if __name__ == "__main__":
    main()
