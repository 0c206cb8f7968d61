"""The embedded redis-server: one per directory, durable, and never left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from lorafleet.core.errors import Conflict, Internal, InvalidInput
from lorafleet.registry import EmbeddedRedis
from lorafleet.registry.embedded import SERVER_VARIABLE, find_server, server_version


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_data_survives_a_restart_on_the_same_port(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    with _client(server) as client:
        client.set("key", "value")
    server.stop()
    assert not server.alive
    assert server.start() == url
    with _client(server) as client:
        assert client.get("key") == "value"
    server.stop()


def test_a_write_that_was_answered_survives_sigkill(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        url = server.url
        with _client(server) as client:
            client.set("key", "value")
        os.kill(server.pid or 0, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(server.pid)], timeout=5)
        assert not server.alive
        assert server.start() == url
        with _client(server) as client:
            assert client.get("key") == "value"


def test_every_write_is_on_disk_before_its_reply_and_only_this_machine_may_connect(
    redis_server: EmbeddedRedis,
) -> None:
    with _client(redis_server) as client:
        assert client.config_get("append*")["appendonly"] == "yes"
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_a_second_one_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(Conflict, match="another process"):
            EmbeddedRedis(tmp_path).start()
        assert server.alive
    with EmbeddedRedis(tmp_path) as again:
        assert again.alive


def test_start_and_stop_may_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "with spaces" / 'and "quotes"')
    assert server.start() == server.start()
    server.stop()
    server.stop()
    with pytest.raises(Conflict, match="not running"):
        _ = server.url


def test_the_server_of_an_owner_that_died_is_stopped_and_its_data_kept(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, pathlib, redis\n"
        "from lorafleet.registry import EmbeddedRedis\n"
        "server = EmbeddedRedis(pathlib.Path(sys.argv[1]))\n"
        "redis.Redis.from_url(server.start()).set('key', 'value')\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    owner = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60
    )
    orphan = psutil.Process(int(owner.stdout))
    assert orphan.is_running()
    with EmbeddedRedis(tmp_path) as server:
        assert server.pid != orphan.pid
        with _client(server) as client:
            assert client.get("key") == "value"
    orphan.wait(timeout=5)


def test_a_port_in_use_is_an_error_with_the_servers_own_words(
    tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    taken = int(redis_server.url.rpartition(":")[2].partition("/")[0])
    server = EmbeddedRedis(tmp_path, port=taken)
    with pytest.raises(Internal, match=r"does not start: .*Failed listening on port"):
        server.start()
    with EmbeddedRedis(tmp_path) as other:  # the directory is free again
        assert other.alive


def test_an_old_server_does_not_start_on_newer_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "appendonlydir").mkdir()
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.5 sha=0'\n")
    old.chmod(0o755)
    monkeypatch.setenv(SERVER_VARIABLE, str(old))
    with pytest.raises(Conflict, match="written by Redis 7"):
        EmbeddedRedis(tmp_path).start()


def test_a_server_named_by_the_environment_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_VARIABLE, "/nowhere/redis-server")
    with pytest.raises(InvalidInput, match=SERVER_VARIABLE):
        find_server()


def test_the_wheels_server_is_found_when_there_is_none_on_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert server_version(find_server()) >= (6, 2)


def test_its_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    with EmbeddedRedis(directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_stop_ends_a_server_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafleet.registry.embedded._STOP_TIMEOUT_S", 0.3)
    server = EmbeddedRedis(tmp_path)
    server.start()
    pid = server.pid or 0
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    server.stop()
    assert time.monotonic() - begun < 5
    assert not psutil.pid_exists(pid)
