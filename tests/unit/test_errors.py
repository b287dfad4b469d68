"""The error tree is what every face and the docs are made from."""

import pytest

from carpool.core.errors import (
    CarpoolError,
    ClientError,
    GatewayError,
    OverloadError,
    UpstreamError,
    all_errors,
)

GRPC_CODES = {
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
}

each_error = pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.code)


@each_error
def test_each_says_whose_fault_it_is(error: type[CarpoolError]) -> None:
    branches = [
        branch for branch in (ClientError, OverloadError, UpstreamError, GatewayError) if issubclass(error, branch)
    ]
    assert len(branches) == 1
    expected = {ClientError: {4}, OverloadError: {4, 5}, UpstreamError: {5}, GatewayError: {5}}[branches[0]]
    if error.code != "http-version":  # the client's fault, but HTTP counts it among the server's
        assert error.status // 100 in expected


@each_error
def test_each_has_what_the_faces_need(error: type[CarpoolError]) -> None:
    assert error.grpc_code in GRPC_CODES
    assert error.title != CarpoolError.title
    assert error.__doc__


@each_error
def test_what_may_succeed_later_is_so_marked(error: type[CarpoolError]) -> None:
    if issubclass(error, OverloadError) or error.status in (408, 429, 503, 504):
        assert error.retryable
    if issubclass(error, ClientError) and error.status != 408:
        assert not error.retryable
