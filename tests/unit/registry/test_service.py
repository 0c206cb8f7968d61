"""Pushes over real gRPC: whole and valid, or refused by name with nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet.adapters import load_adapter
from lorafleet.core.errors import (
    AlreadyExists,
    InvalidAdapter,
    InvalidInput,
    LorafleetError,
    NotFound,
    Unavailable,
    Unsupported,
)
from lorafleet.core.model import BaseModel
from lorafleet.registry import BlobStore, RegistryStore
from lorafleet.registry.push import push_messages
from lorafleet.registry.server import SERVICE
from lorafleet.registry.service import PushLimits, RegistryService
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.v1 import registry_pb2_grpc
from lorafleet.wire.channel import GrpcServer, Service, open_channel
from lorafleet.wire.status import from_rpc_error

AdapterMaker = Callable[..., Path]


class Client:
    """The stub, raising our errors."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = registry_pb2_grpc.AdapterRegistryStub(channel)

    async def call(self, method: str, request: Any, **options: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, **options)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def push(self, messages: Iterable[pb.PushAdapterRequest], **options: Any) -> Any:
        return await self.call("PushAdapter", iter(messages), **options)

    async def names(self) -> list[str]:
        response = await self.call("ListAdapters", pb.ListAdaptersRequest())
        return [adapter.name for adapter in response.adapters]


Connect = Callable[..., Any]


@pytest.fixture
async def serve(store: RegistryStore, blobs: BlobStore) -> AsyncIterator[Connect]:
    """Serve a registry for a base model and return a client."""
    closing: list[Callable[[], Any]] = []

    async def start(base: BaseModel, **options: Any) -> Client:
        load = functools.partial(load_adapter, base=base)
        service = RegistryService(store, blobs, **{"load": load, **options})
        add = functools.partial(registry_pb2_grpc.add_AdapterRegistryServicer_to_server, service)
        server = GrpcServer("127.0.0.1:0", [Service(name=SERVICE, add=add)])
        channel = open_channel(await server.start())
        closing.extend([channel.close, functools.partial(server.stop, 1.0)])

        async def close() -> None:
            service.close()

        closing.append(close)
        return Client(channel)

    yield start
    for close in closing:
        await close()


@pytest.fixture
async def client(serve: Connect, make_base: Callable[..., BaseModel]) -> Client:
    client: Client = await serve(make_base())
    return client


def plain(adapter: pb.Adapter) -> dict[str, str]:
    """Aliases that are not split."""
    assert all(len(target.shares) == 1 for target in adapter.aliases.values())
    return {alias: target.shares[0].version for alias, target in adapter.aliases.items()}


def _stored(tmp_path: Path) -> list[str]:
    """Every file of the blob store, but what is kept of a push that broke off, and whose it is."""
    root = tmp_path / "blobs"
    found = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    return [path.name for path in found if not {"owners", "partial"} & set(path.parts)]


async def test_a_pushed_adapter_is_listed_stored_and_loads_again(
    client: Client,
    store: RegistryStore,
    blobs: BlobStore,
    make_base: Callable[..., BaseModel],
    make_adapter: AdapterMaker,
    tmp_path: Path,
) -> None:
    response = await client.push(push_messages(make_adapter(tmp_path / "a"), "org/a"))
    assert not response.existed
    version = response.version
    assert (version.adapter, version.max_rank, version.num_modules) == ("org/a", 4, 2)
    assert (list(version.target_modules), version.dtype) == (["o_proj"], "float32")
    adapter = (await client.call("GetAdapter", pb.GetAdapterRequest(name="org/a"))).adapter
    assert plain(adapter) == {"latest": version.id}
    assert list(adapter.versions) == [version]
    assert await client.names() == ["org/a"]
    manifest = (await store.get_adapter("org/a")).latest
    loaded = load_adapter(blobs.materialise(manifest), make_base())
    assert loaded.version == version.id
    assert set(loaded.files) == set(manifest.files)
    assert list((tmp_path / "blobs" / "staging").iterdir()) == []


