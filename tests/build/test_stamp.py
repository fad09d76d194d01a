"""The early exit of an unchanged build: taken when nothing changed, and only then."""

import json
import os
import subprocess
import sys
import time

import pytest
from packages import ROOT, TINY, copy_of_tiny

from lorac import stamp
from lorac.cli import main

CONFIG = json.loads((ROOT / "lorac" / "spec" / "presets" / "llama-3.2-1b.json").read_text()) | {"num_hidden_layers": 1}


@pytest.fixture
def spec(tmp_path):
    """A built spec whose model is a config.json, and whose files were written long before the build."""
    model = TINY.read_text().split("model: ")[1].split("\n")[0]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = copy_of_tiny(tmp_path, model=f"{model} -> {{config: config.json}}")
    for file in tmp_path.iterdir():
        os.utime(file, (1e9, 1e9))
    build(path)
    return path


def build(spec):
    # others may be at work on lorac's own source: what counts here is that this build has read it as it is now
    assert main(["build", str(spec), "--output", str(spec.parent / "out"), "--quiet"]) == 0
    folder = spec.parent / "out" / "tiny"
    stamp.record(spec, [spec.parent / "config.json"], folder, time.time() + 1)


def is_fresh(spec) -> bool:
    return stamp.fresh_package(spec, spec.parent / "out") is not None


def test_nothing_changed(spec):
    assert stamp.fresh_package(spec, spec.parent / "out") == spec.parent / "out" / "tiny"


def test_a_copy_elsewhere_is_fresh_too(spec, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("tiny.yaml", "config.json", "out"):
        os.rename(tmp_path / name, moved / name)
    assert is_fresh(moved / "tiny.yaml")


@pytest.mark.parametrize("place", ["tiny.yaml", "config.json", "out/tiny/layout.py", "out/tiny/manifest.json"])
def test_a_changed_file_is_noticed_whatever_its_time(spec, place):
    file = spec.parent / place
    before = file.stat()
    file.write_text(file.read_text().replace("e", "f", 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_fresh(spec)


@pytest.mark.parametrize("place", ["config.json", "out/tiny/layout.py", "out/.lorac/tiny.stamp"])
def test_a_lost_file_is_noticed(spec, place):
    (spec.parent / place).unlink()
    assert not is_fresh(spec)


def test_a_changed_template_is_noticed(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(stamp, "templates_folder", lambda: tmp_path / "templates")
    (tmp_path / "templates").mkdir()
    build(spec)
    assert is_fresh(spec)
    (tmp_path / "templates" / "new.py.jinja").write_text("")
    assert not is_fresh(spec)


def test_leftovers_of_a_killed_build_are_not_skipped(spec):
    (spec.parent / "out" / ".lorac" / "tiny.new").mkdir()
    assert not is_fresh(spec)


def test_a_file_saved_during_the_build_leaves_no_stamp(spec):
    folder = spec.parent / "out" / "tiny"
    (spec.parent / "out" / ".lorac" / "tiny.stamp").unlink()
    (spec.parent / "config.json").write_text(json.dumps(CONFIG))
    stamp.record(spec, [spec.parent / "config.json"], folder, started=time.time() - 1)
    assert not is_fresh(spec)


def test_an_unchanged_build_needs_no_compiler(spec):
    blocked = "import sys; sys.modules.update(dict.fromkeys(('pydantic', 'yaml', 'jinja2', 'torch', 'triton')));"
    command = f"{blocked} from lorac.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-c", command, "build", str(spec), "--output", str(spec.parent / "out")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{spec.parent}/out/tiny: unchanged\n"), done.stderr
