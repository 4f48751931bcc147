"""DraftProgress: what a draft model knows of one sequence."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftProgress:
    """What the draft model has in the pages of one sequence: `computed` known tokens, then the drafts `ahead`.

    rate: how often its drafts are right after right ones.
    """

    rate: float
    computed: int = 0
    ahead: list[int] = field(default_factory=list)
