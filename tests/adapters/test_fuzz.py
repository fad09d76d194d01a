"""A fixed sample of mutated configs and weights: an adapter is read or refused, and nothing else ever happens."""

import json
import random

import adapter_kit as kit

from lorac.runtime.adapters import read_adapter
from lorac.runtime.errors import AdapterError

ODD = [
    None, True, False, 0, -1, 7, 2**70, 1e308, float("nan"), "", "q_proj", ".*", "(a+)+b", "all-linear", [], [None],
    ["q_proj"], [[]], {}, {"q_proj": 4}, {"": 4}, {"*": 4}, {"(": 1}, {"q_proj": None}, "\ud800", "\x00", [2**70],
    "pissa", "0.19", "9" * 5000,
]  # fmt: skip


def attempt(folder, layout) -> bool:
    """Whether the adapter was read; any exception but AdapterError is the test's failure."""
    try:
        read_adapter(folder, layout)
    except AdapterError:
        return False
    return True


def test_mutated_configs(tmp_path):
    generator, layout = random.Random(11), kit.layout()
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"))
    path, read = tmp_path / "adapter_config.json", 0
    fields = [*kit.SKELETON, "unheard_of", "velora_config"]
    for round in range(900):
        config = dict(kit.SKELETON)
        for _ in range(generator.choice((1, 1, 2, 3))):
            config[generator.choice(fields)] = generator.choice(ODD)
        text = json.dumps(config)
        if round % 3 == 0:  # and bytes that are no longer JSON, or other JSON
            at = generator.randrange(len(text))
            text = text[:at] + generator.choice('{}[]",:0e-\\x') + text[at + generator.randrange(3) :]
        path.write_text(text)
        read += attempt(tmp_path, layout)
    assert 100 < read < 800


def test_mutated_weights(tmp_path):
    generator, layout = random.Random(12), kit.layout()
    kit.write(tmp_path, kit.factors("q_proj", "v_proj", rank=1), r=1)
    path = tmp_path / "adapter_model.safetensors"
    data, read = path.read_bytes(), 0
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(900):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            at = generator.randrange(header if generator.random() < 0.8 else len(changed))
            kind = generator.randrange(4)
            if kind == 0:
                changed[at] = generator.randrange(256)
            elif kind == 1:
                changed[at] ^= 1 << generator.randrange(8)
            elif kind == 2:
                changed[at : at + generator.randrange(1, 9)] = bytes(generator.choices(b'0123456789[]{},:"', k=4))
            else:
                del changed[at : at + generator.randrange(1, 4)]
        path.write_bytes(changed)
        read += attempt(tmp_path, layout)
    assert 20 < read < 800
