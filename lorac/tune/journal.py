"""The journal of a search: a line of JSON per measurement, written as it is made, so that it can be resumed."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lorac.errors import BuildError
from lorac.plan.model import Launch
from lorac.tune.search import Result
from lorac.tune.space import Site


class Journal:
    """Measurements on one GPU of the kernels of one fingerprint."""

    def __init__(self, file: Path, gpu: str, fingerprint: str, resume: bool):
        """Opens the file. Raises BuildError where that fails, or it is of another GPU or other kernels, to be resumed.

        Without `resume` the file begins anew.
        """
        self.file = file
        self._head = {"gpu": gpu, "kernels": fingerprint}
        self.past: list[tuple[Site, Launch, Result]] = list(self._read()) if resume and file.exists() else []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("w" if not self.past else "a", encoding="utf-8")
        except OSError as error:
            raise BuildError(f"{file} cannot be written ({error.strerror}): tables lie beside their spec") from None
        if not self.past:
            self._write(self._head)
        elif not file.read_bytes().endswith(b"\n"):
            self._stream.write("\n")

    def add(self, site: Site, launch: Launch, result: Result) -> None:
        """Note one measurement at once."""
        self._write({"site": asdict(site), "launch": asdict(launch), "result": asdict(result)})

    def close(self) -> None:
        """Close the file, which stays."""
        self._stream.close()

    def _write(self, entry: dict) -> None:
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()

    def _read(self) -> Iterator[tuple[Site, Launch, Result]]:
        head, *lines = self.file.read_text(encoding="utf-8").splitlines() or ["{}"]
        if _parsed(head) != self._head:
            raise BuildError(
                f"{self.file} was measured on another GPU or for other kernels: search again without --resume"
            )
        for line in lines:
            entry = _parsed(line)
            if entry:  # the last line may have been cut off
                launch = entry["launch"]
                tile = tuple((name, size) for name, size in launch["tile"])
                result = {name: tuple(of) if isinstance(of, list) else of for name, of in entry["result"].items()}
                yield Site(**entry["site"]), Launch(**(launch | {"tile": tile})), Result(**result)


def _parsed(line: str) -> dict:
    try:
        return json.loads(line)
    except ValueError:
        return {}
