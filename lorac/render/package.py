"""Plan -> {path: text}: every file of a package, in memory. Nothing else in lorac knows Jinja."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from lorac.errors import BuildError, Problem, format_problems
from lorac.plan.buffers import room
from lorac.plan.kernels import block_of
from lorac.plan.model import BackendPlan, KernelPlan, Launch, ModulePlan, Plan
from lorac.render.environment import environment
from lorac.render.names import attributes_read, check_names, exists
from lorac.render.python import render_python
from lorac.render.tables import check_tables
from lorac.runtime.load import FORMAT
from lorac.runtime.room import SPAN, UNIT
from lorac.spec.backend import declaration_path
from lorac.spec.folders import BackendFolder
from lorac.spec.source import place, read_source
from lorac.spec.wording import nearest

# what a kernel template may use besides what it defines itself
KERNEL_NAMES = {"kernel", "module", "package", "parameters", "backend"}


def render(plan: Plan, folders: dict[str, BackendFolder], fingerprint: str) -> dict[str, str]:
    """Every file of the package by its path inside it, the manifest last.

    `folders` holds each backend block's. Raises BuildError where a template and the plan disagree.
    """
    package = _package(plan)
    bare = {variant.name for variant in plan.variants if not variant.adapters}
    common = {"package": package, "modules": [_module(module) for module in plan.modules]}
    common["has_experts"] = any(module.experts for module in plan.modules)
    context = {
        "layout": common,
        "admission": {
            "package": package,
            "decode": plan.decode,
            "prefill": plan.prefill,
            "variants": plan.variants,
            "backends": [asdict(backend) | {"off": _off(plan, backend)} for backend in plan.backends],
        },
        "step": {
            "package": package,
            "variants": plan.variants,
            "backends": plan.backends,
            "limits": _limits(plan),
        },
        "decode": {"package": package, "backends": plan.backends, "bare": bare},
        "prefill": {"package": package, "backends": plan.backends, "bare": bare},
        "init": common | {"backends": plan.backends},
    }
    env = environment()
    files = {}
    for name, values in context.items():
        path = "__init__.py" if name == "init" else f"{name}.py"
        template = f"package/{name}.py.jinja"
        values = values | {"header": _header(plan, f"templates/{template}")}
        files[path] = render_python(env, template, path, values)
    files["backends/__init__.py"] = (
        _header(plan, "templates/backends/") + '\n"""The backends of this package, one module each."""\n'
    )
    for backend in plan.backends:
        files[f"backends/{backend.name}.py"] = _backend(plan, backend, folders[backend.name], package)
    return dict(sorted(files.items())) | {"manifest.json": _manifest(plan, files, fingerprint)}


def _backend(plan: Plan, backend: BackendPlan, folder: BackendFolder, package: dict) -> str:
    env = environment(folder.path)
    template = "backend.py.jinja"
    file = folder.path / template
    if not file.is_file():
        raise BuildError(f"{file} is not there: it is the template that renders a backend's module")
    _check_kernels(env, backend, folder.path)
    _check_parameters(env, template, backend, folder.path)
    served = [
        _module(module) | _kernels([kernel for kernel in backend.kernels if kernel.module == module.name])
        for module in plan.modules
        if backend.experts or not module.experts
    ]
    context = {
        "package": package,
        "backend": backend,
        "parameters": dict(backend.parameters),
        "modules": [module for module in served if not module["experts"]],
        "experts": [module for module in served if module["experts"]],
        "header": _header(plan, f"{folder.name}/{template}{', beside the spec' * folder.beside_spec}"),
    }
    # whoever writes a backend uses what serves it; its parameters alone must be read
    text = render_python(env, template, f"backends/{backend.name}.py", context, optional=frozenset(context))
    names = ([module["name"] for module in context[kind]] for kind in ("modules", "experts"))
    check_tables(text, str(file), *names)
    return text


def _check_kernels(env, backend: BackendPlan, folder: Path) -> None:
    """Raises BuildError, placed in the declaration, for templates of kernels that are not there."""
    missing = {kernel.stage: kernel.template for kernel in backend.kernels if not exists(env, kernel.template)}
    if missing:
        problems = [
            Problem(
                f"there is no template {template}",
                ("kernels", stage, "template"),
                expected="a file of the backend's folder, or of lorac's templates, as in shared/shrink.py.jinja",
                hint=nearest(template, env.list_templates()),
            )
            for stage, template in missing.items()
        ]
        raise BuildError(format_problems(place(problems, read_source(declaration_path(folder)))))


def _check_parameters(env, template: str, backend: BackendPlan, folder: Path) -> None:
    """Every declared parameter is read by some template of the backend; every name a kernel template reads exists."""
    read = attributes_read(env, template, "parameters")
    for kernel in {kernel.template for kernel in backend.kernels}:
        read |= attributes_read(env, kernel, "parameters")
        check_names(env, kernel, KERNEL_NAMES)
    unread = sorted(name for name, _ in backend.parameters if name not in read)
    if unread:
        source = read_source(declaration_path(folder))
        problems = [Problem(f"no template reads the parameter {name}", ("parameters", name)) for name in unread]
        raise BuildError(format_problems(place(problems, source)))


def _package(plan: Plan) -> dict:
    names = ("name", "family", "dtype", "slots", "max_rank", "layers", "hidden", "vocab", "tied", "tp", "ep", "paths")
    widths = (plan.max_rank, *plan.narrow)
    return {name: getattr(plan, name) for name in names} | {"unit": UNIT, "span": SPAN, "widths": widths}


def _module(module: ModulePlan) -> dict:
    values = asdict(module)
    if module.experts:
        gate, up, down = module.experts.names
        values["expert_names"] = (gate, up) if len(module.slices) == 2 else (down,)
    return values


def _kernels(kernels: list[KernelPlan]) -> dict:
    """A module's kernels in order, and by stage."""
    nodes = [_kernel(kernel) for kernel in kernels]
    return {"kernels": nodes, "stages": {node["stage"]: node for node in nodes}}


