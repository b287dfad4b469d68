"""As much of FastAPI as docs/quickstart-fastapi.md uses, for where it is not installed: routes whose body is a model
of pydantic, and FastAPI's 422 for a body that is none."""

from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import pydantic
from aiohttp import web

Route = Callable[[Any], Awaitable[Any]]


class FastAPI:
    """Routes."""

    def __init__(self) -> None:
        self.application = web.Application()

    def post(self, path: str) -> Callable[[Route], Route]:
        def add(route: Route) -> Route:
            hints = get_type_hints(route)
            hints.pop("return", None)
            (model,) = hints.values()

            async def answer(request: web.Request) -> web.Response:
                try:
                    body = model.model_validate_json(await request.read())
                except pydantic.ValidationError as fault:
                    missing = [each | {"loc": ("body", *each["loc"])} for each in fault.errors(include_url=False)]
                    return web.json_response({"detail": missing}, status=422)
                return web.json_response(await route(body))

            self.application.router.add_post(path, answer)
            return route

        return add
