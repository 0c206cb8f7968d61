"""The native operators inside `nn` modules: each emits one call into the native library."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op


class NativeLinear(nn.Linear):
    """y = x Wᵀ + b by `lorafleet.linear`; parameters are those of `nn.Linear`."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class Embedding(nn.Embedding):
    """Rows of the embedding table; ids beyond it take the last row instead of foreign memory."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return take(self.weight, x, axis=0)


class NativeRMSNorm(nn.RMSNorm):
    """Root mean square norm over the last axis by `lorafleet.rms_norm`."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        out = nn.Tensor.placeholder(x.shape, x.dtype)
        return op.extern("lorafleet.rms_norm", [x, self.weight, float(self.epsilon)], out)


class PagedKVCache(nn.Object):
    """The native paged KV cache as an argument of a compiled function.

    Its method has the name and meaning of `nn.llm.kv_cache.PagedKVCache`'s, so one model definition
    serves both.
    """

    def attention_with_fused_qkv(
        self, layer_id: int, qkv: nn.Tensor, num_qo_heads: int, sm_scale: float
    ) -> nn.Tensor:
        """Rotate, append and attend; (b, s, heads, d) to (b, s, num_qo_heads, d)."""
        b, s, _, d = qkv.shape
        out = nn.Tensor.placeholder((b, s, num_qo_heads, d), qkv.dtype)
        # op.extern takes tensors and scalars only; the cache is an opaque object.
        call = relax.call_dps_packed(
            "lorafleet.attention_with_fused_qkv",
            [
                self._expr,
                relax.prim_value(tirx.IntImm("int64", layer_id)),
                relax.prim_value(tirx.FloatImm("float64", sm_scale)),
                qkv._expr,
            ],
            out_ty=out._expr.ty,
        )
        return nn.op.wrap_nested(call, "attention")


def linear(x: nn.Tensor, weight: nn.Tensor) -> nn.Tensor:
    """X Wᵀ for a weight of shape (out, in)."""
    out = nn.Tensor.placeholder((*x.shape[:-1], weight.shape[0]), x.dtype)
    return op.extern("lorafleet.linear", [x, weight], out)


def silu_mul(gate_up: nn.Tensor) -> nn.Tensor:
    """SwiGLU's gate: silu of the first half of the last axis times the second half."""
    out = nn.Tensor.placeholder((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype)
    return op.extern("lorafleet.silu_mul", [gate_up], out)


def take(x: nn.Tensor, indices: nn.Tensor, axis: int) -> nn.Tensor:
    """Slices of x by 1-D indices, clipped to its bounds."""
    return op.wrap_nested(relax.op.take(x._expr, indices._expr, axis=axis, mode="clip"), "take")
