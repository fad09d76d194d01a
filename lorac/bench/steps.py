"""Decode steps of random batches while adapters are swapped: whether replays equal eager, and what adapters change."""

import random
from types import ModuleType
from typing import NamedTuple

import torch

from lorac.bench.llama import DecodeForward, Llama


class Served(NamedTuple):
    """What a number of steps gave."""

    buckets: int  # that were replayed
    equal: int  # replays that equal eager at the same padded shape, bit for bit
    difference: float  # the largest between replay and eager, of any log-probability
    effect: float  # of its adapter on a row: the largest change of a log-probability, the least of all rows


def serve_steps(package: ModuleType, model: Llama, slots, step, count: int, seed: int = 0) -> Served:
    """`count` decode batches, bucket after bucket. Raises AssertionError where one is not replayed.

    Every step is run eagerly as well, one in eight also by the model without lorac.
    """
    chance = random.Random(seed)
    names = [None, *(str(slot) for slot in range(package.LAYOUT.slots))]
    buckets = sorted({bucket for bucket, _ in package.decode.GRAPHS[step.backend_name]})
    forward, plain = (DecodeForward(model, of, buckets[-1]) for of in (step, None))
    plain.cache = forward.cache
    graphs = package.DecodeGraphs(forward, step, forward.inputs(buckets[-1]))
    graphs.capture()
    equal, difference, effect = 0, 0.0, float("inf")
    for number in range(count):
        if number % 3 == 0:
            slots.swap(chance.choice(names[1:]))
        place = number % len(buckets)
        rows = chance.randint(buckets[place - 1] + 1 if place else 1, buckets[place])
        some = chance.sample(names, chance.randint(1, len(names)))
        batch = [chance.choice(some) for _ in range(rows)]
        generator = torch.Generator(model.device).manual_seed(chance.randrange(1 << 31))
        inputs = {
            name: torch.randint(0, limit, (rows,), device=model.device, generator=generator)
            for name, limit in (("tokens", package.LAYOUT.vocab), ("positions", forward.cache.shape[4]))
        }
        ticket = step.prepare(batch)
        replayed = graphs.run(ticket, inputs).clone()
        padded = {name: static[: ticket.bucket] for name, static in graphs.inputs.tensors.items()}
        with torch.no_grad(), step.launching():
            eager = forward(**padded)[:rows]
        equal += torch.equal(replayed, eager)
        found = replayed.float().log_softmax(1)
        difference = max(difference, float((found - eager.float().log_softmax(1)).abs().max()))
        adapted = [row for row, name in enumerate(batch) if name is not None]
        if number % 8 == 0 and adapted:
            with torch.no_grad():
                base = plain(**padded)[:rows].float().log_softmax(1)
            effect = min(effect, float((found - base).abs().amax(1)[adapted].min()))
    hits = graphs.stats()["hits"]
    if sum(hits.values()) != count:
        raise AssertionError(f"{count} steps, but {sum(hits.values())} replays: {graphs.report()}")
    return Served(len({key.bucket for key, replays in hits.items() if replays}), equal, difference, effect)
