"""Each operation is called as the OpenAPI document allows and forbids; no valid call fails, no invalid one passes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from echo import EchoEngine
from server_case import free_blocks, serving, wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="the package schemathesis is not installed"
)

KEY = "k-schemathesis"
ALIASES = ("/chat/completions", "/completions", "/v1/messages/count_tokens", "/get_model_info", "/ready", "/ping")
"""Other paths of operations that are called under their first one."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


def run(case, folder, *, examples, seed=1):
    """schemathesis against a server -> (exit code, its output)."""
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    options = [f"{case.url}/openapi.json", "--checks", ",".join(CHECKS), "-H", f"Authorization: Bearer {KEY}"]
    options += ["--phases", "coverage,fuzzing", "--max-examples", str(examples), "--seed", str(seed)]
    options += ["--generation-database", "none", "--suppress-health-check", "all", "--warnings", "off", "--no-shrink"]
    options += ["--request-timeout", "60"]
    for path in ALIASES:
        options += ["--exclude-path", path]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command + options, capture_output=True, text=True, env=environment, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.security
def test_openapi_document_matches_what_is_served(tmp_path):
    with serving(EchoEngine(num_blocks=64), api_key=KEY) as case:
        case.http.headers["Authorization"] = f"Bearer {KEY}"
        before = free_blocks(case)
        code, text = run(case, tmp_path, examples=int(os.environ.get("SCHEMATHESIS_EXAMPLES", "10")))
        assert code == 0, text
        assert case.http.get("/health").json()["status"] == "ok"
        wait_for(lambda: free_blocks(case) == before)
        assert case.http.post("/v1/completions", json={"prompt": "on it goes"}).status_code == 200
        assert len(json.loads(case.http.get("/openapi.json").text)["paths"]) > 8
