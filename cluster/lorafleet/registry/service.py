"""The admin plane's gRPC servicer: pushes in, adapters out.

It owns the order of a push: check the header, receive and verify the files, validate them against
the base, make them durable, and only then register the version. It decides nothing about formats
(the loader does) or names (`core.names`). Whatever goes wrong before the last step leaves nothing
behind but, at worst, unreferenced blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lorafleet.core.errors import InvalidAdapter, InvalidInput, LorafleetError, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.names import canonical_name, check_alias, is_version_id
from lorafleet.registry.blobs import BlobStore, Staging, check_file_entry
from lorafleet.registry.push import CHUNK_BYTES
from lorafleet.registry.store import Published, RegistryStore
from lorafleet.v1 import registry_pb2, registry_pb2_grpc
from lorafleet.wire.messages import adapter_to_proto, file_from_proto, version_to_proto

T = TypeVar("T")

_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_STORE_PAGE = 50
_MAX_FILES = 256

# A page ends early at this size, so that it fits into a message of 4 MiB with room for the largest
# adapter that may come last (4,096 versions of about 0.6 KiB).
_PAGE_BYTES = 1 << 20

_log = get_logger(__name__)


class Loaded(Protocol):
    """A validated adapter, as much of it as the registry needs."""

    def manifest(self, name: str, created_at_s: float) -> VersionManifest:
        """Describe it under a name."""
        ...


Loader = Callable[[Path], Loaded]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    name: str
    files: tuple[FileEntry, ...]
    if_new: bool


class RegistryService(registry_pb2_grpc.AdapterRegistryServicer):
    """Serves `lorafleet.v1.AdapterRegistry`.

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
    """

    def __init__(
        self,
        store: RegistryStore,
        blobs: BlobStore,
        *,
        load: Loader,
        limits: PushLimits | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._load = load
        self._limits = limits or PushLimits()
        self._validators = ThreadPoolExecutor(max_workers=2, thread_name_prefix="validate")

    def close(self) -> None:
        """Let the validation threads end."""
        self._validators.shutdown(wait=False, cancel_futures=True)

    async def PushAdapter(
        self, request_iterator: AsyncIterator[registry_pb2.PushAdapterRequest], context: Any
    ) -> registry_pb2.PushAdapterResponse:
        """Receive, check and register a version."""
        messages = _Messages(request_iterator, self._limits.idle_timeout_s)
        try:
            published = await self._push(messages)
        except LorafleetError:
            await messages.discard()
            raise
        manifest = published.manifest
        _log.info(
            "adapter pushed",
            adapter=manifest.adapter,
            version=manifest.id,
            existed=published.existed,
        )
        return registry_pb2.PushAdapterResponse(
            version=version_to_proto(manifest), existed=published.existed
        )

    async def GetAdapter(
        self, request: registry_pb2.GetAdapterRequest, context: Any
    ) -> registry_pb2.GetAdapterResponse:
        """Return one adapter."""
        record = await self._store.get_adapter(canonical_name(request.name))
        return registry_pb2.GetAdapterResponse(adapter=adapter_to_proto(record))

    async def ListAdapters(
        self, request: registry_pb2.ListAdaptersRequest, context: Any
    ) -> registry_pb2.ListAdaptersResponse:
        """Return a page of adapters."""
        if request.page_size > _MAX_PAGE:
            raise InvalidInput(
                f"page_size: expected at most {_MAX_PAGE}, got {request.page_size}",
                field="page_size",
            )
        wanted = request.page_size or _DEFAULT_PAGE
        after = canonical_name(request.page_token) if request.page_token else None
        response = registry_pb2.ListAdaptersResponse()
        num_bytes = 0
        while len(response.adapters) < wanted and num_bytes < _PAGE_BYTES:
            limit = min(_STORE_PAGE, wanted - len(response.adapters))
            records = await self._store.list_adapters(after=after, limit=limit)
            if not records:
                return response
            for record in records:
                message = adapter_to_proto(record)
                response.adapters.append(message)
                after = record.name
                num_bytes += message.ByteSize()
                if num_bytes >= _PAGE_BYTES:
                    break
        if await self._store.list_adapters(after=after, limit=1):
            response.next_page_token = after or ""
        return response

    async def SetAlias(
        self, request: registry_pb2.SetAliasRequest, context: Any
    ) -> registry_pb2.SetAliasResponse:
        """Point an alias at a version."""
        name = canonical_name(request.name)
        alias = check_alias(request.alias)
        if not is_version_id(request.version):
            raise InvalidInput(
                f"version {request.version!r} is not valid: expected sha256: and 64 hex digits",
                field="version",
            )
        record = await self._store.set_alias(name, alias, request.version)
        _log.info("alias set", adapter=name, alias=alias, version=request.version)
        return registry_pb2.SetAliasResponse(adapter=adapter_to_proto(record))

    async def DeleteAdapter(
        self, request: registry_pb2.DeleteAdapterRequest, context: Any
    ) -> registry_pb2.DeleteAdapterResponse:
        """Remove an adapter."""
        name = canonical_name(request.name)
        await self._store.delete_adapter(name)
        _log.info("adapter deleted", adapter=name)
        return registry_pb2.DeleteAdapterResponse()

    async def _push(self, messages: _Messages) -> Published:
        header = _check_header(await messages.header(), self._limits)
        with self._blobs.open_staging() as staging:
            for entry in header.files:
                await _receive(messages, staging, entry)
            await messages.expect_end()
            return await self._register(header, staging)

    async def _register(self, header: _Header, staging: Staging) -> Published:
        """Validate what is staged, make it durable, then visible: in this order."""
        loop = asyncio.get_running_loop()

        def validate() -> VersionManifest:
            return self._load(staging.directory).manifest(header.name, time.time())

        manifest = await loop.run_in_executor(self._validators, validate)
        _check_all_used(header.files, manifest.files)
        await asyncio.to_thread(self._blobs.commit, staging)
        return await self._store.publish_version(manifest, if_new=header.if_new)


_DISCARD_S = 0.5


class _Messages:
    """The messages of one push, each waited for with a time limit."""

    def __init__(
        self, iterator: AsyncIterator[registry_pb2.PushAdapterRequest], idle_timeout_s: float
    ) -> None:
        self._iterator = iterator
        self._idle_timeout_s = idle_timeout_s

    async def header(self) -> registry_pb2.PushHeader:
        message = await self._next()
        if message is None or message.WhichOneof("part") != "header":
            raise InvalidInput("a push begins with its header", field="header")
        return message.header

    async def chunk(self, entry: FileEntry, missing_bytes: int) -> bytes:
        message = await self._next()
        if message is None:
            raise InvalidAdapter(
                f"{entry.name}: expected {missing_bytes} more bytes, but the push ended",
                file=entry.name,
                field="size_bytes",
            )
        if message.WhichOneof("part") != "chunk":
            raise InvalidInput("expected a chunk; a push has one header", field="chunk")
        if not 0 < len(message.chunk) <= CHUNK_BYTES:
            raise InvalidInput(
                f"chunk: expected 1 to {CHUNK_BYTES} bytes, got {len(message.chunk)}",
                field="chunk",
            )
        return bytes(message.chunk)

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


async def _receive(messages: _Messages, staging: Staging, entry: FileEntry) -> None:
    with staging.file(entry) as file:
        while file.missing_bytes:
            chunk = await messages.chunk(entry, file.missing_bytes)
            await asyncio.to_thread(file.write, chunk)
        await asyncio.to_thread(file.finish)


def _check_header(header: registry_pb2.PushHeader, limits: PushLimits) -> _Header:
    name = canonical_name(header.name)
    files = tuple(file_from_proto(message) for message in header.files)
    if not files:
        raise InvalidInput("the push has no files", field="files")
    if len(files) > _MAX_FILES:
        raise InvalidInput(f"files: expected at most {_MAX_FILES}, got {len(files)}", field="files")
    for entry in files:
        check_file_entry(entry)
    total_bytes = sum(entry.size_bytes for entry in files)
    if total_bytes > limits.max_adapter_bytes:
        raise InvalidInput(
            f"files: expected at most {limits.max_adapter_bytes} bytes in all, got {total_bytes}; "
            "the registry's --max-adapter-bytes sets the limit",
            field="files",
        )
    return _Header(name=name, files=files, if_new=header.if_new)


def _check_all_used(pushed: Sequence[FileEntry], used: Sequence[FileEntry]) -> None:
    unused = sorted({entry.name for entry in pushed} - {entry.name for entry in used})
    if unused:
        raise InvalidAdapter(
            f"{unused[0]} is not part of the adapter: its weights are in "
            f"{', '.join(entry.name for entry in used[1:])}",
            file=unused[0],
            field="files",
        )
