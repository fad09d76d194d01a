"""Small packages to write: each file says which edition it is, so a mixture of two shows."""

import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "specs" / "tiny.yaml"


def package(edition: int, *more: str) -> dict[str, str]:
    """A package of three files, and of those named in `more`, whose every file holds `EDITION = <edition>`."""
    files = {path: f"EDITION = {edition}\n" for path in ("__init__.py", "layout.py", "backends/one.py", *more)}
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    return files | {
        "manifest.json": json.dumps({"lorac": 1, "name": "p", "fingerprint": str(edition), "files": hashes})
    }


def edition(folder: Path) -> int:
    """The edition that a folder holds in full. Raises AssertionError for a mixture, or an incomplete one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = int(manifest["fingerprint"])
    expected = package(found, *manifest["files"])
    assert {path: (folder / path).read_text() for path in expected} == expected
    return found


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its text, bytecode aside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def copy_of_tiny(folder: Path, **replaced: str) -> Path:
    """The spec `tiny` in `folder`, with texts of it replaced: `name="name: tiny -> name: other"`."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = Path(shutil.copy(TINY, folder / "tiny.yaml"))
    text = spec.read_text()
    for change in replaced.values():
        before, after = change.split(" -> ")
        assert before in text
        text = text.replace(before, after)
    spec.write_text(text)
    return spec
