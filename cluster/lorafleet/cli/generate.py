"""`lorafleet generate` and `lorafleet chat`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lorafleet.cli.output import (
    GatewayOption,
    JsonOption,
    err,
    out,
    print_json,
    print_json_line,
)

if TYPE_CHECKING:
    from lorafleet.sdk import Event

AdapterOption = Annotated[
    str,
    typer.Option(
        "--adapter", "-a", help="`name`, `name@alias` or `name@sha256:…`; the base if not given."
    ),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")
]
TopPOption = Annotated[float, typer.Option(help="Nucleus sampling: in (0, 1].")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or to answer with --chat.")],
    adapter: AdapterOption = "",
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Likeliest tokens only, whatever the temperature.")
    ] = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Show tokens as they come: text does so unless told not to, --json then prints "
            "one object a line for each event.",
        ),
    ] = None,
    gateway: GatewayOption = None,
    json: JsonOption = False,
) -> None:
    """Generate text, streamed as it comes.

    Examples: `lorafleet generate "Once upon a time" --temperature 0.8 --seed 1`;
    `lorafleet generate "What is the capital of Spain?" --adapter pirate --chat --json`
    """
    from lorafleet.sdk import Client, Sampling
    from lorafleet.sdk.client import collect

    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_p=top_p,
        seed=seed,
    )
    with Client(gateway=gateway) as client:
        events = (
            client.chat_stream([("user", prompt)], adapter=adapter, sampling=sampling)
            if chat
            else client.generate(prompt, adapter=adapter, sampling=sampling)
        )
        if json and stream:
            for event in events:
                print_json_line({"event": type(event).__name__.lower(), **asdict(event)})
        elif json:
            print_json(collect(events).to_dict())
        elif stream is False:
            out.print(collect(events).text, markup=False)
        else:
            _print_stream(events)


def chat(
    adapter: AdapterOption = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    gateway: GatewayOption = None,
) -> None:
    """Talk to a model; Ctrl-C cuts an answer short, an empty line or Ctrl-D ends the talk.

    Example: `lorafleet chat --adapter pirate --system "You are brief."`
    """
    from lorafleet.sdk import Client, Sampling

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    turns: list[tuple[str, str]] = [("system", system)] if system else []
    with Client(gateway=gateway) as client:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            if not line:
                return
            turns.append(("user", line))
            events = client.chat_stream(turns, adapter=adapter, sampling=sampling)
            turns.append(("assistant", _print_stream(events, cut_by_ctrl_c=True)))


def _print_stream(events: Iterator[Event], *, cut_by_ctrl_c: bool = False) -> str:
    """Print text as it comes and, after it, who served it; return the text."""
    from lorafleet.sdk import Delta, Started

    text, started = "", None
    try:
        for event in events:
            if isinstance(event, Started):
                started = event
            elif isinstance(event, Delta):
                text += event.text
                out.print(event.text, end="", markup=False)
    except KeyboardInterrupt:
        if not cut_by_ctrl_c:
            raise
    out.print()
    if started is not None:
        where = "resident" if started.resident else "loaded for this request"
        err.print(f"[dim]{started.replica}, {where}[/dim]")
    return text
