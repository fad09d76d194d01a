"""The region in which a prepared batch is launched: no slot changes before it ends."""

from typing import TYPE_CHECKING

from lorac.runtime.capture import capturing

if TYPE_CHECKING:
    from lorac.runtime.step import Step


class Launching:
    """What `Step.launching` returns: the outermost one holds the slots' lock, and makes the model's device current."""

    __slots__ = ("device", "outermost", "step")

    def __init__(self, step: "Step"):
        self.step, self.outermost = step, False

    def __enter__(self) -> None:
        step = self.step
        # a graph's batch has no ticket: its slots are read by replays
        if step.inside or step.ticket is None or capturing():
            return
        step.slots.lock.acquire()
        self.device = step.on_device()
        self.device.__enter__()
        step.inside = self.outermost = True
        try:
            step.slots.before_step()
            step.check(step.ticket)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *error) -> None:
        if self.outermost:
            self.step.inside = self.outermost = False
            self.device.__exit__(*error)
            self.step.slots.lock.release()
