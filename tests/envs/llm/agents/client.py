"""A client of chat completions as small as can be, and agents that know nothing of rollwright."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request


class Refused(Exception):
    """What an address answered in place of what it was asked."""

    def __init__(self, status, body):
        self.status, self.error = status, json.loads(body)["error"]
        super().__init__(f"{status} {self.error}")


class Client:
    """Knows an address and a key."""

    def __init__(self, base_url, api_key):
        self.base_url, self.api_key = base_url, api_key

    def ask(self, path, body=None):
        """The bytes of an answer."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.base_url}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read()) from None

    def chat(self, messages, **options):
        """The choices of a completion."""
        body = {"model": "any", "messages": messages, **options}
        return json.loads(self.ask("chat/completions", body))["choices"]

    def say(self, messages, text, **options):
        """Append a user's message and the answer to it; its message."""
        messages.append({"role": "user", "content": text})
        messages.append(self.chat(messages, **options)[0]["message"])
        return messages[-1]

    def reward(self, value):
        """Post a reward."""
        self.ask("reward", {"reward": value})


def talks(row, base_url, api_key):
    """Three turns of one history."""
    client, messages = Client(base_url, api_key), [{"role": "system", "content": "Be brief."}]
    for turn in range(3):
        client.say(messages, f"{row['question']} ({turn})")
    return float(row["number"])


def edits(row, base_url, api_key):
    """Two turns, then one whose history has but the last answer, then one that goes on from there."""
    client, messages = Client(base_url, api_key), []
    client.say(messages, row["question"])
    last = client.say(messages, "Go on.")
    messages = [{"role": "user", "content": f"Notes: {last['content']}"}]
    client.say(messages, "And now?")
    client.say(messages, "And then?")


def side_by_side(row, base_url, api_key):
    """Two histories at the same time, each of two turns."""
    failed = []

    def one(name):
        try:
            client, messages = Client(base_url, api_key), []
            for turn in range(2):
                client.say(messages, f"{name} {turn} {row['question']}")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
