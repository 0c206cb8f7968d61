"""A push's messages, with the reason when making them fails.

gRPC takes the messages in a thread of its own and tells only that iterating them failed; here the
failure itself is kept for the caller. Files are hashed once, however often a push is tried: small
ones while they are sent, large ones before, so that the registry can say what it holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lorafleet.core.errors import InvalidAdapter
from lorafleet.v1 import registry_pb2

Progress = Callable[[int, int], None]

TRIES = 3
"""How often a push that broke off is taken up again."""

_HASH_FIRST_BYTES = 256 << 20
"""From here on hashing costs less than sending again what a push that broke off had sent."""


class Push:
    """A directory to be pushed.

    Raises
    ------
    InvalidInput, InvalidAdapter, Unsupported
        As `registry.push.push_messages`.
    """

    def __init__(
        self, directory: Path | str, name: str, progress: Progress | None, **options: Any
    ) -> None:
        # Half a second of imports that only a push needs.
        from lorafleet.registry.push import push_header

        self._directory = Path(directory)
        self._header = push_header(self._directory, name, hashed=False, **options)
        self._progress = progress
        self.begun = False

    def plan(self) -> registry_pb2.PlanPushRequest | None:
        """The question what is held already, unless it is quicker to send everything."""
        small = sum(entry.size_bytes for entry in self._header.files) < _HASH_FIRST_BYTES
        if small and not self.begun:
            return None
        if not self._header.files[0].sha256:
            self._hash()
        return registry_pb2.PlanPushRequest(name=self._header.name, files=self._header.files)

    def _hash(self) -> None:
        from lorafleet.registry.push import push_header

        files = push_header(self._directory, self._header.name).files
        del self._header.files[:]
        self._header.files.extend(files)

    def upload(self, held_bytes: Sequence[int] = ()) -> Upload:
        """The messages, after what is held."""
        from lorafleet.registry.push import header_messages

        self._header.ClearField("held_bytes")
        self._header.held_bytes.extend(held_bytes)
        return Upload(header_messages(self._directory, self._header, self._told))

    def _told(self, sent_bytes: int, total_bytes: int) -> None:
        self.begun = self.begun or sent_bytes > 0
        if self._progress is not None:
            self._progress(sent_bytes, total_bytes)


class Upload:
    """An iterator over the messages of one push.

    As a context it replaces the call's error by the iterator's own, where there is one.
    """

    def __init__(self, messages: Iterator[registry_pb2.PushAdapterRequest]) -> None:
        self._messages = messages
        self._failure: Exception | None = None

    def __iter__(self) -> Upload:
        return self

    def __next__(self) -> registry_pb2.PushAdapterRequest:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except OSError as error:
            self._failure = InvalidAdapter(f"{error.filename}: {error.strerror}")
            raise
        except Exception as error:
            self._failure = error
            raise

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._failure is not None:
            raise self._failure from error
