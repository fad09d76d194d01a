"""A package whose kernels linger: each may wait between letting its dependents start and storing what they read."""

import ast
import hashlib
import json
import re
import shutil
from pathlib import Path

import torch

import lorac
from lorac.runtime.package import backend_module

# Appended to a backend's source. Kernels take no further argument: the address of their delay is written into calls.
# No load or store is moved past assembly that has side effects.
LINGER = '''

_LINGER = tl.constexpr("""
{
.reg .pred other, early;
.reg .b64 now, until;
.reg .b32 program, mask;
mov.u32 program, %ctaid.x;
ld.volatile.global.b32 mask, [$1+8];
and.b32 program, program, mask;
setp.ne.u32 other, program, 0;
@other bra done;
ld.volatile.global.b64 until, [$1];
mov.u64 now, %globaltimer;
add.u64 until, until, now;
again:
mov.u64 now, %globaltimer;
setp.lt.u64 early, now, until;
@early bra again;
done:
mov.u32 $0, 0;
}
""")


@triton.jit
def _linger(at: tl.constexpr):
    tl.inline_asm_elementwise(_LINGER, "=r,l", [at], tl.int32, is_pure=False, pack=1)
'''


class Delays:
    """How long each kernel of a backend lingers, and in which programs. Read by the device at each launch."""

    def __init__(self, kernels: list[str], device: str = "cuda"):
        self.kernels = sorted(kernels)
        self.table = torch.zeros(len(kernels), 2, dtype=torch.int64, device=device)

    def set(self, nanoseconds: dict[str, int], every: int = 1) -> None:
        """Let these kernels linger so long, and no other; in every program, or every second, fourth, ... of them."""
        self.table.copy_(torch.tensor([[nanoseconds.get(name, 0), every - 1] for name in self.kernels]))

    def address(self, kernel: str) -> int:
        """Of the kernel's entry."""
        return self.table.data_ptr() + 16 * self.kernels.index(kernel)


def dependent_kernels(package, backend: str = "fused") -> list[str]:
    """The names of the backend's kernels that launch dependents."""
    module = backend_module(package.__name__, package.BACKENDS, backend)
    return [kernel.name for kernel in module.KERNELS if any(launch.pdl for launch in kernel.launches)]


_WAIT = re.compile(r"\btl\.extra\.cuda\.gdc_wait\(\)|(?:@\w+ )?\bgriddepcontrol\.wait;")


def lingering(source: str, delays: Delays, waits: bool) -> str:
    """A backend's source in which a kernel lingers when it has let its dependents go; without `waits`, none waits.

    That is where it lets them go, or where that is part of a value, before it stores. Functions that several kernels
    share linger where they are called. Lines keep their numbers.
    """
    lines = source.encode().splitlines(keepends=True)
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]

    def text(node: ast.AST) -> str:
        return b"".join(lines[node.lineno - 1 : node.end_lineno]).decode()

    owners = {
        function.name: max((name for name in delays.kernels if name in function.name), key=len, default="")
        for function in functions
    }

    def either(pattern: str) -> re.Pattern:
        """That, or a call of what has it and several kernels share."""
        shared = [node.name for node in functions if not owners[node.name] and re.search(pattern, text(node))]
        return re.compile("|".join([pattern, *(rf"\b{name}\(" for name in shared)]))

    let_go, wait = either("launch_dependents"), either(_WAIT.pattern)
    places = []
    for function in (of for of in functions if owners[of.name]):
        for node in (of for of in ast.walk(function) if isinstance(of, ast.Expr) and isinstance(of.value, ast.Call)):
            if let_go.search(text(node)):
                places.append((node.end_lineno, node.end_col_offset, "; {}", owners[function.name]))
            elif "_once_there(" in text(function) and text(node).lstrip().startswith("_store"):
                places.append((node.lineno, node.col_offset, "{}; ", owners[function.name]))
    assert {owner for *_, owner in places} == set(delays.kernels), "a kernel has no place to linger in"
    for line, column, form, owner in sorted(places, reverse=True):
        old = lines[line - 1]
        call = form.format(f"_linger({delays.address(owner)})").encode()
        lines[line - 1] = old[:column] + call + old[column:]
    changed = b"".join(lines).decode()
    if not waits:
        waiting = {owners[function.name] for function in functions if wait.search(text(function))}
        assert waiting >= set(delays.kernels), "a kernel does not wait"
        changed = _WAIT.sub(_no_wait, changed)
    return changed + LINGER


def _no_wait(found: re.Match) -> str:
    return "pass" if found[0].startswith("tl.") else ""


def load_lingering(package: Path, target: Path, delays: Delays, waits: bool = True):
    """Load a package's copy, written to `target`, in which the kernels of the fused backend linger."""
    shutil.copytree(package, target)
    path = target / "backends" / "fused.py"
    path.write_text(lingering(path.read_text(), delays, waits))
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["backends/fused.py"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return lorac.load(target)
