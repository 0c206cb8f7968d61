"""A push on the server: its messages in, a registered version out.

It owns the order of a push: check the header, receive and verify the files, validate them against
the base, make them durable, and only then register the version. It decides nothing about formats
(the loader does) or names (`core.names`). Whatever goes wrong before the last step leaves nothing
behind but unreferenced blobs, and what came of the files for the next try.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lorafleet.core.errors import InvalidAdapter, InvalidInput, LorafleetError, Unavailable
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.names import tenant_of
from lorafleet.registry.auth import owned
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.changes import ANY, Condition
from lorafleet.registry.push import MAX_CHUNK_BYTES
from lorafleet.registry.requests import check_labels, condition_of
from lorafleet.registry.staging import StagedFile, Staging, check_file_entry
from lorafleet.registry.store import Published, RegistryStore
from lorafleet.v1 import registry_pb2
from lorafleet.wire.messages import file_from_proto

_MAX_FILES = 256
_CHUNKS_AHEAD = 16
"""Chunks of a push that wait to be written at most."""


class Loaded(Protocol):
    """A validated adapter, as much of it as the registry needs."""

    def manifest(self, name: str, created_at_s: float) -> VersionManifest:
        """Describe it under a name."""
        ...


class Loader(Protocol):
    """Reads and checks a directory; `known` are its files as they were checked while written."""

    def __call__(self, directory: Path, *, known: Sequence[FileEntry] = ()) -> Loaded: ...


"""Validates a directory against the base model; raises InvalidInput naming file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """Bounds of a push.

    Parameters
    ----------
    max_adapter_bytes : int
        Of all files together.
    idle_timeout_s : float
        Longest wait for the next message of a push.
    """

    max_adapter_bytes: int = 4 << 30
    idle_timeout_s: float = 60.0

    def check_size(self, total_bytes: int) -> None:
        """InvalidInput when an adapter is larger."""
        if total_bytes > self.max_adapter_bytes:
            raise InvalidInput(
                f"files: expected at most {self.max_adapter_bytes} bytes in all, got "
                f"{total_bytes}; the registry's --max-adapter-bytes sets the limit",
                field="files",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What shall be registered, and how."""

    name: str
    files: tuple[FileEntry, ...]
    if_new: bool = False
    held_bytes: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    condition: Condition = ANY


class Pusher:
    """Receives, checks and registers versions.

    Parameters
    ----------
    store : RegistryStore
        Where versions are registered.
    blobs : BlobStore
        Where their files go.
    load : callable
        Validates a directory; runs in one of two threads.
    limits : PushLimits
        Bounds of a push.
    create_tenants : bool
        Whether a push makes the tenant of a new name.
    """

    def __init__(
        self,
        store: RegistryStore,
        blobs: BlobStore,
        *,
        load: Loader,
        limits: PushLimits,
        create_tenants: bool,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._load = load
        self.limits = limits
        self._create_tenants = create_tenants
        self._validators = ThreadPoolExecutor(max_workers=2, thread_name_prefix="validate")

    def close(self) -> None:
        """Let the validation threads end."""
        self._validators.shutdown(wait=False, cancel_futures=True)

    async def push(self, requests: AsyncIterator[registry_pb2.PushAdapterRequest]) -> Published:
        """Receive a push and register it."""
        messages = _Messages(requests, self.limits.idle_timeout_s)
        try:
            order = _check_header(await messages.header(), self.limits)
            with self._blobs.open_staging(tenant_of(order.name)) as staging:
                try:
                    await self._receive(messages, staging, order)
                except (LorafleetError, asyncio.CancelledError) as error:
                    if messages.broke_off or not isinstance(error, InvalidInput):
                        self._blobs.keep_partial(staging)
                    raise
                return await self.register(order, staging)
        except LorafleetError:
            await messages.discard()
            raise

    async def register(self, order: Order, staging: Staging) -> Published:
        """Validate what is staged, make it durable, then visible: in this order."""
        loop = asyncio.get_running_loop()

        def validate() -> VersionManifest:
            found = self._load(staging.directory, known=staging.entries)
            return found.manifest(order.name, time.time())

        durable = asyncio.create_task(asyncio.to_thread(staging.sync))
        try:
            manifest = await loop.run_in_executor(self._validators, validate)
        finally:
            await durable
        _check_all_used(order.files, manifest.files)
        await asyncio.to_thread(self._blobs.commit, staging)
        return await self._store.publish_version(
            manifest,
            if_new=order.if_new,
            labels=order.labels,
            create_tenant=self._create_tenants,
            condition=order.condition,
        )

    def plan(self, name: str, files: Sequence[FileEntry]) -> list[int]:
        """How many leading bytes of each file a push of it need not send."""
        tenant = tenant_of(name)
        held = (self._blobs.held(tenant, entry) for entry in files)
        return [found[1] if found is not None else 0 for found in held]

    async def _receive(self, messages: _Messages, staging: Staging, order: Order) -> None:
        held_bytes = order.held_bytes or (0,) * len(order.files)
        for entry, held in zip(order.files, held_bytes, strict=True):
            found = self._blobs.held(staging.tenant, entry) if held else None
            path = found[0] if found is not None else staging.directory / "nothing is held"
            file = staging.file(entry, held=path if held else None, held_bytes=held)
            await asyncio.to_thread(file.__enter__)
            try:
                await _receive_file(messages, file, entry)
                sha256 = "" if entry.sha256 else await messages.digest(entry)
                await asyncio.to_thread(file.finish, sha256)
            finally:
                file.__exit__(None, None, None)
        await messages.expect_end()


async def _receive_file(messages: _Messages, file: StagedFile, entry: FileEntry) -> None:
    """Write and hash in a thread what the event loop receives."""
    loop = asyncio.get_running_loop()
    chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    room = asyncio.Semaphore(_CHUNKS_AHEAD)

    def write() -> None:
        try:
            while (chunk := chunks.get()) is not None:
                file.write(chunk)
                loop.call_soon_threadsafe(room.release)
        finally:
            # Who waits for room must wake up, to hear of the error.
            loop.call_soon_threadsafe(_release, room)

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    missing_bytes = file.missing_bytes
    try:
        while missing_bytes and not writing.done():
            chunk = await messages.chunk(entry, missing_bytes)
            missing_bytes -= len(chunk)
            await room.acquire()
            chunks.put(chunk)
    finally:
        chunks.put(None)
        await writing


def _release(room: asyncio.Semaphore) -> None:
    for _ in range(_CHUNKS_AHEAD):
        room.release()


_DISCARD_S = 0.5


class _Messages:
    """The messages of one push, each waited for with a time limit."""

    def __init__(
        self, iterator: AsyncIterator[registry_pb2.PushAdapterRequest], idle_timeout_s: float
    ) -> None:
        self._iterator = iterator
        self._idle_timeout_s = idle_timeout_s
        self.broke_off = False

    async def header(self) -> registry_pb2.PushHeader:
        message = await self._next()
        if message is None or message.WhichOneof("part") != "header":
            raise InvalidInput("a push begins with its header", field="header")
        return message.header

    async def chunk(self, entry: FileEntry, missing_bytes: int) -> bytes:
        message = await self._next()
        if message is None:
            self.broke_off = True
            raise InvalidAdapter(
                f"{entry.name}: expected {missing_bytes} more bytes, but the push ended",
                file=entry.name,
                field="size_bytes",
            )
        if message.WhichOneof("part") != "chunk":
            raise InvalidInput("expected a chunk; a push has one header", field="chunk")
        if not 0 < len(message.chunk) <= MAX_CHUNK_BYTES:
            raise InvalidInput(
                f"chunk: expected 1 to {MAX_CHUNK_BYTES} bytes, got {len(message.chunk)}",
                field="chunk",
            )
        return bytes(message.chunk)

    async def digest(self, entry: FileEntry) -> str:
        message = await self._next()
        if message is None or message.WhichOneof("part") != "sha256":
            raise InvalidInput(
                f"{entry.name}: expected its sha256 after its last chunk, since the header has "
                "none",
                field="sha256",
            )
        return message.sha256

    async def expect_end(self) -> None:
        if await self._next() is not None:
            raise InvalidInput(
                "the push goes on after the last byte of its last file", field="chunk"
            )

    async def discard(self) -> None:
        """Read on for a moment after a refusal.

        A client of grpc.aio that is still sending as the call ends loses the reason: it reports an
        internal error instead of our status. What it sends within the moment is thrown away.
        """
        with contextlib.suppress(TimeoutError, LorafleetError):
            async with asyncio.timeout(_DISCARD_S):
                while await self._next() is not None:
                    pass

    async def _next(self) -> registry_pb2.PushAdapterRequest | None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await anext(self._iterator, None)
        except TimeoutError:
            raise Unavailable(
                f"the push stood still for {self._idle_timeout_s:g} s; begin anew"
            ) from None


def _check_header(header: registry_pb2.PushHeader, limits: PushLimits) -> Order:
    name = owned(header.name)
    files = check_files(header.files, hashed=False)
    limits.check_size(sum(entry.size_bytes for entry in files))
    held = tuple(header.held_bytes)
    sizes = [entry.size_bytes for entry in files]
    if held and (len(held) != len(files) or any(h > n for h, n in zip(held, sizes, strict=False))):
        raise InvalidInput(
            "held_bytes: expected one number for each file, at most its size", field="held_bytes"
        )
    return Order(
        name=name,
        files=files,
        if_new=header.if_new,
        held_bytes=held,
        labels=check_labels(header.labels),
        condition=condition_of(header.condition),
    )


def check_files(messages: Sequence[Any], *, hashed: bool = True) -> tuple[FileEntry, ...]:
    """Files of a push as values; unless `hashed`, their digests may be left out.

    Raises
    ------
    InvalidInput
        There are none, or too many.
    InvalidAdapter
        No adapter may have one of them.
    """
    files = tuple(file_from_proto(message) for message in messages)
    if not files:
        raise InvalidInput("the push has no files", field="files")
    if len(files) > _MAX_FILES:
        raise InvalidInput(f"files: expected at most {_MAX_FILES}, got {len(files)}", field="files")
    for entry in files:
        check_file_entry(entry, hashed=hashed)
    return files


def _check_all_used(pushed: Sequence[FileEntry], used: Sequence[FileEntry]) -> None:
    unused = sorted({entry.name for entry in pushed} - {entry.name for entry in used})
    if unused:
        raise InvalidAdapter(
            f"{unused[0]} is not part of the adapter: its weights are in "
            f"{', '.join(entry.name for entry in used[1:])}",
            file=unused[0],
            field="files",
        )