def _kernel(kernel: KernelPlan) -> dict:
    launches, source = [], "default"
    for launch in kernel.launches:
        note = launch.source if launch.source != source else ""
        source = launch.source
        launches.append({"row": launch_row(kernel, launch), "note": note})
    return asdict(kernel) | {"launches": launches}


def launch_row(kernel: KernelPlan, launch: Launch) -> tuple:
    """One line of a kernel's launch table: bounds and options, then its constants in the signature's order."""
    bounds = {"RANK": launch.rank, "ACTIVE": block_of(launch.adapters, 1) if launch.adapters > 0 else 0}
    options = {"PDL": int(launch.pdl), "STAGES": launch.stages, "WHOLE": int(launch.whole)}
    values = dict(launch.tile) | bounds | options
    constants = (values[name] for name in kernel.constants)
    return (launch.rows, launch.rank, launch.adapters, launch.warps, launch.stages, launch.pdl, *constants)


def _limits(plan: Plan) -> dict[str, int | bool]:
    rows, requests = room(plan.decode, plan.prefill)
    return {
        "rows": rows,
        "requests": requests,
        "streams": plan.decode.streams,
        "agree": plan.agree,
        "slots_block": block_of(plan.slots, 2),
    }


def _off(plan: Plan, backend: BackendPlan) -> list[tuple[str, str]]:
    """(phase, reason) for each phase this backend has no graphs in."""
    reasons = {decision.subject: decision.reason for decision in plan.decisions}
    off = []
    if not backend.decode:
        why = reasons.get(f"{backend.name}: decode graphs", "the spec asks for no decode graphs")
        off.append(("decode", why))
    if not backend.prefill:
        why = reasons.get(f"{backend.name}: prefill graphs", "the spec asks for no prefill graphs")
        off.append(("prefill", why))
    return off


def _header(plan: Plan, template: str) -> str:
    """Two lines, always: Triton keys compiled kernels by their line number. The first follows Go's convention."""
    return f'# Code generated by lorac from the spec "{plan.name}". DO NOT EDIT.\n# Template: {template}'


def _manifest(plan: Plan, files: dict[str, str], fingerprint: str) -> str:
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(files.items())}
    manifest = {"lorac": FORMAT, "name": plan.name, "fingerprint": fingerprint, "plan": plan.digest(), "files": hashes}
    return json.dumps(manifest, indent=2) + "\n"
