"""The errors of `huggingface_hub`, each as one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from shapeshift.errors import EngineError, NotFoundError, ShapeshiftError, UnsupportedError

_FOLDER = "or download it on another machine and give its folder"


@contextlib.contextmanager
def hub_errors(asked: str) -> Iterator[None]:
    """Raise what the library raises about the repository `asked` as an error of this project."""
    try:
        yield
    except ShapeshiftError:
        raise
    except Exception as error:
        raise _translated(asked, error) from error


def _translated(asked: str, error: Exception) -> ShapeshiftError:
    # Imported here: a build without hub ids does not load the library.
    import httpx2
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RevisionResolutionError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    endpoint = constants.ENDPOINT
    start, reason = f"hub id {asked}", _first_line(error)
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
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngineError(
            f"{start}: no space left in {constants.HF_HUB_CACHE}; make room, or set HF_HOME, and {again}"
        )
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | errors.LocalEntryNotFoundError):
        return EngineError(
            f"{start}: cannot reach {endpoint} ({reason}); check the network, set HF_ENDPOINT to a mirror, {_FOLDER}"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return EngineError(f"{start}: {constants.HF_HUB_CACHE} cannot be used ({error.strerror}); set HF_HOME")
    return EngineError(f"{start}: the download from {endpoint} ended early ({reason}); {again}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
