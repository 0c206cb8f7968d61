"""What a request's `adapter` means: the base model, one exact version, or an error that names it.

It owns the rule that nothing but the base model's own name (or the empty one) ever means the base
model, and that a name registered a moment ago is found. It knows no replica.

    ""  "base"  "default/base"      the base model
    a registered name or reference  its version
    an unknown name, another case   NotFound, naming it
    a deleted adapter               NotFound, naming it
    one of a tenant unseen          NotFound, the same
    a malformed one ("x ", "a:b")   InvalidInput, naming it
    registry never read             Unavailable
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.core.errors import Conflict, NotFound, Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.model import BaseModel
from lorafleet.core.names import AdapterRef, parse_ref, tenant_of
from lorafleet.core.tenant import ANYONE, Principal
from lorafleet.registry.catalogue import Catalogue
from lorafleet.registry.changes import no_adapter
from lorafleet.registry.store import RegistryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who asks for what: `adapter` and `sticky_key` as the client wrote them."""

    adapter: str
    sticky_key: str = ""
    caller: Principal = ANYONE


class Resolver:
    """Turns what a request names into a version of this base model."""

    def __init__(self, catalogue: Catalogue, store: RegistryStore, base: BaseModel) -> None:
        self._catalogue = catalogue
        self._store = store
        self._base = base

    async def resolve(self, asked: Asked) -> VersionManifest | None:
        """Return the version that a request's `adapter` means; None is the base model.

        Raises
        ------
        InvalidInput
            It is malformed.
        NotFound
            No such adapter, alias or version is registered; never retried on another replica.
        Conflict
            It was registered for another base model.
        Unavailable
            The registry has not been read yet.
        """
        ref = parse_ref(asked.adapter)
        if ref is None:
            return None
        if not asked.caller.sees(tenant_of(ref.name)):
            raise no_adapter(ref.name)
        manifest = await self._find(ref, asked.sticky_key)
        if manifest.base_digest != self._base.digest:
            raise Conflict(
                f"adapter {ref.name!r} was registered for another base model "
                f"({manifest.base_digest}); this fleet serves {self._base.name} "
                f"({self._base.digest}); push it again",
                adapter=ref.name,
                base=self._base.name,
            )
        return manifest

    async def _find(self, ref: AdapterRef, sticky_key: str) -> VersionManifest:
        try:
            return self._catalogue.resolve(ref, sticky_key)
        except NotFound:
            if not self._catalogue.connected:
                raise
            # The view may be some milliseconds behind a push that has just been answered.
            try:
                record = await self._store.get_adapter(ref.name)
            except Unavailable:
                pass
            else:
                return record.resolve(ref, sticky_key)
            raise
