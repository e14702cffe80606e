"""Code that the scripts share: arithmetic, files and formats."""

__version__ = "0.1.0"


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
