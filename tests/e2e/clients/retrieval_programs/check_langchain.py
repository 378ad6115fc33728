"""Retrieval with LangChain: embeddings, a vector store, a reranker and the answer, all from one gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from retrieval_programs.conftest import DOCUMENTS, ECHO, QUESTION, TIMEOUT_S, check_prompt

if TYPE_CHECKING:
    from conftest import Stage


@pytest.fixture
def store(stage: Stage) -> InMemoryVectorStore:
    # LangChain splits long texts with OpenAI's tokenizer by default, which it downloads.
    embeddings = OpenAIEmbeddings(
        base_url=f"{stage.scripted}/v1",
        api_key=stage.key,
        model="word-vectors",
        check_embedding_ctx_length=False,
        max_retries=0,
        timeout=TIMEOUT_S,
    )
    return InMemoryVectorStore.from_texts([*DOCUMENTS], embeddings)


@pytest.fixture
def ranker(stage: Stage) -> CohereRerank:
    return CohereRerank(base_url=stage.scripted, cohere_api_key=stage.key, model="word-ranker", top_n=1)


def test_the_store_finds_the_nearest_documents(store: InMemoryVectorStore) -> None:
    found = store.similarity_search(QUESTION, k=3)
    assert found[0].page_content == DOCUMENTS[0]
    assert len(found) == 3


def test_the_ranker_orders_documents(ranker: CohereRerank) -> None:
    ranked = ranker.compress_documents([Document(text) for text in reversed(DOCUMENTS)], QUESTION)
    assert [document.page_content for document in ranked] == [DOCUMENTS[0]]
    assert ranked[0].metadata["relevance_score"] > 0.5


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_a_chain_answers_from_the_best_document(
    stage: Stage, store: InMemoryVectorStore, ranker: CohereRerank, responses: bool
) -> None:
    model = ChatOpenAI(
        base_url=f"{stage.scripted}/v1",
        api_key=stage.key,
        model="scripted",
        use_responses_api=responses,
        max_retries=0,
        timeout=TIMEOUT_S,
    )

    async def context(question: str) -> str:
        found = await store.asimilarity_search(question, k=4)
        ranked = await ranker.acompress_documents(found, question)
        return "\n".join(document.page_content for document in ranked)

    template = ChatPromptTemplate.from_template(f"Answer from {{context}}\nQuestion: {{question}}\n{ECHO}")
    inputs: Any = {"context": RunnableLambda(context), "question": RunnablePassthrough()}
    chain = inputs | template | model | StrOutputParser()
    answer = "".join([piece async for piece in chain.astream(QUESTION)])
    check_prompt(answer)
