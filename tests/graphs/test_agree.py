"""Ranks that agree: one answer for all, whatever each of them has to do; with real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import spec

from lorac.compile import compile_spec
from lorac.emit import emit
from lorac.runtime.errors import PackageError

SCRIPT = Path(__file__).parent / "agreeing_ranks.py"
RANKS = 3


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory):
    import yaml

    folder = tmp_path_factory.mktemp("agree")
    data = spec(
        graphs__agree=True, backends={"torch": {}, "csgmv": {"segments": {"by": "chunk", "chunk": {1: 16}, "floor": 1}}}
    )
    (folder / "spec.yaml").write_text(yaml.safe_dump(data))
    compiled = compile_spec(folder / "spec.yaml")
    emit(compiled.files, folder / "small")
    return folder / "small"


def test_ranks_settle_on_one_answer(package_folder, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, SCRIPT, str(package_folder), str(tmp_path / "store"), str(RANKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = {rank: [] for rank in range(RANKS)}
    for line in done.stdout.splitlines():
        if line.startswith("answer "):
            _, rank, answer = line.split(" ", 2)
            answers[int(rank)].append(answer)
    assert len(answers[0]) == 8 and answers[0] == answers[1] == answers[2]


def test_a_step_without_its_ranks_says_what_is_missing(package_folder):
    import lorac

    package = lorac.load(package_folder)
    with pytest.raises(PackageError, match="init_process_group"):
        package.Step(package.Slots("cpu"))
