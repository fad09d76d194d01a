"""Where lorac's own data lies: beside the package in a checkout, inside it when installed from a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE / "_data" if (_PACKAGE / "_data").is_dir() else _PACKAGE.parent


def templates_folder() -> Path:
    """The folder of templates: `package/`, `backends/<name>/`, `shared/`."""
    return _ROOT / "templates"


def presets_folder() -> Path:
    """The folder of model presets."""
    return _PACKAGE / "spec" / "presets"
