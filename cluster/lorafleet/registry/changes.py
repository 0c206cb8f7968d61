"""Changing adapters in Redis, each change in one step: what the scripts' outcomes mean.

It owns the arguments of the scripts and the errors that their refusals become. The texts are in
`scripts`; what is stored is read by `reading`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lorafleet.core.errors import AlreadyExists, Conflict, Exhausted, InvalidInput, NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import tenant_of
from lorafleet.core.record import AdapterRecord, Target
from lorafleet.registry import scripts
from lorafleet.registry.encoding import (
    manifest_bytes,
    record_of,
    target_text,
)
from lorafleet.registry.layout import (
    CHANGES,
    DELETED_NAMES,
    DELETED_UNTIL,
    NAMES,
    STATE,
    TENANT_NAMES,
    key,
)
from lorafleet.registry.link import RedisLink, Reply
from lorafleet.registry.rebuild import Rebuilder
from lorafleet.registry.saving import lost

DEFAULT_GRACE_S = 86_400.0
"""How long a deleted adapter can be restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a change depends on, and who makes it.

    Parameters
    ----------
    if_revision : int
        The adapter must have this revision; 0 is any.
    idempotency_key : str
        A repeated change with it is answered as the first one was; empty for none.
    actor : str
        The id of the API key that asks for it.
    """

    if_revision: int = 0
    idempotency_key: str = ""
    actor: str = ""


ANY = Condition()


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A publish's outcome. `existed`: this very version had been registered before."""

    manifest: VersionManifest
    existed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a script did, now or when the same change was asked for before.

    `record` is the adapter just after it; None where there is none.
    """

    code: str
    value: str
    record: AdapterRecord | None = None


class Changer:
    """Runs the changes; every method raises Unavailable while Redis is away.

    Beside the errors named, all raise Conflict when the condition's revision is not the adapter's,
    and InvalidInput when its idempotency key was used for another change.
    """

    def __init__(
        self, link: RedisLink, max_changes: int, rebuilder: Rebuilder | None = None
    ) -> None:
        self._link = link
        self._max_changes = max_changes
        self._rebuilder = rebuilder

    async def publish(
        self,
        manifest: VersionManifest,
        *,
        if_new: bool,
        labels: Mapping[str, str],
        create_tenant: bool,
        condition: Condition,
    ) -> Published:
        """See `RegistryStore.publish_version`."""
        name, tenant = manifest.adapter, tenant_of(manifest.adapter)
        outcome = await self._run(
            scripts.PUBLISH,
            name,
            condition,
            # When it was made is no part of what is asked for.
            ("publish", manifest.id, int(if_new), json.dumps(labels, sort_keys=True)),
            manifest.id,
            manifest.to_json(),
            int(if_new),
            scripts.MAX_VERSIONS,
            manifest_bytes(manifest),
            json.dumps(labels),
            tenant,
            int(create_tenant),
            TENANT_NAMES,
        )
        if outcome.code == "published":
            # Of an idempotent repetition, the first one's manifest.
            return Published(manifest=VersionManifest.from_json(outcome.value), existed=False)
        if outcome.code != "existed":
            _refuse(name, outcome)
        stored = outcome.value.partition(" ")[2]
        return Published(manifest=VersionManifest.from_json(stored), existed=True)

    async def set_alias(
        self, name: str, alias: str, target: Target, condition: Condition
    ) -> AdapterRecord:
        """Point an alias at a target; NotFound when a version in it is not the adapter's."""
        action = "set_alias" if target.version is not None else "split_alias"
        versions = sorted(target.versions)
        arguments = (alias, target_text(target), action, *versions)
        return await self._do(scripts.SET_ALIAS, name, condition, "set_alias", *arguments)

    async def remove_alias(self, name: str, alias: str, condition: Condition) -> AdapterRecord:
        """Remove an alias; NotFound when there is none."""
        return await self._do(scripts.REMOVE_ALIAS, name, condition, "remove_alias", alias)

    async def rollback(self, name: str, alias: str, condition: Condition) -> AdapterRecord:
        """Point an alias at what it meant before; Conflict when there is nothing before."""
        return await self._do(scripts.ROLLBACK, name, condition, "rollback", alias)

    async def set_labels(
        self, name: str, labels: Mapping[str, str], condition: Condition
    ) -> AdapterRecord:
        """Replace the labels."""
        text = json.dumps(labels, sort_keys=True)
        return await self._do(scripts.SET_LABELS, name, condition, "set_labels", text)

    async def pin(
        self, name: str, version: str, replicas: int, condition: Condition
    ) -> AdapterRecord:
        """Keep a version on so many replicas; 0 ends it."""
        return await self._do(scripts.PIN, name, condition, "pin", version, str(replicas))

    async def prefetch(self, name: str, version: str, replicas: int) -> None:
        """Announce that so many replicas should load a version."""
        await self._do(scripts.PREFETCH, name, ANY, "prefetch", version, str(replicas))

    async def delete(self, name: str, condition: Condition, *, grace_s: float) -> float:
        """Move an adapter among the deleted ones; returns until when it can be restored."""
        grace_ms = round(grace_s * 1000)
        outcome = await self._run(scripts.DELETE, name, condition, ("delete", grace_ms), grace_ms)
        if outcome.code != "deleted":
            _refuse(name, outcome)
        return float(outcome.value) / 1000

    async def restore(self, name: str, condition: Condition) -> AdapterRecord:
        """Bring a deleted adapter back; AlreadyExists when the name was taken since."""
        outcome = await self._run(scripts.RESTORE, name, condition, ("restore",))
        if outcome.code == "taken":
            raise AlreadyExists(
                f"adapter {name!r} was registered anew since it was deleted", adapter=name
            )
        return _done(name, outcome)

    async def purge(self, name: str) -> bool:
        """Forget a deleted adapter whose grace has ended; whether it was forgotten."""
        return (await self._run(scripts.PURGE, name, ANY, ("purge",))).code == "purged"

    async def _do(
        self, script: str, name: str, condition: Condition, action: str, *arguments: str
    ) -> AdapterRecord:
        outcome = await self._run(script, name, condition, (action, *arguments), *arguments)
        return _done(name, outcome)

    async def _run(
        self,
        script: str,
        name: str,
        condition: Condition,
        identity: tuple[str | int, ...],
        *arguments: str | int,
    ) -> Outcome:
        """Run a script; `identity` is what makes two calls the same for an idempotency key.

        Each call has such a key: the link repeats one whose reply was lost, and it must not then
        happen twice, with other changes between.
        """
        # A colon keeps keys of ours apart from callers' keys.
        done = condition.idempotency_key or f":{secrets.token_hex(16)}"
        tenant = tenant_of(name)
        keys = [
            *(STATE, CHANGES, NAMES, key("adapter", name), key("history", name)),
            *(key("done", tenant, done), key("tenant", tenant)),
            *(key("deleted", name), key("deleted_history", name), DELETED_NAMES, DELETED_UNTIL),
        ]
        asked = json.dumps([name, *identity])
        fingerprint = hashlib.sha256(asked.encode()).hexdigest()
        seen = self._rebuilder.expected if self._rebuilder is not None else ""
        head: list[str | int] = [
            *(name, seen or secrets.token_hex(8), self._max_changes, condition.actor),
            *(condition.if_revision, fingerprint),
            scripts.DONE_S if condition.idempotency_key else scripts.RETRY_S,
        ]
        reply: Reply[list[Any]] = await self._link.run(script, keys, [*head, *arguments])
        code, value = (part.decode() for part in reply.value[:2])
        flat = reply.value[2] if len(reply.value) > 2 else []
        record = record_of(name, dict(zip(flat[::2], flat[1::2], strict=True)))
        if code == "again":
            code, _, value = value.partition(" ")
        if code == "lost":
            raise lost()
        if self._rebuilder is not None:
            await self._rebuilder.changed(name)
        if code == "reused":
            raise InvalidInput(
                f"idempotency_key {condition.idempotency_key!r} was used for another change",
                field="idempotency_key",
            )
        if code == "stale":
            raise Conflict(
                f"adapter {name!r} has revision {value}, not {condition.if_revision}: somebody "
                "changed it; look at it and decide again",
                adapter=name,
                revision=value,
                field="if_revision",
            )
        return Outcome(code=code, value=value, record=record)


