"""Adapters fetched from elsewhere, from allowed places only.

It owns which URLs may be contacted at all, and the fetching: local directories and HTTP by itself,
object stores by fsspec. A URL that no rule covers is refused before any name is resolved or any
file is looked at. Redirects are not followed, links out of an allowed directory are not either.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from lorafleet.core.errors import InvalidAdapter, InvalidInput, NotFound, Unavailable, Unsupported
from lorafleet.core.manifest import FileEntry
from lorafleet.core.names import tenant_of
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.changes import Condition
from lorafleet.registry.pushing import Order, Pusher
from lorafleet.registry.staging import FILE_NAME, Staging, full_disk_is_exhausted
from lorafleet.registry.store import Published

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_INDEX = "adapter_model.safetensors.index.json"
_MAX_JSON_BYTES = 8 << 20

_PORTS = {"http": 80, "https": 443}
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
_BLOCK_BYTES = 1 << 20
_HTTP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A URL in parts; `path` has no empty, `.` or `..` segment."""

    scheme: str
    host: str
    port: int | None
    path: tuple[str, ...]

    @classmethod
    def parse(cls, url: str, field: str = "source") -> Source:
        """Take a URL apart.

        Raises
        ------
        InvalidInput
            It is none, or has parts by which readers of URLs differ.
        """

        def wrong(why: str) -> InvalidInput:
            return InvalidInput(f"{field} {url[:200]!r}: {why}", field=field)

        if any(char in url for char in "\\%?#@") or any(ord(c) <= 32 or ord(c) > 126 for c in url):
            raise wrong("expected a plain URL without user, query, fragment or escapes")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong(str(error)) from None
        if parts.scheme not in ("file", *_PORTS, *_DRIVERS):
            raise wrong("expected file://, http://, https://, s3://, gs:// or az://")
        if (parts.scheme == "file") == bool(parts.netloc):
            raise wrong("expected file:///path, or a host or bucket after //")
        path = parts.path.removeprefix("/").removesuffix("/").split("/")
        if any(segment in ("", ".", "..") for segment in path) and path != [""]:
            raise wrong("expected a path without empty, `.` and `..` parts")
        return cls(
            scheme=parts.scheme,
            host=(parts.hostname or "").lower(),
            port=port if port is not None else _PORTS.get(parts.scheme),
            path=tuple(segment for segment in path if segment),
        )

    def covers(self, other: Source) -> bool:
        """Whether `other` is at or below this one."""
        same = (self.scheme, self.host, self.port) == (other.scheme, other.host, other.port)
        return same and other.path[: len(self.path)] == self.path

    def url(self, name: str) -> str:
        """The URL of a file in it."""
        host = (
            self.host
            if self.port in (None, _PORTS.get(self.scheme))
            else (f"{self.host}:{self.port}")
        )
        return f"{self.scheme}://{host}/{'/'.join((*self.path, name))}"

    @property
    def local(self) -> Path:
        """The directory of a file:// URL."""
        return Path("/", *self.path)


class SourceRules:
    """Which sources may be contacted: those at or below an allowed URL.

    Raises
    ------
    InvalidInput
        One of the allowed URLs is malformed.
    """

    def __init__(self, *allowed: str) -> None:
        self._allowed = tuple(Source.parse(url, "allow-source") for url in allowed)

    def check(self, url: str) -> Source:
        """The source of a URL.

        Raises
        ------
        InvalidInput
            It is malformed, or no rule covers it; nothing was contacted.
        """
        source = Source.parse(url)
        rules = [rule for rule in self._allowed if rule.covers(source)]
        if not rules:
            raise InvalidInput(
                f"source {url[:200]!r} is not allowed; the registry's --allow-source says what is",
                field="source",
            )
        if source.scheme == "file":
            # Links are followed inside the allowed directory only.
            roots = [rule.local.resolve() for rule in rules]
            if not any(source.local.resolve().is_relative_to(root) for root in roots):
                raise InvalidInput(
                    f"source {url[:200]!r} is a link out of what is allowed", field="source"
                )
        return source


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportStep:
    """How far an import is; `published` is in the last step alone."""

    fetched_bytes: int
    total_bytes: int
    published: Published | None = None


class Importer:
    """Fetches PEFT directories and registers them as pushes would."""

    def __init__(self, rules: SourceRules, blobs: BlobStore, pusher: Pusher) -> None:
        self._rules = rules
        self._blobs = blobs
        self._pusher = pusher

    async def run(
        self,
        url: str,
        *,
        name: str,
        if_new: bool,
        labels: Mapping[str, str],
        condition: Condition,
    ) -> AsyncGenerator[ImportStep, None]:
        """Fetch and register; steps tell how far it is."""
        source = self._rules.check(url)
        fetcher = _Fetcher(source, self._pusher.limits.check_size)
        with self._blobs.open_staging(tenant_of(name)) as staging:
            work = asyncio.create_task(asyncio.to_thread(fetcher.fetch, staging))
            try:
                while not work.done():
                    yield ImportStep(
                        fetched_bytes=fetcher.fetched_bytes, total_bytes=fetcher.total_bytes
                    )
                    await asyncio.wait([work], timeout=0.5)
                files = work.result()
            finally:
                fetcher.stopped = True
                with contextlib.suppress(Exception):
                    await work
            order = Order(name=name, files=files, if_new=if_new, labels=labels, condition=condition)
            published = await self._pusher.register(order, staging)
            total = fetcher.total_bytes
            yield ImportStep(fetched_bytes=total, total_bytes=total, published=published)


