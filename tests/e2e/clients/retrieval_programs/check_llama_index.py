"""Retrieval with LlamaIndex: an index of vectors, a reranker and the answer, all from one gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank
from retrieval_programs.conftest import DOCUMENTS, ECHO, QUESTION, TIMEOUT_S, check_prompt

if TYPE_CHECKING:
    from conftest import Stage


@pytest.fixture
def index(stage: Stage) -> VectorStoreIndex:
    # Small batches, so that the index needs several requests.
    embedding = OpenAILikeEmbedding(
        model_name="word-vectors",
        api_base=f"{stage.scripted}/v1",
        api_key=stage.key,
        embed_batch_size=2,
        max_retries=0,
        timeout=TIMEOUT_S,
    )
    return VectorStoreIndex.from_documents([Document(text=text) for text in DOCUMENTS], embed_model=embedding)


def test_the_index_finds_the_nearest_documents(index: VectorStoreIndex) -> None:
    found = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    assert len(found) == 3
    assert found[0].text == DOCUMENTS[0]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_query_engine_answers_from_the_best_document(stage: Stage, index: VectorStoreIndex, streaming: bool) -> None:
    model = OpenAILike(
        model="scripted",
        api_base=f"{stage.scripted}/v1",
        api_key=stage.key,
        is_chat_model=True,
        context_window=100_000,
        max_retries=0,
        timeout=TIMEOUT_S,
    )
    engine = index.as_query_engine(
        llm=model,
        similarity_top_k=4,
        node_postprocessors=[
            CohereRerank(base_url=stage.scripted, api_key=stage.key, model="word-ranker", top_n=1, max_retries=1)
        ],
        text_qa_template=PromptTemplate("Answer from {context_str}\nQuestion: {query_str}\n" + ECHO),
        streaming=streaming,
    )
    answer = engine.query(QUESTION)
    check_prompt(str(answer))
    assert [node.text for node in answer.source_nodes] == [DOCUMENTS[0]]
