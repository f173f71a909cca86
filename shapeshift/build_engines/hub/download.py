"""Model repositories of a hub (Hugging Face's, or the one that HF_ENDPOINT names), through `huggingface_hub`.

An id is resolved to a commit once. `hub.json` in the build folder keeps the commit and the files, so that later builds
take the same ones, from the cache of HF_HOME and without network.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.build_engines.hub.needed_files import Read
from shapeshift.build_engines.hub.stated_hashes import require_hashes
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError, ShapeshiftError, UnsupportedError
from shapeshift.settings import require

RECORD = "hub.json"
_LOCK = ".hub.lock"
_FOLDER = "or download it on another machine and give its folder"
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w][\w./+-]*))?(?::(\w+))?", re.ASCII)

Choose = Callable[[Sequence[str], Read], list[str]]
"""The files to fetch, of the names in a repository; the second argument reads one of them."""


@dataclass(frozen=True)
class HubId:
    """A repository "owner/model" of the hub, and a branch, tag or commit of it; empty: its default branch.

    variant: of its GGUF models the one with this in its name, such as Q8_0; empty: it has one, or none.
    """

    repository: str
    revision: str = ""
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """The id that `text` writes as owner/model@revision:variant, of which only owner/model must be there; None if
        it is not of this form."""
        match = _ID.fullmatch(text)
        return None if match is None else cls(match[1], match[2] or "", match[3] or "")

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Source:
    """A folder of files. origin: the repository and commit that it comes from, owner/model@commit; empty: no hub."""

    folder: Path
    origin: str = ""


@dataclass(frozen=True)
class _Resolved:
    """What an id stood for when it was first used: the commit, and the names of the files that are needed."""

    commit: str
    files: list[str]


def fetch(hub_id: HubId, choose: Choose, build: Path, most_bytes: int | None = None) -> Source:
    """The files of `hub_id` that `choose` wants, downloaded unless the cache of HF_HOME has them.

    most_bytes: of a download; None: as much as the disk holds.
    Raises ShapeshiftError, in one line with the remedy, also where a file has another hash than the hub states. After
    any error the record and earlier files are unchanged.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise EngineError("a hub id needs huggingface_hub; run `pip install huggingface_hub`") from None
    # Requests for files report nothing else about this machine. In place of the variable: the library reads it once.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    hooks = huggingface_hub.get_session().event_hooks["request"]
    hooks += [] if _limit in hooks else [_limit]
    logging.getLogger(huggingface_hub.__name__).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _hub_errors(str(hub_id)):
        recorded = _read_record(build).get(str(hub_id))
        resolved, folder = _in_cache(hub_id, recorded, choose) if recorded or _is_offline() else (None, None)
        if resolved is None or folder is None:
            resolved, folder = _download(hub_id, recorded, choose, most_bytes)
            require_hashes(str(hub_id), folder, resolved.files, build / files.HASHES)
    if resolved != recorded:
        with files.exclusive_lock(build / _LOCK):
            record = {**_read_record(build), str(hub_id): resolved}
            text = json.dumps({name: asdict(one) for name, one in sorted(record.items())}, indent=1)
            files.replace_text(build / RECORD, text + "\n")
    return Source(folder, f"{hub_id.repository}@{resolved.commit}")


