"""The served description of the HTTP contract, for both ports. Built from the error tree and the limits in force."""

from typing import Any

import msgspec

from carpool.core.dead_letter import dead_letter_causes
from carpool.core.errors import CarpoolError, all_errors
from carpool.face.http.dead_letters import LETTER_ID_MAX, LETTERS_LISTED, LETTERS_LISTED_MAX

Json = dict[str, Any]

PROBLEM: Json = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "urn:carpool:error:<code>"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": "string"},
    },
}
METADATA: Json = {
    "type": "object",
    "required": ["latency_ms", "queue_ms", "upstream_ms", "batch_size", "model", "cached"],
    "properties": {
        "latency_ms": {"type": "number"},
        "queue_ms": {"type": "number"},
        "upstream_ms": {"type": "number"},
        "batch_size": {"type": "integer"},
        "model": {"type": "string"},
        "cached": {"type": "boolean"},
        "model_version": {"type": "string"},
        "tokens_used": {"type": "integer"},
    },
}
INFERENCE_ANSWER: Json = {
    "type": "object",
    "required": ["request_id", "output", "metadata"],
    "properties": {"request_id": {"type": "string"}, "output": {}, "metadata": METADATA},
}
TASK_ACCEPTED: Json = {
    "type": "object",
    "required": ["task_id", "status"],
    "properties": {"task_id": {"type": "string"}, "status": {"const": "PENDING"}},
}
TASK_STATE: Json = {
    "type": "object",
    "required": ["task_id", "status", "timestamp"],
    "properties": {
        "task_id": {"type": "string"},
        "status": {"enum": ["PENDING", "SUCCESS", "FAILED"]},
        "output": {},
        "error": {"$ref": "#/components/schemas/Problem"},
        "timestamp": {"type": "string", "format": "date-time"},
    },
}
PREDICT_ANSWER: Json = {
    "type": "object",
    "required": ["request_id", "output", "latency_ms"],
    "properties": {"request_id": {"type": "string"}, "output": {}, "latency_ms": {"type": "integer"}},
}
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


def gateway_openapi(models: list[str], default_model: str, wait_ms_max: int) -> bytes:
    """The description of the port for clients."""
    model_name: Json = {"type": "string", "enum": models}
    inference_body: Json = {
        "type": "object",
        "required": ["input"],
        "additionalProperties": False,
        "properties": {
            "input": {"description": "any JSON value; passed on untouched"},
            "model": {"enum": [*models, None], "default": default_model},
            "parameters": {"type": ["object", "null"], "description": "requests with equal parameters share batches"},
            "client_id": {"type": ["string", "null"], "maxLength": 256},
            "mode": {"enum": ["sync", "async", None]},
        },
    }
    predict_body: Json = {
        "type": "object",
        "required": ["model_id", "input_data"],
        "additionalProperties": False,
        "properties": {"model_id": model_name, "input_data": {"description": "any JSON value"}},
    }
    prefer: Json = {
        "name": "Prefer",
        "in": "header",
        "schema": {"type": "string"},
        "description": "`respond-async` makes the request a task",
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
        "schema": {**model_name, "default": default_model},
        "description": "the model, for a binary body; with JSON it must not contradict the body",
    }
    paths: Json = {
        "/v1/inference": {
            "post": {
                "operationId": "inference",
                "summary": "One input in, its output back; or a task to poll",
                "parameters": [REQUEST_ID, prefer],
                "requestBody": {"required": True, "content": {"application/json": {"schema": inference_body}}},
                "responses": {
                    "200": answer("The model's output", INFERENCE_ANSWER),
                    "202": {
                        **answer("The task is stored", TASK_ACCEPTED),
                        "headers": {"Location": {"schema": {"type": "string"}}},
                        "links": {
                            name: {"operationId": name, "parameters": OF_THE_TASK} for name in ("result", "delete")
                        },
                    },
                    **problems(400, 404, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
                },
            }
        },
        "/v1/predict": {
            "post": {
                "operationId": "predict",
                "summary": "One input, JSON or binary, and its output",
                "parameters": [REQUEST_ID, model_id],
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": predict_body},
                        "application/octet-stream": {"schema": {"type": "string", "format": "binary", "minLength": 1}},
                    },
                },
                "responses": {
                    "200": answer("The model's output", PREDICT_ANSWER),
                    **problems(400, 404, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
                },
            }
        },
        "/v1/result/{task_id}": {
            "parameters": [TASK_ID],
            "get": {
                "operationId": "result",
                "summary": "The state of a task, and its result",
                "parameters": [wait],
                "responses": {"200": answer("The task's state", TASK_STATE), **problems(400, 404, 431, 500, 503)},
            },
            "delete": {
                "operationId": "delete",
                "summary": "Cancel a task or forget its result",
                "responses": {"204": {"description": "Done"}, **problems(400, 404, 431, 500, 503)},
            },
        },
        "/openapi.json": DESCRIBED_BY_ITSELF,
    }
    return document("Carpool", paths)


