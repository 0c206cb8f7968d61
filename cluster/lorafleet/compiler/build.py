"""From a model definition to a library: export, inject, lower, link.

It knows TVM and the zoo; it does not know directories or caches (`package` does).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.exporter import Exporter

from lorafleet.compiler.inject import inject, linears, with_twins
from lorafleet.compiler.probe import find_sites
from lorafleet.compiler.source import Checkpoint
from lorafleet.compiler.zoo import Family
from lorafleet.core.errors import Unsupported
from lorafleet.core.model import Site

TARGETS = ("llvm",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A traced model: its functions, its parameters in order, and its sites."""

    module: tvm.IRModule
    parameters: dict[str, tuple[int, ...]]
    sites: tuple[Site, ...]


def export(family: Family, checkpoint: Checkpoint, *, lora: bool, page_rows: int) -> Exported:
    """Trace the model, with LoRA twins if `lora`.

    Raises
    ------
    Unsupported
        A layer's weight mapping cannot be followed; see `probe`.
    """
    model: nn.Module = family.module()
    model.to("float32")
    sites: list[Site] = []
    spec = model.get_default_spec()
    if lora:
        shapes = {
            path: (int(layer.weight.shape[0]), int(layer.weight.shape[1]))
            for path, layer in linears(model).items()
        }
        source_shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        sites = [
            replace(site, has_bias=linears(model)[site.name].bias is not None)
            for site in find_sites(shapes, family.weight_map(), source_shapes.__getitem__)
        ]
        inject(model, sites)
        spec = with_twins(spec, sites, page_rows)
    module, parameters, _ = Exporter(debug=False).build(spec)
    return Exported(
        module=module,
        parameters={name: tuple(int(dim) for dim in param.shape) for name, param in parameters},
        sites=tuple(sites),
    )


def build_library(exported: Exported, metadata: dict[str, Any], target: str, path: Path) -> None:
    """Compile for `target` and write the shared library.

    `metadata` becomes the library's `_metadata()`, in MLC-LLM's form.

    Raises
    ------
    Unsupported
        The target is not one of `TARGETS`.
    """
    if target not in TARGETS:
        raise Unsupported(
            f"target {target!r} is not supported; expected one of {', '.join(TARGETS)}",
            field="target",
        )
    module = exported.module
    module["_metadata"] = _constant_function(json.dumps(metadata))
    with tvm.transform.PassContext(opt_level=3):
        executable = tvm.compile(module, target=tvm.target.Target(target))
    executable.export_library(str(path))


def _constant_function(text: str) -> relax.Function:
    builder = relax.BlockBuilder()
    with builder.function("_metadata", params=[]):
        builder.emit_func_output(tvm.ir.StringImm(text))
    return builder.finalize()["_metadata"]
