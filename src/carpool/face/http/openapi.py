"""The served description of the HTTP contract, for both ports.

Made from the types of bodies and answers, from the error tree, and from the limits in force.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from carpool.core.dead_letter import Replayed, ReplayReport, dead_letter_causes
from carpool.core.errors import CarpoolError, all_errors
from carpool.core.problem import Problem
from carpool.core.snapshot import FleetState, Health
from carpool.core.timeline import RequestState
from carpool.face.http.answers import (
    InferenceAnswer,
    PredictAnswer,
    Ready,
    StreamTicket,
    TaskAccepted,
    TaskState,
)
from carpool.face.http.dead_letters import (
    LETTER_ID_MAX,
    LETTERS_LISTED,
    LETTERS_LISTED_MAX,
    LettersDropped,
    LetterShown,
    LettersListed,
)
from carpool.face.http.list_openapi import list_paths
from carpool.face.http.openapi_v2 import TYPES as V2_TYPES
from carpool.face.http.openapi_v2 import v2_paths
from carpool.face.http.webhooks import WEBHOOKS_LISTED, WEBHOOKS_LISTED_MAX, WebhooksListed, WebhooksRetried
from carpool.face.http.wire import InferenceCall, PredictCall

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"

TASK_ID: Json = {
    "name": "task_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "from the answer that accepted the task",
}
OF_THE_TASK: Json = {"task_id": "$response.body#/task_id"}
REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "schema": {"type": "string"},
    "description": "echoed if it has 1 to 128 of A-Z a-z 0-9 . _ : -; any other is replaced by Carpool's own id",
}


# Where models are not named.
MODEL_OR_DEFAULT: Json = {"type": ["string", "null"]}


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
    model_name: Json = {"type": "string", "enum": models} if names_models else {"type": "string"}
    or_default: Json = {"enum": [*models, None], "default": default_model} if names_models else MODEL_OR_DEFAULT
    prefer: Json = {
        "name": "Prefer",
        "in": "header",
        "schema": {"type": "string"},
        "description": "`respond-async` makes the request a task; `wait=s` is a deadline in seconds, as "
        "`X-Request-Timeout-Ms` is one in milliseconds",
    }
    wait: Json = {
        "name": "wait_ms",
        "in": "query",
        "schema": {"type": "integer", "minimum": 0, "maximum": wait_ms_max, "default": 0},
        "description": "long poll: wait so long for an outcome",
    }
    model_id: Json = {
        "name": "model_id",
        "in": "query",
        "schema": {**model_name, **({"default": default_model} if names_models else {})},
        "description": "the model, for a binary body; with JSON it must not contradict the body",
    }
    accept: Json = {
        "name": "Accept",
        "in": "header",
        "schema": {"type": "string"},
        "description": "`application/octet-stream` for an output that is one raw tensor, or base64 in JSON",
    }
    paths: Json = {
        **v2_paths(tensor_models, ref, titles_of, names_models=names_models),
        "/v1/inference": {
            "post": {
                "operationId": "inference",
                "summary": "One input in, its output back; or a task to poll",
                "parameters": [REQUEST_ID, prefer],
                "requestBody": {"required": True, "content": {"application/json": {"schema": ref(InferenceCall)}}},
                "responses": {
                    "200": answer("The model's output", InferenceAnswer),
                    "202": {
                        **answer("The task is stored", TaskAccepted),
                        "headers": {"Location": {"schema": {"type": "string"}}},
                        "links": {
                            name: {"operationId": name, "parameters": OF_THE_TASK}
                            for name in ("result", "events", "delete")
                        },
                    },
                    **problems(400, 401, 403, 404, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
                },
            }
        },
        "/v1/predict": {
            "post": {
                "operationId": "predict",
                "summary": "One input, JSON or binary, and its output",
                "parameters": [REQUEST_ID, model_id, accept],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": ref(PredictCall)},
                        "application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}},
                    },
                },
                "responses": {
                    "200": {
                        "description": "The model's output; its bytes for who accepts those, if it has some",
                        "content": {
                            "application/json": {"schema": ref(PredictAnswer)},
                            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                        },
                    },
                    **problems(400, 401, 403, 404, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
                },
            }
        },
        "/v1/result/{task_id}": {
            "parameters": [TASK_ID],
            "get": {
                "operationId": "result",
                "summary": "The state of a task, and its result",
                "parameters": [wait],
                "responses": {"200": answer("The task's state", TaskState), **problems(400, 401, 404, 431, 500, 503)},
            },
            "delete": {
                "operationId": "delete",
                "summary": "Cancel a task or forget its result",
                "responses": {"204": {"description": "Done"}, **problems(400, 401, 404, 431, 500, 503)},
            },
        },
        **list_paths(or_default, model_name),
        **open_paths(),
        "/openapi.json": DESCRIBED_BY_ITSELF,
    }
    answers = (InferenceAnswer, PredictAnswer, TaskAccepted, TaskState, StreamTicket)
    schemas = schemas_of(InferenceCall, PredictCall, *answers, *V2_TYPES)
    # The types know nothing of the models that are served.
    schemas["InferenceCall"]["properties"]["model"] = or_default
    schemas["PredictCall"]["properties"]["model_id"] = model_name
    if not takes_callbacks:
        del schemas["InferenceCall"]["properties"]["callback_url"]
    return document("Carpool", paths, schemas)


def open_paths() -> Json:
    """The paths of what stays open: events of tasks, and streams."""
    last: Json = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": {"type": "string"},
        "description": "the last event that was heard: it is not told again",
    }
    ticket: Json = {"name": "ticket", "in": "query", "schema": {"type": "string"}, "description": "for a browser"}
    events: Json = {"description": "Server-sent events", "content": {"text/event-stream": {}}}
    return {
        "/v1/result/{task_id}/events": {
            "parameters": [TASK_ID],
            "get": {
                "operationId": "events",
                "summary": "What becomes of a task, as it happens: `queued`, `processing`, then `done` or `failed`",
                "parameters": [last],
                "responses": {
                    "200": events,
                    "204": {"description": "The last event was the last"},
                    **problems(400, 401, 404, 429, 431, 500, 503),
                },
            },
        },
        "/v1/stream": {
            "get": {
                "operationId": "stream",
                "summary": "A WebSocket with many requests in flight (docs/stream.md)",
                "parameters": [ticket],
                "responses": {
                    "101": {"description": "A WebSocket from now on"},
                    **problems(400, 401, 403, 426, 429, 431, 500, 503),
                },
            }
        },
        "/v1/stream/tickets": {
            "post": {
                "operationId": "ticket",
                "summary": "What opens a stream in place of a credential, for a minute",
                "responses": {
                    "200": answer("A ticket", StreamTicket),
                    **problems(400, 401, 408, 413, 431, 500, 503),
                },
            }
        },
    }


def admin_openapi() -> bytes:
    """The description of the port for operators."""
    request_id: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    metrics: Json = {
        "description": "Prometheus text, or OpenMetrics for who accepts it",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")},
    }
    paths: Json = {
        "/internal/health": get("health", "How busy this process is", {"200": answer("Numbers of the moment", Health)}),
        "/internal/ready": get(
            "ready",
            "Whether to send requests here",
            {"200": answer("Ready", Ready), "503": answer("Not ready, and why", Ready)},
        ),
        "/internal/fleet": get("fleet", "Every endpoint of every model", {"200": answer("The fleet", FleetState)}),
        "/internal/requests/{id}": {
            "parameters": [request_id],
            **get(
                "request", "A live or recent request", {"200": answer("Its state", RequestState), **problems(404, 503)}
            ),
        },
        "/metrics": get("metrics", "Metrics", {"200": metrics}),
        **dead_letter_paths(),
        **webhook_paths(),
        "/openapi.json": DESCRIBED_BY_ITSELF,
    }
    letters = (LettersListed, LetterShown, LettersDropped, Replayed, ReplayReport)
    schemas = schemas_of(Problem, Health, Ready, FleetState, RequestState, *letters, WebhooksListed, WebhooksRetried)
    return document("Carpool, for operators", paths, schemas)


def dead_letter_paths() -> Json:
    """The paths of dead letters."""
    causes = dead_letter_causes()
    limit: Json = {"type": "integer", "minimum": 1, "maximum": LETTERS_LISTED_MAX, "default": LETTERS_LISTED}
    after: Json = {"type": "integer", "minimum": 0, "maximum": LETTER_ID_MAX, "default": 0}
    letter_id: Json = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": LETTER_ID_MAX},
    }
    shared = problems(400, 401, 429, 431, 500, 503)
    of_one = {**shared, **problems(404)}
    operations_of_one = ("dead_letter", "drop_dead_letter", "replay_dead_letter")
    first: Json = {"id": "$response.body#/dead_letters/0/id"}
    links: Json = {name: {"operationId": name, "parameters": first} for name in operations_of_one}
    return {
        "/internal/dead-letters": {
            "get": {
                "operationId": "dead_letters",
                "summary": "Requests given up on, the oldest first; not their inputs",
                "parameters": [
                    {"name": "limit", "in": "query", "schema": limit},
                    {"name": "after", "in": "query", "schema": after, "description": "the last id already seen"},
                ],
                "responses": {"200": {**answer("Some dead letters", LettersListed), "links": links}, **shared},
            },
            "delete": {
                "operationId": "drop_dead_letters",
                "summary": "Drop all",
                "parameters": [{"name": "all", "in": "query", "required": True, "schema": {"enum": ["true"]}}],
                "responses": {"200": answer("How many there were", LettersDropped), **shared},
            },
        },
        "/internal/dead-letters/replay": {
            "post": {
                "operationId": "replay_dead_letters",
                "summary": "Make all, or those of one cause, tasks again",
                "parameters": [{"name": "cause", "in": "query", "schema": {"enum": causes}}],
                "responses": {"202": answer("The new tasks; why some letters were left", ReplayReport), **of_one},
            }
        },
        "/internal/dead-letters/{id}": {
            "parameters": [letter_id],
            "get": {
                "operationId": "dead_letter",
                "summary": "One dead letter with its input",
                "responses": {"200": answer("The dead letter", LetterShown), **of_one},
            },
            "delete": {
                "operationId": "drop_dead_letter",
                "summary": "Drop one",
                "responses": {"204": {"description": "Done"}, **of_one},
            },
        },
        "/internal/dead-letters/{id}/replay": {
            "parameters": [letter_id],
            "post": {
                "operationId": "replay_dead_letter",
                "summary": "Make one a task again",
                "responses": {"202": answer("The new task", Replayed), **of_one},
            },
        },
    }


def webhook_paths() -> Json:
    """The paths of webhooks."""
    limit: Json = {"type": "integer", "minimum": 1, "maximum": WEBHOOKS_LISTED_MAX, "default": WEBHOOKS_LISTED}
    shared = problems(400, 401, 431, 500, 503)
    retried = {"202": answer("How many are due now", WebhooksRetried), **shared}
    return {
        "/internal/webhooks": {
            "get": {
                "operationId": "webhooks",
                "summary": "Outcomes of tasks that wait to be sent, the next first",
                "parameters": [{"name": "limit", "in": "query", "schema": limit}],
                "responses": {"200": answer("Some webhooks", WebhooksListed), **shared},
            }
        },
        "/internal/webhooks/retry": {
            "post": {"operationId": "retry_webhooks", "summary": "Send all of them now", "responses": retried}
        },
        "/internal/webhooks/{task_id}/retry": {
            "parameters": [TASK_ID],
            "post": {
                "operationId": "retry_webhook",
                "summary": "Send one now",
                "responses": {**retried, **problems(404)},
            },
        },
    }


def schemas_of(*kinds: type) -> Json:
    """The schemas of these types and of all types in them, by name."""
    return msgspec.json.schema_components(kinds, ref_template=REFERENCE)[1]


def ref(kind: type) -> Json:
    """A reference to the schema of a type."""
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def document(title: str, paths: Json, schemas: Json) -> bytes:
    """A whole OpenAPI document."""
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": "1", "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def get(operation: str, summary: str, responses: Json) -> Json:
    """A path with one GET."""
    shared = problems(400, 401, 429, 431, 500)
    return {"get": {"operationId": operation, "summary": summary, "responses": {**responses, **shared}}}


def answer(description: str, kind: type) -> Json:
    """A JSON response."""
    return {"description": description, "content": {"application/json": {"schema": ref(kind)}}}


def problems(*statuses: int) -> Json:
    """The error responses of these statuses, described by the error tree."""
    return {
        str(status): {
            "description": titles_of(status),
            "content": {"application/problem+json": {"schema": ref(Problem)}},
        }
        for status in statuses
    }


def titles_of(status: int) -> str:
    """What errors with this status are called."""
    errors: list[type[CarpoolError]] = all_errors()
    return "; ".join([error.title for error in errors if error.status == status])


DESCRIBED_BY_ITSELF: Json = get(
    "openapi",
    "This document",
    {"200": {"description": "OpenAPI", "content": {"application/json": {"schema": {"type": "object"}}}}},
)
