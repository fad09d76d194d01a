"""A plan is a function of the spec's content: not of the order of keys, the folder, the process or its hash seed."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import plan_kit as kit
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.compile import compile_spec

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "specs").glob("*.yaml"))
CHILD = """
import json, sys
from lorac.compile import compile_spec
print(json.dumps([compile_spec(path).files for path in sys.argv[1:]]))
"""


def shuffled(value, rng: random.Random, trail=()):
    """The same data with the keys of every mapping in another order, but for backends: the first is the default."""
    if isinstance(value, list):
        return [shuffled(item, rng, trail) for item in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    if trail != ("backends",):
        rng.shuffle(keys)
    return {key: shuffled(value[key], rng, (*trail, key)) for key in keys}


@settings(max_examples=60)
@given(kit.specs(), st.randoms(use_true_random=False))
def test_the_order_of_keys(data, rng):
    other = shuffled(data, rng)
    assert other == data
    assert kit.plan_of(other).canonical() == kit.plan_of(data).canonical()


def test_the_order_of_backends_counts():
    data = kit.spec_data()
    turned = data | {"backends": dict(reversed(data["backends"].items()))}
    assert kit.plan_of(turned).digest() != kit.plan_of(data).digest()


def test_every_field_of_a_spec_changes_the_plan():
    data = kit.spec_data()
    changes = [
        {"name": "other"}, {"dtype": "float32"}, {"targets": ["sm_90"]}, {"parallel": {"tp": 2}},
        {"adapters": data["adapters"] | {"slots": 5}}, {"adapters": data["adapters"] | {"max_rank": 17}},
        {"model": data["model"] | {"vocab": 161}}, {"graphs": None}, {"backends": {"triton": {}}},
        {"backends": data["backends"] | {"triton": {"segments": {"by": "request", "cap": 31}}}},
    ]  # fmt: skip
    digests = [kit.plan_of(data | change if change != {"graphs": None} else kit.spec_data(graphs=None)).digest()
               for change in [{}, *changes]]  # fmt: skip
    assert len(set(digests)) == len(digests)


def test_folder_process_hash_seed_and_comments(tmp_path):
    """Not only the plan: the bytes of every file, which follow from it."""
    specs = []
    shutil.copytree(ROOT / "specs" / "tuned", tmp_path / "elsewhere" / "tuned")
    for path in EXAMPLES:
        copy = tmp_path / "elsewhere" / f"renamed_{path.name}"
        data = yaml.safe_load(path.read_text())
        copy.write_text("# no comment counts\n" + yaml.safe_dump(shuffled(data, random.Random()), sort_keys=False))
        specs.append(copy)
    here = [compile_spec(path).files for path in EXAMPLES]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *(path.name for path in specs)],
        cwd=tmp_path / "elsewhere", env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "4711", "TZ": "Asia/Tokyo"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(child.stdout) == here
