"""The journal of a search: a line of JSON for what is measured together, as it is made, so that it can be resumed."""

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
        self.past: list[tuple[Site, dict[Launch, Result]]] = list(self._read()) if resume and file.exists() else []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open("w" if not self.past else "a", encoding="utf-8")
        except OSError as error:
            raise BuildError(f"{file} cannot be written ({error.strerror}): tables lie beside their spec") from None
        if not self.past:
            self._write(self._head)
        elif not file.read_bytes().endswith(b"\n"):
            self._stream.write("\n")

    def add(self, site: Site, results: dict[Launch, Result]) -> None:
        """Note what was measured together at once."""
        pairs = [[asdict(launch), asdict(result)] for launch, result in results.items()]
        self._write({"site": asdict(site), "results": pairs})

    def close(self) -> None:
        """Close the file, which stays."""
        self._stream.close()

    def _write(self, entry: dict) -> None:
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()

    def _read(self) -> Iterator[tuple[Site, dict[Launch, Result]]]:
        head, *lines = self.file.read_text(encoding="utf-8").splitlines() or ["{}"]
        if _parsed(head) != self._head:
            raise BuildError(
                f"{self.file} was measured on another GPU or for other kernels: search again without --resume"
            )
        for line in lines:
            entry = _parsed(line)
            if entry:  # the last line may have been cut off
                pairs = [map(_tuples, pair) for pair in entry["results"]]
                yield Site(**entry["site"]), {Launch(**launch): Result(**result) for launch, result in pairs}


def _tuples(values: object) -> object:
    """JSON has lists alone."""
    if isinstance(values, dict):
        return {name: _tuples(of) for name, of in values.items()}
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


def _parsed(line: str) -> dict:
    try:
        return json.loads(line)
    except ValueError:
        return {}
