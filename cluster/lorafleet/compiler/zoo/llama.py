"""The Llama family: Llama, Mistral without a sliding window, SmolLM2.

Function names, parameter names and the fused layers are those of MLC-LLM, so its tools read the
result. Attention, norms and linears are native operators; the rest is Relax.

References: Touvron et al., "LLaMA" (2023); Shazeer, "GLU Variants" (2020); Su et al., "RoFormer"
(2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from lorafleet.compiler.ops import (
    Embedding,
    NativeLinear,
    NativeRMSNorm,
    PagedKVCache,
    linear,
    silu_mul,
    take,
)
from lorafleet.compiler.weights import WeightMap
from lorafleet.core.errors import InvalidInput, Unsupported
from lorafleet.core.model import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFamily:
    """A Llama model's sizes; see `zoo.Family`."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_window: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LlamaFamily:
        """Read a HuggingFace config; Unsupported names what would change the numbers."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        refusals = {
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
            "sliding_window": bool(config.get("sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
        }
        for field, refused in refusals.items():
            if refused:
                raise Unsupported(
                    f"config.json: {field} = {config.get(field, rope)!r} is not supported",
                    file="config.json",
                    field=field,
                )
        try:
            heads = config["num_attention_heads"]
            return cls(
                model_type=config["model_type"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab_size=config["vocab_size"],
                context_window=config["max_position_embeddings"],
                rms_norm_eps=config["rms_norm_eps"],
                rope_theta=config.get("rope_theta", 10000.0),
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError as missing:
            raise InvalidInput(
                f"config.json: {missing} is missing", file="config.json", field=missing.args[0]
            ) from None

    def module(self) -> LlamaForCausalLM:
        return LlamaForCausalLM(self)

    def kv_layout(self) -> KvLayout:
        # In float32 from the first operation on, as transformers computes it.
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        inv_freq = np.float32(1.0) / np.power(np.float32(self.rope_theta), exponent)
        return KvLayout(
            num_layers=self.num_layers,
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_inv_freq=tuple(float(value) for value in inv_freq),
        )

    def weight_map(self) -> WeightMap:
        weights = WeightMap()
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            weights.add(name, name)
        if not self.tied:
            weights.add("lm_head.weight", "lm_head.weight")
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            for part in (
                "self_attn.o_proj",
                "mlp.down_proj",
                "input_layernorm",
                "post_attention_layernorm",
            ):
                weights.add(f"{layer}.{part}.weight", f"{layer}.{part}.weight")
            weights.add(
                f"{layer}.self_attn.qkv_proj.weight",
                *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"),
            )
            weights.add(
                f"{layer}.mlp.gate_up_proj.weight",
                *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")),
            )
        return weights


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged KV cache, q, k and v from one linear."""

    def __init__(self, size: LlamaFamily) -> None:
        self.size = size
        heads = size.num_heads + 2 * size.num_kv_heads
        self.qkv_proj = NativeLinear(size.hidden_size, heads * size.head_dim, bias=False)
        self.o_proj = NativeLinear(size.num_heads * size.head_dim, size.hidden_size, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        size = self.size
        b, s, _ = x.shape
        heads = size.num_heads + 2 * size.num_kv_heads
        qkv = op.reshape(self.qkv_proj(x), (b, s, heads, size.head_dim))
        out = cache.attention_with_fused_qkv(layer, qkv, size.num_heads, size.head_dim**-0.5)
        return self.o_proj(op.reshape(out, (b, s, size.num_heads * size.head_dim)))


class LlamaMLP(nn.Module):
    """SwiGLU, gate and up from one linear."""

    def __init__(self, size: LlamaFamily) -> None:
        self.gate_up_proj = NativeLinear(size.hidden_size, 2 * size.intermediate_size, bias=False)
        self.down_proj = NativeLinear(size.intermediate_size, size.hidden_size, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, size: LlamaFamily) -> None:
        self.self_attn = LlamaAttention(size)
        self.mlp = LlamaMLP(size)
        self.input_layernorm = NativeRMSNorm(size.hidden_size, -1, size.rms_norm_eps, bias=False)
        self.post_attention_layernorm = NativeRMSNorm(
            size.hidden_size, -1, size.rms_norm_eps, bias=False
        )

    def forward(self, x: nn.Tensor, cache: PagedKVCache, layer: int) -> nn.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """The stack of layers between embedding and head."""

    def __init__(self, size: LlamaFamily) -> None:
        self.embed_tokens = Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList([LlamaLayer(size) for _ in range(size.num_layers)])
        self.norm = NativeRMSNorm(size.hidden_size, -1, size.rms_norm_eps, bias=False)

    def forward(self, x: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, cache, i)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """The functions of a compiled model. T tokens, S sequences, D hidden size, V vocabulary."""

    def __init__(self, size: LlamaFamily) -> None:
        self.size = size
        self.model = LlamaModel(size)
        if not size.tied:
            self.lm_head = NativeLinear(size.hidden_size, size.vocab_size, bias=False)
        self.dtype = "float32"

    def embed(self, input_ids: nn.Tensor) -> nn.Tensor:
        """(T,) token ids to (T, D)."""
        return self.model.embed_tokens(input_ids)

    def batch_prefill(
        self, input_embeds: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: PagedKVCache
    ) -> tuple[nn.Tensor, PagedKVCache]:
        """(1, T, D) ragged rows to the logits (1, S, V) at `logit_positions`."""
        hidden = self.model(input_embeds, paged_kv_cache)
        return self._logits(take(hidden, logit_positions, axis=1)), paged_kv_cache

    def batch_decode(
        self, input_embeds: nn.Tensor, paged_kv_cache: PagedKVCache
    ) -> tuple[nn.Tensor, PagedKVCache]:
        """(S, 1, D), one token a sequence, to (S, 1, V)."""
        return self._logits(self.model(input_embeds, paged_kv_cache)), paged_kv_cache

    def batch_verify(
        self, input_embeds: nn.Tensor, paged_kv_cache: PagedKVCache
    ) -> tuple[nn.Tensor, PagedKVCache]:
        """(1, T, D) ragged rows to the logits (1, T, V) of every row."""
        return self._logits(self.model(input_embeds, paged_kv_cache)), paged_kv_cache

    def _logits(self, hidden: nn.Tensor) -> nn.Tensor:
        if self.size.tied:
            return linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)

    def get_default_spec(self) -> nn.spec.ModuleSpec:
        """The functions to export, with symbolic sizes."""
        d = self.size.hidden_size
        packed = {"param_mode": "packed", "effect_mode": "none"}
        cache = nn.spec.Object(object_type=PagedKVCache)
        return nn.spec.ModuleSpec.from_raw(
            {
                "embed": {"input_ids": nn.spec.Tensor(["seq_len"], "int32"), "$": packed},
                "batch_prefill": {
                    "input_embeds": nn.spec.Tensor([1, "seq_len", d], self.dtype),
                    "logit_positions": nn.spec.Tensor(["batch_size"], "int32"),
                    "paged_kv_cache": cache,
                    "$": packed,
                },
                "batch_decode": {
                    "input_embeds": nn.spec.Tensor(["batch_size", 1, d], self.dtype),
                    "paged_kv_cache": cache,
                    "$": packed,
                },
                "batch_verify": {
                    "input_embeds": nn.spec.Tensor([1, "seq_len", d], self.dtype),
                    "paged_kv_cache": cache,
                    "$": packed,
                },
            },
            self,
        )
