"""Every key and channel in Redis, and how long it is kept. Knows no Redis client.

All keys start with one hash tag, so that they are in one slot of a Redis Cluster and a script may use them together.
The scripts build the same names from the tag (`KEYS[1]`).

| key after the tag        | type       | content                                       | life                      |
|--------------------------|------------|-----------------------------------------------|---------------------------|
| job:ID                   | hash       | a job's record and request                    | job_ttl or failed_ttl     |
| journal:ID (channel too) | stream     | its events, ids `SEQ-0`, one field `e`        | journal_ttl after the end |
| queue:CLASS:MODEL        | zset       | waiting job ids by arrival and priority       | while jobs wait           |
| bound:CLASS:FORMAT:DIGEST:MODEL | zset | waiting jobs for some workers only     | while jobs wait           |
| bound                    | zset       | FORMAT:DIGEST:MODEL of these, by the time at  | while jobs wait           |
|                          |            | which such a worker was last seen             |                           |
| line:CLASS:FORMAT:TENANT:CALLER:MODEL | zset | waiting jobs of one caller   | 5 model_ttl; while they wait  |
| front:CLASS:FORMAT:MODEL | zset       | waiting jobs that lost their workers          | 5 model_ttl; while they wait |
| turns:CLASS:MODEL        | zset       | tenants with waiting jobs, by virtual time    | 5 model_ttl |
| callers:CLASS:TENANT:MODEL | zset     | callers of a tenant with waiting jobs         | 5 model_ttl |
| accounts:CLASS:MODEL     | hash       | what tenants were charged for their turns     | 5 model_ttl; 1,024 entries |
| caller_accounts:CLASS:TENANT:MODEL | hash | the same for a tenant's callers            | 5 model_ttl; 1,024 entries |
| weights                  | hash       | weights of tenants                            | 5 model_ttl |
| live                     | zset       | ids of queued and running jobs by arrival     | while there are any       |
| ended                    | zset       | ids of ended jobs by the end of their record  | job_ttl; 10,000 entries   |
| waiting                  | string     | bytes of all requests that wait               | while jobs wait           |
| tenant:NAME              | hash       | its live and queued jobs, bytes, rates        | until its rates are full  |
| stored                   | hash       | bytes that each tenant's jobs use            | while there are any       |
| held                     | zset       | bytes of ended jobs, by their expiry      | while there is any        |
| failed                   | zset       | failed jobs with their requests, by their end | failed_ttl; 10,000        |
| failed:bytes             | string     | bytes of these requests                       | failed_ttl                |
| memory                   | string     | bytes that the server uses and may use        | 5 leases                  |
| scrub                    | hash       | progress of `scrub`                           | 5 leases                  |
| deadlines                | zset       | live job ids by deadline                      | while there are any       |
| backlog                  | hash       | CLASS:MODEL to number of live jobs            | while there are any       |
| idempotency:DIGEST       | string     | request hash and job id                       | idempotency_ttl           |
| conversation:DIGEST      | string     | job id of its latest answer (JSON)            | idempotency_ttl           |
| response:DIGEST          | string     | a response's conversation and answer (JSON)   | response_ttl              |
| responses:TENANT         | zset       | its responses by the time of their storing    | response_ttl; 1,000       |
| responses:bytes:TENANT   | string     | bytes of these, with some that have expired   | response_ttl              |
| file:ID                  | hash       | a file's tenant, name, size, times            | as its upload asked       |
| files:of:TENANT          | zset       | ids of its files by arrival                   | while there are any       |
| files:bytes              | hash       | bytes of each tenant's files                  | while there are any       |
| files:expiry             | zset       | ids of files by the end of their life         | while there are any       |
| installation             | string     | the name that the store of files has          | for ever                  |
| batch:ID                 | hash       | a batch's request, status, facts and speed    | batch_ttl after the end   |
| batches                  | zset       | ids of batches by the end of their owner's lease | until they have ended  |
| batches:open:TENANT      | set        | ids of its batches that have not ended        | while there are any       |
| batches:of:TENANT        | zset       | ids of its batches by their creation          | batch_ttl; 1,000 entries  |
| leases                   | zset       | worker ids by the end of their lease          | while there are any       |
| worker:WORKER (channel)  | hash       | card, facts, statistics, numbers, last step   | 5 model_ttl               |
| running:WORKER           | hash       | its jobs to the seq of their last event       | while it runs jobs        |
| cancels:WORKER           | hash       | jobs to stop, with the step that reported it  | with the lease            |
| warm:WORKER              | zset       | prefix hashes of its jobs, by time            | 30 leases; 1,024 entries  |
| parked:MODEL             | zset       | workers that wait for a job, by their claim   | a minute                  |
| models, models:more      | hash       | model cards; fields for newer versions        | 5 model_ttl               |
| models:seen              | zset       | when each expires                             | 5 model_ttl               |
| tick                     | string     | last renewal of a lease or reap               | 5 model_ttl               |
| synced                   | string     | a write to wait for (durability fsync)        | a minute                  |
| webhooks                 | zset       | ended jobs whose webhook is due, by their end | job_ttl; 100,000 entries  |
| wake:MODEL               | channel    | a job was queued                              |                           |
| ends                     | channel    | the id of a job that has ended                |                           |
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key and channel names of one shard. `prefix` separates installations that share a server."""

    prefix: str
    shard: int = 0

    @property
    def tag(self) -> str:
        """The beginning of every key, without the colon."""
        return f"{{{self.prefix}:s{self.shard}}}"

    def journal_channel(self, job_id: str) -> str:
        """The channel of a job's events. Messages are `SEQ:EVENT`."""
        return f"{self.tag}:journal:{job_id}"

    @property
    def ends_channel(self) -> str:
        """The channel that announces the ids of jobs that have ended."""
        return f"{self.tag}:ends"

    def wake_channel(self, model: str) -> str:
        """The channel that announces new jobs of a model."""
        return f"{self.tag}:wake:{model}"

    def worker_channel(self, worker_id: str) -> str:
        """The channel on which a waiting worker is given a job."""
        return f"{self.tag}:worker:{worker_id}"
