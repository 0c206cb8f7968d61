"""Who calls: an interceptor that finds it out before any servicer runs, and where they ask.

It covers every method of a server but health and reflection. It knows no keys: whoever makes the
server says who a secret belongs to, and what a method needs.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from lorafleet.core.errors import LorafleetError
from lorafleet.core.tenant import ANYONE, Principal

HEADER = "authorization"
"""The metadata key of `Bearer <key>`."""

Authorise = Callable[[str, str | None], Principal]
"""Receives a method's full name (`/package.Service/Method`) and the secret, if one was sent; says
who calls, or raises Unauthenticated or Forbidden."""

_OPEN = ("/grpc.health.", "/grpc.reflection.")

_caller: contextvars.ContextVar[Principal] = contextvars.ContextVar("caller", default=ANYONE)


def caller() -> Principal:
    """Who makes the call that is being served; anyone, where a server asks for no keys."""
    return _caller.get()


def bearer(secret: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata by which a client shows its key; empty without one."""
    return ((HEADER, f"Bearer {secret}"),) if secret else ()


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Puts the caller into the context of every call, or ends the call."""

    def __init__(self, authorise: Authorise) -> None:
        self._authorise = authorise

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of the called method."""
        details: Any = handler_call_details
        handler: Any = await continuation(handler_call_details)
        if handler is None or details.method.startswith(_OPEN):
            return handler  # type: ignore[no-any-return]
        try:
            enter = _entering(self._authorise(details.method, _secret(details)))
        except LorafleetError as error:
            enter = _refusing(error)
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        for kind, guard in (
            ("unary_unary", _unary),
            ("stream_unary", _unary),
            ("unary_stream", _stream),
            ("stream_stream", _stream),
        ):
            behaviour = getattr(handler, kind)
            if behaviour:
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                return make(guard(behaviour, enter), **codec)  # type: ignore[no-any-return]
        raise AssertionError("a handler without a behaviour")


def _secret(details: Any) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == HEADER and isinstance(value, str):
            kind, _, secret = value.partition(" ")
            return secret.strip() if kind.lower() == "bearer" else ""
    return None


def _entering(principal: Principal) -> Callable[[], None]:
    def enter() -> None:
        _caller.set(principal)

    return enter


def _refusing(error: LorafleetError) -> Callable[[], None]:
    def enter() -> None:
        raise error

    return enter


def _unary(behaviour: Callable[..., Any], enter: Callable[[], None]) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        enter()
        return await behaviour(request, context)

    return call


def _stream(behaviour: Callable[..., Any], enter: Callable[[], None]) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(behaviour):
        return _unary(behaviour, enter)

    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        enter()
        async with contextlib.aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return call
