"""`inference.GRPCInferenceService`: KServe V2 over gRPC. Triton's clients work unchanged.

A call of n rows is n requests, which share batches with other clients'; it is answered when all of them are, and
counts as n (face/tensor_rows.py, as over HTTP).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from carpool.core.errors import CarpoolError, QueueFull, UnknownModel, without_frames
from carpool.core.messages import inference
from carpool.core.outcome import Output
from carpool.core.ports import Caller
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method, Problems, enter, in_turns, tell
from carpool.face.grpc.messages import parse
from carpool.face.grpc.v2_messages import call_of, read_infer, write_infer
from carpool.face.http.faces import INFER, model_with_face
from carpool.face.http.gateway import too_large_for
from carpool.face.http.ids import acceptable_id, given_id
from carpool.face.http.kserve_v2 import check_version, metadata_of
from carpool.face.http.lists import Answers
from carpool.face.http.v2_wire import V2Call
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
        return inference.ServerLiveResponse(live=True)

    async def server_ready(self, call: GrpcCall) -> GrpcResult:
        """Ready when a model is."""
        return inference.ServerReadyResponse(ready=any(self._is_up(model.name) for model in self._intake.models()))

    async def model_ready(self, call: GrpcCall) -> GrpcResult:
        """Whether a model is ready; an unknown model is not, as with Triton."""
        caller = call.caller(self._intake)
        asked = parse(inference.ModelReadyRequest, await call.read())
        try:
            model = self._model(asked.name, asked.version, caller)
        except UnknownModel:
            return inference.ModelReadyResponse(ready=False)
        return inference.ModelReadyResponse(ready=self._is_up(model.name))

    async def server_metadata(self, call: GrpcCall) -> GrpcResult:
        """The name and version of this server."""
        return inference.ServerMetadataResponse(name="carpool", version=__version__)

    async def model_metadata(self, call: GrpcCall) -> GrpcResult:
        """What is known of a model."""
        caller = call.caller(self._intake)
        asked = parse(inference.ModelMetadataRequest, await call.read())
        return inference.ModelMetadataResponse(**metadata_of(self._model(asked.name, asked.version, caller)))

    async def infer(self, call: GrpcCall) -> GrpcResult:
        """The outputs of all rows."""
        caller = call.caller(self._intake)
        try:
            model, asked = await self._read(call, caller)
        except CarpoolError as fault:  # a call that cannot be read counts as one row
            without_frames(fault)
            return await enter(self._intake, call, caller) or fault
        rows, asked = asked.rows, replace(asked, rows=[])
        if (refusal := await enter(self._intake, call, caller, len(rows))) is not None:
            return refusal
        call.own_id = given_id(call.headers) or acceptable_id(asked.id) or new_request_id()
        held = HeldRows(self._answers, model)
        # The outputs of all rows; or an error, and the row that it is of, or None where it is of all.
        told: asyncio.Future[tuple[Sequence[Any], int | None]] = asyncio.get_running_loop().create_future()
        begin = None if self._begin_trace is None else partial(self._begin_trace, call.headers)
        group = self._intake.ask_all(
            caller=caller,
            model=model,
            parameters=asked.parameters,
            values=rows,
            request_id=call.own_id,
            answer=lambda outcomes, number: tell(told, (outcomes, number)),
            came=held.came,
            options=call.options(asked.timeout_s, call.remaining_s()),
            begin_trace=begin,
            route=f"{self.name}/ModelInfer",
        )
        is_several = len(rows) > 1
        del rows
        try:
            outcomes, number = await told
            call.came_in = group.came_in
            if isinstance(outcomes[0], CarpoolError):
                return outcomes[0] if number is None or not is_several else of_row(outcomes[0], number)
            writing = write_infer(model.name, held.version, asked.id, join_rows(outcomes), asked.wanted)
            return await in_turns(self._answers.turns, writing)
        except asyncio.CancelledError:
            group.leave()
            raise
        finally:
            held.let_go()

    async def _read(self, call: GrpcCall, caller: Caller) -> tuple[ServedModel, V2Call]:
        """The model that is asked for, and the call, with one input for each row. The message is not kept."""
        message = await call.read()
        asked, raw = await in_turns(self._answers.turns, read_infer(message))
        model = self._model(asked.model_name, asked.model_version, caller)
        if len(message) > model.body_bytes_max:
            raise too_large_for(model)
        return model, await in_turns(self._answers.turns, call_of(asked, raw, len(message)))

    def _model(self, name: str, version: str, caller: Caller) -> ServedModel:
        model = model_with_face(self._intake, name, INFER, caller)
        if version:
            check_version(model, version)
        return model


class HeldRows:
    """The outputs of a call's rows. What all calls hold of outputs is bounded (face/http/lists.py)."""

    def __init__(self, answers: Answers, model: ServedModel) -> None:
        self._answers = answers
        self._held = 0
        # Of the model, as the upstream tells it, or as it is configured.
        self.version = model.tensors.version if model.tensors else ""

    def came(self, number: int, output: Output) -> Row:
        """The output of one row."""
        if number == 0:
            self.version = output.call.model_version or self.version
        size = len(output.value)
        self._held += size
        self._answers.held += size
        if self._answers.held > self._answers.bytes_max:
            raise QueueFull("too many large answers are on their way; ask for fewer rows at a time", retry_after_s=1)
        return read_row(output.value)

    def let_go(self) -> None:
        """Nothing is held any more."""
        self._answers.held -= self._held
        self._held = 0


def of_row(error: CarpoolError, number: int) -> CarpoolError:
    """An error that names the row that it is of."""
    return type(error)(
        f"row {number}: {error.detail}",
        retry_after_s=error.retry_after_s,
        predicted_wait_ms=error.predicted_wait_ms,
        header_lines=error.header_lines,
    )
