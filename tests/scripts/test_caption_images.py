"""caption_images.py: captions beside images, in one file, after a kill, on several processes."""

import json
import os
import signal

import datasets
import pytest
import torch
from conftest import ROOT, Script, finish, launch, start
from PIL import Image
from transformers import (
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    GitForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

caption = Script("caption_images")
CAPTIONER = ROOT / "demo/captioner"
CHAT = (
    "{% for message in messages %}{{ message.role }} : {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


@pytest.fixture
def drawings(tmp_path):
    """A folder with ten of the demo's ducks."""
    rows = datasets.load_dataset(str(ROOT / "demo/ducks"), split="train[:10]")
    (tmp_path / "ducks").mkdir()
    for i, image in enumerate(rows["image"]):
        image.save(tmp_path / f"ducks/{i}.png")
    return tmp_path / "ducks"


@pytest.fixture
def flags(drawings):
    return [
        f"--train_data_dir={drawings}", f"--pretrained_model_name_or_path={CAPTIONER}",
        "--batch_size=4", "--dataloader_num_workers=0",
    ]  # fmt: skip


def make_chat_model(folder):
    """A tiny Llava, whose processor has a chat template, as JoyCaption's has."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CAPTIONER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    LlavaProcessor(
        image_processor, tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=CHAT,
    ).save_pretrained(folder)  # fmt: skip
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=16, patch_size=8, **sizes),
            text_config=LlamaConfig(
                vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=0, **sizes
            ),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        )
    )
    model.save_pretrained(folder)
    return folder


def make_qwen(folder):
    """A tiny Qwen3-VL, whose images take different numbers of tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CAPTIONER)
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    image_processor = Qwen2VLImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, patch_size=16, merge_size=2
    )
    chat = CHAT.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    Qwen3VLProcessor(
        image_processor, tokenizer, Qwen3VLVideoProcessor(), chat_template=chat
    ).save_pretrained(folder)
    image, video, start, end = map(tokenizer.convert_tokens_to_ids, names)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True}  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 32}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**sizes, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                         "num_key_value_heads": 2, "vocab_size": len(tokenizer),
                         "rope_parameters": rope},
            vision_config={**sizes, "depth": 2, "num_heads": 2, "patch_size": 16,
                           "out_hidden_size": 32, "num_position_embeddings": 16,
                           "deepstack_visual_indexes": [0, 1]},
            image_token_id=image, video_token_id=video,
            vision_start_token_id=start, vision_end_token_id=end,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    return folder


