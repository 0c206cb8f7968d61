"""Writing a model directory in MLC-LLM's format, whole or not at all.

    mlc-chat-config.json, tensor-cache.json + params_shard_*.bin   as MLC-LLM writes them
    tokenizer.json, tokenizer_config.json                          the checkpoint's
    lib/<target>.so                                                the compiled model
    lorafleet.json                                                 BaseModel, written last

Everything goes into a hidden folder beside the destination, which takes the destination's name when
it is complete: an interrupted compile leaves nothing that looks like a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.compiler.source import Checkpoint, open_checkpoint
from lorafleet.core.errors import AlreadyExists, InvalidInput
from lorafleet.core.model import DESCRIPTION_FILE, BaseModel

PAGE_ROWS = 8
"""Rank rows of a page: the smallest rank in common use, so that no adapter is padded by much."""

Progress = Callable[[str, float], None]
"""Receives the stage's name and the fraction done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What to compile for.

    `max_context` caps the model's own context window, in tokens. `lora` False makes the model that
    MLC-LLM would make: the same functions, no sites.
    """

    target: str = "llvm"
    lora: bool = True
    page_rows: int = PAGE_ROWS
    max_context: int = 8192


def compile_model(
    source: Path,
    out_dir: Path,
    *,
    options: CompileOptions | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> BaseModel:
    """Compile a GGUF file or a HuggingFace directory into `out_dir`.

    Raises
    ------
    AlreadyExists
        `out_dir` exists.
    InvalidInput, Unsupported
        The source cannot be read or is of a kind that is not supported; the field is named.
    """
    options = options or CompileOptions()
    out_dir = Path(out_dir).absolute()
    if out_dir.exists():
        raise AlreadyExists(f"{out_dir} exists; choose another directory", file=out_dir)
    checkpoint = open_checkpoint(source)
    work = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir(parents=True)
    try:
        base = _write(checkpoint, work, options, progress)
        os.replace(work, out_dir)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    progress("done", 1.0)
    return base


def _write(
    checkpoint: Checkpoint, work: Path, options: CompileOptions, progress: Progress
) -> BaseModel:
    from lorafleet.compiler.build import build_library, export
    from lorafleet.compiler.zoo import family as find_family

    progress("tracing the model", 0.0)
    family = find_family(checkpoint.config)
    context = min(family.context_window, options.max_context)
    exported = export(family, checkpoint, lora=options.lora, page_rows=options.page_rows)

    progress("writing weights", 0.1)
    digest = _write_weights(
        checkpoint,
        exported.parameters,
        family.weight_map(),
        work,
        lambda fraction: progress("writing weights", 0.1 + 0.4 * fraction),
    )

    progress("compiling", 0.5)
    library = Path("lib") / f"{options.target}.so"
    (work / "lib").mkdir()
    metadata = _metadata(checkpoint, family, exported, context, options)
    build_library(exported, metadata, options.target, work / library)

    progress("writing the description", 0.95)
    for name, content in checkpoint.tokenizer_files().items():
        (work / name).write_bytes(content)
    config = _chat_config(checkpoint, family, context, work)
    (work / "mlc-chat-config.json").write_text(json.dumps(config, indent=1))
    eos = checkpoint.config.get("eos_token_id")
    base = BaseModel(
        name=checkpoint.name,
        digest=digest,
        library=str(library),
        target=options.target,
        vocab_size=family.vocab_size,
        context_window=context,
        max_batch_tokens=metadata["prefill_chunk_size"],
        page_rows=options.page_rows,
        kv=family.kv_layout(),
        sites=exported.sites,
        extra={"eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos]},
    )
    (work / DESCRIPTION_FILE).write_text(base.to_json())
    return base


def _write_weights(
    checkpoint: Checkpoint,
    parameters: dict[str, tuple[int, ...]],
    weights: Any,
    work: Path,
    progress: Callable[[float], None],
) -> str:
    """Write the tensor cache and return the base's digest."""
    from tvm.contrib import tvmjs

    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for i, (name, shape) in enumerate(parameters.items()):
            origin = weights.origins[name]
            array = origin.make(*(checkpoint.read(source) for source in origin.sources))
            if array.shape != shape:
                raise InvalidInput(
                    f"{checkpoint.name}: {' + '.join(origin.sources)} has shape {array.shape}, "
                    f"expected {shape}",
                    tensor=origin.sources[0],
                )
            array = np.ascontiguousarray(array, dtype=np.float32)
            digest.update(f"{name} float32 {shape} ".encode())
            digest.update(hashlib.sha256(array.data).digest())
            yield name, array
            progress((i + 1) / len(parameters))

    count = sum(int(np.prod(shape)) for shape in parameters.values())
    with contextlib.redirect_stdout(io.StringIO()):  # it prints, whatever show_progress says
        tvmjs.dump_tensor_cache(
            arrays(),
            str(work),
            encode_format="raw",
            meta_data={"ParamSize": len(parameters), "ParamBytes": 4 * count, "BitsPerParam": 32.0},
            show_progress=False,
        )
    return f"sha256:{digest.hexdigest()}"


def _metadata(
    checkpoint: Checkpoint, family: Any, exported: Any, context: int, options: CompileOptions
) -> dict[str, Any]:
    """What the library says of itself: MLC-LLM's keys, and `lora`."""
    kv = family.kv_layout()
    return {
        "model_type": family.model_type,
        "quantization": "q0f32",
        "context_window_size": context,
        "sliding_window_size": -1,
        "attention_sink_size": -1,
        "prefill_chunk_size": 2048,
        "max_batch_size": 128,
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "kv_state_kind": "kv_cache",
        "kv_cache": {
            "num_hidden_layers": kv.num_layers,
            "num_attention_heads": kv.num_qo_heads,
            "num_key_value_heads": kv.num_kv_heads,
            "head_dim": kv.head_dim,
        },
        "params": [
            {"name": name, "shape": list(shape), "dtype": "float32", "preprocs": []}
            for name, shape in exported.parameters.items()
        ],
        "lora": {"page_rows": options.page_rows, "sites": [site.name for site in exported.sites]},
    }


def _chat_config(checkpoint: Checkpoint, family: Any, context: int, work: Path) -> dict[str, Any]:
    """mlc-chat-config.json."""
    config = checkpoint.config
    return {
        "version": "0.1.0",
        "model_type": family.model_type,
        "quantization": "q0f32",
        "model_config": config,
        "vocab_size": family.vocab_size,
        "context_window_size": context,
        "sliding_window_size": -1,
        "prefill_chunk_size": 2048,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "temperature": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "top_p": 1.0,
        "tokenizer_files": sorted(
            file.name for file in work.iterdir() if file.name.startswith("tokenizer")
        ),
        "pad_token_id": config.get("pad_token_id", config.get("eos_token_id")),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "model_task": "chat",
    }
