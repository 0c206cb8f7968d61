"""Channels and servers with the same limits on both sides.

It owns the gRPC options of the house (keep-alive, message sizes, ports never shared), the health
service and reflection, and knows none of our services. Every client and every serving process
stands on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from lorafleet.core.errors import Conflict, InvalidInput
from lorafleet.wire.auth import AuthInterceptor, Authorise
from lorafleet.wire.status import ErrorInterceptor

_OptionList = list[tuple[str, int]]

_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """Limits of a connection; the defaults fit a client and server that both use them.

    Parameters
    ----------
    keepalive_time_s : float
        Silence after which a ping asks whether the peer is there. The server tolerates pings every
        half of that, so a client may not go below half of the server's value.
    keepalive_timeout_s : float
        Wait for the ping's answer before the connection counts as lost: a peer that vanished
        without a word is noticed within the sum of both. Long enough for a process that was not
        given a core for a while.
    max_message_bytes : int
        Largest message either way. The default is gRPC's own, 4 MiB: whatever may be larger goes in
        chunks.
    """

    keepalive_time_s: float = 10.0
    keepalive_timeout_s: float = 10.0
    max_message_bytes: int = 4 << 20

    def _common(self) -> _OptionList:
        return [
            ("grpc.keepalive_time_ms", round(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            # Without this the first of the two is 60 s, whatever the other says (grpcio 1.85).
            ("grpc.http2.ping_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
        ]

    def for_client(self) -> _OptionList:
        """Channel arguments; a lost server is tried again after at most 2 s."""
        return [
            *self._common(),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]

    def for_server(self) -> _OptionList:
        """Server arguments; a port in use is an error, not shared with its other owner."""
        return [
            *self._common(),
            (
                "grpc.http2.min_recv_ping_interval_without_data_ms",
                round(self.keepalive_time_s * 500),
            ),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ]


def open_channel(address: str, options: WireOptions | None = None) -> grpc.aio.Channel:
    """Open an asyncio channel to `host:port`; connects at the first call. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=(options or WireOptions()).for_client())


def open_sync_channel(address: str, options: WireOptions | None = None) -> grpc.Channel:
    """Open a blocking channel to `host:port`; connects at the first call. The caller closes it."""
    return grpc.insecure_channel(address, options=(options or WireOptions()).for_client())


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A servicer to be served.

    `name` is the full protobuf name (`lorafleet.v1.Inference`); `add` registers the servicer with a
    server: usually `functools.partial(add_XServicer_to_server, servicer)`. `serving` is its health
    from the start on, until `GrpcServer.set_serving` changes it.
    """

    name: str
    add: Callable[[grpc.aio.Server], None]
    serving: bool = True


@dataclass(slots=True, kw_only=True)
class _Running:
    server: grpc.aio.Server
    health: HealthServicer
    address: str


@dataclass(slots=True)
class GrpcServer:
    """An asyncio gRPC server with health, reflection and typed errors.

    Parameters
    ----------
    listen : str
        `host:port`; port 0 picks a free one.
    services : Sequence[Service]
        What is served.
    options : WireOptions
        Limits of its connections.
    authorise : callable, optional
        Says who calls, and whether they may; without it, anyone may.
    """

    listen: str
    services: Sequence[Service]
    options: WireOptions = field(default_factory=WireOptions)
    authorise: Authorise | None = None
    _running: _Running | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        """Where it listens, `host:port` with the real port.

        Raises
        ------
        Conflict
            The server is not started.
        """
        return self._state().address

    async def start(self) -> str:
        """Listen and serve; returns the address.

        Raises
        ------
        InvalidInput
            `listen` is not `host:port`.
        Conflict
            The address is in use, or not this machine's.
        """
        host = _host(self.listen)
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if self.authorise is not None:
            interceptors.append(AuthInterceptor(self.authorise))
        server = grpc.aio.server(interceptors=interceptors, options=self.options.for_server())
        health = HealthServicer()
        for service in self.services:
            service.add(server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = [service.name for service in self.services]
        reflection.enable_server_reflection([*names, health_name, reflection.SERVICE_NAME], server)
        try:
            port = server.add_insecure_port(self.listen)
        except RuntimeError as error:
            raise Conflict(
                f"cannot listen on {self.listen}: another process uses the port, or the address is "
                "not this machine's",
                address=self.listen,
            ) from error
        for service in self.services:
            await health.set(service.name, _health_status(service.serving))
        await server.start()
        self._running = _Running(server=server, health=health, address=f"{host}:{port}")
        return self.address

    async def set_serving(self, service: str, serving: bool) -> None:
        """Report a service's health (`""` is the server as a whole); it goes on being served."""
        await self._state().health.set(service, _health_status(serving))

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report not serving, refuse new calls, let running ones end for `grace_s`, then cut them.

        Does nothing when the server is not running.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        await running.health.enter_graceful_shutdown()
        await running.server.stop(grace_s)

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._state().server.wait_for_termination()

    def _state(self) -> _Running:
        if self._running is None:
            raise Conflict("the server is not running: call start() first", address=self.listen)
        return self._running


def _host(listen: str) -> str:
    """Check `host:port` (gRPC takes a port modulo 65,536 without a word) and return the host."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise InvalidInput(
            f"cannot listen on {listen!r}: expected host:port, port 0 to {_MAX_PORT}",
            field="listen",
        )
    return host


def _health_status(serving: bool) -> Any:
    response = health_pb2.HealthCheckResponse
    return response.SERVING if serving else response.NOT_SERVING
