"""Writing a package: everything or nothing, touching only what changed, and never a file that is not lorac's.

The manifest lists the files lorac owns, with their hashes. A package is replaced as a whole (see `swap`); unchanged
files and the user's own are hard-linked into the new folder, so they stay the same files with the same times.
"""

import difflib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lorac.errors import BuildError
from lorac.fingerprint import sha256
from lorac.swap import exclusive, has_leftovers, swap

MANIFEST = "manifest.json"
CHANGED, MISSING, EXTRA = "CHANGED", "MISSING", "EXTRA"
Row = tuple[str, str]  # one of the three, and a path inside the package


@dataclass(frozen=True)
class Changes:
    """What a build did: paths inside the package."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.written or self.removed)


def emit(files: dict[str, str], folder: Path, force: bool = False) -> Changes:
    """Make `folder` hold `files` (path to text; among them the manifest), beside whatever else is the user's.

    Raises BuildError, with everything left as it was, where the folder cannot be written, a path leaves it, or (unless
    forced) a file that would be overwritten or removed is not as lorac wrote it.
    """
    try:
        _refuse_places(files, folder)
        if not check(files, folder) and not has_leftovers(folder):
            return Changes()
        with exclusive(folder) as staged:
            rows = check(files, folder)
            if rows:
                if not force:
                    refuse_edited(rows, folder)
                _stage(files, folder, staged, {path for _, path in rows})
                swap(staged, folder)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise BuildError(f"{folder}: not written: {error.strerror}{place}; nothing there was changed") from error
    return Changes(
        tuple(path for kind, path in rows if kind != EXTRA), tuple(path for kind, path in rows if kind == EXTRA)
    )


def check(files: dict[str, str], folder: Path) -> list[Row]:
    """How the folder differs from `files`: CHANGED, MISSING, or EXTRA: owned by its manifest, and not in `files`.

    Raises BuildError for a file that cannot be read.
    """
    rows = []
    for path, text in files.items():
        content = _content(folder / path)
        if content != text.encode():
            rows.append((MISSING if content is None else CHANGED, path))
    stale = sorted(set(owned_files(folder)) - set(files))
    return rows + [(EXTRA, path) for path in stale if os.path.lexists(folder / path)]


def diff(files: dict[str, str], folder: Path) -> str:
    """What a build would change, as a unified diff with paths that begin with the package's name."""
    parts = []
    for kind, path in check(files, folder):
        before = "" if kind == MISSING else (_content(folder / path) or b"").decode(errors="replace")
        place = f"{folder.name}/{path}"
        names = "/dev/null" if kind == MISSING else f"a/{place}", "/dev/null" if kind == EXTRA else f"b/{place}"
        after = files.get(path, "")
        for line in difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def refuse_edited(rows: list[Row], folder: Path) -> None:
    """Raises BuildError where making up for the rows would discard what somebody wrote."""
    if edited := edited_files(rows, folder):
        listed = "".join(f"  {path}\n" for path in edited)
        hint = "move the changes into the spec or a template; build with --force to discard them"
        raise BuildError(f"{folder}: not written, for files there are not as lorac wrote them:\n{listed}  hint: {hint}")


def edited_files(rows: list[Row], folder: Path) -> list[str]:
    """Those of the rows' files that are not as lorac wrote them: edited, or never lorac's."""
    owned = owned_files(folder)
    present = {path: _content(folder / path) for kind, path in rows if kind != MISSING and path != MANIFEST}
    return [path for path, content in present.items() if content is None or sha256(content) != owned.get(path)]


def owned_files(folder: Path) -> dict[str, str]:
    """Path to SHA-256 of the files that the folder's manifest lists; none where it has no readable manifest."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return {path: digest for path, digest in files.items() if _is_inside(path)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _refuse_places(files: dict[str, str], folder: Path) -> None:
    for path in files:
        if not _is_inside(path):
            raise BuildError(f"{folder}: a package has no place for {path!r}, which is not a relative path inside it")
    parents = {parent for path in files for parent in PurePosixPath(path).parents}
    for place in sorted(folder / parent for parent in parents):
        if place.is_symlink():
            raise BuildError(f"{place} is a symbolic link, and lorac writes no package through one; remove the link")
        if os.path.lexists(place) and not place.is_dir():
            raise BuildError(f"{place} is not a folder; move it away, or build to another --output")


def _is_inside(path: str) -> bool:
    return not any(part in ("", ".", "..") for part in path.split("/")) and "\\" not in path and path.isprintable()


def _content(file: Path) -> bytes | None:
    """A file's bytes, None where there is none. A link or a folder counts as content lorac has never written."""
    try:
        if file.is_symlink():
            return b"link to " + os.fsencode(os.readlink(file))
        return b"folder" if file.is_dir() else file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        hint = "make it readable, or remove it and build again"
        raise BuildError(f"{file} cannot be read: {error.strerror}; {hint}") from None


def _stage(files: dict[str, str], folder: Path, staged: Path, rewritten: set[str]) -> None:
    staged.mkdir()
    if folder.is_dir():
        _carry_over(folder, staged, rewritten)
        staged.chmod(folder.stat().st_mode & 0o7777)
    for path in files:
        if path in rewritten:
            _write(staged / path, files[path], folder / path)


def _carry_over(folder: Path, staged: Path, rewritten: set[str]) -> None:
    """Link every file but those rewritten or removed, and but bytecode, which belongs to the modules as they were."""
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        target = staged / inside
        if not folders and not names:
            target.mkdir(parents=True, exist_ok=True)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names + links:
            if (inside / name).as_posix() not in rewritten:
                target.mkdir(parents=True, exist_ok=True)
                _link(os.path.join(place, name), target / name)


def _link(source: str, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _write(file: Path, text: str, old: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode())
    if os.path.lexists(old):
        # Python takes bytecode for current when size and whole second agree, wherever it is kept: never the same second
        second = int(os.lstat(old).st_mtime) + 1
        if file.stat().st_mtime < second:
            os.utime(file, (second, second))
