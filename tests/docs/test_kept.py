"""What a shortening of a page must not take away: guides and users look for these lines."""

import re

import pytest
from conftest import ROOT

# page: for each item, words that stand together in a row of a table, or in an item of a list
KEPT = {
    "docs/training.md": [
        ["`--ddpm_num_steps`", "1000", "250 to 4,000"],
        ["`--adam_beta1`, `--adam_beta2`", "0.999", "0.95 to 0.9999"],
        ['`"dropout"`', "0 to 0.1", "0 to 0.2"],
        ["`--learning_rate`", "2e-4", "1e-4 to 3e-4"],
        ["images per step", "64 to 256", "32 to 512"],
        ["`--lr_warmup_steps`", "1,000 to 10,000"],
        ["`--ema_max_decay`", "0.9999", "0.999 to 0.99999"],
        ["`--max_grad_norm`", "1.0", "0.2 to 2.0"],
        ["`--ddpm_beta_schedule`", "squaredcos_cap_v2"],
        ["| 10,000 | 64 | 200,000 |"],
        ["| 1,000,000 | 64 | 1,000,000 |"],
        ["| unet_256.json | 256 |", "35"],
        ["| unet_64 |", "30.5", "5.1"],
        ["benchmarks/memory.py --models my/config.json"],
        ["10 to 50 times", "3,682 times", "100 times too many"],
        ["3 to 5 GB", "12.3 GB"],
        ["mixed precision", "halves", "10 to 40 %"],
        ["rise from 1e-7 to 1", "a tenth of"],
        ["`--scale_lr auto --base_batch_size 64`", "linearly up to 512"],
        ["one device", "small size", "`--max_train_samples 1000`"],  # the guides: start simple
        ["twice the side", "four times", "181 MB at 64 px", "2,900 MB at 256 px"],
        ["256 px on 40 GB", "512 px on 80 GB"],
        ["| images | side, px | steps | epochs | hours, RTX 4090 | hours, H100 |"],
    ],
    "docs/benchmarks.md": [
        ["Sampling steps", "quality.py sampling"],
        ["1,000", "50.8 (26.4 to 80.2)", "57.3 (37.3 to 81.4)"],
        ["bf16 against float32", "FID"],
        ["Gradient checkpointing", "1.21 (1.11 to 1.31)", "172 (164 to 181) MiB less"],
        ["`--dataloader_num_workers 0`", "17.1 (16.9 to 17.2)"],
        ["`--cache_images`", "13.9 (13.8 to 14.1)"],
        ["Two processes (DDP)", "0.96 (0.91 to 1.01)"],  # the only figure of DDP
        ["CUDA stream of their own (0.999)", "`cudnn.benchmark`"],
    ],
    "docs/cluster.md": [
        ["`accelerate config`", "No distributed training", "DeepSpeed", "traceback"],
        ["images", "2,000,000,000"],
        ["Cores for a GPU", "4.6 cores"],
        ["`HF_TOKEN`", "on each machine", "private or gated"],
        ["`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`", "`eth0`"],
        ["`torchrun --nproc_per_node=4 train_unconditional.py`"],
        ["fewer", "`ray start --head --num-cpus 8`"],  # in place of a flag of the Ray script
        ["Training", "5,452 hours of an H200"],  # beside the guide's hours of an A100
    ],
    # the guides' picture of the flow
    "docs/data.md": [
        ["URLs", "shards", "latent cache", "a trainer", "pipeline or LoRA"],
        # a public data set with captions by its id, and a picture of what is done to an image
        ["--dataset_name lambdalabs/naruto-blip-captions", "--max_train_steps"],
        ["cut out as a square", "latents", "decoded again", "image-stages.png"],
        ["`--dataloader_num_workers`", "`--cache_images`", "latent cache"],
    ],
    "docs/watching.md": [
        ["`waiting`", "the share of the time", "data"],
        ["`epoch_loss`", "the mean of the losses"],
        ["Without a terminal", "`TQDM_DISABLE=1`", "Epochs count from 1"],
    ],
    "docs/from-scratch.md": [["| prx_163m |", "658 h"], ["2,000 million images", "at 0.248"]],
    "docs/memory.md": [["`sdxl_lora_12gb`", "6.5 (6.5)", "10.9 (9.1)"]],  # lora.md: 11.2
    # the command of diffusers' model card, and what it needs
    "README.md": [
        [
            "`accelerate launch train_unconditional.py --mixed_precision bf16`",
            "`accelerate config`",
        ],
        ["never run", "several GPUs", "`--fit`", "published weights"],
    ],
}


@pytest.mark.parametrize("page", KEPT)
def test_no_shortening_takes_these_lines_away(page):
    text = (ROOT / page).read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", re.sub(r"^\|.*\n", "", text, flags=re.M))
    parts = [*rows, *(" ".join(paragraph.split()) for paragraph in paragraphs)]
    missing = [
        words for words in KEPT[page] if not any(all(w in part for w in words) for part in parts)
    ]
    assert not missing, f"{page} has no line with {missing}"
