"""Adapters whose experts share a factor, in every form such files have: one A of gate and up, one B of down."""

import adapter_kit as kit
import pytest
import torch

from lorac.inspect import inspect_adapter
from lorac.runtime.adapters import read_adapter
from lorac.runtime.errors import AdapterError

COUNT, RANK = 4, 2
ROOT = "base_model.model.model.layers.{}.mlp.experts."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SETTINGS = dict(r=RANK, lora_alpha=6, target_modules=list(PROJECTIONS))


@pytest.fixture
def factors(generator) -> dict:
    """(A [1 or experts, r, in], B [1 or experts, out, r]) by layer and projection."""

    def random(*shape):
        return torch.randn(shape, generator=generator)

    found = {}
    for layer in range(kit.LAYERS):
        for name in PROJECTIONS:
            down = name == "down_proj"
            inside, out = (kit.INTER, kit.HIDDEN) if down else (kit.HIDDEN, kit.INTER)
            a, b = random(COUNT if down else 1, RANK, inside), random(1 if down else COUNT, out, RANK)
            found[layer, name] = a, b
    return found


def packed(factors: dict, names: tuple[str, ...] = PROJECTIONS) -> dict:
    """Three dimensions throughout; `names` are what the projections are called."""
    called, tensors = dict(zip(PROJECTIONS, names, strict=True)), {}
    for (layer, name), (a, b) in factors.items():
        key = ROOT.format(layer) + called[name]
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return tensors


def split(factors: dict, shared: str = "shared.", keep: bool = False) -> dict:
    """Each expert's own half by its number, and the shared one once: as a matrix, or with its dimension of 1."""
    tensors = {}
    for (layer, name), pair in factors.items():
        for side, factor in zip("AB", pair, strict=True):
            if len(factor) == 1:
                tensors[f"{ROOT.format(layer)}{shared}{name}.lora_{side}.weight"] = factor if keep else factor[0]
            else:
                for expert, own in enumerate(factor):
                    tensors[f"{ROOT.format(layer)}{expert}.{name}.lora_{side}.weight"] = own
    return tensors


def repeated(factors: dict) -> dict:
    """A whole pair for each expert, with equal shared halves."""
    tensors = {}
    for (layer, name), pair in factors.items():
        for side, factor in zip("AB", pair, strict=True):
            for expert, own in enumerate(factor.expand(COUNT, -1, -1)):
                tensors[f"{ROOT.format(layer)}{expert}.{name}.lora_{side}.weight"] = own
    return tensors


FORMS = {
    "packed": packed,
    "packed, w1 w2 w3": lambda factors: packed(factors, ("w1", "w3", "w2")),
    "split, shared": split,
    "split, one dimension more": lambda factors: split(factors, "", keep=True),
    "repeated": repeated,
}


@pytest.mark.parametrize("targets", [list(PROJECTIONS), "all-linear", r".*\.(gate|up|down)_proj"], ids=str)
@pytest.mark.parametrize("shared_outer", [True, False], ids=["shared slots", "own slots"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_read_alike(form, shared_outer, targets, factors, tmp_path):
    kit.write(tmp_path, form(factors), **{**SETTINGS, "target_modules": targets})
    layout = kit.layout(kit.MOE, shared_outer=shared_outer)
    ours = kit.deltas(read_adapter(tmp_path, layout))
    assert len(ours) == kit.LAYERS * len(PROJECTIONS) * COUNT
    for (_, layer, role, expert), delta in ours.items():
        a, b = (factor.expand(COUNT, -1, -1)[expert] for factor in factors[layer, f"{role}_proj"])
        torch.testing.assert_close(delta, 3.0 * b @ a)
    assert inspect_adapter(tmp_path, layout).served


@pytest.mark.parametrize("form", ["packed", "split"])
def test_one_pair_for_gate_and_up(form, factors, tmp_path):
    a, b = torch.randn(1, RANK, kit.HIDDEN), torch.randn(COUNT, 2 * kit.INTER, RANK)
    tensors = {}
    for layer in range(kit.LAYERS):
        key = ROOT.format(layer)
        if form == "packed":
            tensors |= {f"{key}gate_up_proj.lora_A.weight": a, f"{key}gate_up_proj.lora_B.weight": b}
        else:
            tensors |= {f"{key}shared.gate_up_proj.lora_A.weight": a[0]}
            tensors |= {f"{key}{expert}.gate_up_proj.lora_B.weight": own for expert, own in enumerate(b)}
    settings = {**SETTINGS, "target_modules": ["gate_proj", "up_proj"]}
    kit.write(tmp_path, tensors, **settings, moe_parameterization="shared_outer")
    ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE, shared_outer=True)))
    for expert in range(COUNT):
        both = torch.cat([ours["experts_gate_up", 1, role, expert] for role in ("gate", "up")])
        torch.testing.assert_close(both, 3.0 * b[expert] @ a[0])


