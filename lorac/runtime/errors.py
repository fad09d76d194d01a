"""The runtime's errors. Messages say which package, adapter, module or slot, what was expected, and the remedy."""


class RuntimeFault(Exception):
    """Base of the runtime's errors."""


class PackageError(RuntimeFault):
    """A generated package that is missing, incomplete, altered or unfit for this device."""


class AdapterError(RuntimeFault):
    """An adapter folder that cannot be served as it is; the slots keep what they held."""


class SlotError(RuntimeFault):
    """A slot operation that cannot be carried out: unknown name, no free slot, pinned or in use."""


class TicketError(RuntimeFault):
    """A ticket that may not be used: not the latest, of another phase, or of slots that changed since."""


class CaptureError(RuntimeFault):
    """Something a CUDA graph must not contain, or scratch that would have to grow while one is captured."""


class ShapeError(RuntimeFault):
    """A tensor whose shape, dtype, device or layout does not fit the module it was given for."""
