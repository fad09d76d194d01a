"""Plain YAML scalars by the core schema of YAML 1.2, whose numbers and booleans hold no surprises."""

import re

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_LEADING_ZEROS = re.compile(r"[-+]?0+[0-9]+")
_MAX_DIGITS = 40  # beyond any size; Python itself refuses to convert thousands of digits

Scalar = str | int | float | bool | None


class ScalarError(ValueError):
    """A scalar that reads as a number to one YAML version and as something else to another. `hint` mends it."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar. Raises ScalarError for leading zeros and for numbers of absurd length."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _LEADING_ZEROS.fullmatch(text):
        sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text.lstrip("+"))
        raise ScalarError(
            f"the number {_short(text)} has leading zeros, which YAML 1.1 reads as octal",
            f'write {sign}{_short(digits.lstrip("0") or "0")}, or "{_short(text)}" for a text',
        )
    if _INT.fullmatch(text) or _FLOAT.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ScalarError(f"the number {_short(text)} has {len(text)} characters", "no size is that large")
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        return float(text)
    if text.lower() in _SPECIAL:
        return float(_SPECIAL[text.lower()])
    return text


def _short(text: str) -> str:
    return text if len(text) <= 20 else text[:17] + "..."
