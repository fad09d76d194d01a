"""PEFT's rules for matching module names, and a guard: an adapter's regex must not be able to stall a server."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from re import _parser as tree  # the only way to see a pattern's structure short of parsing it again

_NAME_LENGTH = 64  # of a module name, about
_MAX_STEPS = 2e7  # of one match: about a second
_MAX_SECONDS = 10.0  # of all matches of one pattern
_LITERAL = re.compile(r"[\w.\-]+")


class Pattern:
    """A compiled regex of an adapter's config. Raises ValueError if it is invalid or could take exponential time."""

    def __init__(self, text: str):
        try:
            compiled = re.compile(text)
            steps = _steps(tree.parse(text))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{text[:200]!r} is not a regex: {error}") from error
        if steps > _MAX_STEPS:
            raise ValueError(f"the regex {text[:200]!r} could take exponential time; list the modules instead")
        self._compiled, self._seconds = compiled, _MAX_SECONDS

    def fullmatch(self, name: str) -> re.Match | None:
        """The match of the whole name."""
        return self._timed(self._compiled.fullmatch, name)

    def match(self, name: str) -> re.Match | None:
        """The match at the name's beginning."""
        return self._timed(self._compiled.match, name)

    def _timed(self, how, name: str) -> re.Match | None:
        if self._seconds < 0:
            raise ValueError(f"the regex {self._compiled.pattern[:200]!r} takes too long; list the modules instead")
        start = time.monotonic()
        found = how(name)
        self._seconds -= time.monotonic() - start
        return found


class PatternTable:
    """A rank_pattern or alpha_pattern: the first key that matches as `(.*\\.)?(key)$`, in the file's order, wins."""

    def __init__(self, values: Mapping[str, float]):
        self.values = dict(values)
        self._regexes: list[tuple[int, Pattern]] = []
        # Literal keys are looked up instead of tried: there can be one per expert of every layer. In a regex a dot
        # matches any character, so keys are grouped by where their dots stand and names are masked there.
        self._literals: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        for order, key in enumerate(self.values):
            if _LITERAL.fullmatch(key):
                dots = tuple(position for position, char in enumerate(key) if char == ".")
                self._literals.setdefault((len(key), dots), {}).setdefault(key, order)
            else:
                self._regexes.append((order, Pattern(rf"(.*\.)?({key})$")))
        self._keys = list(self.values)

    def lookup(self, name: str) -> float | None:
        """The value of the first key that matches the module's name."""
        hits = [order for order in map(lambda group: self._literal(group, name), self._literals) if order is not None]
        first = min(hits, default=len(self._keys))
        for order, pattern in self._regexes:
            if order > first:
                break
            if pattern.match(name):
                first = order
                break
        return self.values[self._keys[first]] if first < len(self._keys) else None

    def _literal(self, group: tuple[int, tuple[int, ...]], name: str) -> int | None:
        length, dots = group
        start = len(name) - length
        if start < 0 or (start and name[start - 1] != "."):
            return None
        tail = list(name[start:])
        for dot in dots:
            tail[dot] = "."
        return self._literals[group].get("".join(tail))


class Targets:
    """target_modules, exclude_modules, layers_to_transform and layers_pattern, as PEFT applies them to names."""

    def __init__(
        self,
        modules: Sequence[str] | str,
        exclude: Sequence[str] | str = (),
        layers: Sequence[int] | None = None,
        layers_pattern: Sequence[str] = (),
    ):
        self.everything = isinstance(modules, str) and modules.lower() == "all-linear"
        self._modules = Pattern(modules) if isinstance(modules, str) else frozenset(modules)
        self._exclude = Pattern(exclude) if isinstance(exclude, str) and exclude else frozenset(exclude)
        # PEFT applies layers_to_transform to lists only, and there to entries that are tails of names
        self._layers = frozenset(layers) if layers and not isinstance(modules, str) else None
        named = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in layers_pattern]
        self._layer = [Pattern(text) for text in named or [r".*?\.[^.]*\.(?P<idx>\d+)\."]] if self._layers else []

    def matches(self, name: str) -> bool:
        """Whether PEFT puts LoRA on the module of that name."""
        if _among(self._exclude, name):
            return False
        if not self.everything and not _among(self._modules, name):
            return False
        # a module listed by its whole name is meant in whatever layer: lm_head, which is in none
        return self._layers is None or name in self._modules or self._layer_of(name) in self._layers

    def _layer_of(self, name: str) -> int | None:
        found = next(filter(None, (pattern.match(name) for pattern in self._layer)), None)
        return int(found["idx"]) if found else None


def _among(names: frozenset[str] | Pattern, name: str) -> bool:
    if isinstance(names, Pattern):
        return names.fullmatch(name) is not None
    while name not in names:  # an entry equals the name or its dotted tail
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True


def _steps(parsed, repeated: bool = False) -> float:
    """An estimate of the steps a failing match can take on a module's name; infinite for a choice inside a repeat."""
    choices, repeats = 1.0, 0
    for op, argument in parsed:
        kind = str(op)
        if kind.endswith("_REPEAT"):
            low, high, inner = argument
            if repeated and low != high:
                return math.inf
            choices *= _steps(inner, repeated or high > 1) * (2 if (low, high) == (0, 1) else 1)
            repeats += high > 1 and low != high
        elif kind == "BRANCH":
            if repeated:
                return math.inf
            # alternatives without a choice of their own are told apart by their first letters
            choices *= max(2.0, sum(steps for steps in map(_steps, argument[1]) if steps > 1))
        elif kind in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT"):
            choices *= _steps(argument if kind == "ATOMIC_GROUP" else argument[-1], repeated)
        elif kind == "GROUPREF_EXISTS":
            choices *= sum(_steps(branch, repeated) for branch in argument[1:] if branch)
    return choices * _NAME_LENGTH**repeats / math.factorial(min(repeats, 100))
