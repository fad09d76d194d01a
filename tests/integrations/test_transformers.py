"""Models of each family served with adapters per row: PEFT, adapter by adapter, is the oracle."""

import copy
import runpy
import sys
from dataclasses import replace

import model_kit as kit
import pytest
import torch

from lorac.integrations import example
from lorac.integrations.sites import find_sites
from lorac.integrations.transformers import attach
from lorac.runtime.errors import PackageError, ShapeError, SlotError, TicketError
from lorac.runtime.layout import ExpertLayout

ROWS = ["sql", None, "poet", "sql"]
GREEDY = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_each_row_equals_peft_and_base_rows_the_untouched_model(served, family, generator):
    s = served(family)
    tokens, mask = kit.prompt(4, 7, generator, short=3)
    s.check(ROWS, tokens, attention_mask=mask)
    s.check(ROWS, tokens[:, -1:])
    s.check(ROWS, tokens[:, 3:], logits_to_keep=1)
    s.check([None] * 4, tokens)


@pytest.mark.parametrize("family", kit.FAMILIES)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_mixed_batch_generates_what_peft_does_for_each_adapter(served, family, graphs, generator):
    s = served(family)
    if graphs:
        s.handle.capture(rows=3, length=16)
    rows = ["sql", None, "poet"]
    tokens, mask = kit.prompt(3, 6, generator, short=2)
    made = s.handle.generate(tokens, adapters=rows, attention_mask=mask, **GREEDY)
    expected = [s.oracles[name].generate(input_ids=tokens, attention_mask=mask, **GREEDY) for name in rows]
    assert made.tolist() == [outputs[row].tolist() for row, outputs in enumerate(expected)]
    if graphs:
        stats = s.handle.static.graphs.stats()
        assert sum(stats["hits"].values()) == 4 and not stats["fallbacks"]


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
def test_other_backends_serve_the_same(served, backend, generator):
    s = served("qwen3", backend)
    tokens, mask = kit.prompt(4, 5, generator, short=2)
    s.check(ROWS, tokens, attention_mask=mask)
    s.check(ROWS, tokens[:, -1:])


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_graphs_serve_changing_batches_over_one_cache(served, family, generator):
    s = served(family)
    s.handle.capture(rows=4, length=16)
    for rows in (["poet"] * 4, [None], ["sql", "poet"], [None, None, "sql"], ["sql", None, "poet", None]):
        tokens, mask = kit.prompt(len(rows), 5, generator, short=1)
        made = s.handle.generate(tokens, adapters=rows, attention_mask=mask, **GREEDY)
        for row, name in enumerate(rows):
            expected = s.oracles[name].generate(input_ids=tokens, attention_mask=mask, **GREEDY)
            assert made[row].tolist() == expected[row].tolist()
    assert not s.handle.static.graphs.stats()["fallbacks"]


def test_beams_are_rows(served, generator):
    s = served("llama")
    tokens, _ = kit.prompt(2, 5, generator)
    rows = ["sql", "sql", "poet", "poet"]
    for _ in range(2):
        made = s.handle.generate(tokens, adapters=rows, num_beams=2, **GREEDY)
        for row, name in enumerate(["sql", "poet"]):
            expected = s.oracles[name].generate(input_ids=tokens, num_beams=2, **GREEDY)
            assert made[row].tolist() == expected[row].tolist()
        s.handle.capture(rows=4, length=16)  # the second time with graphs


def test_embeddings_given_instead_of_tokens_take_no_embedding_adapter(served, generator):
    s = served("llama")
    tokens, _ = kit.prompt(2, 5, generator)
    embeddings = s.family.model.get_input_embeddings()(tokens).detach()
    with s.handle.rows(["poet", None]):
        made = s.model(inputs_embeds=embeddings).logits
    with torch.no_grad():
        expected = s.oracles["poet"](inputs_embeds=embeddings).logits
    torch.testing.assert_close(made[0], expected[0], rtol=1e-4, atol=1e-4)


def test_an_adapter_of_one_half_of_a_tied_pair_leaves_the_other_alone(served, tmp_path, generator):
    s = served("qwen3")
    assert s.model.config.tie_word_embeddings
    tokens, _ = kit.prompt(2, 5, generator)
    for target in ("lm_head", "embed_tokens"):
        oracle = kit.trained(s.family.model, target, tmp_path / target, r=4, lora_alpha=8, target_modules=[target])
        s.slots.load(tmp_path / target, name="half")
        embedding = s.model.get_input_embeddings().weight.clone()
        with s.handle.rows(["half", None]):
            made = s.model(input_ids=tokens, output_hidden_states=True)
        with torch.no_grad():
            expected = oracle(input_ids=tokens, output_hidden_states=True)
            plain = s.family.model(input_ids=tokens, output_hidden_states=True)
        torch.testing.assert_close(made.logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.hidden_states[0][0], expected.hidden_states[0][0], rtol=1e-4, atol=1e-4)
        assert torch.equal(made.hidden_states[0][0], plain.hidden_states[0][0]) == (target == "lm_head")
        assert torch.equal(made.logits[1], plain.logits[1])
        assert torch.equal(s.model.get_input_embeddings().weight, embedding)


def test_detach_restores_the_model(served, generator):
    s = served("phi3")
    tokens, _ = kit.prompt(2, 5, generator)
    s.check(["sql", None], tokens)
    assert s.model.state_dict().keys() == s.family.model.state_dict().keys()
    s.handle.detach()
    for ours, untouched in zip(s.model.modules(), s.family.model.modules(), strict=True):
        assert vars(ours).keys() == vars(untouched).keys()
    with torch.no_grad():
        assert torch.equal(s.model(tokens).logits, s.oracle(None, tokens))
    s.handle = attach(s.model, s.package, s.slots, s.step)
    s.check(["sql", None], tokens)


