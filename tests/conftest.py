"""Code that the tests share.

An offline, single-threaded process, small images and models, and ways to run a script.
"""

import argparse
import atexit
import contextlib
import functools
import gc
import hashlib
import importlib.util
import io
import json
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true"
)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has used a GPU can't be forked
gc.disable()  # until the first test
ROOT = Path(__file__).parent.parent
MODELS = ROOT / "demo/models"
CHILDREN = str(ROOT / "tests/children")
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402
import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from hub import Hub, use_hub  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_pipelines import make_chat_tokenizer, make_klein, make_qwen_image, make_z_image, randomize  # noqa: E402, F401
from tqdm import tqdm  # noqa: E402

from diffusion_training import shapes  # noqa: E402
from diffusion_training.errors.sentences import AGAIN  # noqa: E402
from diffusion_training.errors.stop_signals import SIGNALS  # noqa: E402
from diffusion_training.families.known import load_family  # noqa: E402
from diffusion_training.files import hash_values  # noqa: E402
from diffusion_training.repositories import open_repository  # noqa: E402
from diffusion_training.training.keeping.checkpoints import find_checkpoints  # noqa: E402
from diffusion_training.training.lora import lora  # noqa: E402
from diffusion_training.training.step.optimizers import load_optimizer  # noqa: E402

torch.set_num_threads(1)
# If autograd's first call comes after torch.compile, it starts threads, and no fork can train.
torch.ones((), requires_grad=True).backward()
# tqdm's default lock is shared by all forks: if a process is killed while holding it, the others
# hang for good.
tqdm.set_lock(threading.RLock())


# They never fork, so they may share a process with Ray's threads.
WITHOUT_FORKS = "families laws lokr lora lora_files ranges recorded".split()


