"""A Llama-family GGUF file as a HuggingFace checkpoint.

Undoes what the conversion to GGUF did: names, the interleaved rows of q and k, quantisation (to
float32), and the tokenizer, which is rebuilt from its tokens and merges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.core.errors import InvalidInput, NotFound, Unsupported

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType


class GgufCheckpoint:
    """One GGUF file, memory-mapped; see `source.Checkpoint`.

    Raises
    ------
    Unsupported
        The architecture is not `llama`, or the tokenizer is not a byte-level BPE.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        self.name = path.name.split(".")[0]
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise InvalidInput(f"{path}: not a valid GGUF file: {error}", file=path) from error
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise Unsupported(
                f"{path.name}: GGUF architecture {architecture!r} is not supported; "
                "expected 'llama'",
                field="general.architecture",
            )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._sources = self._hf_names()
        self.config = self._config()

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF lists dimensions from the fastest to the slowest.
        return tuple(int(dim) for dim in reversed(self._tensor(name).shape))

    def read(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensor(name)
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        array = np.ascontiguousarray(array, dtype=np.float32)
        if name.endswith("self_attn.q_proj.weight"):
            return _deinterleave(array, self.config["num_attention_heads"])
        if name.endswith("self_attn.k_proj.weight"):
            return _deinterleave(array, self.config["num_key_value_heads"])
        return array

    def tokenizer_files(self) -> dict[str, bytes]:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        if self._field("tokenizer.ggml.model") != "gpt2":
            raise Unsupported(
                f"{self.path.name}: tokenizer {self._field('tokenizer.ggml.model')!r} is not "
                "supported; expected 'gpt2' (byte-level BPE)",
                field="tokenizer.ggml.model",
            )
        pre = self._field("tokenizer.ggml.pre")
        if pre not in ("smollm", "gpt-2"):
            raise Unsupported(
                f"{self.path.name}: pre-tokenizer {pre!r} is not supported; "
                "expected 'smollm' or 'gpt-2'",
                field="tokenizer.ggml.pre",
            )
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(pair.split(" ")) for pair in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(
            models.BPE({token: i for i, token in enumerate(tokens)}, merges, fuse_unk=False)
        )
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
            if pre == "smollm"
            else byte_level
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[self.config["bos_token_id"]],
            "eos_token": tokens[self.config["eos_token_id"]],
            "chat_template": self._field("tokenizer.chat_template", None),
        }
        return {
            "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
            "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        }

    def _tensor(self, name: str) -> Any:
        if name not in self._sources:
            raise NotFound(f"{self.path.name}: no tensor {name!r}", tensor=name)
        return self._tensors[self._sources[name]]

    def _field(self, name: str, *default: Any) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            if default:
                return default[0]
            raise InvalidInput(f"{self.path.name}: GGUF field {name!r} is missing", field=name)
        return field.contents()

    def _config(self) -> dict[str, Any]:
        heads = self._field("llama.attention.head_count")
        hidden = self._field("llama.embedding_length")
        if any(name.startswith("llama.rope.scaling") for name in self._reader.fields):
            raise Unsupported(
                f"{self.path.name}: rope scaling is not supported", field="llama.rope.scaling.type"
            )
        return {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv", heads),
            "head_dim": self._field("llama.attention.key_length", hidden // heads),
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "max_position_embeddings": self._field("llama.context_length"),
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": self._field("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_act": "silu",
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
        }

    def _hf_names(self) -> dict[str, str]:
        names = {hf: gguf for hf, gguf in _TOP.items() if gguf in self._tensors}
        for layer in range(self._field("llama.block_count")):
            for hf, gguf in _LAYER.items():
                if f"blk.{layer}.{gguf}" in self._tensors:
                    names[f"model.layers.{layer}.{hf}"] = f"blk.{layer}.{gguf}"
        stray = sorted(set(self._tensors) - set(names.values()))
        if stray:
            raise Unsupported(
                f"{self.path.name}: tensor {stray[0]!r} belongs to no part of a Llama model",
                tensor=stray[0],
            )
        return names


def _deinterleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's row order, which pairs row i with row i + D/2 of each head."""
    rows, columns = weight.shape
    head_dim = rows // num_heads
    paired = weight.reshape(num_heads, head_dim // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))
