"""The vision-language part of the folder that stands for the hub: two tiny models whose processors need
neither torchvision nor a download, and a dataset with an image a row.
"""

from pathlib import Path

import numpy as np
import transformers as tf
from datasets import Dataset, Features, Image, Value
from trl_suite_hub import OWNER, SIZES, TEST_ROWS, prompts, randomise, token_ids, write_readme

TEXT = SIZES | {"hidden_size": 16}
VISION = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
PATCH, SIDE = 14, 56  # pixels
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_image_dataset(folder: Path) -> None:
    """`conversational_prompt_only` of `zen-image`: a question, and a picture of noise."""
    random, starts = np.random.default_rng(0), prompts()
    asked = [[{"role": "user", "content": f"How does this line end: {start} ...?"}] for start in starts]
    sizes = random.integers(32, 64, size=(len(starts), 2))
    pictures = [random.integers(0, 256, size=(*size, 3), dtype=np.uint8) for size in sizes]
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()})
    rows = Dataset.from_dict({"prompt": asked, "image": pictures}, features=features)
    cut, name = len(starts) - TEST_ROWS, "conversational_prompt_only"
    for split, part in (("train", range(cut)), ("test", range(cut, len(starts)))):
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows.select(part).to_parquet(folder / name / f"{split}.parquet")
    write_readme(folder, [name])


def with_marks(hub: Path, **marks: str) -> tf.PreTrainedTokenizerBase:
    """The hub's tokenizer with special tokens for images, under the names that processors read."""
    source = hub / OWNER / "tiny-LlamaForCausalLM-3.2"
    return tf.AutoTokenizer.from_pretrained(source, extra_special_tokens=marks)


def write_gemma3(hub: Path) -> None:
    folder = hub / OWNER / "tiny-Gemma3ForConditionalGeneration"
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = with_marks(hub, **marks, image_token="<image_soft_token>")
    per_image = (SIDE // PATCH) ** 2
    pictures = tf.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    template = TEMPLATE.replace("IMAGE", tokenizer.boi_token)
    tf.Gemma3Processor(
        pictures, tokenizer, chat_template=template, image_seq_length=per_image
    ).save_pretrained(folder)
    config = tf.Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "vocab_size": len(tokenizer)} | token_ids(tokenizer),
        vision_config=VISION | {"image_size": SIDE, "patch_size": PATCH, "vision_use_head": False},
        mm_tokens_per_image=per_image,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        **token_ids(tokenizer),
    )
    randomise(tf.Gemma3ForConditionalGeneration(config)).save_pretrained(folder)


def write_llava_next(hub: Path) -> None:
    folder = hub / OWNER / "tiny-LlavaNextForConditionalGeneration"
    tokenizer = with_marks(hub, image_token="<image>")
    side, grid = SIDE // 2, [[SIDE // 2, SIDE], [SIDE, SIDE // 2], [SIDE, SIDE]]
    pictures = tf.LlavaNextImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, image_grid_pinpoints=grid
    )
    tf.LlavaNextProcessor(
        pictures,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.replace("IMAGE", tokenizer.image_token),
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    config = tf.LlavaNextConfig(
        text_config=tf.MistralConfig(
            **TEXT, head_dim=4, vocab_size=len(tokenizer), **token_ids(tokenizer)
        ).to_dict(),
        vision_config=VISION | {"model_type": "clip_vision_model", "image_size": side, "patch_size": PATCH},
        image_grid_pinpoints=grid,
        image_token_index=tokenizer.image_token_id,
        **token_ids(tokenizer),
    )
    randomise(tf.LlavaNextForConditionalGeneration(config)).save_pretrained(folder)


def write_images(hub: Path) -> None:
    """Everything above, under the ids that the tests ask for."""
    write_image_dataset(hub / OWNER / "zen-image")
    write_gemma3(hub)
    write_llava_next(hub)
