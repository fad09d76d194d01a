"""`lorac verify`: a package against the float64 oracle, over every backend, module, bucket edge and awkward batch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lorac.runtime.errors import PackageError, RuntimeFault
from lorac.runtime.launch import interpreted
from lorac.runtime.layout import Module
from lorac.runtime.load import load
from lorac.runtime.package import backend_module
from lorac.runtime.step import Step
from lorac.verify.cases import Case, decode_cases, prefill_cases, smaller
from lorac.verify.check import Outcome, check, filled_slots, prepare
from lorac.verify.experts import check_experts


@dataclass
class Report:
    """Checks and worst error per (backend, module); failures with their smallest input."""

    device: str
    dtype: str
    checks: dict[tuple[str, str], int] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A table of modules by backend, then the failures."""
        lines = [f"{self.device}, {self.dtype}", f"{'backend':<12} {'module':<16} {'checks':>7} {'worst error':>12}"]
        for (backend, module), count in self.checks.items():
            lines.append(f"{backend:<12} {module:<16} {count:>7} {self.errors[backend, module]:>12.2e}")
        lines += [f"{backend:<12} skipped: {reason}" for backend, reason in self.skipped.items()]
        lines += [f"left out: {what}" for what in self.left_out]
        lines += [f"FAILED {failure}" for failure in self.failures]
        total = sum(self.checks.values())
        lines.append(f"{total} checks, {len(self.failures)} failed")
        return "\n".join(lines)