async def test_pushing_the_same_again_existed_and_other_weights_become_latest(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    one = make_adapter(tmp_path / "one", seed=1)
    two = make_adapter(tmp_path / "two", seed=2)
    first = await client.push(push_messages(one, "a"))
    again = await client.push(push_messages(one, "a"))
    assert again.existed
    assert again.version == first.version
    second = await client.push(push_messages(two, "a"))
    adapter = (await client.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
    assert [version.id for version in adapter.versions] == [first.version.id, second.version.id]
    assert plain(adapter)["latest"] == second.version.id
    back = await client.push(push_messages(one, "a"))
    assert back.existed
    adapter = (await client.call("GetAdapter", pb.GetAdapterRequest(name="a"))).adapter
    assert plain(adapter)["latest"] == first.version.id


async def test_c42_of_twenty_concurrent_pushes_of_a_new_name_one_wins(
    client: Client, store: RegistryStore, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    directories = [make_adapter(tmp_path / str(seed), seed=seed) for seed in range(20)]
    results = await asyncio.gather(
        *(client.push(push_messages(each, "a", if_new=True)) for each in directories),
        return_exceptions=True,
    )
    winners = [result for result in results if not isinstance(result, BaseException)]
    assert len(winners) == 1
    assert sum(isinstance(result, AlreadyExists) for result in results) == 19
    record = await store.get_adapter("a")
    assert [manifest.id for manifest in record.versions] == [winners[0].version.id]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "  ",
        "a:b",
        "a@v1",
        "a%2Fb",
        "../../etc/x",
        "/abs",
        "a/b/c",
        "a\x00b",
        "\u00e9",  # composed
        "e\u0301",  # decomposed
        "x" * 300,
        "base",
        "default/base",
        "x ",
        ".hidden",
    ],
)
async def test_c42_a_name_that_breaks_the_rule_is_refused_with_the_rule(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path, name: str
) -> None:
    directory = make_adapter(tmp_path / "a")
    header, *chunks = push_messages(directory, "good")
    header.header.name = name
    with pytest.raises(InvalidInput) as caught:
        await client.push([header, *chunks])
    assert caught.value.facts["field"] == "name"
    for method, request in (
        ("GetAdapter", pb.GetAdapterRequest(name=name)),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name=name)),
        ("SetAlias", pb.SetAliasRequest(name=name, alias="prod", version="sha256:" + "0" * 64)),
    ):
        with pytest.raises(InvalidInput):
            await client.call(method, request)
    assert await client.names() == []
    assert _stored(tmp_path) == []


