"""Events become one timed answer."""

from __future__ import annotations

import pytest

from lorafleet.core.errors import Internal
from lorafleet.sdk import Delta, Finished, Started
from lorafleet.sdk.collecting import Collector, collect, collect_async

START = Started(request_id="q", version="v", replica="r", resident=True, prompt_tokens=3)
END = Finished(reason="length", completion_tokens=3, queue_s=0.0, ttft_s=0.0, decode_s=0.0)


def test_texts_and_ids_are_joined() -> None:
    deltas = [
        Delta(token_ids=(1, 2), text="a"),
        Delta(token_ids=(), text=""),
        Delta(token_ids=(3,), text="b"),
    ]
    done = collect(iter([START, *deltas, END]))
    assert (done.text, done.token_ids, done.finish_reason) == ("ab", (1, 2, 3), "length")
    assert (done.version, done.replica, done.resident) == ("v", "r", True)
    assert done.tokens_per_s > 0
    assert done.to_dict()["token_ids"] == (1, 2, 3)


def test_an_answer_without_tokens_has_no_speed() -> None:
    done = collect(iter([START, END]))
    assert (done.text, done.tokens_per_s) == ("", 0.0)
    assert done.ttft_s >= 0


async def test_an_asyncio_stream_is_collected_alike() -> None:
    async def events():
        yield START
        yield Delta(token_ids=(1,), text="a")
        yield END

    assert (await collect_async(events())).text == "a"


@pytest.mark.parametrize("events", [[], [START], [END], [Delta(token_ids=(1,), text="a")]])
def test_a_stream_that_lacks_its_ends_is_an_error(events) -> None:
    collector = Collector()
    for event in events:
        collector.add(event)
    with pytest.raises(Internal, match="without its Started or Finished"):
        collector.completion()
