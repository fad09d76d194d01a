"""Two adapters and a base request in one batch of a Hugging Face model, on the CPU.

    python -m lorac.integrations.example

A random model and random adapters stand for yours. Needs peft and transformers, which lorac's extra `test` installs.
"""

import copy
import json
import tempfile
from pathlib import Path

import torch

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as error:
    raise SystemExit(f"the example needs {error.name}, which is not installed: pip install -e '.[test]'") from None

import lorac
from lorac.compile import compile_spec
from lorac.emit import emit
from lorac.integrations.transformers import attach

SPEC = """
lorac: 1
name: example
model: {config: config.json}
dtype: float32
adapters: {slots: 2, max_rank: 16, targets: [qkv_proj, o_proj, gate_up_proj, down_proj]}
backends: {torch: {}}
graphs: {decode: {buckets: [1, 2, 4], variants: {nolora: {adapters: 0}, lora: {}}}}
"""
TOKENS = 8
GREEDY = dict(max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)


def main() -> None:
    torch.set_num_threads(1)  # the model is small
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, trained = random_model(), {}
        for name, targets in {"sql": ["q_proj", "v_proj"], "poet": ["o_proj", "gate_proj", "down_proj"]}.items():
            trained[name] = random_adapter(model, targets, root / name)

        # once per deployment: the same as `lorac build spec.yaml`
        (root / "config.json").write_text(json.dumps(model.config.to_dict()))
        (root / "spec.yaml").write_text(SPEC)
        emit(compile_spec(root / "spec.yaml").files, root / "built" / "example")

        package = lorac.load(root / "built" / "example")
        slots = package.Slots("cpu")
        for name in trained:
            slots.load(root / name, name=name)
        prompt = torch.randint(1, model.config.vocab_size, (1, 5)).expand(3, -1)
        untouched = model.generate(prompt, **GREEDY)

        handle = attach(model, package, slots, package.Step(slots, "torch"))
        adapters = ["sql", None, "poet"]
        for way in ("eager", "decode graphs"):
            made = handle.generate(prompt, adapters=adapters, **GREEDY)
            print(f"one prompt three times, {way}:")
            for row, name in enumerate(adapters):
                by_peft = untouched if name is None else trained[name].generate(input_ids=prompt, **GREEDY)
                differs = "as the base model" if torch.equal(made[row], untouched[row]) else "not as the base model"
                agrees = "as PEFT" if torch.equal(made[row], by_peft[row]) else "NOT AS PEFT"
                print(f"  {name or 'base':5} {made[row, -TOKENS:].tolist()}  {differs}, {agrees}")
            handle.capture(rows=3, length=16)
        handle.detach()


def random_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=128,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def random_adapter(model: LlamaForCausalLM, targets: list[str], folder: Path):
    """PEFT's model of an adapter as training would leave it, saved to `folder`."""
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    for name, tensor in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    peft.save_pretrained(folder)
    return peft.eval()


if __name__ == "__main__":
    main()