def _limit(request: Any) -> None:
    """Limit the time of a request: the library sends many that would wait without end."""
    from huggingface_hub import constants

    limits = request.extensions["timeout"].items()
    request.extensions["timeout"] = {kind: seconds or constants.HF_HUB_DOWNLOAD_TIMEOUT for kind, seconds in limits}


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _in_cache(hub_id: HubId, recorded: _Resolved | None, choose: Choose) -> tuple[_Resolved | None, Path | None]:
    """The snapshot in the cache, without network; None where the cache lacks a file of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision = recorded.commit if recorded else hub_id.revision or None
    patterns = recorded.files if recorded else []
    try:
        snapshot = snapshot_download(
            hub_id.repository, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None, None
    folder = Path(snapshot)
    if recorded is None:
        names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        recorded = _Resolved(folder.name, choose(names, lambda name: (folder / name).read_text(encoding="utf-8")))
    if not all((folder / name).is_file() for name in recorded.files):
        return None, None
    return recorded, folder


def _download(
    hub_id: HubId, recorded: _Resolved | None, choose: Choose, most_bytes: int | None
) -> tuple[_Resolved, Path]:
    """The snapshot, downloaded where the cache lacks files of it."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    if recorded is None:
        hub = HfApi()
        commit = hub.resolve_revision(hub_id.repository, revision=hub_id.revision or None).resolved
        names = sorted(hub.list_repo_files(hub_id.repository, revision=commit))

        def read(name: str) -> str:
            file = Path(hf_hub_download(hub_id.repository, name, revision=commit))
            require_hashes(str(hub_id), file.parents[name.count("/")], [name])
            return file.read_text(encoding="utf-8")

        recorded = _Resolved(commit, choose(names, read))
    planned = snapshot_download(
        hub_id.repository, revision=recorded.commit, allow_patterns=recorded.files, dry_run=True
    )
    size = sum(one.file_size or 0 for one in planned if one.will_download)
    if most_bytes is not None:
        require(size <= most_bytes, f"hub id {hub_id}", f"{size} bytes", f"at most {most_bytes} bytes")
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if size > free:
        raise EngineError(
            f"hub id {hub_id}: {size / 1e6:.0f} MB to download, {free / 1e6:.0f} MB free in {cache}; "
            "make room, or set HF_HOME to a folder with more"
        )
    if size:
        sys.stderr.write(f"{hub_id}: downloading {size / 1e6:.1f} MB of commit {recorded.commit[:12]} into {cache}\n")
    return recorded, Path(snapshot_download(hub_id.repository, revision=recorded.commit, allow_patterns=recorded.files))


def _read_record(build: Path) -> dict[str, _Resolved]:
    file = build / RECORD
    try:
        return {name: _Resolved(**one) for name, one in json.loads(file.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidInputError(RECORD, str(file), f"the record of hub ids ({error}); remove it") from None


@contextlib.contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    """Raise what the library raises about the repository `hub_id` as an error of this project."""
    try:
        yield
    except ShapeshiftError:
        raise
    except Exception as error:
        raise _translated(hub_id, error) from error


def _translated(hub_id: str, error: Exception) -> ShapeshiftError:
    # Imported here: a build without hub ids does not load the library.
    import httpx2
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RevisionResolutionError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    endpoint = constants.ENDPOINT
    start, reason = f"hub id {hub_id}", _first_line(error)
    again = "run the same command again: what was downloaded is kept"
    if isinstance(error, errors.GatedRepoError):
        return UnsupportedError(
            f"{start}: gated at {endpoint}; accept its terms there, then set HF_TOKEN to a token of your account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{start}: {endpoint} has no such repository, or it is private; "
            "check the id, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{start}: {endpoint} has no such revision; give a branch, a tag or a full commit after @")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return NotFoundError(
            f"{start}: not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it; "
            f"unset HF_HUB_OFFLINE once, {_FOLDER}"
        )
    if isinstance(error, errors.HFValidationError):
        return NotFoundError(f"{start}: not the id of a repository ({reason}); give a folder or an id as owner/model")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        remedy = "set HF_TOKEN to a valid token" if status in (401, 403) else again
        return EngineError(f"{start}: {endpoint} answered {status}; {remedy}")
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return EngineError(f"{start}: {endpoint} sends more than the size that it states")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngineError(
            f"{start}: no space left in {constants.HF_HUB_CACHE}; make room, or set HF_HOME, and {again}"
        )
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | errors.LocalEntryNotFoundError):
        return EngineError(
            f"{start}: cannot reach {endpoint} ({reason}); check the network, set HF_ENDPOINT to a mirror, {_FOLDER}"
        )
    if isinstance(error, httpx2.TimeoutException):
        limit = f"HF_HUB_DOWNLOAD_TIMEOUT, {constants.HF_HUB_DOWNLOAD_TIMEOUT} s"
        return EngineError(f"{start}: {endpoint} sent nothing for {limit}; {again}, or set a longer one")
    if isinstance(error, OSError) and error.errno is not None:
        return EngineError(f"{start}: {constants.HF_HUB_CACHE} cannot be used ({error.strerror}); set HF_HOME")
    return EngineError(f"{start}: the download from {endpoint} ended early ({reason}); {again}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
