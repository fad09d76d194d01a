"""`inspect_adapter` shows what there is, also of adapters that cannot be served, and says why not."""

import adapter_kit as kit
import torch

from lorac.inspect import inspect_adapter


def test_what_an_adapter_holds_and_where_it_goes(tmp_path):
    tensors = kit.factors("q_proj", "v_proj", rank=4)
    kit.write(tmp_path, tensors, lora_alpha=16, alpha_pattern={"v_proj": 2}, base_model_name_or_path="org/base")
    plain = inspect_adapter(tmp_path)
    assert plain.served and "serves it" not in plain.text()
    report = inspect_adapter(tmp_path, kit.layout())
    text = report.text()
    assert report.served and report.adapter.rank == 4
    assert "org/base" in text and "alpha_pattern of 1" in text and "8, 2.1 KiB, F32" in text
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line}
    assert lines["self_attn.q_proj"] == "2 [4, 16] [24, 4] 4"
    assert lines["self_attn.v_proj"] == "2 [4, 16] [12, 4] 0.5"
    assert lines["qkv_proj"] == "q_proj v_proj 2 of 2 4"
    assert "package small serves it" in text


def test_scales_of_experts_are_those_their_parameters_may_have(tmp_path):
    key = "base_model.model.model.layers.0.mlp.experts.lora_"
    tensors = {f"{key}A.weight": torch.randn(8, kit.INTER), f"{key}B.weight": torch.randn(kit.HIDDEN, 8)}
    settings = dict(
        r=2, lora_alpha=6, target_modules=[], target_parameters=["experts.down_proj"], peft_version="0.19.1"
    )
    assert " 3\n" in inspect_adapter(kit.write(tmp_path, tensors, **settings)).text() + "\n"
    text = inspect_adapter(kit.write(tmp_path, tensors, alpha_pattern={"experts.down_proj": 5}, **settings)).text()
    assert "3, 2.5" in text


def test_an_adapter_that_cannot_be_served_is_shown_all_the_same(tmp_path):
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"), use_dora=True)
    report = inspect_adapter(tmp_path, kit.layout())
    assert not report.served and "use_dora is True" in report.text() and "self_attn.q_proj" in report.text()
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"))
    report = inspect_adapter(tmp_path, kit.layout(["o_proj"]))
    assert not report.served and "self_attn.q_proj fits no module of package small" in report.text()
    assert len(inspect_adapter(tmp_path / "nope").refusals) == 1, "one fault of the folder is told once"
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_config.json").unlink()
    assert len(inspect_adapter(tmp_path).refusals) == 2
