"""Code that the scripts share; each script can be read without it."""

__version__ = "0.1.0"


def check_version(version: str, script: str) -> None:
    """End the program if a script was written for another version than the installed package.

    Without this check the script would fail later, with a less clear error. version: that of the
    script. The last part of the number may differ.
    """
    if version.split(".")[:2] != __version__.split(".")[:2]:
        advice = (
            "install that version, or make the script one file with it "
            "(python -m diffusion_training.standalone)"
        )
        raise SystemExit(
            f"{script} needs version {version} of diffusion_training, but {__version__} is "
            f"installed: {advice}"
        )
