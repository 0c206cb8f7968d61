"""Whether requests land where their adapter is, and answers come from the right one."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from lorafleet.bench.examples import QUESTIONS, example_adapters
from lorafleet.bench.figure import Measurement
from lorafleet.compiler import ensure_compiled
from lorafleet.core import home
from lorafleet.engine import Engine, EngineOptions, Prompt, SamplingParams
from lorafleet.fleet import FleetOptions, FleetState, Supervisor
from lorafleet.sdk import Client, Completion, Sampling

_GOAL = 0.95
_REQUESTS = 60
_CONCURRENT = 6
_TOKENS = 16


@contextmanager
def private_fleet(options: FleetOptions, report: Callable[[str], None]) -> Iterator[FleetState]:
    """A fleet with a home and ports of its own, for as long as the block runs."""
    before = os.environ.get(home.VARIABLE)
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder:
        os.environ[home.VARIABLE] = folder
        supervisor = Supervisor(options, report=report)
        try:
            yield supervisor.start()
        finally:
            supervisor.stop()
            if before is None:
                del os.environ[home.VARIABLE]
            else:
                os.environ[home.VARIABLE] = before


def measure_affinity(report: Callable[[str], None]) -> Measurement:
    """Send 60 mixed requests to two replicas; see the figure's goal."""
    model_dir = ensure_compiled()
    adapters = example_adapters()
    names = sorted(adapters)
    rng = random.Random(0)
    requests = [(rng.choice(["", *names]), rng.choice(QUESTIONS)) for _ in range(_REQUESTS)]
    options = FleetOptions(
        model_dir=model_dir, replicas=2, gateway="127.0.0.1:0", admin="127.0.0.1:0"
    )
    with (
        private_fleet(options, report) as state,
        Client(gateway=state.gateway, admin=state.admin) as client,
    ):
        for name, directory in adapters.items():
            client.push_adapter(directory, name=name)
        report("warming up")
        for name in names:
            _ask(client, name, QUESTIONS[0])
        report(f"{_REQUESTS} requests, {_CONCURRENT} at a time")
        with ThreadPoolExecutor(_CONCURRENT) as pool:
            answers = list(pool.map(lambda request: _ask(client, *request), requests))

    report("the same requests in one process")
    wrong = []
    with Engine(model_dir, options=EngineOptions(kv_tokens=8192)) as engine:
        for name, directory in adapters.items():
            engine.upload_lora(directory, name=name)
        for (name, question), answer in zip(requests, answers, strict=True):
            expected = engine.complete(
                Prompt(messages=[{"role": "user", "content": question}]),
                SamplingParams(max_tokens=_TOKENS),
                adapter=name or None,
            )
            if expected.token_ids != answer.token_ids:
                wrong.append(f"{name or 'base'}: {question}")

    adapted = [answer for (name, _), answer in zip(requests, answers, strict=True) if name]
    share = sum(answer.resident for answer in adapted) / len(adapted)
    return Measurement(
        value=share,
        holds=share >= _GOAL and not wrong,
        details={
            "requests with an adapter": len(adapted),
            "replicas that served": len({answer.replica for answer in answers}),
            "answers from a wrong adapter": wrong or "none",
        },
    )


def _ask(client: Client, name: str, question: str) -> Completion:
    return client.chat([("user", question)], adapter=name, sampling=Sampling(max_tokens=_TOKENS))
