"""A program that knows nothing of Carpool: langchain-openai, llama-index and litellm, against the URL that it is given.

It checks every embedding by value, and prints one line of JSON with how many were right. langchain sends token ids.
"""

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

# What they would fetch from elsewhere: litellm brings the files along.
litellm_home = Path(find_spec("litellm").origin).parent
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["TIKTOKEN_CACHE_DIR"] = str(litellm_home / "litellm_core_utils" / "tokenizers")

import litellm  # noqa: E402
import tiktoken  # noqa: E402
from langchain_openai import OpenAIEmbeddings  # noqa: E402
from llama_index.embeddings.openai_like import OpenAILikeEmbedding  # noqa: E402

URL = sys.argv[1]
TEXTS = [f"sentence number {number}" for number in range(40)]


def first(value):
    """What the vector of an input begins with."""
    return (crc32(json.dumps(value).encode()) & 0xFFFFFF) / 2**24


def right(vectors, values):
    assert [vector[0] for vector in vectors] == [first(value) for value in values], (vectors[0], first(values[0]))
    return len(values)


tokens = [tiktoken.get_encoding("cl100k_base").encode(text) for text in TEXTS]
langchain = OpenAIEmbeddings(model="ada", tiktoken_model_name="gpt-4", base_url=URL, api_key="none")
by_langchain = right(langchain.embed_documents(TEXTS), tokens) + right([langchain.embed_query(TEXTS[0])], tokens[:1])
by_langchain += right(asyncio.run(langchain.aembed_documents(TEXTS)), tokens)

llama_index = OpenAILikeEmbedding(model_name="ada", api_base=URL, api_key="none", embed_batch_size=7)
by_llama_index = right(llama_index.get_text_embedding_batch(TEXTS), TEXTS)
by_llama_index += right([llama_index.get_query_embedding(TEXTS[0])], TEXTS[:1])

options = {"model": "openai/ada", "api_base": URL, "api_key": "none"}
answer = litellm.embedding(input=TEXTS, **options)
by_litellm = right([each["embedding"] for each in answer.data], TEXTS)
answer = asyncio.run(litellm.aembedding(input=TEXTS[:3], **options))
by_litellm += right([each["embedding"] for each in answer.data], TEXTS[:3])

found = {"langchain": by_langchain, "llama-index": by_llama_index, "litellm": by_litellm}
print(json.dumps(found))  # noqa: T201
