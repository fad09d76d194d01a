"""What is wrong with one adapter, collected so that its owner sees everything at once."""

from lorac.runtime.errors import AdapterError

_SHOWN = 3  # names shown of those that share a problem
_LINES = 20  # problems shown of one adapter


class Problems:
    """Problems of one adapter folder. Those with the same wording are one line that names its tensors."""

    def __init__(self, folder: object):
        self.folder = str(folder)
        self.found: dict[str, list[str]] = {}

    def add(self, message: str, name: str = "") -> None:
        """Note a problem; `name` is the tensor it concerns, if it is about one."""
        names = self.found.setdefault(message, [])
        if name:
            names.append(name)

    def lines(self) -> list[str]:
        """One line per problem, with the names of the tensors concerned."""
        shown = []
        for message, names in self.found.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown.append(message + (f" ({', '.join(names[:_SHOWN])}{more})" if names else ""))
        return shown

    def raise_if_any(self) -> None:
        """Raises AdapterError with everything found so far."""
        lines = self.lines()
        if not lines:
            return
        if len(lines) > _LINES:
            lines = [*lines[:_LINES], f"and {len(lines) - _LINES} more problems"]
        raise AdapterError(f"adapter {self.folder} cannot be served:" + "".join(f"\n  - {line}" for line in lines))
