"""A model on KServe's model server: over V1 it reverses texts, over V2 it negates vectors."""

import argparse
from typing import Any

from kserve import InferOutput, InferResponse, Model, ModelServer
from kserve.errors import InvalidInput

POISON = "poison"


class Mirror(Model):
    """What comes in, turned around."""

    def __init__(self) -> None:
        super().__init__("mirror")
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        """V1 comes as a dictionary, V2 as tensors."""
        if isinstance(payload, dict):
            if POISON in payload["instances"]:
                raise InvalidInput("the model does not like this text")
            return {"predictions": [text[::-1] for text in payload["instances"]]}
        vectors = payload.inputs[0].as_numpy()
        if (vectors < 0).any():
            raise InvalidInput("the model does not like this vector")
        output = InferOutput("NEGATED", list(vectors.shape), "FP32")
        output.set_data_from_numpy(-vectors, binary_data=bool(payload.use_binary_outputs))
        return InferResponse(payload.id, self.name, [output])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("http_port", type=int)
    parser.add_argument("grpc_port", type=int)
    ports = parser.parse_args()
    ModelServer(http_port=ports.http_port, grpc_port=ports.grpc_port, workers=1).start([Mirror()])
