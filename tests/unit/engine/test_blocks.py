"""KV blocks are never lost and never owned twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import Internal
from lorafleet.engine.blocks import BlockTable
from lorafleet.native.kv_cache import BLOCK_SIZE


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_any_history_of_takes_and_gives_conserves_blocks(history: list[tuple[bool, int]]) -> None:
    table = BlockTable(12)
    owned: list[list[int]] = []
    for take, number in history:
        if take and table.can_allocate(number):
            owned.append(table.allocate(number))
            assert len(owned[-1]) == number
        elif not take and owned:
            table.release(owned.pop(number % len(owned)))
        assert table.num_free == 12 - sum(map(len, owned))
        table.check(owned)


def test_the_check_finds_lost_and_doubly_owned_blocks() -> None:
    table = BlockTable(4)
    blocks = table.allocate(2)
    with pytest.raises(Internal):
        table.check([])
    with pytest.raises(Internal):
        table.check([blocks, blocks])
    table.check([blocks])


def test_allocating_more_than_is_free_is_a_bug() -> None:
    table = BlockTable(2)
    assert not table.can_allocate(3)
    with pytest.raises(Internal):
        table.allocate(3)


@given(st.integers(0, 10_000))
def test_needed_blocks_hold_the_tokens_and_no_block_is_idle(num_tokens: int) -> None:
    needed = BlockTable.needed(num_tokens)
    assert num_tokens <= needed * BLOCK_SIZE < num_tokens + BLOCK_SIZE
