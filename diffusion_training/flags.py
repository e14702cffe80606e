"""Flags for how the device computes. Imports only the standard library."""

from diffusion_training.arguments import SWITCH, Add, number


def add_device_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for how the device computes.

    `make_launch`, `compile_model` and a trainer's `main` read them.
    """
    if trains:
        add(
            "--gradient_checkpointing",
            **SWITCH,
            help="compute activations a second time instead of storing them: less memory, and a "
            "third more operations in a step, or half more for a LoRA",
            useless_with="--checkpoint_blocks or --blocks_to_swap",
            strict=False,
        )
        add(
            "--checkpoint_blocks",
            type=number(1, 10**4, int),
            help="gradient checkpointing of this number of the model's blocks, not of all: each "
            "block less is faster and takes more memory; the results are the same",
        )
        add(
            "--keep_attention",
            **SWITCH,
            help="with gradient checkpointing, store the result of each attention, which takes "
            "longest to compute again: faster, more memory, the same results",
            needs="--gradient_checkpointing or --checkpoint_blocks or --blocks_to_swap",
        )
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="use torch.compile, with this backend; inductor if you name none",
    )
    add(
        "--no-compile",
        dest="compile",
        action="store_false",
        default=None,
        help="do not use torch.compile, even if `accelerate config` turns it on",
    )
    if trains:
        add(
            "--allow_tf32",
            **SWITCH,
            help="compute float32 matrix products in TF32, on Ampere GPUs and later: faster, less "
            "exact",
        )
        add(
            "--deterministic",
            **SWITCH,
            help="use only deterministic GPU kernels: slower, but a resumed run ends with the same "
            "bits as one that never stopped",
        )
    add_precision_flag(add)


def add_precision_flag(add: Add) -> None:
    """Add the flag that `accelerator_options` reads."""
    add(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        help="precision of the computation; no is float32, bf16 is for Ampere GPUs and later, "
        "fp16 for older ones such as a T4 (default: the setting of `accelerate launch` or "
        "`accelerate config`, else no)",
    )
