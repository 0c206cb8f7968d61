"""`lorafleet adapter mix`, `adapter convert`, `merge`: new adapters and base models, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.output import JsonOption, err, out, print_json
from lorafleet.core.errors import InvalidInput

DtypeOption = Annotated[
    str | None, typer.Option(help="float32, float16 or bfloat16; as the input's if not given.")
]


def mix(
    adapters: Annotated[
        list[str], typer.Argument(help="PEFT directories, each with an optional weight: DIR[=0.7].")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="The new PEFT directory.")],
    method: Annotated[
        str,
        typer.Option(
            help="cat and svd are exact sums; linear, ties, dare_linear, dare_ties and "
            "magnitude_prune are PEFT's; with _svd they work on the products."
        ),
    ] = "cat",
    density: Annotated[float, typer.Option(help="What pruning keeps, in (0, 1].")] = 1.0,
    sign: Annotated[str, typer.Option(help="TIES' majority: total or frequency.")] = "total",
    rank: Annotated[int | None, typer.Option(help="Rank of an svd result.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of DARE.")] = 0,
    dtype: DtypeOption = None,
    json: JsonOption = False,
) -> None:
    """Mix adapters into one, to be pushed or shipped.

    A request can name a weighted mix without any of this; see `lorafleet generate --help`.

    Examples: `lorafleet adapter mix a=0.7 b=0.3 --out ab`;
    `lorafleet adapter mix a b --method ties --density 0.3 --out ab`
    """
    from dataclasses import replace

    from lorafleet.adapters.mix import MixOptions, mix
    from lorafleet.adapters.modules import check_dtype, read_plain

    options = MixOptions(method=method, density=density, sign=sign, rank=rank, seed=seed)
    terms = [_weighted(text) for text in adapters]
    with err.status("mixing"):
        mixed = mix([read_plain(path) for path, _ in terms], [w for _, w in terms], options)
        if dtype is not None:
            mixed = replace(mixed, dtype=check_dtype(dtype))
        mixed.save(out_dir)
    ranks = sorted({module.rank for module in mixed.modules.values()})
    if json:
        print_json({"directory": str(out_dir), "modules": len(mixed.modules), "ranks": ranks})
    else:
        out.print(f"{out_dir}: {len(mixed.modules)} modules, rank {', '.join(map(str, ranks))}")


def convert(
    source: Annotated[
        Path, typer.Argument(help="A PEFT directory, or a .gguf file of a LoRA adapter.")
    ],
    out_path: Annotated[
        Path, typer.Option("--out", help="A new PEFT directory, or a new .gguf file.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The base model, for its heads' order; the default one if not given."),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read adapter_model.bin. It is read as tensors; code in it is refused, never run.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Convert an adapter between PEFT and GGUF, or from a pickle to safetensors.

    Examples: `lorafleet adapter convert ./my-adapter --out my-adapter.gguf`;
    `lorafleet adapter convert ./old --allow-pickle --out ./new`
    """
    from lorafleet.adapters.convert import read_any, write_any
    from lorafleet.adapters.gguf_lora import Heads
    from lorafleet.compiler import default_source, open_checkpoint

    config = open_checkpoint(model or default_source()).config
    heads = config["num_attention_heads"]
    order = Heads(query=heads, key=config.get("num_key_value_heads") or heads)
    adapter = read_any(source, order, allow_pickle=allow_pickle)
    write_any(adapter, out_path, order)
    if json:
        print_json({"path": str(out_path), "modules": len(adapter.modules)})
    else:
        out.print(f"{out_path}: {len(adapter.modules)} modules")


def merge(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A GGUF file or a HuggingFace directory; the default one if not given."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="PEFT directory with an optional scale, DIR[=0.7]; repeatable."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="The new HuggingFace directory.")] = Path(
        "merged"
    ),
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    json: JsonOption = False,
) -> None:
    """Merge adapters into a base model's weights; the result is a model like any other.

    Example: `lorafleet merge ./my-model --adapter ./pirate=0.8 --out ./pirate-model`
    """
    from rich.progress import Progress

    from lorafleet.adapters import load_adapter
    from lorafleet.adapters.merge import Merger
    from lorafleet.compiler import default_source, open_checkpoint
    from lorafleet.compiler.merge import describe, write_checkpoint

    if not adapter:
        raise InvalidInput("expected at least one --adapter DIR[=scale]", field="adapter")
    checkpoint = open_checkpoint(model or default_source())

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("finding the model's layers", total=None)
        base = describe(checkpoint)
        terms = [(load_adapter(path, base), scale) for path, scale in map(_weighted, adapter)]
        merger = Merger(terms, checkpoint.read)
        bar.update(task, description="merging", total=1.0)
        write_checkpoint(
            checkpoint,
            out_dir,
            merger.change,
            dtype=dtype,
            progress=lambda fraction: bar.update(task, completed=fraction),
        )
    if json:
        print_json({"directory": str(out_dir), "dtype": dtype, "adapters": list(adapter)})
    else:
        out.print(f"{out_dir}; compile it with `lorafleet compile {out_dir}`")


def _weighted(text: str) -> tuple[Path, float]:
    """`DIR` or `DIR=weight`."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return Path(text), 1.0
    try:
        return Path(path), float(weight)
    except ValueError:
        raise InvalidInput(
            f"{text!r}: expected DIR or DIR=weight, with a number as weight", field="adapter"
        ) from None
