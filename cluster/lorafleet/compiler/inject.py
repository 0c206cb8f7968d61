"""Putting LoRA into a model: every eligible linear becomes a LoRA-carrying subclass of its class.

The model's files are not edited and parameters keep their names, so stock weights load. Outside a
LoRA scope a changed layer emits exactly what it emitted before; the stock functions therefore stay
stock. For each of them that runs the model a twin `<function>_lora` is added, which takes two more
arguments and traces the very same method inside a scope.
"""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec as nn_spec

from lorafleet.core.model import Site

EXCLUDED = ("lm_head", "*.lm_head")
"""Layers that are no sites by default: the head's rows are not the batch's token rows."""


@dataclass(frozen=True, slots=True)
class LoRAScope:
    """The traced adapter arguments: three tensors a site, and the batch's plan."""

    pool: Sequence[nn.Tensor]
    plan: Sequence[nn.Tensor]


_scope: contextvars.ContextVar[LoRAScope | None] = contextvars.ContextVar("lora", default=None)


@contextlib.contextmanager
def lora_scope(pool: Sequence[nn.Tensor], plan: Sequence[nn.Tensor]) -> Iterator[None]:
    """While active, LoRA-carrying layers add their adapters."""
    token = _scope.set(LoRAScope(pool, plan))
    try:
        yield
    finally:
        _scope.reset(token)


class LoRALinear:
    """y = W x + s·B(A x): a linear layer plus the adapters of the batch's plan.

    A mixin, put in front of the class of an existing layer by `inject`. Every token row takes the
    rank pages that the plan gives to its segment, with their scales (s, beyond what is folded into
    B); rows without pages are left untouched. The sum is added into W x in place: no full-width
    delta exists. Defined by `lorafleet_kernels.reference.lora_add`.

    References: Hu et al., "LoRA" (2021); Sheng et al., "S-LoRA" (2023); Chen et al., "Punica"
    (2023).
    """

    lora_site: int
    lora_part_ends: tuple[int, ...]

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = super().forward(x)  # type: ignore[misc]
        scope = _scope.get()
        if scope is None:
            return y
        pages = scope.pool[3 * self.lora_site : 3 * self.lora_site + 3]
        call = relax.op.call_inplace_packed(
            "lorafleet.lora_add",
            y._expr,
            x._expr,
            *(tensor._expr for tensor in (*pages, *scope.plan)),
            relax.ShapeExpr(self.lora_part_ends),
            inplace_indices=0,
            ty_args=y._expr.ty,
        )
        return nn.op.wrap_nested(call, "lora_add")


def modules(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules below `root` by path, in the order in which they were assigned."""
    children = enumerate(root) if isinstance(root, nn.ModuleList) else vars(root).items()
    for name, child in children:
        if isinstance(child, nn.Module):
            yield f"{prefix}{name}", child
            yield from modules(child, f"{prefix}{name}.")


def linears(
    model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = EXCLUDED
) -> dict[str, nn.Linear]:
    """Eligible linear layers by module path, in the model's order; patterns are globs on paths."""
    return {
        path: module
        for path, module in modules(model)
        if isinstance(module, nn.Linear)
        and any(fnmatch.fnmatchcase(path, pattern) for pattern in include)
        and not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)
    }


def inject(model: nn.Module, sites: Sequence[Site]) -> None:
    """Make the layers of `sites` carry LoRA; site i takes tensors 3i..3i+2 of the pool."""
    by_path = dict(modules(model))
    for index, site in enumerate(sites):
        layer = by_path[site.name]
        stock = type(layer)
        layer.__class__ = type(f"LoRA{stock.__name__}", (LoRALinear, stock), {})
        layer.lora_site = index
        layer.lora_part_ends = tuple(part.out_end for part in site.parts)


def with_twins(
    stock: nn_spec.ModuleSpec, sites: Sequence[Site], page_rows: int
) -> nn_spec.ModuleSpec:
    """Add `<function>_lora` after every function that runs the model over a KV cache.

    A twin's last two arguments are `lora_pool`, a tuple of (a, b, used) for each site, and
    `lora_plan`, the tuple (segment_starts, page_starts, page_ids, page_scales).
    """
    names, methods = list(stock.method_names), list(stock.method_specs)
    for name, method in zip(stock.method_names, stock.method_specs, strict=True):
        if "paged_kv_cache" not in method.arg_names:
            continue
        names.append(f"{name}_lora")
        methods.append(
            nn_spec.MethodSpec(
                method=_in_scope(method.method),
                arg_names=[*method.arg_names, "lora_pool", "lora_plan"],
                arg_specs=[*method.arg_specs, _pool_spec(sites, page_rows), _plan_spec()],
                param_mode=method.param_mode,
                effect_mode=method.effect_mode,
            )
        )
    return nn_spec.ModuleSpec(module=stock.module, method_names=names, method_specs=methods)


def _in_scope(method: Any) -> Any:
    def twin(*arguments: Any) -> Any:
        *stock_arguments, pool, plan = arguments
        with lora_scope(pool, plan):
            return method(*stock_arguments)

    return twin


def _pool_spec(sites: Sequence[Site], page_rows: int) -> nn_spec.Tuple:
    elements: list[nn_spec.Tensor] = []
    for site in sites:
        parts = len(site.parts)
        elements += [
            nn_spec.Tensor(["num_pages", parts, page_rows, site.in_features], "float32"),
            nn_spec.Tensor(["num_pages", page_rows, site.out_features], "float32"),
            nn_spec.Tensor(["num_pages", parts], "int32"),
        ]
    return nn_spec.Tuple("lora_pool", elements)


def _plan_spec() -> nn_spec.Tuple:
    return nn_spec.Tuple(
        "lora_plan",
        [
            nn_spec.Tensor(["num_segment_bounds"], "int32"),
            nn_spec.Tensor(["num_segment_bounds"], "int32"),
            nn_spec.Tensor(["num_page_refs"], "int32"),
            nn_spec.Tensor(["num_page_refs"], "float32"),
        ],
    )
