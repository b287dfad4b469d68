"""A model on KServe's model server: over V1 it reverses texts, over V2 it negates vectors."""

import argparse
from typing import Any

from kserve import InferOutput, InferResponse, Model, ModelServer
from kserve.errors import InvalidInput
from kserve.utils.utils import generate_uuid

# One that the model refuses (400), one that makes it raise (500, after which the server closes the connection).
REFUSED_TEXT, RAISING_TEXT = "poison", "surprise"
REFUSED_NUMBER, RAISING_NUMBER = -1.0, -2.0


class Mirror(Model):
    """What comes in, turned around."""

    def __init__(self) -> None:
        super().__init__("mirror")
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """V1 comes as a dictionary, V2 as tensors."""
        if isinstance(payload, dict):
            check(REFUSED_TEXT in payload["instances"], RAISING_TEXT in payload["instances"])
            return {"predictions": [text[::-1] for text in payload["instances"]]}
        vectors = payload.inputs[0].as_numpy()
        check((vectors == REFUSED_NUMBER).any(), (vectors == RAISING_NUMBER).any())
        is_raw = bool(payload.use_binary_outputs)
        output = InferOutput("NEGATED", list(vectors.shape), "FP32")
        output.set_data_from_numpy(-vectors, binary_data=is_raw)
        return InferResponse(payload.id or generate_uuid(), self.name, [output], use_binary_outputs=is_raw)


def check(is_refused: bool, is_raising: bool) -> None:
    if is_refused:
        raise InvalidInput("the model does not like this input")
    if is_raising:
        raise RuntimeError("the model did not expect this input")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("http_port", type=int)
    parser.add_argument("grpc_port", type=int)
    ports = parser.parse_args()
    ModelServer(http_port=ports.http_port, grpc_port=ports.grpc_port, workers=1).start([Mirror()])
