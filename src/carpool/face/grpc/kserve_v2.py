"""`inference.GRPCInferenceService`: KServe V2 over gRPC. Triton's clients work unchanged.

A call of n rows is n requests, which share batches with other clients'; it is answered when all of them are, and
counts as n (face/tensor_rows.py, as over HTTP).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from carpool.core.errors import CarpoolError, QueueFull, UnknownModel, without_frames
from carpool.core.outcome import Output
from carpool.core.ports import NO_OPTIONS, Caller, LimitVerdict, RequestOptions
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method, Problems, in_turns, tell
from carpool.face.grpc.v2_messages import (
    InferCall,
    ModelName,
    is_so,
    model_metadata,
    own_parameters,
    read_infer,
    read_model,
    rows_of,
    server_metadata,
    write_infer,
)
from carpool.face.http.faces import INFER, model_with_face
from carpool.face.http.gateway import options_in, too_large_for
from carpool.face.http.ids import acceptable_id, given_id
from carpool.face.http.kserve_v2 import check_version, metadata_of
from carpool.face.http.lists import Answers
from carpool.face.intake import Intake, ServedModel, new_request_id
from carpool.face.tensor_rows import Row, join_rows, read_row
from carpool.version import __version__


class KServeV2:
    """The service. `is_up` says whether requests for a model would be taken now."""

    name = "inference.GRPCInferenceService"

    def __init__(self, intake: Intake, is_up: Callable[[str], bool], answers: Answers, problems: Problems) -> None:
        self._intake = intake
        self._is_up = is_up
        # What all calls hold of outputs is bounded, over both transports together.
        self._answers = answers
        self._begin_trace = None if problems.traces is None else problems.traces.begin
        self.methods: Mapping[str, Method] = {
            "ServerLive": Method(self.server_live),
            "ServerReady": Method(self.server_ready),
            "ModelReady": Method(self.model_ready),
            "ServerMetadata": Method(self.server_metadata),
            "ModelMetadata": Method(self.model_metadata),
            "ModelInfer": Method(self.infer),
        }

    def drain(self) -> None:
        """Do nothing: this service has no streams."""

    async def server_live(self, call: GrpcCall) -> GrpcResult:
        """Always true: a process that answers is alive."""
        return is_so(True)

    async def server_ready(self, call: GrpcCall) -> GrpcResult:
        """Ready when a model is."""
        return is_so(any(self._is_up(model.name) for model in self._intake.models()))

    async def model_ready(self, call: GrpcCall) -> GrpcResult:
        """Whether a model is ready; an unknown model is not, as with Triton."""
        caller = self._caller(call)
        try:
            model = self._model(read_model(await call.read()), caller)
        except UnknownModel:
            return is_so(False)
        return is_so(self._is_up(model.name))

    async def server_metadata(self, call: GrpcCall) -> GrpcResult:
        """The name and version of this server."""
        return server_metadata("carpool", __version__)

    async def model_metadata(self, call: GrpcCall) -> GrpcResult:
        """What is known of a model."""
        caller = self._caller(call)
        return model_metadata(metadata_of(self._model(read_model(await call.read()), caller)))

    async def infer(self, call: GrpcCall) -> GrpcResult:
        """The outputs of all rows."""
        caller = self._caller(call)
        try:
            given = await self._read(call, caller)
        except CarpoolError as fault:  # a call that cannot be read counts as one row
            without_frames(fault)
            entry = await self._enter(call, caller, 1)
            return entry if isinstance(entry, CarpoolError) else fault
        model, asked, rows = given
        entry = await self._enter(call, caller, len(rows))
        if isinstance(entry, CarpoolError):
            return entry
        parameters, timeout_s = own_parameters(asked)
        call.own_id = given_id(call.headers) or acceptable_id(asked.id) or new_request_id()
        reply = GrpcReply(self._answers)
        begin = None if self._begin_trace is None else partial(self._begin_trace, call.headers)
        group = self._intake.ask_all(
            caller=caller,
            model=model,
            parameters=parameters,
            values=rows,
            request_id=call.own_id,
            answer=reply.answer,
            came=reply.came,
            options=options_of(call, timeout_s),
            begin_trace=begin,
            route=f"{self.name}/ModelInfer",
        )
        is_several = len(rows) > 1
        del given, rows
        try:
            outcomes, number = await reply.told
            call.came_in = group.came_in
            if isinstance(outcomes[0], CarpoolError):
                return outcomes[0] if number is None or not is_several else of_row(outcomes[0], number)
            version = reply.version or (model.tensors.version if model.tensors else "")
            return await in_turns(
                self._answers.turns,
                write_infer(model.name, version, asked.id, join_rows(outcomes), asked.wanted, is_raw=asked.is_raw),
            )
        except asyncio.CancelledError:
            group.leave()
            raise
        finally:
            reply.end()

    async def _read(self, call: GrpcCall, caller: Caller) -> tuple[ServedModel, InferCall, list[bytes]]:
        """The model that is asked for, and one input for each row. The message is not kept."""
        message = await call.read()
        asked = read_infer(message)
        model = self._model(asked.model, caller)
        if len(message) > model.body_bytes_max:
            raise too_large_for(model)
        rows = await in_turns(self._answers.turns, rows_of(asked, len(message)))
        is_raw = asked.is_raw
        asked.tensors, asked.raw = [], [b""] if is_raw else []
        return model, asked, rows

    async def _enter(self, call: GrpcCall, caller: Caller, cost: int) -> LimitVerdict:
        """Whether the rate limit of the caller lets so many rows in."""
        if caller.limit is None:
            return b""
        entry = self._intake.enter(caller, cost)
        if entry is None:
            known: asyncio.Future[LimitVerdict] = asyncio.get_running_loop().create_future()
            self._intake.when_known(caller, partial(tell, known), cost)
            entry = await known
        if isinstance(entry, bytes):
            call.tell_limit(entry)
        return entry

    def _caller(self, call: GrpcCall) -> Caller:
        return call.peer.caller or self._intake.identify(call.headers, call.peer)

    def _model(self, named: ModelName, caller: Caller) -> ServedModel:
        model = model_with_face(self._intake, named.name, INFER, caller)
        if named.version:
            check_version(model, named.version)
        return model


class GrpcReply:
    """What a call waits for, and what it holds meanwhile."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._held = 0
        # Of the model, as the upstream tells it.
        self.version = ""
        self.told: asyncio.Future[tuple[Sequence[Any], int | None]] = asyncio.get_running_loop().create_future()

    def came(self, number: int, output: Output) -> Row:
        """The output of one row."""
        if number == 0:
            self.version = output.call.model_version or ""
        size = len(output.value)
        self._held += size
        self._answers.held += size
        if self._answers.held > self._answers.bytes_max:
            raise QueueFull("too many large answers are on their way; ask for fewer rows at a time", retry_after_s=1)
        return read_row(output.value)

    def answer(self, outcomes: Sequence[Any], number: int | None) -> None:
        """Take the outputs of all rows, or the error of one, or of all."""
        tell(self.told, (outcomes, number))

    def end(self) -> None:
        """Nothing is held any more."""
        self._answers.held -= self._held
        self._held = 0


def options_of(call: GrpcCall, timeout_s: float | None) -> RequestOptions:
    """How the rows of a call are to be treated: by the sooner of two deadlines, and by its metadata."""
    options = options_in(call.headers, {}) if b"cache-control" in call.headers else NO_OPTIONS
    remaining_s = call.remaining_s()
    if remaining_s is not None and (timeout_s is None or remaining_s < timeout_s):
        timeout_s = remaining_s
    return options if timeout_s is None else RequestOptions(timeout_s, options.no_store, options.no_cache)


def of_row(error: CarpoolError, number: int) -> CarpoolError:
    """An error that names the row that it is of."""
    return type(error)(
        f"row {number}: {error.detail}",
        retry_after_s=error.retry_after_s,
        predicted_wait_ms=error.predicted_wait_ms,
        header_lines=error.header_lines,
    )
