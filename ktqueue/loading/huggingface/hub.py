"""Downloads models from the Hugging Face hub into its cache, with its token, progress bar and HF_* variables.

The cache is used as it is if HF_HUB_OFFLINE is set or the hub cannot be reached. An interrupted download continues
where it stopped: each file grows as `ETAG.incomplete` beside the blobs of the cache. huggingface_hub would start again.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]  # documented, not typed

from ktqueue.core.errors import CheckpointError, ConfigError, Unavailable
from ktqueue.core.hub_model import HubModel
from ktqueue.core.units import format_bytes
from ktqueue.loading.huggingface.hub_files import HubFile, HubSelection, select
from ktqueue.loading.huggingface.quantisation import read_quantisation
from ktqueue.loading.json_file import read_json
from ktqueue.loading.unsupported import check_model_type

SMALL_FILE = 16 << 20  # bytes; smaller files are not resumed
LIST_SECONDS = 20.0  # timeout of the request that lists the files of a repository
REVISION = "main"
"""The branch that is downloaded."""

ShowLine = Callable[[str], None]


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Where the hub is, where its files are cached, and how to get them. The defaults are those of the HF_* variables.

    token: None for the user's own, False for none. free_bytes: returns the free bytes of a folder's disk.
    """

    endpoint: str = field(default_factory=lambda: constants.ENDPOINT)
    cache: str = field(default_factory=lambda: constants.HF_HUB_CACHE)
    offline: bool = field(default_factory=constants.is_offline_mode)
    token: str | bool | None = None
    free_bytes: Callable[[Path], int] = _free_bytes


def download(model: HubModel, show_line: ShowLine, access: HubAccess | None = None) -> Path:
    """Download the model if it is not in the cache.

    Returns its .gguf file (the first part of a split one) or its folder in the cache. `show_line` gets a line before a
    download. Raises ConfigError, which lists the choices, if the name does not mean one model or the disk has no room;
    CheckpointError, before weights are downloaded, for a checkpoint that cannot be loaded; Unavailable if the hub
    cannot be reached and the cache does not have the model.
    """
    access = access or HubAccess()
    if access.offline:
        return cached(
            model, "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or pull the model first", access
        )
    try:
        commit, files, etags = _list(model, access)
    except Unavailable as error:
        path = cached(model, error.message, access)
        show_line(f"{error.message}; using the cached {model}")
        return path
    selection = select(model, files)
    missing = [file for file in selection.files if not _in_cache(model, file.path, commit, access)]
    needed_bytes = sum(file.size - _downloaded_bytes(model, etags.get(file.path), access) for file in missing)
    if missing:
        _check_disk(model, needed_bytes, access)
        what = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        show_line(f"downloading {model}: {what}, {format_bytes(needed_bytes)}, to {access.cache}")
    for file in missing:
        if file.path.endswith(".safetensors"):  # the small files are downloaded already
            _check_config(model, commit, access)
        _fetch(model, file, commit, access)
    if not selection.entry:
        _check_config(model, commit, access)
    _record_commit(model, commit, access)
    return _entry(_folder(model, access) / "snapshots" / commit, selection)


def size(model: HubModel, access: HubAccess | None = None) -> int:
    """Return the bytes of the model's files without downloading any. Raises like `download` does before a download."""
    access = access or HubAccess()
    if access.offline:
        raise Unavailable("HF_HUB_OFFLINE is set, so the hub is not asked")
    return select(model, _list(model, access)[1]).size


def _list(model: HubModel, access: HubAccess) -> tuple[str, list[HubFile], dict[str, str]]:
    """Return the commit of the branch, its files, and the ETag of each. Raises ConfigError, Unavailable."""
    try:
        api = HfApi(endpoint=access.endpoint, token=access.token)
        info = api.model_info(model.repository, revision=REVISION, files_metadata=True, timeout=LIST_SECONDS)
    except Exception as error:
        raise _translate_error(model, error, access) from error
    files, etags = [], {}
    for sibling in info.siblings or ():
        if ".." not in Path(sibling.rfilename).parts:
            files.append(HubFile(sibling.rfilename, sibling.size or 0))
            etags[sibling.rfilename] = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
    if info.sha is None:
        raise Unavailable(f"{access.endpoint} did not name a commit of {model}")
    return info.sha, files, etags


def _fetch(model: HubModel, file: HubFile, commit: str, access: HubAccess) -> None:
    """Download a file, continuing an earlier attempt, and enter it in the cache."""
    try:
        if SMALL_FILE < file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger files need the hub's own protocol
            _resume(model, file, commit, access)
        hf_hub_download(
            model.repository,
            file.path,
            revision=commit,
            cache_dir=access.cache,
            endpoint=access.endpoint,
            token=access.token,
        )
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise _translate_error(
            model, error, access, f" while downloading {file.path}; run the same command again to continue"
        ) from error


