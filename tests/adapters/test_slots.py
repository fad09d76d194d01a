"""Slots: what a slot holds is exactly one adapter, whatever was there before, and names lead nowhere else."""

import adapter_kit as kit
import pytest
import torch

from lorac.runtime.adapters import read_adapter
from lorac.runtime.buffers import Buffers
from lorac.runtime.errors import AdapterError, PackageError, ShapeError, SlotError
from lorac.runtime.slots import Slots

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter(folder, *names, rank=4, fill=None, **config):
    """A folder with random LoRA on some projections of every layer."""
    names = names or ("q_proj", "v_proj")
    tensors = kit.factors(*names, rank=rank, fill=fill)
    return kit.write(folder, tensors, r=rank, target_modules=list(names), **config)


def rich(folder, rank=8):
    """A folder with LoRA on everything, head and embedding too, of the largest rank."""
    tensors = kit.factors(*NAMES, rank=rank) | {
        "base_model.model.lm_head.lora_A.weight": torch.randn(rank, kit.HIDDEN),
        "base_model.model.lm_head.lora_B.weight": torch.randn(kit.VOCAB, rank),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(rank, kit.VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(kit.HIDDEN, rank),
    }
    return kit.write(folder, tensors, r=rank, target_modules=[*NAMES, "lm_head", "embed_tokens"])


def snapshot(slots: Slots) -> list[torch.Tensor]:
    """Copies of every table."""
    return [table.clone() for tables in (slots.a, slots.b, slots.rank, slots.scale) for table in tables.values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def fresh(contents: dict[int, object], layout=None) -> list[torch.Tensor]:
    """The tables of new slots into which each folder was loaded where it belongs."""
    slots = Slots(layout or kit.layout(), "cpu")
    loaded = [
        slots.load(contents.get(slot) or next(iter(contents.values())), str(slot)) for slot in range(slots.layout.slots)
    ]
    assert loaded == list(range(slots.layout.slots))
    for slot in set(loaded) - set(contents):
        slots.evict(str(slot))
    return snapshot(slots)


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given in ((), ("cuda",), ("cuda:1",)):
        with pytest.raises(PackageError, match='torch finds no GPU here; device="cpu" serves for tests'):
            Slots(kit.layout(), *given)


def test_tables_have_the_stated_shapes_and_hold_the_adapter(tmp_path):
    layout = kit.layout()
    slots = Slots(layout, "cpu")
    slots.load(adapter(tmp_path / "other"), "other")
    slot = slots.load(rich(tmp_path / "rich", rank=5), "rich")
    assert slots.a["qkv_proj"].shape == (2, 3, 3 * 8, 16) and slots.b["qkv_proj"].shape == (2, 48, 3, 8)
    assert slots.a["embed_tokens"].shape == (1, 3, 37, 8) and slots.b["embed_tokens"].shape == (1, 16, 3, 8)
    prepared = read_adapter(tmp_path / "rich", layout)
    for module in layout.modules:
        for index, part in enumerate(module.slices):
            for instance, layer in enumerate(module.layers or (0,)):
                want = prepared.part(module.name, instance, index)
                a, b, rank, scale = slots.instance(module.name, layer)
                own = a[slot].T if module.kind == "embedding" else a[slot, index * 8 : index * 8 + 8]
                rows = b[part.start : part.start + part.width, slot]
                assert torch.equal(own[:5], want.a) and not own[5:].any()
                assert torch.equal(rows[:, :5], want.b) and not rows[:, 5:].any()
                assert (rank[slot, index], scale[slot, index]) == (5, torch.tensor(want.scale))
    assert slots.bytes["qkv_proj"] == sum(t["qkv_proj"].nbytes for t in (slots.a, slots.b, slots.rank, slots.scale))


def test_expert_tables(tmp_path):
    layout = kit.layout(kit.MOE, shared_outer=True)
    slots = Slots(layout, "cpu")
    assert slots.a["experts_gate_up"].shape == (2, 3, 1, 2 * 8, 16)
    assert slots.b["experts_gate_up"].shape == (2, 3, 4, 48, 8)
    assert slots.a["experts_down"].shape == (2, 3, 4, 8, 24) and slots.b["experts_down"].shape == (2, 3, 1, 16, 8)
    tensors = {}
    for expert in range(4):
        key = f"base_model.model.model.layers.1.mlp.experts.{expert}.down_proj.lora_"
        tensors |= {f"{key}A.weight": torch.randn(3, 24), f"{key}B.weight": torch.ones(16, 3)}
    folder = kit.write(tmp_path, tensors, r=3, target_modules=["down_proj"], layers_to_transform=[1])
    slots.load(folder, "first")
    slots.evict("first")
    slot = slots.load(folder, "x")
    a, b, rank, _ = slots.instance("experts_down", 1)
    for expert in range(4):
        key = f"base_model.model.model.layers.1.mlp.experts.{expert}.down_proj.lora_A.weight"
        assert torch.equal(a[slot, expert, :3], tensors[key])
    assert b[slot, 0, :, :3].eq(1).all() and not b[slot, 0, :, 3:].any() and rank[slot].tolist() == [3]
    assert not slots.instance("experts_down", 0)[0].any()


def test_a_poorer_adapter_leaves_nothing_of_the_richer_one(tmp_path):
    poor = adapter(tmp_path / "poor", "q_proj", rank=2)
    slots = Slots(kit.layout(slots=1), "cpu")
    slots.load(rich(tmp_path / "rich"), "rich")
    slots.load(poor, "poor")
    assert same(snapshot(slots), fresh({0: poor}, kit.layout(slots=1)))
    slots.evict("poor")
    assert not any(table.any() for table in snapshot(slots))


def test_the_same_name_with_new_weights(tmp_path):
    slots = Slots(kit.layout(), "cpu")
    folder = adapter(tmp_path / "x", fill=1.0)
    slot = slots.load(folder, "x")
    first = slots.adapters()[0].version
    adapter(tmp_path / "x", fill=2.0)
    slots.evict("x")
    assert slots.load(folder, "x") == slot
    assert slots.instance("qkv_proj", 0)[1][0, slot, 0] == 2.0
    adapter(tmp_path / "x", fill=3.0)
    assert slots.load(folder, "x") == slot  # in place, without evicting
    assert slots.instance("qkv_proj", 0)[1][0, slot, 0] == 3.0
    assert slots.adapters()[0].version > first + 1 and same(snapshot(slots), fresh({slot: folder}))


def test_registering_anew_is_a_new_version_for_ensure(tmp_path):
    slots = Slots(kit.layout(), "cpu")
    slots.register("x", adapter(tmp_path / "one", fill=1.0))
    slot = slots.ensure(["x", None, "x"])["x"]
    slots.register("x", adapter(tmp_path / "two", fill=2.0))
    assert slots.instance("qkv_proj", 0)[1][0, slot, 0] == 1.0  # served until it is replaced
    assert slots.ensure(["x"]) == {"x": slot}
    assert slots.instance("qkv_proj", 0)[1][0, slot, 0] == 2.0


def test_reloading_scales_once(tmp_path):
    slots = Slots(kit.layout(slots=1), "cpu")
    folder = adapter(tmp_path / "x", rank=8, lora_alpha=16)
    slots.load(folder, "x")
    first = snapshot(slots)
    slots.register("other", adapter(tmp_path / "other"))
    for _ in range(5):
        slots.ensure(["other"])
        slots.ensure(["x"])
        assert same(snapshot(slots), first)
    assert slots.instance("qkv_proj", 0)[3][0].tolist() == [2.0, 0.0, 2.0]


@pytest.mark.parametrize("damage", ["shape", "nan", "config", "absent"])
def test_a_failed_update_changes_no_bit(damage, tmp_path):
    layout = kit.layout(layers=4)
    tensors = kit.factors("q_proj", "v_proj", layers=range(4))
    slots = Slots(layout, "cpu")
    slot = slots.load(kit.write(tmp_path, tensors), "x")
    before, generation, resident = snapshot(slots), slots.generation, slots.adapters()
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    if damage == "shape":
        tensors[key] = tensors[key][:-1]
    elif damage == "nan":
        tensors[key][0, 0] = float("nan")
    elif damage == "absent":
        del tensors[key]
    with pytest.raises(AdapterError):
        slots.load(kit.write(tmp_path, tensors, use_dora=damage == "config"), "x")
    assert same(snapshot(slots), before) and slots.generation == generation
    assert slots.adapters() == resident and slots.slot_of("x") == slot


def test_out_of_memory_changes_nothing(tmp_path, monkeypatch):
    slots = Slots(kit.layout(slots=1), "cpu")
    slots.load(adapter(tmp_path / "x"), "x")
    slots.register("y", adapter(tmp_path / "y"))
    before, resident, names = snapshot(slots), slots.adapters(), slots.names

    def exhausted(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "stage", exhausted)
        for attempt in (lambda: slots.load(tmp_path / "y", "z"), lambda: slots.ensure(["y"])):
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
    assert same(snapshot(slots), before) and slots.adapters() == resident and slots.names == names
    assert slots.ensure(["y"]) == {"y": 0}


def test_rank_above_the_package_and_then_a_good_one(tmp_path):
    slots = Slots(kit.layout(), "cpu")
    with pytest.raises(AdapterError, match="rank 16 .* max_rank 8"):
        slots.load(adapter(tmp_path / "big", rank=16), "x")
    assert not any(table.any() for table in snapshot(slots)) and slots.names == []
    slots.load(adapter(tmp_path / "good", rank=8), "x")


def test_least_recently_used_goes_first(tmp_path):
    slots = Slots(kit.layout(slots=2), "cpu")
    for name in "abc":
        slots.register(name, adapter(tmp_path / name))
    slots.ensure(["a"])
    slots.ensure(["b"])
    slots.ensure(["a"])
    slots.ensure(["c"])
    assert {resident.name for resident in slots.adapters()} == {"a", "c"}
    assert slots.ensure(["b", "c"])["c"] == slots.slot_of("c")
    with pytest.raises(SlotError, match="'a' is registered but in no slot"):
        slots.slot_of("a")


def test_registered_adapters_take_turns_in_one_slot(tmp_path):
    slots = Slots(kit.layout(slots=1), "cpu")
    folders = {name: adapter(tmp_path / name) for name in ("sql", "chat", "code")}
    for name, folder in folders.items():
        slots.register(name, folder)
    for name in ["sql", "chat", "code", "sql", "code"]:
        assert slots.ensure([name, None]) == {name: 0}
        assert same(snapshot(slots), fresh({0: folders[name]}, kit.layout(slots=1)))
    with pytest.raises(SlotError, match="no adapter is called 'sqll'; did you mean 'sql'"):
        slots.ensure(["sqll"])
    with pytest.raises(SlotError, match="no adapter is called 99"):
        slots.slot_of(99)


def test_pinned_and_used_adapters_stay(tmp_path):
    slots = Slots(kit.layout(slots=2), "cpu")
    for name in "abc":
        slots.register(name, adapter(tmp_path / name))
    held = slots.ensure(["a", "b"], use=True)
    both = r"a \(in use\), b \(in use\)"
    finish = r"call `step.finish\(\)` once its batch is over"
    with pytest.raises(
        SlotError, match=f"1 adapters, and there are 2 slots, of which {both} must stay; {finish}, split"
    ):
        slots.ensure(["c"])
    with pytest.raises(SlotError, match=f"no slot for adapter 'c'.*{both}; {finish}, or raise adapters.slots"):
        slots.load(tmp_path / "c", "c")
    with pytest.raises(SlotError, match=f"'a' in slot 0 is in use; {finish}$"):
        slots.evict("a")
    slots.pin("a")
    with pytest.raises(SlotError, match=rf"a \(pinned\), b \(in use\) must stay; unpin it, {finish}, split"):
        slots.ensure(["c"])
    slots.release(held.values())
    assert slots.ensure(["c"]) == {"c": held["b"]}
    with pytest.raises(SlotError, match="is pinned; unpin it$"):
        slots.unregister("a")
    slots.unpin("a")
    assert slots.ensure(["b"]) == {"b": held["a"]}
    with pytest.raises(SlotError, match="slot 0 is not in use"):
        slots.release([0])
    slots.evict("b")
    with pytest.raises(SlotError, match="slot 0 is empty: nothing was loaded there, or it was evicted"):
        slots.use([held["b"], held["a"]])
    assert [resident.users for resident in slots.adapters()] == [0]


def test_a_batch_of_more_adapters_than_slots_is_refused_before_anything_moves(tmp_path):
    slots = Slots(kit.layout(slots=2), "cpu")
    for name in "abc":
        slots.register(name, adapter(tmp_path / name))
    slots.ensure(["a", "b", None])  # base rows need no slot
    before, generation = snapshot(slots), slots.generation
    with pytest.raises(SlotError, match="the batch has 3 adapters, and there are 2 slots; split the batch"):
        slots.ensure(["a", "b", "c"])
    assert same(snapshot(slots), before) and slots.generation == generation


def test_generations_tell_what_changed(tmp_path):
    slots = Slots(kit.layout(slots=2), "cpu")
    slots.load(adapter(tmp_path / "a"), "a")
    slots.load(adapter(tmp_path / "b"), "b")
    overall, before = slots.generation, list(slots.slot_generation)
    slots.pin("a")
    slots.ensure(["a", "b"])
    assert (slots.generation, slots.slot_generation) == (overall, before)
    slots.rename("b", "c")  # the weights are the same, the names are not
    assert slots.generation > overall and slots.slot_generation == before
    slots.load(tmp_path / "b", "c")
    assert slots.slot_generation == [before[0], before[1] + 1]
    slots.evict("c")
    assert slots.slot_generation == [before[0], before[1] + 2]


def test_rename(tmp_path):
    slots = Slots(kit.layout(), "cpu")
    slot = slots.load(adapter(tmp_path / "a"), "a")
    slots.register("far", tmp_path / "a")
    with pytest.raises(SlotError, match="'far' exists already"):
        slots.rename("a", "far")
    slots.rename("a", "b")
    slots.rename("far", "near")
    assert slots.slot_of("b") == slot and slots.names == ["b", "near"]
    with pytest.raises(SlotError):
        slots.slot_of("a")
    slots.unregister("b")
    assert slots.names == ["near"] and slots.adapters() == []


def test_the_host_cache_is_bounded_and_makes_reading_unnecessary(tmp_path):
    size = read_adapter(adapter(tmp_path / "0"), kit.layout()).nbytes
    slots = Slots(kit.layout(slots=1), "cpu", cache_bytes=3 * size)
    for name in map(str, range(6)):
        slots.register(name, adapter(tmp_path / name))
        slots.ensure([name])
    assert slots.host_bytes == 3 * size
    for name in map(str, range(6)):  # nothing can be read any more
        (tmp_path / name / "adapter_model.safetensors").unlink()
    for name in ("5", "4", "3"):
        slots.ensure([name])
    with pytest.raises(AdapterError, match="is missing"):
        slots.ensure(["2"])


def test_prepared_adapters_and_foreign_ones(tmp_path):
    slots = Slots(kit.layout(slots=1), "cpu")
    prepared = read_adapter(adapter(tmp_path / "a"), slots.layout)
    assert slots.load(prepared, "a") == 0
    slots.load(adapter(tmp_path / "b"), "b")
    assert slots.ensure(["a"]) == {"a": 0} and slots.host_bytes < 2 * prepared.nbytes
    with pytest.raises(AdapterError, match="was prepared for package small"):
        slots.load(read_adapter(tmp_path / "a", kit.layout(slots=2)), "c")
    with pytest.raises(SlotError, match="expected a string"):
        slots.load(tmp_path / "a", "")
    with pytest.raises(ShapeError, match="no module 'qkv' in layer 0"):
        slots.instance("qkv", 0)


def test_ranks_of_tensor_parallelism_hold_their_shares(tmp_path):
    """A rank below R in sharded slots: padded to R, so that rows are where an unsharded slot has them."""
    folder = adapter(tmp_path, *NAMES, rank=3)
    whole = Slots(kit.layout(), "cpu")
    whole.load(folder, "x")
    ranks = [Slots(kit.layout(tp=2), "cpu", tp_rank=rank) for rank in range(2)]
    for slots in ranks:
        slots.load(folder, "x")
    assert torch.equal(torch.cat([slots.a["down_proj"] for slots in ranks], -1), whole.a["down_proj"])
    assert all(torch.equal(slots.b["down_proj"], whole.b["down_proj"]) for slots in ranks)
    assert all(torch.equal(slots.a["gate_up_proj"], whole.a["gate_up_proj"]) for slots in ranks)
    gates = torch.cat([slots.b["gate_up_proj"][:, :12] for slots in ranks], 1)
    assert torch.equal(gates, whole.b["gate_up_proj"][:, :24])


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_the_package_is_not_for_is_refused(tmp_path, rank):
    """Else -1 would serve the last rank's shard, and 2 nothing at all."""
    layout = kit.layout(kit.MOE, tp=2, local=2)
    for name in ("tp_rank", "ep_rank"):
        expected = f"{name} {rank} of a package for {name[:2]} 2; expected 0 to 1"
        with pytest.raises(PackageError, match=expected):
            Slots(layout, "cpu", **{name: rank})
        with pytest.raises(PackageError, match=expected):
            read_adapter(tmp_path, layout, **{name: rank})
    with pytest.raises(PackageError, match="tp_rank 2 of a package for tp 1; expected 0$"):
        Slots(kit.layout(), "cpu", tp_rank=2)
