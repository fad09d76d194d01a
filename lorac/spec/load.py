"""One spec file -> SpecFile, or every problem of the file at its place."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lorac.errors import Problem, SpecError

from .model import model_shapes
from .rules import adapter_rules, backend_rules, decode_rules, name_rules, prefill_rules, target_rules
from .schema import Adapters, Backend, Decode, Model, Prefill, Spec
from .shapes import Shapes
from .source import Source, read_source
from .wording import problems_of

Block = TypeVar("Block", bound=BaseModel)


@dataclass(frozen=True)
class SpecFile:
    """A valid spec with the model shapes it stands for and the file it was read from."""

    spec: Spec
    shapes: Shapes
    source: Source

    @property
    def folder(self) -> Path:
        """The folder that relative paths of the spec start from."""
        return Path(self.source.file).parent


def load_spec(path: str | Path) -> SpecFile:
    """Reads and checks a spec. Raises SpecError with all problems of the file, placed as `file:line:column`."""
    source = read_source(path)
    spec, shapes, found = _examine(source.data, Path(source.file).parent)
    problems = [*source.problems, *(source.place(problem) for problem in found)]
    if problems or spec is None or shapes is None:
        raise SpecError(problems)
    return SpecFile(spec, shapes, source)


def spec_from_data(data: dict[str, Any], folder: Path = Path()) -> tuple[Spec, Shapes]:
    """As load_spec, from plain data: paths start from `folder`, and the problems of the SpecError have no place."""
    spec, shapes, found = _examine(data, folder)
    if found or spec is None or shapes is None:
        raise SpecError(found)
    return spec, shapes


def _examine(data: dict[str, Any], folder: Path) -> tuple[Spec | None, Shapes | None, list[Problem]]:
    """The spec, the shapes, and every problem."""
    spec, found = None, []
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        found = problems_of(error, Spec)
    shapes, broken = _check(data, folder)
    return spec, shapes, found + broken


def _check(data: dict[str, Any], folder: Path) -> tuple[Shapes | None, list[Problem]]:
    """The model's shapes and what breaks the rules across fields.

    Every block that is valid by itself is checked, whatever is wrong with the others: one run finds everything.
    """
    problems: list[Problem] = []
    shapes = None
    model = _valid(Model, data, "model")
    if model:
        try:
            shapes = model_shapes(model, folder)
        except SpecError as error:
            problems += [replace(problem, path=problem.path or ("model",)) for problem in error.problems]
    if isinstance(data.get("name"), str):
        problems += name_rules(data["name"], ("name",))
    backends = data.get("backends") if isinstance(data.get("backends"), dict) else {}
    known = {name: _valid(Backend, backends, name) for name in backends if isinstance(name, str)}
    problems += backend_rules({name: backend for name, backend in known.items() if backend}, folder)
    adapters = _valid(Adapters, data, "adapters")
    if adapters:
        problems += adapter_rules(adapters, shapes)
    graphs = data.get("graphs") if isinstance(data.get("graphs"), dict) else {}
    if decode := _valid(Decode, graphs, "decode"):
        problems += decode_rules(decode, adapters)
    if prefill := _valid(Prefill, graphs, "prefill"):
        problems += prefill_rules(prefill)
    if isinstance(data.get("targets"), list):
        problems += target_rules(data["targets"])
    return shapes, problems


def _valid(block: type[Block], data: dict[str, Any], key: str) -> Block | None:
    try:
        return block.model_validate(data[key])
    except (KeyError, ValidationError):
        return None
