"""`tiny4`: a seeded random Llama of 4 layers as a HuggingFace directory, small enough for any test.

Hidden 64, 4 heads of 16, 2 KV heads, MLP 128, vocabulary 256 (one token a byte), untied head.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
}

LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
"""(out, in) of each linear of a layer."""


def write_tiny(directory: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Write config.json, model.safetensors and tokenizer.json; return `directory`."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(256, 64, scale=1.0),
        "model.norm.weight": 1 + draw(64, scale=0.1),
    }
    if not tied:
        tensors["lm_head.weight"] = draw(256, 64, scale=0.3)
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in LINEARS.items():
            tensors[f"{prefix}.{name}.weight"] = draw(rows, columns, scale=columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + draw(64, scale=0.1)
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory
