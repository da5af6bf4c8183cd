"""Exceptions can be copied and sent to other processes unchanged."""

import copy
import multiprocessing
import pickle

import pytest
import sterling


def failed() -> sterling.ProgramError:
    error = sterling.ProgramError("sterling score ended with 2: no model")
    error.status = 2
    return error


ERRORS = [
    sterling.RequestError(400, {"code": "invalid", "detail": "no", "retryable": False}, 2.0),
    sterling.ConnectionFailed("POST http://a: rejected"),
    sterling.ExportError("no table"),
    sterling.SnapshotError("not whole"),
    failed(),
    sterling.SterlingError("any"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and again.__dict__ == error.__dict__


def refuse(number: int) -> None:
    raise sterling.RequestError(400, {"code": "invalid", "detail": f"no {number}"}, 2.0)


def test_a_pool_raises_the_error_of_its_worker():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(sterling.RequestError, match="400 invalid: no 7") as refused:
            pool.map_async(refuse, [7]).get(60)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (400, "invalid", 2.0)
