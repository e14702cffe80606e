"""What the scripts share, once: a script is read in one sitting, and this is what its reader need not know."""

__version__ = "0.1.0"


def check_version(version: str, script: str) -> None:
    """End a script that was copied away from another version than this one, before it fails in some stranger way.

    `version`: the one that the script was written for; a last number that differs is no difference.
    """
    if version.split(".")[:2] != __version__.split(".")[:2]:
        turn = (
            "take both from one version, or make the script one file there (python -m diffusion_training.standalone)"
        )
        raise SystemExit(
            f"{script} is of version {version}, and the installed diffusion_training is {__version__}: {turn}"
        )
