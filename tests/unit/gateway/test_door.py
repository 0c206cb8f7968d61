"""The door counts who is inside and lets nobody in once closed."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.core.errors import Unavailable
from lorafleet.gateway.door import Door


async def test_a_closed_door_waits_for_those_inside() -> None:
    door = Door()
    leave = asyncio.Event()

    async def visit() -> None:
        with door.passing():
            await leave.wait()

    visits = [asyncio.create_task(visit()) for _ in range(3)]
    await asyncio.sleep(0)
    assert door.inside == 3
    door.close()
    with pytest.raises(Unavailable, match="stopping"), door.passing():
        pass
    assert not await door.wait_empty(0.01)
    leave.set()
    assert await door.wait_empty(5.0)
    await asyncio.gather(*visits)
    assert door.inside == 0


async def test_an_error_inside_leaves_nobody_behind() -> None:
    door = Door()
    with pytest.raises(KeyError), door.passing():
        raise KeyError
    assert await door.wait_empty(0.0)
