"""Code that the scripts share: arithmetic, files and formats."""

import logging

__version__ = "0.1.0"

# diffusers and peft import bitsandbytes where it is installed. On some CPUs it then warns of a
# missing kernel for 4-bit inference, also in runs that use no 4 bits.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def check_version(version: str, script: str) -> None:
    """End the program if a script was written for another version than the installed package.

    Without this check the script would fail later, with a less clear error. version: that of the
    script. The last part of the number may differ.
    """
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise SystemExit(
            f"{script} needs version {version} of diffusion_training, but {__version__} is "
            "installed: install that version, or take the script of this one"
        )
