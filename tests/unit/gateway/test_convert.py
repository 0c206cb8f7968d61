"""Messages keep every field on their way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.gateway import convert
from lorafleet.routing import ReplicaState, Report
from lorafleet.v1 import inference_pb2

COUNT = st.integers(0, 2**32 - 1)
VERSIONS = st.frozensets(st.text(max_size=5), max_size=4)
REPORTS = st.builds(
    Report,
    replica=st.text(max_size=5),
    epoch=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    resident=VERSIONS,
    loading=VERSIONS,
    free_pages=COUNT,
    num_pages=COUNT,
    running=COUNT,
    waiting=COUNT,
    draining=st.booleans(),
)
SAMPLING = inference_pb2.SamplingParams(max_tokens=3, temperature=0.5, seed=0, stop=["x"])


@given(REPORTS)
def test_a_report_survives_the_round_trip(report: Report) -> None:
    assert convert.report_from_proto(convert.report_to_proto(report)) == report


@given(REPORTS)
def test_a_replicas_state_shows_its_report(report: Report) -> None:
    state = ReplicaState(id="a", address="a:1", epoch=1, report=report, connected=True)
    message = convert.state_to_proto(state)
    assert (message.address, message.connected) == ("a:1", True)
    assert convert.report_from_proto(message.report) == report
    assert not convert.state_to_proto(ReplicaState(id="a", address="a:1", epoch=1)).HasField(
        "report"
    )


def test_a_generate_request_keeps_prompt_and_sampling() -> None:
    text = convert.from_generate(inference_pb2.GenerateRequest(text="hi", sampling=SAMPLING))
    assert (text.text, text.sampling) == ("hi", SAMPLING)
    ids = inference_pb2.TokenIds(ids=[1, 2])
    inner = convert.from_generate(inference_pb2.GenerateRequest(token_ids=ids))
    assert inner.WhichOneof("prompt") == "token_ids"
    assert inner.token_ids == ids


def test_a_chat_keeps_its_messages_and_events() -> None:
    messages = [inference_pb2.Message(role="user", content="hi")]
    inner = convert.from_chat(inference_pb2.ChatRequest(messages=messages, sampling=SAMPLING))
    assert list(inner.conversation.messages) == messages
    assert inner.sampling == SAMPLING
    for event in (
        inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r")),
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[1], text="a")),
        inference_pb2.GenerateResponse(finished=inference_pb2.Finished(completion_tokens=2)),
    ):
        assert convert.to_chat(event).SerializeToString() == event.SerializeToString()