def _resume(model: HubModel, file: HubFile, commit: str, access: HubAccess) -> None:
    """Write the file's blob. The library then finds it in its cache."""
    url = hf_hub_url(model.repository, file.path, revision=commit, endpoint=access.endpoint)
    etag = get_hf_file_metadata(url, token=access.token, endpoint=access.endpoint).etag
    if etag is None or Path(etag).name != etag:
        return  # the library reports the problem
    blob = _folder(model, access) / "blobs" / etag
    part = blob.with_name(f"{etag}.incomplete")
    lock = Path(access.cache) / ".locks" / _folder(model, access).name / f"{etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        downloaded = part.stat().st_size if part.exists() else 0
        with part.open("ab" if downloaded <= file.size else "wb") as target:
            http_get(
                url,  # not its redirect target: httpx sends the token to no other host
                target,
                resume_size=target.tell(),
                headers=build_hf_headers(token=access.token),
                expected_size=file.size,
                displayed_filename=file.path,
            )
        if downloaded and len(etag) == 2 * hashlib.sha256().digest_size:
            with part.open("rb") as written:
                found = hashlib.file_digest(written, "sha256").hexdigest()
            if found != etag:
                part.unlink()
                raise CheckpointError(f"{model}: {file.path} is damaged: its SHA-256 is {found}, not {etag}; try again")
        part.replace(blob)


def _translate_error(model: HubModel, error: Exception, access: HubAccess, where: str = "") -> Exception:
    """Return an error that explains what went wrong between the hub and us."""
    page = f"{access.endpoint}/{model.repository}"
    text: str | None = None
    if isinstance(error, GatedRepoError):
        text = f"{model} is gated: accept its terms at {page}, then set HF_TOKEN or run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        text = (
            f"{model}: {access.endpoint} has no repository {model.repository}, or it is private: check the name; "
            "for a private one set HF_TOKEN or run `hf auth login`"
        )
    elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        text = f"{model}: {page} refuses access ({error.response.status_code}): check HF_TOKEN"
    if text is not None:
        return ConfigError(text, param="engine.model", value=str(model))
    if isinstance(error, HfHubHTTPError):
        return Unavailable(f"{access.endpoint} answered {error.response.status_code} for {model}{where}")
    if isinstance(error, OSError) and not isinstance(error, OfflineModeIsEnabled | ConnectionError) and error.errno:
        return error  # an error of the disk
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Unavailable(f"{access.endpoint} cannot be reached for {model}{where} ({reason})")


def _check_disk(model: HubModel, needed_bytes: int, access: HubAccess) -> None:
    folder = Path(access.cache)
    while not folder.exists():
        folder = folder.parent
    free_bytes = access.free_bytes(folder)
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"engine.model {model} needs {format_bytes(needed_bytes)} in {access.cache}, which has "
            f"{format_bytes(free_bytes)} free: make room, or set HF_HOME to a folder on another disk",
            param="engine.model",
            limit=free_bytes,
            value=needed_bytes,
        )


def _check_config(model: HubModel, commit: str, access: HubAccess) -> None:
    """Refuse an unsupported family or quantisation before weights are downloaded. Raises CheckpointError."""
    config = read_json(_folder(model, access) / "snapshots" / commit / "config.json")
    check_model_type(config, str(model))
    read_quantisation(config, str(model))


def _folder(model: HubModel, access: HubAccess) -> Path:
    """Return the repository's folder in the cache, which has blobs, snapshots and refs."""
    return Path(access.cache) / repo_folder_name(repo_id=model.repository, repo_type="model")


def _in_cache(model: HubModel, path: str, commit: str, access: HubAccess) -> bool:
    return isinstance(try_to_load_from_cache(model.repository, path, access.cache, commit), str)


def _downloaded_bytes(model: HubModel, etag: str | None, access: HubAccess) -> int:
    """Return the bytes of an incomplete file that are already here."""
    if etag:
        for name in (etag, f"{etag}.incomplete"):
            if (path := _folder(model, access) / "blobs" / name).exists():
                return path.stat().st_size
    return 0


def _record_commit(model: HubModel, commit: str, access: HubAccess) -> None:
    """Record the branch's commit, as the library does."""
    path = _folder(model, access) / "refs" / REVISION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, encoding="ascii")


def cached(model: HubModel, why: str, access: HubAccess | None = None) -> Path:
    """Return the path of the model in the cache, without asking the hub. `why` explains that in an error.

    Raises Unavailable if the cache does not have all of it.
    """
    access = access or HubAccess()
    first_error: ConfigError | None = None
    for snapshot in _snapshots(model, access):
        files = [
            HubFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
            for path in snapshot.rglob("*")
            if path.is_file()
        ]
        try:
            return _entry(snapshot, select(model, files))
        except ConfigError as error:
            first_error = first_error or error
    detail = "" if first_error is None else f"; there: {first_error.message}"
    raise Unavailable(f"{model} is not complete in the cache {access.cache}, and {why}{detail}")


def _snapshots(model: HubModel, access: HubAccess) -> Iterator[Path]:
    """Yield the branch's last commit first, then the other snapshots, the newest first."""
    folder = _folder(model, access) / "snapshots"
    ref = _folder(model, access) / "refs" / REVISION
    last = ref.read_text(encoding="ascii").strip() if ref.exists() else ""
    snapshots = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    yield from sorted(snapshots, key=lambda path: (path.name == last, path.stat().st_mtime), reverse=True)


def _entry(snapshot: Path, selection: HubSelection) -> Path:
    return snapshot / selection.entry if selection.entry else snapshot
