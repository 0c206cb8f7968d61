"""The default model's GGUF file against transformers' own reading of it."""

from __future__ import annotations

import numpy as np
import pytest

from lorafleet.compiler import default_source, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello, world!",
    "  leading and   inner spaces\n\nand lines\t",
    "naïve café, Ελληνικά, 日本語, emoji 🦜🏴‍☠️",
    "<|im_start|>user\nWhat is it?<|im_end|>\n",
    "def f(x): return x**2  # comment",
]


def test_tokens_are_those_of_transformers() -> None:
    from tokenizers import Tokenizer

    source = default_source()
    files = open_checkpoint(source).tokenizer_files()
    ours = Tokenizer.from_str(files["tokenizer.json"].decode())
    theirs = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == expected
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_split_one_by_one_as_the_model_was_trained() -> None:
    from tokenizers import Tokenizer

    files = open_checkpoint(default_source()).tokenizer_files()
    ours = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert len(ours.encode("2026", add_special_tokens=False).ids) == 4


def test_weights_are_those_of_transformers() -> None:
    source = default_source()
    checkpoint = open_checkpoint(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    state = model.state_dict()
    assert set(checkpoint.names()) == set(state) - {"lm_head.weight"}
    for name in checkpoint.names():
        if ".layers." not in name or ".layers.7." in name:
            np.testing.assert_array_equal(checkpoint.read(name), state[name].numpy())
