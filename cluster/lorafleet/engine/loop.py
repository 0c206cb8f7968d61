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
from typing import TypeVar

import numpy as np

from lorafleet.core.errors import (
    Exhausted,
    Internal,
    InvalidAdapter,
    LorafleetError,
    Unavailable,
)
from lorafleet.core.log import get_logger
from lorafleet.engine.request import Delta, Failed, Finished, FinishReason, Request, Started
from lorafleet.engine.runner import Runner
from lorafleet.engine.sampling import Sampler
from lorafleet.engine.scheduler import Scheduler
from lorafleet.engine.text import Detokenizer, TextCodec

_WAITING_S = 0.05
"""How long the thread sleeps while requests wait: short enough for the age limit's clock."""
_IDLE_S = 1.0
"""How long it sleeps while there are none: news wakes it, so this is for its sign of life alone."""

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Output:
    """What a running request's tokens pass through."""

    sampler: Sampler
    detokenizer: Detokenizer


class StepLoop:
    """Runs `scheduler` over `runner` until stopped.

    Parameters
    ----------
    scheduler, runner, codec
        What it drives; nobody else may touch the first two while it runs.
    eos_ids : frozenset of int
        Tokens that end an answer.
    max_waiting : int
        Requests that may be submitted and not yet admitted.
    on_change : callable
        Called on the step thread whenever residency or the queues may have changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        codec: TextCodec,
        *,
        eos_ids: frozenset[int],
        max_waiting: int,
        on_change: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._codec = codec
        self._eos_ids = eos_ids
        self._max_waiting = max_waiting
        self._on_change = on_change
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: dict[Request, _Output] = {}
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self.alive_at_s = time.monotonic()
        self._lock = threading.Lock()
        # Under the lock, so that nothing is put into an inbox that nobody reads any more.
        self._open = False
        self._num_unread = 0

    def start(self) -> None:
        self._open = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests in it fail with Unavailable. A second call does nothing."""
        self._stopping.set()
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
        """Hand a request over. Any thread.

        Raises
        ------
        Exhausted
            Too many requests wait already.
        Unavailable
            The engine is not running.
        """
        output = _Output(
            sampler=Sampler(request.sampling),
            detokenizer=Detokenizer(self._codec, request.sampling.stop),
        )
        with self._lock:
            num_waiting = self._num_unread + len(self._scheduler.waiting)
            if num_waiting >= self._max_waiting:
                raise Exhausted(
                    f"{num_waiting} requests wait already, and at most {self._max_waiting} may: "
                    "try again later"
                )
            self._put(lambda: self._accept(request, output))
            self._num_unread += 1

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between steps and return its future result. Any thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._put(run)
        return future

    def _put(self, job: Callable[[], None]) -> None:
        """Put a job into the inbox; with the lock held."""
        if not self._open:
            raise Unavailable("the engine is not running")
        self._inbox.put(job)

    def _accept(self, request: Request, output: _Output) -> None:
        residency = self._scheduler.residency
        request.resident = residency is None or residency.can_pin(request.mix)
        self._outputs[request] = output
        self._scheduler.add(request)
        with self._lock:
            self._num_unread -= 1

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.alive_at_s = time.monotonic()
                self._drain(block=not self._turn())
        except BaseException as error:
            self._failure = error
            _log.exception("engine_failed")
        self._abandon()

    def _drain(self, *, block: bool) -> None:
        try:
            pause_s = _WAITING_S if self._scheduler.waiting else _IDLE_S
            job = self._inbox.get(timeout=pause_s) if block else self._inbox.get_nowait()
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
            try:
                self._take_token(request, logits[row], now_s)
            except Exception as error:
                self._fail(request, error)
        return True

    def _take_token(self, request: Request, logits: np.ndarray, now_s: float) -> None:
        output = self._outputs[request]
        token = output.sampler.sample(logits)
        if token is None:
            raise _not_finite(request)
        if request.num_generated == 0:
            request.first_token_s = now_s
            request.send(Started(resident=request.resident, prompt_tokens=request.prompt_length))
        request.tokens.append(token)
        ended = token in self._eos_ids and not request.sampling.ignore_eos
        text = "" if ended else output.detokenizer.push(token)
        full = request.num_generated >= request.sampling.max_tokens
        if not (ended or full or output.detokenizer.stopped):
            request.send(Delta(token_ids=(token,), text=text))
            return
        text += output.detokenizer.flush()
        request.send(Delta(token_ids=(token,), text=text))
        stopped = ended or output.detokenizer.stopped
        self._finish(request, FinishReason.STOP if stopped else FinishReason.LENGTH, now_s)

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._scheduler.finish(request)
        del self._outputs[request]
        request.send(
            Finished(
                reason=reason,
                completion_tokens=request.num_generated,
                queue_s=request.admitted_s - request.arrived_s,
                ttft_s=request.first_token_s - request.arrived_s,
                decode_s=now_s - request.first_token_s,
            )
        )

    def _fail(self, request: Request, error: Exception) -> None:
        """End one running request with an error; its neighbours go on."""
        if not isinstance(error, LorafleetError):
            _log.error("request_failed", exc_info=error)
            error = Internal(f"the request failed: {error!r}")
        self._scheduler.finish(request)
        del self._outputs[request]
        request.send(Failed(error=error))

    def _forget_gone(self) -> None:
        """Drop the outputs of requests that were cancelled or failed."""
        live = len(self._scheduler.waiting) + len(self._scheduler.running)
        if live != len(self._outputs):
            present = {*self._scheduler.waiting, *self._scheduler.running}
            self._outputs = {r: out for r, out in self._outputs.items() if r in present}

    def _abandon(self) -> None:
        """Leave nobody waiting, and nothing held."""
        error: LorafleetError = (
            Unavailable("the engine was stopped")
            if self._failure is None
            else Internal(f"the engine failed: {self._failure!r}")
        )
        with self._lock:
            self._open = False
        self._drain(block=False)
        for request in self._outputs:
            request.send(Failed(error=error))
        if self._scheduler.residency is not None:
            self._scheduler.residency.abandon(error)
        self._scheduler.waiting.clear()
        for request in list(self._scheduler.running):
            self._scheduler.finish(request)


def _not_finite(request: Request) -> LorafleetError:
    message = "the logits are not finite"
    if not request.mix:
        return Internal(f"{message}: the base model is broken")
    names = ", ".join(version for version, _ in request.mix)
    return InvalidAdapter(f"{message} with adapter {names}: its weights overflow", adapter=names)
