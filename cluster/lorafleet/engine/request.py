"""A request inside the engine, how its tokens are chosen, and the events it sends.

`Request` belongs to the step thread once submitted; everybody else sees events only.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lorafleet.core.errors import InvalidInput, LorafleetError

Mix = tuple[tuple[str, float], ...]
"""Adapter versions with scales; empty is the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.

    `temperature` 0 is greedy decoding. Every request draws from its own generator, so a `seed`
    gives the same tokens whatever else is in the batch.

    Raises
    ------
    InvalidInput
        A value is out of range; the field is named.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "in [0, 2]"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "in [0, 2**64)"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "non-empty strings"),
        )
        for name, holds, expected in checks:
            if not holds:
                value = getattr(self, name)
                raise InvalidInput(f"{name}: expected {expected}, got {value!r}", field=name)


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Sent before the first token; `resident` is whether all versions were in rank pages."""

    resident: bool
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens and their text, which may lag while a character is incomplete."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end; times in seconds as in `inference.proto`."""

    reason: FinishReason
    completion_tokens: int
    queue_s: float
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request cannot be served."""

    error: LorafleetError


Event = Started | Delta | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Exactly one of the three: text, token ids, or messages for the chat template.

    Raises
    ------
    InvalidInput
        None of them is given, or several are.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None

    def __post_init__(self) -> None:
        given = sum(part is not None for part in (self.text, self.token_ids, self.messages))
        if given != 1:
            raise InvalidInput(
                f"prompt: expected one of text, token_ids and messages, got {given}", field="prompt"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence.

    `tokens` are prompt and answer; the first `num_cached` have their keys and values in `blocks`.
    Only `cancelled` may be set by other threads. Events go through `send`, never through `emit`.
    """

    prompt_length: int
    tokens: list[int]
    mix: Mix
    sampling: SamplingParams
    emit: Callable[[Event], object]
    arrived_s: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    resident: bool = True
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    page_refs: tuple[tuple[int, float], ...] = ()
    admitted_s: float = math.nan
    first_token_s: float = math.nan

    def send(self, event: Event) -> None:
        """Give an event to the client; a client that cannot take it has gone away."""
        try:
            self.emit(event)
        except Exception:
            # The client's side of the stream must never be able to stop the step thread.
            self.cancelled.set()

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not cached yet."""
        return len(self.tokens) - self.num_cached

    @property
    def max_length(self) -> int:
        """The most tokens that it can come to have cached."""
        return self.prompt_length + self.sampling.max_tokens
