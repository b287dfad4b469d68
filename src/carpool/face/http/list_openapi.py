"""The description of the faces that take lists: OpenAI, TEI and KServe V1. Their formats are others' contracts."""

from typing import Any

from carpool.core.errors import all_errors
from carpool.core.problem import Problem
from carpool.face.http.faces import COMPLETIONS, EMBED, EMBEDDINGS
from carpool.face.http.list_bodies import INPUTS_MAX, TOKEN_ID_MAX

Json = dict[str, Any]

STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504)
PROBLEM: Json = {"$ref": f"#/components/schemas/{Problem.__name__}"}

TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX}, "minItems": 1}
TEXT: Json = {"type": "string", "examples": ["a short sentence"]}
# One, or several.
TEXTS: Json = {"anyOf": [TEXT, TOKENS, {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1}]}
COUNT: Json = {"type": "integer", "minimum": 0}


def obj(properties: Json, *required: str) -> Json:
    """An object; what else is in a call is a parameter for the model."""
    return {"type": "object", "properties": properties, "required": list(required)}


def usage(*names: str) -> Json:
    """How many tokens were used."""
    return obj(dict.fromkeys(names, COUNT), *names)


OPENAI_ERROR = obj(
    {"error": obj({"message": TEXT, "type": TEXT, "param": {"type": "null"}, "code": TEXT}, "message", "type", "code")},
    "error",
)
MODEL = obj({"id": TEXT, "object": {"enum": ["model"]}, "created": COUNT, "owned_by": TEXT}, "id", "object", "created")
EMBEDDING = obj(
    {
        "object": {"enum": ["embedding"]},
        "index": COUNT,
        "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
    },
    "object",
    "index",
    "embedding",
)
CHOICE = obj({"text": TEXT, "index": COUNT, "finish_reason": {"type": ["string", "null"]}}, "text", "index")


def list_paths(model: Json, model_name: Json) -> Json:
    """The paths; `model` is what a body may say of it, and `model_name` what a path has to."""
    name: Json = {"name": "name", "in": "path", "required": True, "schema": model_name}
    list_of_models = obj({"object": {"enum": ["list"]}, "data": {"type": "array", "items": MODEL}}, "object", "data")
    state = obj({"version": TEXT, "state": {"enum": ["AVAILABLE", "UNAVAILABLE"]}}, "version", "state")
    ready = {"name": TEXT, "ready": {"type": "boolean"}, "model_version_status": {"type": "array", "items": state}}
    one_model = obj({**MODEL["properties"], **ready}, "id", "name", "ready")
    embeddings = obj(
        {
            "model": model,
            "input": TEXTS,
            "encoding_format": {"enum": ["float", "base64", None], "default": "float"},
            "user": {"type": ["string", "null"]},
        },
        "input",
    )
    completions = obj(
        {
            "model": model,
            "prompt": TEXTS,
            "n": {"enum": [1, None], "default": 1},
            "best_of": {"enum": [1, None], "default": 1},
            "stream": {"type": ["boolean", "null"], "default": False},
            "stream_options": {"anyOf": [obj({"include_usage": {"type": "boolean"}}), {"type": "null"}]},
            "user": {"type": ["string", "null"]},
        },
        "prompt",
    )
    instances: Json = {"type": "array", "minItems": 1, "maxItems": INPUTS_MAX}
    predict = {
        **obj(
            {
                "instances": instances,
                "signature_name": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
            },
            "instances",
        ),
        "additionalProperties": False,
    }
    text_completion = obj(
        {
            "id": TEXT,
            "object": {"enum": ["text_completion"]},
            "created": COUNT,
            "model": TEXT,
            "choices": {"type": "array", "items": CHOICE},
            "usage": usage("prompt_tokens", "completion_tokens", "total_tokens"),
        },
        "id",
        "choices",
        "usage",
    )
    completed = answers("The completions, or with `stream` one event with all of them", text_completion)
    completed["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    embedded = obj(
        {
            "object": {"enum": ["list"]},
            "data": {"type": "array", "items": EMBEDDING},
            "model": TEXT,
            "usage": usage("prompt_tokens", "total_tokens"),
        },
        "object",
        "data",
        "model",
        "usage",
    )
    vectors: Json = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    return {
        "/": {
            "get": {
                "operationId": "alive",
                "summary": "KServe V1: whether it lives",
                "responses": {"200": answers("Yes", obj({"status": {"enum": ["alive"]}}, "status")), **errors(PROBLEM)},
            }
        },
        EMBEDDINGS: post("embeddings", "OpenAI: embeddings", embeddings, answers("The embeddings", embedded)),
        COMPLETIONS: post("completions", "OpenAI: completions", completions, completed),
        "/v1/chat/completions": post("chat", "What to use in place of chat", {"type": "object"}, None),
        "/v1/models": {
            "get": {
                "operationId": "models",
                "summary": "OpenAI: the models",
                "responses": {"200": answers("Those that the caller may ask for", list_of_models), **openai_errors()},
            }
        },
        "/v1/models/{name}": {
            "parameters": [name],
            "get": {
                "operationId": "model",
                "summary": "One model, for OpenAI, KServe V1 and TF Serving",
                "responses": {"200": answers("It is ready", one_model), **openai_errors()},
            },
        },
        "/v1/models/{name}:predict": {
            "parameters": [name],
            **post(
                "predict_instances",
                "KServe V1, TF Serving: predictions",
                predict,
                answers("One for each instance", obj({"predictions": {"type": "array"}}, "predictions")),
                obj({"error": TEXT}, "error"),
            ),
        },
        EMBED: post(
            "embed",
            "TEI: embeddings",
            obj({"inputs": TEXTS}, "inputs"),
            answers("One for each input", vectors),
            obj({"error": TEXT, "error_type": TEXT}, "error", "error_type"),
        ),
    }


def post(operation: str, summary: str, body: Json, answer: Json | None, error: Json = OPENAI_ERROR) -> Json:
    """A path with a POST; without an `answer` it always answers with an error."""
    told = {} if answer is None else {"200": answer}
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {**told, **errors(error)},
        }
    }


def answers(description: str, schema: Json) -> Json:
    """A JSON response."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def errors(schema: Json) -> Json:
    """The errors, in the face's own form; those of HTTP itself are problem objects at every path."""
    kinds = {"application/json": {"schema": schema}, "application/problem+json": {"schema": PROBLEM}}
    return {
        str(status): {
            "description": "; ".join(error.title for error in all_errors() if error.status == status),
            "content": kinds,
        }
        for status in STATUSES
    }


def openai_errors() -> Json:
    """Those of OpenAI."""
    return errors(OPENAI_ERROR)
