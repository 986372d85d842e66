"""The page at `/`: one file, which asks nothing of others, and shows what was said as text."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from serving import served, user


def test_the_page_allows_its_own_script_and_style_alone_and_names_no_other_place() -> None:
    with served(max_new_tokens=4) as server:
        response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        own = b64encode(sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{own}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"https?:|//[a-z]|src=|href=|innerHTML|insertAdjacent", response.text)


def test_what_the_page_shows_can_not_turn_around_or_hide_other_text() -> None:
    with served(max_new_tokens=4) as server:
        page = server.client.get("/").text
    (controls,) = re.findall(r"const CONTROLS = /(.*)/g;", page)
    for shown in ("a", "\n", "\t", "é", "\u05d0", "\u0627", "\u200d", "\ufe0f", "😀"):
        assert not re.search(controls, shown)
    for control in ("\x00", "\x07", "\x1b", "\x7f", "\x9b", "\u200f", "\u202e", "\u2066"):
        assert re.search(controls, control)
    assert "made.textContent = text.replace(CONTROLS" in page


def test_the_page_needs_no_key_but_what_it_shows_does() -> None:
    with served(key="secret", max_new_tokens=4) as server:
        assert server.client.get("/").status_code == 200
        assert server.client.get("/v1/sirchat/sessions").status_code == 401
        own = {"Authorization": "Bearer secret"}
        listed = server.client.get("/v1/sirchat/sessions", headers=own).json()
    assert listed["data"] == []
    assert "salience" in listed["policies"]


def test_another_site_can_not_change_a_memory() -> None:
    with served(max_new_tokens=4) as server:
        ident = server.ask([user("Hello.")])["sirchat"]["id"]
        foreign = {"Origin": "http://elsewhere.example"}
        response = server.client.post(
            f"/v1/sirchat/sessions/{ident}", json={"budget": 64}, headers=foreign
        )
    assert response.status_code == 403
