"""The LoRA operator in TVMScript: shrink into rank rows, expand into y in place.

One PrimFunc for one site's sizes; tokens, pages, segments and references are symbolic. A token
finds its segment by a table made beforehand (`plan_segments`), so every token is independent: the
form that a GPU kernel keeps. Only the rank rows in use are computed, and no full-width delta
exists: the expand adds into y element by element, pages and rank rows in order.

References: Chen et al., "Punica" (2023), BGMV.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """The sizes of one site: K in_features, N out_features, P page_rows, part ends."""

    in_features: int
    part_ends: tuple[int, ...]
    page_rows: int

    @property
    def out_features(self) -> int:
        """N."""
        return self.part_ends[-1]

    @property
    def num_parts(self) -> int:
        """Q."""
        return len(self.part_ends)


def plan_segments(segment_starts: np.ndarray) -> np.ndarray:
    """The segment of each token, (T,) int32, from (S + 1,) bounds."""
    lengths = np.diff(segment_starts)
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def column_parts(shape: PoolShape) -> np.ndarray:
    """The part of each output column, (N,) int32."""
    widths = np.diff((0, *shape.part_ends))
    return np.repeat(np.arange(shape.num_parts, dtype=np.int32), widths)


@functools.cache
def lora_add(shape: PoolShape) -> Any:
    """The operator as a PrimFunc; cached by shape, since parsing one takes a while.

    Its arguments are y (T, N), x (T, K), a (NP, Q, P, K), b (NP, P, N), used (NP, Q),
    token_segments (T,), page_starts (S + 1,), page_ids (R,), page_scales (R,), column_parts (N,):
    float32 and int32 as in `reference.lora_add`, from which it differs by rounding alone.
    """
    from tvm.script import tirx as T

    num_k, num_n = shape.in_features, shape.out_features
    num_q, num_p = shape.num_parts, shape.page_rows

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def lora_add(  # type: ignore[no-untyped-def]
        y_handle: T.handle,
        x_handle: T.handle,
        a_handle: T.handle,
        b_handle: T.handle,
        used_handle: T.handle,
        segments_handle: T.handle,
        starts_handle: T.handle,
        ids_handle: T.handle,
        scales_handle: T.handle,
        columns_handle: T.handle,
    ):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "lora_add"})
        tokens = T.int64()
        pages = T.int64()
        bounds = T.int64()
        refs = T.int64()
        y = T.match_buffer(y_handle, (tokens, num_n), "float32")
        x = T.match_buffer(x_handle, (tokens, num_k), "float32")
        a = T.match_buffer(a_handle, (pages, num_q, num_p, num_k), "float32")
        b = T.match_buffer(b_handle, (pages, num_p, num_n), "float32")
        used = T.match_buffer(used_handle, (pages, num_q), "int32")
        segments = T.match_buffer(segments_handle, (tokens,), "int32")
        starts = T.match_buffer(starts_handle, (bounds,), "int32")
        ids = T.match_buffer(ids_handle, (refs,), "int32")
        scales = T.match_buffer(scales_handle, (refs,), "float32")
        columns = T.match_buffer(columns_handle, (num_n,), "int32")
        for t in T.parallel(tokens):
            with T.sblock("token"):
                T.reads()
                T.writes()
                h = T.sblock_alloc_buffer((num_q, num_p), "float32", scope="local")
                segment: T.int32 = segments[t]
                for c in T.serial(num_n):
                    h[0, 0] = y[t, c]
                    for i in T.serial(starts[segment + 1] - starts[segment]):
                        if used[ids[starts[segment] + i], columns[c]] < 0:
                            y[t, c] = y[t, c] + scales[starts[segment] + i] * (
                                b[ids[starts[segment] + i], 0, c] * h[0, 0]
                                + b[ids[starts[segment] + i], 1, c]
                            )
                for i in T.serial(starts[segment + 1] - starts[segment]):
                    page: T.int32 = ids[starts[segment] + i]
                    scale: T.float32 = scales[starts[segment] + i]
                    for q in T.serial(num_q):
                        for j in T.serial(used[page, q]):
                            h[q, j] = T.float32(0)
                            for k in T.serial(num_k):
                                h[q, j] = h[q, j] + x[t, k] * a[page, q, j, k]
                            h[q, j] = h[q, j] * scale
                    for c in T.serial(num_n):
                        for j in T.serial(used[page, columns[c]]):
                            y[t, c] = y[t, c] + h[columns[c], j] * b[page, j, c]

    return lora_add
