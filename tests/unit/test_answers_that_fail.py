"""A defect while an answer is written ends that client's call with a 500: nobody is left waiting."""

from typing import Any, cast

import pytest

from carpool.core.errors import CarpoolError, QueueFull
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import Peer
from carpool.core.tensors import RawTensor, pack_tensors
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.gateway import OctetReplies, ParkedReplies
from carpool.face.http.kserve_v2 import InferWork, KServeV2Routes
from carpool.face.http.lists import Answers, ListCall
from carpool.face.http.v2_wire import WantedOutputs
from carpool.face.http.wire import predict_pieces
from carpool.face.intake import ServedModel, ServedTensors, as_error
from carpool.testing import make_request

FACTS = CallFacts(1, 0.1)
MODEL = ServedModel("m", 1000, lambda data: data, tensors=ServedTensors())


class Wire:
    """Takes answers; the first of them may fail."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.statuses: list[int] = []
        self.fails = False

    def respond(self, exchange: Exchange, status: int, body: Any, content_type: bytes, headers: bytes) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("a defect")
        self.statuses.append(status)
        exchange.response = b""

    def answer(self, exchange: Exchange, pieces: Any, headers: bytes) -> None:
        self.respond(exchange, 200, b"".join(pieces), b"", headers)

    def note_problem(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not expected")


def infer(wire: Wire, answers: Answers, rows: int) -> InferWork:
    face = object.__new__(KServeV2Routes)  # nothing comes in here
    face.answers = answers
    return InferWork(face, parked(wire), ListCall(MODEL, b"", [b""] * rows, WantedOutputs(None, True)), "")


def parked(wire: Wire) -> Exchange:
    return Exchange(cast(Connection, wire), b"POST", b"/", {}, b"", True)


@pytest.mark.parametrize("kind", [ParkedReplies, OctetReplies])
@pytest.mark.parametrize("value", [b"[1]", pack_tensors([RawTensor("x", "UINT8", (1, 1), b"1")]), b"\0cut off", None])
def test_predict(kind: type[ParkedReplies], value: Any) -> None:
    is_good = value not in (None, b"\0cut off")
    for fails in (False, True) if is_good else (False,):
        wire = Wire()
        wire.fails = fails
        replies = kind(predict_pieces, "/v1/predict")
        request = make_request("r", replies, now=0.0)
        request.ticket = parked(wire)
        request.settle(Output(value, FACTS), 1.0)
        assert wire.statuses == [200 if is_good and not fails else 500]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (pack_tensors([RawTensor("x", "UINT8", (1, 1), b"1")]), 200),
        (b'[{"name":"x","datatype":"UINT8","shape":[1,1],"data":[1]}]', 200),
        (b'[{"name":"x","datatype":"UINT8","shape":[1,1],"data":[1000]}]', 502),
        (b"\0cut off", 502),
        (b'{"no":"tensor"}', 502),
        (7, 500),
    ],
)
async def test_kserve_v2(value: Any, status: int) -> None:
    for fails in (False, True) if status == 200 else (False,):
        wire, answers = Wire(), Answers(1000)
        wire.fails = fails
        reply = infer(wire, answers, 1)
        told: CarpoolError | None = None
        try:
            reply.came(0, Output(value, FACTS))
        except Exception as failure:  # as a group does it
            told = as_error(failure)
        reply.answer([told], None)
        assert wire.statuses == [500 if fails else status] and answers.held == 0


async def test_too_much_of_answers() -> None:
    reply = infer(Wire(), Answers(10), 2)
    with pytest.raises(QueueFull):
        reply.came(0, Output(bytes(11), FACTS))