def verify(
    folder: str | Path,
    device: str | None = None,
    backends: list[str] | None = None,
    most_rows: int | None = None,
    seed: int = 0,
    show: Callable[[float, str], None] = lambda share, words: None,
) -> Report:
    """Check a package on the device there is.

    `most_rows` leaves larger batches out; on a CPU 16 unless stated, for Triton's interpreter is slow. Raises
    PackageError where there is no such device, where nothing of the package is checked on it, and where its code fails.
    """
    package = load(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PackageError("there is no CUDA device here; leave --device out, or name cpu")
    most = (1 << 30 if device == "cuda" else 16) if most_rows is None else most_rows
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    layers = {
        module.name: sorted({*(module.layers[:1] or (0,)), *module.layers[-1:]}) for module in package.LAYOUT.modules
    }
    slots = filled_slots(package, device, layers, generator)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report = Report(name, package.LAYOUT.dtype)
    steps = _steps(package, slots, backends or package.BACKENDS, device, report)
    report.left_out = _left_out(package.admission, most)
    cases = _cases(package, most, rng)
    if not cases:
        raise PackageError(f"nothing is left to check: {'; '.join(report.left_out)}: allow more rows")
    total, done = len(steps) * len(cases), 0
    for step in steps:
        for case in cases:
            for module, layer, outcome in _run(step, case, package, layers, rng, generator):
                _note(report, step, module.name, outcome)
                if outcome.problem:
                    report.failures.append(_explain(step, case, package, module, layer, outcome, generator))
            done += 1
            show(done / total, f"{done} of {total} batches")
    for step in steps:
        if not any(backend == step.backend_name for backend, _ in report.checks):
            report.skipped[step.backend_name] = "it serves no module of this package"
    if not report.checks:
        raise PackageError(f"nothing was checked: {_reasons(report)}")
    return report


def _run(step: Step, case: Case, package, layers: dict, rng: random.Random, generator: torch.Generator) -> list:
    """One batch through every module, in one of the layers that were filled."""
    with _blaming(package, f"{step.backend_name}, {case.describe()}"):
        prepare(step, case)
    outcomes = []
    for module in package.LAYOUT.modules:
        if module.experts is None or hasattr(step.backend, "EXPERT_ADD"):
            layer = rng.choice(layers[module.name])
            with _blaming(package, f"{step.backend_name} {module.name} layer {layer}, {case.describe()}"):
                outcomes.append((module, layer, _check(package, step, module, layer, case, generator)))
    return outcomes


@contextmanager
def _blaming(package, what: str) -> Iterator[None]:
    """Raises what the package's code raises as a PackageError: while doing what, and its innermost line in the package.

    Errors that the runtime raises on purpose say so themselves.
    """
    try:
        yield
    except RuntimeFault:
        raise
    except Exception as error:  # generated from templates that anybody writes
        place, trace = "", error.__traceback__
        while trace:
            of = trace.tb_frame.f_globals
            if of.get("__name__", "").startswith(package.__name__ + "."):
                place = f"{of['__file__']}:{trace.tb_lineno}: "
            trace = trace.tb_next
        raise PackageError(f"{what}: {place}{type(error).__name__}: {error}") from error


def _check(package, step: Step, module: Module, layer: int, case: Case, generator: torch.Generator) -> Outcome:
    one = check if module.experts is None else check_experts
    return one(package, step, module, layer, case, generator)


def _explain(
    step: Step, case: Case, package, module: Module, layer: int, outcome: Outcome, generator: torch.Generator
) -> str:
    """A failure with the smallest input found that still shows it."""

    def again(candidate: Case) -> Outcome:
        prepare(step, candidate)
        return _check(package, step, module, layer, candidate, generator)

    least = _smallest(case, again)
    problem = again(least).problem or outcome.problem
    return f"{step.backend_name} {module.name} layer {layer}, {least.describe()}: {problem}"


def _steps(package, slots, backends, device: str, report: Report) -> list[Step]:
    """A step per backend that can run here: Triton's kernels need a GPU, or the interpreter and no bfloat16."""
    steps = []
    for backend in backends:
        with _blaming(package, f"backend {backend}"):
            module = backend_module(package.__name__, package.BACKENDS, backend)
            kernels, operators = module.KERNELS, getattr(module, "OPERATORS", ())
        missing = [name for name in operators if not torch._C._dispatch_has_kernel(name)]
        if missing:
            report.skipped[backend] = f"no operator {missing[0]} is registered: import what defines it"
        elif not kernels or device == "cuda":
            steps.append(package.Step(slots, backend))
        elif not interpreted():
            report.skipped[backend] = "its kernels need a GPU, or TRITON_INTERPRET=1"
        elif package.LAYOUT.dtype == "bfloat16":
            report.skipped[backend] = "Triton's interpreter computes bfloat16 wrongly"
        else:
            steps.append(package.Step(slots, backend))
    if not steps:
        raise PackageError(f"no backend of this package can run on {device}: {_reasons(report)}")
    return steps


def _reasons(report: Report) -> str:
    return "; ".join(f"{backend}: {reason}" for backend, reason in report.skipped.items())


def _cases(package, most: int, rng: random.Random) -> list[Case]:
    admission = package.admission
    slots = package.LAYOUT.slots
    requests = max(admission.PREFILL_REQUESTS.values(), default=4)
    return [
        *decode_cases(admission.DECODE_BUCKETS, slots, most, rng),
        *prefill_cases(admission.PREFILL_BUCKETS, slots, most, requests, rng),
    ]


def _left_out(admission, most: int) -> list[str]:
    """The buckets that no batch of up to `most` rows fills, in words."""
    left_out = []
    for phase, buckets in (("decode", admission.DECODE_BUCKETS), ("prefill", admission.PREFILL_BUCKETS)):
        larger = [str(size) for size in buckets if size > most]
        if larger:
            names = f"bucket {larger[0]}" if len(larger) == 1 else f"buckets {larger[0]} to {larger[-1]}"
            left_out.append(f"{phase} {names}, larger than --max-rows, which is {most}")
    return left_out


def _smallest(case: Case, run: Callable[[Case], Outcome], budget: int = 200) -> Case:
    """Take away requests and rows for as long as the failure stays."""
    while budget > 0:
        for candidate in smaller(case):
            budget -= 1
            if run(candidate).problem:
                case = candidate
                break
            if budget <= 0:
                return case
        else:
            return case
    return case


def _note(report: Report, step: Step, module: str, outcome: Outcome) -> None:
    key = (step.backend_name, module)
    report.checks[key] = report.checks.get(key, 0) + 1
    report.errors[key] = max(report.errors.get(key, 0.0), outcome.error)
