"""Errors across processes: a `LorafleetError` as google.rpc.Status with typed details, and back.

It owns the mapping (ErrorInfo: reason = class name, domain = `lorafleet`, metadata = facts and
retry; BadRequest for wrong input) and the interceptor that applies it to every servicer. It knows
no service. Servicers just raise; clients turn any RpcError into the same class again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from lorafleet.core import errors
from lorafleet.core.errors import InvalidInput, LorafleetError
from lorafleet.core.log import get_logger

DOMAIN = "lorafleet"
"""The ErrorInfo domain of our own errors."""

_DETAILS_KEY = "grpc-status-details-bin"

# HTTP/2 peers drop a response whose headers exceed 8 KiB. The message travels twice (once
# percent-encoded, once inside the base64 details), so it and the facts get a quarter of that each.
_MAX_MESSAGE_BYTES = 1536
_MAX_FACT_BYTES = 256
_MAX_FACTS = 8

_log = get_logger(__name__)

_BY_CODE: dict[str, type[LorafleetError]] = {
    "INVALID_ARGUMENT": errors.InvalidInput,
    "OUT_OF_RANGE": errors.InvalidInput,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.Forbidden,
    "UNIMPLEMENTED": errors.Unsupported,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.Conflict,
    "ABORTED": errors.Conflict,
    "RESOURCE_EXHAUSTED": errors.Exhausted,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.Unavailable,
    "CANCELLED": errors.Unavailable,
}


def to_status(error: LorafleetError) -> status_pb2.Status:
    """Describe an error as google.rpc.Status; long messages and facts are cut to fit in headers."""
    message = _clip_message(error.message)
    facts = {
        _clip(key, 63): _clip(value, _MAX_FACT_BYTES)
        for key, value in list(error.facts.items())[:_MAX_FACTS]
    }
    facts["retry"] = error.retry.value
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=facts)
    ]
    if isinstance(error, InvalidInput):
        field = next((facts[key] for key in ("field", "tensor", "file") if key in facts), "")
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=_clip(error.message, _MAX_FACT_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return status_pb2.Status(
        code=getattr(grpc.StatusCode, error.code).value[0],
        message=message,
        details=[_pack(detail) for detail in details],
    )


def from_status(status: status_pb2.Status) -> LorafleetError | None:
    """Rebuild the error of a Status, or None when it is not one of ours."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if not detail.Is(info.DESCRIPTOR):
            continue
        detail.Unpack(info)
        kind = getattr(errors, info.reason, None)
        if info.domain == DOMAIN and isinstance(kind, type) and issubclass(kind, LorafleetError):
            error = kind(status.message)
            error.facts = {key: value for key, value in info.metadata.items() if key != "retry"}
            return error
    return None


def from_rpc_error(error: grpc.RpcError) -> LorafleetError:
    """Turn what a client call raised into our error; other peers' errors are mapped by code."""
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            ours = from_status(status_pb2.Status.FromString(value))
            if ours is not None:
                return ours
    code: grpc.StatusCode = call.code()
    kind = _BY_CODE.get(code.name, errors.Internal)
    return kind(call.details() or f"the call failed with {code.name}", grpc_code=code.name)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: LorafleetError) -> NoReturn:
    """End a call with an error; never returns."""
    status = to_status(error)
    await context.abort(
        getattr(grpc.StatusCode, error.code),
        status.message,
        trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets every servicer of a server raise LorafleetError.

    Any other exception is a bug: it is logged with its traceback and the caller gets INTERNAL with
    no more than the exception's class.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of the called method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method; gRPC answers UNIMPLEMENTED
            return None  # type: ignore[return-value]
        method = handler_call_details.method
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, method), **codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method), **codec
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), **codec
            )
        return grpc.stream_stream_rpc_method_handler(
            _stream(handler.stream_stream, method), **codec
        )


def _unary(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _fail(context, error, method)

    return call


def _stream(behaviour: Callable[..., AsyncGenerator[Any, None]], method: str) -> Callable[..., Any]:
    if not inspect.isasyncgenfunction(behaviour):  # a coroutine that writes to its context
        return _unary(behaviour, method)

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            # Closed at once, not when collected: a request holds pins and queue places.
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _fail(context, error, method)

    return call


async def _fail(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, LorafleetError):
        _log.error("a servicer failed", method=method, exc_info=error)
        error = errors.Internal(
            f"{method} failed unexpectedly ({type(error).__name__}); the server's log says where"
        )
    elif isinstance(error, errors.Internal):
        _log.error("a call ended with an internal error", method=method, exc_info=error)
    await abort(context, error)


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _clip(text: str, max_bytes: int) -> str:
    """Cut a text to so many bytes of UTF-8; lone surrogates become `?`."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _clip_message(text: str) -> str:
    """Cut a text so that it fits when percent-encoded, as grpc-message is."""
    text = _clip(text, _MAX_MESSAGE_BYTES)
    used = 0
    for index, char in enumerate(text):
        plain = " " <= char <= "~" and char != "%"
        used += 1 if plain else 3 * len(char.encode())
        if used > _MAX_MESSAGE_BYTES:
            return text[: index - 3] + "..."
    return text
