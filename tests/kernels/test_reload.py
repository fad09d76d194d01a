"""A package built again runs its new code: within the same second, in the same process and in a new one."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import kernel_kit as kit
import pytest
import yaml

from lorac.compile import compile_spec
from lorac.emit import emit
from lorac.runtime.errors import PackageError
from lorac.runtime.load import load

ROOT = Path(__file__).parents[2]
CHILD = """
import importlib, json, sys
mode, folder, name = sys.argv[1:]
if mode == "load":
    import lorac
    package = lorac.load(f"{folder}/{name}")
else:
    sys.path.insert(0, folder)
    package = importlib.import_module(name)
backend = importlib.import_module(package.__name__ + ".backends.csgmv")
print(json.dumps([package.LAYOUT.slots, max(launch.BLOCK_M for launch in backend.KERNELS[0].launches)]))
"""


def build(folder: Path, slots: int, chunk: int) -> Path:
    """The same spec with other numbers, of the same size in bytes."""
    data = kit.spec_of(kit.Kind("csgmv", kit.kinds()[0].declaration), "float32")
    data |= {"name": "again", "backends": {"csgmv": {"segments": {"by": "chunk", "chunk": chunk, "floor": 16}}}}
    data["adapters"] |= {"slots": slots}
    path = folder / "again.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    emit(compile_spec(path).files, folder / "again")
    return folder / "again"


def chunk_of(package) -> int:
    return package.step.SEGMENTS["csgmv"].chunks[0][1]


def test_load_again_in_one_process(tmp_path):
    for slots, chunk in ((3, 16), (4, 32), (3, 64), (3, 16)):
        package = load(build(tmp_path, slots, chunk))
        assert (package.LAYOUT.slots, chunk_of(package)) == (slots, chunk)
    assert load(tmp_path / "again") is package


def test_a_loaded_package_is_called_by_its_own_name(tmp_path):
    """Not by that of the module it is loaded as, which depends on the folder and on every byte in it."""
    folder = build(tmp_path, 3, 16)
    folder = folder.rename(tmp_path / "elsewhere")
    package = load(folder)
    with pytest.raises(PackageError) as caught:
        package.Step(package.Slots("cpu"), "fsed")
    assert str(caught.value) == "package again has no backend 'fsed': it has csgmv"


def test_kernels_are_new_as_well(tmp_path, generator):
    """Triton reads the source of a kernel when it first runs: it must be that of its own build."""
    (kind,) = [kind for kind in kit.kinds() if kind.name == "csgmv"]
    packages = []
    for scale in (1, 2):
        data = kit.spec_of(kind, "float32")
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        files = compile_spec(path).files
        text = files["backends/tested.py"]
        assert text.count("acc.to(y.dtype.element_ty)") > 0
        files["backends/tested.py"] = text.replace("acc.to(y.dtype", f"(acc * {scale}).to(y.dtype")
        manifest = json.loads(files["manifest.json"])
        manifest["files"]["backends/tested.py"] = hashlib.sha256(files["backends/tested.py"].encode()).hexdigest()
        emit(files | {"manifest.json": json.dumps(manifest)}, tmp_path / "again", force=True)
        packages.append(load(tmp_path / "again"))
    # both are loaded before either runs
    benches = [kit.Bench(package, kind, generator) for package in packages]
    results = []
    x = benches[0].random((1, benches[0].layout.by_name["wide_proj"].in_features))
    for bench in benches:
        for name in ("a", "b", "rank", "scale"):
            getattr(bench.slots, name)["wide_proj"].copy_(getattr(benches[0].slots, name)["wide_proj"])
        bench.prepare("decode", [(1, 1)])
        y = bench.random((1, bench.layout.by_name["wide_proj"].out_features)) * 0
        results.append(bench.package.add("wide_proj", 0, x, y, bench.step))
    assert results[0].norm() > 0
    assert (results[1] - 2 * results[0]).norm() < 1e-5 * results[1].norm()


def test_a_new_process(tmp_path):
    """The first one leaves bytecode behind, which Python takes for current if sizes and whole seconds agree."""
    for slots, mode in ((3, "import"), (4, "import"), (5, "load")):
        build(tmp_path, slots, 16)
        command = [sys.executable, "-c", CHILD, mode, str(tmp_path), "again"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(run.stdout)[0] == slots
