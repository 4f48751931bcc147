"""The jobs that have ended and have a webhook, until somebody has taken it upon himself to call it."""

from collections.abc import Sequence

from ktqueue.broker.scripts import Scripts


class Webhooks:
    """Of an installation. Raises Unavailable when Redis is away."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def waiting(self, limit: int, taken: Sequence[str] = ()) -> list[str]:
        """Ids of ended jobs, those that ended first first, after `taken` have been taken off the list.

        A job stays on the list until it is taken off, so it is told of at least once whoever dies.
        """
        return [job_id.decode() for job_id in await self._scripts.call("due_webhooks", limit, *taken)]
