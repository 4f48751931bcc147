"""The list of ended jobs whose webhook is due."""

from collections.abc import Sequence

from ktqueue.broker.scripts import Scripts


class Webhooks:
    """Due webhooks of an installation. Raises Unavailable if Redis does not answer."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def waiting(self, limit: int, done: Sequence[str] = ()) -> list[str]:
        """Remove the jobs `done` from the list, then return the ids of at most `limit` others, the oldest end first.

        A job stays on the list until it is removed, so each is returned at least once, even if a process dies.
        """
        return [job_id.decode() for job_id in await self._scripts.call("due_webhooks", limit, *done)]
