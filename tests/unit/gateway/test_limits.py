"""Quotas per minute: by one gateway at once, by several together, and without Redis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import Exhausted, Unavailable
from lorafleet.core.tenant import Quota
from lorafleet.gateway.limits import Meter
from lorafleet.registry.link import LinkOptions
from lorafleet.registry.store import RegistryStore
from lorafleet.registry.usage import Usage

QUOTAS = {
    "acme": Quota(requests_per_minute=10),
    "wordy": Quota(tokens_per_minute=100),
    "free": Quota(),
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000 * 60.0

    def __call__(self) -> float:
        return self.now_s


class Nobody:
    """A book that keeps nothing."""

    async def add(self, minute, more):
        raise Unavailable("away")


def admitted(meter: Meter, tenant: str, tries: int) -> int:
    count = 0
    for _ in range(tries):
        try:
            meter.admit(tenant)
            count += 1
        except Exhausted:
            pass
    return count


def meter(clock=None, book=None) -> Meter:
    return Meter(QUOTAS.__getitem__, book or Nobody(), clock or Clock())


def test_a_tenant_gets_its_quota_and_no_more():
    one = meter()
    assert admitted(one, "acme", 50) == 10
    assert admitted(one, "free", 50) == 50


def test_the_refusal_names_tenant_quota_and_wait():
    one = meter()
    admitted(one, "acme", 10)
    with pytest.raises(Exhausted, match="'acme' has used its 10 requests per minute") as raised:
        one.admit("acme")
    assert raised.value.facts["quota"] == "requests_per_minute"
    assert raised.value.facts["tenant"] == "acme"
    assert 0 < float(raised.value.facts["retry_after_s"]) <= 120


@given(
    used=st.integers(0, 12),
    second=st.floats(0, 59.9),
    more=st.integers(0, 12),
    next_s=st.floats(0, 59),
)
def test_whoever_waits_as_told_is_let_in_and_not_much_earlier(used, second, more, next_s):
    clock = Clock()
    one = meter(clock)
    clock.now_s += second
    admitted(one, "acme", used)
    clock.now_s += 60 - second + next_s
    admitted(one, "acme", more)
    try:
        one.admit("acme")
    except Exhausted as error:
        wait_s = float(error.facts["retry_after_s"])
        if wait_s > 2:
            clock.now_s += wait_s - 1.5
            assert admitted(one, "acme", 1) == 0
            clock.now_s += 1.5
        else:
            clock.now_s += wait_s
        clock.now_s += 0.2  # what is told is rounded
        one.admit("acme")


@given(gaps=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=60))
def test_no_minute_has_twice_the_quota(gaps):
    clock = Clock()
    one = meter(clock)
    times: list[float] = []
    for gap in gaps:
        clock.now_s += gap
        times += [clock.now_s] * admitted(one, "acme", 3)
    for start in times:
        assert sum(start <= at < start + 60 for at in times) < 20


def test_tokens_count_when_they_are_spent():
    clock = Clock()
    one = meter(clock)
    one.admit("wordy")
    one.spend("wordy", 99)
    one.admit("wordy")
    one.spend("wordy", 1)
    with pytest.raises(Exhausted, match="100 tokens per minute"):
        one.admit("wordy")
    clock.now_s += 90
    one.admit("wordy")


async def test_gateways_add_up_what_they_count(redis_url):
    store = RegistryStore(redis_url)
    clock = Clock()
    one, two = meter(clock, store.usage), meter(clock, store.usage)
    assert admitted(one, "acme", 6) == 6
    await one.share()
    assert admitted(two, "acme", 1) == 1
    await two.share()
    assert admitted(two, "acme", 50) == 3
    await two.share()
    await one.share()
    assert admitted(one, "acme", 50) == 0
    assert await store.usage.add(int(clock.now_s // 60), {"acme": Usage()}) == {
        "acme": Usage(requests=10)
    }
    await store.close()


async def test_without_redis_each_goes_by_its_own_count():
    store = RegistryStore("redis://127.0.0.1:1", options=LinkOptions(deadline_s=0.1))
    one = meter(book=store.usage)
    assert admitted(one, "acme", 4) == 4
    with pytest.raises(Unavailable):
        await one.share()
    assert admitted(one, "acme", 50) == 6
    await store.close()