def test_expert_parallelism_keeps_the_local_experts(factors, tmp_path):
    kit.write(tmp_path, packed(factors), **SETTINGS)
    whole = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE)))
    for rank in range(2):
        ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE, local=2, shared_outer=True), ep_rank=rank))
        for (module, layer, role, expert), value in ours.items():
            assert torch.equal(value, whole[module, layer, role, 2 * rank + expert])


def test_packed_experts_of_their_own(factors, tmp_path):
    """The same names with a factor for each expert: served, unless the slots have room for one only."""
    tensors = packed(factors)
    tensors = {
        name: factor.expand(COUNT, -1, -1) + torch.arange(COUNT)[:, None, None] for name, factor in tensors.items()
    }
    kit.write(tmp_path, tensors, **SETTINGS)
    ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE)))
    key = ROOT.format(1) + "up_proj.lora_"
    torch.testing.assert_close(
        ours["experts_gate_up", 1, "up", 3], 3.0 * tensors[f"{key}B.weight"][3] @ tensors[f"{key}A.weight"][3]
    )
    with pytest.raises(AdapterError, match="(?s)differ in B.*differ in A.*shared_outer_experts"):
        read_adapter(tmp_path, kit.layout(kit.MOE, shared_outer=True))


def refusal(folder, layout=None) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, layout or kit.layout(kit.MOE, shared_outer=True))
    return str(caught.value)


def test_what_does_not_fit_is_refused(factors, tmp_path):
    a, b = (ROOT.format(1) + f"up_proj.lora_{side}.weight" for side in "AB")
    wrong = {
        "[2, 24, 2] where its config and the model ask for [4, 24, 2] = [experts or 1, out, rank]": {
            b: torch.ones(2, kit.INTER, RANK)
        },
        "[2, 16] where its config and the model ask for [4, 2, 16] = [experts or 1, rank, in]": {
            a: torch.ones(RANK, kit.HIDDEN)
        },
    }
    for message, changed in wrong.items():
        assert message in refusal(kit.write(tmp_path, packed(factors) | changed, **SETTINGS))
    tensors = split(factors)
    tensors[ROOT.format(0) + "3.up_proj.lora_A.weight"] = torch.ones(RANK, kit.HIDDEN)
    assert "lora_A of one expert beside" in refusal(kit.write(tmp_path, tensors, **SETTINGS))
    alone = {name: factor for name, factor in split(factors).items() if ".shared." in name or "up_proj" not in name}
    assert "lora_A without its lora_B" in refusal(kit.write(tmp_path, alone, **SETTINGS))


def test_a_layer_that_is_missing_is_noticed_under_the_other_names(factors, tmp_path):
    tensors = packed({key: pair for key, pair in factors.items() if key[0] == 0}, ("w1", "w3", "w2"))
    assert "no tensors for layers 1" in refusal(kit.write(tmp_path, tensors, **SETTINGS))
    kit.write(tmp_path, packed(factors, ("w1", "w3", "w2")), **{**SETTINGS, "target_modules": ["q_proj", "up_proj"]})
    assert "do not select it" in refusal(tmp_path)
