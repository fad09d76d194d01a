"""Builds that are killed, run side by side, or cannot write: the old package or the new one, never a mixture."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from packages import ROOT, TINY, edition, package, tree

from lorac.emit import emit
from lorac.errors import BuildError


@pytest.mark.parametrize("how", ["exchange", "rename"])
def test_killed_at_every_step(how):
    script = [sys.executable, str(Path(__file__).with_name("die_at_every_step.py")), how]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 20


def test_eight_builds_at_once(tmp_path):
    command = [sys.executable, "-m", "lorac", "build", str(TINY), "--output", str(tmp_path / "together")]
    builds = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    errors = [build.communicate()[1] for build in builds]
    assert [build.returncode for build in builds] == [0] * 8, errors
    subprocess.run([*command[:-1], str(tmp_path / "alone")], cwd=ROOT, check=True)
    assert tree(tmp_path / "together" / "tiny") == tree(tmp_path / "alone" / "tiny")
    left = {path.name for path in (tmp_path / "together" / ".lorac").iterdir()}
    assert left <= {".gitignore", "tiny.lock", "tiny.stamp"}


@pytest.mark.parametrize("closed", [".", "p"], ids=["output", "package"])
def test_a_read_only_target_is_named_and_left_alone(closed):
    output = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users altogether
    try:
        emit(package(1), output / "p")
        shutil.rmtree(output / ".lorac")
        for place in (output, output / "p"):
            place.chmod(0o777)
        (output / closed).chmod(0o555)
        with unprivileged(), pytest.raises(BuildError, match=rf"{output}/p: not written: Permission denied"):
            emit(package(2), output / "p")
        assert edition(output / "p") == 1
        with unprivileged():
            assert not emit(package(1), output / "p"), "an unchanged package needs no permission to write"
    finally:
        shutil.rmtree(output)


def test_a_full_disk_changes_nothing(tmp_path):
    emit(package(1), tmp_path / "p")
    before = tree(tmp_path / "p")
    large = package(2) | {"layout.py": "x" * 5000}
    with (
        largest_file(1000),
        pytest.raises(BuildError, match="p: not written: File too large.*nothing there was changed"),
    ):
        emit(large, tmp_path / "p")
    assert tree(tmp_path / "p") == before
    assert sorted(path.name for path in (tmp_path / ".lorac").iterdir()) == [".gitignore", "p.lock"]


@contextmanager
def unprivileged():
    """As a user whom permissions stop."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@contextmanager
def largest_file(size: int):
    """Writing past `size` bytes fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