def test_forwards_someone_else_replaced_are_called_and_restored(served, generator):
    s = served("llama")
    s.handle.detach()
    attention, calls = s.model.model.layers[0].self_attn, []

    def watched(name: str):
        layer = attention.get_submodule(name)

        def theirs(x):
            calls.append(name)
            return type(layer).forward(layer, x)

        layer.forward = theirs
        return theirs

    theirs = {name: watched(name) for name in kit.ATTENTION}
    s.handle = attach(s.model, s.package, s.slots, s.step)
    s.check(["sql", None], kit.prompt(2, 5, generator)[0])
    assert calls == kit.ATTENTION  # also where the package computes q, k and v together
    s.handle.detach()
    assert all(vars(attention.get_submodule(name))["forward"] is own for name, own in theirs.items())


def test_adapters_take_turns_in_fewer_slots(served, generator):
    s = served("llama")
    for name in ("third", "fourth", "fifth", "sixth"):
        s.slots.register(name, s.family.folders["sql"])
        s.oracles[name] = s.oracles["sql"]
    tokens, _ = kit.prompt(3, 4, generator)
    for rows in (["sql", "poet", "third"], ["fourth", "fifth", "sixth"], ["sql", "poet", None]):
        s.check(rows, tokens)
    with pytest.raises(SlotError, match="4 adapters, and there are 3 slots"):
        s.handle.generate(tokens, adapters=["sql", "poet", "third", "fourth"])


def test_mistakes_are_named(served, generator):
    s = served("llama")
    tokens, _ = kit.prompt(2, 4, generator)
    with pytest.raises(TicketError, match="no adapters were named"):
        s.model(input_ids=tokens)
    with pytest.raises(SlotError, match="no adapter is called 'sqk'; did you mean 'sql'"):
        s.handle.generate(tokens, adapters=["sqk", None])
    with pytest.raises(ShapeError, match="2 rows, but 3 adapters"):
        s.handle.generate(tokens, adapters=["sql", None, None])
    with pytest.raises(ShapeError, match="is the string 'sql'"):
        s.handle.generate(tokens, adapters="sql")
    with s.handle.rows(["sql", None]), pytest.raises(ShapeError, match="input_ids or inputs_embeds"):
        s.model(attention_mask=torch.ones_like(tokens))
    with pytest.raises(PackageError, match="attached already"):
        attach(s.model, s.package, s.slots, s.step)
    s.handle.capture(rows=1, length=8)
    with pytest.raises(ShapeError, match="2 rows are above the 1"):
        s.handle.generate(tokens, adapters=["sql", None])
    with pytest.raises(ShapeError, match="9 tokens are above the 8"):
        s.handle.generate(tokens[:1], adapters=["sql"], **GREEDY | dict(max_new_tokens=6))
    s.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ShapeError, match="takes no masks"):
        s.handle.capture(rows=1, length=8)


def test_a_model_of_another_shape_is_refused_with_what_differs(served):
    s = served("llama")

    def refused(model, match: str, package=s.package):
        slots = package.Slots("cpu")
        before = {name: vars(module).copy() for name, module in model.named_modules()}
        with pytest.raises(ShapeError, match=match):
            attach(model, package, slots, package.Step(slots, "torch"))
        assert before == {name: vars(module) for name, module in model.named_modules()}  # untouched

    s.handle.detach()
    refused(copy.deepcopy(s.model).to(torch.float16), "the model is in torch.float16, the package in torch.float32")
    fewer = copy.deepcopy(s.model)
    fewer.model.layers = fewer.model.layers[:1]
    refused(fewer, "the model has 1 layers, the package 2")
    wide = copy.deepcopy(s.model)
    wide.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 50)
    refused(wide, "layer 1: up_proj maps 32 to 50, in the package 32 to 48")
    without = copy.deepcopy(s.model)
    del without.model.layers[0].self_attn.o_proj
    refused(without, "layer 0: the model has no self_attn.o_proj")
    refused(copy.deepcopy(s.oracles["sql"].base_model.model), "PEFT has put adapters into the model")
    refused(
        copy.deepcopy(s.model).to("meta"),
        "lm_head is on meta, the slots on cpu|embed_tokens is on meta|q_proj is on meta",
    )


def test_a_model_without_the_experts_of_the_package_is_refused(served):
    s = served("llama")
    experts = ExpertLayout(4, 4, 2, "mlp.experts", ("gate_proj", "up_proj"))
    module = replace(s.package.LAYOUT.by_name["gate_up_proj"], name="experts_gate_up", kind="experts", experts=experts)
    layout = replace(s.package.LAYOUT, modules=(module,))
    with pytest.raises(ShapeError, match="holds no weights gate_up_proj and down_proj of all experts"):
        find_sites(s.model, layout, s.slots.device)


def test_parts_of_different_packages_are_refused(served, tmp_path):
    s, other = served("llama"), served("qwen3")
    s.handle.detach()
    name, theirs = s.package.LAYOUT.name, other.package.LAYOUT.name
    for what, slots, step in (("the Step", s.slots, other.step), ("the Slots object", other.slots, s.step)):
        with pytest.raises(PackageError, match=f"{what} given to package {name} is of package {theirs}"):
            attach(s.model, s.package, slots, step)
    with pytest.raises(PackageError, match="made for other Slots"):
        attach(s.model, s.package, s.package.Slots("cpu"), s.step)


def test_the_example_tells_what_peft_says(capsys):
    example.main()
    out = capsys.readouterr().out
    assert out.count("as PEFT") == 6 and "NOT" not in out
    assert out.count("not as the base model") == 4


def test_the_example_names_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match=r"needs peft, which is not installed: pip install -e '\.\[test\]'"):
        runpy.run_path(example.__file__)
