"""A template and its plan node agree in both directions, and every error of a template names its file and line."""

import re

import pytest
import render_kit as kit

from lorac.compile import compile_spec
from lorac.errors import BuildError, LoracError, SpecError
from lorac.render.environment import environment, render_template


def error_of(folder, **texts) -> str:
    with pytest.raises(LoracError) as caught:
        compile_spec(kit.write(folder, **texts))
    return str(caught.value)


def place(folder, file: str, text: str, part: str) -> str:
    return f"{folder}/kinds/mine/{file}:{kit.line_of(text, part)}: "


def test_the_folder_as_it_stands(tmp_path):
    files = compile_spec(kit.write(tmp_path)).files
    assert "WIDTH = 4\n" in files["backends/mine.py"] and "ONLY_O_PROJ = 64\n" in files["backends/mine.py"]


@pytest.mark.parametrize("branch", ["{{ kernl.name }}", "{% if 0 > 1 %}{{ kernl }}{% endif %}"])
def test_a_kernel_uses_an_unknown_name(tmp_path, branch):
    text = kit.KERNEL + "# more\n" + branch
    message = error_of(tmp_path, kernel=text)
    assert message.startswith(place(tmp_path, "kernel.py.jinja", text, "kernl"))
    assert "uses kernl" in message and "backend, kernel, module, package, parameters" in message


@pytest.mark.parametrize("branch", ["{{ modles }}", "{% if 0 > 1 %}{{ modles }}{% endif %}"])
def test_a_backend_uses_an_unknown_name(tmp_path, branch):
    text = kit.BACKEND + branch
    message = error_of(tmp_path, backend=text)
    assert message.startswith(place(tmp_path, "backend.py.jinja", text, "modles"))
    assert "uses modles" in message and "modules" in message


def test_an_included_template_sees_its_includer_and_nothing_else(tmp_path):
    (tmp_path / "kinds/mine").mkdir(parents=True)
    shared = tmp_path / "kinds/mine/part.py.jinja"
    backend = kit.BACKEND + '{% for one in modules %}{% include "part.py.jinja" %}{% endfor %}\n'
    shared.write_text("PART = {{ one.in_features }}\n")
    spec = tmp_path / "demo.yaml"
    (tmp_path / "kinds/mine/backend.yaml").write_text(kit.DECLARATION)
    (tmp_path / "kinds/mine/backend.py.jinja").write_text(backend)
    (tmp_path / "kinds/mine/kernel.py.jinja").write_text(kit.KERNEL)
    spec.write_text(kit.SPEC)
    assert "PART = 64" in compile_spec(spec).files["backends/mine.py"]
    shared.write_text("\n\nPART = {{ two }}\n")
    with pytest.raises(BuildError) as caught:
        compile_spec(spec)
    assert str(caught.value).startswith(f"{shared}:3: the template uses two")


def test_a_missing_attribute(tmp_path):
    text = kit.KERNEL + "X = {{ module.inn_features }}\n"
    message = error_of(tmp_path, kernel=text)
    assert message.startswith(place(tmp_path, "kernel.py.jinja", text, "inn_features"))
    assert "UndefinedError" in message and "inn_features" in message


def test_an_expression_that_fails(tmp_path):
    text = kit.KERNEL + "\nX = {{ 1 // (module.in_features - 64) }}\n"
    message = error_of(tmp_path, kernel=text)
    assert message.startswith(place(tmp_path, "kernel.py.jinja", text, "1 //")) and "ZeroDivisionError" in message


@pytest.mark.parametrize("file", ["backend", "kernel"])
@pytest.mark.parametrize("fault", ["{% if %}", "{{ module.name | nofilter }}"])
def test_a_syntax_error(tmp_path, file, fault):
    text = {"backend": kit.BACKEND, "kernel": kit.KERNEL}[file] + f"ok\n{fault}\n"
    message = error_of(tmp_path, **{file: text})
    assert message.startswith(place(tmp_path, f"{file}.py.jinja", text, fault))


