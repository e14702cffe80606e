"""VAE, text encoders and tokenizers: loading, trying, calling and recognizing them."""

import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DiffusionPipeline
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion_training.data.captions import tokenize
from diffusion_training.errors import explain, explained, fail
from diffusion_training.training.models import compile_model, load_weights, put_on_device

DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of --mixed_precision
load_once = functools.lru_cache(DiffusionPipeline.load_config)  # from the hub: each report asks again


def locate_model(args, own_path, subfolder):
    """Where a model is: (hub id or folder, options). One with a flag of its own is no part of a pipeline."""
    if own_path is not None:
        return own_path, {"cache_dir": args.cache_dir}
    options = {"cache_dir": args.cache_dir, "subfolder": subfolder, "revision": args.revision, "variant": args.variant}
    return args.pretrained_model_name_or_path, options


def read_pipeline(args):
    """What model_index.json says of a pipeline; {} of models that are given one by one, or lie in a bare folder."""
    source = args.pretrained_model_name_or_path
    if source is None or os.path.isdir(source) and not os.path.isfile(os.path.join(source, "model_index.json")):
        return {}
    load = DiffusionPipeline.load_config if os.path.isdir(source) else load_once
    with explained(f"{source} can't be opened as a pipeline"):
        return load(source, cache_dir=args.cache_dir, revision=args.revision)


def is_sdxl(args):
    """Whether the models are those of Stable Diffusion XL, which has two text encoders."""
    return read_pipeline(args).get("_class_name", "").startswith("StableDiffusionXL")


def load_models(args, dtype):
    """(the VAE, a ModuleList of the text encoders, a list of their tokenizers), on the CPU; SDXL has two of these."""
    sdxl = is_sdxl(args)
    if sdxl and None in read_pipeline(args).get("text_encoder", [None]):
        fail(f"{args.pretrained_model_name_or_path} has one text encoder of two: a refiner can't be trained here")
    if sdxl and (args.text_encoder_name_or_path or args.tokenizer_name_or_path):
        fail("SDXL's encoders go together: leave --text_encoder_name_or_path and --tokenizer_name_or_path out")
    source, options = locate_model(args, args.vae_name_or_path, "vae")
    try:
        kind = AutoencoderKL.load_config(source, **options)["_class_name"]
        if kind not in ("AutoencoderKL", "AutoencoderTiny"):
            raise ValueError(f"it is an {kind}, no AutoencoderKL or AutoencoderTiny")
        vae_class = AutoencoderTiny if kind == "AutoencoderTiny" else AutoencoderKL
        # SDXL's overflows in float16 where it says so; Stable Diffusion's all say so, by default, and seldom do
        exact = sdxl and AutoencoderKL.load_config(source, **options).get("force_upcast", True)
        vae = load_weights(vae_class, source, **options, torch_dtype=torch.float32 if exact else dtype)
        for name in ("shift_factor", "latents_mean", "latents_std"):
            if vae.config.get(name):
                raise ValueError(f"it has a {name}, which a StableDiffusionPipeline would leave out")
        text_encoders, tokenizers = torch.nn.ModuleList(), []
        kinds = {"": CLIPTextModel} | ({"_2": CLIPTextModelWithProjection} if sdxl else {})
        for suffix, text_class in kinds.items():
            source, options = locate_model(args, args.text_encoder_name_or_path, f"text_encoder{suffix}")
            text_encoder = load_weights(text_class, source, **options, torch_dtype=dtype)
            own_path = args.tokenizer_name_or_path or args.text_encoder_name_or_path
            source, options = locate_model(args, own_path, f"tokenizer{suffix}")
            options.pop("variant", None)
            tokenizer = CLIPTokenizer.from_pretrained(source, **options)
            if len(tokenizer) < 256:  # where there are no files, transformers makes one that knows two tokens
                raise ValueError("no vocabulary")
            if len(tokenizer) > text_encoder.config.vocab_size or tokenizer.pad_token is None:
                raise ValueError("it has other tokens than the text encoder, or none to fill up with")
            text_encoders.append(text_encoder)
            tokenizers.append(tokenizer)
        limits = [tokenizer.model_max_length for tokenizer in tokenizers]
        limits += [encoder.config.max_position_embeddings for encoder in text_encoders]
        for tokenizer in tokenizers:  # old ones do not know how many the text encoder takes
            tokenizer.model_max_length = min(limits)
    except Exception as error:
        what = f"the {options.get('subfolder', 'model')} of a Stable Diffusion{' XL' if sdxl else ''} pipeline"
        fail(f"{source} does not hold {what} ({explain(error)})")
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, which this VAE needs")
    if args.bucket_step and (args.bucket_step % vae_scale_factor(vae) or (args.resolution or 0) % args.bucket_step):
        turn = f"it must divide --resolution {args.resolution} and be a multiple of {vae_scale_factor(vae)}"
        fail(f"--bucket_step {args.bucket_step} does not suit: {turn}, as this VAE needs")
    return vae.eval(), text_encoders.eval(), tokenizers