def admin_openapi() -> bytes:
    """The description of the port for operators."""
    health: Json = {
        "type": "object",
        "required": ["status", "gpu_utilization", "queue_depth", "requests_per_second"],
        "properties": {
            "status": {"enum": ["healthy", "degraded", "draining"]},
            "problem": {"type": "string", "description": "what is wrong, and what to change, where it is degraded"},
            "gpu_utilization": {"type": "number"},
            "queue_depth": {"type": "integer"},
            "requests_per_second": {"type": "number"},
        },
    }
    ready: Json = {
        "type": "object",
        "required": ["ready"],
        "properties": {"ready": {"type": "boolean"}, "reason": {"type": "string"}},
    }
    request: Json = {
        "type": "object",
        "required": ["status", "latency_ms", "error", "client_id"],
        "properties": {
            "status": {"enum": ["queued", "processing", "completed", "failed"]},
            "latency_ms": {"type": "number"},
            "error": {"type": ["string", "null"]},
            "client_id": {"type": ["string", "null"]},
        },
    }
    request_id: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    metrics: Json = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths: Json = {
        "/internal/health": get("health", "How busy this process is", {"200": answer("Numbers of the moment", health)}),
        "/internal/ready": get(
            "ready",
            "Whether to send requests here",
            {"200": answer("Ready", ready), "503": answer("Not ready, and why", ready)},
        ),
        "/internal/fleet": get("fleet", "Every endpoint of every model", {"200": answer("The fleet", FLEET)}),
        "/internal/requests/{id}": {
            "parameters": [request_id],
            **get("request", "A live or recent request", {"200": answer("Its state", request), **problems(404, 503)}),
        },
        "/metrics": get("metrics", "Metrics", {"200": metrics}),
        **dead_letter_paths(),
        "/openapi.json": DESCRIBED_BY_ITSELF,
    }
    return document("Carpool, for operators", paths)


def dead_letter_paths() -> Json:
    """The paths of dead letters."""
    causes = dead_letter_causes()
    number: Json = {"type": "integer", "minimum": 1}
    summary: Json = {
        "id": number,
        "request_id": {"type": "string"},
        "model": {"type": "string"},
        "cause": {"enum": causes},
        "detail": {"type": "string"},
        "sends": {"type": "integer"},
        "buried_at": {"type": "string", "format": "date-time"},
        "size": {"type": "integer", "description": "bytes of input and parameters"},
    }
    owner: Json = {
        "type": "string",
        "description": "whom it counts for: the client's address; empty if that is not known",
    }
    whole: Json = {**summary, "owner": owner, "input": {}, "parameters": {"type": ["object", "null"]}}
    replayed = strict_object({"id": number, "task_id": {"type": "string"}})
    report = strict_object({"tasks": {"type": "array", "items": replayed}, "reason": {"type": ["string", "null"]}})
    listed = strict_object(
        {"dead_letters": {"type": "array", "items": strict_object(summary)}, "total": {"type": "integer"}}
    )
    limit: Json = {"type": "integer", "minimum": 1, "maximum": LETTERS_LISTED_MAX, "default": LETTERS_LISTED}
    after: Json = {"type": "integer", "minimum": 0, "maximum": LETTER_ID_MAX, "default": 0}
    letter_id: Json = {"name": "id", "in": "path", "required": True, "schema": {**number, "maximum": LETTER_ID_MAX}}
    shared = problems(400, 401, 431, 500, 503)
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
                "responses": {"200": {**answer("Some dead letters", listed), "links": links}, **shared},
            },
            "delete": {
                "operationId": "drop_dead_letters",
                "summary": "Drop all",
                "parameters": [{"name": "all", "in": "query", "required": True, "schema": {"enum": ["true"]}}],
                "responses": {
                    "200": answer("How many there were", strict_object({"dropped": {"type": "integer"}})),
                    **shared,
                },
            },
        },
        "/internal/dead-letters/replay": {
            "post": {
                "operationId": "replay_dead_letters",
                "summary": "Make all, or those of one cause, tasks again",
                "parameters": [{"name": "cause", "in": "query", "schema": {"enum": causes}}],
                "responses": {"202": answer("The new tasks; why some letters were left", report), **of_one},
            }
        },
        "/internal/dead-letters/{id}": {
            "parameters": [letter_id],
            "get": {
                "operationId": "dead_letter",
                "summary": "One dead letter with its input",
                "responses": {"200": answer("The dead letter", strict_object(whole)), **of_one},
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
                "responses": {"202": answer("The new task", replayed), **of_one},
            },
        },
    }


