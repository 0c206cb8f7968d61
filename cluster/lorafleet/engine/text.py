"""From tokens to text: chat templates, incremental detokenizing, stop strings."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafleet.core.errors import InvalidInput, Unsupported

_REPLACEMENT = "\ufffd"


class TextCodec:
    """A model's tokenizer and chat template, read from its directory."""

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config_file = model_dir / "tokenizer_config.json"
        self._config: dict[str, Any] = (
            json.loads(config_file.read_text()) if config_file.is_file() else {}
        )
        jinja = model_dir / "chat_template.jinja"
        self._template = _template(
            jinja.read_text() if jinja.is_file() else self._config.get("chat_template")
        )

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in the text are recognised, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation up to where the assistant speaks, in a sandbox.

        Raises
        ------
        Unsupported
            The model has no chat template.
        InvalidInput
            The template refuses the messages.
        """
        if self._template is None:
            raise Unsupported("this base model has no chat template; use plain generation")
        if not messages:
            raise InvalidInput("messages: expected at least one", field="messages")
        try:
            return str(
                self._template.render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=True,
                    bos_token=self._token("bos_token"),
                    eos_token=self._token("eos_token"),
                )
            )
        except Exception as error:
            # Whatever a template trips over, it tripped over these messages.
            raise InvalidInput(
                f"messages: the chat template refused them: {error}", field="messages"
            ) from None

    def _token(self, name: str) -> str:
        token = self._config.get(name) or ""
        return str(token["content"]) if isinstance(token, dict) else str(token)


def _template(source: str | list[dict[str, str]] | None) -> Any:
    """Compile a template as transformers does, in a sandbox; of several, the one for plain chat."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if isinstance(source, list):
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not source:
        return None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InvalidInput(f"the model's chat template is broken: {error}") from None


class Detokenizer:
    """Text of a growing sequence, whole characters only, up to the first stop string.

    Tokens are decoded from a little before the newest, since a token's text may depend on its
    predecessor. Text that may yet become a stop string is held back.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._codec = codec
        self._stop = stop
        self._ids: list[int] = []
        self._prefix = 0  # decoding starts here
        self._read = 0  # text of tokens before here has been taken
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain."""
        self._ids.append(token)
        before = self._codec.decode(self._ids[self._prefix : self._read])
        after = self._codec.decode(self._ids[self._prefix :])
        if after.endswith(_REPLACEMENT) and len(self._ids) - self._read < 8:
            return ""  # inside a multi-byte character
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence."""
        if self.stopped:
            return ""
        before = self._codec.decode(self._ids[self._prefix : self._read])
        tail = self._codec.decode(self._ids[self._prefix :])[len(before) :]
        text = self._release(tail)  # the tail may hold a stop string too
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        places = [text.find(stop) for stop in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
