"""Settings of the store for files and batches, and of what clients may keep there."""

import re
from dataclasses import dataclass

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.setting import check_settings, setting

_WORD = r"[A-Za-z0-9_.-]+"
_S3 = re.compile(rf"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?:/(?P<prefix>{_WORD}(?:/{_WORD})*))?/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The store. Times in seconds, sizes in bytes."""

    location: str | None = setting(
        None,
        "Folder of uploaded files and of what batches write, or `s3://BUCKET[/PREFIX]`.",
        details="All gateways and control workers of an installation use the same one. S3 needs the extra "
        "`ktqueue[s3]`; its keys and address are in AWS's own variables and files, such as `AWS_ENDPOINT_URL_S3`.",
        shown="`files` in `broker.state_dir`",
    )
    min_free_bytes: int = setting(
        1 << 30, "Nothing is written while the folder's file system has less free space.", at_least=0
    )

    max_file_bytes: int = setting(
        200_000_000, "Largest file that can be uploaded. A larger one is refused with 413.", at_least=1
    )
    max_uploads: int = setting(
        32,
        "Files that a gateway receives at once. More are refused with 503.",
        details="If they are all in use, a new caller takes the place of one of the caller with the most.",
        at_least=1,
    )
    min_upload_rate: int = setting(
        32 << 10, "Bytes a second that an upload must average after its first 5 seconds. Else 408.", at_least=1
    )
    max_files: int = setting(
        10_000, "Files that a tenant without `max_files` may have, or all callers without a key together.", at_least=1
    )
    max_files_bytes: int = setting(
        10 << 30,
        "Bytes of these files.",
        details="Uploads beyond it are refused. What batches write counts too, but is never refused.",
        at_least=1,
    )
    file_ttl: float = setting(
        30 * 86_400.0, "How long a file is kept whose upload has no `expires_after`.", at_least=0.01
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("storage", self)
        if self.location is not None and "://" in self.location and _S3.fullmatch(self.location) is None:
            raise ConfigError.must_be(
                "storage.location", "a folder or s3://BUCKET[/PREFIX]", self.location, limit="s3://BUCKET[/PREFIX]"
            )

    @property
    def bucket(self) -> tuple[str, str] | None:
        """The bucket of S3 and the prefix of its keys, which ends with / unless it is empty. None: a folder."""
        match = _S3.fullmatch(self.location or "")
        if match is None:
            return None
        return match["bucket"], f"{match['prefix']}/" if match["prefix"] else ""
