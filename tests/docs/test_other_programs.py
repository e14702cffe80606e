"""Commands and settings that people have for other programs, and what they are here.

Each is of a program's own pages or issues, in the versions of docs/from-kohya.md, with its flags or
keys alone, and as docs/from-kohya.md rewrites it.
"""

import importlib
import re
import shlex

import pytest
from conftest import ROOT

COMMON = (
    "--dataset_config --output_dir --output_name --network_module --network_dim --learning_rate "
    "--optimizer_type --max_train_epochs --save_every_n_epochs --mixed_precision "
    "--gradient_checkpointing "
)
MUSUBI = (
    "--dit --vae --text_encoder --sdpa --timestep_sampling --weighting_scheme "
    "--discrete_flow_shift "
    "--max_data_loader_n_workers --persistent_data_loader_workers --seed "
)
DATA = "--data data.toml --output_dir out --output_name dog --learning_rate 1e-4 "
EPOCHS = "--num_train_epochs 16 --checkpointing_epochs 1 --gradient_checkpointing "
KOHYA = "--pretrained_model_name_or_path base "
# {what: (script here, flags there, flags here)}
COMMANDS = {
    "sd-scripts docs/sdxl_train_network.md": (
        "train_text_to_image",
        f"{COMMON} --pretrained_model_name_or_path --save_model_as --network_alpha --unet_lr "
        "--text_encoder_lr1 --text_encoder_lr2 --lr_scheduler --cache_text_encoder_outputs "
        "--cache_latents",
        f"{KOHYA}{DATA}{EPOCHS} --rank 32 --lora_alpha 16 --optimizer adamw8bit --mixed_precision "
        "bf16 --lr_scheduler constant --cache_latents",
    ),
    "sd-scripts issue 725": (
        "train_text_to_image",
        "--enable_bucket --pretrained_model_name_or_path --train_data_dir --resolution "
        "--output_dir "
        "--logging_dir --network_alpha --save_model_as --network_module --text_encoder_lr "
        "--unet_lr "
        "--network_dim --output_name --lr_scheduler_num_cycles --no_half_vae --learning_rate "
        "--lr_scheduler --train_batch_size --max_train_steps --save_every_n_epochs "
        "--mixed_precision "
        "--save_precision --cache_latents --cache_latents_to_disk --optimizer_type "
        "--optimizer_args "
        "--max_data_loader_n_workers --bucket_reso_steps --gradient_checkpointing --xformers "
        "--bucket_no_upscale",
        f"{KOHYA} --train_data_dir . --folder_repeats --resolution 1024 --bucket_step 64 "
        "--bucket_no_upscale --output_dir out --output_name shodan --rank 256 --lora_alpha 1 "
        "--learning_rate 4e-4 --lr_scheduler constant --train_batch_size 1 --max_train_steps 5200 "
        "--checkpointing_epochs 1 --mixed_precision bf16 --cache_latents --optimizer adafactor "
        "--gradient_checkpointing",
    ),
    "sd-scripts docs/flux_train_network.md": (
        "train_flow",
        f"{COMMON} --pretrained_model_name_or_path --clip_l --t5xxl --ae --save_model_as "
        "--network_alpha --lr_scheduler --sdpa --guidance_scale --timestep_sampling "
        "--model_prediction_type --blocks_to_swap --cache_text_encoder_outputs --cache_latents",
        f"{KOHYA}{DATA}{EPOCHS} --rank 16 --lora_alpha 1 --optimizer adamw8bit --lr_scheduler "
        "constant --embedded_guidance_scale 1 --weighting_scheme flux_shift --blocks_to_swap 18 "
        "--cache_latents --mixed_precision fp16",
    ),
    "sd-scripts docs/sd3_train_network.md": (
        "train_flow",
        f"{COMMON} --pretrained_model_name_or_path --clip_l --clip_g --t5xxl --save_model_as "
        "--network_alpha --lr_scheduler --sdpa --weighting_scheme --blocks_to_swap",
        f"{KOHYA}{DATA}{EPOCHS} --rank 16 --lora_alpha 1 --optimizer adamw8bit --lr_scheduler "
        "constant --weighting_scheme uniform --blocks_to_swap 32 --mixed_precision fp16",
    ),
    "musubi-tuner docs/zimage.md": (
        "train_flow",
        f"{COMMON}{MUSUBI}",
        f"{KOHYA}{DATA}{EPOCHS} --transformer_file z.safetensors --rank 32 --lora_alpha 1 "
        "--optimizer adamw8bit --weighting_scheme shift --shift 2 --seed 42 --mixed_precision bf16",
    ),
    "musubi-tuner docs/krea2.md": (
        "train_flow",
        f"{COMMON}{MUSUBI} --network_alpha --turbo_dit",
        f"{KOHYA}{DATA}{EPOCHS} --transformer_file raw.safetensors --rank 32 --lora_alpha 32 "
        "--optimizer adamw8bit --weighting_scheme shift --shift 2.5 --seed 42 --mixed_precision "
        "bf16 --validation_base turbo.safetensors --validation_prompts dog",
    ),
    "musubi-tuner issue 499": (
        "train_flow",
        f"{COMMON}{MUSUBI} --edit --network_alpha --gradient_accumulation_steps --max_grad_norm "
        "--optimizer_args --lr_scheduler",
        f"{KOHYA}{DATA}{EPOCHS} --transformer_file qwen.safetensors --rank 16 --lora_alpha 16 "
        "--optimizer adamw --adam_weight_decay 0.00001 --weighting_scheme shift --shift 2.2 "
        "--seed 5 --max_grad_norm 0 --mixed_precision bf16 --gradient_accumulation_steps 1",
    ),
    "SimpleTuner examples/anima.peft-lora": (
        "train_flow",
        "--base_model_precision --caption_dropout_probability --checkpoint_step_interval "
        "--checkpoints_total_limit --data_backend_config --flow_schedule_shift --learning_rate "
        "--gradient_accumulation_steps --gradient_checkpointing --hub_model_id --lora_alpha "
        "--lora_rank --lora_type --loss_type --lr_scheduler --lr_warmup_steps --max_grad_norm "
        "--max_train_steps --mixed_precision --model_family --model_flavour --model_type "
        "--optimizer "
        "--num_train_epochs --output_dir --pretrained_model_name_or_path --push_checkpoints_to_hub "
        "--push_to_hub --report_to --resolution --resolution_type --resume_from_checkpoint --seed "
        "--tracker_project_name --tracker_run_name --train_batch_size --use_ema --vae_batch_size "
        "--user_prompt_library --validation_guidance --validation_guidance_rescale "
        "--validation_negative_prompt --validation_num_inference_steps --validation_prompt "
        "--validation_prompt_library --validation_resolution --validation_seed --validation_steps",
        f"{KOHYA} --dataset_name captions --image_column Image --caption_column Caption --rank 64 "
        "--lora_alpha 64 --caption_dropout 0.1 --checkpointing_steps 1000 --shift 3 --output_dir "
        "out --checkpoints_total_limit 6 --learning_rate 1e-5 --lr_scheduler constant_with_warmup "
        "--lr_warmup_steps 250 --max_train_steps 1000 --mixed_precision bf16 --no-use_ema "
        "--train_batch_size 1 --resolution 1024 --center_crop --resume_from_checkpoint latest "
        "--validation_prompts portrait --guidance_scale 4 --num_inference_steps 20 "
        "--validation_steps 1000 --gradient_checkpointing --seed 42",
    ),
}
# {what: (script here, keys there, flags here)}; the page has all keys
FILES = {
    "ai-toolkit config/examples/train_lora_qwen_image_24gb.yaml": (
        "train_flow",
        "training_folder trigger_word linear linear_alpha save_every max_step_saves_to_keep "
        "folder_path caption_ext caption_dropout_rate shuffle_tokens cache_latents_to_disk "
        "resolution batch_size cache_text_embeddings steps gradient_accumulation "
        "train_text_encoder gradient_checkpointing noise_scheduler optimizer lr skip_first_sample "
        "dtype name_or_path arch quantize qtype quantize_te low_vram sampler sample_every prompts "
        "neg seed walk_seed guidance_scale sample_steps",
        f"{KOHYA} --train_data_dir . --bucket_step 32 --resolution 512 768 1024 --cache_latents "
        "cpu "
        "--rank 16 --lora_alpha 16 --checkpointing_steps 250 --checkpoints_total_limit 4 "
        "--caption_dropout 0.05 --train_batch_size 1 --max_train_steps 2000 --optimizer adamw8bit "
        "--gradient_checkpointing --learning_rate 1e-4 --mixed_precision bf16 --base_precision nf4 "
        "--validation_prompts a b --validation_steps 250 --guidance_scale 3 "
        "--num_inference_steps 25 --output_dir out --seed 42",
    ),
    "OneTrainer training_presets/Z-Image/#z-image LoRA 16GB.json": (
        "train_flow",
        "base_model_name batch_size learning_rate model_type output_model_format resolution "
        "compile weight_dtype training_method train_dtype layer_filter_preset "
        "timestep_distribution",
        f"{KOHYA} --train_data_dir . --bucket_step 64 --train_batch_size 2 --learning_rate 3e-4 "
        "--rank 16 --lora_alpha 1 --resolution 512 --compile --base_precision int8 "
        "--mixed_precision bf16 --lora_layers attention_mlp --weighting_scheme logit_normal "
        "--output_dir out",
    ),
}


