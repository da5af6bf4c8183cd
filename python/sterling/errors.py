"""What goes wrong, each kind under a name of its own. Messages name the thing, what came, and what was expected."""

from typing import Any


class SterlingError(Exception):
    """Any error of this package."""


class ExportError(SterlingError, ValueError):
    """A module, a table, a feature or a sample does not make a model package."""


class SnapshotError(SterlingError, ValueError):
    """A published version is not whole, or is of a format that this package does not read."""


class ProgramError(SterlingError, RuntimeError):
    """The ``sterling`` program is missing, refused what it was given, or ended early.

    ``status`` is what it ended with, negative where a signal ended it; none where it did not run.
    """

    status: int | None = None


class ConnectionFailed(SterlingError, ConnectionError):
    """A server could not be reached, or gave no answer in time; ``__cause__`` is httpx's error."""


class RequestError(SterlingError):
    """The server answered with a problem.

    ``status`` is HTTP's, ``code`` and ``retryable`` are the problem's (``docs/reference/http.md``), ``retry_after`` the seconds that the
    server asks to wait, where it says so. ``problem`` is all that it said.
    """

    def __init__(self, status: int, problem: dict, retry_after: float | None = None):
        self.status = status
        self.problem = problem
        self.code = str(problem.get("code", ""))
        self.retryable = bool(problem.get("retryable", False))
        self.retry_after = retry_after
        super().__init__(f"{status} {self.code}: {problem.get('detail', problem)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied, and sent to other processes, by its arguments, which here is the message alone.
        return type(self), (self.status, self.problem, self.retry_after), self.__dict__
