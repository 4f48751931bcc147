"""Downloads models from the Hugging Face hub (the door to huggingface_hub): into its cache, with its token, its bar and
its HF_* variables. Offline, and where the hub cannot be reached, what the cache has is used.

A download that was cut short goes on where it stopped: each file grows as `ETAG.incomplete` beside the cache's blobs.
The library itself would begin anew.
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

SMALL_FILE = 16 << 20  # bytes: not worth resuming
LIST_SECONDS = 20.0  # for the list of a repository's files
REVISION = "main"
"""The branch that a name means."""

ShowLine = Callable[[str], None]


def download(model: HubModel, say: ShowLine) -> Path:
    """The model's .gguf file (of a split one: the first part) or folder in the cache, downloaded where it is not there.

    `say` is given a line before a download. Raises ConfigError, which lists the choices, where the name does not mean
    one model or the disk has no room for it; CheckpointError for a checkpoint that cannot be loaded, before its weights
    are downloaded; Unavailable where the hub cannot be reached and the cache does not have the model.
    """
    if constants.is_offline_mode():
        return cached(model, "HF_HUB_OFFLINE is set, so nothing is downloaded: unset it, or pull the model before")
    try:
        commit, files, etags = _list(model)
    except Unavailable as error:
        path = cached(model, error.message)
        say(f"{error.message}; using the cached {model}")
        return path
    selection = select(model, files)
    missing = [file for file in selection.files if not _in_cache(model, file.path, commit)]
    need = sum(file.size - _begun(model, etags.get(file.path)) for file in missing)
    if missing:
        _check_disk(model, need)
        what = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        say(f"downloading {model}: {what}, {format_bytes(need)}, to {constants.HF_HUB_CACHE}")
    for file in missing:
        if file.path.endswith(".safetensors"):  # the small files are there
            _check_config(model, commit)
        _fetch(model, file, commit)
    if not selection.entry:
        _check_config(model, commit)
    _remember(model, commit)
    return _entry(_folder(model) / "snapshots" / commit, selection)


def size(model: HubModel) -> int:
    """Bytes of the model's files, without downloading any. Raises as `download` does before one starts."""
    if constants.is_offline_mode():
        raise Unavailable("HF_HUB_OFFLINE is set, so the hub is not asked")
    return select(model, _list(model)[1]).size


def _list(model: HubModel) -> tuple[str, list[HubFile], dict[str, str]]:
    """The commit of the branch, its files, and the ETag of each. Raises ConfigError, Unavailable."""
    try:
        info = HfApi().model_info(model.repository, revision=REVISION, files_metadata=True, timeout=LIST_SECONDS)
    except Exception as error:
        raise _failure(model, error) from error
    files, etags = [], {}
    for one in info.siblings or ():
        if ".." not in Path(one.rfilename).parts:
            files.append(HubFile(one.rfilename, one.size or 0))
            etags[one.rfilename] = (one.lfs.sha256 if one.lfs else one.blob_id) or ""
    if info.sha is None:
        raise Unavailable(f"{constants.ENDPOINT} names no commit of {model}")
    return info.sha, files, etags


def _fetch(model: HubModel, file: HubFile, commit: str) -> None:
    """Download a file, from where an earlier attempt stopped, and enter it in the cache."""
    try:
        if (
            file.size > SMALL_FILE and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
        ):  # larger ones need its own protocol
            _resume(model, file, commit)
        hf_hub_download(model.repository, file.path, revision=commit)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        raise _failure(model, error, f" while downloading {file.path}; the same command goes on from there") from error


def _resume(model: HubModel, file: HubFile, commit: str) -> None:
    """Write the file's blob, which the library then finds in its cache."""
    url = hf_hub_url(model.repository, file.path, revision=commit)
    etag = get_hf_file_metadata(url).etag
    if etag is None or Path(etag).name != etag:
        return  # the library will say what it thinks of that
    blob = _folder(model) / "blobs" / etag
    part = blob.with_name(f"{etag}.incomplete")
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / _folder(model).name / f"{etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        begun = part.stat().st_size if part.exists() else 0
        with part.open("ab" if begun <= file.size else "wb") as target:
            http_get(
                url,  # not the address that it leads to: httpx sends the token to no other host
                target,
                resume_size=target.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.path,
            )
        if begun and len(etag) == 2 * hashlib.sha256().digest_size:
            with part.open("rb") as written:
                found = hashlib.file_digest(written, "sha256").hexdigest()
            if found != etag:
                part.unlink()
                raise CheckpointError(f"{model}: {file.path} is damaged: its SHA-256 is {found}, not {etag}; try again")
        part.replace(blob)


def _failure(model: HubModel, error: Exception, where: str = "") -> Exception:
    """What went wrong between the hub and us, as an error with words of ours."""
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
        return error  # of the disk
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Unavailable(f"{constants.ENDPOINT} cannot be reached for {model}{where} ({reason})")


def _check_disk(model: HubModel, need: int) -> None:
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if need > free:
        raise ConfigError(
            f"engine.model {model} needs {format_bytes(need)} in {constants.HF_HUB_CACHE}, which has "
            f"{format_bytes(free)} free: make room, or set HF_HOME to a folder on another disk",
            param="engine.model",
            limit=free,
            value=need,
        )


def _check_config(model: HubModel, commit: str) -> None:
    """Refuse a quantised checkpoint before its weights are downloaded. Raises CheckpointError."""
    path = _folder(model) / "snapshots" / commit / "config.json"
    check_quantization(read_json(path), str(model))


def _folder(model: HubModel) -> Path:
    """Of the repository in the cache: with blobs, snapshots and refs."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repository, repo_type="model")


def _in_cache(model: HubModel, path: str, commit: str) -> bool:
    return isinstance(try_to_load_from_cache(model.repository, path, revision=commit), str)


def _begun(model: HubModel, etag: str | None) -> int:
    """Bytes that are here of a file that is not complete."""
    if etag:
        for name in (etag, f"{etag}.incomplete"):
            if (path := _folder(model) / "blobs" / name).exists():
                return path.stat().st_size
    return 0


def _remember(model: HubModel, commit: str) -> None:
    """Note what the branch was at last, as the library does."""
    path = _folder(model) / "refs" / REVISION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit, encoding="ascii")


def cached(model: HubModel, why: str) -> Path:
    """The path of the model in the cache, without asking the hub. `why`: what an error says of that.

    Raises Unavailable where the cache does not have all of it.
    """
    found: ConfigError | None = None
    for snapshot in _snapshots(model):
        files = [
            HubFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
            for path in snapshot.rglob("*")
            if path.is_file()
        ]
        try:
            return _entry(snapshot, select(model, files))
        except ConfigError as error:
            found = found or error
    there = "" if found is None else f"; there: {found.message}"
    raise Unavailable(f"{model} is not complete in the cache {constants.HF_HUB_CACHE}, and {why}{there}")


def _snapshots(model: HubModel) -> Iterator[Path]:
    """The branch's last one first, then the others from the newest on."""
    folder = _folder(model) / "snapshots"
    ref = _folder(model) / "refs" / REVISION
    last = ref.read_text(encoding="ascii").strip() if ref.exists() else ""
    known = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    yield from sorted(known, key=lambda path: (path.name == last, path.stat().st_mtime), reverse=True)


def _entry(snapshot: Path, selection: HubSelection) -> Path:
    return snapshot / selection.entry if selection.entry else snapshot
