"""Concurrent changes of one adapter from several processes, checked to be linearizable."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lorafleet.bench.figure import Measurement
from lorafleet.bench.registry.lab import manifest
from lorafleet.bench.registry.linearizable import History, Operation
from lorafleet.core.errors import AlreadyExists, Conflict, NotFound
from lorafleet.core.record import AdapterRecord
from lorafleet.registry import EmbeddedRedis, RegistryStore

_HISTORIES = 60
_PROCESSES = 4
_CALLS = 12
_ROUNDS = 20


class State(NamedTuple):
    """What the model knows of the adapter: versions in order, aliases, and what they meant."""

    versions: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    undo: tuple[tuple[str, tuple[str, ...]], ...] = ()


def step(state: State, call: tuple[str, ...], answer: Any) -> tuple[bool, State]:
    """One operation of the registry as a sequential program."""
    expected, after = _run(state, call)
    return answer is None or answer == expected, after


def _run(state: State, call: tuple[str, ...]) -> tuple[Any, State]:
    what, *arguments = call
    aliases, undo = dict(state.aliases), dict(state.undo)

    def moved(alias: str, target: str) -> State:
        if alias in aliases and aliases[alias] != target:
            undo[alias] = (*undo.get(alias, ()), aliases[alias])
        return _state(state.versions, {**aliases, alias: target}, undo)

    match what, arguments:
        case "read", []:
            return (state.versions, state.aliases) if state.versions else "NOT_FOUND", state
        case "push", [version]:
            grown = state._replace(versions=(*state.versions, version))
            known = state if version in state.versions else grown
            return "OK", moved("latest", version)._replace(versions=known.versions)
        case "push_new", [version]:
            if set(state.versions) - {version}:
                return "ALREADY_EXISTS", state
            return _run(state, ("push", version))
        case "alias", [version] if not state.versions or version not in state.versions:
            return "NOT_FOUND", state
        case "alias", [version]:
            return "OK", moved("prod", version)
        case "rollback", [] if not state.versions:
            return "NOT_FOUND", state
        case "rollback", [] if not undo.get("prod"):
            return "FAILED_PRECONDITION", state
        case "rollback", []:
            *rest, target = undo["prod"]
            undo["prod"] = tuple(rest)
            return "OK", _state(state.versions, {**aliases, "prod": target}, undo)
        case "delete", []:
            return ("OK" if state.versions else "NOT_FOUND"), State()
    raise AssertionError(call)


def _state(
    versions: tuple[str, ...], aliases: dict[str, str], undo: dict[str, tuple[str, ...]]
) -> State:
    kept = {alias: earlier for alias, earlier in undo.items() if earlier}
    return State(versions, tuple(sorted(aliases.items())), tuple(sorted(kept.items())))


def measure_histories(report: Callable[[str], None]) -> Measurement:
    """Check 60 histories of 4 processes, and 20 races of 20 first registrations."""
    with (
        tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder,
        EmbeddedRedis(Path(folder)) as redis,
        ProcessPoolExecutor(
            _PROCESSES, mp_context=multiprocessing.get_context("spawn")
        ) as processes,
    ):
        report(f"{_HISTORIES} histories of {_PROCESSES} processes")
        wrong, operations, overlapping = [], 0, 0
        for seed in range(_HISTORIES):
            start_s = time.time() + (1.5 if seed == 0 else 0.02)
            parts = processes.map(
                _work,
                *zip(*((redis.url, seed, i, start_s) for i in range(_PROCESSES)), strict=True),
            )
            history = [operation for part in parts for operation in part]
            operations += len(history)
            overlapping += _overlaps(history)
            if not History(history, step).is_linearizable(State()):
                wrong.append(seed)
        report(f"{_ROUNDS} races for one name")
        winners = [asyncio.run(_race(redis.url, round)) for round in range(_ROUNDS)]
    return Measurement(
        value=1.0 - len(wrong) / _HISTORIES,
        holds=not wrong and winners == [1] * _ROUNDS,
        details={
            "operations": operations,
            "overlapping pairs": overlapping,
            "histories that are not linearizable (seeds)": wrong,
            "winners of each race of 20": winners,
        },
    )


def _overlaps(history: list[Operation]) -> int:
    return sum(
        one.began_s < two.ended_s and two.began_s < one.ended_s
        for index, one in enumerate(history)
        for two in history[index + 1 :]
    )


def _work(url: str, seed: int, start_s: float, worker: int) -> list[Operation]:
    return asyncio.run(_calls(url, seed, worker, start_s))


async def _calls(url: str, seed: int, worker: int, start_s: float) -> list[Operation]:
    """One process's part of a history."""
    rng = random.Random(f"{seed} {worker}")
    store = RegistryStore(url)
    name = f"history-{seed}"
    await store.ping()
    await asyncio.sleep(max(0.0, start_s - time.time()))
    done = []
    for _ in range(_CALLS):
        version = manifest(name, rng.randrange(4)).id
        calls = [("push", version)] * 3 + [("push_new", version)] + [("alias", version)] * 3
        call = rng.choice([*calls, ("rollback",), ("rollback",), ("delete",), *[("read",)] * 4])
        began_s = time.monotonic()
        answer = await _ask(store, name, call)
        done.append(Operation(call=call, answer=answer, began_s=began_s, ended_s=time.monotonic()))
    await store.close()
    return done


async def _ask(store: RegistryStore, name: str, call: tuple[str, ...]) -> Any:
    versions = {manifest(name, number).id: manifest(name, number) for number in range(4)}
    try:
        match call:
            case ("read",):
                return _view(await store.get_adapter(name))
            case ("push", version):
                await store.publish_version(versions[version])
            case ("push_new", version):
                await store.publish_version(versions[version], if_new=True)
            case ("alias", version):
                await store.set_alias(name, "prod", version)
            case ("rollback",):
                await store.rollback(name, "prod")
            case ("delete",):
                await store.delete_adapter(name)
        return "OK"
    except (NotFound, AlreadyExists, Conflict) as error:
        return error.code


def _view(record: AdapterRecord) -> Any:
    aliases = {alias: target.version for alias, target in record.aliases.items()}
    return tuple(each.id for each in record.versions), tuple(sorted(aliases.items()))


async def _race(url: str, round: int) -> int:
    """Register one name 20 times at once with different weights; how many won."""
    store, name = RegistryStore(url), f"race-{round}"

    async def register(number: int) -> bool:
        try:
            await store.publish_version(manifest(name, number), if_new=True)
            return True
        except AlreadyExists:
            return False

    won = sum(await asyncio.gather(*(register(number) for number in range(20))))
    assert len((await store.get_adapter(name)).versions) == 1
    await store.close()
    return won
