"""The admin plane's gRPC servicer of adapters.

It owns the shape of requests and answers: a request is checked against who calls, handed on, and
its outcome given back. Pushes are for `pushing`, sources for `sources`, changes for the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from lorafleet.core.errors import InvalidInput, NotFound
from lorafleet.core.log import get_logger
from lorafleet.core.names import DEFAULT_TENANT, canonical_name, check_alias, check_part
from lorafleet.core.record import AdapterRecord, Target
from lorafleet.core.tenant import Scope
from lorafleet.registry.auth import owned, seen
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.changes import DEFAULT_GRACE_S
from lorafleet.registry.pushing import Loader, Pusher, PushLimits, check_files
from lorafleet.registry.requests import (
    any_alias,
    check_labels,
    check_target,
    check_version,
    condition_of,
)
from lorafleet.registry.sources import Importer, SourceRules
from lorafleet.registry.store import Filter, RegistryStore
from lorafleet.registry.verify import check_version_files
from lorafleet.registry.watch import watch
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.v1 import registry_pb2_grpc
from lorafleet.wire.auth import caller
from lorafleet.wire.messages import (
    adapter_to_proto,
    history_to_proto,
    time_to_proto,
    version_to_proto,
)

_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_STORE_PAGE = 50
_MAX_REPLICAS = 10_000

# A page ends early at this size, so that it fits into a message of 4 MiB with room for the largest
# adapter that may come last (4,096 versions of about 0.6 KiB).
_PAGE_BYTES = 1 << 20

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the admin plane allows.

    Parameters
    ----------
    allow_sources : tuple of str
        URLs at or below which adapters may be imported from; none if not given.
    grace_s : float
        How long a deleted adapter can be restored.
    create_tenants : bool
        Whether a push makes the tenant of a new name: where nobody is asked for a key.
    """

    allow_sources: tuple[str, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    create_tenants: bool = True


class RegistryService(registry_pb2_grpc.AdapterRegistryServicer):
    """Serves `lorafleet.v1.AdapterRegistry`.

    Parameters
    ----------
    store : RegistryStore
        Where versions are registered.
    blobs : BlobStore
        Where their files go.
    load : callable
        Validates a directory against the base model.
    limits : PushLimits
        Bounds of a push.
    policy : Policy
        What is allowed.
    """

    def __init__(
        self,
        store: RegistryStore,
        blobs: BlobStore,
        *,
        load: Loader,
        limits: PushLimits | None = None,
        policy: Policy | None = None,
    ) -> None:
        policy = policy or Policy()
        self._store = store
        self._blobs = blobs
        self._load = load
        self._grace_s = policy.grace_s
        self._pusher = Pusher(
            store,
            blobs,
            load=load,
            limits=limits or PushLimits(),
            create_tenants=policy.create_tenants,
        )
        self._importer = Importer(SourceRules(*policy.allow_sources), blobs, self._pusher)

    def close(self) -> None:
        """Let the validation threads end."""
        self._pusher.close()

    # Registering.

    async def PlanPush(self, request: pb.PlanPushRequest, context: Any) -> pb.PlanPushResponse:
        """Say what of a push is held already."""
        name = owned(request.name)
        return pb.PlanPushResponse(held_bytes=self._pusher.plan(name, check_files(request.files)))

    async def PushAdapter(
        self, request_iterator: AsyncIterator[pb.PushAdapterRequest], context: Any
    ) -> pb.PushAdapterResponse:
        """Receive, check and register a version."""
        published = await self._pusher.push(request_iterator)
        manifest, existed = published.manifest, published.existed
        _log.info("adapter pushed", adapter=manifest.adapter, version=manifest.id, existed=existed)
        return pb.PushAdapterResponse(version=version_to_proto(manifest), existed=existed)

    async def ImportAdapter(
        self, request: pb.ImportAdapterRequest, context: Any
    ) -> AsyncGenerator[pb.ImportAdapterResponse, None]:
        """Fetch, check and register a version."""
        name = owned(request.name)
        async for step in self._importer.run(
            request.source,
            name=name,
            if_new=request.if_new,
            labels=check_labels(request.labels),
            condition=condition_of(request.condition),
        ):
            response = pb.ImportAdapterResponse(
                fetched_bytes=step.fetched_bytes, total_bytes=step.total_bytes
            )
            if step.published is not None:
                response.version.CopyFrom(version_to_proto(step.published.manifest))
                response.existed = step.published.existed
                _log.info("adapter imported", adapter=name, source=request.source)
            yield response

    # Reading.

    async def GetAdapter(
        self, request: pb.GetAdapterRequest, context: Any
    ) -> pb.GetAdapterResponse:
        """Return one adapter."""
        record = await self._store.get_adapter(seen(request.name))
        return pb.GetAdapterResponse(adapter=adapter_to_proto(record))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Any
    ) -> pb.ListAdaptersResponse:
        """Return a page of adapters."""
        if request.page_size > _MAX_PAGE:
            raise InvalidInput(
                f"page_size: expected at most {_MAX_PAGE}, got {request.page_size}",
                field="page_size",
            )
        wanted = _filter(request)
        count = request.page_size or _DEFAULT_PAGE
        after = canonical_name(request.page_token) if request.page_token else None
        response = pb.ListAdaptersResponse()
        if wanted is None:
            return response
        num_bytes = 0
        while len(response.adapters) < count and num_bytes < _PAGE_BYTES:
            limit = min(_STORE_PAGE, count - len(response.adapters))
            records = await self._store.list_adapters(after=after, limit=limit, wanted=wanted)
            if not records:
                return response
            for record in records:
                message = adapter_to_proto(record)
                response.adapters.append(message)
                after = record.name
                num_bytes += message.ByteSize()
                if num_bytes >= _PAGE_BYTES:
                    break
        if await self._store.list_adapters(after=after, limit=1, wanted=wanted):
            response.next_page_token = after or ""
        return response

    async def GetHistory(
        self, request: pb.GetHistoryRequest, context: Any
    ) -> pb.GetHistoryResponse:
        """Return what was done to an adapter."""
        if request.limit > _MAX_PAGE:
            raise InvalidInput(
                f"limit: expected at most {_MAX_PAGE}, got {request.limit}", field="limit"
            )
        entries = await self._store.history(seen(request.name), request.limit or _DEFAULT_PAGE)
        return pb.GetHistoryResponse(entries=[history_to_proto(entry) for entry in entries])

    async def Verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        """Read a version's files again."""
        record = await self._store.get_adapter(seen(request.name))
        versions = record.versions
        if request.version:
            versions = (record.version(check_version(request.version)),)
        checks = [
            pb.VersionCheck(
                version=manifest.id,
                problems=await check_version_files(manifest, self._blobs, self._load),
            )
            for manifest in versions
        ]
        return pb.VerifyResponse(checks=checks)

    async def Watch(
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Stream changes."""
        who = caller()
        async for response in watch(self._store, request.cursor, who.sees):
            yield response

    # Changing.

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.SetAliasResponse:
        """Point an alias at a version."""
        name, alias = owned(request.name), check_alias(request.alias)
        target = Target.to(check_version(request.version))
        record = await self._store.set_alias(name, alias, target, condition_of(request.condition))
        _log.info("alias set", adapter=name, alias=alias, version=request.version)
        return pb.SetAliasResponse(adapter=adapter_to_proto(record))

    async def SplitAlias(
        self, request: pb.SplitAliasRequest, context: Any
    ) -> pb.SplitAliasResponse:
        """Point an alias at several versions by weight."""
        name, alias = owned(request.name), check_alias(request.alias)
        target = check_target(request)
        record = await self._store.set_alias(name, alias, target, condition_of(request.condition))
        _log.info("alias split", adapter=name, alias=alias, shares=len(target.shares))
        return pb.SplitAliasResponse(adapter=adapter_to_proto(record))

    async def RemoveAlias(
        self, request: pb.RemoveAliasRequest, context: Any
    ) -> pb.RemoveAliasResponse:
        """Remove an alias."""
        name, alias = owned(request.name), check_alias(request.alias)
        record = await self._store.remove_alias(name, alias, condition_of(request.condition))
        _log.info("alias removed", adapter=name, alias=alias)
        return pb.RemoveAliasResponse(adapter=adapter_to_proto(record))

    async def Rollback(self, request: pb.RollbackRequest, context: Any) -> pb.RollbackResponse:
        """Point an alias at what it meant before."""
        name, alias = owned(request.name), any_alias(request.alias)
        record = await self._store.rollback(name, alias, condition_of(request.condition))
        _log.info("alias rolled back", adapter=name, alias=alias)
        return pb.RollbackResponse(adapter=adapter_to_proto(record))

    async def SetLabels(self, request: pb.SetLabelsRequest, context: Any) -> pb.SetLabelsResponse:
        """Replace an adapter's labels."""
        name, labels = owned(request.name), check_labels(request.labels)
        record = await self._store.set_labels(name, labels, condition_of(request.condition))
        _log.info("labels set", adapter=name)
        return pb.SetLabelsResponse(adapter=adapter_to_proto(record))

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        """Keep a version resident."""
        name = owned(request.name)
        replicas = _check_replicas(request.replicas)
        version = await self._version(name, request.version)
        record = await self._store.pin(name, version, replicas, condition_of(request.condition))
        _log.info("version pinned", adapter=name, version=version, replicas=replicas)
        return pb.PinResponse(adapter=adapter_to_proto(record))

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        """Ask replicas to load a version."""
        name = owned(request.name)
        replicas = _check_replicas(request.replicas) or 1
        version = await self._version(name, request.version)
        await self._store.prefetch(name, version, replicas)
        _log.info("version prefetched", adapter=name, version=version, replicas=replicas)
        return pb.PrefetchResponse()

    async def DeleteAdapter(
        self, request: pb.DeleteAdapterRequest, context: Any
    ) -> pb.DeleteAdapterResponse:
        """Remove an adapter."""
        name = owned(request.name)
        until_s = await self._store.delete_adapter(
            name, condition_of(request.condition), grace_s=self._grace_s
        )
        _log.info("adapter deleted", adapter=name)
        return pb.DeleteAdapterResponse(restorable_until=time_to_proto(until_s))

    async def RestoreAdapter(
        self, request: pb.RestoreAdapterRequest, context: Any
    ) -> pb.RestoreAdapterResponse:
        """Bring a deleted adapter back."""
        name = owned(request.name)
        record = await self._store.restore_adapter(name, condition_of(request.condition))
        _log.info("adapter restored", adapter=name)
        return pb.RestoreAdapterResponse(adapter=adapter_to_proto(record))

    async def _version(self, name: str, text: str) -> str:
        """A version's id, given as one or as an alias that is not split."""
        if text.startswith("sha256:"):
            return check_version(text)
        record: AdapterRecord = await self._store.get_adapter(name)
        alias = any_alias(text or "latest")
        target = record.aliases.get(alias)
        if target is None:
            raise NotFound(f"adapter {name!r} has no alias {alias!r}", adapter=name, alias=alias)
        if target.version is None:
            raise InvalidInput(
                f"version: alias {alias!r} is split; name one version", field="version"
            )
        return target.version


def _filter(request: pb.ListAdaptersRequest) -> Filter | None:
    """What a list asks for and the caller may see; None when that is nothing."""
    who = caller()
    tenants: tuple[str, ...] = ()
    if request.tenant:
        tenants = (check_part(request.tenant, "tenant"),)
        if not who.sees(request.tenant):
            return None
    elif who.scope is not Scope.OPERATOR:
        tenants = tuple({who.tenant, DEFAULT_TENANT})
    return Filter(
        tenants=tenants,
        search=request.search,
        labels=check_labels(request.labels),
        deleted=request.deleted,
    )


def _check_replicas(replicas: int) -> int:
    if replicas > _MAX_REPLICAS:
        raise InvalidInput(
            f"replicas: expected at most {_MAX_REPLICAS}, got {replicas}", field="replicas"
        )
    return replicas
