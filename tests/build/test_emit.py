"""What a build writes, keeps, removes and refuses; and that the code it wrote is the code that runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import ROOT, edition, package, tree

from lorac.emit import CHANGED, EXTRA, MISSING, check, diff, emit
from lorac.errors import BuildError


@pytest.fixture
def folder(tmp_path) -> Path:
    """A package of edition 1 with one more file, `stale.py`."""
    emit(package(1, "stale.py"), tmp_path / "p")
    return tmp_path / "p"


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Identity and time of every file and folder below, and of the folder."""
    places = [folder, *folder.rglob("*")]
    return {str(place): (place.stat().st_ino, place.stat().st_mtime_ns) for place in places}


def test_a_new_package_is_exactly_its_files(tmp_path):
    changes = emit(package(1), tmp_path / "deep" / "p")
    assert tree(tmp_path / "deep" / "p") == package(1)
    assert sorted(changes.written) == sorted(package(1)) and not changes.removed


def test_an_unchanged_package_is_not_touched(folder):
    before = state(folder.parent)
    assert not emit(package(1, "stale.py"), folder)
    assert state(folder.parent) == before


def test_only_what_changed_is_new(folder):
    before = state(folder)
    files = package(1, "stale.py") | {"layout.py": "EDITION = 1  # otherwise\n"}
    assert emit(files, folder).written == ("layout.py",)
    after = state(folder)
    assert {path for path in before if before[path] != after[path] and Path(path).is_file()} == {f"{folder}/layout.py"}


def test_stale_files_go_and_the_users_stay(folder):
    (folder / "backends" / "mine.py").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("backends")
    (folder / "stale.py").chmod(0o444)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "stale.cpython-311.pyc").write_text("")
    changes = emit(package(2), folder)
    assert not (folder / "__pycache__").exists()
    assert changes.removed == ("stale.py",)
    assert edition(folder) == 2
    assert (folder / "backends" / "mine.py").read_text() == "mine"
    assert (folder / "empty").is_dir() and (folder / "link").readlink() == Path("backends")
    assert tree(folder).keys() == {*package(2), "backends/mine.py"}


def test_a_folder_left_empty_by_stale_files_goes_too(folder):
    emit(package(1, "old/one.py"), folder)
    assert (folder / "old").is_dir()
    emit(package(1), folder)
    assert not (folder / "old").exists()


@pytest.mark.parametrize("path", ["layout.py", "stale.py"], ids=["overwritten", "removed"])
def test_hand_edited_files_are_refused_unless_forced(folder, path):
    (folder / path).write_text("by hand")
    before = tree(folder)
    with pytest.raises(BuildError, match=rf"as lorac wrote them:\n  {path}\n.*--force"):
        emit(package(2), folder)
    assert tree(folder) == before
    emit(package(2), folder, force=True)
    assert tree(folder) == package(2)


def test_a_hand_edited_file_that_need_not_change_is_no_obstacle(folder):
    (folder / "layout.py").write_text(package(2)["layout.py"])
    emit(package(2), folder)
    assert edition(folder) == 2


def test_a_users_file_in_the_way_is_refused(folder):
    (folder / "new.py").write_text("mine")
    with pytest.raises(BuildError, match="\n  new.py\n"):
        emit(package(1, "new.py"), folder)
    assert (folder / "new.py").read_text() == "mine"


def test_without_a_manifest_nothing_counts_as_lorac_s(folder):
    (folder / "manifest.json").write_text("<<<<<<< ours")
    with pytest.raises(BuildError, match="backends/one.py\n"):
        emit(package(2), folder)
    emit(package(1), folder)  # nothing but the manifest would be overwritten
    assert edition(folder) == 1 and (folder / "stale.py").exists()


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a/./b", "", "a//b", "a\\b", "a\nb"])
def test_paths_stay_inside(tmp_path, path):
    with pytest.raises(BuildError, match="not a relative path inside it"):
        emit(package(1) | {path: "x"}, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_manifest_cannot_point_outside(folder):
    outside = folder.parent / "precious"
    outside.write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../precious"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert ("EXTRA", "../precious") not in check(package(1), folder)
    emit(package(2), folder)
    assert outside.read_text() == "x"


@pytest.mark.parametrize("place", [".", "backends"], ids=["package", "subfolder"])
def test_links_to_folders_are_not_followed(tmp_path, place):
    emit(package(1), tmp_path / "p")
    link = tmp_path / "p" / place
    os.rename(link, tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match="is a symbolic link"):
        emit(package(2), tmp_path / "p")
    assert "EDITION = 1" in (tmp_path / "elsewhere" / ("one.py" if place == "backends" else "layout.py")).read_text()


def test_a_link_to_a_file_counts_as_edited(folder):
    target = folder.parent / "target"
    os.rename(folder / "layout.py", target)
    (folder / "layout.py").symlink_to(target)
    with pytest.raises(BuildError, match="\n  layout.py\n"):
        emit(package(2), folder)
    emit(package(2), folder, force=True)
    assert edition(folder) == 2 and target.read_text() == "EDITION = 1\n"


def test_a_file_where_the_package_should_be_is_left(tmp_path):
    (tmp_path / "p").write_text("mine")
    with pytest.raises(BuildError, match="p is not a folder"):
        emit(package(1), tmp_path / "p")
    assert (tmp_path / "p").read_text() == "mine"


def test_check_and_diff_tell_the_differences(folder):
    (folder / "layout.py").unlink()
    (folder / "backends" / "one.py").write_text("by hand")
    rows = check(package(1), folder)
    assert rows == [
        (MISSING, "layout.py"),
        (CHANGED, "backends/one.py"),
        (CHANGED, "manifest.json"),
        (EXTRA, "stale.py"),
    ]
    before = tree(folder)
    patch = diff(package(1), folder)
    (folder.parent / "patch").write_text(patch)
    subprocess.run(["git", "apply", "patch"], cwd=folder.parent, check=True)  # an independent reader of unified diffs
    assert tree(folder) == package(1) != before


RUN = "import sys; sys.path.insert(0, sys.argv[1]); from p import layout; from p.backends import one; "
RUN += "print(layout.EDITION, one.EDITION)"


@pytest.mark.parametrize("cache", ["beside the code", "elsewhere"])
def test_a_rebuild_within_the_same_second_runs_the_new_code(tmp_path, cache):
    """Python takes bytecode for current when size and whole second of the source agree; both do here."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if cache == "elsewhere":
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path / "cache")
    for number in range(1, 7):
        emit(package(number), tmp_path / "p")
        command = [sys.executable, "-c", RUN, str(tmp_path)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(number)] * 2
    assert list(tmp_path.rglob("*.pyc")), "no bytecode was written, so none could have been stale"
