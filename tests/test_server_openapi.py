"""The server against its own OpenAPI document: requests made from it, good and bad, are answered as it says, and never with a fault."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import HTTP, Client, serving_inside

from runtime.serving.openapi import openapi

schemathesis = pytest.importorskip("schemathesis", reason="the dev extra's schemathesis is not installed")

from schemathesis.specs.openapi import checks  # noqa: E402

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
SCHEMA = schemathesis.openapi.from_dict(openapi(model_name="tiny-k3.1", has_keys=False))
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations()}
MODES = schemathesis.GenerationMode


@pytest.fixture(scope="module")
def served(extractions: dict[str, Path]) -> Iterator[Client]:
    # A small context, since an answer without a limit fills it.
    with serving_inside(extractions["tiny-k3.1"], context=96) as served:
        yield served


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.startswith("POST")])
@pytest.mark.parametrize("mode", [MODES.POSITIVE, MODES.NEGATIVE], ids=["allowed", "forbidden"])
def test_requests_out_of_the_document_are_answered_as_it_says(served: Client, label: str, mode: Any) -> None:
    @given(st.data())
    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def ask(data: st.DataObject) -> None:
        case = data.draw(OPERATIONS[label].as_strategy(generation_mode=mode))
        case.call_and_validate(base_url=served.url, checks=CHECKS)

    ask()


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.startswith("GET")])
def test_what_is_read_is_what_the_document_says(served: Client, label: str) -> None:
    _, path = label.split(" ")
    OPERATIONS[label].Case(path_parameters={"name": "tiny-k3.1"} if "{" in path else None).call_and_validate(base_url=served.url, checks=CHECKS)


def test_a_method_that_is_not_answered_is_told_which_are(served: Client) -> None:
    answer = HTTP.put(f"{served.url}/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
