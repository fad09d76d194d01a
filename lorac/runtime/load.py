"""Loading a generated package: every file is read once, checked against the manifest, and run from those very bytes.

Python accepts stale bytecode when a file is rewritten within a second at the same size, and Triton reads kernel source
from disk: either would mix an old package with a new one. Here neither can happen.
"""

import hashlib
import importlib.abc
import importlib.machinery
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType

from lorac.runtime.errors import PackageError

FORMAT = 2  # of packages: what the runtime expects of their files


def load(folder: str | Path) -> ModuleType:
    """The package in `folder`, as a module. The same bytes in the same place load once.

    Raises PackageError for a folder that is no package, or whose files are not those its manifest lists.
    """
    folder = Path(folder).resolve()
    try:
        sources, digest = _read(folder)
    except PackageError:
        sources, digest = _read(folder)  # a build may have swapped the package between two files
    name = f"lorac_package_{folder.name}_{digest[:16]}"
    if name not in sys.modules:
        finder = _Finder(name, folder, sources)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module(name)
        except BaseException:
            sys.meta_path.remove(finder)
            raise
    return sys.modules[name]


def _read(folder: Path) -> tuple[dict[str, str], str]:
    """Texts by path, and a digest of them and of the place, from one reading of every file."""
    mend = "build it again with `lorac build`"
    if folder.is_file():
        raise PackageError(f"{folder} is a file, not the folder of a package; `lorac build SPEC` makes one of a spec")
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = manifest["files"]
        version = manifest["lorac"]
    except FileNotFoundError:
        raise PackageError(f"{folder} is no generated package: it has no manifest.json; {mend}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{folder}/manifest.json cannot be read ({error}); {mend}") from None
    if version != FORMAT:
        raise PackageError(f"{folder} is of format {version}, this runtime reads {FORMAT}; {mend}")
    sources = {}
    for path, expected in sorted(files.items()):
        try:
            data = (folder / path).read_bytes()
        except OSError as error:
            raise PackageError(f"{folder}/{path} is listed in the manifest but {error.strerror}; {mend}") from None
        if hashlib.sha256(data).hexdigest() != expected:
            raise PackageError(f"{folder}/{path} is not the file that was built; {mend}")
        sources[path] = data.decode()
    digest = hashlib.sha256(json.dumps([str(folder), files], sort_keys=True).encode()).hexdigest()
    return sources, digest


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and runs the modules of one loaded package from memory."""

    def __init__(self, name: str, folder: Path, sources: dict[str, str]):
        self.name, self.folder, self.sources = name, folder, sources

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name and not fullname.startswith(self.name + "."):
            return None
        file, is_package = self._file(fullname)
        if file is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(self.folder / file), is_package=is_package)
        spec.has_location = True
        return spec

    def get_source(self, fullname):
        return self.sources[self._file(fullname)[0]]

    def is_package(self, fullname):
        return self._file(fullname)[1]

    def exec_module(self, module):
        source = self.get_source(module.__name__)
        # Triton takes kernel source from linecache, its interpreter only when a kernel first runs: hence a name that no
        # other build has, and an entry without a time stamp, which is never read from disk again
        file = f"{module.__spec__.origin} ({self.name[-8:]})"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), module.__dict__)

    def _file(self, fullname: str) -> tuple[str | None, bool]:
        inner = fullname[len(self.name) + 1 :].replace(".", "/")
        package = f"{inner}/__init__.py".lstrip("/")
        if package in self.sources:
            return package, True
        return (f"{inner}.py", False) if f"{inner}.py" in self.sources else (None, False)
