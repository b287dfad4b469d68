"""The description of KServe V2's paths, for `/openapi.json`."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from carpool.core.problem import Problem
from carpool.core.tensors import DATATYPES, DIMENSIONS_MAX
from carpool.face.tensor_rows import NAME_BYTES_MAX, ROWS_MAX, TENSORS_MAX

Json = dict[str, Any]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX)]
Shape = Annotated[
    list[Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, max_length=DIMENSIONS_MAX, description="the first dimension is the rows"),
]
Kind = Annotated[str, Meta(extra_json_schema={"enum": list(DATATYPES)})]
Parameters = dict[str, Any] | UnsetType | None
OF_ROWS = Meta(min_length=1, max_length=TENSORS_MAX, description=f"all of the same 1 to {ROWS_MAX} rows")
Elements = Annotated[list[Any], Meta(description="flat or nested; as many as the shape says")]


class V2Tensor(Struct):
    """A tensor."""

    name: Name
    datatype: Kind
    shape: Shape
    data: Elements | UnsetType = UNSET
    # `binary_data_size`: its raw bytes follow the JSON.
    parameters: Parameters = UNSET


class V2Wanted(Struct):
    """An output that is asked for."""

    name: str
    # `binary_data`: whether it is to be raw.
    parameters: Parameters = UNSET


class V2Request(Struct):
    """The body of `infer`: n rows are n requests."""

    inputs: Annotated[list[V2Tensor], OF_ROWS]
    id: Annotated[str, Meta(max_length=256)] | UnsetType | None = UNSET
    # `binary_data_output`; `timeout` in µs; others go on.
    parameters: Parameters = UNSET
    outputs: list[V2Wanted] | UnsetType | None = UNSET


class V2Response(Struct):
    """The outputs of all rows, in their order."""

    model_name: str
    outputs: list[V2Tensor]
    model_version: str | UnsetType = UNSET
    id: str | UnsetType = UNSET


class V2Known(Struct):
    """An input that is known; -1 for any size."""

    name: str
    datatype: str
    shape: list[int]


class V2Model(Struct):
    """What is known of a model."""

    name: str
    platform: str
    inputs: list[V2Known]
    outputs: list[V2Known]
    versions: list[str] | UnsetType = UNSET


class V2Server(Struct):
    """What this is."""

    name: str
    version: str
    extensions: list[str]


class V2Error(Struct):
    """An error, in the protocol's form."""

    error: str


TYPES: tuple[type, ...] = (V2Request, V2Response, V2Model, V2Server, V2Error)


def v2_paths(models: Sequence[str], ref: Any, titles: Any, *, names_models: bool = True) -> Json:
    """The paths; those of models only if there are `models` with tensors. `titles` tells what a status means."""

    def answer(description: str, kind: type) -> Json:
        return {"description": description, "content": {"application/json": {"schema": ref(kind)}}}

    def errors(*statuses: int) -> Json:
        # Errors before the path is known are problem objects, as everywhere else.
        content = {"application/json": {"schema": ref(V2Error)}, "application/problem+json": {"schema": ref(Problem)}}
        return {str(status): {"description": titles(status), "content": content} for status in statuses}

    def get(operation: str, summary: str, responses: Json) -> Json:
        shared = errors(400, 405, 431, 500)
        return {"get": {"operationId": operation, "summary": summary, "responses": {**responses, **shared}}}

    def yes(word: str) -> Json:
        said: Json = {"type": "object", "properties": {word: {"const": True}}, "required": [word]}
        return {"description": "Yes", "content": {"application/json": {"schema": said}}}

    paths: Json = {
        "/v2": get("v2_server", "What this is", {"200": answer("This server", V2Server)}),
        "/v2/health/live": get("v2_live", "Whether it lives", {"200": yes("live")}),
        "/v2/health/ready": get("v2_ready", "Whether a model can be asked", {"200": yes("ready"), **errors(503)}),
    }
    if not models:
        return paths
    names = {"enum": list(models)} if names_models else {}
    model: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", **names}}
    octets: Json = {"schema": {"type": "string", "format": "binary"}}
    infer: Json = {
        "summary": "Rows of tensors in, their outputs back (KServe V2, with the binary tensor extension)",
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref(V2Request)}}},
        "responses": {
            "200": {
                "description": "The outputs; raw ones follow the JSON (`Inference-Header-Content-Length`)",
                "content": {"application/json": {"schema": ref(V2Response)}, "application/octet-stream": octets},
            },
            **errors(400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 431, 500, 502, 503, 504),
        },
    }
    known, refused = answer("What is known of it", V2Model), errors(401, 404)
    version: Json = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
    of_one = "/v2/models/{model}"
    for path, where, end in ((of_one, [model], ""), (of_one + "/versions/{version}", [model, version], "_version")):
        about = get(f"v2_model{end}", "What is known of a model", {"200": known, **refused})
        ready = {"200": yes("ready"), **refused, **errors(503)}
        paths[path] = {"parameters": where, **about}
        paths[f"{path}/ready"] = {
            "parameters": where,
            **get(f"v2_model_ready{end}", "Whether a model can be asked", ready),
        }
        paths[f"{path}/infer"] = {"parameters": where, "post": {"operationId": f"v2_infer{end}", **infer}}
    return paths
