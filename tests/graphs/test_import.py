"""Importing a package leaves out what the first step, the first graphs and the first adapter need, and the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from serving import SPEC

from lorac.compile import compile_spec
from lorac.emit import emit

IMPORTED = """
import sys, imported_package as package
print(sorted(name.partition(".")[2] for name in sys.modules if name.startswith("imported_package.")))
print([name for name in ("pydantic", "jinja2", "yaml", "rich", "lorac.runtime.adapters") if name in sys.modules])
"""


def test_importing_a_package_imports_its_layout_alone(tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    emit(compile_spec(tmp_path / "spec.yaml").files, tmp_path / "imported_package")
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['layout']", "[]"]


def test_the_rest_is_imported_by_its_name(build):
    package = build(SPEC)
    assert all(getattr(package, name) for name in package.__all__)
    assert package.DecodeGraphs is package.decode.DecodeGraphs
    assert package.PrefillGraphs is package.prefill.PrefillGraphs
    assert package.admission.admit is package.step.admit
    with pytest.raises(AttributeError, match="has no attribute 'Graphs'"):
        _ = package.Graphs


def test_a_step_on_a_cpu_compiles_nothing(build, monkeypatch):
    for module in ("package", "step"):
        monkeypatch.setattr(f"lorac.runtime.{module}.interpreted", lambda: False)
    package = build(SPEC)
    step = package.Step(package.Slots("cpu"), "torch")
    assert package.warm(step) == len(step.tables.ROUTE.launches)
    assert not step.tables.ROUTE._compiled
