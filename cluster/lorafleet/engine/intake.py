"""From what a caller asks to a request that the engine can run; the last check of its input."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import BaseModel
from lorafleet.engine.request import Event, Mix, Prompt, Request, SamplingParams
from lorafleet.engine.text import TextCodec


class Intake:
    """Tokenizes prompts and bounds answers by the context.

    Parameters
    ----------
    base : BaseModel
        Its vocabulary and context window.
    codec : TextCodec
        Its tokenizer and chat template.
    max_tokens : int
        Tokens that one sequence may have, whatever the model's window.
    """

    def __init__(self, base: BaseModel, codec: TextCodec, max_tokens: int) -> None:
        self._codec = codec
        self._vocab_size = base.vocab_size
        self._context = min(base.context_window, max_tokens)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises
        ------
        InvalidInput
            It is empty, or has ids outside the vocabulary.
        """
        if prompt.messages is not None:
            ids = self._codec.encode(self._codec.chat(prompt.messages))
        elif prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        else:
            ids = self._codec.encode(prompt.text or "")
        if not ids:
            raise InvalidInput("prompt: expected at least one token", field="prompt")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidInput(
                f"prompt: token ids must be in [0, {self._vocab_size})", field="token_ids"
            )
        return ids

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        mix: Mix,
        emit: Callable[[Event], object],
    ) -> Request:
        """Make a request; its answer is cut to what the context has room for.

        Raises
        ------
        InvalidInput
            As `tokenize`, or the prompt leaves no room for an answer.
        """
        sampling = sampling or SamplingParams()
        ids = self.tokenize(prompt)
        room = self._context - len(ids)
        if room < 1:
            raise InvalidInput(
                f"prompt: {len(ids)} tokens do not fit into a context of {self._context} and "
                "leave room for an answer",
                field="prompt",
            )
        return Request(
            prompt_length=len(ids),
            tokens=ids,
            mix=mix,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            emit=emit,
            arrived_s=time.monotonic(),
        )