def vae_scale_factor(vae):
    """How many times smaller than the image the latents are in height and in width."""
    return 2 ** (len(vae.config.get("block_out_channels") or vae.config.encoder_block_out_channels) - 1)


def describe_latents(vae, resolution, kind):
    """What a cache says of its latents if they are of this VAE; `kind`: moments or sample."""
    side, channels = resolution // vae_scale_factor(vae), vae.config.latent_channels
    return {"latents": kind, "latents_shape": [channels * (2 if kind == "moments" else 1), side, side]}


def try_models(vae, text_encoders):
    """Encode a small image and two tokens, or end the program: a config may say what can't be computed."""
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * vae_scale_factor(vae)
            latents = encode_images(vae, torch.zeros(1, vae.config.in_channels, side, side, device=vae.device))
            vae.decode(latents[:, : vae.config.latent_channels].to(vae.dtype))
        with explained("the text encoder does not work"):
            ids = torch.zeros(1, 2, dtype=torch.long, device=vae.device)
            encode_prompts(text_encoders, {"input_ids": ids, "input_ids_2": ids})


def encode_images(vae, pixel_values):
    """Images uint8 [N, C, H, W] -> mean and std of their latents, float32 [N, 2 * latent_channels, h, w], unscaled.

    Of an AutoencoderTiny, which has no std, the latents themselves: [N, latent_channels, h, w].
    """
    images = (pixel_values / 127.5 - 1).to(vae.dtype)
    if isinstance(vae, AutoencoderTiny):
        return vae.encode(images).latents.float()
    posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


def encode_prompts(text_encoders, batch):
    """Tokens {"input_ids", "input_ids_2": [N, model_max_length]} -> what the pipeline makes of them, float32.

    {"prompt_embeds": [N, model_max_length, D]}, the last hidden state; of SDXL the last but one of both encoders side
    by side, and "pooled_prompt_embeds" [N, D2], the second one's projection (arXiv:2307.01952, section 2.1).
    """
    if len(text_encoders) == 1:
        return {"prompt_embeds": text_encoders[0](batch["input_ids"])[0].float()}
    one, two = text_encoders
    one = one(batch["input_ids"], output_hidden_states=True)
    two = two(batch["input_ids_2"], output_hidden_states=True)
    prompt_embeds = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], dim=-1)
    return {"prompt_embeds": prompt_embeds.float(), "pooled_prompt_embeds": two.text_embeds.float()}


@torch.no_grad()
def encode_empty_prompt(text_encoders, tokenizers, args):
    """What stands for a caption that is left out, as the pipeline has it: {name: float32}, of one image.

    The encoded "", or zeros where model_index.json wants them, as SDXL's does and as it was trained.
    """
    ids = {name: ids.to(text_encoders[0].device) for name, ids in tokenize(tokenizers, [""]).items()}
    empty_prompt = {name: embeds[0] for name, embeds in encode_prompts(text_encoders, ids).items()}
    zeros = is_sdxl(args) and read_pipeline(args).get("force_zeros_for_empty_prompt", True)
    return {name: torch.zeros_like(embeds) if zeros else embeds for name, embeds in empty_prompt.items()}


def hash_weights(model):
    """SHA-256 of a model's weights: of their values and shapes, whatever the files and the library call them."""

    def hash_weight(weight):
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool:  # gigabytes, and all processes wait; hashing lets other threads run
        digests = pool.map(hash_weight, model.parameters())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def describe_models(vae, text_encoders, tokenizers):
    """What has to be the same in the models of two caches, or of a cache and a trainer, for them to fit."""
    factors = {"scaling_factor": vae.config.scaling_factor, "shift_factor": vae.config.shift_factor or 0.0}
    described = {"vae": {"class": type(vae).__name__, "sha256": hash_weights(vae), **factors}}
    for suffix, text_encoder, tokenizer in zip(("", "_2"), text_encoders, tokenizers, strict=False):
        probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
        vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
        vocabulary = hashlib.sha256(vocabulary.encode()).hexdigest()
        text = {"class": type(text_encoder).__name__, "sha256": hash_weights(text_encoder)}
        described[f"text_encoder{suffix}"] = text
        described[f"tokenizer{suffix}"] = {"sha256": vocabulary, "model_max_length": tokenizer.model_max_length}
    return described


def describe_prompts(empty_prompt, args):
    """What a cache says of its captions if they are given as `encode_empty_prompt` says."""
    described = {f"{name}_shape": list(embeds.shape) for name, embeds in empty_prompt.items()}
    if is_sdxl(args):
        described["force_zeros_for_empty_prompt"] = not any(embeds.any() for embeds in empty_prompt.values())
    return described


def place_encoders(exact_models, device, args):
    """VAE and text encoders on the device in the precision that is asked for; `exact_models` are they in float32."""
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae, text_encoders = models = exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    put_on_device(vae, device)
    text_encoders.to(device)
    if args.compile:  # the parts that the encoding calls
        for model in (vae.encoder, *text_encoders):
            compile_model(model, args.compile)
    return models
