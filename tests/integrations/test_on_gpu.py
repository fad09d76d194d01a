"""The same on a GPU: compiled kernels, real graphs, and a thread that loads while they replay."""

import itertools
import threading

import model_kit as kit
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = ["sql", None, "poet", "sql"]
GREEDY = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)


@pytest.fixture(autouse=True)
def exact():
    """Float32 products in float32, for PEFT's as for the model's."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_each_row_equals_peft(served, family, backend, generator):
    s = served(family, backend, device="cuda")
    tokens, mask = (tensor.cuda() for tensor in kit.prompt(4, 7, generator, short=3))
    s.check(ROWS, tokens, attention_mask=mask)
    s.check(ROWS, tokens[:, -1:])


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_graphs_generate_what_peft_does_while_adapters_are_loaded(served, family, backend, generator):
    s = served(family, backend, device="cuda")
    s.handle.capture(rows=4, length=32)
    done, loads = threading.Event(), itertools.count()

    def load():
        while not done.is_set():
            s.slots.load(s.family.folders["poet"], name="another")
            next(loads)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for rows in (ROWS, ["poet", None], [None, None, "sql"]):
            tokens, mask = (tensor.cuda() for tensor in kit.prompt(len(rows), 6, generator, short=2))
            made = s.handle.generate(tokens, adapters=rows, attention_mask=mask, **GREEDY)
            for row, name in enumerate(rows):
                expected = s.oracles[name].generate(input_ids=tokens, attention_mask=mask, **GREEDY)
                assert made[row].tolist() == expected[row].tolist()
    finally:
        done.set()
        thread.join()
    stats = s.handle.static.graphs.stats()
    assert sum(stats["hits"].values()) == 3 * 11 and not stats["fallbacks"]
    assert next(loads) > 0
