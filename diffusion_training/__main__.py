"""Run a script of the installed package: python -m diffusion_training SCRIPT [flags]."""

import os
import sys
from pathlib import Path


def main() -> None:
    here = Path(__file__).parent
    # in a wheel, and in a clone of the repository
    folder = here / "scripts" if (here / "scripts").is_dir() else here.parent
    names = sorted(path.stem for path in folder.glob("*.py"))
    name = sys.argv[1].removesuffix(".py") if len(sys.argv) > 1 else ""
    if name not in names:
        sys.exit(
            f"python -m diffusion_training SCRIPT [flags]: SCRIPT is one of {', '.join(names)}; "
            f"they are in {folder}, to read and to copy"
        )
    # The script takes the place of this process, as if it had been started by its path.
    os.execv(sys.executable, [sys.executable, str(folder / f"{name}.py"), *sys.argv[2:]])


if __name__ == "__main__":
    main()
