"""The definition of the LoRA operator: loops that read like the paper.

Dims: T tokens, K input features, N output features, NP pages of the pool, Q parts of the site,
P rank rows of a page, S segments, R page references.

References: Hu et al., "LoRA" (2021); Chen et al., "Punica" (2023) for segments; Sheng et al.,
"S-LoRA" (2023) for pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

AFFINE = -1
"""What `used` says of a page that holds a gain less one and a shift instead of rank rows."""


def lora_add(
    y: np.ndarray,
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    used: np.ndarray,
    segment_starts: np.ndarray,
    page_starts: np.ndarray,
    page_ids: np.ndarray,
    page_scales: np.ndarray,
    part_ends: Sequence[int],
) -> np.ndarray:
    """Add each segment's adapters to its rows of y, in place; return y.

        for each affine page p = page_ids[i] of s (used[p, q] is AFFINE), with the y of before:
            y[t, part q] += page_scales[i] * (b[p, 0, part q] * y[t, part q] + b[p, 1, part q])
        for each segment s, page reference i of s, part q, rank row j of page p = page_ids[i]:
            h = a[p, q, j] · x[t]                       for the tokens t of s
            y[t, part q] += page_scales[i] * h * b[p, j, part q]

    Parameters
    ----------
    y : (T, N) floating
    x : (T, K) floating
    a : (NP, Q, P, K)
        Rank rows of A, each part of the site its own.
    b : (NP, P, N)
        Rank rows of B transposed; a part owns its range of columns.
    used : (NP, Q) int32
        Live rank rows of a page for a part; the rest is not read. Or AFFINE.
    segment_starts, page_starts : (S + 1,) int32
        Tokens and page references of each segment, ascending from 0.
    page_ids : (R,) int32
    page_scales : (R,) float32
    part_ends : sequence of Q ints
        Where each part's columns end; the last is N.
    """
    for s in range(len(segment_starts) - 1):
        rows = slice(segment_starts[s], segment_starts[s + 1])
        before = y[rows].copy()
        for i in range(page_starts[s], page_starts[s + 1]):
            p = page_ids[i]
            begin = 0
            for q, end in enumerate(part_ends):
                r = used[p, q]
                if r == AFFINE:
                    gain, shift = b[p, :2, begin:end]
                    y[rows, begin:end] += page_scales[i] * (gain * before[:, begin:end] + shift)
                else:
                    h = x[rows] @ a[p, q, :r].T
                    y[rows, begin:end] += page_scales[i] * (h @ b[p, :r, begin:end])
                begin = end
    return y