def strict_object(properties: Json) -> Json:
    """An object that has all of these properties, and no other."""
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }


MEMBER: Json = {
    "type": "object",
    "required": ["name", "status", "current_utilization", "in_flight", "last_heartbeat"],
    "properties": {
        "name": {"type": "string"},
        "status": {"enum": ["ok", "draining", "offline"]},
        "last_heartbeat": {"type": "string", "format": "date-time", "description": "on the clock of Redis"},
    },
}
ENDPOINT: Json = strict_object(
    {
        "endpoint": {"type": "string"},
        "state": {"enum": ["healthy", "degraded", "offline"]},
        "utilization": {"type": "number", "description": "as it reports it, else the busy share of its slots"},
        "in_flight": {"type": "integer", "description": "calls under way"},
        "limit": {"type": "integer", "description": "calls it may have at once: its slots, or fewer under load"},
        "slots": {"type": "integer"},
        "breaker": {"enum": ["closed", "open", "half-open"]},
        "last_heartbeat": {
            "type": ["string", "null"],
            "format": "date-time",
            "description": "when a call or a probe was last answered well",
        },
    }
)
ENDPOINT["properties"]["batcher"] = {"type": "string", "description": "over Redis: who calls it"}
MODEL_FLEET: Json = strict_object(
    {
        "slots": {"type": "integer"},
        "healthy_slots": {"type": "integer", "description": "calls that the endpoints that work may have at once"},
        "capacity_rps": {"type": "number", "description": "healthy slots x largest batch / seconds a batch takes"},
        "endpoints": {"type": "array", "items": ENDPOINT},
        "offenders": {
            "type": "array",
            "items": {"type": "string"},
            "description": "owners whose inputs keep being refused, and who ride apart",
        },
    }
)
FLEET: Json = {
    "type": "object",
    "required": ["models"],
    "properties": {
        "models": {"type": "object", "additionalProperties": MODEL_FLEET},
        "gateways": {"type": "array", "items": MEMBER, "description": "over Redis: who lives, or did a minute ago"},
        "batchers": {"type": "array", "items": MEMBER},
    },
    "additionalProperties": False,
}


def document(title: str, paths: Json) -> bytes:
    """A whole OpenAPI document."""
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": "1", "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "paths": paths,
            "components": {"schemas": {"Problem": PROBLEM}},
        }
    )


def get(operation: str, summary: str, responses: Json) -> Json:
    """A path with one GET."""
    shared = problems(400, 401, 431, 500)
    return {"get": {"operationId": operation, "summary": summary, "responses": {**responses, **shared}}}


def answer(description: str, schema: Json) -> Json:
    """A JSON response."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def problems(*statuses: int) -> Json:
    """The error responses of these statuses, described by the error tree."""
    described: Json = {}
    errors: list[type[CarpoolError]] = all_errors()
    for status in statuses:
        titles = [error.title for error in errors if error.status == status]
        described[str(status)] = {
            "description": "; ".join(titles),
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    return described


DESCRIBED_BY_ITSELF: Json = get("openapi", "This document", {"200": answer("OpenAPI", {"type": "object"})})
