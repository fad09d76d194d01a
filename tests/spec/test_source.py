"""YAML is read by 1.2 rules, with positions, and nothing that a file can contain ends in a traceback."""

import json

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorac.errors import Problem, SpecError
from lorac.spec import SpecFile, load_spec, place
from lorac.spec.scalars import ScalarError, plain_scalar
from lorac.spec.source import read_source

TEXT = st.text(st.characters(max_codepoint=0xD7FF), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)

GOOD = """\
lorac: 1
name: demo
model: {hidden: 64, intermediate: 96, heads: 4, layers: 2, vocab: 128, tied: false}
dtype: float32
adapters: {slots: 4, max_rank: 16, targets: [qkv_proj, down_proj]}
backends:
  csgmv: {segments: {by: chunk, chunk: {1: 16, 64: 32}}}
graphs:
  decode: {max_rows: 8}
  prefill: {max_tokens: 64}
"""


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "spec.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_source(path)

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            (word, word)
            for word in ("yes", "No", "on", "OFF", "y", "n", "1:30", "1_000", "0b11", "1e", "e5", "+", "tRue")
        ],
        *[(word, None) for word in ("", "~", "null", "NULL")],
        *[("true", True), ("FALSE", False), ("0", 0), ("-12", -12), ("+7", 7), ("0x10", 16), ("0o17", 15)],
        *[("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-.inf", float("-inf")), ("0.5", 0.5)],
    ],
)
def test_core_schema(text, value):
    read = plain_scalar(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", ["010", "-007", "00", "+08"])
def test_leading_zeros_are_refused_with_both_readings(text):
    with pytest.raises(ScalarError, match="leading zeros") as caught:
        plain_scalar(text)
    assert f'write {int(text)}, or "{text}" for a text' == caught.value.hint


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=4))
def test_json_is_read_as_json_with_every_position_right(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("json") / "spec.yaml"
    path.write_text(json.dumps(data, indent=2))
    source = read_source(path)
    assert repr(source.data) == repr(data)  # repr: 1, 1.0 and True differ
    lines = path.read_text().splitlines()

    def written_at(position):
        return lines[position[0] - 1][position[1] - 1 :]

    def walk(value, trail):
        if isinstance(value, dict):
            for key, inner in value.items():
                assert written_at(source.keys[*trail, key]).startswith(json.dumps(key))
                walk(inner, (*trail, key))
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                walk(inner, (*trail, index))
        else:
            assert written_at(source.values[trail]).startswith(json.dumps(value))

    walk(data, ())


def test_problems_are_placed_at_the_value_the_key_or_the_nearest_known_key(read):
    source = read("a:\n  b: [1,\n      2]\n  c: 3\n")
    places = {
        ("a", "c"): (4, 6),
        ("a", "b"): (2, 3),
        ("a", "b", 1): (3, 7),
        ("a", "b", 7, "x"): (2, 3),
        ("a", "missing"): (1, 1),
        ("z",): (1, 1),
        (): (1, 1),
    }
    placed = place([Problem("m", path) for path in places], source)
    assert [(problem.line, problem.column) for problem in placed] == list(places.values())
    assert source.place(Problem("m", ("a", "c"), at_key=True)).column == 3
    assert placed[0].source_line == "  c: 3"
    assert place(placed, source) == placed


def test_long_lines_are_cut_and_never_printed_beyond_the_screen(read):
    source = read("a: '" + "x" * 5000 + "'\nb: {" + " " * 5000 + "c: 2}\n")
    assert len(source.place(Problem("m", ("a",))).text()) < 500
    far = source.place(Problem("m", ("b", "c")))
    assert far.column > 5000 and far.source_line == ""


def test_aliases_are_expanded(read):
    source = read("a: &x {p: 1}\nb: [*x, *x]\n")
    assert source.data == {"a": {"p": 1}, "b": [{"p": 1}, {"p": 1}]}
    assert source.problems == ()


def test_byte_order_mark_and_windows_line_ends(read):
    source = read(b"\xef\xbb\xbflorac: 1\r\nname: demo\r\n")
    assert source.data == {"lorac": 1, "name": "demo"}
    assert source.values["name",] == (2, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\n" * 2_000_000, "larger than 1 MiB"),
        (b"a: [" + b"1, " * 20_000 + b"1]", "more than 10000 values"),
        (b"[" * 100_000, "nested more than 32 deep"),
        (b"a: " + b"{b: " * 5000, "nested more than 32 deep"),
        (b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*%s, *%s]\n" % (i, i, p, p) for i, p in
            enumerate([b"a", *[b"b%d" % i for i in range(40)]])), "aliases"),
        (b"a: \xed\xa0\x80", "not UTF-8"),
        (b'a: "\\ud800"\nlorac: 1', "half of a surrogate pair"),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1", "number out of range"),
        (b"%YAML 2.0\n---\na: 1", "incompatible YAML document"),
    ],
)  # fmt: skip
def test_hostile_files(read, content, message):
    try:
        problems = read(content).problems
    except SpecError as error:
        problems = error.problems
    assert len(problems) == 1 and message in problems[0].message
    assert len(problems[0].text()) < 1000


@pytest.mark.parametrize("path", ["absent.yaml", ".", "nul\0.yaml"])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).startswith(f"{path}: cannot be read: ")


def survives(path):
    """load_spec answers with a spec or a SpecError whose every problem names the file and can be printed."""
    try:
        assert isinstance(load_spec(path), SpecFile)
    except SpecError as error:
        assert error.problems and all(problem.file == str(path) for problem in error.problems)
        str(error).encode()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text("{}[]:,-#&*!|>'\"%@` \n\tab0<?.\\", max_size=60).map(str.encode))
@example(b"? a")
@example(b"&a : *a")
@example(b"a: !<tag:yaml.org,2002:int> b")
def test_any_bytes(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "spec.yaml"
    path.write_bytes(content)
    survives(path)


def replaced(data, trail, value):
    """The data with `value` in the place of what is at `trail`."""
    if not trail:
        return value
    inner = replaced(data[trail[0]], trail[1:], value)
    return {**data, trail[0]: inner} if isinstance(data, dict) else [*data[: trail[0]], inner, *data[trail[0] + 1 :]]


def trails(data, trail=()):
    yield trail
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, inner in items:
        yield from trails(inner, (*trail, key))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_in_any_place(tmp_path_factory, data):
    spec = yaml.safe_load(GOOD)
    trail = data.draw(st.sampled_from([*trails(spec)]))
    words = st.sampled_from(["preset", "config", "linears", "fused", "experts", "kind", "templates", "../x", "\0", "/"])
    value = data.draw(VALUES | words | st.dictionaries(words, VALUES | words, max_size=3))
    path = tmp_path_factory.mktemp("values") / "spec.yaml"
    path.write_text(yaml.safe_dump(replaced(spec, trail, value), allow_unicode=False))
    survives(path)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD)), st.integers(0, 12), TEXT)
def test_any_edit_of_a_good_spec(tmp_path_factory, start, removed, inserted):
    path = tmp_path_factory.mktemp("edits") / "spec.yaml"
    path.write_text(GOOD[:start] + inserted + GOOD[start + removed :])
    survives(path)