def parse(monkeypatch, tmp_path, script, words):
    module = importlib.import_module(script)
    # `--data` looks for its folders
    (tmp_path / "photos").mkdir()
    (tmp_path / "data.toml").write_text('[[datasets]]\nimage_directory = "photos"\n')
    monkeypatch.chdir(tmp_path)
    return module.parse_args(shlex.split(words))


def find_parser(script, monkeypatch):
    module = importlib.import_module(script)
    parsers = []
    with monkeypatch.context() as patch:
        make = module.make_parser
        patch.setattr(module, "make_parser", lambda *a: parsers.append(make(*a)) or parsers[0])
        with pytest.raises(SystemExit):
            module.parse_args(["--help"])
    return parsers[0]


@pytest.mark.parametrize("what", COMMANDS)
def test_each_flag_of_a_command_is_known_or_has_a_hint(tmp_path, monkeypatch, what, capsys):
    script, there, here = COMMANDS[what]
    parser = find_parser(script, monkeypatch)
    assert not [flag for flag in there.split() if parser.advise(flag) is None]
    parse(monkeypatch, tmp_path, script, here)


@pytest.mark.parametrize("what", FILES)
def test_each_key_of_a_file_is_on_the_page(tmp_path, monkeypatch, what):
    script, there, here = FILES[what]
    page = (ROOT / "docs/from-kohya.md").read_text()
    section = re.search(r"## From SimpleTuner(.*?)\n## ", page, re.DOTALL)[1]
    assert not [key for key in there.split() if not re.search(rf"\b{key}\b", section)]
    parse(monkeypatch, tmp_path, script, here)
