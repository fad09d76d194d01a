"""A YAML file -> the pydantic model that describes it, or every problem of the file at its place."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lorac.errors import SpecError

from .source import Source, read_source
from .wording import problems_of

Described = TypeVar("Described", bound=BaseModel)


def read_described(path: Path, model: type[Described]) -> tuple[Source, Described]:
    """The file and its values. Raises SpecError with all problems of the file, placed as `file:line:column`."""
    source = read_source(path)
    try:
        described = model.model_validate(source.data)
    except ValidationError as error:
        found = problems_of(error, model, path.name)
        raise SpecError([*source.problems, *(source.place(problem) for problem in found)]) from None
    if source.problems:
        raise SpecError(list(source.problems))
    return source, described
