"""Imports: from a directory or a web server that is allowed, and from nowhere else."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.core.errors import (
    InvalidInput,
    NotFound,
    Unsupported,
)
from lorafleet.core.model import BaseModel
from lorafleet.registry import BlobStore, RegistryStore
from lorafleet.registry.sources import Source, SourceRules
from lorafleet.v1 import registry_pb2 as pb
from support.admin import Admin, serving


class Web:
    """A web server of one directory that counts who asks."""

    def __init__(self, root: Path) -> None:
        self.requests: list[str] = []
        web = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(root))

            def do_GET(self) -> None:
                web.requests.append(self.path)
                if self.path.startswith("/moved"):
                    self.send_response(302)
                    self.send_header("location", "/a/adapter_config.json")
                    self.end_headers()
                    return
                super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def web(tmp_path: Path, make_adapter: Callable[..., Path]) -> Iterator[Web]:
    make_adapter(tmp_path / "web" / "a")
    web = Web(tmp_path / "web")
    yield web
    web.server.shutdown()


@pytest.fixture
async def importing(
    store: RegistryStore,
    blobs: BlobStore,
    make_base: Callable[..., BaseModel],
    web: Web,
    tmp_path: Path,
) -> AsyncIterator[Admin]:
    allowed = (f"file://{tmp_path}/web", f"{web.url}/a", f"{web.url}/moved", f"{web.url}/none")
    async with serving(store, blobs, make_base(), allow_sources=allowed) as admin:
        yield admin


async def test_adapters_are_imported_from_a_directory_and_over_http(
    importing: Admin, web: Web, tmp_path: Path
) -> None:
    for i, source in enumerate((f"{web.url}/a", f"file://{tmp_path}/web/a", f"{web.url}/a/")):
        request = pb.ImportAdapterRequest(name=f"a{i}", source=source, labels={"k": "v"})
        *_, last = await importing.stream("ImportAdapter", request)
        assert last.version.adapter == f"a{i}"
        assert last.fetched_bytes == last.total_bytes > 0
    adapter = (await importing.call("GetAdapter", pb.GetAdapterRequest(name="a0"))).adapter
    assert dict(adapter.labels) == {"k": "v"}


async def test_c53_what_is_not_allowed_is_refused_without_any_contact(
    importing: Admin, web: Web, tmp_path: Path
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    port = listener.getsockname()[1]
    (tmp_path / "web" / "out").symlink_to("/etc")
    host = web.url.removeprefix("http://")
    for source in (
        "meta-llama/some-adapter",
        "http://169.254.169.254/latest",
        f"http://127.0.0.1:{port}/a",
        f"http://localhost:{host.split(':')[1]}/a",
        f"https://{host}/a",
        f"{web.url}/",
        f"{web.url}/ab",
        f"{web.url}/a/../b",
        f"{web.url}/a/%2e%2e/b",
        f"http://user@{host}/a",
        f"{web.url}/a?x=1",
        f"{web.url}/a#x",
        "file:///etc",
        f"file://{tmp_path}/web/../etc",
        f"file://{tmp_path}/web/out",
        f"file://localhost{tmp_path}/web/a",
        "\\\\server\\share",
        "//server/share",
        "s3://bucket/a",
        "gopher://x/a",
        "",
    ):
        with pytest.raises(InvalidInput, match="source"):
            await importing.stream(
                "ImportAdapter", pb.ImportAdapterRequest(name="x", source=source)
            )
    with pytest.raises(TimeoutError):
        listener.accept()
    assert web.requests == []
    listener.close()


async def test_redirects_and_what_is_not_there_are_named(importing: Admin, web: Web) -> None:
    with pytest.raises(Unsupported, match="redirects"):
        await importing.stream(
            "ImportAdapter", pb.ImportAdapterRequest(name="x", source=f"{web.url}/moved")
        )
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        await importing.stream(
            "ImportAdapter", pb.ImportAdapterRequest(name="x", source=f"{web.url}/none")
        )
    assert (await importing.call("ListAdapters", pb.ListAdaptersRequest())).adapters == []


def test_rules_compare_hosts_ports_and_whole_segments() -> None:
    rules = SourceRules("https://Host/a/b", "s3://bucket")
    assert rules.check("https://host:443/a/b/c").path == ("a", "b", "c")
    assert rules.check("s3://bucket/x/y").host == "bucket"
    for url in ("https://host/a/bc", "https://host:444/a/b", "http://host/a/b", "s3://bucket2/x"):
        with pytest.raises(InvalidInput, match="not allowed"):
            rules.check(url)
    with pytest.raises(InvalidInput, match="allow-source"):
        SourceRules("not a url")
    assert Source.parse("https://h:8443/a").url("f") == "https://h:8443/a/f"
