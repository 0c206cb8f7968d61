"""A task ends although it swallows a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.gateway.tasks import end


async def test_a_swallowed_cancellation_is_repeated() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 3


async def test_ending_what_has_ended_does_nothing() -> None:
    async def failing() -> None:
        raise ValueError("kept by the task")

    task = asyncio.create_task(failing())
    await asyncio.wait({task})
    await end(task)
    assert isinstance(task.exception(), ValueError)


async def test_being_cancelled_oneself_while_waiting_is_not_swallowed() -> None:
    async def deaf() -> None:
        for _ in range(5):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    inner = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    outer = asyncio.create_task(end(inner))
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    await end(inner)
