"""The endpoints about the model itself, and which pages may ask."""

from __future__ import annotations

from serving import CHAT, Served, refusal, served, server_of_module, user

ANNA = "My name is Anna."


server = server_of_module(policy="full", max_new_tokens=12)


def test_a_model_is_found_by_its_name_with_and_without_v1(server: Served) -> None:
    for path in ("/v1/models/tiny", "/models/tiny"):
        found = server.client.get(path).json()
        assert (found["id"], found["object"]) == ("tiny", "model")
    assert refusal(server.client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    body = {"messages": [user(ANNA)], "seed": 1}
    replies = [server.client.post(path, json=body).json() for path in (CHAT, CHAT[3:])]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_only_pages_of_sites_that_were_named_may_ask() -> None:
    site, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    with served(max_new_tokens=2, cors=["https://chat.example"], key="key") as server:
        asked = {"Access-Control-Request-Method": "POST"}
        allowed = server.client.options(CHAT, headers=site | asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert (
            "access-control-allow-origin"
            not in server.client.options(CHAT, headers=other | asked).headers
        )
        key = {"Authorization": "Bearer key"}
        said = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=site | key)
        assert said.headers["access-control-allow-origin"] == "https://chat.example"
        refused = server.client.post(CHAT, json={"messages": [user(ANNA)]}, headers=other | key)
        assert "--cors" in refusal(refused, 403)["message"]
