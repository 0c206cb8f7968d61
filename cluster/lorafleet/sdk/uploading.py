"""A push's messages, with the reason when making them fails.

gRPC takes the messages in a thread of its own and tells only that iterating them failed; here the
failure itself is kept for the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lorafleet.core.errors import InvalidAdapter
from lorafleet.v1 import registry_pb2

Progress = Callable[[int, int], None]


class Upload:
    """An iterator over the messages of one push.

    As a context it replaces the call's error by the iterator's own, where there is one.
    """

    def __init__(self, messages: Iterator[registry_pb2.PushAdapterRequest]) -> None:
        self._messages = messages
        self._failure: Exception | None = None

    @classmethod
    def of(
        cls, directory: Path | str, name: str, *, if_new: bool, progress: Progress | None
    ) -> Upload:
        """The push of a directory; errors as in `registry.push.push_messages`."""
        # Half a second of imports that only a push needs.
        from lorafleet.registry.push import push_messages

        return cls(push_messages(Path(directory), name, if_new=if_new, progress=progress))

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
