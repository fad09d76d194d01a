"""What is committed and could drift: the generated packages, and the commands that people are told to run."""

import pytest
from packages import ROOT

from lorac.cli import main

PACKAGES = sorted(path.parent.name for path in ROOT.glob("generated/*/manifest.json"))


@pytest.mark.parametrize("name", sorted({"llama31_8b", "tiny", *PACKAGES}))
def test_packages_are_what_their_specs_give(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["build", "--check", f"specs/{name}.yaml"]) == 0, capsys.readouterr().out


def test_ci_runs_the_readmes_test_command():
    command = next(line.strip() for line in (ROOT / "README.md").read_text().splitlines() if "-m pytest" in line)
    assert command in map(str.strip, (ROOT / ".ci" / "run").read_text().splitlines())
