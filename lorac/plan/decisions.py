"""Decisions: what does not work together, each switched off in one place, with the reason a user reads in `explain`."""

from lorac.plan.kernels import TMA_TARGETS, UNLIMITED, spills, tile_rank
from lorac.plan.model import Decision, KernelPlan, ModulePlan, Variant
from lorac.runtime.segments import Segments
from lorac.spec.backend import Declaration

# MoE runners whose base-only graph was compared with their LoRA graph; others keep a single variant
VALIDATED_RUNNERS = ("triton",)


def prefill_mode(
    block: str, asked: str, declaration: Declaration, segments: Segments, experts: bool, dp_attention: bool
) -> tuple[str, list[Decision]]:
    """The prefill graph mode of one backend, and why it is off where it was asked for.

    A backend that never has any is no cause for a warning, for nothing in the spec would change that.
    """
    if asked == "off":
        return "off", []
    level = "warning"
    if not declaration.prefill_graphs:
        reason, level = declaration.no_prefill_graphs or "the backend declares none", "note"
    elif dp_attention:
        reason = "under DP attention the ranks' batches differ, so one could replay what another runs eagerly"
    elif asked not in declaration.prefill_graphs:
        reason = f"the backend supports {' and '.join(declaration.prefill_graphs)}, not {asked}"
    elif experts and asked == "full":
        reason = "a full graph fixes the routing of experts, which must be recomputed for every batch; use breakable"
    else:
        return asked, []
    return "off", [Decision(f"{block}: prefill graphs", "off", reason, level)]


def moe_variants(
    variants: tuple[Variant, ...], experts: bool, runner: str
) -> tuple[tuple[Variant, ...], list[Decision]]:
    """All variants, or the widest alone for a MoE runner whose dual capture was never validated."""
    if not experts or runner in VALIDATED_RUNNERS:
        return variants, []
    known = ", ".join(VALIDATED_RUNNERS)
    reason = f"dual capture was validated for MoE runner {known}, never for {runner!r}; one graph serves every batch"
    return variants[-1:], [Decision("variants", f"{variants[-1].name} alone", reason, "warning")]


def backend_notes(
    block: str, declaration: Declaration, dtype: str, targets: tuple[str, ...], kinds: set[str], decode: bool,
    slots: int, max_rank: int,
) -> list[Decision]:  # fmt: skip
    """What a backend leaves out of this spec, each with its reason."""
    notes, columns = [], slots * max_rank
    for target in targets:
        if declaration.architectures and target not in declaration.architectures:
            reason = f"the backend supports {', '.join(declaration.architectures)}"
            notes.append(Decision(f"{block}: {target}", "not compiled", reason, "warning"))
    tiled = [stage for stage, kernel in declaration.kernels.items() if kernel.tiled]
    if others := [target for target in targets if target not in TMA_TARGETS]:
        reason = f"{', '.join(others)} cannot copy whole tiles (TMA), without which they spill registers"
        notes += _left_to_the_library(block, tiled, reason)
    if (aligned := tile_rank(max_rank, dtype)) != max_rank:
        reason = f"a slot of max_rank {max_rank} is no multiple of 16 bytes in {dtype}; one of {aligned} is"
        notes += _left_to_the_library(block, tiled, reason)
    spilling = [stage for stage, kernel in declaration.kernels.items() if spills(kernel, dtype, targets)]
    reason = "no tensor core multiplies float32 exactly, and without them its tiles spill registers"
    notes += _left_to_the_library(block, spilling, reason)
    notes += [
        Decision(
            f"{block}: {stage}",
            "left out",
            f"{columns} columns of B, slots x max_rank, are more than its {kernel.max_columns}",
        )
        for stage, kernel in declaration.kernels.items()
        if not kernel.takes(columns)
    ]
    if decode and not declaration.decode_graphs:
        notes.append(Decision(f"{block}: decode graphs", "off", "the backend's decode step cannot be captured"))
    if "experts" in kinds and not declaration.experts:
        notes.append(Decision(f"{block}: experts", "not served", "the backend has no kernels for experts", "warning"))
    return notes


def base_notes(block: str, modules: tuple[ModulePlan, ...], kernels: tuple[KernelPlan, ...]) -> list[Decision]:
    """Who computes the base GEMM of linear layers under a backend that owns it, as its kernels were planned."""
    served: dict[tuple[str, str], list[str]] = {}
    for module in (module for module in modules if module.kind == "linear"):
        base = [kernel for kernel in kernels if kernel.module == module.name and kernel.base]
        served.setdefault(_whose_base(base), []).append(module.name)
    return [
        Decision(f"{block}: base GEMM of {', '.join(names)}", outcome, reason)
        for (outcome, reason), names in served.items()
    ]


def _whose_base(kernels: list[KernelPlan]) -> tuple[str, str]:
    """Whose the base GEMM of one module is that these kernels compute, and why."""
    if not kernels:
        return "the library's", "none of its kernels with the base serves them in this dtype, these sizes and targets"
    reason = "LoRA as further steps of its sum spares reading and writing y again"
    most = max(kernel.max_rows or UNLIMITED for kernel in kernels)
    outcome = "its own" if most == UNLIMITED else f"its own up to {most} rows, the library's past them"
    if any(kernel.library for kernel in kernels):
        return f"{outcome}, but for rows left to the library above", f"{reason}; the library has what it is faster at"
    return outcome, reason


def _left_to_the_library(block: str, stages: list[str], reason: str) -> list[Decision]:
    return [Decision(f"{block}: {stage}", "left to the library's GEMM and to segments", reason) for stage in stages]


def model_notes(kinds: set[str], prefill: bool, tied: bool) -> list[Decision]:
    """What follows from the modules themselves."""
    notes = []
    if "lm_head" in kinds and prefill:
        reason = "logits are computed for some rows of each request only, on a row map of their own"
        notes.append(Decision("lm_head in prefill graphs", "runs in the eager tail", reason))
    if tied and kinds & {"lm_head", "embedding"}:
        reason = "the checkpoint shares one weight; an adapter on one of the two leaves the other alone"
        notes.append(Decision("tied embeddings", "separate deltas", reason))
    return notes