def make_florence(folder):
    """A tiny Florence-2, an encoder-decoder, whose answer does not begin with the question."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        CAPTIONER, extra_special_tokens={"image_token": "<image>"}
    )
    sides = {"height": 32, "width": 32}
    image_processor = CLIPImageProcessor(size=sides, crop_size=sides, do_center_crop=False)
    image_processor.image_seq_length = 2
    Florence2Processor(image_processor, tokenizer, num_additional_image_tokens=2).save_pretrained(
        folder
    )
    text = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in
            {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(4)
    model = Florence2ForConditionalGeneration(
        Florence2Config(
            text_config={**text, "model_type": "bart", "vocab_size": len(tokenizer), "d_model": 16,
                         "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
                         "pad_token_id": 0, "decoder_start_token_id": 2,
                         "forced_eos_token_id": None},
            vision_config={"model_type": "florence_vision", "embed_dim": [8, 8, 8, 16],
                           "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4,
                           "window_size": 2, "projection_dim": 16},
            image_token_id=image,
        )
    )  # fmt: skip
    model.generation_config.suppress_tokens = [0, 1, 2, 3, image]  # it says words
    model.save_pretrained(folder)
    return folder


def read_texts(folder):
    return {path.name: path.read_text() for path in folder.glob("*.txt")}


def describe_alone(path):
    """The caption of one image, by the plain library."""
    processor, model = (
        AutoProcessor.from_pretrained(CAPTIONER),
        GitForCausalLM.from_pretrained(CAPTIONER, dtype=torch.float32),
    )
    inputs = processor(images=Image.open(path).convert("RGB"), return_tensors="pt")
    words = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    return processor.batch_decode(words, skip_special_tokens=True)[0]


def test_each_image_gets_a_caption_file_which_the_trainers_read(flags, drawings, tmp_path, capsys):
    (drawings / "3.txt").write_text("mine")
    (drawings / "broken.png").write_bytes((drawings / "0.png").read_bytes()[:100])
    caption(*flags, "--trigger=sks duck")
    texts = read_texts(drawings)
    assert texts.pop("3.txt") == "mine" and len(texts) == 9
    for name, text in texts.items():
        alone = describe_alone(drawings / name.replace(".txt", ".png"))
        assert text == f"sks duck, {alone}\n" and "duck" in alone
    said = capsys.readouterr().out
    assert "no caption: broken.png: " in said and "Done: 9 captions" in said
    assert not [*drawings.glob(".*")]
    (drawings / "broken.png").unlink()
    rows = datasets.load_dataset(
        "imagefolder", data_dir=str(drawings), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(rows) == 10

    caption(*flags, "--overwrite")
    texts = read_texts(drawings)
    assert texts["3.txt"] != "mine" and not any("sks" in text for text in texts.values())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_run_describes_no_image_twice(flags, drawings, num_processes, monkeypatch):
    expected = {f"{i}.txt": describe_alone(drawings / f"{i}.png") + "\n" for i in range(10)}
    described = drawings.parent / "described"
    write, describe = caption.module.write_file, caption.module.describe

    def note(path, *rest, **options):
        with open(described, "a") as file:
            file.write(f"{path.name}\n")
        write(path, *rest, **options)

    def die(*values):
        captions = describe(*values)
        if described.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return captions

    monkeypatch.setattr(caption.module, "write_file", note)
    with monkeypatch.context() as m:
        m.setattr(caption.module, "describe", die)
        more = ["--overwrite", "--batch_size=2"]
        codes = finish(start(lambda: caption(*flags, *more), num_processes))
    assert -signal.SIGKILL in codes
    first = described.read_text().split()
    assert 2 <= len(first) < 10 and [*drawings.glob(".captions-*")]
    caption.fork(*flags, *more, num_processes=num_processes)
    assert sorted(described.read_text().split()) == sorted(expected)
    assert read_texts(drawings) == expected and not [*drawings.glob(".captions-*")]


def test_a_torn_line_of_the_journal_is_not_read(tmp_path):
    journal = caption.module.Journal(tmp_path / "a.jsonl", "settings")
    with journal.open(0) as file:
        file.write('[0, "a", null]\n[1, "b')
    with journal.open(0) as file:
        file.write('[2, null, "broken"]\n')
    made = journal.read()
    assert {row: each.caption for row, each in made.items()} == {0: "a", 2: None}
    with pytest.raises(SystemExit):
        caption.module.Journal(tmp_path / "a.jsonl", "others").read()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_captions_go_into_one_file(flags, drawings, tmp_path, suffix):
    file = tmp_path / f"captions[1].{suffix}"
    first = min(drawings.glob("*.png"))
    first.rename(first.with_name("Screenshot at 3.45.12\u202fPM.png"))  # as macOS names them
    caption(*flags, f"--output_file={file}", "--max_train_samples=6")
    if suffix == "jsonl":
        file = file.rename(drawings / "metadata.jsonl").parent
    cache = str(tmp_path / "cache")
    if suffix == "jsonl":
        rows = datasets.load_dataset(str(file), split="train", cache_dir=cache)
        names = [json.loads(line)["file_name"] for line in open(drawings / "metadata.jsonl")]
    else:
        file = file.rename(tmp_path / "captions.parquet")  # `datasets` takes names for patterns
        rows = datasets.Dataset.from_parquet(str(file), cache_dir=cache)
    assert len(rows) == 6 and rows[0]["image"].size == (64, 64)
    assert all("duck" in text for text in rows["text"])
    if suffix == "jsonl":
        assert all((drawings / name).is_file() for name in names)
        text = describe_alone(drawings / names[0])
        assert json.loads(open(drawings / "metadata.jsonl").readline())["text"] == text
    assert not read_texts(drawings)


def test_a_table_needs_an_output_file(flags, tmp_path, capsys):
    source = f"--train_data_dir={ROOT / 'demo/ducks'}"
    assert "give --output_file" in caption.refused(*flags, source)
    caption(*flags, source, f"--output_file={tmp_path / 'a.parquet'}", "--max_train_samples=3")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"))
    assert len(rows) == 3 and rows.column_names == ["image", "text"]
    said = caption.refused(*flags, source, f"--output_file={tmp_path / 'a.jsonl'}")
    assert "is not a file of its own: give --output_file NAME.parquet" in said
    said = caption.refused(*flags, source, f"--output_file={tmp_path / 'a.parquet'}", status=2)
    assert "exists: choose another, or give --overwrite" in said


def test_a_model_with_a_chat_template_is_asked_and_its_question_is_no_caption(
    flags, drawings, tmp_path, monkeypatch
):
    """Images of a batch are described as each alone is, and the text has what the model added."""
    model = make_chat_model(tmp_path / "chat")
    more = [f"--pretrained_model_name_or_path={model}", "--max_new_tokens=5"]
    more += ["--prompt=a red duck", "--system_prompt=on blue", "--overwrite"]
    caption(*flags, *more)
    texts = read_texts(drawings)
    caption(*flags, *more, "--batch_size=1")
    assert read_texts(drawings) == texts and len(texts) == 10
    processor = AutoProcessor.from_pretrained(model)
    library = LlavaForConditionalGeneration.from_pretrained(model)
    asked = "system : on blue user : <image> a red duck assistant :"
    for name in ("0", "7"):
        image = Image.open(drawings / f"{name}.png").convert("RGB")
        inputs = processor(images=[image], text=[asked], return_tensors="pt")
        words = library.generate(**inputs, max_new_tokens=5, do_sample=False)
        added = words[0, inputs["input_ids"].shape[1] :]
        answer = processor.decode(added, skip_special_tokens=True)
        assert texts[f"{name}.txt"].split() == answer.split()


@pytest.mark.parametrize(
    "make, prompt", [(make_qwen, "a red duck"), (make_florence, "<MORE_DETAILED_CAPTION>")]
)
def test_other_models_describe_images_of_several_sizes(make, prompt, flags, drawings, tmp_path):
    """A batch of images of other sizes has the captions that each image has alone."""
    Image.open(drawings / "1.png").resize((40, 60)).save(drawings / "1.png")
    model = f"--pretrained_model_name_or_path={make(tmp_path / 'model')}"
    more = [model, "--max_new_tokens=5", f"--prompt={prompt}", "--overwrite"]
    caption(*flags, *more)
    texts = read_texts(drawings)
    caption(*flags, *more, "--batch_size=1")
    assert read_texts(drawings) == texts and len(texts) == 10
    assert not any(prompt in text for text in texts.values())


def test_a_caption_ends_where_the_model_can_write_no_more(flags, drawings, tmp_path):
    """Florence-2 has 1,024 positions, the tiny one 256, and this one never ends by itself."""
    more = [f"--pretrained_model_name_or_path={make_florence(tmp_path / 'florence')}"]
    more += ["--batch_size=2", "--max_train_samples=2", "--max_new_tokens=300"]
    said = caption.refused(*flags, *more, f"--prompt={'duck ' * 300}")
    assert "an image with --prompt takes 30" in said and "the model reads 256: shorten it" in said
    # the run that described nothing does not stand in the way of another prompt
    caption(*flags, *more, "--prompt=a red duck")
    texts = read_texts(drawings)
    assert len(texts) == 2 and all(200 < len(text.split()) <= 256 for text in texts.values())


def test_bad_flags_and_models_end_in_one_sentence(flags, drawings, tmp_path):
    for more, sentence in {
        "--trigger=": "--trigger is empty: leave it out",
        "--output_file=a.csv": "is not the name of a .jsonl or .parquet file",
        "--output_file=nowhere/a.jsonl": "there is no folder nowhere",
        "--train_data_dir=nowhere": "is not a folder",
        "--batch_size=0": "0 is not between 1",
        "--max_new_tokens=1000000": "1000000 is not between 1 and 4096",
        "--caption_extension=.a/b": "--caption_extension .a/b is no extension: give one such as",
        "--caption_extension=.": "--caption_extension . is no extension",
    }.items():
        assert sentence in caption.refused(*flags, more, status=2)
    model = "--pretrained_model_name_or_path"
    said = caption.refused(*flags, f"{model}={ROOT / 'demo/drawings'}")
    assert "can't be used as a model that describes images" in said
    assert "--system_prompt is for a model with a chat template" in caption.refused(
        *flags, "--system_prompt=be short"
    )
    pictures = {path: path.read_bytes() for path in drawings.iterdir()}
    said = caption.refused(*flags, "--caption_extension=.png", "--overwrite")
    assert "--caption_extension .png would write over the image" in said
    assert {path: path.read_bytes() for path in drawings.iterdir()} == pictures
    Image.open(drawings / "0.png").convert("RGB").save(drawings / "0.jpg")
    assert "2 images share the caption file" in caption.refused(*flags)
    assert not read_texts(drawings)


def test_a_model_that_says_nothing_leaves_no_caption(flags, drawings, monkeypatch, capsys):
    monkeypatch.setattr(caption.module, "describe", lambda *values: [""] * 4)
    assert "no image could be described" in caption.refused(*flags, "--max_train_samples=4")
    assert "the model returned no words" in capsys.readouterr().out
    assert not read_texts(drawings)
    # another prompt is tried, and an image without words gets no file
    monkeypatch.setattr(caption.module, "describe", lambda *values: ["", "a", "a duck", "b"])
    caption(*flags, "--max_train_samples=4", "--prompt=say more", "--caption_extension=txt")
    said = capsys.readouterr().out
    assert "Done: 3 captions" in said and said.count("no caption: ") == 1
    assert sorted(read_texts(drawings).values()) == ["a\n", "a duck\n", "b\n"]


@pytest.mark.ci
def test_accelerate_launch_captions_on_two_processes(flags, drawings):
    env = {"ACCELERATE_USE_CPU": "true"}
    config = ["--multi_gpu", "--num_processes", 2, "--main_process_port", 0]
    run = launch(*config, "caption_images.py", *flags, "--mixed_precision=bf16", env=env)
    assert run.returncode == 0, run.stderr
    assert "Processes: 2 on cpu" in run.stdout and "Done: 10 captions" in run.stdout
    assert len(read_texts(drawings)) == 10
