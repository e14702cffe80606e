"""Run a script of the installed package: python -m diffusion_training SCRIPT [flags].

Instead of a script, `lora` looks at a LoRA file or merges it; see lora_tools.py.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    here = Path(__file__).parent
    # in a wheel, and in a clone of the repository
    folder = here / "scripts" if (here / "scripts").is_dir() else here.parent
    names = sorted(path.stem for path in folder.glob("*.py"))
    name = sys.argv[1].removesuffix(".py") if len(sys.argv) > 1 else ""
    if name == "lora":
        tools = ["-m", "diffusion_training.training.lora.lora_tools"]
        os.execv(sys.executable, [sys.executable, *tools, *sys.argv[2:]])
    if name not in names:
        sys.exit(
            f"python -m diffusion_training SCRIPT [flags]: SCRIPT is one of {', '.join(names)}; "
            f"they are in {folder}, to read and to copy; or it is lora (info, merge)"
        )
    # The script takes the place of this process, as if it had been started by its path.
    os.execv(sys.executable, [sys.executable, str(folder / f"{name}.py"), *sys.argv[2:]])


if __name__ == "__main__":
    main()