class _Fetcher:
    """Copies a PEFT directory's files into a staging; runs in a thread of its own."""

    def __init__(self, source: Source, check_size: Callable[[int], None]) -> None:
        self._source = source
        self._open = _opener(source)
        self._check_size = check_size
        self.fetched_bytes = 0
        self.total_bytes = 0
        self.stopped = False

    def fetch(self, staging: Staging) -> tuple[FileEntry, ...]:
        self._copy(staging, _CONFIG, _MAX_JSON_BYTES)
        try:
            self._copy(staging, _WEIGHTS)
        except NotFound:
            self._copy(staging, _INDEX, _MAX_JSON_BYTES)
            for shard in _shards(staging.directory / _INDEX):
                self._copy(staging, shard)
        return staging.entries

    def _copy(self, staging: Staging, name: str, most: int | None = None) -> None:
        size, file = self._open(name)
        with file:
            if most is not None and size > most:
                raise InvalidAdapter(
                    f"{name}: expected at most {most} bytes, got {size}", file=name
                )
            self.total_bytes += size
            self._check_size(self.total_bytes)
            digest = hashlib.sha256()
            copied = 0
            with full_disk_is_exhausted(), (staging.directory / name).open("xb") as out:
                while block := file.read(_BLOCK_BYTES):
                    if self.stopped:
                        raise Unavailable("the import was given up")
                    copied += len(block)
                    if copied > size:
                        break
                    out.write(block)
                    digest.update(block)
                    self.fetched_bytes += len(block)
        if copied != size or not size:
            raise InvalidAdapter(
                f"{name}: the source announced {size} bytes and gave {copied}", file=name
            )
        staging.adopt(FileEntry(name=name, size_bytes=size, sha256=digest.hexdigest()))


Opener = Callable[[str], tuple[int, BinaryIO]]
"""Opens a file of the source by name: its size and a reader. Raises NotFound."""


def _opener(source: Source) -> Opener:
    if source.scheme == "file":
        return _open_local(source)
    return _open_http(source) if source.scheme in _PORTS else _open_fsspec(source)


def _open_local(source: Source) -> Opener:
    root = source.local.resolve()

    def open_file(name: str) -> tuple[int, BinaryIO]:
        path = root / name
        if not path.exists():
            raise _missing(name)
        if not path.resolve().is_relative_to(root) or not path.is_file():
            raise InvalidAdapter(f"{name} is no file, or a link out of its directory", file=name)
        file = path.open("rb")
        return path.stat().st_size, file

    return open_file


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _open_http(source: Source) -> Opener:
    # No proxy of the environment: it could reach what this machine cannot.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def open_file(name: str) -> tuple[int, BinaryIO]:
        try:
            response = opener.open(source.url(name), timeout=_HTTP_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise _missing(name) from None
            if 300 <= error.code < 400:
                raise Unsupported(
                    f"{name}: the source redirects, which is not followed; allow and name where to",
                    file=name,
                    field="source",
                ) from None
            raise Unavailable(f"{name}: the source answered HTTP {error.code}", file=name) from None
        except OSError as error:
            raise Unavailable(f"{name}: the source cannot be reached: {error}", file=name) from None
        length = response.headers.get("content-length")
        if length is None or not length.isdecimal():
            response.close()
            raise InvalidAdapter(f"{name}: the source does not say how long it is", file=name)
        return int(length), cast(BinaryIO, response)

    return open_file


def _open_fsspec(source: Source) -> Opener:
    import fsspec

    driver = _DRIVERS[source.scheme]
    try:
        system = fsspec.filesystem(source.scheme)
    except ImportError as error:
        raise Unsupported(
            f"{source.scheme}:// needs the package {driver}, which is not installed: {error}",
            field="source",
        ) from None
    root = PurePosixPath(source.host, *source.path)

    def open_file(name: str) -> tuple[int, BinaryIO]:
        try:
            return int(system.size(str(root / name))), cast(BinaryIO, system.open(str(root / name)))
        except FileNotFoundError:
            raise _missing(name) from None
        except Exception as error:  # each driver has errors of its own
            raise Unavailable(f"{name}: the source cannot be read: {error}", file=name) from None

    return open_file


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InvalidAdapter(f"{index.name}: expected a weight_map", file=index.name) from None
    for name in names:
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise InvalidAdapter(f"{index.name}: {name!r} is no shard's name", file=index.name)
    return names


def _missing(name: str) -> NotFound:
    return NotFound(f"the source has no {name}", file=name)
