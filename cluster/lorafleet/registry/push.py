"""A push as messages: a PEFT directory in, PushAdapterRequests out.

It owns the order and the chunking that the service expects; what belongs to an adapter is for
`lorafleet.adapters` to say, and sending is the caller's. Clients use it, blocking or asyncio alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lorafleet.adapters import scan_directory
from lorafleet.core.names import canonical_name
from lorafleet.v1 import registry_pb2
from lorafleet.wire.messages import file_to_proto

CHUNK_BYTES = 1 << 20
"""Most bytes in one message: a quarter of gRPC's default limit."""

Progress = Callable[[int, int], None]
"""Called with (bytes handed out, bytes in all), first with 0 and last with all."""


def push_messages(
    directory: Path,
    name: str,
    *,
    if_new: bool = False,
    progress: Progress | None = None,
) -> Iterator[registry_pb2.PushAdapterRequest]:
    """Make the messages that push an adapter directory under a name.

    The name and the directory are checked before this returns; files are read as the messages are
    taken, never more than a chunk at a time.

    Parameters
    ----------
    directory : Path
        A PEFT adapter: config and safetensors.
    name : str
        `name` or `tenant/name`.
    if_new : bool
        The push shall fail when the adapter has another version already.
    progress : callable, optional
        Told how far it is.

    Raises
    ------
    InvalidInput
        The name breaks the rule.
    InvalidAdapter, Unsupported
        The directory is no adapter, or its weights are pickled.
    """
    header = registry_pb2.PushHeader(
        name=canonical_name(name),
        files=[file_to_proto(entry) for entry in scan_directory(Path(directory))],
        if_new=if_new,
    )
    return _messages(Path(directory), header, progress or _ignore)


def _messages(
    directory: Path, header: registry_pb2.PushHeader, progress: Progress
) -> Iterator[registry_pb2.PushAdapterRequest]:
    total_bytes = sum(entry.size_bytes for entry in header.files)
    sent_bytes = 0
    progress(0, total_bytes)
    yield registry_pb2.PushAdapterRequest(header=header)
    for entry in header.files:
        with (directory / entry.name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield registry_pb2.PushAdapterRequest(chunk=chunk)
                sent_bytes += len(chunk)
                progress(sent_bytes, total_bytes)


def _ignore(_sent_bytes: int, _total_bytes: int) -> None:
    pass
