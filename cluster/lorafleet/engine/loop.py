"""The step thread: takes requests from an inbox, runs steps, sends events.

Everything that touches the scheduler, the runner or a request's state happens on this thread; the
rest of the process reaches it through `submit` and `call`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorafleet.core.errors import Internal, LorafleetError, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.engine.request import Delta, Failed, Finished, FinishReason, Request, Started
from lorafleet.engine.runner import Runner
from lorafleet.engine.sampling import Sampler
from lorafleet.engine.scheduler import Scheduler
from lorafleet.engine.text import Detokenizer, TextCodec

_IDLE_S = 0.05
"""How long the thread sleeps without news: short enough for the age limit's clock."""

_log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Output:
    """What a running request's tokens pass through."""

    sampler: Sampler
    detokenizer: Detokenizer


class StepLoop:
    """Runs `scheduler` over `runner` until stopped.

    `on_change` is called on the step thread whenever residency or the queues may have changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        codec: TextCodec,
        *,
        eos_ids: frozenset[int],
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._codec = codec
        self._eos_ids = eos_ids
        self._on_change = on_change
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: dict[Request, _Output] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self.alive_at_s = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests in it fail with Unavailable."""
        self._stopping = True
        self.wake()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and took a turn in the last 30 s."""
        return self._thread.is_alive() and time.monotonic() - self.alive_at_s < 30

    def wake(self) -> None:
        """Make the thread look at its queues again. Any thread."""
        self._inbox.put(None)

    def submit(self, request: Request) -> None:
        """Hand a request over. Any thread."""
        self._post(lambda: self._accept(request))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function between steps and return its future result. Any thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future

    def _post(self, job: Callable[[], None]) -> None:
        if self._stopping or not self._thread.is_alive():
            raise Unavailable("the engine is not running")
        self._inbox.put(job)

    def _accept(self, request: Request) -> None:
        residency = self._scheduler.residency
        request.resident = residency is None or all(
            residency.is_resident(version) for version, _ in request.mix
        )
        self._outputs[request] = _Output(
            sampler=Sampler(request.sampling),
            detokenizer=Detokenizer(self._codec, request.sampling.stop),
        )
        self._scheduler.add(request)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.alive_at_s = time.monotonic()
                self._drain(block=not self._turn())
        except BaseException as error:
            self._failure = error
            _log.exception("engine_failed")
        self._abandon()

    def _drain(self, *, block: bool) -> None:
        try:
            job = self._inbox.get(timeout=_IDLE_S) if block else self._inbox.get_nowait()
            while True:
                if job is not None:
                    job()
                job = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _turn(self) -> bool:
        """Schedule and run one step; whether there was one."""
        plan = self._scheduler.schedule(time.monotonic())
        self._forget_gone()
        self._on_change()
        if plan is None:
            return False
        logits = self._runner.step(plan)
        for chunk in plan.chunks:
            chunk.request.num_cached += chunk.num_tokens
        now_s = time.monotonic()
        for row, request in enumerate(plan.sampled):
            self._take_token(request, logits[row], now_s)
        return True

    def _take_token(self, request: Request, logits: np.ndarray, now_s: float) -> None:
        output = self._outputs[request]
        token = output.sampler.sample(logits)
        if request.num_generated == 0:
            request.first_token_s = now_s
            request.emit(Started(resident=request.resident, prompt_tokens=request.prompt_length))
        request.tokens.append(token)
        ended = token in self._eos_ids and not request.sampling.ignore_eos
        text = "" if ended else output.detokenizer.push(token)
        full = request.num_generated >= request.sampling.max_tokens
        if ended or full or output.detokenizer.stopped:
            text += output.detokenizer.flush()
            request.emit(Delta(token_ids=(token,), text=text))
            stopped = ended or output.detokenizer.stopped
            self._finish(request, FinishReason.STOP if stopped else FinishReason.LENGTH, now_s)
        else:
            request.emit(Delta(token_ids=(token,), text=text))

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._scheduler.finish(request)
        del self._outputs[request]
        request.emit(
            Finished(
                reason=reason,
                completion_tokens=request.num_generated,
                queue_s=request.admitted_s - request.arrived_s,
                ttft_s=request.first_token_s - request.arrived_s,
                decode_s=now_s - request.first_token_s,
            )
        )

    def _forget_gone(self) -> None:
        """Drop the outputs of requests that were cancelled or failed."""
        live = len(self._scheduler.waiting) + len(self._scheduler.running)
        if live != len(self._outputs):
            present = {*self._scheduler.waiting, *self._scheduler.running}
            self._outputs = {r: out for r, out in self._outputs.items() if r in present}

    def _abandon(self) -> None:
        error: LorafleetError = (
            Unavailable("the engine was stopped")
            if self._failure is None
            else Internal(f"the engine failed: {self._failure!r}")
        )
        self._stopping = True
        self._drain(block=False)
        for request in self._outputs:
            request.emit(Failed(error=error))
        for request in list(self._scheduler.running):
            self._scheduler.finish(request)
        self._scheduler.waiting.clear()
