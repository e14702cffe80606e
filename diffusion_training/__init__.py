"""Code that the scripts share; each script can be read without it."""

__version__ = "0.1.0"


def check_version(version: str, script: str) -> None:
    """End the program if a copied script is of another version than the installed package.

    Without this check the script would fail later, with a less clear error. `version` is the
    version that the script was written for. The last part of the number may differ.
    """
    if version.split(".")[:2] != __version__.split(".")[:2]:
        advice = (
            "install the version of the script, or use that version to make the script one file "
            "(python -m diffusion_training.standalone)"
        )
        raise SystemExit(
            f"{script} is of version {version}, and the installed diffusion_training is "
            f"{__version__}: {advice}"
        )
