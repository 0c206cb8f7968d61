"""Values become messages, and what no message can carry is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import InvalidInput
from lorafleet.sdk import Delta, Finished, Sampling, Started, convert
from lorafleet.v1 import inference_pb2

UINT32 = st.integers(0, 2**32 - 1)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=UINT32,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32),
    top_k=UINT32,
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@given(SAMPLINGS)
def test_sampling_keeps_every_field(sampling: Sampling) -> None:
    message = convert.generate_request("x", "", sampling).sampling
    for name in ("max_tokens", "temperature", "top_p", "top_k", "ignore_eos"):
        assert getattr(message, name) == getattr(sampling, name)
    assert tuple(message.stop) == sampling.stop
    assert (message.seed if message.HasField("seed") else None) == sampling.seed


def test_defaults_are_the_protos_meaning() -> None:
    message = convert.generate_request("x", "", None).sampling
    assert (message.max_tokens, message.temperature, message.top_p) == (128, 0.0, 1.0)
    assert not message.HasField("seed")


def test_a_prompt_is_a_text_or_token_ids() -> None:
    assert convert.generate_request("", "", None).WhichOneof("prompt") == "text"
    empty = convert.generate_request([], "pirate", None)
    assert (empty.WhichOneof("prompt"), empty.adapter) == ("token_ids", "pirate")
    assert list(convert.generate_request((1, 2), "", None).token_ids.ids) == [1, 2]


@pytest.mark.parametrize("prompt", [[-1], [2**32], ["a"], [0.5], 7, None])
def test_other_prompts_are_refused(prompt) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert.generate_request(prompt, "", None)
    assert caught.value.facts["field"] == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", -1), ("top_k", 2**32), ("seed", -1), ("temperature", "hot"), ("stop", "x")],
)
def test_impossible_sampling_is_refused_by_field(name: str, value) -> None:
    with pytest.raises(InvalidInput) as caught:
        convert.generate_request("x", "", Sampling(**{name: value}))
    assert caught.value.facts["field"] == f"sampling.{name}"


@pytest.mark.parametrize("turns", [["hello"], [("user",)], [("user", 7)], 3])
def test_turns_that_are_no_pairs_are_refused(turns) -> None:
    for make in (
        lambda: convert.chat_request(turns, "", None),
        lambda: convert.tokenize_request(turns),
    ):
        with pytest.raises(InvalidInput) as caught:
            make()
        assert caught.value.facts["field"] == "messages"


def test_events_of_both_streams_are_decoded() -> None:
    for kind in (inference_pb2.GenerateResponse, inference_pb2.ChatResponse):
        started = kind(started=inference_pb2.Started(request_id="a", version="v", replica="r"))
        assert convert.event_from_proto(started) == Started(
            request_id="a", version="v", replica="r", resident=False, prompt_tokens=0
        )
        told = kind(delta=inference_pb2.Delta(token_ids=[1, 2], text="x"))
        assert convert.event_from_proto(told) == Delta(token_ids=(1, 2), text="x")
        ended = kind(
            finished=inference_pb2.Finished(
                reason=inference_pb2.FINISH_REASON_LENGTH, completion_tokens=2, decode_s=0.5
            )
        )
        assert convert.event_from_proto(ended) == Finished(
            reason="length", completion_tokens=2, queue_s=0.0, ttft_s=0.0, decode_s=0.5
        )
