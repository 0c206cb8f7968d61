"""Many requests at once, shown as they stream in: the heart of `lorafleet demo`.

It owns the live view and the table of who served what. It knows a client, not the fleet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rich.live import Live
from rich.table import Table
from rich.text import Text

from lorafleet.cli.output import out
from lorafleet.core.errors import LorafleetError
from lorafleet.sdk import Client, Completion, Delta, Event, Sampling
from lorafleet.sdk.client import collect

_MAX_TOKENS = 40
_REFRESH_S = 0.1


def ask_all(client: Client, names: list[str], questions: tuple[str, ...], rounds: int) -> None:
    """All adapters at once, `rounds` times: texts as they stream in, then who served them."""
    served = Table("adapter", "replica", "resident", "first token", "tokens/s", title="who served")
    with ThreadPoolExecutor(len(names)) as pool:
        for turn in range(rounds):
            streams = [
                _Stream(name, questions[(turn + i) % len(questions)])
                for i, name in enumerate(names)
            ]
            jobs = [pool.submit(stream.run, client) for stream in streams]
            with Live(console=out, auto_refresh=False, transient=False) as live:
                while True:
                    done = all(job.done() for job in jobs)
                    live.update(_texts(streams), refresh=True)
                    if done:
                        break
                    time.sleep(_REFRESH_S)
            if not out.is_terminal:
                out.print()  # Live ends its last line on terminals only
            for stream, job in zip(streams, jobs, strict=True):
                answer = job.result()
                served.add_row(
                    stream.name,
                    answer.replica,
                    "yes" if answer.resident else "no, loaded",
                    f"{1000 * answer.ttft_s:.0f} ms",
                    f"{answer.tokens_per_s:.1f}",
                )
    out.print(served)


def ask_unknown(client: Client) -> None:
    """Show what a name that nobody registered gets."""
    try:
        client.chat([("user", "Hello")], adapter="no-such-adapter")
    except LorafleetError as error:
        out.print(
            f"an unknown adapter is never answered by the base: {error.code}: {error.message}"
        )


class _Stream:
    """One request, and its text so far."""

    def __init__(self, name: str, question: str) -> None:
        self.name = name
        self.question = question
        self.text = ""

    def run(self, client: Client) -> Completion:
        events = client.chat_stream(
            [("user", self.question)], adapter=self.name, sampling=Sampling(max_tokens=_MAX_TOKENS)
        )
        return collect(self._seen(events))

    def _seen(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Delta):
                self.text += event.text
            yield event


def _texts(streams: list[_Stream]) -> Table:
    table = Table.grid(padding=(0, 1))
    for stream in streams:
        table.add_row(
            Text(stream.name, style="bold cyan"),
            Text(stream.question, style="dim"),
            Text(" ".join(stream.text.split())),
        )
    return table
