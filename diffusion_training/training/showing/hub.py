"""Make the repository of --push_to_hub, and upload a run to it."""

import time
from argparse import Namespace
from pathlib import Path

from huggingface_hub import create_repo, get_paths_info, repo_info, upload_folder

from diffusion_training.errors.faults import is_a, is_refused_by_storage, is_web_page
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.training.showing.pipelines import name_source

WAITS = (1, 4, 16)  # seconds between tries
# The client's statuses that pass: too slow, another commit came between, too early, too many
PASSING = (408, 412, 425, 429)
TITLE = "Upload a training run"  # of commits; one with another title has changed a card by hand


def make_repository(args: Namespace) -> str:
    """Make the repository of --push_to_hub, or use an existing one. Returns its id."""
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    private = args.hub_private_repo or None
    with explained(f"--push_to_hub can't use {name}: run `hf auth login`, or remove the flag"):
        name = create_repo(name, private=private, exist_ok=True).repo_id
        is_public = private and not repo_info(name).private
    if is_public:
        fail(f"--hub_private_repo: {name} exists and is public: make it private, or choose another")
    return name


def upload_run(repository: str | None, output_dir: str, files: list[str]) -> None:
    """Upload what every run has, and the `files`: patterns of paths in --output_dir.

    A card that was written on the hub stays.
    """
    name_source(output_dir, repository)
    files = ["*model_index.json", "loss.png", "samples/*", *files]
    with explained(f"the upload to {repository} failed; everything is in {output_dir}"):
        for wait in (*WAITS, None):
            try:
                there = get_paths_info(repository, "README.md", expand=True)
                is_own = all(card.last_commit.title == TITLE for card in there)
                upload_folder(
                    repo_id=repository,
                    folder_path=output_dir,
                    allow_patterns=[*files, "README.md"] if is_own else files,
                    commit_message=TITLE,
                )
                break
            except Exception as error:
                status = getattr(getattr(error, "response", None), "status_code", 0)
                is_passing = status >= 500 or status in PASSING or is_a(error, "TransportError")
                is_passing |= is_refused_by_storage(error) or is_web_page(error)
                if wait is None or not is_passing:
                    raise
                time.sleep(wait)
    if not is_own:
        print(
            f"{repository} keeps its README.md, because it was changed there: "
            f"the card of this run is {output_dir}/README.md"
        )
