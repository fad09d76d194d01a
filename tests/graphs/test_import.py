"""Importing a package costs little beyond torch and Triton, and leaves the compiler's dependencies alone."""

import compileall
import os
import subprocess
import sys
from pathlib import Path

import yaml
from serving import SPEC

from lorac.compile import compile_spec
from lorac.emit import emit

# In definitions of a dataclass, which is work of the same kind: milliseconds would measure how busy the machine is.
# Where one takes a third of a millisecond this is 30 ms.
LIMIT = 90
CODE = """
import dataclasses, sys, time
import torch, triton, triton.language, safetensors, torch.distributed

def timed(run):
    started = time.process_time()
    run()
    return time.process_time() - started

fields = list("abcdefgh")
define = lambda: [dataclasses.make_dataclass("Unit", fields, frozen=True) for _ in range(20)]
before = timed(define)
took = timed(lambda: __import__("imported_package"))
print(took / ((before + timed(define)) / 40))
print([name for name in ("pydantic", "jinja2", "yaml", "rich", "lorac.runtime.adapters") if name in sys.modules])
"""


def test_a_package_imports_quickly(tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    emit(compile_spec(tmp_path / "spec.yaml").files, tmp_path / "imported_package")
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}", "TRITON_INTERPRET": "0"}
    compileall.compile_dir(tmp_path / "imported_package", quiet=1)
    took = []
    while len(took) < 3 and not (took and min(took) < LIMIT):  # once is enough, unless the machine is busy
        done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        units, unwanted = done.stdout.splitlines()
        assert unwanted == "[]"
        took.append(float(units))
    assert min(took) < LIMIT, took
