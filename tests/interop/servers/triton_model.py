"""A model for Triton's Python backend, run by Triton: reverses texts, negates vectors; which of them it has decides."""

from typing import Any

import numpy as np
import triton_python_backend_utils as triton

POISON = "poison"


class TritonPythonModel:
    """What Triton looks for."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each call; poison fails the whole call, as a model that raises does."""
        return [triton.InferenceResponse(answer(request)) for request in requests]


def answer(request: Any) -> list[Any]:
    outputs = []
    vectors = triton.get_input_tensor_by_name(request, "VECTOR")
    if vectors is not None:
        outputs.append(triton.Tensor("NEGATED", -vectors.as_numpy()))
    texts = triton.get_input_tensor_by_name(request, "TEXT")
    if texts is not None:
        rows = [[element.decode() for element in row] for row in texts.as_numpy()]
        if any(POISON in row for row in rows):
            raise ValueError("the model does not like this text")
        reversed_rows = [[text[::-1].encode() for text in row] for row in rows]
        outputs.append(triton.Tensor("REVERSED", np.array(reversed_rows, dtype=np.object_)))
    return outputs