def test_a_parameter_nobody_reads(tmp_path):
    declaration = kit.DECLARATION.replace("{width:", "{depth: {type: int, default: 1, help: unread}, width:")
    message = error_of(tmp_path, declaration=declaration)
    assert message.startswith(f"{tmp_path}/kinds/mine/backend.yaml:{kit.line_of(declaration, 'depth')}:14: ")
    assert "no template reads the parameter depth" in message and message.count("no template reads") == 1


def test_a_parameter_nobody_declares(tmp_path):
    text = kit.BACKEND + "X = {{ parameters.height }}\n"
    message = error_of(tmp_path, backend=text)
    assert message.startswith(place(tmp_path, "backend.py.jinja", text, "height")) and "height" in message


def test_a_context_entry_nobody_uses(tmp_path):
    (tmp_path / "one.py.jinja").write_text("{{ used }}\n")
    with pytest.raises(BuildError, match=rf"^{tmp_path}/one.py.jinja: it does not use unused, "):
        render_template(environment(tmp_path), "one.py.jinja", {"used": 1, "unused": 2})


def test_a_backend_uses_of_what_it_is_given_what_serves_it(tmp_path):
    spec = kit.write(tmp_path, backend=kit.BACKEND.replace("{{ backend.name }}", "nameless"))
    assert "nameless" in compile_spec(spec).files["backends/mine.py"]


def test_a_kernel_s_template_that_is_not_there(tmp_path):
    declaration = kit.DECLARATION.replace("kernel.py.jinja", "kernal.py.jinja")
    message = error_of(tmp_path, declaration=declaration)
    assert message.startswith(f"{tmp_path}/kinds/mine/backend.yaml:6:15: there is no template kernal.py.jinja\n")
    assert "hint: did you mean kernel.py.jinja?" in message


@pytest.mark.parametrize("file", ["backend", "kernel"])
def test_an_included_template_that_is_not_there(tmp_path, file):
    text = {"backend": kit.BACKEND, "kernel": kit.KERNEL}[file] + 'ok\n{% include "none.py.jinja" %}\n'
    message = error_of(tmp_path, **{file: text})
    assert (
        message == place(tmp_path, f"{file}.py.jinja", text, "none") + "there is no template none.py.jinja to include"
    )


def test_a_folder_without_the_template_of_its_module(tmp_path):
    spec = kit.write(tmp_path)
    (tmp_path / "kinds/mine/backend.py.jinja").unlink()
    with pytest.raises(BuildError, match=rf"^{tmp_path}/kinds/mine/backend.py.jinja is not there: "):
        compile_spec(spec)


TILES = "tiles: [{BLOCK_M: 16}]"


