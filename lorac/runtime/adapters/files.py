"""The two files of an adapter folder, opened with suspicion: regular files, inside their folder, of a bounded size."""

import json
import os
import stat
from pathlib import Path

from lorac.runtime.errors import AdapterError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that git-lfs has yet to fetch
_MAX_CONFIG = 16 << 20  # an `all-linear` list over every expert of a large model takes a few MiB
_CONVERT = (
    "convert it with: python -c \"import torch, safetensors.torch as s; w = torch.load('adapter_model.bin', "
    "map_location='cpu', weights_only=True); s.save_file({k: v.contiguous() for k, v in w.items()}, "
    "'adapter_model.safetensors')\""
)


def member(folder: Path, name: str) -> Path:
    """The real path of one file of the folder.

    Raises AdapterError where it is absent, special, elsewhere, or a pointer that git-lfs left in its place.
    """
    if not folder.is_dir():
        raise AdapterError(f"adapter {folder}: not a folder; expected one with {CONFIG} and {WEIGHTS}")
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve()
        regular = stat.S_ISREG(os.stat(real).st_mode)
    except FileNotFoundError:
        raise AdapterError(f"adapter {folder}: {_absent(folder, name)}") from None
    except (OSError, RuntimeError) as error:
        raise AdapterError(f"adapter {folder}: {name} cannot be opened: {error}") from error
    if not regular:
        raise AdapterError(f"adapter {folder}: {name} is not a regular file")
    if not real.is_relative_to(home) and not _in_hub_cache(real, home):
        raise AdapterError(
            f"adapter {folder}: {name} is a link to {real}, outside its folder; copy the file here instead"
        )
    if _is_pointer(real):
        raise AdapterError(
            f"adapter {folder}: {name} is a git-lfs pointer, not the file itself; "
            "run `git lfs pull` in its repository, which fetches it"
        )
    return real


def read_json(folder: Path) -> dict:
    """The settings of adapter_config.json. Raises AdapterError unless it is one JSON object without repeated keys."""
    path = member(folder, CONFIG)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_CONFIG + 1)
        if len(data) > _MAX_CONFIG:
            raise ValueError(f"it is larger than {_MAX_CONFIG >> 20} MiB")
        return parse_object(data)
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"adapter {folder}: {CONFIG} cannot be read: {error or 'nested too deeply'}") from error


def parse_object(data: bytes) -> dict:
    """A JSON object. Raises ValueError for anything else, repeated keys included."""
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_repeats)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _no_repeats(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return value


def _is_pointer(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False  # whoever opens it to read it says why that fails


def _in_hub_cache(real: Path, home: Path) -> bool:
    # the Hugging Face cache keeps snapshots/<commit>/file as links into the blobs folder of the same repository
    return home.parent.name == "snapshots" and real.is_relative_to(home.parent.parent / "blobs")


def _absent(folder: Path, name: str) -> str:
    if name == WEIGHTS and (folder / "adapter_model.bin").exists():
        return f"only adapter_model.bin, which can run code when read; {_CONVERT}"
    found = sorted(entry.name for entry in folder.iterdir())[:8]
    return f"{name} is missing; the folder holds {', '.join(found) or 'nothing'}"
