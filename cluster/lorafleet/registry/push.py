"""A push as messages: a PEFT directory in, PushAdapterRequests out.

It owns the order and the chunking that the service expects; what belongs to an adapter is for
`lorafleet.adapters` to say, and sending is the caller's. Clients use it, blocking or asyncio alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from lorafleet.adapters import scan_directory
from lorafleet.core.names import canonical_name
from lorafleet.v1 import registry_pb2
from lorafleet.wire.messages import file_to_proto

CHUNK_BYTES = 1 << 18
"""Bytes in one message: measured, the fastest of 64 KiB to 2 MiB."""

MAX_CHUNK_BYTES = 1 << 20
"""Most bytes in one message: a quarter of gRPC's default limit."""

Progress = Callable[[int, int], None]
"""Called with (bytes handed out, bytes in all), first with 0 and last with all."""


class PushOptions(TypedDict, total=False):
    """What a push's header may say beside the name and the files.

    `if_new` makes it fail when the adapter has another version already; `held_bytes` are how many
    leading bytes of each file need not be sent, as PlanPush answered; `labels` are set on the
    adapter beside those it has; `condition` is what the push depends on.
    """

    if_new: bool
    held_bytes: Sequence[int]
    labels: Mapping[str, str]
    condition: registry_pb2.Condition


def push_messages(
    directory: Path,
    name: str,
    *,
    progress: Progress | None = None,
    hashed: bool = True,
    **options: Unpack[PushOptions],
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
    progress : callable, optional
        Told how far it is.
    hashed : bool
        As of `push_header`.
    **options
        What else the header says.

    Raises
    ------
    InvalidInput
        The name breaks the rule.
    InvalidAdapter, Unsupported
        The directory is no adapter, or its weights are pickled.
    """
    header = push_header(directory, name, hashed=hashed, **options)
    return header_messages(directory, header, progress)


def push_header(
    directory: Path, name: str, *, hashed: bool = True, **options: Unpack[PushOptions]
) -> registry_pb2.PushHeader:
    """The first message's content; other arguments and errors as of `push_messages`.

    `hashed` reads the files for their digests, without which the server can say nothing of what it
    holds; else each file is hashed while it is sent.
    """
    return registry_pb2.PushHeader(
        name=canonical_name(name),
        files=[file_to_proto(entry) for entry in scan_directory(directory, hashed=hashed)],
        **options,
    )


def header_messages(
    directory: Path, header: registry_pb2.PushHeader, progress: Progress | None = None
) -> Iterator[registry_pb2.PushAdapterRequest]:
    """The messages of a push with a header made before; as `push_messages`."""
    progress = progress or _ignore
    total_bytes = sum(entry.size_bytes for entry in header.files)
    sent_bytes = 0
    progress(0, total_bytes)
    yield registry_pb2.PushAdapterRequest(header=header)
    held_bytes = list(header.held_bytes) or [0] * len(header.files)
    for entry, held in zip(header.files, held_bytes, strict=True):
        sent_bytes += held
        if held:
            progress(sent_bytes, total_bytes)
        digest = None if entry.sha256 else hashlib.sha256()
        with (directory / entry.name).open("rb") as file:
            file.seek(held)
            while chunk := file.read(CHUNK_BYTES):
                yield registry_pb2.PushAdapterRequest(chunk=chunk)
                if digest is not None:
                    digest.update(chunk)
                sent_bytes += len(chunk)
                progress(sent_bytes, total_bytes)
        if digest is not None:
            yield registry_pb2.PushAdapterRequest(sha256=digest.hexdigest())


def _ignore(_sent_bytes: int, _total_bytes: int) -> None:
    pass
