"""A wheel, installed away from the checkout, finds its templates, presets and example specs."""

import os
import subprocess
import sys
import zipfile

import pytest
from packages import ROOT, tree


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel's files, as an installer lays them down; it needs no network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("lorac-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def lorac(site, folder, *arguments) -> str:
    command = [sys.executable, "-m", "lorac", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_builds_what_the_checkout_builds(site, tmp_path):
    spec = site / "lorac" / "_data" / "specs" / "tiny.yaml"
    lorac(site, tmp_path, "build", spec)
    lorac(ROOT, tmp_path, "build", ROOT / "specs" / "tiny.yaml", "--output", "checkout")
    assert tree(tmp_path / "generated" / "tiny") == tree(tmp_path / "checkout" / "tiny")


def test_it_knows_every_preset(site, tmp_path):
    code = "import lorac, lorac.spec; print(lorac.__file__, *lorac.spec.presets())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    file, *presets = done.stdout.split()
    assert file == str(site / "lorac" / "__init__.py")
    assert presets == sorted(path.stem for path in (ROOT / "lorac" / "spec" / "presets").glob("*.json"))


def test_it_requires_what_triton_s_interpreter_imports(site):
    """Triton does not require it, so an installation would have it by luck alone."""
    (metadata,) = site.glob("*.dist-info/METADATA")
    required = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: ")]
    assert any(line.startswith("Requires-Dist: numpy") and "extra ==" not in line for line in required)


def test_it_holds_nothing_else(site):
    tops = {path.name for path in site.iterdir()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"lorac"}
    assert (site / "lorac" / "runtime" / "replay.c").exists(), "it is compiled where it runs"
    (metadata,) = site.glob("*.dist-info")
    assert (metadata / "licenses" / "LICENSE").exists() and "lorac.cli:main" in (
        metadata / "entry_points.txt"
    ).read_text()