@pytest.mark.parametrize(
    ("old", "new", "at", "message"),
    [
        ("summary:", "sumary:", "sumary", "unknown key sumary in backend.yaml"),
        ("[BLOCK_M]", "[BLOCK_M, BLOCK_N]", "{BLOCK_M: 16}", "the tile lacks BLOCK_N"),
        (TILES, "tiles: [{BLOCK_M: 16, stags: 5}]", "stags", "a tile of this stage has no stags"),
        (TILES, "tiles: [{BLCK_M: 16}]", "BLCK_M", "a tile of this stage has no BLCK_M"),
        (TILES, "tiles: [{BLOCK_M: 16, RANK: 16}]", "RANK", "a tile of this stage has no RANK"),
        (TILES, "tiles: [{BLOCK_M: 48}]", "48", "BLOCK_M must be a power of two, not 48"),
        (TILES, "tiles: [{BLOCK_M: 0}]", "0}", "BLOCK_M must be a power of two, not 0"),
        (TILES, "tiles: [{BLOCK_M: big}]", "big", "BLOCK_M must be a power of two, not big"),
        (TILES, "tiles: [{BLOCK_M: 16, warps: 3}]", "3}", "warps cannot be 3"),
        (TILES, "tiles: []", "tiles", "tiles must not be empty"),
        (TILES, "tiles: [{rows: 8, BLOCK_M: 16}]", "rows: 8", "the last tile has a bound, rows"),
        (TILES, "tiles: [{bare: true, BLOCK_M: 16}]", "bare", "the last tile has a bound, bare"),
        (TILES, "tiles: [{library: true}, {BLOCK_M: 16}]", "true", "only cannot leave anything to the library"),
        ("dims: {BLOCK_M", "dims: {BLOCK_N", "BLOCK_N", "BLOCK_N is no constant of the kernel that tiles state"),
        ("dims:", "operands: [[BLOCK_M, BLOCK_K]]\n    dims:", "BLOCK_K", "operands cannot be BLOCK_K"),
        ("dims:", "when_split: [parts]\n    dims:", "parts", "when_split cannot be parts"),
        ("dims:", "beside: other\n    dims:", "other", "beside cannot be other"),
        ("[BLOCK_M]", "[BLOCK_M, ROWS]\n    follows: {ROWS: other.ROWS}", "other.ROWS", "ROWS cannot be other.ROWS"),
        ('"*dtype"', '"*fp33"', '"*fp33"', 'x cannot be "*fp33"'),
        ('"*dtype"', "integer", "integer", 'x cannot be "integer"'),
        ('"*dtype"', '"tile<dtype>[BLOCK_M, BLOCK_K]"', '"tile', "x cannot be BLOCK_K"),
    ],
)  # fmt: skip
def test_a_declaration_at_fault(tmp_path, old, new, at, message):
    """Told once, where it stands, before any template is rendered."""
    declaration = kit.DECLARATION.replace(old, new)
    with pytest.raises(SpecError) as caught:
        compile_spec(kit.write(tmp_path, declaration=declaration))
    problems = [of for of in caught.value.problems if of.message != "backend.yaml lacks the key summary"]
    before = declaration[: declaration.index(at)].split("\n")
    place = (f"{tmp_path}/kinds/mine/backend.yaml", len(before), len(before[-1]) + 1)
    assert [(of.file, of.line, of.column) for of in problems] == [place] and problems[0].message.startswith(message)


@pytest.mark.parametrize("file", ["backend", "kernel"])
@pytest.mark.parametrize("fault", ["def broken(:", "broken = {{ module.in_features }} {{ parameters.width }}"])
def test_python_that_is_none(tmp_path, file, fault):
    """After loops, conditions, comments, and lines that a filter has filled anew."""
    before = "{# of\nlines #}\n{% if parameters.width %}\n{% filter pydoc %}\na text\nof lines\n"
    before += "{% endfilter %}\n{% endif %}\n"
    text = {"backend": kit.BACKEND + "{% set module = modules[0] %}\n", "kernel": kit.KERNEL}[file]
    text += f"{before}{fault}\nY = 1\n"
    message = error_of(tmp_path, **{file: text})
    assert message.startswith(place(tmp_path, f"{file}.py.jinja", text, fault))
    assert re.search(
        r"invalid Python: invalid syntax.*, in line \d+ of backends/mine.py: (def broken|broken = 64 4)", message
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("KERNELS = ()", "", "the module it renders defines no KERNELS; "),
        ("ADD = {", "TABLE = {", "the module it renders defines no ADD; "),
        ('"{{ module.name }}": print,', "", "the ADD it renders has no function for o_proj; "),
    ],
)
def test_a_module_without_what_the_runtime_looks_up(tmp_path, old, new, message):
    assert old in kit.BACKEND
    found = error_of(tmp_path, backend=kit.BACKEND.replace(old, new))
    assert found.startswith(f"{tmp_path}/kinds/mine/backend.py.jinja: {message}")


def test_a_table_may_be_any_expression(tmp_path):
    text = kit.BACKEND.replace("ADD = {", "ADD = dict() | {") + "from itertools import count as KERNELS\n"
    assert "ADD = dict() | {" in compile_spec(kit.write(tmp_path, backend=text)).files["backends/mine.py"]


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ module.update(name='x') }}",
        "{{ (lambda).x }}",
        "{% include '../../../demo.yaml' %}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox(tmp_path, text):
    assert "kernel.py.jinja:" in (message := error_of(tmp_path, kernel=kit.KERNEL + text)) or "no template" in message
