"""Mutated adapter folders: each is read or refused with an AdapterError, soon, and a refused one changes no slot.

python -m lorac.bench.fuzz PACKAGE [--count 100000]
"""

import argparse
import json
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from lorac.bench.adapters import CONFIG, WEIGHTS, write_adapter
from lorac.bench.given import given_package
from lorac.runtime.errors import AdapterError

_LIMIT = 10.0  # seconds after which a read counts as hung
_TABLES_EVERY = 500  # mutations after which all tables are compared, beside the generations after each
_FIELDS = (
    "peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias",
    "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules", "fan_in_fan_out",
    "init_lora_weights", "target_parameters", "trainable_token_indices", "layer_replication", "loftq_config",
    "peft_version", "task_type", "inference_mode", "megatron_config", "eva_config", "unheard_of",
)  # fmt: skip
_ODD = (
    None, True, False, 0, -1, 4, 7, 2**70, 1e308, float("nan"), "", "q_proj", ".*", "(a+)+b", "all-linear", [], [None],
    ["q_proj"], [[]], {}, {"q_proj": 4}, {"": 4}, {"*": 4}, {"(": 1}, {"q_proj": None}, "\ud800", "\x00", [2**70],
    "pissa", "0.19", "9" * 5000, "LORA",
)  # fmt: skip


def mutated_config(text: str, chance: random.Random) -> str:
    """Some fields replaced by odd values; one time in three, characters that break the JSON, or change it."""
    config = json.loads(text)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        config[chance.choice(_FIELDS)] = chance.choice(_ODD)
    text = json.dumps(config)
    if chance.randrange(3) == 0:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice('{}[]",:0e-\\x') + text[at + chance.randrange(3) :]
    return text


def mutated_weights(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, exchanged or removed, most of them in the header."""
    header, changed = 8 + int.from_bytes(data[:8], "little"), bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        at = chance.randrange(min(header, len(changed)) if chance.random() < 0.8 else len(changed))
        kind = chance.randrange(4)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            changed[at : at + chance.randrange(1, 9)] = bytes(chance.choices(b'0123456789[]{},:"', k=4))
        else:
            del changed[at : at + chance.randrange(1, 4)]
    return bytes(changed)


def fuzz(package, count: int, seed: int, root: Path) -> tuple[Counter, float, list[str]]:
    """(outcomes, seconds of processor time of the slowest, what went wrong)."""
    small = [module.name for module in package.LAYOUT.modules if module.kind == "linear"][:2]
    generator = torch.Generator().manual_seed(seed)
    good = write_adapter(root / "good", package.LAYOUT, 1, generator, small)
    config, weights = (good / CONFIG).read_text(), (good / WEIGHTS).read_bytes()
    slots, outcomes, slowest, wrong = package.Slots("cpu", cache_bytes=0), Counter(), 0.0, []
    slots.load(good, "kept")
    tables = {name: (slots.a[name].clone(), slots.b[name].clone()) for name in slots.a}
    bad = root / "bad"
    bad.mkdir()
    signal.signal(signal.SIGALRM, _hung)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        of_config = number % 2 == 0
        (bad / CONFIG).write_text(mutated_config(config, chance) if of_config else config)
        (bad / WEIGHTS).write_bytes(weights if of_config else mutated_weights(weights, chance))
        kind, before, started = "config" if of_config else "weights", slots.generation, time.process_time()
        signal.setitimer(signal.ITIMER_REAL, _LIMIT)
        try:
            slots.load(bad, "mutated")
            outcomes[f"{kind} read"] += 1
        except AdapterError:
            outcomes[f"{kind} refused"] += 1
            if slots.generation != before:
                wrong.append(f"mutation {number}: refused, but a slot changed")
        except Exception as error:
            wrong.append(f"mutation {number}: {type(error).__name__}: {error!s:.200}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.process_time() - started)
        if "mutated" in slots.names:
            slots.unregister("mutated")
        if number % _TABLES_EVERY == 0 or number == count - 1:
            same = all(
                torch.equal(slots.a[name], a) and torch.equal(slots.b[name], b) for name, (a, b) in tables.items()
            )
            if not same:
                wrong.append(f"mutation {number} or one before it left something in the tables")
    return outcomes, slowest, wrong


def _hung(*_) -> None:
    raise TimeoutError(f"not done after {_LIMIT} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        outcomes, slowest, wrong = fuzz(given_package(given.package), given.count, given.seed, Path(root))
    listed = ", ".join(f"{outcome} {number}" for outcome, number in sorted(outcomes.items()))
    print(f"{given.count} mutations in {time.perf_counter() - started:.0f} s: {listed}; slowest {slowest * 1e3:.0f} ms")
    print("\n".join(wrong) or "nothing else happened")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
