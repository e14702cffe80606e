"""VAE, text encoder and tokenizer: loading, trying, calling and recognizing them."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from transformers import CLIPTextModel, CLIPTokenizer

from diffusion_training.errors import explain, explained, fail
from diffusion_training.training.models import compile_model, load_weights, put_on_device

DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of --mixed_precision


def locate_model(args, own_path, subfolder):
    """Where a model is: (hub id or folder, options). One with a flag of its own is no part of a pipeline."""
    if own_path is not None:
        return own_path, {"cache_dir": args.cache_dir}
    options = {"cache_dir": args.cache_dir, "subfolder": subfolder, "revision": args.revision, "variant": args.variant}
    return args.pretrained_model_name_or_path, options


def load_models(args, dtype):
    """The VAE, the text encoder and the tokenizer, on the CPU."""
    try:
        source, options = locate_model(args, args.vae_name_or_path, "vae")
        kind = AutoencoderKL.load_config(source, **options)["_class_name"]
        if kind not in ("AutoencoderKL", "AutoencoderTiny"):
            raise ValueError(f"it is an {kind}, no AutoencoderKL or AutoencoderTiny")
        vae_class = AutoencoderTiny if kind == "AutoencoderTiny" else AutoencoderKL
        vae = load_weights(vae_class, source, **options, torch_dtype=dtype)
        for name in ("shift_factor", "latents_mean", "latents_std"):
            if vae.config.get(name):
                raise ValueError(f"it has a {name}, which a StableDiffusionPipeline would leave out")
        source, options = locate_model(args, args.text_encoder_name_or_path, "text_encoder")
        text_encoder = load_weights(CLIPTextModel, source, **options, torch_dtype=dtype)
        own_path = args.tokenizer_name_or_path or args.text_encoder_name_or_path
        source, options = locate_model(args, own_path, "tokenizer")
        options.pop("variant", None)
        tokenizer = CLIPTokenizer.from_pretrained(source, **options)
        if len(tokenizer) < 256:  # where there are no files, transformers makes one that knows two tokens
            raise ValueError("no vocabulary")
        if len(tokenizer) > text_encoder.config.vocab_size or tokenizer.pad_token is None:
            raise ValueError("it has other tokens than the text encoder, or none to fill up with")
        limit = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
        tokenizer.model_max_length = limit  # old tokenizers do not know how many the text encoder takes
    except Exception as error:
        what = f"the {options.get('subfolder', 'model')} of a Stable Diffusion pipeline"
        fail(f"{source} does not hold {what} ({explain(error)})")
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, which this VAE needs")
    return vae.eval(), text_encoder.eval(), tokenizer


def vae_scale_factor(vae):
    """How many times smaller than the image the latents are in height and in width."""
    return 2 ** (len(vae.config.get("block_out_channels") or vae.config.encoder_block_out_channels) - 1)


def describe_latents(vae, resolution, kind):
    """What a cache says of its latents if they are of this VAE; `kind`: moments or sample."""
    side, channels = resolution // vae_scale_factor(vae), vae.config.latent_channels
    return {"latents": kind, "latents_shape": [channels * (2 if kind == "moments" else 1), side, side]}


def try_models(vae, text_encoder):
    """Encode a small image and two tokens, or end the program: a config may say what can't be computed."""
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * vae_scale_factor(vae)
            latents = encode_images(vae, torch.zeros(1, vae.config.in_channels, side, side, device=vae.device))
            vae.decode(latents[:, : vae.config.latent_channels].to(vae.dtype))
        with explained("the text encoder does not work"):
            encode_prompts(text_encoder, torch.zeros(1, 2, dtype=torch.long, device=text_encoder.device))


def encode_images(vae, pixel_values):
    """Images uint8 [N, C, H, W] -> mean and std of their latents, float32 [N, 2 * latent_channels, h, w], unscaled.

    Of an AutoencoderTiny, which has no std, the latents themselves: [N, latent_channels, h, w].
    """
    images = (pixel_values / 127.5 - 1).to(vae.dtype)
    if isinstance(vae, AutoencoderTiny):
        return vae.encode(images).latents.float()
    posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


def encode_prompts(text_encoder, input_ids):
    """Tokens [N, model_max_length] -> the text encoder's last hidden state, float32 [N, model_max_length, D]."""
    return text_encoder(input_ids)[0].float()


def hash_weights(model):
    """SHA-256 of a model's weights: of their values and shapes, whatever the files and the library call them."""

    def hash_weight(weight):
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool:  # gigabytes, and all processes wait; hashing lets other threads run
        digests = pool.map(hash_weight, model.parameters())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def describe_models(vae, text_encoder, tokenizer):
    """What has to be the same in the models of two caches, or of a cache and a trainer, for them to fit."""
    probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
    vocabulary = hashlib.sha256(vocabulary.encode()).hexdigest()
    factors = {"scaling_factor": vae.config.scaling_factor, "shift_factor": vae.config.shift_factor or 0.0}
    return {
        "vae": {"class": type(vae).__name__, "sha256": hash_weights(vae), **factors},
        "text_encoder": {"class": type(text_encoder).__name__, "sha256": hash_weights(text_encoder)},
        "tokenizer": {"sha256": vocabulary, "model_max_length": tokenizer.model_max_length},
    }


def place_encoders(exact_models, device, args):
    """VAE and text encoder on the device in the precision that is asked for; `exact_models` are they in float32."""
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae, text_encoder = models = exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    put_on_device(vae, device)
    text_encoder.to(device)
    if args.compile:  # the parts that the encoding calls
        compile_model(vae.encoder, args.compile)
        compile_model(text_encoder, args.compile)
    return models
