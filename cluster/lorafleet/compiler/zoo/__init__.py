"""Our own model definitions, by HuggingFace `model_type`.

A family says how to read its config, build its `nn.Module`, and make each compiled parameter from
the checkpoint's tensors.
"""

from __future__ import annotations

from typing import Any, Protocol

from lorafleet.compiler.weights import WeightMap
from lorafleet.core.errors import Unsupported
from lorafleet.core.model import KvLayout


class Family(Protocol):
    """One architecture at one size."""

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_window(self) -> int: ...

    def module(self) -> Any:
        """Build the `tvm.relax.frontend.nn` module."""
        ...

    def weight_map(self) -> WeightMap:
        """How parameters are made from the checkpoint."""
        ...

    def kv_layout(self) -> KvLayout:
        """What the KV cache needs."""
        ...


def family(config: dict[str, Any]) -> Family:
    """Find the definition for a HuggingFace config.

    Raises
    ------
    Unsupported
        There is none, or the config asks for what the definition does not honour.
    """
    from lorafleet.compiler.zoo.llama import LlamaFamily

    model_type = config.get("model_type")
    if model_type in ("llama", "mistral", "smollm2"):
        return LlamaFamily.from_config(config)
    raise Unsupported(
        f"model_type {model_type!r} is not supported; expected llama or mistral",
        field="model_type",
    )
