"""Downloads models from the Hugging Face hub into its cache, with its token, progress bar and HF_* variables.

The cache is used as it is if HF_HUB_OFFLINE is set or the hub cannot be reached. An interrupted download continues
where it stopped: each file grows as `ETAG.incomplete` beside the blobs of the cache. huggingface_hub would start again.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]  # documented, not typed

from ktqueue.core.errors import CheckpointError, ConfigError, Unavailable
from ktqueue.core.hub_model import HubModel
from ktqueue.core.units import format_bytes
from ktqueue.loading.huggingface.config_check import check_quantization
from ktqueue.loading.huggingface.hub_files import HubFile, HubSelection, select
from ktqueue.loading.json_file import read_json

SMALL_FILE = 16 << 20  # bytes; smaller files are not resumed
LIST_SECONDS = 20.0  # timeout of the request that lists the files of a repository
REVISION = "main"
"""The branch that is downloaded."""

ShowLine = Callable[[str], None]


def download(model: HubModel, show_line: ShowLine) -> Path:
    """Download the model if it is not in the cache.

    Returns its .gguf file (the first part of a split one) or its folder in the cache. `show_line` gets a line before a
    download. Raises ConfigError, which lists the choices, if the name does not mean one model or the disk has no room;
    CheckpointError, before weights are downloaded, for a checkpoint that cannot be loaded; Unavailable if the hub
    cannot be reached and the cache does not have the model.
    """
    if constants.is_offline_mode():
        return cached(model, "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or pull the model first")
    try:
        commit, files, etags = _list(model)
    except Unavailable as error:
        path = cached(model, error.message)
        show_line(f"{error.message}; using the cached {model}")
        return path
    selection = select(model, files)
    missing = [file for file in selection.files if not _in_cache(model, file.path, commit)]
    needed_bytes = sum(file.size - _downloaded_bytes(model, etags.get(file.path)) for file in missing)
    if missing:
        _check_disk(model, needed_bytes)
        what = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        show_line(f"downloading {model}: {what}, {format_bytes(needed_bytes)}, to {constants.HF_HUB_CACHE}")
    for file in missing:
        if file.path.endswith(".safetensors"):  # the small files are downloaded already
            _check_config(model, commit)
        _fetch(model, file, commit)
    if not selection.entry:
        _check_config(model, commit)
    _record_commit(model, commit)
    return _entry(_folder(model) / "snapshots" / commit, selection)


def size(model: HubModel) -> int:
    """Return the bytes of the model's files without downloading any. Raises like `download` does before a download."""
    if constants.is_offline_mode():
        raise Unavailable("HF_HUB_OFFLINE is set, so the hub is not asked")
    return select(model, _list(model)[1]).size


def _list(model: HubModel) -> tuple[str, list[HubFile], dict[str, str]]:
    """Return the commit of the branch, its files, and the ETag of each. Raises ConfigError, Unavailable."""
    try:
        info = HfApi().model_info(model.repository, revision=REVISION, files_metadata=True, timeout=LIST_SECONDS)
    except Exception as error:
        raise _translate_error(model, error) from error
    files, etags = [], {}
    for sibling in info.siblings or ():
        if ".." not in Path(sibling.rfilename).parts:
            files.append(HubFile(sibling.rfilename, sibling.size or 0))
            etags[sibling.rfilename] = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
    if info.sha is None:
        raise Unavailable(f"{constants.ENDPOINT} did not name a commit of {model}")
    return info.sha, files, etags


def _fetch(model: HubModel, file: HubFile, commit: str) -> None:
    """Download a file, continuing an earlier attempt, and enter it in the cache."""
    try:
        if SMALL_FILE < file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger files need the hub's own protocol
            _resume(model, file, commit)
        hf_hub_download(model.repository, file.path, revision=commit)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise _translate_error(
            model, error, f" while downloading {file.path}; run the same command again to continue"
        ) from error


