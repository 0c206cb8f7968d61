"""Running a compiled model: the one place where the engine meets TVM.

It loads a model directory and turns a step plan into logits. It knows nothing of requests' lives.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import BaseModel, Site
from lorafleet.engine.plan import StepPlan
from lorafleet.native import AdapterPool, PagedKVCache, load

_CPU = 1  # DLDeviceType


class Runner:
    """A compiled model with its weights, KV cache and rank pages. Used by one thread.

    Parameters
    ----------
    model_dir : Path
        A directory made by `lorafleet.compiler`.
    num_blocks : int
        KV blocks.
    num_pages : int
        Rank pages; ignored when the model was compiled without LoRA.
    """

    def __init__(self, model_dir: Path, num_blocks: int, num_pages: int) -> None:
        self.base = BaseModel.read(model_dir)
        tvm = _import_runtime()
        from tvm.runtime.vm import VirtualMachine

        load()
        library = tvm.runtime.load_module(str(model_dir / self.base.library))
        self._machine = VirtualMachine(library, tvm.cpu())
        self._params, names = self._load_weights(tvm, model_dir)
        self.weights = SiteWeights(self.base.sites, dict(zip(names, self._params, strict=True)))
        self.cache = PagedKVCache(self.base.kv, num_blocks)
        self.pool: AdapterPool | None = None
        self._pool_tensors: Any = None
        self._functions = {name: self._machine[name] for name in self._names()}
        if self.base.sites:
            self.pool = AdapterPool(self.base.sites, num_pages, self.base.page_rows)
            self._pool_tensors = self.pool.tensors()

    def step(self, plan: StepPlan) -> np.ndarray:
        """Run a step and return logits (L, V) float32, valid until the next step."""
        from tvm_ffi import from_dlpack

        self.cache.begin_forward(plan.query_starts, plan.context_lens, plan.block_table)
        embeds = np.from_dlpack(self._functions["embed"](from_dlpack(plan.tokens), self._params))
        arguments: list[Any]
        if plan.is_decode:
            name = "batch_decode"
            arguments = [from_dlpack(embeds[:, None, :]), self.cache.handle]
        else:
            name = "batch_prefill"
            # A step of unfinished prompts wants no logits; the function wants at least one row.
            positions = plan.logit_positions if plan.sampled else np.zeros(1, dtype=np.int32)
            arguments = [from_dlpack(embeds[None]), from_dlpack(positions), self.cache.handle]
        if plan.has_adapters:
            name += "_lora"
            adapters = (plan.segment_starts, plan.page_starts, plan.page_ids, plan.page_scales)
            arguments += [self._pool_tensors, [from_dlpack(array) for array in adapters]]
        logits = np.from_dlpack(self._functions[name](*arguments, self._params)[0])
        return logits.reshape(-1, self.base.vocab_size)[: len(plan.sampled)]

    def _names(self) -> list[str]:
        stock = ["embed", "batch_prefill", "batch_decode"]
        return stock + [f"{name}_lora" for name in stock[1:] if self.base.sites]

    def _load_weights(self, tvm: Any, model_dir: Path) -> tuple[Any, list[str]]:
        metadata = json.loads(self._machine["_metadata"]())
        names = [parameter["name"] for parameter in metadata["params"]]
        try:
            tvm.get_global_func("vm.builtin.tensor_cache.load")(str(model_dir), _CPU, 0)
        except Exception as error:
            raise InvalidInput(f"{model_dir}: the weights cannot be read: {error}") from error
        params = tvm.get_global_func("vm.builtin.param_array_from_cache_by_name")(names)
        tvm.get_global_func("vm.builtin.tensor_cache.clear")()
        return params, names


class SiteWeights:
    """The base's weights by site: those that the model computes with, not copies.

    Parameters
    ----------
    sites : sequence of Site
    parameters : mapping
        TVM tensors by parameter name.
    """

    def __init__(self, sites: Sequence[Site], parameters: Mapping[str, Any]) -> None:
        self._sites = sites
        self._parameters = parameters

    def weight(self, site: int) -> np.ndarray:
        """W, (out_features, in_features) float32."""
        return np.from_dlpack(self._parameters[f"{self._sites[site].name}.weight"])

    def bias(self, site: int) -> np.ndarray | None:
        """b, (out_features,) float32, if the layer has one."""
        name = f"{self._sites[site].name}.bias"
        return np.from_dlpack(self._parameters[name]) if name in self._parameters else None


def _import_runtime() -> Any:
    """TVM; only its runtime, which starts in half the time, unless the compiler is here already."""
    if "tvm" not in sys.modules:
        os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    import tvm

    return tvm
