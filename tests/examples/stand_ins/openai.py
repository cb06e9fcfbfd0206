"""Stands in for the client of OpenAI, which the tests do not need: as much of it as ``examples/agent.py`` uses."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from types import SimpleNamespace


class _Message(dict):
    """A message: an object for who reads it, a mapping where it is sent."""

    def __getattr__(self, name):
        return self[name]


class OpenAI:
    """See ``tests/envs/llm/agents/real_client.py`` for checks with the real one."""

    def __init__(self, *, base_url, api_key):
        self._base_url, self._api_key = base_url, api_key
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def with_options(self, *, base_url, api_key):
        return OpenAI(base_url=base_url, api_key=api_key)

    def _create(self, **body):
        headers = {"Authorization": f"Bearer {self._api_key}"}
        request = urllib.request.Request(f"{self._base_url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                choices = json.load(answer)["choices"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(error.read().decode()) from None
        return SimpleNamespace(choices=[SimpleNamespace(message=_Message(choice["message"])) for choice in choices])
