"""`carpool.v1.Inference`: Predict, Submit, GetResult and Cancel; PredictStream is in stream.py.

The hot path is `predict` → `Intake.ask` … `settled`. For each request it makes one Request and one future.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from carpool.core.errors import CarpoolError, Malformed
from carpool.core.messages import carpool_v1
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Caller, RequestOptions
from carpool.core.request import DONE, Request
from carpool.core.task import StoredTask
from carpool.core.webhook import URL_CHARS_MAX
from carpool.face.grpc.call import GrpcCall, GrpcResult, Method, Problems, enter, in_a_turn, tell
from carpool.face.grpc.messages import PredictCall, PredictResponses, parse, predict_call, read_predict, task_message
from carpool.face.grpc.stream import GrpcStreams
from carpool.face.http.gateway import no_callbacks, possible_task_id, too_large_for, with_trace
from carpool.face.http.places import Places
from carpool.face.http.wire import CLIENT_ID_CHARS_MAX, canonical_parameters, checked_input
from carpool.face.intake import Intake, ServedModel

NAME = "carpool.v1.Inference"
TIMEOUT_MS_MAX = 10**9

_read_json = msgspec.json.Decoder(msgspec.Raw).decode


class InferenceSettings(msgspec.Struct, frozen=True):
    """What this service must know of the configuration."""

    wait_ms_max: int
    forget_after_read: bool
    unread_bytes_max: int = 256 * 1024 * 1024


class Inference:
    """The service. It waits for the outcomes of the requests of `Predict`."""

    name = NAME
    # For traces.
    route = f"{NAME}/Predict"

    def __init__(
        self,
        intake: Intake,
        settings: InferenceSettings,
        problems: Problems,
        places: Places,
        # The `callback_url` of a task as it is kept; raises CallbackDenied.
        check_callback: Callable[[str], str] = no_callbacks,
    ) -> None:
        self.intake = intake
        self._check_callback = check_callback
        self.problems = problems
        self._settings = settings
        # None where nothing is traced.
        self._begin_trace = None if problems.traces is None else problems.traces.begin
        self._early = intake.early
        self.answers = PredictResponses(
            {model.name: found for model in intake.models() if (found := model.output_bytes) is not None}
        )
        self._streams = GrpcStreams(self, places, settings.unread_bytes_max)
        self.methods: Mapping[str, Method] = {
            "Predict": Method(self.predict),
            "PredictStream": Method(self._streams.serve, is_stream=True),
            "Submit": Method(self.submit),
            "GetResult": Method(self.get_result),
            "Cancel": Method(self.cancel),
        }

    def drain(self) -> None:
        """Streams take nothing new."""
        self._streams.drain()

    async def predict(self, call: GrpcCall) -> GrpcResult:
        """One input, and its output."""
        caller = call.caller(self.intake)
        if (refusal := await enter(self.intake, call, caller)) is not None:
            return refusal
        early = self._early
        if early is not None and early.headroom[caller.tier] <= 0 and (refusal := early.refusal(caller)) is not None:
            return refusal
        message = await call.read()
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        requests: list[Request] = []

        def ask() -> None:
            asked = read_predict(message)
            requests.append(self.ask(caller, call, asked, call.request_id(), self, outcome, call.remaining_s()))

        try:
            await in_a_turn(self.intake.long_turns, message, ask)
            message = b""  # what waits should be small: the request has what is needed of it
            found = await outcome
        except asyncio.CancelledError:
            for request in requests:
                self.intake.cancel(request)
            raise
        return self.answers.message(requests[0], found) if isinstance(found, Output) else found

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Wake the call that waits for a request; it writes the answer itself, so that a defect there is its own."""
        tell(request.ticket, outcome)

    def ask(
        self,
        caller: Caller,
        call: GrpcCall,
        asked: PredictCall,
        request_id: str,
        waiter: Any,
        ticket: object,
        remaining_s: float | None = None,
    ) -> Request:
        """Let a synchronous request in; raises as `Intake.ask`, and Malformed for what the message has in it."""
        model, parameters, value = self._parts(caller, asked)
        options = self._options(call, asked.message.timeout_ms, remaining_s)
        request = self.intake.ask(
            caller, model, parameters, value, request_id, waiter, ticket, asked.message.client_id, options
        )
        call.came_in = request.phase != DONE  # else it was refused
        return request

    async def submit(self, call: GrpcCall) -> GrpcResult:
        """A task: answered once it is safe."""
        caller = call.caller(self.intake)
        if (refusal := await enter(self.intake, call, caller)) is not None:
            return refusal
        message = await call.read()
        answer: asyncio.Future[GrpcResult] = asyncio.get_running_loop().create_future()
        await in_a_turn(self.intake.long_turns, message, partial(self._submit, caller, call, message, answer))
        del message
        return await answer

    def _submit(self, caller: Caller, call: GrpcCall, message: bytes, answer: "asyncio.Future[GrpcResult]") -> None:
        submission = parse(carpool_v1.SubmitRequest, message)
        asked, callback_url = submission.request, submission.callback_url
        model, parameters, value = self._parts(caller, predict_call(asked))
        if len(callback_url) > URL_CHARS_MAX:
            raise Malformed(f"`callback_url` may have {URL_CHARS_MAX} characters at most")

        def accepted(request: Request, error: CarpoolError | None) -> None:
            tell(
                answer,
                carpool_v1.SubmitResponse(task_id=request.id, status="TASK_STATUS_PENDING") if error is None else error,
            )

        self.intake.submit(
            caller=caller,
            model=model,
            parameters=parameters,
            value=value,
            client_id=asked.client_id,
            callback_url=self._check_callback(callback_url) if callback_url else "",
            options=self._options(call, asked.timeout_ms),
            accepted=accepted,
        )

    async def get_result(self, call: GrpcCall) -> GrpcResult:
        """What became of a task, with a long poll if the client asks for one."""
        caller = call.caller(self.intake)
        asked = parse(carpool_v1.GetResultRequest, await call.read())
        wait_ms_max = self._settings.wait_ms_max
        if not 0 <= asked.wait_ms <= wait_ms_max:
            raise Malformed(f"`wait_ms` must be a whole number from 0 to {wait_ms_max}")
        found: asyncio.Future[StoredTask | CarpoolError] = asyncio.get_running_loop().create_future()

        def answer(task: StoredTask | CarpoolError) -> bool:
            if found.done():
                return False
            found.set_result(task)
            return True

        ticket = self.intake.look(
            caller=caller,
            task_id=possible_task_id(asked.task_id),
            wait_s=asked.wait_ms / 1000,
            forget=self._settings.forget_after_read,
            answer=answer,
        )
        try:
            task = await found
        except asyncio.CancelledError:
            self.intake.leave(ticket)
            raise
        return task if isinstance(task, CarpoolError) else task_message(task)

    async def cancel(self, call: GrpcCall) -> GrpcResult:
        """Cancel, discard or forget a task."""
        caller = call.caller(self.intake)
        asked = parse(carpool_v1.CancelRequest, await call.read())
        answer: asyncio.Future[GrpcResult] = asyncio.get_running_loop().create_future()

        def done(error: CarpoolError | None) -> None:
            tell(answer, b"" if error is None else error)

        self.intake.delete(caller=caller, task_id=possible_task_id(asked.task_id), done=done)
        return await answer

    def _parts(self, caller: Caller, call: PredictCall) -> tuple[ServedModel, bytes, bytes]:
        """The model, the canonical parameters and the input of a request; raises Malformed, UnknownModel, TooLarge."""
        asked, kind, given = call
        model = self.intake.model(asked.model_id, caller) if asked.model_id else self.intake.default_model
        if kind is None:
            raise Malformed("there is no input; set `input_data` or `input_json`")
        if len(given) > model.body_bytes_max:
            raise too_large_for(model)
        if len(asked.client_id) > CLIENT_ID_CHARS_MAX:
            raise Malformed(f"`client_id` may have {CLIENT_ID_CHARS_MAX} characters at most")
        if not 0 <= asked.timeout_ms <= TIMEOUT_MS_MAX:
            raise Malformed(f"`timeout_ms` must be a whole number from 0 to {TIMEOUT_MS_MAX}")
        text = asked.parameters.encode()
        parameters = canonical_parameters(json_of(text, "parameters")) if text else b""
        if kind == "input_data":
            if not given:
                raise Malformed("`input_data` is empty; send the input's bytes")
            return model, parameters, model.binary_input(given)
        return model, parameters, checked_input(json_of(given, "input_json"), "input_json")

    def _options(self, call: GrpcCall, timeout_ms: int, remaining_s: float | None = None) -> RequestOptions:
        options = call.options(timeout_ms / 1000 if timeout_ms else None, remaining_s)
        if self._begin_trace is not None and (trace := self._begin_trace(call.headers)) is not None:
            options = with_trace(options, trace)
        return options


def json_of(given: bytes, field: str) -> msgspec.Raw:
    """The JSON value in a field; raises Malformed. The callers check what else must hold."""
    try:
        return _read_json(given)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Malformed(f"`{field}` is not valid JSON") from None