def pytest_collection_modifyitems(items):
    """Run the tests with Ray late: the other tests fork, and Ray's threads do not survive that.

    The tests that start Ray in processes of their own take longest and come first. Those that never
    fork come last, or all but one of several processes would be idle in the end.
    """
    places = {
        "test_precompute_latents_ray": -1,
        "test_train_on_ray": -1,
        "test_connection": 1,
        "test_download_images": 2,
        **{f"test_{name}": 3 for name in WITHOUT_FORKS},
    }
    items.sort(key=lambda item: places.get(item.path.stem, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, keep each file in one process, because its tests share fixtures.

    Files keep their order, so that Ray is last.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Every test has its own caches and leaves no Accelerate state and no signal handler behind."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))
    reset()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def quick_children():
    """Launched processes start sooner: see tests/children."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", CHILDREN, prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def little_garbage():
    """Exempt what was imported from garbage collection: it stays, and a full one visits it all.

    That took a tenth of the tests' time.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise triton complains of objects that are left at the end
    with pytest.MonkeyPatch.context() as m:
        m.setattr(gc, "unfreeze", lambda: None)  # `find_largest` calls it
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_disk():
    """Files are not flushed to the disk, since no test cuts the power: a tenth of a run's time."""

    def fsync(file):
        os.fstat(file)  # fails for a closed one

    fsync.__qualname__ = "fsync"  # the event of tests/attacks
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session")
def storage():
    """The address of an S3 server, also in the environment; None if moto is not installed.

    The server is not a thread, because tests fork.
    """
    if importlib.util.find_spec("moto") is None:
        yield None
        return
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as m:
        for name, value in {
            "ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "ACCESS_KEY_ID": "a",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            m.setenv(f"AWS_{name}", value)
        m.setenv("AWS_SECRET_ACCESS_KEY", "b")
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def faulty(tmp_path, storage, monkeypatch):
    """faulty({end of a key: faults}) puts tests/faulty_server.py in front of the S3 server.

    Returns its log.
    """
    servers = []

    def begin(faults):
        port = free_port()
        (tmp_path / "faults").write_text(json.dumps(faults))
        command = [
            sys.executable,
            ROOT / "tests/faulty_server.py",
            str(port),
            storage,
            tmp_path / "faults",
        ]
        servers.append(subprocess.Popen(command))
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        return tmp_path / "faults.log"

    yield begin
    for server in servers:
        server.kill()
        server.wait()


def upload(folder, address, bucket):
    """Copy a folder's files to a bucket. botocore, because fsspec's thread breaks in a fork."""
    import boto3

    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket=bucket)
    for path in sorted(folder.rglob("*")):  # records after their shards
        if path.is_file():
            client.upload_file(str(path), bucket, f"cache/{path.relative_to(folder)}")
    return f"s3://{bucket}/cache"


def make_unet_config(folder):
    """A U-Net of 10,000 weights for 16 px. It has dropout, which a resumed run has to repeat."""
    unet = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        dropout=0.1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    unet.save_config(folder / "tiny-unet")
    return str(folder / "tiny-unet")


@pytest.fixture
def unet_config(tmp_path):
    return make_unet_config(tmp_path)


@pytest.fixture
def images(tmp_path, flags):
    """The `flags` of a test's file, for training from the images that they have made."""
    data = f"--train_data_dir={tmp_path / 'images'}"
    return [*flags, data, "--resolution=16", "--dataloader_num_workers=0"]


def make_tiny_unet(**options):
    """A U-Net of Stable Diffusion with 20,000 weights, for latents of 8 x 8."""
    options = {
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "cross_attention_dim": 32,
        "attention_head_dim": 2,
    } | options
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **options,
    )


def make_models(folder):
    """Make a Stable Diffusion folder whose U-Net has 20,000 weights.

    It has dropout, which a resumed run has to repeat.
    """
    shutil.copytree(MODELS, folder / "sd")
    torch.manual_seed(0)
    make_tiny_unet(dropout=0.1).save_pretrained(folder / "sd/unet")
    return folder / "sd"


def make_sdxl(folder, **index):
    """Make a Stable Diffusion XL folder whose U-Net has 40,000 weights and dropout.

    The embeddings of its two text encoders have 32 and 16 numbers.
    """
    make_models(folder)
    (folder / "sd").rename(folder / "sdxl")
    folder = folder / "sdxl"
    shutil.copytree(folder / "tokenizer", folder / "tokenizer_2")
    config = transformers.CLIPTextConfig.from_pretrained(folder / "text_encoder")
    torch.manual_seed(1)
    config.update({"hidden_size": 16, "projection_dim": 24, "hidden_act": "gelu"})
    transformers.CLIPTextModelWithProjection(config).save_pretrained(folder / "text_encoder_2")
    unet = diffusers.UNet2DConditionModel.load_config(folder / "unet")
    unet = {
        **unet,
        "cross_attention_dim": 48,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
    }
    unet["projection_class_embeddings_input_dim"] = 24 + 6 * 8
    diffusers.UNet2DConditionModel.from_config(unet).save_pretrained(folder / "unet")
    classes = {"vae": "AutoencoderKL", "unet": "UNet2DConditionModel", "scheduler": "DDIMScheduler"}
    classes = {name: ["diffusers", kind] for name, kind in classes.items()}
    for suffix, kind in {"": "CLIPTextModel", "_2": "CLIPTextModelWithProjection"}.items():
        classes[f"text_encoder{suffix}"] = ["transformers", kind]
        classes[f"tokenizer{suffix}"] = ["transformers", "CLIPTokenizer"]
    classes |= {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": "0.36.0", **index}
    (folder / "model_index.json").write_text(json.dumps(classes))
    return folder


PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 32,
    "hidden_size": 16,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [4, 4],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process talks to, with an empty cache."""
    open_repository.cache_clear()
    with Hub() as hub:
        use_hub(hub, tmp_path / "hf", monkeypatch)
        yield hub


def make_prx(folder, **changes):
    """The config of a PRX transformer of 10,000 weights, for the models of `make_models`."""
    with torch.device("meta"):
        diffusers.PRXTransformer2DModel(**PRX | changes).save_config(folder)
    return folder


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


def make_clip(folder):
    """A CLIP model in the hub's form, with the demo's tokenizer."""
    torch.manual_seed(0)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length,
            "eos_token_id": tokenizer.eos_token_id}  # fmt: skip
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(
        text_config={**SMALL, **text}, vision_config=vision, projection_dim=16
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.CLIPProcessor(transformers.CLIPImageProcessor(**SIZES), tokenizer).save_pretrained(
        folder
    )
    return folder


def make_dino(folder):
    """A DINOv2 model in the hub's form."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**SMALL, image_size=16, patch_size=8)
    transformers.Dinov2Model(config).save_pretrained(folder)
    transformers.BitImageProcessor(**SIZES).save_pretrained(folder)
    return folder


class Moments(torch.nn.Module):
    """In place of Inception: the mean of each channel and the spread of the image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.float() / 255
        return torch.cat([images.mean(dim=(2, 3)), images.std(dim=(1, 2, 3))[:, None]], dim=1)


def make_moments(path):
    """A TorchScript file of `Moments`."""
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.script(Moments()).save(str(path))
    return path


def open_pipeline(folder):
    """The pipeline of `make_models`, whose folder has no model_index.json."""
    kinds = {"vae": diffusers.AutoencoderKL, "text_encoder": transformers.CLIPTextModel}
    kinds |= {"tokenizer": transformers.CLIPTokenizer, "unet": diffusers.UNet2DConditionModel}
    kinds["scheduler"] = diffusers.DDIMScheduler
    parts = {name: kind.from_pretrained(folder, subfolder=name) for name, kind in kinds.items()}
    parts |= {"safety_checker": None, "feature_extractor": None}
    return diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)


def adapt_unet(
    unet, layers="attention", seed=0, base="base", dtype=torch.float32, learned=True, **flags
):
    """A U-Net with an adapter whose B matrices and magnitudes are random, as after training."""
    flags = {"rank": 4, "lora_alpha": None, "lora_type": "lora", "use_dora": False} | flags
    args = argparse.Namespace(**{"lora_layers": layers, "lora_dropout": 0.0} | flags)
    torch.manual_seed(seed)
    if isinstance(layers, str):
        layers = load_family("sd").choose_layers(unet, layers)
    lora.add_lora(unet, layers, base, dtype, args)
    if not learned:
        return unet
    with torch.no_grad():
        for weight in lora.list_lora_b({"unet": unet}):
            weight.normal_(std=0.3)
        for name, weight in unet.named_parameters():
            if "magnitude" in name:
                weight.mul_(torch.rand_like(weight) + 0.5)
    return unet


def make_images(folder, count, size=(24, 20)):
    """Write `count` PNGs; the grey level of image i is 20 * i.

    A little noise tells left from right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = 20 * i + rng.integers(0, 10, (size[1], size[0], 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return str(folder)


def make_captioned(folder, count, captions=None):
    """The images of `make_images` with captions."""
    make_images(folder, count)
    captions = captions or [f"a digit {'zero one two'.split()[i % 3]}" for i in range(count)]
    lines = [
        json.dumps({"file_name": f"{i}.png", "text": caption}) for i, caption in enumerate(captions)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def save_as_parquet(images, folder, names):
    """Images of `make_captioned` as download_images.py saves them, ten in a file."""
    cache = str(Path(images).parent / "datasets-cache")
    rows = datasets.load_dataset(str(images), split="train", cache_dir=cache)
    rows = rows.cast_column("image", datasets.Image(decode=False))
    items = [
        {**row, "image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}}
        for row in rows
    ]
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        part = datasets.Dataset.from_list(items[10 * k : 10 * k + 10])
        part = part.cast_column("image", datasets.Image(decode=False))
        part = part.add_column("other", [k] * len(part))
        part.to_parquet(str(folder / f"{name}.parquet"), batch_size=3)
    return folder


# (height, width); in buckets of 16 px with step 4: square, tall, wide, square
SHAPES = [(20, 24), (40, 20), (18, 50), (30, 30)]


def make_masked(folder, count=12, masks=True):
    """Noise in four sizes, with captions, and a mask for every third image."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        height, width = SHAPES[i % 4]
        Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)).save(
            folder / f"{i:02}.png"
        )
        (folder / f"{i:02}.txt").write_text(f"a digit {'zero one two'.split()[i % 3]}")
        if masks and i % 3 == 0:
            Image.fromarray(rng.integers(0, 255, (height, width), np.uint8)).save(
                folder / f"{i:02}.mask.png"
            )
    return folder


def needs(package):
    """A mark for a test that needs a package which requirements.txt does not name."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"needs {package}, in requirements-dev.txt")


def patch(monkeypatch, name, value):
    """Set a name in every module that holds it: a from-import is a copy."""
    ours = re.compile(rf"{re.escape(str(ROOT))}/(diffusion_training/.*|[^/]*)").fullmatch
    modules = [module for module in list(sys.modules.values()) if name in vars(module)]
    holders = [module for module in modules if ours(vars(module).get("__file__") or "")]
    assert holders, f"{name} is nowhere"
    for module in holders:
        monkeypatch.setattr(module, name, value)


TRAINING = (
    "--train_batch_size=1",
    "--learning_rate=1e-3",
    "--lr_warmup_steps=2",
    "--logging_steps=1",
    "--report_to=none",
)
FROM_CAPTIONS = (*TRAINING, "--num_train_epochs=1", "--num_inference_steps=2")
QUICK = {
    "train_unconditional.py": (
        *TRAINING,
        "--resolution=16",
        "--ddpm_num_inference_steps=2",
        "--eval_batch_size=1",
        "--dataloader_num_workers=0",
    ),
    "train_text_to_image.py": FROM_CAPTIONS,
    "train_flow.py": FROM_CAPTIONS,
    "precompute_latents.py": ("--resolution=16", "--batch_size=2", "--dataloader_num_workers=0"),
}  # flags of short runs
FITTED = {}  # what `check_shapes` has found to fit


@pytest.fixture
def without_figures(monkeypatch):
    """Skip work that takes four fifths of a short run's time.

    It is drawing curves, and checking the shapes of models that were checked before.
    """

    def check_once(models, predict, name, shape, condition, check_shapes=shapes.check_shapes):
        sizes = {key: value.shape for key, value in condition.items()}
        configs = [
            (type(model), {k: v for k, v in model.config.items() if k != "_name_or_path"})
            for model in models.values()
        ]
        key = str((predict, configs, shape, sizes))
        if key not in FITTED:
            FITTED[key] = check_shapes(models, predict, name, shape, condition)
        return FITTED[key]

    patch(monkeypatch, "check_shapes", check_once)
    monkeypatch.setattr(
        "diffusion_training.training.showing.report.draw_curves", lambda *args, **options: None
    )


def replace(args, **values):
    """Copy parsed flags, which are read-only, with other values."""
    return type(args)(**vars(args) | values)


def reset():
    """Forget the Accelerate state, the signals and the notes of the previous run."""
    for notes in (SIGNALS, AGAIN):
        notes.clear()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Script:
    """A script of this repository, which a test calls with flags instead of a command line.

    `train = Script("train_flow")`, then `train(*flags)`.
    """

    def __init__(self, name):
        self.file_name = f"{name}.py"
        self.module = importlib.import_module(name)

    def __call__(self, *flags):
        """Run the script in this process."""
        reset()
        try:
            self.module.main(self.module.parse_args([*map(str, flags)]))
        finally:
            reset()

    def refused(self, *flags, status=1):
        """Run the script, which must end with an error in a sentence; returns what it printed."""
        said = io.StringIO()
        with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(said):
            self(*flags)
        error = said.getvalue()
        assert stop.value.code == status, error
        assert error.count(f"{self.file_name}: ") == 1 and "Traceback" not in error, error
        return error

    def fork(self, *flags, num_processes=1, status=0):
        """Run the script in forked processes, which must all end with this status.

        Several processes are the ranks of one job. Returns what they printed.
        """
        with tempfile.NamedTemporaryFile("r") as log:
            try:
                codes = finish(start(lambda: self(*flags), num_processes, log.name))
            except TimeoutError as error:
                raise TimeoutError(log.read()) from error
            said = log.read()
        assert set(codes) == {status}, said
        return said

    def flags(self, output_dir, *more):
        """Flags of a run that takes a second; later ones override these."""
        return [*QUICK[self.file_name], f"--output_dir={output_dir}", *map(str, more)]

    def kill_after_checkpoint(self, folder, *flags, num_processes=1, until=lambda: True, delay=0):
        """Run the script in forked processes, and kill them one step after their first checkpoint.

        In this step they wait for the whole checkpoint, for `until`, and for the kill; or, with a
        `delay`, they go on for some seconds. Returns what they printed.
        """
        every = self.module.parse_args([*map(str, flags)]).checkpointing_steps
        take_step = self.module.train_step
        reached = folder.with_name(f"{folder.name}-reached")
        before = []

        def take_step_and_wait(*args):
            sums = take_step(*args)
            before.append(set(find_checkpoints(folder)))
            if len(before) == every + 1:
                wait_until(lambda: set(find_checkpoints(folder)) - before[0])
                wait_until(until)
                reached.touch()
                wait_until(lambda: delay)
            return sums

        def run():
            self.module.train_step = take_step_and_wait
            self(*flags, f"--output_dir={folder}")

        with tempfile.NamedTemporaryFile("r") as log:
            pids = start(run, num_processes, log.name)
            wait_until(lambda: reached.exists() or any(map(has_ended, pids)))
            time.sleep(delay)
            kill(pids)
            said = log.read()
        assert reached.exists(), said
        reached.unlink()
        return said


@pytest.fixture(scope="session")
def sd_inputs(tmp_path_factory):
    """sd_inputs(number of images, *flags of the cache): a folder that the tests share.

    It holds a base in `sd`, and images and their cache in `images` and `cache`.
    """
    precompute = Script("precompute_latents")

    @functools.cache
    def make(num_images, *flags):
        folder = tmp_path_factory.mktemp("sd")
        make_models(folder)
        make_captioned(folder / "images", num_images)
        precompute(
            *precompute.flags(
                folder / "cache",
                f"--train_data_dir={folder / 'images'}",
                f"--pretrained_model_name_or_path={MODELS}",
                f"--cache_dir={folder / 'datasets'}",
                *flags,
            )
        )
        return folder

    return make


def list_sd_flags(inputs, output_dir, *more):
    """Flags of a run of train_text_to_image.py on the cache of `sd_inputs`."""
    base, cache = inputs / "sd", inputs / "cache"
    return Script("train_text_to_image").flags(
        output_dir, f"--pretrained_model_name_or_path={base}", f"--latents_dir={cache}", *more
    )


def list_unconditional_flags(folder, num_images, *more):
    """Make images and a U-Net's config; returns the flags of train_unconditional.py for them."""
    make_images(folder / "images", num_images)
    return Script("train_unconditional").flags(
        folder / "out",
        f"--train_data_dir={folder / 'images'}",
        f"--model_config_name_or_path={make_unet_config(folder)}",
        *more,
    )


def launch(*argv, env=None):
    """Run a command line of the README in a separate process.

    `env` adds variables; a value of None removes one.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", *map(str, argv)]
    env = {
        name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def read_files(folder):
    """{name: bytes} of all files in a folder."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def copy_shard(folder, source, target):
    """Let a shard of a finished cache hold another one's rows, as the first script for Ray could.

    Returns the name of the shard that is now wrong.
    """
    cache = json.loads((folder / "cache.json").read_text())
    names = cache["shards"]["name"]
    shutil.copy(folder / names[source], folder / names[target])
    for column in ("sha256", "checksums"):
        cache["shards"][column][target] = cache["shards"][column][source]
    (folder / "cache.json").write_text(json.dumps(cache, indent=1))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_fingerprint": hash_values(cache)}))
    return names[target]


def hash_as_before(model, with_old=False):
    """`hash_weights` of the versions that did not name the kind of a hash."""
    digests = []
    for weight in model.parameters():
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().contiguous().numpy())
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def find_parser(parse_args):
    """The parser that a script's parse_args builds."""
    found = []

    def catch(parser, *args):
        found.append(parser)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as m, pytest.raises(InterruptedError):
        m.setattr(argparse.ArgumentParser, "parse_args", catch)
        parse_args([])
    return found[0]


def checkpoints(folder):
    return {name for name in os.listdir(folder) if "checkpoint" in name}


def metrics(folder):
    """The records of a run, except those that hold only signs about its samples."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if len(record := json.loads(line)) > 2]


def read_losses(folder):
    """The loss of each step that a run has logged."""
    return [record["loss"] for record in metrics(folder) if "loss" in record]


def weights(folder):
    return load_file(Path(folder) / "diffusion_pytorch_model.safetensors")


def copy_state(optimizer, other):
    """Load an optimizer's state into `other` through a file, without unpickling."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    load_optimizer(other, torch.load(file, weights_only=True))


def assert_same_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@functools.cache
def warm_up():
    """Do work once that each fork would repeat.

    For example, 1,000 patterns are compiled when the first text encoder is loaded.
    """
    Image.init()
    transformers.utils.logging.disable_progress_bar()
    transformers.CLIPTextModel.from_pretrained(MODELS / "text_encoder")


def start(function, num_processes=1, log=os.devnull):
    """Run `function()` in forked processes with their output in `log`; returns their ids.

    Several processes are the ranks of one gloo job. Forking keeps the imports, which take five
    seconds, so that a run takes one second.
    """
    warm_up()
    port, pids = str(free_port()), []
    for rank in range(num_processes):
        pid = os.fork()
        if pid:
            # the fork does this as well, but `kill` may come before it
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            pids.append(pid)
            continue
        code = 1
        try:
            # The imports leave no garbage, and scanning their objects takes half of a run's time.
            gc.freeze()
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if num_processes > 1:
                world = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": num_processes,
                    "LOCAL_WORLD_SIZE": num_processes,
                }
                os.environ.update({name: str(value) for name, value in world.items()})
                os.environ.update(
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true"
                )
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            # creates the fork's thread pool, because two threads that create it at once crash
            torch.set_num_threads(1)
            atexit._clear()  # Ray, for example, is for the parent to end
            atexit.register(multiprocessing.util._exit_function)
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
            if isinstance(code, str):  # a sentence; Python prints it and exits with 1
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
            os._exit(code)
    return pids


def finish(pids, timeout=300):
    """Wait for processes of `start`; returns their exit statuses."""
    deadline, codes = time.time() + timeout, []
    for pid in pids:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.time() > deadline:
                kill(pids)
                raise TimeoutError("the processes did not end")
            time.sleep(0.01)
    return codes


@pytest.fixture
def forked(monkeypatch):
    """precompute_latents.py of --cache_latents runs in a fork, which imports nothing.

    Returns the list of its commands.
    """
    calls = []

    def run(command, environment):
        calls.append(command)
        script = Script(Path(command[0]).stem)
        assert finish(start(lambda: script(*command[1:]))) == [0]

    monkeypatch.setattr("diffusion_training.latents.shared.make_cache", run)
    return calls


def has_ended(pid):
    """Whether a process of `start` has ended, which `finish` or `kill` can still ask."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_until(condition, timeout=300):
    deadline = time.time() + timeout
    while not condition():
        if time.time() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.01)


def start_ray_node(folder, *flags, env=None):
    """Start a Ray node with one CPU, whose log is in a folder. It ends with its process group."""
    store = f"--object-store-memory={100 * 2**20}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    command += ["--include-dashboard=false"] if "--head" in flags else []
    for _ in range(4):  # Ray gives a node 30 s to start, which is too little on a busy machine
        with tempfile.NamedTemporaryFile(dir=folder, prefix="node-", delete=False) as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True, "env": env}
            node = subprocess.Popen([*command, store, *flags], **options)
        said = Path(log.name).read_text
        # Two nodes that start at the same moment may choose the same names for their sockets
        wait_until(lambda said=said, node=node: "--block" in said() or node.poll() is not None, 120)
        if node.poll() is None:
            return node
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
    pytest.fail(f"Ray does not start: {said()}")


def kill(pids):
    """Kill processes of `start` and their children with SIGKILL, like a lost machine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