def _done(name: str, outcome: Outcome) -> AdapterRecord:
    if outcome.code != "done":
        _refuse(name, outcome)
    if outcome.record is None:  # asked for again, and deleted since
        raise no_adapter(name)
    return outcome.record


def _refuse(name: str, outcome: Outcome) -> NoReturn:
    value = outcome.value
    match outcome.code:
        case "no adapter":
            raise no_adapter(name)
        case "no version":
            raise NotFound(f"adapter {name!r} has no version {value}", adapter=name, version=value)
        case "no alias":
            raise NotFound(f"adapter {name!r} has no alias {value!r}", adapter=name, alias=value)
        case "no tenant":
            raise NotFound(f"there is no tenant {value!r}; create it first", tenant=value)
        case "nothing":
            raise Conflict(
                f"adapter {name!r}: alias {value!r} meant nothing before", adapter=name, alias=value
            )
        case "quota":
            what, _, most = value.partition(" ")
            raise Exhausted(
                f"tenant {tenant_of(name)!r} may have {most} {what}; delete something or raise its "
                "quota",
                tenant=tenant_of(name),
                quota=what,
                limit=most,
            )
        case "taken":
            raise AlreadyExists(
                f"adapter {name!r} has version {value} already; push without if_new to add another",
                adapter=name,
                version=value,
            )
        case "full":
            raise Conflict(
                f"adapter {name!r} has {value} versions, the most it may have; delete it or push "
                "under another name",
                adapter=name,
            )
        case _:
            raise AssertionError(f"a script answered {outcome.code!r}")


def no_adapter(name: str) -> NotFound:
    """The error of a name that is not registered."""
    return NotFound(f"adapter {name!r} is not registered", adapter=name)
