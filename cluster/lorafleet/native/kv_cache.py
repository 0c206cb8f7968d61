"""The paged KV cache of the native library.

It stores keys and values and attends over them; which sequence owns which block is the engine's
business (`engine.blocks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lorafleet.core.model import KvLayout
from lorafleet.native.library import as_tensor, functions

BLOCK_SIZE = 16
"""Tokens of a block; fixed by the layout of the keys."""


class PagedKVCache:
    """Keys and values of every layer in `num_blocks` blocks of 16 tokens, float32.

    Memory is reserved at once and taken as blocks are first written.

    Parameters
    ----------
    layout : KvLayout
        The model's heads and rotary frequencies.
    num_blocks : int
        Blocks of the cache, at least 1.

    Raises
    ------
    InvalidInput
        head_dim is not a multiple of 8, or heads do not divide.
    Exhausted
        The memory cannot be reserved.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self._functions = functions()
        self.num_blocks = num_blocks
        self.handle: Any = self._functions.kv_cache_create(
            layout.num_layers,
            num_blocks,
            BLOCK_SIZE,
            layout.num_qo_heads,
            layout.num_kv_heads,
            layout.head_dim,
            as_tensor(np.asarray(layout.rope_inv_freq, dtype=np.float32)),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return int(self._functions.kv_cache_bytes(self.handle))

    def begin_forward(
        self, query_starts: np.ndarray, context_lens: np.ndarray, block_table: np.ndarray
    ) -> None:
        """Set the step's S sequences.

        Parameters
        ----------
        query_starts : (S + 1,) int32
            Bounds of each sequence's rows, ascending from 0.
        context_lens : (S,) int32
            Tokens cached before the step.
        block_table : (S, M) int32
            Block ids of each sequence, enough for context and query; the rest is ignored.

        Raises
        ------
        InvalidInput
            The arrays do not fit each other or name a block that does not exist.
        """
        self._functions.kv_cache_begin_forward(
            self.handle, as_tensor(query_starts), as_tensor(context_lens), as_tensor(block_table)
        )
