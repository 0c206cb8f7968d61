"""Wrong input is refused at the edge, by the name of its field."""

from __future__ import annotations

import pytest

from gateway_support import BASE
from lorafleet.core.errors import InvalidInput
from lorafleet.gateway.validate import (
    check_chat,
    check_generate,
    check_sampling,
    check_tokenize,
)
from lorafleet.v1.inference_pb2 import (
    ChatRequest,
    GenerateRequest,
    Message,
    SamplingParams,
    TokenIds,
    TokenizeRequest,
)


def test_all_defaults_are_allowed() -> None:
    check_sampling(SamplingParams(), BASE)


@pytest.mark.parametrize(
    "allowed",
    [
        {"temperature": 2.0, "top_p": 1.0, "top_k": 4_000_000_000, "seed": 0},
        {"max_tokens": 128, "stop": ["a"] * 16, "ignore_eos": True},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(allowed: dict) -> None:
    check_sampling(SamplingParams(**allowed), BASE)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": 2.1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": float("inf")}, "sampling.temperature"),
        ({"top_p": -1.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": float("nan")}, "sampling.top_p"),
        ({"max_tokens": 129}, "sampling.max_tokens"),
        ({"stop": ["ok", ""]}, "sampling.stop[1]"),
        ({"stop": ["a"] * 17}, "sampling.stop"),
    ],
)
def test_sampling_out_of_range_is_named(wrong: dict, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_sampling(SamplingParams(**wrong), BASE)
    assert caught.value.facts["field"] == field
    with pytest.raises(InvalidInput):
        check_generate(GenerateRequest(text="x", sampling=SamplingParams(**wrong)), BASE)
    messages = [Message(role="user", content="x")]
    with pytest.raises(InvalidInput):
        check_chat(ChatRequest(messages=messages, sampling=SamplingParams(**wrong)), BASE)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(), "prompt"),
        (GenerateRequest(text=""), "text"),
        (GenerateRequest(token_ids=TokenIds()), "token_ids.ids"),
        (GenerateRequest(token_ids=TokenIds(ids=[1, 256])), "token_ids.ids"),
        (GenerateRequest(token_ids=TokenIds(ids=[1] * 128)), "token_ids.ids"),
    ],
)
def test_a_prompt_that_is_none_is_named(request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_generate(request_, BASE)
    assert caught.value.facts["field"] == field


def test_a_full_prompt_is_allowed() -> None:
    check_generate(GenerateRequest(token_ids=TokenIds(ids=[0, 255] * 63)), BASE)


@pytest.mark.parametrize("role", ["", "User", "tool", "system "])
def test_an_unknown_role_is_named_with_its_place(role: str) -> None:
    messages = [Message(role="user", content="x"), Message(role=role, content="x")]
    for check in (
        lambda: check_chat(ChatRequest(messages=messages), BASE),
        lambda: check_tokenize(TokenizeRequest(messages=messages)),
    ):
        with pytest.raises(InvalidInput) as caught:
            check()
        assert caught.value.facts["field"] == "messages[1].role"


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_chat(ChatRequest(), BASE)
    assert caught.value.facts["field"] == "messages"


def test_known_roles_are_allowed() -> None:
    messages = [Message(role=role, content="") for role in ("system", "user", "assistant")]
    check_chat(ChatRequest(messages=messages), BASE)
    check_tokenize(TokenizeRequest())