async def test_c42_names_that_look_alike_do_not_collide(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    names = ["org/a", "org_a", "Org/a", "a", "A"]
    ids = {}
    for seed, name in enumerate(names):
        directory = make_adapter(tmp_path / str(seed), seed=seed)
        ids[name] = (await client.push(push_messages(directory, name))).version.id
    assert await client.names() == sorted(names)
    for name in names:
        adapter = (await client.call("GetAdapter", pb.GetAdapterRequest(name=name))).adapter
        assert plain(adapter)["latest"] == ids[name]
    same = await client.call("GetAdapter", pb.GetAdapterRequest(name="default/a"))
    assert same.adapter.name == "a"


# What is broken is refused, and leaves nothing.


def _bad_json(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", ')


def _cut(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size * 6 // 10])


def _huge_header(directory: Path) -> None:
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes((10 << 30).to_bytes(8, "little") + weights.read_bytes()[8:])


def _replicated(directory: Path) -> None:
    config = directory / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layer_replication": [[0, 1]]}))


class _Pwn:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize(
    ("spoil", "kind", "facts"),
    [
        (_bad_json, InvalidAdapter, {"file": "adapter_config.json"}),
        (_cut, InvalidAdapter, {"file": "adapter_model.safetensors"}),
        (_huge_header, InvalidAdapter, {"file": "adapter_model.safetensors"}),
        (_replicated, Unsupported, {"file": "adapter_config.json", "field": "layer_replication"}),
    ],
)
async def test_c38_a_broken_adapter_is_refused_by_file_and_its_name_stays_free(
    client: Client,
    make_adapter: AdapterMaker,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    kind: type[LorafleetError],
    facts: dict[str, str],
) -> None:
    await client.push(push_messages(make_adapter(tmp_path / "good", seed=9), "good"))
    before = sorted(_stored(tmp_path))
    directory = make_adapter(tmp_path / "a")
    spoil(directory)
    for _ in range(3):
        with pytest.raises(kind) as caught:
            await client.push(push_messages(directory, "a", if_new=True))
        assert facts.items() <= caught.value.facts.items()
        with pytest.raises(NotFound, match="'a' is not registered"):
            await client.call("GetAdapter", pb.GetAdapterRequest(name="a"))
    assert await client.names() == ["good"]
    assert sorted(_stored(tmp_path)) == before
    mended = await client.push(push_messages(make_adapter(directory), "a", if_new=True))
    assert not mended.existed
    assert await client.names() == ["a", "good"]


async def test_c10_an_adapter_for_a_wider_base_is_refused_with_both_shapes(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a", shape=(2, 128))
    with pytest.raises(InvalidAdapter, match=r"64.*128|128.*64") as caught:
        await client.push(push_messages(directory, "a"))
    assert "o_proj" in caught.value.facts["tensor"]
    assert _stored(tmp_path) == []


async def test_c51_pickles_are_refused_unopened_whatever_they_are_called(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    pwned = tmp_path / "pwned"
    poison = pickle.dumps(_Pwn(pwned))
    directory = make_adapter(tmp_path / "a")
    header, config, _ = push_messages(directory, "a")
    for name in ("adapter_model.bin", "adapter_model.pt"):
        entry = pb.FileEntry(name=name, size_bytes=len(poison), sha256="a" * 64)
        request = pb.PushAdapterRequest(
            header=pb.PushHeader(name="a", files=[header.header.files[0], entry])
        )
        with pytest.raises(InvalidAdapter, match="pickle") as caught:
            await client.push([request, config, pb.PushAdapterRequest(chunk=poison)])
        assert caught.value.facts["file"] == name
    (directory / "adapter_model.safetensors").write_bytes(poison)
    with pytest.raises(InvalidAdapter) as caught:
        await client.push(push_messages(directory, "a"))
    assert caught.value.facts["file"] == "adapter_model.safetensors"
    assert not pwned.exists()
    assert await client.names() == []
    assert _stored(tmp_path) == []


# The protocol of a push.


def _header(messages: Iterable[pb.PushAdapterRequest]) -> tuple[Any, list[Any]]:
    first, *chunks = messages
    return first, chunks


async def _refused(client: Client, messages: Iterable[Any], match: str) -> InvalidInput:
    with pytest.raises(InvalidInput, match=match) as caught:
        await client.push(messages)
    assert await client.names() == []
    return caught.value


async def test_a_push_that_breaks_the_protocol_is_refused(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a")
    header, chunks = _header(push_messages(directory, "a"))
    chunk = pb.PushAdapterRequest
    await _refused(client, [], "begins with its header")
    await _refused(client, chunks, "begins with its header")
    await _refused(client, [header, header], "expected a chunk")
    await _refused(client, [header, chunk(chunk=b"")], "1 to 1048576 bytes")
    await _refused(client, [header, chunk(chunk=b"x" * ((1 << 20) + 1))], "1 to 1048576 bytes")
    await _refused(client, [header, *chunks, chunk(chunk=b"x")], "goes on after the last byte")
    short = await _refused(client, [header, *chunks[:-1]], "the push ended")
    assert short.facts["file"] == "adapter_model.safetensors"
    joined = chunk(chunk=chunks[0].chunk + b"x")
    long = await _refused(client, [header, joined, *chunks[1:]], "got at least")
    assert long.facts["file"] == "adapter_config.json"
    bad = chunk(chunk=bytes(len(chunks[1].chunk)))
    wrong = await _refused(client, [header, chunks[0], bad], "expected sha256")
    assert wrong.facts == {"file": "adapter_model.safetensors", "field": "sha256"}
    assert _stored(tmp_path) == []


async def test_digests_may_follow_their_files_and_are_checked_as_well(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a")
    header, *rest = push_messages(directory, "a", hashed=False)
    part = pb.PushAdapterRequest
    missing = await _refused(client, [header, rest[0], *rest[2:]], "expected its sha256")
    assert missing.facts["field"] == "sha256"
    await _refused(client, [header, *rest[:-1]], "expected its sha256")
    await _refused(client, [header, rest[0], part(sha256="x")], "64 lower-case hex digits")
    await _refused(client, [header, rest[0], part(sha256="0" * 64)], "expected sha256 000")
    assert _stored(tmp_path) == []
    pushed = await client.push(iter([header, *rest]))
    named = await client.push(push_messages(directory, "a"))
    assert named.existed
    assert named.version.id == pushed.version.id
    assert [entry.sha256 for entry in pushed.version.files] == [
        message.sha256 for message in rest if message.sha256
    ]


async def test_a_header_with_files_that_no_adapter_has_is_refused(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    header, chunks = _header(push_messages(make_adapter(tmp_path / "a"), "a"))
    good = list(header.header.files)

    def with_files(*files: pb.FileEntry) -> list[Any]:
        push = pb.PushHeader(name="a", files=files)
        return [pb.PushAdapterRequest(header=push), *chunks]

    await _refused(client, with_files(), "no files")
    await _refused(client, with_files(*good * 200), "at most 256")
    traversal = pb.FileEntry(name="../../x", size_bytes=1, sha256="a" * 64)
    await _refused(client, with_files(*good, traversal), "is not accepted")
    await _refused(client, with_files(good[0], good[0]), "twice")
    missing = await _refused(client, with_files(good[0])[:2], "missing")
    assert missing.facts["file"] == "adapter_model.safetensors"
    extra = pb.FileEntry(
        name="adapter_model-00001-of-00001.safetensors",
        size_bytes=good[1].size_bytes,
        sha256=good[1].sha256,
    )
    unused = await _refused(client, [*with_files(*good, extra), chunks[-1]], "not part of")
    assert unused.facts["file"] == extra.name


async def test_an_adapter_over_the_limit_is_refused_before_its_bytes_come(
    serve: Connect,
    make_base: Callable[..., BaseModel],
    make_adapter: AdapterMaker,
    tmp_path: Path,
) -> None:
    client = await serve(make_base(), limits=PushLimits(max_adapter_bytes=1000))
    header, _ = _header(push_messages(make_adapter(tmp_path / "a"), "a"))
    error = await _refused(client, [header], "at most 1000 bytes in all")
    assert error.facts["field"] == "files"


async def test_a_push_that_stands_still_is_given_up(
    serve: Connect,
    make_base: Callable[..., BaseModel],
    make_adapter: AdapterMaker,
    tmp_path: Path,
) -> None:
    client = await serve(make_base(), limits=PushLimits(idle_timeout_s=0.2))
    header, _ = _header(push_messages(make_adapter(tmp_path / "a"), "a"))

    async def stall() -> AsyncIterator[Any]:
        yield header
        await asyncio.sleep(30)

    with pytest.raises(Unavailable, match="stood still"):
        await client.call("PushAdapter", stall())
    assert list((tmp_path / "blobs" / "staging").iterdir()) == []


async def test_a_client_that_goes_away_leaves_nothing(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    header, _ = _header(push_messages(make_adapter(tmp_path / "a"), "a"))
    staging = tmp_path / "blobs" / "staging"

    async def stall() -> AsyncIterator[Any]:
        yield header
        await asyncio.sleep(30)

    call = client.stub.PushAdapter(stall())
    while not staging.is_dir() or not list(staging.iterdir()):
        await asyncio.sleep(0.01)
    call.cancel()
    for _ in range(200):
        if not list(staging.iterdir()):
            break
        await asyncio.sleep(0.01)
    assert list(staging.iterdir()) == []
    assert await client.names() == []


async def test_c45_a_deadline_ends_the_call_and_a_retry_succeeds(
    serve: Connect,
    make_base: Callable[..., BaseModel],
    make_adapter: AdapterMaker,
    tmp_path: Path,
) -> None:
    base = make_base()
    loads = 0

    def slow_load(directory: Path, *, known: Any = ()) -> Any:
        nonlocal loads
        loads += 1
        adapter = load_adapter(directory, base, known=known)
        if loads == 1:
            time.sleep(0.6)
        return adapter

    client = await serve(base, load=slow_load)
    directory = make_adapter(tmp_path / "a")
    with pytest.raises(Unavailable) as caught:
        await client.push(push_messages(directory, "a"), timeout=0.3)
    assert caught.value.facts["grpc_code"] == "DEADLINE_EXCEEDED"
    assert await client.names() == []
    response = await client.push(push_messages(directory, "a", if_new=True), timeout=5)
    assert response.version.adapter == "a"
    assert loads == 2


@pytest.mark.parametrize("num_layers", [1, 8])
async def test_c45_large_adapters_pass_under_the_default_message_limit(
    serve: Connect,
    make_base: Callable[..., BaseModel],
    make_adapter: AdapterMaker,
    tmp_path: Path,
    num_layers: int,
) -> None:
    # 8 MiB of tensors a layer: beyond gRPC's 4 MiB by far; 64 MiB in all for eight.
    shape = (num_layers, 4096)
    client = await serve(make_base(layers=num_layers, width=4096))
    directory = make_adapter(tmp_path / "a", rank=256, shape=shape)
    response = await client.push(push_messages(directory, "big"))
    assert response.version.weights_bytes == num_layers << 23


# The other calls.


async def test_aliases_are_set_over_the_wire(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    one, two = [
        (await client.push(push_messages(make_adapter(tmp_path / str(n), seed=n), "a"))).version.id
        for n in (1, 2)
    ]
    request = pb.SetAliasRequest(name="a", alias="prod", version=one)
    adapter = (await client.call("SetAlias", request)).adapter
    assert plain(adapter) == {"latest": two, "prod": one}
    for alias, version, kind in (
        ("latest", one, InvalidInput),
        ("", one, InvalidInput),
        ("prod", "v1", InvalidInput),
        ("prod", "sha256:" + "0" * 64, NotFound),
    ):
        with pytest.raises(kind):
            await client.call(
                "SetAlias", pb.SetAliasRequest(name="a", alias=alias, version=version)
            )


async def test_a_deleted_adapter_is_not_found_and_may_be_pushed_again(
    client: Client, make_adapter: AdapterMaker, tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a")
    await client.push(push_messages(directory, "a"))
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="a"))
    for method, request in (
        ("DeleteAdapter", pb.DeleteAdapterRequest(name="a")),
        ("GetAdapter", pb.GetAdapterRequest(name="a")),
    ):
        with pytest.raises(NotFound, match="'a' is not registered"):
            await client.call(method, request)
    assert not (await client.push(push_messages(directory, "a", if_new=True))).existed


async def test_pages_cover_all_adapters_once(
    client: Client, store: RegistryStore, make_manifest: Callable[..., Any]
) -> None:
    names = [f"t/{number:03d}" for number in range(130)]
    for number, name in enumerate(names):
        await store.publish_version(make_manifest(name, number))
    seen = [name async for name in _pages(client, page_size=60)]
    assert seen == names
    assert [name async for name in _pages(client, page_size=0)] == names
    with pytest.raises(InvalidInput, match="at most 1000"):
        await client.call("ListAdapters", pb.ListAdaptersRequest(page_size=1001))
    with pytest.raises(InvalidInput):
        await client.call("ListAdapters", pb.ListAdaptersRequest(page_token="not a name"))


async def _pages(client: Client, *, page_size: int) -> AsyncIterator[str]:
    token = ""
    while True:
        request = pb.ListAdaptersRequest(page_size=page_size, page_token=token)
        response = await client.call("ListAdapters", request)
        assert len(response.adapters) <= (page_size or 100)
        for adapter in response.adapters:
            yield adapter.name
        token = response.next_page_token
        if not token:
            return


async def test_a_page_of_adapters_with_many_versions_fits_into_a_message(
    client: Client, store: RegistryStore, make_manifest: Callable[..., Any]
) -> None:
    modules = tuple(f"{number:050d}" for number in range(100))  # makes a manifest of 6 KiB
    for adapter in range(6):
        await asyncio.gather(
            *(
                store.publish_version(make_manifest(f"a{adapter}", n, target_modules=modules))
                for n in range(150)
            )
        )
    assert [name async for name in _pages(client, page_size=1000)] == [f"a{n}" for n in range(6)]
