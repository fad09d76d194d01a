"""Every spec in failing/ is refused, when it is read or when it is planned, with exactly the message beside it."""

from pathlib import Path

import pytest

from lorac.compile import plan_spec
from lorac.errors import SpecError

FOLDER = Path(__file__).parent / "failing"
CASES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("case", CASES)
def test_message(case, monkeypatch):
    monkeypatch.chdir(FOLDER)
    with pytest.raises(SpecError) as caught:
        plan_spec(f"{case}.yaml")
    assert str(caught.value) + "\n" == (FOLDER / f"{case}.txt").read_text("utf-8")


def test_every_message_has_its_spec():
    assert len(CASES) > 30
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == CASES
