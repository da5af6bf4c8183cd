"""Errors of the package, one class per kind. Messages name the object, the received value and the expected value."""

from typing import Any


class SterlingError(Exception):
    """Base class of the errors of this package."""


class ExportError(SterlingError, ValueError):
    """A module, a table, a feature or a sample does not fit a model package."""


class SnapshotError(SterlingError, ValueError):
    """A published version is incomplete, or has a format that this package does not read."""


class ProgramError(SterlingError, RuntimeError):
    """The ``sterling`` program is missing, rejected its input, or ended early.

    ``status`` is its exit status, negative if a signal ended it, None if it did not run.
    """

    status: int | None = None


class ConnectionFailed(SterlingError, ConnectionError):
    """A server could not be reached, or did not answer in time; ``__cause__`` is the error of httpx."""


class RequestError(SterlingError):
    """The server answered with a problem.

    ``status`` is the HTTP status; ``code`` and ``retryable`` are fields of the problem (``docs/reference/http.md``);
    ``retry_after`` is the time in seconds that the server requests to wait, or None. ``problem`` is the complete JSON.
    """

    def __init__(self, status: int, problem: dict, retry_after: float | None = None):
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code", ""))
        self.retryable = bool(problem.get("retryable", False))
        self.retry_after = retry_after
        super().__init__(f"{status} {self.code}: {problem.get('detail', problem)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Python copies and pickles an exception by its arguments, which would be the message only.
        return type(self), (self.status, self.problem, self.retry_after), self.__dict__
