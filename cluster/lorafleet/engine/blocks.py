"""KV blocks: who owns which. The blocks' memory is the native cache's."""

from __future__ import annotations

from lorafleet.core.errors import Internal
from lorafleet.native.kv_cache import BLOCK_SIZE


class BlockTable:
    """The free list of KV blocks. Used by the step thread alone."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @staticmethod
    def needed(num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // BLOCK_SIZE)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate` would succeed."""
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks; ask `can_allocate` first."""
        if not self.can_allocate(num_blocks):
            raise Internal(f"{num_blocks} KV blocks asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        """Give blocks back."""
        self._free.extend(reversed(blocks))

    def check(self, owned: list[list[int]]) -> None:
        """Prove that free and owned blocks are all blocks, each once; Internal if not."""
        every = sorted([*self._free, *(block for blocks in owned for block in blocks)])
        if every != list(range(self.num_blocks)):
            raise Internal("KV blocks were lost or are owned twice")
