"""Peers: those that cannot take part are named with the reason, and kernels import without their engine."""

import sys

import pytest

from lorac.bench import peers
from lorac.bench.peer_imports import Nothing, PeerError, import_module, stand_in
from lorac.bench.peer_sglang import _blocks
from lorac.bench.run import found_peers


def test_peers_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAC_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for engine in ("sglang", "vllm"):
        monkeypatch.setitem(sys.modules, f"{engine}.nothing", None)
    found, missing = found_peers([*peers.PEERS, "lorax"])
    assert not found
    assert missing.keys() == {*peers.PEERS, "lorax"}
    assert missing["vllm"] == "vllm is neither installed nor unpacked in $LORAC_PEERS"
    assert "there are sglang-triton_v2" in missing["lorax"]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine that cannot be imported, with a kernel that can."""
    files = {
        "__init__.py": "raise RuntimeError('needs a driver')",
        "ops/__init__.py": "raise RuntimeError('needs a driver')",
        "ops/kernel.py": "from ghost.config import flags, decorate\nfrom ghost.deep.place import Thing\n"
        "from ghost.ops.helper import two\n@decorate('x')\ndef run(a: Thing | None): return two() + bool(flags.any)\n",
        "ops/helper.py": "def two(): return 2",
        "ops/broken.py": "import a_package_nobody_has",
        "config.py": "raise RuntimeError('needs a driver')",
    }
    for name, text in files.items():
        path = tmp_path / "ghost" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("LORAC_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_in("ghost", ("ghost.ops",), {"ghost.config": {"decorate": lambda name: lambda function: function}})
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "ghost"]:
        del sys.modules[name]


def test_kernels_import_without_their_engine(engine):
    assert import_module("ghost.ops.kernel").run(None) == 2
    assert not import_module("ghost.elsewhere").anything.at.all


def test_a_kernel_that_does_not_import_says_why(engine):
    with pytest.raises(
        PeerError, match="ghost.ops.broken cannot be imported: ModuleNotFoundError.*a_package_nobody_has"
    ):
        import_module("ghost.ops.broken")


def test_nothing_stands_for_anything():
    assert Nothing()(max) is max, "as a decorator"
    assert not Nothing().deep.inside(1, key=2)
    assert (Nothing() | int) is int


def test_blocks_hold_every_row_once_padded_by_the_number_of_rows():
    ids, buckets = _blocks([1, 0, 1, 1, 2, 1], slots=4, block=2)
    assert ids == [1, 6, 0, 2, 3, 5, 4, 6]
    assert buckets == [0, 1, 1, 2]
