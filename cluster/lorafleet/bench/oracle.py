"""PEFT and PyTorch in float32: the independent oracle of every number.

It reads the same GGUF file and the same adapter directories as lorafleet, through transformers'
and peft's own code, and shares none of ours. Needs the `oracle` dependency group.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.bench.figure import NotMeasured


class PeftOracle:
    """A transformers model with any number of PEFT adapters beside it.

    Parameters
    ----------
    gguf : Path
        The base model's GGUF file; dequantised to float32 by transformers.
    adapters : mapping of str to Path
        PEFT directories by the names used below.

    Raises
    ------
    NotMeasured
        torch, transformers or peft is not installed.
    """

    def __init__(self, gguf: Path, adapters: dict[str, Path]) -> None:
        for package in ("torch", "transformers", "peft"):
            if importlib.util.find_spec(package) is None:
                raise NotMeasured(f"the oracle needs {package}; `make test` installs it")
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._torch = torch
        self._base: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()
        self._model: Any = self._base
        for name, directory in adapters.items():
            if self._model is self._base:
                self._model = PeftModel.from_pretrained(self._base, directory, adapter_name=name)
            else:
                self._model.load_adapter(directory, adapter_name=name)
        self._adapted = self._model is not self._base
        self._model.eval()

    def first_logits(self, token_ids: Sequence[int], adapter: str | None) -> np.ndarray:
        """Logits (V,) float32 of the token that follows the prompt; None is the base model."""
        with self._torch.inference_mode():
            out = self._forward(self._torch.tensor([list(token_ids)]), adapter)
        logits: np.ndarray = out.logits[0, -1].numpy()
        return logits

    def greedy(self, token_ids: Sequence[int], adapter: str | None, num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens by argmax, the end-of-sequence token not special."""
        torch = self._torch
        tokens: list[int] = []
        step, cache = torch.tensor([list(token_ids)]), None
        with torch.inference_mode():
            for _ in range(num_tokens):
                out = self._forward(step, adapter, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                tokens.append(int(out.logits[0, -1].argmax()))
                step = torch.tensor([[tokens[-1]]])
        return tokens

    def _forward(self, ids: Any, adapter: str | None, **options: Any) -> Any:
        if adapter is not None:
            self._model.set_adapter(adapter)
            return self._model(ids, **options)
        if not self._adapted:
            return self._base(ids, **options)
        with self._model.disable_adapter():
            return self._model(ids, **options)
