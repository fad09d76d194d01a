"""Nothing a spec, a config or a backend's text says becomes code: it is refused, or it is a literal."""

import ast
import json

import plan_kit
import pytest
import render_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from lorac.compile import compile_spec
from lorac.errors import SpecError
from lorac.render import filters
from lorac.spec import spec_from_data

CODE = [
    'a"]; import pwned #',
    "a\nimport pwned",
    "{{ pwned }}",
    "{% include 'pwned' %}",
    "a'); pwned(",
    '"""\nimport pwned',
]
LINEAR = {"path": "attn.q", "in": 16, "out": 16}


def imports_and_calls(files: dict[str, str]) -> set[str]:
    """Every name that is imported, called or assigned anywhere in the package."""
    found = set()
    for name, text in files.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            found |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            found |= {node.id} if isinstance(node, ast.Name) else set()
    return found


def long_form(**changes) -> dict:
    model = {"hidden": 16, "layers": 1, "vocab": 32, "tied": False, "linears": {"q": LINEAR}} | changes
    return plan_kit.spec_data(model=model, adapters={"slots": 1, "max_rank": 4, "targets": ["q"]})


@pytest.mark.parametrize("text", CODE)
def test_names_and_paths_are_identifiers(text):
    experts = {"count": 2, "top_k": 1, "intermediate": 16}
    variants = {"lora": {}, text: {"rank": 1}}
    hostile = [
        plan_kit.spec_data(name=text),
        plan_kit.spec_data(dtype=text),
        plan_kit.spec_data(targets=[text]),
        plan_kit.spec_data(backends={text: {}}),
        plan_kit.spec_data(backends={"torch": {"kind": text}}),
        plan_kit.spec_data(adapters={"slots": 1, "max_rank": 4, "targets": [text]}),
        plan_kit.spec_data(graphs={"decode": {"max_rows": 4, "variants": variants}}),
        plan_kit.spec_data(graphs={"prefill": {"max_tokens": 4, "mode": text}}),
        long_form(linears={"q": LINEAR, text: LINEAR}),
        long_form(linears={"q": LINEAR | {"path": text}}),
        long_form(linears={"q": LINEAR | {"sharding": text}}),
        long_form(linears={"q": LINEAR, "k": LINEAR}, fused={text: ["q", "k"]}),
        long_form(experts=experts | {"path": text}),
        long_form(experts=experts | {"names": [text, "b", "c"]}),
    ]
    for data in hostile:
        with pytest.raises(SpecError):
            spec_from_data(data)


@pytest.mark.parametrize("text", CODE)
def test_a_config(tmp_path, text):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 128,
    }  # fmt: skip
    for key in config:
        (tmp_path / "config.json").write_text(json.dumps(config | {key: text}))
        with pytest.raises(SpecError):
            kit.files_of(plan_kit.spec_data(model={"config": "config.json"}), tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": [text], text: text, "_name_or_path": text})
    )
    files = kit.files_of(plan_kit.spec_data(model={"config": "config.json"}), tmp_path)
    assert not any("pwned" in content for content in files.values())


@pytest.mark.parametrize("text", CODE)
def test_free_text_of_a_backend(tmp_path, text):
    declaration = kit.DECLARATION.replace("summary: adds nothing", f"summary: {json.dumps(text)}")
    declaration += f"no_prefill_graphs: {json.dumps(text)}\n"
    spec = kit.write(
        tmp_path, declaration=declaration, backend=kit.BACKEND.replace("` backend.", "`: {{ backend.summary }}")
    )
    spec.write_text(kit.SPEC + "graphs: {prefill: {max_tokens: 8}}\n")
    files = compile_spec(spec).files
    assert "pwned" in files["admission.py"] and "pwned" in files["backends/mine.py"]
    assert "pwned" not in imports_and_calls(files)
    space = {}
    exec(files["admission.py"].split("OFF = ")[1].join(["OFF = ", ""]).split("\n\n\n")[0], space)
    assert space["OFF"]["mine", "prefill"] == text


@pytest.mark.parametrize("text", CODE)
def test_the_moe_runner(tmp_path, text):
    files = kit.files_of(plan_kit.spec_data(moe={"runner": text}), tmp_path)
    assert "pwned" not in imports_and_calls(files)


@given(st.text(), st.integers(0, 40), st.text(alphabet="abc = ", max_size=30))
def test_literals_hold_any_text(value, indent, before):
    written = filters.pystring(value, "", indent)
    assert ast.literal_eval(written) == value
    assert filters.pystring(value, "x = ", indent).startswith("x = ")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.just("\n"), max_size=400), st.integers(0, 3))
def test_docstrings_hold_any_text(value, depth):
    indent = 4 * depth
    text = filters.pydoc("Words. " + value, indent)
    source = "".join("    " * level + "if True:\n" for level in range(depth)) + text
    (found,) = [node.value for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "value", None), str)]
    assert "".join(found.split()) == "".join(("Words. " + value).split())