def _resume(model: HubModel, file: HubFile, commit: str) -> None:
    """Write the file's blob. The library then finds it in its cache."""
    url = hf_hub_url(model.repository, file.path, revision=commit)
    etag = get_hf_file_metadata(url).etag
    if etag is None or Path(etag).name != etag:
        return  # the library reports the problem
    blob = _folder(model) / "blobs" / etag
    part = blob.with_name(f"{etag}.incomplete")
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / _folder(model).name / f"{etag}.lock"
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
                headers=build_hf_headers(),
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


def _translate_error(model: HubModel, error: Exception, where: str = "") -> Exception:
    """Return an error that explains what went wrong between the hub and us."""
    page = f"{constants.ENDPOINT}/{model.repository}"
    text: str | None = None
    if isinstance(error, GatedRepoError):
        text = f"{model} is gated: accept its terms at {page}, then set HF_TOKEN or run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        text = (
            f"{model}: {constants.ENDPOINT} has no repository {model.repository}, or it is private: check the name; "
            "for a private one set HF_TOKEN or run `hf auth login`"
        )
    elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        text = f"{model}: {page} refuses access ({error.response.status_code}): check HF_TOKEN"
    if text is not None:
        return ConfigError(text, param="engine.model", value=str(model))
    if isinstance(error, HfHubHTTPError):
        return Unavailable(f"{constants.ENDPOINT} answered {error.response.status_code} for {model}{where}")
    if isinstance(error, OSError) and not isinstance(error, OfflineModeIsEnabled | ConnectionError) and error.errno:
        return error  # an error of the disk
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Unavailable(f"{constants.ENDPOINT} cannot be reached for {model}{where} ({reason})")


def _check_disk(model: HubModel, needed_bytes: int) -> None:
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"engine.model {model} needs {format_bytes(needed_bytes)} in {constants.HF_HUB_CACHE}, which has "
            f"{format_bytes(free_bytes)} free: make room, or set HF_HOME to a folder on another disk",
            param="engine.model",
            limit=free_bytes,
            value=needed_bytes,
        )


def _check_config(model: HubModel, commit: str) -> None:
    """Refuse a quantised checkpoint before its weights are downloaded. Raises CheckpointError."""
    path = _folder(model) / "snapshots" / commit / "config.json"
    check_quantization(read_json(path), str(model))


def _folder(model: HubModel) -> Path:
    """Return the repository's folder in the cache, which has blobs, snapshots and refs."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repository, repo_type="model")


def _in_cache(model: HubModel, path: str, commit: str) -> bool:
    return isinstance(try_to_load_from_cache(model.repository, path, revision=commit), str)


def _downloaded_bytes(model: HubModel, etag: str | None) -> int:
    """Return the bytes of an incomplete file that are already here."""
    if etag:
        for name in (etag, f"{etag}.incomplete"):
            if (path := _folder(model) / "blobs" / name).exists():
                return path.stat().st_size
    return 0


def _record_commit(model: HubModel, commit: str) -> None:
    """Record the branch's commit, as the library does."""
    path = _folder(model) / "refs" / REVISION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, encoding="ascii")


def cached(model: HubModel, why: str) -> Path:
    """Return the path of the model in the cache, without asking the hub. `why` explains that in an error.

    Raises Unavailable if the cache does not have all of it.
    """
    first_error: ConfigError | None = None
    for snapshot in _snapshots(model):
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
    raise Unavailable(f"{model} is not complete in the cache {constants.HF_HUB_CACHE}, and {why}{detail}")


def _snapshots(model: HubModel) -> Iterator[Path]:
    """Yield the branch's last commit first, then the other snapshots, the newest first."""
    folder = _folder(model) / "snapshots"
    ref = _folder(model) / "refs" / REVISION
    last = ref.read_text(encoding="ascii").strip() if ref.exists() else ""
    snapshots = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    yield from sorted(snapshots, key=lambda path: (path.name == last, path.stat().st_mtime), reverse=True)


def _entry(snapshot: Path, selection: HubSelection) -> Path:
    return snapshot / selection.entry if selection.entry else snapshot
