"""The served descriptions of the HTTP contract, for both ports.

`openapi.json` and `openapi_admin.json` have the paths, and the bodies whose formats are others' contracts. Added here
is what the code knows: the schemas of Carpool's own types, the models and limits in force, and the errors. `x-errors`
of an operation has their statuses by the schema of their form; errors of HTTP itself are problem objects everywhere.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from carpool.core.dead_letter import Replayed, ReplayReport, dead_letter_causes
from carpool.core.errors import CarpoolError, all_errors
from carpool.core.problem import Problem
from carpool.core.snapshot import FleetState, Health, Scale
from carpool.core.timeline import RequestState
from carpool.face.http import answers
from carpool.face.http.wire import InferenceCall, PredictCall

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"
TO_CLIENTS = (
    answers.InferenceAnswer,
    answers.PredictAnswer,
    answers.TaskAccepted,
    answers.TaskState,
    answers.StreamTicket,
)
OF_LISTS = (answers.LettersListed, answers.LetterShown, answers.LettersDropped, answers.WebhooksListed)
OF_TENSOR_MODELS = "/v2/models/"


def gateway_openapi(
    models: list[str],
    default_model: str,
    wait_ms_max: int,
    tensor_models: Sequence[str] = (),
    *,
    takes_callbacks: bool = False,
    names_models: bool = True,
) -> bytes:
    """The description of the port for clients. `tensor_models`: those that are served at `/v2` too.

    Without `names_models` no model is named: reading this needs no credential, and a credential may be for some only.
    """
    document = read("openapi.json", InferenceCall, PredictCall, *TO_CLIENTS)
    schemas = document["components"]["schemas"]
    named: Json = {"enum": models} if names_models else {}
    default: Json = {"default": default_model} if names_models else {}
    schemas["ModelName"] = {"type": "string", **named}
    schemas["ModelOrNone"] = {"type": "string", **named, **default}
    schemas["ModelOrDefault"] = {"enum": [*models, None], **default} if names_models else {"type": ["string", "null"]}
    schemas["TensorModelName"] = {"type": "string", **({"enum": list(tensor_models)} if names_models else {})}
    schemas["WaitMs"]["maximum"] = wait_ms_max
    # The types know nothing of the models that are served.
    schemas["InferenceCall"]["properties"]["model"] = ref("ModelOrDefault")
    schemas["PredictCall"]["properties"]["model_id"] = ref("ModelName")
    if not takes_callbacks:
        del schemas["InferenceCall"]["properties"]["callback_url"]
    if not tensor_models:
        del schemas["TensorModelName"]
        paths = document["paths"].items()
        document["paths"] = {path: item for path, item in paths if not path.startswith(OF_TENSOR_MODELS)}
    return msgspec.json.encode(document)


def admin_openapi() -> bytes:
    """The description of the port for operators."""
    pages = (
        Problem,
        Health,
        answers.Ready,
        FleetState,
        Scale,
        RequestState,
        Replayed,
        ReplayReport,
        answers.WebhooksRetried,
    )
    document = read("openapi_admin.json", *pages, *OF_LISTS)
    document["components"]["schemas"]["DeadLetterCause"] = {"enum": dead_letter_causes()}
    return msgspec.json.encode(document)


def read(name: str, *types: type) -> Json:
    """A document with the schemas of these types, and of all types in them, and with its errors."""
    document: Json = msgspec.json.decode(files("carpool.face").joinpath("http", name).read_bytes())
    document["components"]["schemas"] |= msgspec.json.schema_components(types, ref_template=REFERENCE)[1]
    for item in document["paths"].values():
        for method, operation in item.items():
            if method != "parameters":
                [(form, statuses)] = operation.pop("x-errors").items()
                operation["responses"] |= {str(status): refusal(status, form) for status in statuses}
    return document


def refusal(status: int, form: str) -> Json:
    """The error responses of a status, described by the error tree."""
    errors: list[type[CarpoolError]] = all_errors()
    content: Json = {"application/problem+json": {"schema": ref(Problem.__name__)}}
    if form != Problem.__name__:
        content["application/json"] = {"schema": ref(form)}
    return {"description": "; ".join([error.title for error in errors if error.status == status]), "content": content}


def ref(name: str) -> Json:
    """A reference to a schema."""
    return {"$ref": REFERENCE.format(name=name)}
