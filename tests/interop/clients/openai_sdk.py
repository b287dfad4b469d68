"""A program that knows nothing of Carpool: the OpenAI SDK, sync and async, against the URL that it is given.

It checks every answer by value, and prints one line of JSON with what it found. With a number behind the URL it makes
so many single calls, all of them in flight at once; without one, it tries all that there is.
"""

import asyncio
import json
import sys
import time
from zlib import crc32

import openai
from openai import AsyncOpenAI, OpenAI

URL = sys.argv[1]
MODEL = "ada"


def first(value):
    """What the vector of an input begins with."""
    return (crc32(json.dumps(value).encode()) & 0xFFFFFF) / 2**24


def check(answer, values):
    assert [each.index for each in answer.data] == list(range(len(values))), answer
    assert [each.embedding[0] for each in answer.data] == [first(value) for value in values], answer
    assert answer.usage.total_tokens > 0, answer
    return len(values)


LISTS = [f"text {number}" for number in range(300)]
CALLS = [
    ({"input": "one text"}, ["one text"]),
    ({"input": "naïve №1"}, ["naïve №1"]),
    ({"input": ["a", "b", "c"]}, ["a", "b", "c"]),
    ({"input": LISTS}, LISTS),
    ({"input": [5, 6, 7]}, [[5, 6, 7]]),
    ({"input": [[1, 2], [3]]}, [[1, 2], [3]]),
    ({"input": "x", "encoding_format": "float"}, ["x"]),
    ({"input": "x", "encoding_format": "base64", "user": "somebody"}, None),
    ({"input": "x", "dimensions": 3, "user": "somebody"}, ["x"]),
]
REFUSED = [
    ({"model": MODEL, "input": []}, openai.BadRequestError),
    ({"model": MODEL, "input": ["x"] * 2049}, openai.BadRequestError),
    ({"model": "none", "input": "x"}, openai.NotFoundError),
    ({"model": "gpt", "input": "x"}, openai.NotFoundError),
]


def sync():
    client = OpenAI(base_url=URL, api_key="none", max_retries=0)
    right = 0
    for call, values in CALLS:
        answer = client.embeddings.create(model=MODEL, **call)
        if values is None:
            assert isinstance(answer.data[0].embedding, str)  # asked for by name, it is left as it came
        right += 1 if values is None else check(answer, values)
    errors = 0
    for call, kind in REFUSED:
        try:
            client.embeddings.create(**call)
        except kind as error:
            errors += bool(error.body["message"] and error.request_id)
    try:
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    except openai.NotFoundError as error:
        errors += "/v1/completions" in error.body["message"]
    text = client.completions.create(model="gpt", prompt=["abc", "de"], max_tokens=5)
    assert [choice.text for choice in text.choices] == ["cba", "ed"], text
    assert text.usage.total_tokens == 14, text
    events = list(client.completions.create(model="gpt", prompt="abc", stream=True))
    assert "".join(event.choices[0].text for event in events) == "cba", events
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    return right, errors


async def several():
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(client.embeddings.create(model=MODEL, **call) for call, _ in CALLS))
        expected = [values for _, values in CALLS]
        return sum(check(*each) for each in zip(answers, expected, strict=True) if each[1] is not None)


async def singles(count):
    """Whatever else there is, each call has its own answer."""
    # So many at once from one process take their time, to connect too.
    async with AsyncOpenAI(base_url=URL, api_key="none", timeout=300.0) as client:
        began = time.monotonic()
        texts = [f"single {number}" for number in range(count)]
        answers = await asyncio.gather(*(client.embeddings.create(model=MODEL, input=text) for text in texts))
        seconds = time.monotonic() - began
        wrong = sum(answer.data[0].embedding[0] != first(text) for answer, text in zip(answers, texts, strict=True))
        return {"answers": len(answers), "wrong": wrong, "seconds": round(seconds, 1)}


if len(sys.argv) > 2:
    found = asyncio.run(singles(int(sys.argv[2])))
else:
    right, errors = sync()
    found = {"sync": right, "errors": errors, "async": asyncio.run(several())}
print(json.dumps(found))  # noqa: T201
