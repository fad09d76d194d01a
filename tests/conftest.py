"""Fixtures all tests share: Triton's interpreter, a fresh seed that a failure names, and packages built from specs."""

import json
import os
import random
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when first imported

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]

hypothesis.settings.register_profile("lorac", deadline=None, print_blob=True)
hypothesis.settings.load_profile("lorac")


@pytest.fixture
def seed() -> int:
    """Fresh for every test, unless LORAC_TEST_SEED repeats one; pytest shows what is printed where the test fails."""
    value = int(os.environ.get("LORAC_TEST_SEED") or random.randrange(1 << 31))
    print(f"to repeat: LORAC_TEST_SEED={value}")
    return value


@pytest.fixture
def generator(seed):
    """Torch's random numbers on the CPU, from the seed."""
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched; some tests have one of their own that notes more."""
    from lorac.runtime.launch import Kernel

    names, run = [], Kernel.run
    monkeypatch.setattr(Kernel, "run", lambda kernel, *a, **k: (names.append(kernel.name), run(kernel, *a, **k))[1])
    return names


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(spec) -> the loaded package of a spec, given as a file or as data; equal data is built once."""
    from lorac.compile import compile_spec
    from lorac.emit import emit
    from lorac.runtime.load import load

    folder = tmp_path_factory.mktemp("packages")
    built = {}

    def package(spec: Path | dict):
        key = str(spec) if isinstance(spec, Path) else json.dumps(spec)
        if key not in built:
            path = spec
            if isinstance(spec, dict):
                path = folder / f"{len(built)}.yaml"
                path.write_text(yaml_of(spec))
            compiled = compile_spec(path)
            target = folder / str(len(built)) / compiled.plan.name
            emit(compiled.files, target)
            built[key] = load(target)
        return built[key]

    return package


def yaml_of(data: dict) -> str:
    """Plain data as YAML. Keys may be numbers, which JSON does not have."""
    import yaml

    return yaml.safe_dump(data, sort_keys=False)
