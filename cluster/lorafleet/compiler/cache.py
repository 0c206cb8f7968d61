"""Compiled models by what they were made from: the second start takes no compile.

The key covers the source's bytes, the options, and the code that compiles; a folder under that key
is complete by construction (see `package`).
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from lorafleet.compiler.package import CompileOptions, Progress, compile_model
from lorafleet.compiler.source import default_source
from lorafleet.core.home import models_dir
from lorafleet.core.model import DESCRIPTION_FILE


def ensure_compiled(
    source: Path | None = None,
    *,
    options: CompileOptions | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> Path:
    """Return the compiled model's directory, compiling it first if need be.

    Parameters
    ----------
    source : Path, optional
        GGUF file or HuggingFace directory; the default base model if None. A directory that is
        already compiled is returned as it is.
    """
    if source is not None and (Path(source) / DESCRIPTION_FILE).is_file():
        return Path(source)
    source = Path(source) if source is not None else default_source()
    options = options or CompileOptions()
    directory = models_dir() / f"{source.name.split('.')[0]}-{_key(source, options)}"
    if (directory / DESCRIPTION_FILE).is_file():
        return directory
    models_dir().mkdir(parents=True, exist_ok=True)
    # Whoever comes second waits for the first and finds its result.
    with FileLock(directory.with_suffix(".lock")):
        if not (directory / DESCRIPTION_FILE).is_file():
            for partial in models_dir().glob(f".{directory.name}.*.partial"):
                shutil.rmtree(partial)  # left by a process that was killed
            compile_model(source, directory, options=options, progress=progress)
    return directory


def _key(source: Path, options: CompileOptions) -> str:
    digest = hashlib.sha256(repr(sorted(asdict(options).items())).encode())
    digest.update(metadata.version("apache-tvm").encode())
    for code in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(code.read_bytes())
    files = [source] if source.is_file() else sorted(path for path in source.iterdir())
    for file in files:
        # Name, size and time stand for the bytes: reading gigabytes at every start would be felt.
        state = file.stat()
        digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
