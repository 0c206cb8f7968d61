"""An adapter as the registry keeps it: a name, its aliases, its versions.

It is the value that the store returns, that each process's catalogue holds and that the wire
carries; it knows neither Redis nor protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import LATEST, AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One adapter. `versions` are oldest first; `aliases` always has `latest`."""

    name: str
    aliases: Mapping[str, str]
    versions: tuple[VersionManifest, ...]

    @property
    def latest(self) -> VersionManifest:
        """What a bare name means."""
        return self.version(self.aliases[LATEST])

    def version(self, version_id: str) -> VersionManifest:
        """Return one version's manifest.

        Raises
        ------
        NotFound
            The adapter has no such version.
        """
        for manifest in self.versions:
            if manifest.id == version_id:
                return manifest
        raise NotFound(
            f"adapter {self.name!r} has no version {version_id}",
            adapter=self.name,
            version=version_id,
        )

    def resolve(self, ref: AdapterRef) -> VersionManifest:
        """Return the version that a reference to this adapter means now.

        Raises
        ------
        NotFound
            The reference's alias or version does not exist.
        """
        if ref.version is not None:
            return self.version(ref.version)
        alias = ref.alias or LATEST
        if alias not in self.aliases:
            raise NotFound(
                f"adapter {self.name!r} has no alias {alias!r}: it has "
                f"{', '.join(sorted(self.aliases))}",
                adapter=self.name,
                alias=alias,
            )
        return self.version(self.aliases[alias])
