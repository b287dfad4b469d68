"""Where the faces that take lists are found."""

from collections.abc import Callable

from carpool.core.ports import RequestTraces
from carpool.face.http.faces import COMPLETIONS, EMBED, EMBEDDINGS
from carpool.face.http.kserve_v1 import KServeV1Face, alive
from carpool.face.http.lists import Answers
from carpool.face.http.openai import CompletionsFace, EmbeddingsFace, ModelRoutes
from carpool.face.http.router import Router
from carpool.face.http.tei import TeiFace
from carpool.face.intake import Intake


def add_list_faces(
    router: Router,
    intake: Intake,
    answers: Answers,
    is_down: Callable[[str], bool],
    traces: RequestTraces | None = None,
) -> None:
    """Serve OpenAI, TEI and KServe V1; `is_down` says whether no endpoint of a model may be called."""
    embeddings = EmbeddingsFace(intake, answers, traces)
    models = ModelRoutes(embeddings, is_down)
    router.add(b"POST", EMBEDDINGS.encode(), embeddings.serve)
    router.add(b"POST", COMPLETIONS.encode(), CompletionsFace(intake, answers, traces).serve)
    router.add(b"POST", EMBED.encode(), TeiFace(intake, answers, traces).serve)
    router.add(b"POST", b"/v1/models/*:predict", KServeV1Face(intake, answers, traces).serve)
    router.add(b"POST", b"/v1/chat/completions", models.chat)
    router.add(b"GET", b"/", alive)
    router.add(b"GET", b"/v1/models", models.all)
    router.add(b"GET", b"/v1/models/", models.one)
