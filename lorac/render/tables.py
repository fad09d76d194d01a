"""What the runtime looks up in a backend's module, and whether what was rendered has it."""

import ast
import symtable

from lorac.errors import BuildError

_HINT = "templates/shared/tables.py.jinja renders ADD and KERNELS"


def check_tables(text: str, file: str, modules: list[str], experts: list[str]) -> None:
    """Raises BuildError where the module lacks a table, or one that is written out a function.

    `file` is the template that rendered it; `modules` and `experts` are the names of those it serves.
    """
    table = symtable.symtable(text, file, "exec")
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    needed = {"KERNELS": True, "ADD": bool(modules), "EXPERT_ADD": bool(experts), "MOE": bool(experts)}
    if lacking := [name for name, is_needed in needed.items() if is_needed and name not in bound]:
        raise BuildError(f"{file}: the module it renders defines no {' and no '.join(lacking)}; {_HINT}")
    for name, served in (("ADD", modules), ("EXPERT_ADD", experts)):
        missing = set(served) - _keys(text, name, set(served))
        if missing:
            raise BuildError(f"{file}: the {name} it renders has no function for {', '.join(sorted(missing))}; {_HINT}")


def _keys(text: str, name: str, otherwise: set[str]) -> set[str]:
    """The keys of a table that is written out as a dict; another expression is not looked into."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            if isinstance(node.value, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.value.keys):
                return {key.value for key in node.value.keys}
    return otherwise
