"""Every error lorafleet raises on purpose, each with its gRPC code and whether a retry can help.

    LorafleetError
    ├── InvalidInput          the caller must change the request       INVALID_ARGUMENT   never
    │   ├── InvalidAdapter    an adapter directory is broken           INVALID_ARGUMENT   never
    │   └── Unsupported       a feature is refused by name             INVALID_ARGUMENT   never
    ├── NotFound              a name or version does not exist         NOT_FOUND          never
    ├── AlreadyExists         the name is taken                        ALREADY_EXISTS     never
    ├── Unauthenticated       no key, or one that is not valid         UNAUTHENTICATED    never
    ├── Forbidden             the key does not allow it                PERMISSION_DENIED  never
    ├── Conflict              the state does not allow it now          FAILED_PRECONDITION after change
    ├── Exhausted             no room now                              RESOURCE_EXHAUSTED same replica
    ├── Unavailable           this process cannot serve now            UNAVAILABLE        other replica
    └── Internal              a bug or a broken machine                INTERNAL           other replica

Each carries facts as fields, not only prose. It knows no transport: `wire.status` maps it.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class Retry(enum.Enum):
    """What a caller may do after an error."""

    NEVER = "never"
    SAME_REPLICA = "same_replica"
    OTHER_REPLICA = "other_replica"
    AFTER_CHANGE = "after_change"


class LorafleetError(Exception):
    """The root. `code` is a gRPC status name; `facts` are the message's data.

    Parameters
    ----------
    message : str
        Says what was expected, what was got, and the remedy.
    **facts
        Machine-readable parts of the message (`file`, `field`, `adapter`, ...); values become str.
    """

    code: ClassVar[str] = "INTERNAL"
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = {key: str(value) for key, value in facts.items() if value is not None}


class InvalidInput(LorafleetError):
    """The request itself is wrong."""

    code = "INVALID_ARGUMENT"


class InvalidAdapter(InvalidInput):
    """An adapter cannot be used. `facts` name the `file` and the `field` or `tensor` at fault."""


class Unsupported(InvalidInput):
    """A feature that this build does not honour; the message names it."""


class NotFound(LorafleetError):
    """A name, alias or version does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(LorafleetError):
    """Another thing has the name."""

    code = "ALREADY_EXISTS"


class Unauthenticated(LorafleetError):
    """The call carries no API key, or one that is unknown, revoked or expired."""

    code = "UNAUTHENTICATED"


class Forbidden(LorafleetError):
    """The caller's key does not allow the operation."""

    code = "PERMISSION_DENIED"


class Conflict(LorafleetError):
    """The current state does not allow the operation."""

    code = "FAILED_PRECONDITION"
    retry = Retry.AFTER_CHANGE


class Exhausted(LorafleetError):
    """No room now; a later retry may succeed."""

    code = "RESOURCE_EXHAUSTED"
    retry = Retry.SAME_REPLICA


class Unavailable(LorafleetError):
    """This process cannot serve the request now; another may."""

    code = "UNAVAILABLE"
    retry = Retry.OTHER_REPLICA


class Internal(LorafleetError):
    """A bug or a broken machine."""

    code = "INTERNAL"
    retry = Retry.OTHER_REPLICA
