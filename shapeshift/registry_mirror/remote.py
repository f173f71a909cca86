"""The files of a registry at a URL, which fsspec reads: s3://, gs://, abfs://, https://, file:// and others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError, UnsupportedError
from shapeshift.settings import require

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#]+")
_PASSWORD = re.compile(r"://[^@\s]*:[^\s]*@")
# Errors of file systems quote what they asked for: user and password, and the signature of a signed request.
_SECRETS = re.compile(r"(?<=://)[^\s'\"]*@|\?[^\s'\")]+")


def is_url(place: str) -> bool:
    """Whether a registry is at a URL, and not in a folder."""
    return "://" in place


def require_folder(field: str, place: str) -> Path:
    """The folder `place`. Raises InvalidInputError for a URL: commands do not write there."""
    allowed = "a folder: commands do not change a registry at a URL. Change one in a folder (--dir), then copy it there"
    require(not is_url(place), field, place, f"{allowed}, registry.json last")
    return Path(place)


class Remote:
    """The registry at `url`. The file system is opened by the first `fetch`; one thread at a time calls it.

    field: the parameter that states the URL. Raises InvalidInputError for a URL that is none, or holds a password or a
    query, UnsupportedError without fsspec, or without the package of the URL's file system.
    """

    def __init__(self, field: str, url: str) -> None:
        # A configuration is no place for a secret: it is logged, and Triton shows it to every client.
        allowed = "a URL of a folder without password and query; credentials come from the environment"
        shown = _SECRETS.sub("", url)
        require(bool(_URL.fullmatch(url)) and not _PASSWORD.search(url), field, shown, allowed)
        self.url = url.rstrip("/")
        self._root = ""
        self._files: Any = None
        _require_packages(field, url)

    def fetch(self, name: str, target: Path) -> None:
        """Copy the file `name`, a path below the URL, to `target`. May block for long.

        Raises NotFoundError for a file that is missing, OverloadedError if the URL cannot be read now.
        """
        import fsspec

        try:
            if self._files is None:
                self._files, self._root = fsspec.core.url_to_fs(self.url)
            self._files.get_file(f"{self._root}/{name}", str(target))
        except FileNotFoundError:
            raise NotFoundError(f"there is no {self.url}/{name}") from None
        except Exception as error:  # noqa: BLE001  each file system has errors of its own
            what = f"{type(error).__name__}: {_SECRETS.sub('', str(error))}"
            raise OverloadedError(f"{self.url}/{name} cannot be read: {what}") from None


def _require_packages(field: str, url: str) -> None:
    """Raise UnsupportedError, or InvalidInputError for a kind of URL that is not known, unless `url` can be read."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        missing = str(error) if error.name is None else f"no module {error.name}"
        raise UnsupportedError(
            f"{field}: a registry at {protocol}:// needs the packages fsspec and that of its file system, such as "
            f"s3fs, gcsfs or adlfs ({missing}); install them with pip where the server runs"
        ) from None
    except ValueError as error:
        raise InvalidInputError(field, f"{protocol}://", f"a kind of URL that fsspec knows ({error})") from None
