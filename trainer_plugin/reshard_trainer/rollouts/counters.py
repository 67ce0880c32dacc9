"""What became of every group: numbers that always add up.

assigned == running + accepted + overtaken + rejected + given_up
accepted == trained + handed_out + buffered + evicted_waiting
evicted  == overtaken + evicted_waiting (+ too old when it was delivered, under overtaken)
"""

import msgspec


class Counters(msgspec.Struct):
    """Counts of groups since the run began, resumed runs included.

    Attributes:
        assigned: admissions: a prompt was given to an engine.
        accepted: groups that entered the buffer.
        trained: groups of batches whose step was made.
        evicted_running: too old before they were delivered: stragglers.
        evicted_waiting: too old before the trainer took them.
        given_up: admissions that the engine's side gave back.
        rejected: groups with labels that were never published.
        late: deliveries after their admission had ended.
        duplicates: deliveries of what had been accepted before.
        dropped: prompts that were charged with too many failures and do not come again.
    """

    assigned: int = 0
    accepted: int = 0
    trained: int = 0
    evicted_running: int = 0
    evicted_waiting: int = 0
    given_up: int = 0
    rejected: int = 0
    late: int = 0
    duplicates: int = 0
    dropped: int = 0

    @property
    def evicted(self) -> int:
        """Groups beyond the bound, wherever it was noticed."""
        return self.evicted_running + self.evicted_waiting
