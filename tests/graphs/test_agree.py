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
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(package_folder), str(store), str(rank), str(RANKS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(outputs)
    answers = [[line for line in output.splitlines() if line.startswith("answer")] for output in outputs]
    assert len(answers[0]) == 8 and answers[0] == answers[1] == answers[2]


def test_a_step_without_its_ranks_says_what_is_missing(package_folder):
    import lorac

    package = lorac.load(package_folder)
    with pytest.raises(PackageError, match="init_process_group"):
        package.Step(package.Slots("cpu"))
