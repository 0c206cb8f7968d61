"""The edge's checks: what a request must look like before anything is done for it.

It owns the allowed ranges and says which field broke them. It knows the base model's vocabulary and
context window, not adapters: a name is checked where it is resolved. A request that passes here
reaches no internal check further in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import BaseModel
from lorafleet.v1 import inference_pb2

ROLES = ("system", "user", "assistant")

MAX_TEMPERATURE = 2.0
MAX_STOPS = 16
MAX_STICKY_KEY_BYTES = 256


def check_generate(request: inference_pb2.GenerateRequest, base: BaseModel) -> None:
    """Check a Generate request; InvalidInput names the field."""
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidInput("text is empty: expected at least one character", field="text")
        case "token_ids":
            _check_token_ids(request.token_ids.ids, base)
        case _:
            raise InvalidInput("prompt is not set: give text or token_ids", field="prompt")
    _check_sticky_key(request.sticky_key)
    check_sampling(request.sampling, base)


def check_chat(request: inference_pb2.ChatRequest, base: BaseModel) -> None:
    """Check a Chat request; InvalidInput names the field."""
    if not request.messages:
        raise InvalidInput("messages is empty: expected at least one", field="messages")
    _check_roles(request.messages)
    _check_sticky_key(request.sticky_key)
    check_sampling(request.sampling, base)


def check_tokenize(request: inference_pb2.TokenizeRequest) -> None:
    """Check a Tokenize request; InvalidInput names the field."""
    _check_roles(request.messages)


def check_sampling(sampling: inference_pb2.SamplingParams, base: BaseModel) -> None:
    """Check sampling parameters; InvalidInput names the field."""
    if sampling.max_tokens > base.context_window:
        raise InvalidInput(
            f"max_tokens {sampling.max_tokens} is more than the model's context window of "
            f"{base.context_window} tokens",
            field="sampling.max_tokens",
        )
    _check_range("temperature", sampling.temperature, MAX_TEMPERATURE, "0 is greedy")
    _check_range("top_p", sampling.top_p, 1.0, "0 means 1")
    if len(sampling.stop) > MAX_STOPS:
        raise InvalidInput(
            f"stop has {len(sampling.stop)} strings: at most {MAX_STOPS} are allowed",
            field="sampling.stop",
        )
    for index, text in enumerate(sampling.stop):
        if not text:
            raise InvalidInput(f"stop[{index}] is empty", field=f"sampling.stop[{index}]")


def _check_sticky_key(key: str) -> None:
    length = len(key.encode())
    if length > MAX_STICKY_KEY_BYTES:
        raise InvalidInput(
            f"sticky_key has {length} bytes: at most {MAX_STICKY_KEY_BYTES} are allowed",
            field="sticky_key",
        )


def _check_range(name: str, value: float, most: float, zero: str) -> None:
    if not (math.isfinite(value) and 0.0 <= value <= most):
        raise InvalidInput(
            f"{name} {value:g} is out of range: expected 0 to {most:g} ({zero})",
            field=f"sampling.{name}",
        )


def _check_token_ids(ids: Sequence[int], base: BaseModel) -> None:
    if not ids:
        raise InvalidInput("token_ids is empty: expected at least one id", field="token_ids.ids")
    # The answer needs room for one token.
    if len(ids) >= base.context_window:
        raise InvalidInput(
            f"token_ids has {len(ids)} ids: at most {base.context_window - 1} leave room for an "
            f"answer in the model's context window of {base.context_window}",
            field="token_ids.ids",
        )
    largest = max(ids)
    if largest >= base.vocab_size:
        raise InvalidInput(
            f"token id {largest} at {list(ids).index(largest)} is not in the vocabulary of "
            f"{base.vocab_size}",
            field="token_ids.ids",
        )


def _check_roles(messages: Sequence[inference_pb2.Message]) -> None:
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidInput(
                f"messages[{index}].role {message.role!r} is not known: expected one of "
                f"{', '.join(ROLES)}",
                field=f"messages[{index}].role",
            )
