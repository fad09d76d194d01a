"""The command line: exit statuses, formats, and output that is plain where nobody watches."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages import ROOT, TINY, copy_of_tiny, tree
from safetensors.torch import save_file

from lorac import __version__
from lorac.cli import COMMANDS, main
from lorac.spec import load_spec


@pytest.fixture
def lorac(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own; gives its exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # how argparse ends
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_build_writes_below_generated_in_the_current_folder(lorac, tmp_path):
    status, out, err = lorac("build", TINY)
    assert (status, err) == (0, "") and re.fullmatch(r"generated/tiny: \d+ files written\n", out)
    assert (tmp_path / "generated" / "tiny" / "manifest.json").exists()
    assert lorac("build", TINY)[1] == "generated/tiny: unchanged\n"


def test_a_package_depends_on_no_place(lorac, tmp_path):
    """Another folder, another process, another hash seed: the same bytes."""
    spec = copy_of_tiny(tmp_path / "elsewhere")
    lorac("build", spec)
    command = [sys.executable, "-m", "lorac", "build", str(TINY), "--output", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env={"PYTHONHASHSEED": "77"}, check=True)
    assert tree(tmp_path / "generated" / "tiny") == tree(tmp_path / "out" / "tiny")


def test_comments_and_order_of_keys_do_not_count(lorac, tmp_path):
    spec = copy_of_tiny(tmp_path / "elsewhere")
    lines = spec.read_text().splitlines()
    moved = [line for line in lines if line.startswith(("name:", "dtype:"))]
    spec.write_text("\n".join(["# a comment", *moved[::-1], *(line for line in lines if line not in moved)]))
    lorac("build", TINY)
    assert lorac("build", spec, "--check")[0] == 0


def test_mistakes_in_specs_are_told_in_three_formats(lorac, tmp_path):
    spec = copy_of_tiny(tmp_path / "s", slots="slots: 3 -> slotz: 3", rank="max_rank: 16 -> max_rank: 0")
    status, out, err = lorac("build", spec)
    assert (status, out) == (2, "")
    assert re.search(rf"{spec}:\d+:\d+: unknown key slotz", err) and f"{spec}:" in err and "max_rank" in err
    status, out, _ = lorac("build", spec, "--format", "json")
    found = json.loads(out)
    assert status == 2 and {row["file"] for row in found} == {str(spec)} and all(row["line"] for row in found)
    status, out, _ = lorac("build", spec, "--format", "github")
    assert status == 2 and all(line.startswith(f"::error file={spec},line=") for line in out.splitlines())
    assert not (tmp_path / "generated").exists()


def test_other_specs_are_built_all_the_same(lorac, tmp_path):
    broken = copy_of_tiny(tmp_path / "s", name="name: tiny -> name: class")
    assert lorac("build", broken, TINY)[0] == 2
    assert (tmp_path / "generated" / "tiny").exists()


def test_check_names_differences_and_the_command_that_mends_them(lorac, tmp_path):
    lorac("build", TINY)
    assert lorac("build", TINY, "--check") == (0, "generated/tiny: up to date\n", "")
    assert lorac("build", TINY, "--check", "--quiet", "--format", "json") == (0, "[]\n", "")
    package = tmp_path / "generated" / "tiny"
    (package / "layout.py").unlink()
    status, out, err = lorac("build", TINY, "--check")
    assert (status, err) == (1, "")
    assert out.splitlines()[0] == "generated/tiny/layout.py: MISSING: is not there"
    assert out.splitlines()[-1] == f"  hint: run lorac build {TINY}"
    (package / "step.py").write_text("by hand")
    out = lorac("build", TINY, "--check")[1]
    assert "generated/tiny/step.py: CHANGED: is not what the spec gives" in out
    assert out.splitlines()[-1] == f"  hint: run lorac build {TINY} --force"
    status, out, _ = lorac("build", TINY, "--check", "--format", "github")
    assert status == 1 and len(out.splitlines()) == 2 and out.startswith("::error file=generated/tiny/layout.py,line=1")
    assert not (package / "layout.py").exists(), "--check writes nothing"
    assert lorac("build", TINY, "--force")[0] == 0
    assert lorac("build", TINY, "--check")[0] == 0


def test_check_says_once_that_a_package_is_not_there(lorac, tmp_path):
    line = f"generated/tiny: MISSING: is not there\n  hint: run lorac build {TINY}\n"
    assert lorac("build", TINY, "--check") == (1, line, "")
    (tmp_path / "generated" / "tiny").mkdir(parents=True)
    assert lorac("build", TINY, "--check") == (1, line, "")


@pytest.mark.parametrize("option", ["--check", "--diff", "--dry-run"])
def test_a_file_that_cannot_be_read_is_named(lorac, monkeypatch, option):
    lorac("build", TINY)
    read = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "layout.py" and "generated" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    status, out, err = lorac("build", TINY, option)
    assert (status, out) == (2, "") and "generated/tiny/layout.py cannot be read: Permission denied; make it" in err


def test_hand_edits_are_refused(lorac, tmp_path):
    lorac("build", TINY)
    (tmp_path / "generated" / "tiny" / "layout.py").write_text("by hand")
    status, _, err = lorac("build", TINY)
    assert status == 2 and "  layout.py\n" in err and "--force" in err
    assert lorac("build", TINY, "--dry-run")[0] == 2
    assert lorac("build", TINY, "--dry-run", "--force")[1] == "would write generated/tiny/layout.py\n"
    assert (tmp_path / "generated" / "tiny" / "layout.py").read_text() == "by hand"


def test_diff_and_dry_run_write_nothing(lorac, tmp_path):
    status, out, _ = lorac("build", TINY, "--diff")
    assert status == 0 and "--- /dev/null\n+++ b/tiny/layout.py\n" in out
    assert "would write generated/tiny/layout.py\n" in lorac("build", TINY, "--dry-run")[1]
    assert not (tmp_path / "generated").exists()
    lorac("build", TINY)
    assert lorac("build", TINY, "--diff")[1] == lorac("build", TINY, "--dry-run")[1] == ""


def test_one_name_is_one_package(lorac, tmp_path):
    status, _, err = lorac("build", TINY, copy_of_tiny(tmp_path / "s"))
    assert status == 2 and f"has the name of {TINY}'s, tiny" in err


def test_quiet_is_silent(lorac):
    assert lorac("build", TINY, "--quiet") == (0, "", "")


def test_what_a_build_switches_off_is_said_by_each(lorac, tmp_path):
    spec = copy_of_tiny(tmp_path)
    text = spec.read_text()
    assert "parallel:" not in text
    spec.write_text(text + "parallel: {dp_attention: true}\n")
    for _ in range(2):
        status, _, err = lorac("build", spec)
        assert status == 0 and f"{spec}: warning: triton: prefill graphs: off; under DP attention" in err
        assert "torch" not in err  # which never has any
    assert lorac("build", "--quiet", spec) == (0, "", "")


@pytest.mark.parametrize("arguments", [[], ["bild"], ["build"], ["build", "--nope", "x"], ["explain"]])
def test_misuse_is_status_2(lorac, arguments):
    status, out, err = lorac(*arguments)
    assert (status, out) == (2, "") and err.startswith("usage: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example_that_it_takes(lorac, command):
    status, out, _ = lorac(command, "--help")
    assert status == 0 and f"example:\n  lorac {command}" in out
    assert COMMANDS[command] in lorac("--help")[1]
    example = out.split("example:\n  lorac ")[1].split()
    err = lorac(*example, "--no-such-option")[2]
    assert "unrecognized arguments: --no-such-option" in err, "the example is refused for another reason"


def test_explain_shows_every_module_backend_and_decision(lorac):
    status, text, _ = lorac("explain", TINY)
    plan = json.loads(lorac("explain", TINY, "--json")[1])
    assert status == 0 and max(map(len, text.splitlines())) < 200
    for module in plan["plan"]["modules"]:
        assert f"\n{module['name']} " in text
    for decision in plan["plan"]["decisions"]:
        assert decision["reason"] in text
    slot_bytes = sum(buffer["bytes"] for buffer in plan["plan"]["buffers"] if buffer["name"] != "metadata")
    assert plan["totals"]["slot_bytes"] == slot_bytes
    for name, totals in plan["totals"]["backends"].items():
        assert re.search(rf"\n{name} +{totals['graphs']} +{totals['kernels']} +{totals['launches']} ", text)
    assert "\x1b" not in text


def test_explain_lists_every_graph_with_its_bytes(lorac, tmp_path):
    spec = copy_of_tiny(tmp_path, streams="buckets: [1, 2, 4, 8] -> buckets: [1, 2, 4, 8]\n    streams: 2")
    parts = json.loads(lorac("explain", spec, "--json")[1])
    text = lorac("explain", spec)[1]
    for backend in parts["plan"]["backends"]:
        for phase in ("decode", "prefill"):
            listed = [g for g in parts["graphs"] if (g["backend"], g["phase"]) == (backend["name"], phase)]
            expected = {
                (b["size"], name, stream) for b in backend[phase] for name in b["variants"] for stream in (0, 1)
            }
            assert {(g["bucket"], g["variant"], g["stream"]) for g in listed} == expected
            assert len(listed) == len(expected)
        own = [graph for graph in parts["graphs"] if graph["backend"] == backend["name"]]
        totals = parts["totals"]["backends"][backend["name"]]
        assert (totals["graphs"], totals["graph_bytes"]) == (len(own), sum(graph["bytes"] for graph in own))
    # a line per bucket, a cell per variant and one for scratch where a backend has any
    head = "captured decode, rows +triton: nolora +one +lora +scratch +csgmv: nolora +one +lora +scratch +torch: nolora"
    cell = r" +[\d.]+ (B|KiB)"
    assert re.search(rf"\n{head} +one +lora(\n +[1248]{cell * 11}){{4}}\n", text)
    head = "breakable prefill, tokens +triton: nolora +one +lora +scratch +csgmv: nolora +one +lora +scratch"
    assert re.search(rf"\n{head}(\n +\d+{cell * 8}){{12}}\n", text)
    assert "2 streams of steps, each with graphs" in text


def test_explain_refuses_a_broken_spec(lorac, tmp_path):
    status, out, err = lorac("explain", tmp_path / "none.yaml")
    assert (status, out) == (2, "") and "none.yaml: cannot be read" in err


def test_the_committed_schema_is_current(lorac):
    assert lorac("schema") == (0, (ROOT / "specs" / "schema.json").read_text(), "")


def test_init_writes_a_spec_that_builds_and_never_overwrites(lorac, tmp_path):
    folder = tmp_path / "My-Model.7B"
    folder.mkdir()
    preset = ROOT / "lorac" / "spec" / "presets" / "qwen3-0.6b.json"
    (folder / "config.json").write_text(preset.read_text())
    arguments = ("init", "--config", folder / "config.json")
    text = lorac(*arguments)[1]
    spec = folder / "lora.yaml"
    assert lorac(*arguments, "-o", spec) == (0, "", "")
    assert spec.read_text() == text.replace(f'; save it in "{folder}"', "")
    assert load_spec(spec).spec.name == "my_model_7b"
    assert lorac("build", spec)[0] == 0
    status, _, err = lorac(*arguments, "-o", spec)
    assert status == 2 and "lora.yaml exists" in err and "save it in" not in spec.read_text()


def test_inspect_tells_what_an_adapter_holds_and_whether_a_spec_serves_it(lorac, tmp_path):
    status, out, _ = lorac("inspect", tmp_path)
    assert status == 2 and "adapter_config.json" in out
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    factors = {"A": torch.ones(4, 64), "B": torch.ones(64, 4)}
    tensors = {name.format(layer, part): factor.clone() for layer in (0, 1) for part, factor in factors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    status, out, _ = lorac("inspect", tmp_path, "--spec", TINY)
    assert status == 0 and re.search("o_proj +2 +\\[4, 64\\]", out) and "tiny serves it" in out
    narrow = copy_of_tiny(tmp_path / "s", targets="[qkv_proj, o_proj, -> [qkv_proj,")
    status, out, _ = lorac("inspect", tmp_path, "--spec", narrow)
    assert status == 2 and "o_proj" in out.splitlines()[-1]


def test_python_m_lorac_is_lorac():
    done = subprocess.run([sys.executable, "-m", "lorac", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"lorac {__version__}\n")


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m lorac explain {TINY} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["explain"], ["build", "--diff"], ["build", "--dry-run"]], ids=" ".join)
def test_output_that_cannot_be_written_is_told_in_a_line(tmp_path, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lorac", *command, str(TINY)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (2, "standard output cannot be written: No space left on device\n")


@pytest.fixture
def large(lorac, tmp_path):
    """A package whose smallest bucket has 32 rows."""
    small = "prefill:\n    mode: breakable\n    max_tokens: 64\n    max_requests: 4"
    prefill = f"{small} -> prefill: {{max_tokens: 64, buckets: [40]}}"
    lorac("build", copy_of_tiny(tmp_path, decode="buckets: [1, 2, 4, 8] -> buckets: [32, 64]", prefill=prefill))
    return tmp_path / "generated" / "tiny"


def test_verify_names_the_buckets_it_leaves_out(lorac, large):
    status, out, err = lorac("verify", large, "--backend", "torch", "--device", "cpu", "--max-rows", 39)
    assert (status, err) == (0, "") and re.search(r"\ntorch +o_proj +[1-9]\d* ", out)
    left_out = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert left_out == [
        "left out: decode bucket 64, larger than --max-rows, which is 39",
        "left out: prefill buckets 40 to 64, larger than --max-rows, which is 39",
    ]


def test_verify_without_a_check_fails(lorac, large):
    status, out, err = lorac("verify", large, "--device", "cpu")
    assert (status, out) == (2, "") and err.startswith("nothing is left to check: ")
    assert "decode buckets 32 to 64, larger than --max-rows, which is 16" in err


@pytest.mark.parametrize("rows", ["0", "-3", "many"])
def test_verify_refuses_numbers_of_no_rows(lorac, tmp_path, rows):
    status, out, err = lorac("verify", tmp_path, f"--max-rows={rows}")
    assert (status, out) == (2, "") and "argument --max-rows: " in err


def test_verify_refuses_devices_there_are_none_of(lorac, monkeypatch):
    assert lorac("verify", ROOT / "generated" / "tiny", "--device", "gpu")[0] == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = lorac("verify", ROOT / "generated" / "tiny", "--device", "cuda")
    assert (status, err) == (2, "there is no CUDA device here; leave --device out, or name cpu\n")


def test_verify_wants_a_package_not_its_spec(lorac):
    status, _, err = lorac("verify", TINY)
    assert status == 2
    assert err == f"{TINY} is a file, not the folder of a package; `lorac build SPEC` makes one of a spec\n"
