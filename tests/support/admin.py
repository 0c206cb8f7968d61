"""The admin plane over real gRPC, as a client with one key sees it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from lorafleet.adapters import load_adapter
from lorafleet.core.model import BaseModel
from lorafleet.core.tenant import new_secret
from lorafleet.registry import BlobStore, RegistryStore
from lorafleet.registry.auth import authorise_by, needed_scope
from lorafleet.registry.keyring import Keyring, operator_key
from lorafleet.registry.push import push_messages
from lorafleet.registry.server import (
    _services,
)
from lorafleet.registry.service import Policy, RegistryService
from lorafleet.registry.tenants_service import TenantsService
from lorafleet.v1 import registry_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from lorafleet.wire.auth import bearer
from lorafleet.wire.channel import GrpcServer, open_channel
from lorafleet.wire.status import from_rpc_error

_, OPERATOR = new_secret()
VERSION = "sha256:" + "e" * 64


class Admin:
    """Both stubs with one key, raising our errors."""

    def __init__(self, channel: grpc.aio.Channel, secret: str | None) -> None:
        self.channel = channel
        self.metadata = bearer(secret)
        self._stubs: list[Any] = [
            registry_pb2_grpc.AdapterRegistryStub(channel),
            tenants_pb2_grpc.TenantsStub(channel),
        ]

    def with_key(self, secret: str | None) -> Admin:
        return Admin(self.channel, secret)

    def method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    async def call(self, name: str, request: Any) -> Any:
        try:
            return await self.method(name)(request, metadata=self.metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def push(self, directory: Path, name: str, **options: Any) -> Any:
        return await self.call("PushAdapter", iter(push_messages(directory, name, **options)))

    async def stream(self, name: str, request: Any) -> list[Any]:
        try:
            call = self.method(name)(request, metadata=self.metadata, timeout=20)
            return [response async for response in call]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def make_key(self, tenant: str, scope: int = tenants_pb2.SCOPE_ADMIN) -> str:
        request = tenants_pb2.CreateKeyRequest(tenant=tenant, scope=scope)
        secret: str = (await self.call("CreateKey", request)).secret
        return secret


@asynccontextmanager
async def serving(
    store: RegistryStore, blobs: BlobStore, base: BaseModel, *, auth: bool = False, **policy: Any
) -> AsyncIterator[Admin]:
    load = functools.partial(load_adapter, base=base)
    service = RegistryService(
        store, blobs, load=load, policy=Policy(create_tenants=not auth, **policy)
    )
    keyring = Keyring(store, operator_key(OPERATOR))
    await keyring.start()
    server = GrpcServer(
        "127.0.0.1:0",
        _services(service, TenantsService(store)),
        authorise=(
            authorise_by(keyring.authenticate, needed_scope, "admin plane") if auth else None
        ),
    )
    async with open_channel(await server.start()) as channel:
        yield Admin(channel, OPERATOR if auth else None)
    await server.stop(0.5)
    await keyring.stop()
    service.close()
