"""Tell a simulated step's own operations from those by which DTensor works out shapes, which a real step has not."""

from __future__ import annotations

from torch._guards import active_fake_mode


class FakeDepth:
    """How often the active ``FakeTensorMode`` is entered; DTensor enters it again to work out a result's shape.

    It does so the first time in a process that it meets an operation, so a count with these would depend on what ran
    before. Without a fake mode at the start nothing is ``deeper``.
    """

    def __init__(self) -> None:
        self.mode = active_fake_mode()
        self._at_start = self._times_entered()

    @property
    def deeper(self) -> bool:
        """Whether the mode has been entered again since."""
        return self._times_entered() > self._at_start

    def _times_entered(self) -> int:
        return 0 if self.mode is None else len(self.mode.enter_stack)
